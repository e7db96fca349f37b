"""Models as graphs for other runtimes: ONNX, and the programs of torch.export. Any batch and any size of input.

Every graph is run before it is handed out, at three sizes that its export never saw, and compared with PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models import DetectorViT, EventDetector, EventViT, ViT, ViViT
from ..models.detector import Deployed
from ..models.detector.boxes import decode

FORMATS = ("onnx", "pt2")
PRECISIONS = ("float32", "int8")
TOLERANCE = 1e-4  # of outputs, as a share of the largest or of one
BOX_TOLERANCE = 2e-2  # pixels of a detection
DYNAMIC = torch.export.Dim.DYNAMIC

Inputs = tuple[Tensor, ...]
Example = Callable[[int, int, int, int], Inputs]  # batch, rows, cols, seed


class ExportError(RuntimeError):
    """A run cannot be exported, or its graph does not say what the model says."""


@dataclass(frozen=True)
class Subject:
    """A module whose arguments are all tensors, what they are called, and examples of them.

    shapes: the dimensions of each argument that may change. is_detector: outputs are detections (B, k, 6).
    """

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    example: Example
    is_detector: bool = False


@dataclass(frozen=True)
class Report:
    """What was written, and how far it is from PyTorch at each size that was tried."""

    path: Path
    bytes: int
    errors: Mapping[str, float]
    precision: str = "float32"

    def __str__(self) -> str:
        rows = [f"{size}: largest difference to PyTorch {error:.1e}" for size, error in self.errors.items()]
        return "\n".join([f"{self.bytes / 1e6:.1f} MB, {self.precision}", *rows])


class _Masked(nn.Module):
    """An image model whose graph takes the mask of real patches too."""

    def __init__(self, net: nn.Module, max_det: int | None = None) -> None:
        super().__init__()
        self.net, self.max_det = net, max_det

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        if self.max_det is not None:
            return self.net.detect(images, mask, max_det=self.max_det)  # type: ignore[operator]
        return self.net(images, mask=mask)


class _Counted(nn.Module):
    """A model of samples of several lengths, which come last."""

    def __init__(self, net: nn.Module, max_det: int | None = None) -> None:
        super().__init__()
        self.net, self.max_det = net, max_det

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs) if self.max_det is None else self.net.detect(*inputs, max_det=self.max_det)  # type: ignore[operator]


def describe(net: nn.Module, *, max_det: int = 100, masked: bool = False) -> Subject:
    """How a model of ours is exported. masked: the graph of an image model takes the mask of real patches, too."""
    net = net.eval()
    if isinstance(net, ViT | DetectorViT):
        return _images(net, max_det, masked)
    if masked:
        raise ExportError(f"masks of patches are for image models, {type(net).__name__} is told lengths in any case")
    if isinstance(net, ViViT):
        return _videos(net)
    if isinstance(net, EventViT | EventDetector):
        return _events(net, max_det)
    raise ExportError(
        f"{type(net).__name__} cannot be exported, expected a ViT, ViViT, EventViT or a detector of theirs"
    )


def _images(net: ViT | DetectorViT, max_det: int, masked: bool) -> Subject:
    patch, channels = net.patch, net.embedding.in_channels
    step = 2 * patch if isinstance(net, DetectorViT) else patch
    unit = step // patch

    def example(batch: int, rows: int, cols: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        images = torch.rand(batch, channels, rows * step, cols * step, generator=generator)
        mask = torch.ones(batch, rows * unit, cols * unit, dtype=torch.bool)
        mask[0, :, -1] = False
        return (images, mask) if masked else (images,)

    detector = isinstance(net, DetectorViT)
    if masked:
        module: nn.Module = _Masked(net, max_det if detector else None)
    else:
        module = Deployed(net, max_det) if isinstance(net, DetectorViT) else net
    shapes = ((0, 2, 3), *([(0, 1, 2)] if masked else []))
    return Subject(module, ("image", *(["mask"] if masked else [])), shapes, example, detector)


def _videos(net: ViViT) -> Subject:
    patch, tubelet, channels = net.patch, net.tubelet, net.embedding.in_channels

    def example(batch: int, rows: int, cols: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        steps = 2 + seed % 3
        video = torch.rand(batch, channels, steps * tubelet, rows * patch, cols * patch, generator=generator)
        return video, torch.tensor([max(1, steps - b) for b in range(batch)])

    return Subject(_Counted(net), ("video", "tubelets"), ((0, 2, 3, 4), (0,)), example)


def _events(net: EventViT | EventDetector, max_det: int) -> Subject:
    detector = isinstance(net, EventDetector)
    cells = net.embedding.in_features

    def example(batch: int, rows: int, cols: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        tokens, events = rows * cols, 16 + seed
        high, wide = net.grid if isinstance(net, EventDetector) else (8, 8)
        codes = torch.randint(cells, (batch, tokens, events), generator=generator)
        x = torch.randint(wide, (batch, tokens), generator=generator)
        y = torch.randint(high, (batch, tokens), generator=generator)
        t = torch.randint(200_000, (batch, tokens), generator=generator).sort(1, descending=True).values
        return codes, x, y, t, torch.tensor([max(1, tokens - b) for b in range(batch)])

    shapes = ((0, 1, 2), (0, 1), (0, 1), (0, 1), (0,))
    module = _Counted(net, max_det if detector else None)
    return Subject(module, ("codes", "x", "y", "t", "length"), shapes, example, detector)


def write(subject: Subject, path: Path, kind: str = "onnx", *, rows: int = 4, cols: int = 5) -> Path:
    """Writes the graph of a module, traced on a grid of rows x cols patches (tokens, for events)."""
    if kind not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {kind!r}")
    inputs = subject.example(2, rows, cols, 0)
    shapes: Any = tuple(dict.fromkeys(axes, DYNAMIC) for axes in subject.shapes)
    if isinstance(subject.module, Deployed | _Counted):
        shapes = (shapes,)  # their arguments are one tuple
    path.parent.mkdir(parents=True, exist_ok=True)
    module = subject.module.eval()
    try:
        with torch.no_grad():
            if kind == "pt2":
                torch.export.save(torch.export.export(module, inputs, dynamic_shapes=shapes), path)
            else:
                with open(os.devnull, "w") as quiet, redirect_stdout(quiet):
                    torch.onnx.export(
                        module, inputs, path, dynamo=True, dynamic_shapes=shapes, input_names=list(subject.names),
                        output_names=["detections" if subject.is_detector else "logits"], external_data=False,
                        verbose=False,
                    )  # fmt: skip
    except (ImportError, OSError):
        raise
    except Exception as error:  # tracing fails in many words
        raise ExportError(f"torch cannot export this model: {str(error)[:2000]}") from error
    return path


def quantize(path: Path) -> None:
    """Makes the weights of an ONNX file 8-bit integers, and its products dynamic."""
    import logging

    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    del model.graph.value_info[:]  # sizes of steps in between, which quantization infers anew
    onnx.save(model, path)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(path, path, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    finally:
        root.setLevel(level)


def runner(subject: Subject, path: Path) -> Callable[[Inputs], Tensor]:
    """Runs a file that `write` wrote, in onnxruntime or as a program of PyTorch."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda inputs: program(*inputs)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> Tensor:
        named = zip(subject.names, inputs, strict=True)
        return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in named})[0])

    return run


