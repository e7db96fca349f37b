"""Tokens in compact tiles, and what tiles take from positions alone. All of it is made once for a set of positions.

n queries, N keys, p position dims, f functions, e columns; Q tiles of queries, T tiles of keys, s slots of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..positions import Positions, placed
from ..relative import Exponents, function, key_features, taylor

TILE = 64  # tokens of a tile, about


class Tiling(NamedTuple):
    """The tokens of one sample in compact tiles of nearly equal count."""

    index: Tensor  # type: ignore[assignment]  # (T, s): tokens, -1 in empty slots
    low: Tensor  # (T, p): boxes, in float64
    high: Tensor
    unplaced: Tensor  # (u,): tokens without a position

    @property
    def middle(self) -> Tensor:
        return self.low + (self.high - self.low) / 2


def tilings(positions: Positions) -> list[Tiling]:
    """A tiling per sample, or one for all, made once for these positions."""
    return positions.once(("tilings",), lambda: [tiling(r) for r in positions.r.detach()])


def aligned(positions: Positions, size: int) -> Positions:
    """The same positions in tiles of `size` tokens each, but for the last tile; made once."""

    def make() -> Positions:
        again = Positions(positions.r, positions.unplaced)
        again.once(("tilings",), lambda: [tiling(r, size) for r in again.r.detach()])
        return again

    return positions.once(("aligned", size), make)


def tiling(r: Tensor, size: int | None = None) -> Tiling:
    """Tiles of positions (N, p): sets of tokens are halved across their longest side until about TILE are left.

    On a grid these are blocks. Neighbours in the list of tiles are halves of one set, so runs of them are compact too.
    size: tokens of every tile but the last, if not all shall have nearly as many.
    """
    here, r = placed(r), r.double()
    tokens = here.nonzero()[:, 0]
    n, unit = len(tokens), size or 1
    levels = max(0, round(math.log2(max(n, 1) / TILE))) if size is None else ((max(n, 1) - 1) // size).bit_length()
    index = tokens.new_full((1, max(1, -(-n // (unit * 2**levels))) * unit * 2**levels), -1)
    index[0, :n], count = tokens, torch.tensor([n], device=r.device)
    for level in range(levels + 1):
        x = torch.where((index < 0)[..., None], torch.nan, r[index])  # (sets, slots, p)
        low, high = x.nan_to_num(nan=math.inf).amin(1), x.nan_to_num(nan=-math.inf).amax(1)
        if level == levels:
            break
        axis = (high - low).argmax(-1)[:, None, None].expand(-1, x.shape[1], 1)
        order = x.gather(2, axis)[..., 0].nan_to_num(nan=math.inf).sort(dim=1, stable=True)[1]
        index, half = index.gather(1, order), torch.minimum(((count + unit - 1) // unit + 1) // 2 * unit, count)
        slots = torch.arange(index.shape[1] // 2, device=r.device)[None]
        lower = torch.where(slots < half[:, None], index[:, : slots.shape[1]], -1)
        upper = index.gather(1, (slots + half[:, None]).clamp(max=index.shape[1] - 1))
        upper = torch.where(slots < (count - half)[:, None], upper, -1)
        index, count = torch.stack([lower, upper], 1).flatten(0, 1), torch.stack([half, count - half], 1).flatten()
    if not n or size is not None:
        index, low, high = (x[count > 0] for x in (index, low, high))
    return Tiling(index, low, high, (~here).nonzero()[:, 0])


class Side(NamedTuple):
    """Queries or keys in the order of tiles: those of the tiling, and more for tokens without a position."""

    index: Tensor  # type: ignore[assignment]  # (tiles, s), -1 in empty slots
    at: Tensor  # (tiles, s, p) in float64, NaN where there is no position
    middle: Tensor  # (tiles, p)
    filled: Tensor  # (tiles, s, p) in float64, the middle where there is no position
    compact: int  # tiles with positions

    @classmethod
    def of(cls, r: Tensor, tiles: Tiling, also: Tensor, pad: int) -> Side:
        """also: tokens without a position that take part; pad: empty tiles at the end."""
        size = max(tiles.index.shape[1], 1)
        count = -(-len(also) // size) + pad
        more = also.new_full((count * size,), -1)
        more[: len(also)] = also
        index = torch.cat([tiles.index.expand(-1, size), more.view(-1, size)])
        at = torch.where((index < 0)[..., None], torch.nan, r.double()[index])
        middle = torch.cat([tiles.middle, tiles.middle.new_zeros(count, r.shape[-1])])
        return cls(index, at, middle, torch.where(at.isnan(), middle[:, None], at), len(tiles.index))


def sides(positions: Positions, pad: int) -> list[Side]:
    """A side per sample, or one for all, made once."""
    tiles = tilings(positions)
    both = zip(positions.r.detach(), tiles, strict=True)
    return positions.once((f"sides {pad}",), lambda: [Side.of(r, t, t.unplaced, pad) for r, t in both])


class Columns(NamedTuple):
    """What columns take from the positions of queries, about the middle of each tile."""

    T: Tensor  # (Q, s, f, e): coefficients to query columns
    bound: Tensor  # (Q, f): the largest sum of products that a unit of a coefficient may bring
    features: Exponents

    @classmethod
    def of(cls, side: Side, tiles: Tiling, exponents: Exponents) -> Columns:
        features = key_features(exponents, with_constant=True)
        x = (side.middle[:, None] - side.at).movedim(-1, 0)  # -r_i, so that D = y + x
        half = (tiles.high - tiles.low) * 1.5 + 1.0  # keys with weight are about this near, or D itself is as large
        half = torch.cat([half, half.new_zeros(len(side.at) - len(half), half.shape[1])])
        near = torch.stack([function(half.movedim(-1, 0), f) for f in features], -1)  # (Q, e)
        missing, made = side.at[..., :1].isnan(), []
        for e in exponents:  # one after another: these are many numbers in float64
            row = torch.stack([taylor(x, e, f) for f in features], -1).masked_fill_(missing, 0.0)  # (Q, s, e)
            made.append((row.float(), (row.abs_() * near[:, None]).sum(-1).amax(1).float()))
        T, bound = (torch.stack(parts, -2 if parts[0].ndim == 3 else -1) for parts in zip(*made, strict=True))
        return cls(T, bound, features)


def tile_columns(positions: Positions, exponents: Exponents) -> list[Columns]:
    """Columns per sample, or one set for all, made once."""
    both = zip(sides(positions, 0), tilings(positions), strict=True)
    return positions.once(("tile columns", exponents), lambda: [Columns.of(s, t, exponents) for s, t in both])
