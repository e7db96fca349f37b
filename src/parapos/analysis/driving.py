"""Heads of a UniTR, and where one pillar looks: at patches of the six images, and at pillars around it.

A query sees the tokens of its set, pillars and patches alike. P pillars, V cameras, K slots of a set, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..canvas import new_figure
from ..canvas import save as save_figure
from ..data.transforms import MEAN, STD
from ..experiments.store import ReportError
from ..models.unitr import CAMERAS, UniTR
from ..models.unitr.backbone import PLAN
from ..models.unitr.layers import SetAttention
from ..models.unitr.partition import Partition
from ..tracing import hooked
from .maps import PARTS
from .plot import MARK, bands
from .scores import Layer, quadratic

SAMPLES = 8  # keyframes to score heads on
ORDER = ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT")
AHEAD = (0.0, 10.0)  # metres, the place that looks if none is given


class SeenLayer(NamedTuple):
    """A layer in a pass. x (T, D): tokens, pillars first; seen: what queries and keys are made of."""

    attention: SetAttention
    x: Tensor
    seen: Tensor
    partition: Partition

    def scores(self, sets: Tensor | None = None, scaled: bool = True) -> Layer:
        """What the layer made its scores of, in all sets or in some."""
        slots, mask, _, places = self.partition
        sets = torch.arange(len(slots)) if sets is None else sets
        index = slots[sets]
        q, k, _ = self.attention.project(self.seen[index])
        q, k, terms = self.attention.encoding(self.x[index], q, k, places.gather(index))
        term, factor = quadratic(self.attention.encoding, terms), self.attention.encoding.scale if scaled else 1.0
        return Layer(q, k, term, factor, mask[sets])


@contextmanager
def watch_layers(model: UniTR) -> Iterator[list[SeenLayer]]:
    """In this context a forward pass leaves every layer of the backbone in the list, which a next pass fills anew."""
    attentions = [module for module in model.backbone.modules() if isinstance(module, SetAttention)]
    layers: list[SeenLayer] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        x, partition, *more = args
        if module is attentions[0]:
            layers.clear()
        added = more[0] if more else None
        layers.append(SeenLayer(module, x, x if added is None else x + added, partition))

    with hooked([attention.register_forward_pre_hook(note) for attention in attentions]):
        yield layers


@contextmanager
def look(model: UniTR, scaled: bool) -> Iterator[Callable[[Mapping[str, Any]], list[Layer]]]:
    """In this context, a function that gives the layers of a pass over a batch."""
    with watch_layers(model) as layers:

        def run(batch: Mapping[str, Any]) -> list[Layer]:
            inputs: list[Any] = [batch[name] for name in model.inputs]
            model.backbone(*model.tokenize(*inputs))
            return [seen.scores(scaled=scaled) for seen in layers]

        yield run


@dataclass(frozen=True)
class PillarMaps:
    """What a pillar sees: distance, direction, semantics and attention (V, rows, cols) of patches, and the attention
    (P,) of pillars; NaN where its set has no token. images (V, 3, H, W) in [0, 1]; places (P, 2) of pillars in metres;
    query: which of them looks. space: that of the layer's sets, "own", "canvas" or "bev"."""

    images: Tensor
    places: Tensor
    query: int
    space: str
    distance: Tensor
    direction: Tensor
    semantics: Tensor
    attention: Tensor
    pillars: Tensor

    @property
    def shares(self) -> Tensor:
        """(V,): the attention that the patches of each camera get."""
        return self.attention.nan_to_num(0.0).sum((1, 2))

    @property
    def query_name(self) -> str:
        x, y = self.places[self.query].tolist()
        return f"pillar (orange) at x {x:.1f} m, y {y:.1f} m, in sets of {self.space}"

    def arrays(self) -> dict[str, Tensor]:
        """For the file of numbers."""
        names = ("images", "places", "pillars", "shares", *PARTS)
        return {"query": torch.tensor(self.query), **{name: getattr(self, name) for name in names}}


