"""What one query sees: the parts of its scores, laid out as the image, the video or the event stream it looks at.

C columns of a strip, L tokens. An image gives a `Strip` of one column, a video one with a column per tubelet. Events
have tokens anywhere in time: their strip divides the time from the first token to the last into equal columns, and a
cell shows the newest of its tokens there, or nothing. Padding and class tokens are not shown.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.clips import unscale_pixels
from ..experiments.store import ReportError
from ..models import ViViT
from ..models.event_vit import EventBackbone
from ..training import checkpoint
from .scores import watch

COLUMNS = 6  # of a strip of events
IMAGE = "image and query"  # the kind of a strip with one picture
PARTS = ("distance", "direction", "semantics", "attention")
ON, OFF = (0.835, 0.18, 0.0), (0.0, 0.33, 0.70)  # colours of events


@dataclass(frozen=True)
class Strip:
    """Maps through time (C, rows, cols), NaN where there is no token; those of an image have one column. query: its
    column, row and col, from 0.

    shares (C,): the attention that all tokens of a column get. data: more arrays for the file of numbers.
    """

    names: tuple[str, ...]  # of the columns
    pictures: Tensor  # (C, 3, H, W) in [0, 1]
    kind: str  # what the pictures are
    query: tuple[int, int, int]
    query_name: str  # the query in words
    distance: Tensor
    direction: Tensor
    semantics: Tensor
    attention: Tensor
    shares: Tensor
    data: Mapping[str, Tensor] = field(default_factory=dict)

    def arrays(self) -> dict[str, Tensor]:
        """For the file of numbers; those of an image without the axis of time."""
        parts = {name: getattr(self, name) for name in PARTS}
        arrays = {"sum": self.distance + self.direction + self.semantics, **parts}
        query = torch.tensor(self.query)
        if self.kind == IMAGE:
            return {"image": self.pictures[0], "query": query[1:], **{name: x[0] for name, x in arrays.items()}}
        return {**arrays, "pictures": self.pictures, "query": query, "shares": self.shares, **self.data}


def make_maps(
    model: nn.Module,
    image: Tensor,
    *,
    layer: int,
    head: int,
    query: Sequence[float] | None = None,
    name: str = "",
) -> Strip:
    """Maps of a query on an image (3, H, W). layer and head from 1; query: row and column of a patch from 1, the
    middle if not given."""
    patch = getattr(model, "patch", 1)
    if image.shape[1] % patch or image.shape[2] % patch:
        message = f"{image.shape[1]} x {image.shape[2]}"
        raise ReportError(f"sides of the image must be multiples of the model's patch size {patch}, got {message}")
    rows, cols = image.shape[1] // patch, image.shape[2] // patch
    row, col = _place(query, {"row": rows, "column": cols})
    looked = _look(model, [image[None]], rows * cols, row * cols + col, layer, head)
    grids = {part: values.unflatten(0, (1, rows, cols)) for part, values in looked.items()}
    return Strip(
        names=(name,),
        pictures=image[None],
        kind=IMAGE,
        query=(0, row, col),
        query_name=f"row {row + 1}, column {col + 1}",
        shares=grids["attention"].sum((1, 2)),
        **grids,
    )


def make_video_strip(
    model: ViViT,
    video: Tensor,
    tubelets: int,
    *,
    layer: int,
    head: int,
    query: Sequence[float] | None = None,
    pixel_scale: str = "unit",
) -> Strip:
    """The strip of a query on a video (3, T, H, W) with a number of real tubelets. query: tubelet, row and column from
    1, the middle if not given. pixel_scale: as `scale_pixels` has it."""
    depth, patch = model.tubelet, model.patch
    _, frames, height, width = video.shape
    columns, rows, cols = frames // depth, height // patch, width // patch
    if not 1 <= tubelets <= columns:
        message = "has no complete tubelet, so nothing looks" if not tubelets else f"has no {tubelets} tubelets"
        raise ReportError(f"the video of {frames} frames {message}")
    step, row, col = _place(query, {"tubelet": tubelets, "row": rows, "column": cols})
    at = (step * rows + row) * cols + col
    looked = _look(model, [video[None], torch.tensor([tubelets])], columns * rows * cols, at, layer, head)
    grids = {part: values.unflatten(0, (columns, rows, cols))[:tubelets] for part, values in looked.items()}
    return Strip(
        names=tuple(f"tubelet {i + 1}" for i in range(tubelets)),
        pictures=unscale_pixels(video[:, : tubelets * depth : depth].transpose(0, 1), pixel_scale),
        kind="first frame",
        query=(step, row, col),
        query_name=f"tubelet {step + 1}, row {row + 1}, column {col + 1}",
        shares=grids["attention"].sum((1, 2)),
        **grids,
    )


def make_event_strip(
    model: EventBackbone,
    sample: Mapping[str, Tensor],
    *,
    layer: int,
    head: int,
    query: Sequence[float] | None = None,
    columns: int = COLUMNS,
    grid: tuple[int, int] | None = None,
    clock: str = "time",
) -> Strip:
    """The strip of a query on the tokens of an event stream: codes (L, threshold), x, y and t (L,) in microseconds.

    query: the number of a token from 1, or column and row of a patch from 1 and a time in milliseconds, which mean the
    nearest token in the model's units; the middle token if not given. grid: rows and columns of patches. clock: "age"
    if t counts back from the moment that the sample is about; the oldest column is the first with both. Pictures have
    the events of the tokens of their time, those that the model gets.
    """
    x, y, t = sample["x"].long(), sample["y"].long(), sample["t"].double()
    count = len(t)
    if not count:
        raise ReportError("the sample has no token, so nothing looks")
    rows, cols = grid or (int(y.max()) + 1, int(x.max()) + 1)
    at = _nearest(model, query, x, y, t, (rows, cols))
    given = {**sample, "length": torch.tensor(count)}
    looked = _look(model, [given[name][None] for name in model.inputs], count, at, layer, head)
    when, word = (-t, " ms before") if clock == "age" else (t, " ms")
    edges = torch.linspace(float(when.min()), float(when.max()), columns + 1, dtype=torch.float64)
    column = (torch.searchsorted(edges, when, right=True) - 1).clamp(0, columns - 1)
    shown = torch.full((columns, rows, cols), -1)
    shown.view(-1).scatter_reduce_(0, (column * rows + y) * cols + x, torch.arange(count), "amax")  # the newest
    counts = event_counts(model, sample["codes"], x, y, column, (columns, rows, cols))
    place = (int(column[at]), int(y[at]), int(x[at]))
    message = f"token {at + 1} of {count}, x {place[2] + 1}, y {place[1] + 1}, {float(t[at]) / 1e3:.0f}{word}"
    tokens = {"x": x, "y": y, "t": t, **looked}
    return Strip(
        names=tuple(f"{abs(a):.0f} to {abs(b):.0f}{word}" for a, b in pairwise((edges / 1e3).tolist())),
        pictures=paint(counts),
        kind="events\nred ON, blue OFF",
        query=place,
        query_name=message if shown[place] == at else f"{message}; its cell shows a newer token",
        shares=torch.zeros(columns, dtype=torch.float64).index_add_(0, column, looked["attention"]),
        data={
            "events": counts,
            "edges": edges,
            "shown": shown,
            "query_token": torch.tensor(at),
            **{f"token_{name}": values for name, values in tokens.items()},
        },
        **{part: torch.where(shown >= 0, values[shown], torch.nan) for part, values in looked.items()},
    )


def event_counts(
    model: EventBackbone, codes: Tensor, x: Tensor, y: Tensor, column: Tensor, shape: tuple[int, int, int]
) -> Tensor:
    """(C, 2, H, W): how many events of each polarity, OFF first, the tokens of each column have at each pixel."""
    patch, buckets = model.patch, model.buckets
    columns, rows, cols = shape
    codes = codes.long()
    inside, polarity = codes % patch**2, codes // (buckets * patch**2)
    above = y[:, None] * patch + inside // patch
    left = x[:, None] * patch + inside % patch
    pixel = ((column[:, None] * 2 + polarity) * rows * patch + above) * cols * patch + left
    counts = torch.bincount(pixel.flatten(), minlength=columns * 2 * rows * cols * patch**2)
    return counts.view(columns, 2, rows * patch, cols * patch)


def paint(counts: Tensor) -> Tensor:
    """(C, 3, H, W) in [0, 1] from counts (C, 2, H, W): white where nothing happens, the more events the darker."""
    strength = counts.double().log1p() / math.log1p(max(1, int(counts.max())))
    off, on = (1 - torch.tensor(colour, dtype=torch.float64) for colour in (OFF, ON))
    ink = strength[:, :1] * off[:, None, None] + strength[:, 1:] * on[:, None, None]
    return (1 - ink).clamp(0, 1)


def save(path: Path, maps: Any) -> None:
    """The arrays of maps as a NumPy archive."""
    import numpy

    buffer = io.BytesIO()
    numpy.savez_compressed(buffer, **{name: value.numpy() for name, value in maps.arrays().items()})
    checkpoint.write(path, buffer.getvalue())


def _look(model: nn.Module, given: Sequence[Tensor], tokens: int, at: int, layer: int, head: int) -> dict[str, Tensor]:
    """The parts of a query over the tokens (tokens,). Class tokens come before them, and are left out. What follows the
    encoder is not run, if the model can do without."""
    with watch(model) as watched:
        getattr(model, "forward_features", model)(*given)
        layers = list(watched)
    heads = layers[0].q.shape[1]
    for what, value, most in (("layer", layer, len(layers)), ("head", head, heads)):
        if not 1 <= value <= most:
            raise ReportError(f"{what} must be from 1 to {most}, got {value}")
    first = layers[0].q.shape[2] - tokens
    parts = layers[layer - 1].parts(rows=slice(first + at, first + at + 1))
    return {part: getattr(parts, part)[0, head - 1, 0, first:] for part in PARTS}


def _place(query: Sequence[float] | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Where a query is on a grid, from 0; the middle if it is not given."""
    if query is None:
        return tuple((size - 1) // 2 for size in sizes.values())
    if len(query) != len(sizes) or any(value < 1 or value != int(value) for value in query):
        names = ",".join(sizes).replace("column", "col")
        raise ReportError(f"query must be {names} counted from 1, got {_as_text(query)}")
    for value, (name, size) in zip(query, sizes.items(), strict=True):
        if value > size:
            raise ReportError(f"{name} of the query must be from 1 to {size} at this size, got {value:g}")
    return tuple(int(value) - 1 for value in query)


def _nearest(
    model: EventBackbone, query: Sequence[float] | None, x: Tensor, y: Tensor, t: Tensor, grid: tuple[int, int]
) -> int:
    """The token of a query, from 0."""
    if query is None:
        return (len(t) - 1) // 2
    if len(query) not in (1, 3):
        raise ReportError(f"query must be the number of a token or x,y,milliseconds, got {_as_text(query)}")
    if len(query) == 1:
        if query[0] not in range(1, len(t) + 1):
            raise ReportError(f"query must be a token from 1 to {len(t)}, got {_as_text(query)}")
        return int(query[0]) - 1
    row, col = _place((query[1], query[0]), {"row": grid[0], "column": grid[1]})
    late = (t - query[2] * 1e3) / model.time_scale
    return int(((x - col) ** 2 + (y - row) ** 2 + late**2).argmin())


def _as_text(query: Sequence[float]) -> str:
    return repr(",".join(f"{value:g}" for value in query))
