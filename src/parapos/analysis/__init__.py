"""Everything of `parapos analyze`: how positional each head of a run is, and what one query sees of one sample.

What a head's score is stands in scores.py, how a query's maps are laid out in maps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from . import clouds, driving, plot
from .maps import COLUMNS, Strip, make_event_strip, make_maps, make_video_strip, save
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
    task = wanted.make_task(dataset)
    if at is not None and query is not None:
        raise ReportError("query and at exclude each other: both say which patch looks")
    if image is None and not 0 <= index < len(dataset):
        raise ReportError(f"index must be from 0 to {len(dataset) - 1}, got {index}")
    what = image.name if image else f"sample {index} of {wanted.data.name} {split}"
    if isinstance(model, PointTransformerV3):
        options: dict[str, Any] = dict(layer=layer, head=head, query=query, samples=samples or clouds.SAMPLES)
        options |= {"tau": tau, "scaled": scaled}
        about = {"run": folder.name, "split": split, "tau": tau, "scaled": scaled, **about}
        return _run_points(model, dataset, out, index, what, about, collate=task.collate, tell=tell, **options)
    if isinstance(model, UniTR):
        options = dict(layer=layer, head=head, query=query, samples=samples or driving.SAMPLES, tau=tau, scaled=scaled)
        about = {"run": folder.name, "split": split, **about}
        return _run_driving(model, dataset, out, index, what, about, collate=task.collate, tell=tell, **options)
    make: Callable[..., Strip]
    if isinstance(model, ViViT):
        sample = dataset[index]
        make = partial(make_video_strip, model, sample["video"], int(sample["tubelets"]), levels=_levels(dataset))
    elif isinstance(model, EventBackbone):
        clock = getattr(dataset, "clock", "time")
        more: dict[str, Any] = dict(columns=columns or COLUMNS, grid=_grid(dataset), clock=clock)
        make = partial(make_event_strip, model, dataset[index], **more)
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
        make = partial(make_maps, model, picture, name=f"{' x '.join(map(str, sides))} px")
    make(layer=layer or 1, head=head or 1, query=query)  # tells a mistake before the work begins
    checkpoint.check_writable(out)
    samples = samples or (IMAGES if isinstance(model, PatchBackbone) else STREAMS)
    heads = score_heads(model, dataset, samples, collate=task.collate, tau=tau, scaled=scaled, tell=tell)
    name = label(about["encoding"])
    paths = [out / file for file in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    plot.heads(paths[0], heads.z, heads.bounded, title=f"{name}, {heads.samples} samples of {wanted.data.name}")
    message = heads.as_json(run=folder.name, split=split, size=wanted.data.size or None, tau=tau, scaled=scaled)
    checkpoint.write(paths[1], f"{message}\n".encode())
    layer, head = choose(heads.bounded, layer, head)
    strip = make(layer=layer, head=head, query=query)
    plot.draw(paths[2], [strip], title=f"{name}, layer {layer}, head {head}, {what}")
    save(paths[3], strip)
    return paths


def _run_points(
    model: PointTransformerV3,
    dataset: Any,
    out: Path,
    index: int,
    what: str,
    about: dict[str, Any],
    *,
    layer: int | None,
    head: int | None,
    query: Sequence[float] | None,
    **scoring: Any,
) -> list[Path]:
    """What `run` does, for clouds."""
    sample = dataset[index]
    if "coord" not in sample or "views" in sample:
        raise ReportError("expected a data set with one pass per cloud, got one that asks in pieces or votes")
    clouds.make_cloud_maps(model, sample, layer=layer or 1, head=head or 1, query=query)  # tells a mistake early
    checkpoint.check_writable(out)
    heads = clouds.score_clouds(model, dataset, **scoring)
    z, bounded = (clouds.table(heads, name) for name in ("z", "bounded"))
    paths = [out / file for file in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    name = label(about["encoding"])
    blocks, scored = list(heads), next(iter(heads.values())).samples
    plot.heads(paths[0], z, bounded, title=f"{name}, {scored} clouds")
    told = {key: about[key] for key in ("run", "split", "tau", "scaled")}
    checkpoint.write(paths[1], f"{clouds.as_json(heads, **told)}\n".encode())
    layer, head = choose(bounded.nan_to_num(-torch.inf), layer, head)
    maps = clouds.make_cloud_maps(model, sample, layer=layer, head=head, query=query)
    place = ", ".join(f"{x:.2f}" for x in sample["coord"][maps.point].tolist())
    place = f"query (orange): point {maps.point + 1}, {place}"
    clouds.draw(paths[2], maps, title=f"{name}, layer {layer} ({blocks[layer - 1]}), head {head}, {what}, {place}")
    clouds.save(paths[3], maps)
    return paths


def _run_driving(
    model: UniTR,
    dataset: Any,
    out: Path,
    index: int,
    what: str,
    about: dict[str, Any],
    *,
    layer: int | None,
    head: int | None,
    query: Sequence[float] | None,
    **scoring: Any,
) -> list[Path]:
    """What `run` does, for cameras and LiDAR. Without a layer, one in which pillars meet patches of images."""
    batch = scoring["collate"]([dataset[index]])
    joint = driving.joint_layers(model)
    driving.make_pillar_maps(
        model, batch, layer=layer or joint[0], head=head or 1, query=query
    )  # tells a mistake early
    checkpoint.check_writable(out)
    heads = driving.score_frames(model, dataset, **scoring)
    paths = [out / file for file in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    name = label(about["encoding"])
    plot.heads(paths[0], heads.z, heads.bounded, title=f"{name}, {heads.samples} keyframes")
    told = {key: about[key] for key in ("run", "split")} | {key: scoring[key] for key in ("tau", "scaled")}
    checkpoint.write(paths[1], f"{heads.as_json(**told)}\n".encode())
    layer = layer or max(joint, key=lambda one: float(heads.bounded[one - 1].max()))
    layer, head = choose(heads.bounded, layer, head)
    maps = driving.make_pillar_maps(model, batch, layer=layer, head=head, query=query)
    x, y = maps.places[maps.query].tolist()
    place = f"pillar (orange) at x {x:.1f} m, y {y:.1f} m"
    driving.draw(paths[2], maps, title=f"{name}, layer {layer} ({maps.space}), head {head}, {what}, {place}")
    driving.save(paths[3], maps)
    return paths


def look_inside(folder: Path, out: Path, sizes: Sequence[int]) -> list[Path]:
    """The heads of a PaPE model, and what one of them sees at the smallest and at the largest size."""
    model, _ = load(folder)
    wanted = fit.load_run(folder)
    small, large = sizes[0], sizes[-1]
    heads = score_heads(model, wanted.dataset("test"), 64, batch=16)
    files = [out / "heads.png", out / "maps.png"]
    plot.heads(files[0], heads.z, heads.bounded, title="PaPE")
    layer, head = choose(heads.bounded, None, None)
    rows = []
    for size in (small, large):
        image = wanted.dataset("test", size=size)[0]["image"]
        grid = size // getattr(model, "patch", 1)
        query = (grid * 3 // 8 + 1, grid * 5 // 8 + 1)  # the same place of the image at both sizes
        rows.append(make_maps(model, image, layer=layer, head=head, query=query, name=f"{size} px"))
    plot.draw(files[1], rows, title=f"PaPE, layer {layer}, head {head}: the same model at two resolutions")
    return files


def _levels(dataset: Any) -> tuple[Tensor, Tensor]:
    """Black and white (3, 1, 1, 1) as the videos of a dataset have them."""
    from ..data.clips import scale_pixels

    black, white = (torch.full((3, 1, 1), value, dtype=torch.uint8) for value in (0, 255))
    scale = getattr(dataset, "pixel_scale", "unit")
    return scale_pixels(black, scale)[:, None], scale_pixels(white, scale)[:, None]


def _grid(dataset: Any) -> tuple[int, int] | None:
    """Rows and columns of the patches of a dataset's sensor, or None if it does not tell."""
    message = getattr(dataset, "tokenizing", None)
    return message and (-(-message.height // message.patch), -(-message.width // message.patch))


def choose(bounded: Tensor, layer: int | None, head: int | None) -> tuple[int, int]:
    """Layer and head from 1; what is not given is that of the largest score."""
    depth, count = bounded.shape
    layers = [layer] if layer is not None else range(1, depth + 1)
    heads = [head] if head is not None else range(1, count + 1)
    pairs = [(l, h) for l in layers for h in heads]
    inside = [(l, h) for l, h in pairs if 1 <= l <= depth and 1 <= h <= count]
    return max(inside, key=lambda pair: float(bounded[pair[0] - 1, pair[1] - 1])) if inside else pairs[0]


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
