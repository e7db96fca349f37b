"""Everything of `parapos analyze`: how positional each head of a run is, and what one query sees of one sample.

What a head's score is stands in scores.py, how a query's maps are laid out in maps.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import predict
from ..encodings import ENCODINGS
from ..encodings.looks import label
from ..encodings.parabolic import PaPE, PaPERI
from ..experiments.store import ReportError
from ..models import PointTransformerV3, UniTR, ViViT
from ..models.event_vit import EventBackbone
from ..models.vit import PatchBackbone
from ..training import checkpoint, fit
from . import clouds, driving, plot, scores
from .maps import COLUMNS, make_event_strip, make_maps, make_video_strip, save
from .scores import TAU, score_heads
from .scores import Heads as Heads  # for callers of this package
from .scores import watch as watch

IMAGES, STREAMS = 1000, 100  # to score heads on: images, and videos or event streams


def load(run: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run or of a weights file, if its encoding adds one quadratic term to the scores. The plug-ins of a
    run are loaded first."""
    if run.is_dir():
        fit.load_run(run)
    model, about = checkpoint.load_weights(run / "weights.safetensors" if run.is_dir() else run)
    if not issubclass(ENCODINGS[about["encoding"]], (PaPE, PaPERI)):
        message = "expected a model with pape, pape_ri or a subclass, whose scores have a positional part per pair"
        raise ReportError(f"{run}: {message}, got {about['encoding']}")
    return model, about