def make_pillar_maps(
    model: UniTR, batch: Mapping[str, Tensor], *, layer: int, head: int, query: Sequence[float] | None = None
) -> PillarMaps:
    """Maps of a pillar of a batch of one keyframe. layer and head from 1; query: the number of a pillar from 1, or x
    and y in metres, which mean the nearest one; without it the one nearest to ten metres ahead."""
    with watch_layers(model) as layers:
        given: list[Any] = [batch[name] for name in model.inputs]
        x, scene = model.tokenize(*given)
        if not len(scene.pillars):
            raise ReportError("the sample has no pillar, so nothing looks")
        places = model.grid.centres(scene.pillars).double()
        at = _nearest(places, query)
        model.backbone(x, scene)
        if not 1 <= layer <= len(layers):
            raise ReportError(f"layer must be from 1 to {len(layers)}, got {layer}")
        seen = layers[layer - 1]
    if not 1 <= head <= seen.attention.heads:
        raise ReportError(f"head must be from 1 to {seen.attention.heads}, got {head}")
    slots, mask, slot_of, _ = seen.partition
    number, slot = divmod(int(slot_of[at]), slots.shape[1])
    with torch.no_grad():
        parts = seen.scores(torch.tensor([number])).parts(rows=slice(slot, slot + 1))
    real = mask[number]
    tokens = slots[number][real]
    count, (rows, cols) = len(places), scene.cameras.patches
    flat = {name: torch.full((len(x),), torch.nan, dtype=torch.float64) for name in PARTS}
    for name, values in flat.items():
        values[tokens] = getattr(parts, name)[0, head - 1, 0][real]
    cameras = batch["images"].shape[1]
    whole = {name: torch.full((cameras, rows, cols), torch.nan, dtype=torch.float64) for name in PARTS}
    for name, values in whole.items():
        values[batch["image_mask"][0]] = flat[name][count:].view(-1, rows, cols)
    mean, deviation = (torch.tensor(part)[:, None, None] for part in (MEAN, STD))
    images = (batch["images"][0] * deviation + mean).clamp(0, 1)
    space = PLAN[(layer - 1) // len(model.backbone.shifts)][0]
    return PillarMaps(images, places, at, space, pillars=flat["attention"][:count], **whole)


def _nearest(places: Tensor, query: Sequence[float] | None) -> int:
    if query is not None and len(query) == 1:
        if query[0] not in range(1, len(places) + 1):
            raise ReportError(f"query must be a pillar from 1 to {len(places)}, got {query[0]:g}")
        return int(query[0]) - 1
    if query is not None and len(query) != 2:
        raise ReportError(f"query must be the number of a pillar or x,y in metres, got {len(query)} numbers")
    return int((places - torch.tensor(query or AHEAD)).square().sum(1).argmin())


def joint_layers(model: UniTR) -> list[int]:
    """Layers, from 1, in whose sets pillars meet patches in the plane of an image."""
    each = len(model.backbone.shifts)
    return [1 + each * block + i for block, (space, _) in enumerate(PLAN) if space == "canvas" for i in range(each)]


def draw(path: Path, maps: PillarMaps, *, title: str) -> None:
    """The six images with the attention of their patches, the pillars from above, and below them the parts of the
    scores in the camera that gets most attention."""
    figure = new_figure((15, 6.6))
    grid = figure.add_gridspec(3, 5, height_ratios=(1, 1, 1.1))
    most = max(1e-9, float(maps.attention.nan_to_num(0).max()), float(maps.pillars.nan_to_num(0).max()))
    size = (0, maps.images.shape[3], maps.images.shape[2], 0)
    for place, name in enumerate(ORDER):
        number = CAMERAS.index(name)
        axis = figure.add_subplot(grid[place // 3, place % 3])
        if number < len(maps.images):
            axis.imshow(maps.images[number].permute(1, 2, 0).numpy())
            tint = maps.attention[number].numpy()
            axis.imshow(tint, extent=size, cmap="viridis", vmin=0, vmax=most, alpha=0.65, interpolation="nearest")
            axis.set_title(f"{name}: {100 * float(maps.shares[number]):.1f}% of attention", fontsize=9)
        axis.set_axis_off()
    axis = figure.add_subplot(grid[:2, 3:])
    x, y = maps.places.unbind(1)
    seen = ~maps.pillars.isnan()
    axis.scatter(x[~seen], y[~seen], s=3, c="#d4d7dd", linewidths=0)
    dots = axis.scatter(x[seen], y[seen], s=14, c=maps.pillars[seen], cmap="viridis", vmin=0, vmax=most, linewidths=0)
    axis.plot(x[maps.query], y[maps.query], "o", markersize=9, markerfacecolor="none", color=MARK, markeredgewidth=2)
    axis.set_aspect("equal")
    axis.set_title(f"pillars from above: {100 * float(maps.pillars.nan_to_num(0).sum()):.1f}% of attention", fontsize=9)
    axis.set(xlabel="x in m", ylabel="y in m")
    figure.colorbar(dots, ax=axis, fraction=0.04)
    _draw_parts(figure, grid, maps, size)
    figure.suptitle(f"{title}, query: {maps.query_name}", fontsize=11)
    save_figure(figure, path)


def _draw_parts(figure: Any, grid: Any, maps: PillarMaps, size: tuple[int, ...]) -> None:
    """The bands of the camera that gets most attention; nothing if the set has no patch."""
    if maps.attention.isnan().all():
        return
    best = int(maps.shares.argmax())
    one = replace(maps, **{name: getattr(maps, name)[best] for name in PARTS})
    for place, (name, values, colours, scale) in enumerate(bands(one)):  # type: ignore[arg-type]
        axis = figure.add_subplot(grid[2, place])
        axis.imshow(maps.images[best].permute(1, 2, 0).numpy(), alpha=0.4)
        drawn = axis.imshow(values.numpy(), extent=size, cmap=colours, norm=scale, interpolation="nearest")
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()
        figure.colorbar(drawn, ax=axis, fraction=0.03, orientation="horizontal")
