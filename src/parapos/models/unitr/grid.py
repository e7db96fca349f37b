"""The bird's-eye grid: pillars of a range in metres, and the map that the head works on.

x is the first axis of a cell (ix, iy), and the column of a map; y is the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BevGrid:
    """Pillars that cover a range. low, high: corners (x, y, z) in metres. pillar: sides of a pillar in x and y."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    pillar: tuple[float, float]

    @classmethod
    def of(cls, point_range: Sequence[float], pillar: float | Sequence[float], *, multiple: int = 8) -> BevGrid:
        """point_range: x, y, z of the lower corner, then of the upper one. The number of pillars along x and y must be
        a multiple of `multiple`, which is what the map is shrunk by."""
        if len(point_range) != 6:
            raise ValueError(f"point_range must be x, y, z of both corners, got {list(point_range)}")
        values = [float(x) for x in point_range]
        sides = [float(pillar)] * 2 if isinstance(pillar, int | float) else [float(x) for x in pillar]
        low, high = values[:3], values[3:]
        if len(sides) != 2 or min(sides) <= 0 or any(a >= b for a, b in zip(low, high, strict=True)):
            raise ValueError(f"expected a range that is not empty and positive pillars, got {values} and {sides}")
        grid = cls((low[0], low[1], low[2]), (high[0], high[1], high[2]), (sides[0], sides[1]))
        for axis, count in zip("xy", grid.size, strict=True):
            if count < multiple or count % multiple:
                raise ValueError(
                    f"pillars along {axis} must be a multiple of {multiple}, got {count}; change point_range"
                )
        return grid

    @property
    def size(self) -> tuple[int, int]:
        """Pillars along x and y."""
        nx, ny = (round((b - a) / side) for a, b, side in zip(self.low, self.high, self.pillar, strict=False))
        return nx, ny

    @property
    def middle(self) -> float:
        """z of the centre of every pillar."""
        return (self.low[2] + self.high[2]) / 2

    def centres(self, cells: Tensor) -> Tensor:
        """(..., 2): x and y of the centres of cells (..., 2)."""
        side, low = cells.new_tensor(self.pillar, dtype=torch.float32), cells.new_tensor(self.low, dtype=torch.float32)
        return (cells.float() + 0.5) * side + low[:2]

    def cells(self, xy: Tensor) -> tuple[Tensor, Tensor]:
        """Cells (..., 2) of coordinates in metres, int64, and whether they are on the grid (...)."""
        cells = ((xy - xy.new_tensor(self.low[:2])) / xy.new_tensor(self.pillar)).floor()
        inside = ((cells >= 0) & (cells < cells.new_tensor(self.size))).all(-1)
        return torch.where(inside[..., None], cells, 0).long(), inside


@dataclass(frozen=True)
class BevFrame:
    """The map of the head, in metres: `low` corner (x, y), sides of a `cell`, `cols` along x and `rows` along y."""

    low: tuple[float, float]
    cell: tuple[float, float]
    cols: int
    rows: int

    @classmethod
    def of(cls, grid: BevGrid, stride: int) -> BevFrame:
        nx, ny = grid.size
        side = (grid.pillar[0] * stride, grid.pillar[1] * stride)
        return cls((grid.low[0], grid.low[1]), side, nx // stride, ny // stride)

    def to_cells(self, xy: Tensor) -> Tensor:
        """Metres (..., 2) to cells, with fractions."""
        return (xy - xy.new_tensor(self.low)) / xy.new_tensor(self.cell)

    def to_metres(self, cells: Tensor) -> Tensor:
        """Cells with fractions (..., 2) to metres."""
        return cells * cells.new_tensor(self.cell) + cells.new_tensor(self.low)

    @property
    def extent(self) -> tuple[float, float]:
        """Metres along x and y."""
        return self.cols * self.cell[0], self.rows * self.cell[1]
