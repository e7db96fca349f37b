"""Everything of `parapos analyze`: how positional each head of a run is, and what one query sees of one sample.

What a head's score is stands in scores.py, how a query's maps are laid out in maps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import ENCODINGS
from ..encodings.looks import label
from ..encodings.parabolic import PaPE, PaPERI
from ..experiments.store import ReportError
from ..models import EventViT, ViT, ViViT
from ..training import checkpoint, fit
from . import plot
from .maps import COLUMNS, Maps, Strip, make_event_strip, make_maps, make_video_strip, save
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
    columns: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    tau: float | None = TAU,
    scaled: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """All of `parapos analyze` for a run: heads.png, heads.json, maps.png and maps.npz in a folder.

    samples: to score heads on, by default 1000 images or 100 of what has more tokens. query: row and column of an
    image, tubelet, row and column of a video, a token or x, y and milliseconds of events. image and size are for models
    of images, columns for those of events. Without layer and head, those of the most positional head (largest bounded
    score), within what is given.
    """
    model, about = load(folder)
    for option, value, kind, what in (
        ("image", image, ViT, "images"),
        ("size", size, ViT, "images"),
        ("columns", columns, EventViT, "events"),
    ):
        if value is not None and not isinstance(model, kind):
            raise ReportError(f"{option} is for models of {what}, got {value} for {about['model']}")
    wanted = fit.load_run(folder)
    changes = {"root": root} if root else {}
    dataset = wanted.judged(split, **changes)
    task = wanted.make_task(dataset)
    if image is None and not 0 <= index < len(dataset):
        raise ReportError(f"index must be from 0 to {len(dataset) - 1}, got {index}")
    what = image.name if image else f"sample {index} of {wanted.data.name} {split}"
    make: Callable[..., Maps | Strip]
    if isinstance(model, ViViT):
        sample = dataset[index]
        make = partial(make_video_strip, model, sample["video"], int(sample["tubelets"]), levels=_levels(dataset))
    elif isinstance(model, EventViT):
        make = partial(make_event_strip, model, dataset[index], columns=columns or COLUMNS, grid=_grid(dataset))
    else:
        trained = wanted.data.sides[0]  # recipes for pictures have squares
        size = size or trained
        shown = dataset if size == trained else wanted.judged(split, size=size, **changes)
        picture = read(image, size, wanted.data.options) if image else shown[index]["image"]
        make = partial(make_maps, model, picture, name=f"{size} px")
    make(layer=layer or 1, head=head or 1, query=query)  # tells a mistake before the work begins
    checkpoint.check_writable(out)
    samples = samples or (IMAGES if isinstance(model, ViT) else STREAMS)
    found = score_heads(model, dataset, samples, collate=task.collate, tau=tau, scaled=scaled, tell=tell)
    name = label(about["encoding"])
    paths = [out / file for file in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    plot.heads(paths[0], found.z, found.bounded, title=f"{name}, {found.samples} samples of {wanted.data.name}")
    message = found.as_json(run=folder.name, split=split, size=wanted.data.size or None, tau=tau, scaled=scaled)
    checkpoint.write(paths[1], f"{message}\n".encode())
    layer, head = choose(found.bounded, layer, head)
    maps, title = make(layer=layer, head=head, query=query), f"{name}, layer {layer}, head {head}, {what}"
    if isinstance(maps, Strip):
        plot.draw(paths[2], maps, title=title)
    else:
        at = f"query (orange): row {maps.query[0] + 1}, column {maps.query[1] + 1}"
        plot.maps(paths[2], [maps], title=f"{title}, {at}")
    save(paths[3], maps)
    return paths


def look_inside(folder: Path, out: Path, sizes: Sequence[int]) -> list[Path]:
    """The heads of a PaPE model, and what one of them sees at the smallest and at the largest size."""
    model, _ = load(folder)
    wanted = fit.load_run(folder)
    small, large = sizes[0], sizes[-1]
    found = score_heads(model, wanted.dataset("test"), 64, batch=16)
    files = [out / "heads.png", out / "maps.png"]
    plot.heads(files[0], found.z, found.bounded, title="PaPE")
    layer, head = choose(found.bounded, None, None)
    rows = []
    for size in (small, large):
        image = wanted.dataset("test", size=size)[0]["image"]
        grid = size // getattr(model, "patch", 1)
        query = (max(1, grid * 3 // 8), max(1, grid * 5 // 8))
        rows.append(make_maps(model, image, layer=layer, head=head, query=query, name=f"{size} px"))
    plot.maps(files[1], rows, title=f"PaPE, layer {layer}, head {head}: the same model at two resolutions")
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


def read(path: Path, size: int, options: Mapping[str, Any]) -> Tensor:
    """An image file at a size, as the evaluation of a dataset with these options would show it."""
    from ..data.images import read_image
    from ..data.transforms import eval_transform

    own = {key: options[key] for key in ("crop", "normalize") if key in options}
    return eval_transform(size, **own)(read_image(path, upright=options.get("upright", True)))
