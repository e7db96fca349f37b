"""One head of one sample in tiles: its bounds, the groups of tiles that run together, and their keys and values.

n queries, N keys, h query/key size, w value size, p position dims, f functions, e columns; Q tiles of queries, T tiles
of keys, s slots of a tile, G tiles of queries in a group, L tiles of keys that each of them visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..relative import contract, function, functions
from . import sparse
from .columns import ALLOWED, ROUNDING
from .kernels import Call
from .scores import softmax_
from .terms import Relative
from .tiling import Columns, Side, sides, tile_columns, tilings

BLOCK, GPU_BLOCK = 2**18, 2**25  # pairs of a query and a tile of keys that are bounded at one time
GROUP_BYTES = 3 * 2**20  # keys, values and scores of a thread at one time: about what a core's cache holds
HIDDEN = -1e30  # the score of an empty slot


def wide_type(q: Tensor) -> torch.dtype:
    """The type that a call is computed in: float32 at least."""
    return torch.promote_types(q.dtype, torch.float32)


def of_index(x: Any, i: int) -> Any:
    """The i-th of things, or the one that all share."""
    return x[i if len(x) > 1 else 0]


class Head:
    """One head of one sample in the order of its tiles, in float32 at least."""

    def __init__(self, call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor], b: int, h: int) -> None:
        at, to, n = terms[0].r, terms[0].key_positions, call.q.shape[2]
        self.terms, self.scale = terms, call.scale
        self.factors = [call.scale if term.scaled else 1.0 for term in terms]
        self.dtype = wide_type(call.q)
        self.tiles, self.key_tiles = (of_index(tilings(x), b) for x in (at, to))
        mask = None if call.mask is None else of_index(of_index(call.mask, b), h)  # (n or 1, N)
        self.mask = mask if mask is not None and len(mask) > 1 else None
        padding = mask[0] if mask is not None and len(mask) == 1 else None
        self.rows, self.keys = of_index(sides(at, 0), b), of_index(sides(to, 1), b)
        if padding is not None and len(loose := self.key_tiles.unplaced):
            self.keys = Side.of(of_index(to.r, b), self.key_tiles, loose[padding[loose]], 1)
        self.key_index = self.keys.index.clamp(min=0)
        self.visible = self.keys.index >= 0  # (T, s)
        if padding is not None:
            self.visible = self.visible & padding[self.key_index]
        self.index = torch.where(self.rows.index < 0, self.rows.index[:, :1], self.rows.index)
        self.q, self.k, self.v = (x[b, h] for x in (call.q, call.k, call.v))
        self.c = [self.order(of_index(of_index(c, b), h).expand(n, -1)) for c in coefficients]
        self.columns: Columns | None = None
        self.fits = torch.zeros(len(self.index), dtype=torch.bool, device=call.q.device)  # which tiles have columns
        if not call.exact and len(terms) == 1 and sparse.is_separable(terms[0]) and self.dtype == torch.float32:
            made = of_index(tile_columns(at, terms[0].exponents), b)
            self.fits = (self.c[0].abs().amax(1) * made.bound).sum(-1) * self.scale * ROUNDING <= ALLOWED
            self.columns = made if bool(self.fits.any()) else None

    @cached_property
    def is_full(self) -> bool:
        """Whether no tile of queries has an empty slot."""
        return bool((self.rows.index >= 0).all())

    def without_columns(self) -> Head:
        """The same head with scores formed from D."""
        self.columns, self.fits = None, torch.zeros_like(self.fits)
        self.__dict__.pop("wide_keys", None)
        return self

    def order(self, x: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Queries in tiles, or in some of them: (Q, s, ...). Empty slots repeat the first of their tile."""
        return x[self.index[rows]].to(self.dtype)

    def order_keys(self, x: Tensor, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Keys in tiles, or in some of them: (T, s, ...). Empty slots hold some key."""
        return x[self.key_index[tiles]].to(self.dtype)

    def bias(self, rows: Tensor, lists: Tensor) -> Tensor:
        """The terms of tiles of queries and their tiles of keys, -inf for what is hidden: (G, 1, s, L s)."""
        to = self.keys.at[lists].flatten(1, 2)
        total: Tensor | None = None
        for term, c, factor in zip(self.terms, self.c, self.factors, strict=True):
            basis = functions(self.rows.at[rows], to, term.exponents, self.dtype)
            more = contract(c[rows][:, None] * factor, basis)
            total = more if total is None else total + more
        assert total is not None
        return total.masked_fill(~self.looks(rows, lists), -torch.inf)

    def looks(self, rows: Tensor, lists: Tensor) -> Tensor:
        """Where a query may look: (G, 1, 1 or s, L s)."""
        looks = self.visible[lists].flatten(1)[:, None, None]
        if self.mask is None:
            return looks
        return looks & self.mask[self.index[rows][:, :, None], self.key_index[lists].flatten(1)[:, None]][:, None]

    def needed(self, rows: Tensor, tolerance: float, weighted: bool) -> Tensor:
        """Which tiles of keys these tiles of queries need: (G, T) boolean."""
        return needed([self], rows, tolerance, weighted)[0]

    def floor(self, rows: Tensor, q: Tensor, anchor: Tensor, columns: Tensor | None) -> Tensor:
        """The log-sum-exp of each row over the keys of an anchor tile (G, 1) and those without a position: (G, s).

        columns: of queries q, by the offsets of keys from the middle of their tile.
        """
        loose = torch.arange(self.keys.compact, len(self.keys.index) - 1, device=self.k.device)
        lists = torch.cat([anchor, loose.expand(len(rows), -1)], 1)
        if columns is None:
            bias = self.bias(rows, lists)[:, 0]
        else:
            y = self.offsets(rows, lists)
            products = [y[u] * y[v] for u in range(len(y)) for v in range(u, len(y))]
            bias = torch.bmm(columns, torch.stack([*products, *y, self.placed[lists].flatten(1)], 1))
            if self.mask is not None or not self.visible[lists].all():
                bias.masked_fill_(~self.looks(rows, lists)[:, 0], -torch.inf)
        return bias.baddbmm_(q, self.order_keys(self.k, lists).flatten(1, 2).mT).logsumexp(-1)

    def groups(self, needed: Tensor, times: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tiles of queries (G,), all or none by columns, and what each needs (G, L), filled up with the empty tile.

        needed (Q, T); times: how often the numbers of a key are there. The longest lists come first. Each thread gets
        as many tiles as the others.
        """
        all_counts, places = needed.sum(1), torch.arange(needed.shape[1], device=needed.device)
        for chosen in (self.fits.nonzero()[:, 0], (~self.fits).nonzero()[:, 0]):
            counts, order = all_counts[chosen].sort(dim=0, descending=True, stable=True)
            lengths, order, start = counts.tolist(), chosen[order], 0
            while start < len(lengths):
                one = (
                    lengths[start] * self.key_index.shape[1] * times * self.numbers(order[start]) * self.dtype.itemsize
                )
                stop = min(start + torch.get_num_threads() * max(1, GROUP_BYTES // one), len(lengths))
                rows = order[start:stop]
                first = needed[rows].byte().sort(dim=1, descending=True, stable=True)[1][:, : lengths[start]]
                yield rows, torch.where(places[: lengths[start]] < counts[start:stop, None], first, len(places) - 1)
                start = stop

    @cached_property
    def query_columns(self) -> Tensor:
        """The positional columns of queries, and 1 for the column that hides empty slots: (Q, s, e + 1)."""
        assert self.columns is not None
        return F.pad((self.c[0][..., None, :] @ self.columns.T)[..., 0, :], (0, 1), value=1.0)

    def offsets(self, rows: Tensor, lists: Tensor) -> list[Tensor]:
        """Positions of keys about the middle of each tile of queries, 0 where there is none: p tensors (G, L s)."""
        # In float64: about the middle of a wide tile of keys, positions in float32 would have lost digits.
        middle = self.rows.middle[rows][:, None, :, None] * (lists < self.keys.compact)[..., None, None]  # (G, L, p, 1)
        both, flat = zip(self.planes, middle.unbind(2), strict=True), lists.flatten()
        return [x.index_select(0, flat).view(*lists.shape, -1).sub_(y).to(self.dtype).flatten(1) for x, y in both]

    @cached_property
    def planes(self) -> list[Tensor]:
        """The positions of keys: p of (T, s)."""
        return [x.contiguous() for x in self.keys.filled.unbind(-1)]

    @cached_property
    def placed(self) -> Tensor:
        """1 for keys with a position, 0 for others: (T, s)."""
        return (~self.keys.at[..., 0].isnan()).to(self.dtype)

    @property
    def width(self) -> int:
        """The width of queries and keys: their own, positional columns, and a column that hides empty slots."""
        return self.k.shape[-1] + (0 if self.columns is None else len(self.columns.features) + 1)

    @cached_property
    def wide_keys(self) -> Tensor:
        """Values beside keys and room for their columns, of which the last two are there: (T, s, w + width)."""
        h, w = self.k.shape[-1], self.v.shape[-1]
        kv = torch.empty(*self.key_index.shape, w + self.width, dtype=self.dtype, device=self.k.device)
        kv[..., :w], kv[..., w : w + h] = self.v[self.key_index], self.k[self.key_index]
        if self.columns is not None:
            kv[..., -2] = self.placed
            kv[..., -1] = torch.where(self.visible, 0.0, max(HIDDEN / self.scale, torch.finfo(self.dtype).min))
        return kv

    def attention(self, rows: Tensor, lists: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights (G, s, L s) of tiles of queries and their lists; wide queries, keys and values, (G, s or L s, ...).

        room: memory of any size for keys, values and weights, because fresh memory takes as long as the rest.
        """
        kv, w = self.wide_keys, self.v.shape[-1]
        shape = len(rows), self.index.shape[1], lists.shape[1] * kv.shape[1]
        both, scores = lists.numel() * kv[0].numel(), prod(shape)
        if room.numel() < both + scores:
            room.untyped_storage().resize_(0)  # else old and new are there at one time
            room.resize_(max(both + scores, GROUP_BYTES * torch.get_num_threads() // room.itemsize))  # for most groups
        x, into = room[:both].view(lists.numel(), -1), room[both : both + scores].view(shape)
        x = torch.index_select(kv.flatten(1), 0, lists.flatten(), out=x).view(shape[0], shape[2], -1)
        q, k, v, h = self.order(self.q, rows), x[..., w:], x[..., :w], self.k.shape[-1]
        if not self.fits[rows[0]]:
            k = k[..., :h]
            torch.baddbmm(self.bias(rows, lists)[:, 0], q, k.mT, alpha=self.scale, out=into)
            return softmax_(into, hides=True), q, k, v
        q = torch.cat([q, self.query_columns[rows]], -1)
        assert self.columns is not None
        y = self.offsets(rows, lists)
        k[..., h:-2] = torch.stack([function(y, f) for f in self.columns.features[:-1]], -1)  # the constant is there
        torch.baddbmm(into, q, k.mT, beta=0, alpha=self.scale, out=into)
        if self.mask is not None:
            into.masked_fill_(~self.looks(rows, lists)[:, 0], -torch.inf)
        return softmax_(into, hides=self.mask is not None), q, k, v

    def numbers(self, row: Tensor) -> int:
        """How many numbers a key takes in a group with this tile of queries, the widest tensors counted."""
        wide, s = self.width + self.v.shape[-1], self.index.shape[1]
        return wide + s * (1 if self.fits[row] else 4 + sum(len(t.exponents) for t in self.terms))


def needed(heads: Sequence[Head], rows: Tensor, tolerance: float, weighted: bool) -> Tensor:
    """Which tiles of keys these tiles of queries need, in heads that share positions and visible keys.

    (A, G, T) boolean. The proof is in sparse.py.
    """
    first = heads[0]
    compact, count = first.keys.compact, len(first.keys.index) - 1
    out = torch.ones(len(heads), len(rows), count + 1, dtype=torch.bool, device=first.k.device)
    out[..., -1] = False
    tiled = (rows < first.rows.compact).nonzero()[:, 0]
    if not compact or not len(tiled):
        return out
    tiles = slice(compact)
    keys = sparse.Keys.of(first.key_tiles, (x.order_keys(x.k, tiles) for x in heads), first.visible[tiles])
    on_cpu = first.k.device.type == "cpu"  # elsewhere few large operations are faster, even if they do more
    many = on_cpu and compact % sparse.COARSE == 0 and compact > 4 * sparse.COARSE
    coarse = keys.merged(sparse.COARSE) if many else None
    # Tiles that are neighbours need about the same. Without coarse tiles there is no such reason for small blocks.
    most = (BLOCK if on_cpu else GPU_BLOCK) // (len(heads) * first.index.shape[1] * compact)
    for part in tiled.split(sparse.COARSE if coarse is not None else max(sparse.COARSE, most)):
        out[:, part, :compact] = _needed(heads, rows[part], keys, coarse, tolerance, weighted)
    return out


def _needed(
    heads: Sequence[Head], rows: Tensor, keys: sparse.Keys, coarse: sparse.Keys | None, tolerance: float, weighted: bool
) -> Tensor:
    first = heads[0]
    coefficients = (torch.stack(c) for c in zip(*([c[rows] for c in head.c] for head in heads), strict=True))
    form = sparse.form(first.terms, [c * x for c, x in zip(coefficients, first.factors, strict=True)])
    middle, at = first.rows.middle[rows], first.rows.at[rows]
    x = middle[:, None] - torch.where(at.isnan(), at[:, :1], at)  # empty slots repeat the first query
    q = torch.stack([head.order(head.q, rows) for head in heads]) * first.scale
    queries = sparse.Queries(q, x.to(first.dtype), middle, form)

    def floor(anchor: Tensor, far: Tensor) -> Tensor:
        """At most the log-sum-exp of each row, given anchor tiles (A, G, 1) and at least |D| there."""
        longest = (keys.centroid.norm(dim=-1) + keys.radius).gather(1, anchor[..., 0])[..., None]
        loose = slice(first.keys.compact, len(first.keys.index) - 1)
        if loose.start < loose.stop:
            norms = torch.stack([head.order_keys(head.k, loose).norm(dim=-1).amax() for head in heads])
            longest = torch.maximum(longest, norms[:, None, None])
        size = queries.curve * far.square() + queries.steep * far + queries.length * longest
        columns = [None] * len(heads) if queries.has_distance else queries.columns
        each = zip(heads, q, anchor, columns, strict=True)
        sums = torch.stack([head.floor(rows, y, z, c) for head, y, z, c in each])
        return sums - queries.rounding * (4 * size + sums.abs().nan_to_num(posinf=0.0))

    return sparse.needed(queries, keys, coarse, floor, tolerance, weighted)