def check(subject: Subject, path: Path, *, rows: int = 4, cols: int = 5, exact: bool = True) -> dict[str, float]:
    """The largest difference to PyTorch at three sizes and batches that the export did not see.

    exact: an ExportError if one is beyond the tolerance. Differences of detections are those of their scores."""
    run, errors = runner(subject, path), {}
    tries = [(1, rows + 2, cols), (3, rows, cols + 3), (1, max(1, rows - 1), cols + 1)]
    for seed, (batch, high, wide) in enumerate(tries, 1):
        inputs = subject.example(batch, high, wide, seed)
        with torch.no_grad():
            want, found = subject.module(*inputs), run(inputs)
        if want.shape != found.shape:
            raise ExportError(f"{path}: gives {tuple(found.shape)} where PyTorch gives {tuple(want.shape)}")
        name = f"{batch} x {' x '.join(map(str, inputs[0].shape[1:]))}"
        with torch.no_grad():
            errors[name] = float(_distance(subject, inputs, want, found))
        if exact and errors[name] > TOLERANCE * max(1.0, float(want.abs().max()) if not subject.is_detector else 1.0):
            raise ExportError(f"{path}: differs from PyTorch by {errors[name]:.1e} for {name}; please report it")
    return errors


def _distance(subject: Subject, inputs: Inputs, want: Tensor, found: Tensor) -> Tensor:
    if not subject.is_detector:
        return (want - found).abs().max()
    error = (want[..., 4] - found[..., 4]).abs().max()
    # Scores that are equal but for rounding may change places, also with one that is just not among the best. So each
    # detection must be a box of the model that has this score for this class.
    raw = subject.module.net(*inputs, deploy=True)  # type: ignore[operator]
    for rows, boxes, scores in zip(found, *decode(raw.o2o, raw.strides, raw.bins, raw.mask), strict=True):
        apart = (rows[:, None, :4] - boxes).abs().amax(-1)  # (k, A)
        errors = (scores[:, rows[:, 5].long()].T - rows[:, 4:5]).abs()
        error = torch.maximum(error, errors.masked_fill(apart > BOX_TOLERANCE, torch.inf).amin(1).amax())
    return error


