"""What the network knows of a batch before it looks at features: cells, curves, patches, who is pooled with whom.

B clouds, N points of all of them, R curves (rows of codes), K points of a patch, W windows, S slots. Clouds lie one
after another, and so do the pooled points of each stage. A stage is made once for a forward pass and shared by encoder
and decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...curves import curve_codes
from ...positions import Positions, centre
from .convolution import KernelMap, kernel_map
from .rows import Groups, mean

T = TypeVar("T")
MOST_DEPTH = 16  # bits of a coordinate
NEAR = 32.0  # windows that reach less far from their middle, in units of positions, form tables together
AT_ONCE = 16384  # slots of a table: what attention makes of more would leave the cache, and the heap


class Slots(NamedTuple):
    """Patches of clouds as ranks along a curve. A slot is a place in a patch."""

    rank: Tensor  # (S,) the rank in each slot
    slot: Tensor  # (N,) the slot where a rank belongs; further slots of it are borrowed
    ends: Tensor  # (patches + 1,) where patches begin and end


def patch_slots(lengths: Sequence[int], size: int) -> Slots:
    """Patches of `size` ranks. A cloud with fewer points is one patch; else its last patch is filled up with the last
    ranks of the one before."""
    rank, slot, ends = [], [], [0]
    first = 0
    for length in lengths:
        begin, missing = ends[-1], -length % size if length > size else 0
        whole = first + length - length % size
        rank += [torch.arange(first, first + length), torch.arange(whole - missing, whole)]
        slot.append(torch.arange(begin, begin + length))
        ends += list(range(begin + min(size, length), begin + length + missing + 1, size))
        first += length
    return Slots(torch.cat(rank), torch.cat(slot), torch.tensor(ends))


class Layout(NamedTuple):
    """Patches arranged for attention: W full windows of K slots, then windows of clouds that are smaller. Those that
    differ by less than a factor of two are padded to the largest of them."""

    shapes: list[tuple[int, int]]  # windows and slots per window, of each width
    rank: Tensor  # (S,) the rank in each slot, -1 for padding
    slot: Tensor  # (N,) the slot where each rank belongs
    borrowed: Tensor  # slots that hold copies


def arrange(lengths: Sequence[int], size: int) -> Layout:
    """The layout of patches of `size` points."""
    rank, slot, ends = patch_slots(lengths, size)
    counts = ends.diff()
    kind = torch.where(counts == size, 64, counts.double().log2().ceil().long())
    room, shapes = torch.empty_like(counts), []  # slots that each patch gets
    for alike in (kind == value for value in kind.unique().flip(0)):
        shapes.append((int(alike.sum()), int(counts[alike].max())))
        room[alike] = shapes[-1][1]
    order = torch.sort(kind, descending=True, stable=True)[1]
    begin = torch.empty_like(room)
    begin[order] = room[order].cumsum(0) - room[order]
    patch = torch.repeat_interleave(torch.arange(len(counts)), counts)
    moved = torch.arange(len(rank)) - ends[patch] + begin[patch]  # from a slot of `patch_slots` to one of this layout
    placed = torch.full((int(room.sum()),), -1).index_copy_(0, moved, rank)
    is_borrowed = torch.ones(len(rank), dtype=torch.bool).index_fill_(0, slot, False)
    return Layout(shapes, placed, moved[slot], moved[is_borrowed])


class Table(NamedTuple):
    """Windows of one width."""

    shape: tuple[int, int]  # windows, slots per window
    positions: Positions
    mask: Tensor | None  # (W, K), True for points; None if there is no padding


class Windows(NamedTuple):
    """Patches along one curve: which point is in which slot, and positions and masks of attention.

    Windows that reach farther than others form tables of their own: attention holds scores of near positions in a few
    columns and forms those of far ones from differences, and would copy a call with both apart.
    """

    source: Tensor  # (S,) the point in each slot; padding has some point
    slot: Tensor  # (N,) the slot of each point
    borrowed: Tensor  # slots that hold copies
    tables: list[Table]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What attention takes for the position of a point, in which unit.

    source: "grid", its cell, or "coord", its coordinates: means of those that were pooled. unit: what counts as one, a
    "stage_cell", a "base_cell" (one of the finest stage) or a "metre", the unit of the coordinates. grid_size: the side
    of a base cell in metres. scale: multiplies positions, one factor or one per axis. centred: each patch counts from
    its middle, which encodings that see differences alone do not notice, and float32 does.
    """

    source: str
    unit: str
    grid_size: float
    scale: float | Sequence[float] = 1.0
    centred: bool = True

    def positions(self, stage: Stage) -> Positions:
        """Of the points of a stage, (1, N, 3) float32."""
        side = self.grid_size * 2**stage.level  # of a cell, in metres
        unit = {"stage_cell": side, "base_cell": self.grid_size, "metre": 1.0}[self.unit]
        r = stage.cells * (side / unit) if self.source == "grid" else stage.coord / unit
        scale = torch.as_tensor(self.scale, dtype=torch.float32, device=r.device)
        return Positions((r.float() * scale)[None], unplaced=False)


