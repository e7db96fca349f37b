"""Heads of a Point Transformer V3, and what one point sees of its cloud.

Its blocks have different numbers of heads, and a query sees the points of its patch, at the resolution of its block.
N points of the block's stage, L blocks, H heads of a block, W windows of K slots.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.terms import Quadratic
from ..experiments.plots import load_pyplot
from ..experiments.plots import save as save_figure
from ..experiments.store import ReportError
from ..models.ptv3 import PointTransformerV3
from ..models.ptv3.look import Patches, Seen, ancestors, watch_blocks
from ..training import checkpoint
from .maps import PARTS
from .plot import MARK, bands
from .scores import Heads, Layer, Parts

SAMPLES = 8  # clouds to score heads on
REST = "#d4d7dd"  # of points that the query cannot see


@dataclass(frozen=True)
class CloudMaps:
    """What a query sees of its cloud: distance, direction, semantics and attention (N,), NaN outside of its patch.

    coord (N, 3): points of the block's stage. query: which of them looks. point: which point of the sample it is for.
    """

    coord: Tensor
    query: int
    point: int
    distance: Tensor
    direction: Tensor
    semantics: Tensor
    attention: Tensor


@dataclass(frozen=True)
class PatchLayer(Layer):
    """Windows as samples; copies of points, which other windows answer for, ask nothing."""

    owned: Tensor | None = None  # (W, K)

    def parts(self, batch: slice = slice(None), rows: slice = slice(None)) -> Parts:
        found = super().parts(batch, rows)
        return found if self.owned is None else replace(found, queries=self.owned[batch][:, rows])


def layer_of(seen: Seen, patches: Patches) -> PatchLayer:
    """What a block made its scores of, in windows of one width."""
    attention = seen.block.attn
    q, k, _ = attention.project(patches.x)
    q, k, terms = attention.encoding(patches.x, q, k, patches.positions)
    if len(terms) != 1 or not isinstance(terms[0], Quadratic):
        raise ReportError(f"expected an encoding with one quadratic term, got {type(attention.encoding).__name__}")
    return PatchLayer(q, k, terms[0], attention.encoding.scale, patches.mask, patches.owned)


def score_clouds(
    model: PointTransformerV3,
    dataset: Any,
    samples: int,
    *,
    collate: Callable[[Sequence[Any]], Any],
    tau: float | None,
    scaled: bool,
    tell: Callable[[str], object],
) -> dict[str, Heads]:
    """The heads of each block, by its name, over `samples` clouds of a data set, spread evenly over it."""
    total = min(samples, len(dataset))
    heads: dict[str, Heads] = {}
    with watch_blocks(model) as blocks:
        for number in range(total):
            batch = collate([dataset[number * len(dataset) // total]])
            model(*(batch[name] for name in model.inputs))
            for seen in blocks:
                found = heads.setdefault(seen.name, Heads.empty(1, seen.block.attn.heads))
                for patches in seen.patches():
                    layer = layer_of(seen, patches)
                    found.add([layer if scaled else replace(layer, factor=1.0)], tau)
                found.samples = number + 1
            tell(f"heads: {number + 1} of {total} samples")
    return heads


def table(heads: Mapping[str, Heads], name: str) -> Tensor:
    """z or bounded of all blocks (L, most heads), NaN where a block has fewer."""
    most = max(found.pairs.shape[1] for found in heads.values())
    rows = torch.full((len(heads), most), torch.nan, dtype=torch.float64)
    for row, found in zip(rows, heads.values(), strict=True):
        values = getattr(found, name)[0]
        row[: len(values)] = values
    return rows


def as_json(heads: Mapping[str, Heads], **about: Any) -> str:
    """As images have it, with a row for each block and a number for each of its heads."""
    single = [json.loads(found.as_json()) for found in heads.values()]
    rows = {key: [found[key][0] for found in single] for key in single[0] if isinstance(single[0][key], list)}
    plain = {key: value for key, value in single[0].items() if key not in rows}
    return json.dumps({**about, **plain, "blocks": list(heads), **rows}, indent=1)


@torch.no_grad()
def make_cloud_maps(
    model: PointTransformerV3,
    sample: Mapping[str, Tensor],
    *,
    layer: int,
    head: int,
    query: Sequence[float] | None = None,
) -> CloudMaps:
    """Maps of a query on a cloud. layer and head from 1; query: the number of a point from 1, or x, y and z, which mean
    the nearest point; the one nearest to the middle if not given."""
    coord = sample["coord"]
    point = _nearest(coord, query)
    batch = {**sample, "offset": torch.tensor([len(coord)])}
    with watch_blocks(model) as blocks:
        model(*(batch[name] for name in model.inputs))
        if not 1 <= layer <= len(blocks):
            raise ReportError(f"layer must be from 1 to {len(blocks)}, got {layer}")
        seen = blocks[layer - 1]
        stages = list({block.stage.level: block.stage for block in blocks}.values())
        at = int(ancestors(stages)[seen.stage.level][point])
    heads = seen.block.attn.heads
    if not 1 <= head <= heads:
        raise ReportError(f"head of layer {layer} must be from 1 to {heads}, got {head}")
    for patches in seen.patches():
        place = (patches.owned & (patches.points == at)).nonzero()
        if not len(place):
            continue
        window, slot = place[0].tolist()
        one = slice(window, window + 1)
        parts = layer_of(seen, patches).parts(one, slice(slot, slot + 1))
        real = torch.ones_like(patches.owned[window]) if patches.mask is None else patches.mask[window]
        maps = {name: torch.full((len(seen.stage.coord),), torch.nan, dtype=torch.float64) for name in PARTS}
        for name, values in maps.items():
            values[patches.points[window][real]] = getattr(parts, name)[0, head - 1, 0][real]
        return CloudMaps(seen.stage.coord, at, point, **maps)
    raise AssertionError("every point belongs to one patch")


def _nearest(coord: Tensor, query: Sequence[float] | None) -> int:
    if query is None:
        query = (coord.amin(0) + coord.amax(0)).div(2).tolist()
    elif len(query) == 1:
        if query[0] not in range(1, len(coord) + 1):
            raise ReportError(f"query must be a point from 1 to {len(coord)}, got {query[0]:g}")
        return int(query[0]) - 1
    if len(query) != 3:
        raise ReportError(f"query must be the number of a point or x,y,z, got {len(query)} numbers")
    return int((coord - torch.tensor(query)).square().sum(1).argmin())


def save(path: Path, maps: CloudMaps) -> None:
    """The numbers of the maps as a NumPy archive."""
    import numpy

    arrays = {name: getattr(maps, name).numpy() for name in ("coord", *PARTS)}
    total = maps.distance + maps.direction + maps.semantics
    buffer = io.BytesIO()
    numpy.savez_compressed(buffer, query=maps.query, point=maps.point, sum=total.numpy(), **arrays)
    checkpoint.write(path, buffer.getvalue())


def draw(path: Path, maps: CloudMaps, *, title: str) -> None:
    """The cloud with the query and its patch, then distance, direction, semantics, their sum, and its softmax."""
    pyplot = load_pyplot()
    figure = pyplot.figure(figsize=(13.5, 8.2), layout="constrained")
    seen = ~maps.attention.isnan()
    x, y, z = maps.coord.double().unbind(1)
    size = min(30.0, max(2.0, 20_000 / len(x)))

    def panel(place: int, name: str) -> Any:
        axis = figure.add_subplot(2, 3, place, projection="3d")
        axis.scatter(*(part[~seen].numpy() for part in (x, y, z)), s=size / 2, c=REST, linewidths=0, depthshade=False)
        axis.set_box_aspect([max(float(part.max() - part.min()), 1e-6) for part in (x, y, z)])
        axis.set_title(name.replace("\n", "  "), fontsize=10)
        axis.tick_params(labelsize=6)
        axis.view_init(elev=35, azim=-60)
        return axis

    def mark(axis: Any) -> None:
        place = [part[maps.query : maps.query + 1].numpy() for part in (x, y, z)]
        axis.scatter(*place, s=70, facecolors="none", edgecolors=MARK, linewidths=1.8, depthshade=False)

    inside = [part[seen].numpy() for part in (x, y, z)]
    axis = panel(1, f"cloud, and the {int(seen.sum())} points of the query's patch")
    axis.scatter(*inside, s=size, c="#56B4E9", linewidths=0, depthshade=False)
    mark(axis)
    for place, (name, values, colours, scale) in enumerate(bands(maps), 2):
        axis = panel(place, name)
        drawn = axis.scatter(
            *inside, s=size, c=values[seen].numpy(), cmap=colours, norm=scale, linewidths=0, depthshade=False
        )
        mark(axis)
        figure.colorbar(drawn, ax=axis, fraction=0.03, pad=0.08, shrink=0.7).ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