def export_model(
    net: nn.Module,
    path: str | Path,
    kind: str = "onnx",
    *,
    rows: int = 4,
    cols: int = 5,
    max_det: int = 100,
    masked: bool = False,
    precision: str = "float32",
) -> Report:
    """Writes and checks the graph of a model of ours. rows, cols: patches of the example; any number runs afterwards.

    precision="int8" quantizes an ONNX file; then differences are reported and not judged.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "int8" and kind != "onnx":
        raise ExportError("int8 is for --format onnx; quantize a PyTorch model before torch.export")
    path, subject = Path(path), describe(net, max_det=max_det, masked=masked)
    scratch = path.with_name(f".{path.stem}.tmp{'.pt2' if kind == 'pt2' else '.onnx'}")
    try:
        write(subject, scratch, kind, rows=rows, cols=cols)
        errors = check(subject, scratch, rows=rows, cols=cols)
        if precision == "int8":
            quantize(scratch)
            errors = check(subject, scratch, rows=rows, cols=cols, exact=False)
        os.replace(scratch, path)
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()
    return Report(path, path.stat().st_size, errors, precision)


def export_run(
    folder: str | Path,
    kind: str = "onnx",
    out: str | Path | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    max_det: int | None = None,
    masked: bool = False,
    precision: str = "float32",
) -> Report:
    """The graph of a run's weights, as FOLDER/model.onnx or model.pt2 if no other path is given."""
    from ..training import checkpoint, fit

    folder = Path(folder)
    wanted = fit.load_run(folder)
    net, _ = checkpoint.load_weights(folder / "weights.safetensors")
    path = Path(out) if out is not None else folder / f"model.{kind}"
    if path.suffix != f".{kind}":
        raise ExportError(f"--out: expected a file that ends in .{kind}, got {path}")
    if max_det is not None and not isinstance(net, DetectorViT | EventDetector):
        raise ExportError(f"--max-det: is for detectors, this run is a {type(net).__name__}")
    if size is not None and isinstance(net, EventViT | EventDetector):
        raise ExportError(f"--size: is for images and videos, this run is a {type(net).__name__}")
    sides = (size, size) if isinstance(size, int) else size if size is not None else wanted.data.sides
    if 0 in sides:  # data without a size
        options = wanted.data.options
        sides = (int(options.get("height", 0)), int(options.get("width", 0)))
    patch = int(getattr(net, "patch", 1)) * (2 if isinstance(net, DetectorViT) else 1)
    if any(side % patch for side in sides):
        raise ExportError(f"--size: expected multiples of {patch}, got {sides[0]}x{sides[1]}")
    # A graph is for two patches a side at least, and is tried with one less than its example.
    rows, cols = (max(3, side // patch) if side else 4 + axis for axis, side in enumerate(sides))
    cols += cols == rows  # an example whose sides are equal would leave open whether they must be
    return export_model(
        net, path, kind, rows=rows, cols=cols, max_det=max_det or 100, masked=masked, precision=precision
    )
