"""Space-filling curves: orders of integer positions in which neighbours on the curve are neighbours in space.

N positions, p position dims, d depth: bits of a coordinate. A cell is a position with coordinates in 0..2^d - 1; its
code is its place on the curve, in 0..2^(p d) - 1.
- "z" (Morton): the bits of all coordinates, most significant first, the first dimension first.
- "hilbert": the same cells in an order in which every step goes to an adjacent cell (Skilling's method).
- "z-trans", "hilbert-trans": the first two dimensions change places before.
A curve at depth d - 1 passes the cells halved in the same order: code(cells, d) >> p == code(cells >> 1, d - 1).
The z order does not depend on the depth. The Hilbert order does: each further level turns the curve, p of them back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .text import nearest

CURVES = ("z", "z-trans", "hilbert", "hilbert-trans")


def curve_depth(cells: Tensor) -> int:
    """The depth that cells (N, p) need: the bit length of their largest coordinate plus one. At least 1."""
    return max(1, (int(cells.max()) + 1).bit_length()) if cells.numel() else 1


def curve_codes(cells: Tensor, curve: str, depth: int) -> Tensor:
    """Places (...) int64 on a curve of cells (..., p), integers in 0..2^depth - 1."""
    swapped, hilbert = _parse(curve)
    _check_depth(cells.shape[-1] if cells.ndim else 0, depth)
    if cells.is_floating_point() or cells.is_complex() or cells.dtype == torch.bool:
        raise TypeError(f"cells must be integers, got {cells.dtype}; divide positions by a cell size and floor them")
    low, high = torch.aminmax(cells) if cells.numel() else (0, 0)
    if low < 0 or high >> depth:
        raise ValueError(
            f"cells must be in 0..{2**depth - 1} at depth {depth}, got {int(low)}..{int(high)}; "
            "take larger cells, crop, or count from the smallest coordinate"
        )
    dtype = torch.int32 if depth < 32 else torch.int64
    axes = [axis.to(dtype, copy=hilbert) for axis in cells.unbind(-1)]
    if swapped:
        axes[:2] = axes[1::-1]
    if not hilbert:
        return _interleave(axes, depth)
    for bit in range(depth - 1, 0, -1):
        for axis in range(len(axes)):
            _turn(axes, axis, bit)
    codes = _interleave(axes, depth)
    for shift in (1, 2, 4, 8, 16, 32):  # from a Gray code to the number that it stands for
        codes ^= codes >> shift
    return codes


def curve_cells(codes: Tensor, curve: str, dims: int, depth: int) -> Tensor:
    """The cells (..., dims) int64 at places (...) on a curve: the inverse of `curve_codes`."""
    swapped, hilbert = _parse(curve)
    _check_depth(dims, depth)
    codes = codes.long()
    if codes.numel() and (codes.min() < 0 or codes.max() >> (dims * depth)):
        raise ValueError(f"codes must be in 0..2^{dims * depth} - 1, got {int(codes.min())}..{int(codes.max())}")
    codes = codes ^ codes >> 1 if hilbert else codes
    axes = [torch.zeros_like(codes) for _ in range(dims)]
    for bit in range(depth):
        for axis in range(dims):
            axes[axis] |= (codes >> (dims * bit + dims - 1 - axis) & 1) << bit
    if hilbert:
        for bit in range(1, depth):
            for axis in reversed(range(dims)):
                _turn(axes, axis, bit)
    if swapped:
        axes[:2] = axes[1::-1]
    return torch.stack(axes, dim=-1)


def curve_order(cells: Tensor, curve: str, depth: int | None = None) -> Tensor:
    """The indices (N,) that sort cells (N, p) along a curve; equal cells keep their order.

    depth: that of `curve_depth` by default.
    """
    return torch.sort(curve_codes(cells, curve, curve_depth(cells) if depth is None else depth), stable=True)[1]


def _parse(curve: str) -> tuple[bool, bool]:
    """Whether two dimensions change places, and whether the curve is Hilbert's."""
    if curve not in CURVES:
        raise ValueError(f"unknown curve {curve!r}, expected one of {', '.join(CURVES)}{nearest(curve, CURVES)}")
    return curve.endswith("-trans"), curve.startswith("hilbert")


def _check_depth(dims: int, depth: int) -> None:
    if dims < 1:
        raise ValueError("cells must be (..., p) with at least one dimension")
    if depth < 1 or dims * depth > 63:
        raise ValueError(f"depth must be in 1..{63 // dims} for {dims} dimensions, so that a code fits, got {depth}")


def _interleave(axes: list[Tensor], depth: int) -> Tensor:
    """One number from the bits of all axes, most significant first, the first axis first."""
    codes = torch.zeros_like(axes[0], dtype=torch.int64)
    for axis, x in enumerate(axes):
        for bit in range(depth):
            codes |= (x & 1 << bit).long() << (len(axes) * bit + len(axes) - 1 - axis - bit)
    return codes


def _turn(axes: list[Tensor], axis: int, bit: int) -> None:
    """Where the bit of an axis is set, flips the lower bits of the first axis, else swaps them with those of this axis.

    Undoes itself. In place.
    """
    low = (1 << bit) - 1
    is_set = axes[axis] >> bit & 1
    if axis:
        swap = (axes[0] ^ axes[axis]).bitwise_and_(low).bitwise_and_(is_set - 1)
        axes[0] ^= swap
        axes[axis] ^= swap
    axes[0] ^= is_set * low
