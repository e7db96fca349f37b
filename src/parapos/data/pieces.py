"""A cloud cut into pieces that a network can hold: each has cells of its own, and cells around them to look at.

n points, m occupied cells. Pieces are columns over the floor, whose height is never cut. All cells count from the
cloud's lowest corner in z, and from the piece's in x and y, so a cloud may be larger than curves can count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import FormatError
from .points import MOST_CELLS, Cloud, cells, center_shift, group

Array = np.ndarray[Any, Any]
SHARE = 0.6  # of a piece's cells that are its own, at most
FARTHEST = 2**21  # cells along an axis, so that a number for each cell fits 64 bits


@dataclass(frozen=True)
class Voxels:
    """One point of each occupied cell. cloud: those points, with their cells. index (m,): which points they are.
    inverse (n,): the occupied cell of each point."""

    cloud: Cloud
    index: Array
    inverse: Array


@dataclass(frozen=True)
class Piece:
    """cloud: cells of a piece, its own ones first. index: which of all occupied cells they are. count: how many are its
    own."""

    cloud: Cloud
    index: Array
    count: int


def voxelize(cloud: Cloud, size: float, rng: np.random.Generator) -> Voxels:
    """One point of each cell by chance. The lowest point is at z = 0, the middle of x and y at 0."""
    coord = center_shift(cloud.coord.astype(np.float64))
    cell = cells(coord, size, FARTHEST)
    by = group(cell)
    index = by.members[by.start + np.floor(rng.random(len(by.count)) * by.count).astype(np.int64)]
    return Voxels(replace(replace(cloud, coord=coord).select(index), cell=cell[index]), index, by.inverse)


class Pieces:
    """Pieces of at most so many cells, made when they are asked for. Every cell is one piece's own; the cells nearest
    to these come along."""

    def __init__(self, voxels: Voxels, most: int) -> None:
        assert voxels.cloud.cell is not None
        self.voxels, self.most, self.cell = voxels, most, voxels.cloud.cell
        whole = np.arange(len(self.cell))
        self.own = [whole] if len(whole) <= most else list(_split(self.cell, whole, max(1, int(SHARE * most))))

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Piece]:
        for own in self.own:
            index = own if len(self) == 1 else np.concatenate([own, self._around(own)])
            yield Piece(_centred(self.voxels.cloud.select(index)), index, len(own))

    def _around(self, own: Array) -> Array:
        """The cells nearest to those of a piece, as many as there is room for."""
        floor = self.cell[:, :2]
        low, high = floor[own].min(0), floor[own].max(0)
        outside = np.maximum(low - floor, floor - high).max(1)  # cells between it and the piece's own
        outside[own] = np.iinfo(np.int64).min
        chosen = np.argpartition(outside, self.most - 1)[: self.most]
        return np.setdiff1d(chosen, own, assume_unique=True)


def _split(cell: Array, index: Array, most: int) -> Iterator[Array]:
    """Halves across the longer side of the floor until all parts are small enough."""
    if len(index) <= most:
        yield index
        return
    floor = cell[index, :2]
    axis = int(np.argmax(np.ptp(floor, 0)))
    order = np.argsort(floor[:, axis], kind="stable")
    middle = len(index) // 2
    yield from _split(cell, np.sort(index[order[:middle]]), most)
    yield from _split(cell, np.sort(index[order[middle:]]), most)


def _centred(cloud: Cloud) -> Cloud:
    assert cloud.cell is not None
    cell = cloud.cell - cloud.cell.min(0) * np.array([1, 1, 0])
    if cell.max() >= MOST_CELLS:
        told = f"points {cell.max()} cells apart in one piece, expected less than {MOST_CELLS}"
        raise FormatError(f"{told}; drop what lies far from everything else, or check the unit")
    return replace(cloud, coord=center_shift(cloud.coord, z=False), cell=cell)