def run(
    folder: Path,
    out: Path,
    *,
    samples: int | None = None,
    split: str = "test",
    root: str = "",
    index: int = 0,
    image: Path | None = None,
    size: int | None = None,
    query: Sequence[float] | None = None,
    at: tuple[float, float] | None = None,
    columns: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    tau: float | None = TAU,
    scaled: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """All of `parapos analyze` for a run: heads.png, heads.json, maps.png and maps.npz in a folder.

    samples: to score heads on, by default 1000 images, 8 point clouds or keyframes, 100 of what else has more tokens.
    query: row and column of an image, tubelet, row and column of a video, a token or x, y and milliseconds of events, a
    point or x, y and z of a cloud, a pillar or x and y in metres around a car. at: instead, a place of an image in
    pixels, x and y from the top left; of its file if an image is given, else of the sample. image, size and at are for
    models of images, columns for those of events. Without layer and head, those of the most positional head (largest
    bounded score), within what is given.
    """
    model, about = load(folder)
    for option, value, kind, what in (
        ("image", image, PatchBackbone, "images"),
        ("size", size, PatchBackbone, "images"),
        ("at", at, PatchBackbone, "images"),
        ("columns", columns, EventBackbone, "events"),
    ):
        if value is not None and not isinstance(model, kind):
            raise ReportError(f"{option} is for models of {what}, got {value} for {about['model']}")
    wanted = fit.load_run(folder)
    changes = {"root": root} if root else {}
    dataset = wanted.judged(split, **changes)
    if at is not None and query is not None:
        raise ReportError("query and at exclude each other: both say which patch looks")
    if image is None and not 0 <= index < len(dataset):
        raise ReportError(f"index must be from 0 to {len(dataset) - 1}, got {index}")
    collate = wanted.make_task(dataset).collate
    if isinstance(model, PointTransformerV3 | UniTR | ViViT | EventBackbone):
        view = _view(model, dataset, dataset[index], collate, columns)
    else:
        if image is not None:
            frame = read(folder, image, size)
        else:
            shown = dataset if size in (None, wanted.data.size) else wanted.judged(split, size=size, **changes)
            frame = predict.Frame({"image": shown[index]["image"]}, torch.empty(0))
        picture = _whole_patches(model, frame.sample["image"])
        if at is not None:
            query = _patch_at(frame, at, getattr(model, "patch", 1))
        sides = dict.fromkeys(picture.shape[1:])  # one number for a square
        view = View(partial(make_maps, model, picture, name=f"{' x '.join(map(str, sides))} px"), samples=IMAGES)
    # A mistake should be told before the work begins.
    view.make(layer=layer or next(iter(view.layers), 1), head=head or 1, query=query)
    checkpoint.check_writable(out)
    options: dict[str, Any] = dict(collate=collate, tau=tau, scaled=scaled, tell=tell, look=view.look)
    heads = score_heads(model, dataset, samples or view.samples, **options)
    name = label(about["encoding"])
    paths = [out / file for file in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    plot.heads(paths[0], heads.z, heads.bounded, title=f"{name}, {heads.samples} samples of {wanted.data.name}")
    message = heads.as_json(run=folder.name, split=split, size=wanted.data.size or None, tau=tau, scaled=scaled)
    checkpoint.write(paths[1], f"{message}\n".encode())
    layer, head = choose(heads.bounded, layer, head, view.layers)
    maps = view.make(layer=layer, head=head, query=query)
    what = image.name if image else f"sample {index} of {wanted.data.name} {split}"
    view.draw(paths[2], maps, title=f"{name}, layer {layer}, head {head}, {what}")
    save(paths[3], maps)
    return paths


@dataclass(frozen=True)
class View:
    """How samples of a kind are seen. make(layer, head, query): the maps of a query. samples: to score heads on by
    default. layers: among which the most positional head is looked for, all by default."""

    make: Callable[..., Any]
    draw: Callable[..., None] = plot.draw
    look: Callable[..., Any] = scores.look
    samples: int = STREAMS
    layers: Sequence[int] = ()


def _view(
    model: PointTransformerV3 | UniTR | ViViT | EventBackbone,
    dataset: Any,
    sample: Any,
    collate: Callable[..., Any],
    columns: int | None,
) -> View:
    """Of a sample that is no image."""
    if isinstance(model, PointTransformerV3):
        if "coord" not in sample or "views" in sample:
            raise ReportError("expected a data set with one pass per cloud, got one that asks in pieces or votes")
        return View(partial(clouds.make_cloud_maps, model, sample), clouds.draw, clouds.look, clouds.SAMPLES)
    if isinstance(model, UniTR):
        make = partial(driving.make_pillar_maps, model, collate([sample]))
        return View(make, driving.draw, driving.look, driving.SAMPLES, driving.joint_layers(model))
    if isinstance(model, ViViT):
        tubelets = int(sample["tubelets"])
        scale = getattr(dataset, "pixel_scale", "unit")
        return View(partial(make_video_strip, model, sample["video"], tubelets, pixel_scale=scale))
    clock = getattr(dataset, "clock", "time")
    return View(partial(make_event_strip, model, sample, columns=columns or COLUMNS, grid=_grid(dataset), clock=clock))


def look_inside(folder: Path, out: Path, sizes: Sequence[int]) -> list[Path]:
    """The heads of a PaPE model, and what one of them sees at the smallest and at the largest size."""
    model, _ = load(folder)
    wanted = fit.load_run(folder)
    heads = score_heads(model, wanted.dataset("test"), 64, batch=16)
    files = [out / "heads.png", out / "maps.png"]
    plot.heads(files[0], heads.z, heads.bounded, title="PaPE")
    layer, head = choose(heads.bounded, None, None)
    rows = []
    for size in (sizes[0], sizes[-1]):
        image = wanted.dataset("test", size=size)[0]["image"]
        grid = size // getattr(model, "patch", 1)
        query = (grid * 3 // 8 + 1, grid * 5 // 8 + 1)  # the same place of the image at both sizes
        rows.append(make_maps(model, image, layer=layer, head=head, query=query, name=f"{size} px"))
    plot.draw(files[1], *rows, title=f"PaPE, layer {layer}, head {head}: the same model at two resolutions")
    return files


def _grid(dataset: Any) -> tuple[int, int] | None:
    """Rows and columns of the patches of a dataset's sensor, or None if it does not tell."""
    sensor = getattr(dataset, "tokenizing", None)
    return sensor and (-(-sensor.height // sensor.patch), -(-sensor.width // sensor.patch))


def choose(bounded: Tensor, layer: int | None, head: int | None, among: Sequence[int] = ()) -> tuple[int, int]:
    """Layer and head from 1; what is not given is that of the largest score. among: the layers to choose from, all by
    default."""
    depth, count = bounded.shape
    layers = [layer] if layer is not None else among or range(1, depth + 1)
    heads = [head] if head is not None else range(1, count + 1)
    known = bounded.nan_to_num(-torch.inf)
    return max(itertools.product(layers, heads), key=lambda pair: float(known[pair[0] - 1, pair[1] - 1]))


def read(folder: Path, path: Path, size: int | None = None) -> predict.Frame:
    """An image file as the model of a run sees it, by default at the size of training."""
    try:
        (frame,) = predict.load(folder, size=size, device="cpu").source.read(path).frames
    except predict.PredictError as error:
        raise ReportError(str(error)) from None
    except ValueError as error:
        raise ReportError(f"{path}: expected one image; {error}") from None
    return frame


def _whole_patches(model: nn.Module, picture: Tensor) -> Tensor:
    """Models that take a mask take any size, and fill patches up with zeros."""
    patch = getattr(model, "patch", 1)
    if "mask" not in getattr(model, "inputs", ()):
        return picture
    return F.pad(picture, (0, -picture.shape[2] % patch, 0, -picture.shape[1] % patch))


def _patch_at(frame: predict.Frame, at: tuple[float, float], patch: int) -> tuple[int, int]:
    """Row and column from 1 of the patch at a place of the picture, or of the sample where that is all there is."""
    x, y = ((place - shift) / zoom for place, zoom, shift in zip(at, frame.zoom, frame.shift, strict=True))
    height, width = frame.sample["image"].shape[1:]
    if not (0 <= x < width and 0 <= y < height):
        (left, top), (wide, high) = frame.shift, (width * frame.zoom[0], height * frame.zoom[1])
        limits = f"{left:.0f} to {left + wide:.0f} and {top:.0f} to {top + high:.0f}"
        raise ReportError(f"at must be a place that the model sees, x and y from {limits}, got {at[0]:g},{at[1]:g}")
    return int(y // patch) + 1, int(x // patch) + 1
