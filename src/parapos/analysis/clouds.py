"""Heads of a Point Transformer V3, and what one point sees of its cloud.

Its blocks have different numbers of heads, and a query sees the points of its patch, at the resolution of its block.
N points of the block's stage, L blocks, H heads of a block, W windows of K slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..canvas import new_figure
from ..canvas import save as save_figure
from ..experiments.store import ReportError
from ..models.ptv3 import PointTransformerV3
from ..models.ptv3.look import Patches, Seen, ancestors, watch_blocks
from .maps import PARTS
from .plot import MARK, bands
from .scores import Layer, Parts, quadratic

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
    query_name: str = ""

    def arrays(self) -> dict[str, Tensor]:
        """For the file of numbers."""
        parts = {name: getattr(self, name) for name in ("coord", *PARTS)}
        places = {"query": torch.tensor(self.query), "point": torch.tensor(self.point)}
        return {**parts, **places, "sum": self.distance + self.direction + self.semantics}


@dataclass(frozen=True)
class PatchLayer(Layer):
    """Windows as samples; copies of points, which other windows answer for, ask nothing."""

    owned: Tensor | None = None  # (W, K)

    def parts(self, batch: slice = slice(None), rows: slice = slice(None)) -> Parts:
        parts = super().parts(batch, rows)
        return parts if self.owned is None else replace(parts, queries=self.owned[batch][:, rows])


def layer_of(seen: Seen, patches: Patches, scaled: bool = True) -> PatchLayer:
    """What a block made its scores of, in windows of one width."""
    attention = seen.block.attn
    q, k, _ = attention.project(patches.x)
    q, k, terms = attention.encoding(patches.x, q, k, patches.positions)
    term, factor = quadratic(attention.encoding, terms), attention.encoding.scale if scaled else 1.0
    return PatchLayer(q, k, term, factor, patches.mask, owned=patches.owned)


class SeenBlock(NamedTuple):
    """A block in a pass, as `Heads.add` takes it."""

    name: str
    heads: int
    layers: Callable[[], Iterator[PatchLayer]]

    def blocks(self) -> Iterator[Parts]:
        return (parts for layer in self.layers() for parts in layer.blocks())


@contextmanager
def look(model: PointTransformerV3, scaled: bool) -> Iterator[Callable[[Mapping[str, Any]], list[SeenBlock]]]:
    """In this context, a function that gives the blocks of a pass over a batch."""
    with watch_blocks(model) as blocks:

        def layers(seen: Seen) -> Iterator[PatchLayer]:
            return (layer_of(seen, patches, scaled) for patches in seen.patches())

        def run(batch: Mapping[str, Any]) -> list[SeenBlock]:
            model(*(batch[name] for name in model.inputs))
            return [SeenBlock(seen.name, seen.block.attn.heads, partial(layers, seen)) for seen in blocks]

        yield run


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
        where = ", ".join(f"{x:.2f}" for x in sample["coord"][point].tolist())
        words = f"point {point + 1} (orange) at {where}, in {seen.name}"
        return CloudMaps(seen.stage.coord, at, point, **maps, query_name=words)
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


def draw(path: Path, maps: CloudMaps, *, title: str) -> None:
    """The cloud with the query and its patch, then distance, direction, semantics, their sum, and its softmax."""
    figure = new_figure((13.5, 8.2))
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
    figure.suptitle(f"{title}, query: {maps.query_name}", fontsize=11)
    save_figure(figure, path)