@dataclass(eq=False)
class Stage:
    """All points of a batch at one resolution. level: how often they were pooled. groups: points of the finer stage, by
    point of this one. codes: places along each curve, with the cloud above the highest bit of the curve."""

    frame: Frame
    level: int
    coord: Tensor  # (N, 3)
    cells: Tensor  # (N, 3) int64
    clouds: Tensor  # (N,) int64
    lengths: list[int]
    codes: Tensor  # (R, N) int64
    depth: int
    groups: Groups | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def order(self, row: int) -> Tensor:
        """(N,): the points along a curve; those of equal cells keep their order."""
        return self.once(("order", row), lambda: torch.sort(self.codes[row], stable=True)[1])

    def kernel_map(self, size: int) -> KernelMap:
        return self.once(("kernel", size), lambda: kernel_map(self.cells, self.clouds, size))

    def positions(self) -> Positions:
        """Of all points, (1, N, 3)."""
        return self.once("positions", lambda: self.frame.positions(self))

    def windows(self, row: int, size: int) -> Windows:
        """Patches of `size` points along a curve."""
        return self.once(("windows", row, size), lambda: self._windows(row, size))

    def _windows(self, row: int, size: int) -> Windows:
        device, order = self.codes.device, self.order(row)
        shapes, *moves = self.once(("layout", size), lambda: arrange(self.lengths, size))
        rank, slot, borrowed = (x.to(device) for x in moves)
        index = torch.where(rank < 0, -1, order[rank.clamp(min=0)])
        sources, tables, moved, start = [], [], torch.arange(len(rank), device=device), 0
        for windows, width in shapes:
            part = index[start : start + windows * width].view(windows, width)
            r = self.positions().gather(part).r
            middle, reach = centre(r)
            r = (r - middle).to(r.dtype) if self.frame.centred else r
            kind = reach.flatten().clamp(min=NEAR).log2().ceil()  # windows that reach equally far come together
            turn = torch.sort(kind, stable=True)[1]
            place = torch.empty_like(turn).index_copy_(0, turn, torch.arange(windows, device=device))
            moved[start : start + windows * width] = (
                start + place[:, None] * width + torch.arange(width, device=device)
            ).flatten()
            sources.append(part[turn].flatten())
            alike = turn.split(kind.unique(return_counts=True)[1].tolist())
            for own in chain.from_iterable(which.split(max(1, AT_ONCE // width)) for which in alike):
                is_point = part[own] >= 0
                mask = None if bool(is_point.all()) else is_point
                tables.append(Table((len(own), width), Positions(r[own], unplaced=mask is not None), mask))
            start += windows * width
        own_slot = torch.empty_like(slot).index_copy_(0, order, moved[slot])
        return Windows(torch.cat(sources).clamp(min=0), own_slot, moved[borrowed], tables)

    def pool(self, rows: Sequence[int]) -> Stage:
        """Points of which each stands for those in a cell of twice the side, ordered along the first curve. rows: the
        new order of the curves."""
        shift = min(self.depth, 1)
        order = self.order(0)
        groups = Groups.of_sorted(self.codes[0, order] >> 3 * shift, order)
        first = groups.first
        clouds = self.clouds[first]
        return Stage(
            frame=self.frame,
            level=self.level + 1,
            coord=mean(self.coord, groups),
            cells=self.cells[first] >> 1,
            clouds=clouds,
            lengths=torch.bincount(clouds, minlength=len(self.lengths)).tolist(),
            codes=(self.codes[:, first] >> 3 * shift)[list(rows)],
            depth=self.depth - shift,
            groups=groups,
        )

    def by_cloud(self) -> Groups:
        """The points of each cloud."""
        return Groups.of_sorted(self.clouds, torch.arange(len(self.clouds), device=self.clouds.device))


def serialize(
    frame: Frame,
    coord: Tensor,
    cells: Tensor,
    lengths: Sequence[int],
    curves: Sequence[str],
    rows: Sequence[int],
    depth: int,
) -> Stage:
    """The finest stage. rows: the order of the curves. depth: bits of a coordinate."""
    if not 1 <= depth <= MOST_DEPTH or 3 * depth + len(lengths).bit_length() > 63:
        raise ValueError(
            f"depth must be in 1..{MOST_DEPTH}, and 3 depth + bits of the number of clouds at most 63, got {depth} and "
            f"{len(lengths)} clouds; take larger cells or crop the clouds"
        )
    counts = torch.tensor(lengths, device=cells.device)
    clouds = torch.repeat_interleave(torch.arange(len(lengths), device=cells.device), counts, output_size=len(cells))
    codes = torch.stack([curve_codes(cells, curves[row], depth) for row in rows]) | clouds << 3 * depth
    return Stage(frame, 0, coord, cells.long(), clouds, list(lengths), codes, depth)


def cells_of(coord: Tensor, lengths: Sequence[int], grid_size: float) -> Tensor:
    """Cells (N, 3) of coordinates, counted from the smallest of each cloud."""
    cells = (coord.double() / grid_size).floor().long()
    return torch.cat([cloud - cloud.amin(0) for cloud in cells.split(list(lengths))])
