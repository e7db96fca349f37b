"""Lists of tiles for kernels that run blocks of tokens: a call in the order of its tiles, and the blocks of keys that
each block of queries visits.

tiles.py says which tiles a call needs. A block is a run of tokens in the order of the tiles, and visits what any tile
needs that has a token in it: no list misses a tile. Without lists, every block visits all.
B batch, H heads, n queries, N keys; Q tiles of queries, T tiles of keys.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import sparse, tiles
from .kernels import Call
from .terms import Relative
from .tiling import aligned


class Order(NamedTuple):
    """An order of the tokens of each sample."""

    tokens: Tensor  # (B, n): which token stands at a place
    places: Tensor  # (B, n): where a token stands
    tile: Tensor  # (B, n): the tile of the token at a place, ascending

    @classmethod
    def of(cls, index: list[Tensor], count: int) -> Order:
        """By tiles (tiles, s) of each sample; tokens that are in none come last."""
        tile = torch.stack([x.new_full((count + 1,), len(x)) for x in index])
        for row, x in zip(tile, index, strict=True):  # empty slots are -1: they go to the end, which is cut off
            row[x] = torch.arange(len(x), device=x.device)[:, None].expand_as(x)
        ascending, tokens = tile[:, :count].sort(dim=1, stable=True)
        return cls(tokens, tokens.argsort(dim=1), ascending)

    def __call__(self, x: Tensor) -> Tensor:
        """x (B or 1, H, n, ...) in this order."""
        y: Tensor = _Moved.apply(x, self.tokens, self.places)
        return y

    def undo(self, x: Tensor) -> Tensor:
        y: Tensor = _Moved.apply(x, self.places, self.tokens)
        return y


class _Moved(torch.autograd.Function):
    """Tokens in another order, and gradients back: every token moves once, so nothing has to be added up."""

    @staticmethod
    def forward(ctx, x, tokens, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(tokens, places)
        ctx.shared = len(x) < len(tokens)
        return _gathered(x, 2, tokens)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        tokens, places = ctx.saved_tensors
        dx = _Moved.apply(dx, places, tokens)
        return dx.sum(0, keepdim=True) if ctx.shared else dx, None, None


def _gathered(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries of x (B or 1, ...) along one dimension, by an index (B, entries)."""
    shape = [len(index), *(index.shape[1] if d == dim else 1 for d in range(1, x.ndim))]
    x = x.expand(len(index), *x.shape[1:])
    return x.gather(dim, index.view(shape).expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


class Lists(NamedTuple):
    """A call with its tokens in the order of its tiles, and the tiles that it needs."""

    call: Call
    queries: Order
    keys: Order
    needed: Tensor  # (B, H, Q, T), boolean

    def blocks(self, i: int, j: int) -> Tensor:
        """Which blocks of j keys each block of i queries visits: (B, H, blocks of queries, blocks of keys), boolean."""
        sums = F.pad(self.needed.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        for dim, tile, size in ((2, self.queries.tile, i), (3, self.keys.tile, j)):
            first = torch.arange(0, tile.shape[1], size, device=tile.device)
            last = (first + size - 1).clamp(max=tile.shape[1] - 1)
            sums = _gathered(sums, dim, tile[:, last] + 1) - _gathered(sums, dim, tile[:, first])
        return sums > 0


def compressed(visits: Tensor) -> tuple[Tensor, Tensor]:
    """What each row of visits (..., rows, blocks) visits: lists one after another, where each begins and the last ends.

    As (rows + 1,) and (visits in all,).
    """
    rows = visits.flatten(0, -2)
    return F.pad(rows.sum(1).cumsum(0), (1, 0)), rows.nonzero()[:, 1].int()


def _changed(term: Relative, **changes: Any) -> Relative:
    return replace(term, **changes)  # type: ignore[type-var]


def _reordered(call: Call, terms: tuple[Relative, ...], queries: Order, keys: Order) -> Call:
    made = []
    for term in terms:
        fields = {name: x for name in term.learned if (x := getattr(term, name)) is not None}
        learned = {name: queries(x) for name, x in fields.items() if x.ndim > 2}  # one for each query
        r, to = term.r.gather(queries.tokens), term.key_positions.gather(keys.tokens)
        made.append(_changed(term, r=r, keys=to, **learned))
    mask = None if call.mask is None else _gathered(call.mask, 3, keys.tokens)
    if mask is not None and mask.shape[2] > 1:
        mask = _gathered(mask, 2, queries.tokens)
    return replace(call, q=queries(call.q), k=keys(call.k), v=keys(call.v), terms=tuple(made), mask=mask)


def listed(call: Call, size: int) -> Lists | None:
    """The lists of a call in tiles of `size` tokens; None if every key shall be looked at.

    That is where tiles are not expected to save time, and in programs that are compiled or captured. Lists are made
    where the call is; how long they are is read back.
    """
    recorded = torch.compiler.is_compiling() or (call.q.is_cuda and torch.cuda.is_current_stream_capturing())
    # A single query may see other keys in each head, which then have no order in common.
    if recorded or call.q.shape[2] < 2 or (terms := sparse.served(call)) is None:
        return None
    terms = tuple(_changed(t, r=aligned(t.r, size), keys=aligned(t.key_positions, size)) for t in terms)
    call = replace(call, terms=terms)
    if tiles.chosen(call) is None or (found := tiles.needed_tiles(call, call.needs_grad)) is None:
        return None
    queries = Order.of([heads[0].queries for heads in found], call.q.shape[2])
    keys = Order.of([heads[0].keys for heads in found], call.k.shape[2])
    rows, columns = (max(heads[0].needed.shape[i] for heads in found) for i in (0, 1))
    needed = torch.zeros(*call.q.shape[:2], rows, columns + 1, dtype=torch.bool, device=call.q.device)
    for into, head in zip(needed.flatten(0, 1), chain.from_iterable(found), strict=True):
        into[: len(head.needed), : head.needed.shape[1]] = head.needed  # nobody needs keys that are in no tile
    return Lists(_reordered(call, terms, queries, keys), queries, keys, needed)


def share(call: Call, size: int, block: int) -> str:
    """The share of blocks that a call visits, in words; nothing where it visits all."""
    lists = listed(call, size)
    if lists is None:
        return ""
    return f", over the {float(lists.blocks(block, block).double().mean()):.1%} of tiles that may have weight"
