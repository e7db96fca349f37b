"""Attention over lists of tiles: each tile of queries looks at the tiles of keys that sparse.py says it needs.

One head of one sample at a time, its tokens in the order of the tiles. Tiles of queries that need about as many tiles
of keys form a group. Their keys and values are gathered tile by tile, and PyTorch's fused attention runs the group as a
batch. Terms of degree two are columns, centred in each tile of queries; other terms, and forms so steep that columns
would lose digits, are formed from D. The backward pass visits the same lists. A query is in one tile only, so no
softmax is merged.
n queries, N keys, h query/key size, w value size, p position dims, f functions, e columns; Q tiles of queries, T tiles
of keys, s slots of a tile, G tiles of queries in a group, L tiles of keys that each of them visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..relative import contract, function, functions, project
from ..tracing import no_autocast
from . import sparse
from .columns import ALLOWED, GRADIENT_ROUNDING, ROUNDING
from .kernels import Call
from .scores import empty_heads
from .terms import Relative
from .tiling import Columns, Side, sides, tile_columns, tilings

SAMPLED = (2, 4)  # heads, and tiles of queries of each, that the share of tiles is estimated from
BLOCK = 2**19  # pairs of a query and a tile of keys that are bounded at one time
GROUP_BYTES = 3 * 2**20  # gathered keys and values, or a bias, at one time
HIDDEN = -1e30  # the score of an empty slot

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_separable(term: Relative) -> bool:
    """Whether a term can be columns."""
    return term.scaled and all(e[0] == -2 or 0 <= sum(e) <= 2 for e in term.exponents)


def _of(x: Any, i: int) -> Any:
    """The i-th of things, or the one that all share."""
    return x[i if len(x) > 1 else 0]


class Head:
    """One head of one sample in the order of its tiles, in float32 at least."""

    def __init__(self, call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor], b: int, h: int) -> None:
        at, to, n = terms[0].r, terms[0].key_positions, call.q.shape[2]
        self.terms, self.scale = terms, call.scale
        self.factors = [call.scale if term.scaled else 1.0 for term in terms]
        self.dtype = _wide(call.q)
        self.tiles, self.key_tiles = (_of(tilings(x), b) for x in (at, to))
        mask = None if call.mask is None else _of(_of(call.mask, b), h)  # (n or 1, N)
        self.mask = mask if mask is not None and len(mask) > 1 else None
        padding = mask[0] if mask is not None and len(mask) == 1 else None
        self.rows, self.keys = _of(sides(at, 0), b), _of(sides(to, 1), b)
        if padding is not None and len(loose := self.key_tiles.unplaced):
            self.keys = Side.of(_of(to.r, b), self.key_tiles, loose[padding[loose]], 1)
        self.key_index = self.keys.index.clamp(min=0)
        self.visible = self.keys.index >= 0  # (T, s)
        if padding is not None:
            self.visible = self.visible & padding[self.key_index]
        self.index = torch.where(self.rows.index < 0, self.rows.index[:, :1], self.rows.index)
        self.q, self.k, self.v = self.order(call.q[b, h]), self.order_keys(call.k[b, h]), call.v[b, h]
        self.c = [self.order(_of(_of(c, b), h).expand(n, -1)) for c in coefficients]
        self.columns: Columns | None = None
        if not call.exact and len(terms) == 1 and is_separable(terms[0]) and self.dtype == torch.float32:
            made = _of(tile_columns(at, terms[0].exponents), b)
            lost = (self.c[0].abs().amax(1) * made.bound).sum(-1).amax() * self.scale * ROUNDING
            self.columns = made if float(lost) <= ALLOWED else None

    def order(self, x: Tensor) -> Tensor:
        """Queries in tiles: (Q, s, ...). Empty slots repeat the first of their tile."""
        return x[self.index].to(self.dtype)

    def order_keys(self, x: Tensor) -> Tensor:
        """Keys in tiles: (T, s, ...). Empty slots hold some key."""
        return x[self.key_index].to(self.dtype)

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
        """Which tiles of keys these tiles of queries need: (G, T) boolean. The proof is in sparse.py."""
        compact, count = self.keys.compact, len(self.keys.index) - 1
        needed = torch.ones(len(rows), count + 1, dtype=torch.bool, device=self.q.device)
        needed[:, -1] = False
        tiled = (rows < self.rows.compact).nonzero()[:, 0]
        if not compact or not len(tiled):
            return needed
        keys = sparse.Keys.of(self.key_tiles, self.k[:compact], self.visible[:compact])
        coarse = keys.merged(sparse.COARSE) if compact % sparse.COARSE == 0 and compact > 4 * sparse.COARSE else None
        # Tiles that are neighbours need about the same. Without coarse tiles there is no such reason for small blocks.
        step = sparse.COARSE if coarse is not None else max(sparse.COARSE, BLOCK // (self.q.shape[1] * compact))
        for part in tiled.split(step):
            needed[part, :compact] = self._needed(rows[part], keys, coarse, tolerance, weighted)
        return needed

    def _needed(
        self, rows: Tensor, keys: sparse.Keys, coarse: sparse.Keys | None, tolerance: float, weighted: bool
    ) -> Tensor:
        f = sparse.form(self.terms, [c[rows] * x for c, x in zip(self.c, self.factors, strict=True)])
        middle, at = self.rows.middle[rows], self.rows.at[rows]
        x = middle[:, None] - torch.where(at.isnan(), at[:, :1], at)  # empty slots repeat the first query
        queries = sparse.Queries(self.q[rows] * self.scale, x.to(self.dtype), middle, f)
        return sparse.needed(queries, keys, coarse, partial(self._floor, rows, queries, keys), tolerance, weighted)

    def _floor(self, rows: Tensor, queries: sparse.Queries, keys: sparse.Keys, anchor: Tensor, far: Tensor) -> Tensor:
        """At most the log-sum-exp of each row, from the keys of an anchor tile (G, 1) and those without a position.

        far (G, 1): at least |D| there.
        """
        loose = torch.arange(self.keys.compact, len(self.keys.index) - 1, device=self.q.device)
        lists = torch.cat([anchor, loose.expand(len(rows), -1)], 1)
        longest = (keys.centroid.norm(dim=-1) + keys.radius)[anchor]
        if len(loose):
            longest = torch.maximum(longest, self.k[loose].norm(dim=-1).amax())
        size = queries.curve * far.square() + queries.steep * far + queries.length * longest
        if self.columns is None:
            scores = torch.baddbmm(self.bias(rows, lists)[:, 0], queries.q, self.k[lists].flatten(1, 2).mT)
        else:
            wide, kv = self.widened
            k, _, bias = self.gathered(kv, rows, lists)
            scores = torch.bmm(wide[rows], k[:, 0].mT) * self.scale
            scores = scores if bias is None else scores + bias[:, 0]
        floor = scores.logsumexp(-1)
        return floor - queries.rounding * (4 * size + floor.abs().nan_to_num(posinf=0.0))

    def groups(self, needed: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tiles of queries (G,) and what each needs (G, L), filled up with the empty tile.

        needed (Q, T); width: numbers that a key takes in a group. The longest lists come first.
        """
        counts, order = needed.sum(1).sort(dim=0, descending=True, stable=True)
        lengths, start, empty = counts.tolist(), 0, needed.shape[1] - 1
        while start < len(lengths):
            most = max(1, GROUP_BYTES // (lengths[start] * self.q.shape[1] * width * self.dtype.itemsize))
            stop = min(start + most, len(lengths))
            rows = order[start:stop]
            first = (~needed[rows]).int().sort(dim=1, stable=True)[1][:, : lengths[start]]
            yield rows, torch.where(needed[rows].gather(1, first), first, empty)
            start = stop

    @cached_property
    def widened(self) -> tuple[Tensor, Tensor]:
        """Queries (Q, s, width), and keys beside values (T, s, 2 width), with room for columns.

        One more column hides empty slots.
        """
        e = 0 if self.columns is None else len(self.columns.features)
        h, w = self.q.shape[-1], self.v.shape[-1]
        width = -(-max(h + e + 1, w) // 8) * 8
        q = self.q.new_zeros(*self.q.shape[:2], width)
        kv = self.q.new_zeros(*self.k.shape[:2], 2 * width)
        q[..., :h], kv[..., :h], kv[..., width : width + w] = self.q, self.k, self.order_keys(self.v)
        if self.columns is not None:
            q[..., h : h + e] = (self.c[0][..., None, :] @ self.columns.T)[..., 0, :]
            q[..., h + e] = 1.0
            kv[..., h + e - 1] = ~self.keys.at[..., 0].isnan()  # the constant, which comes last
            kv[..., h + e].masked_fill_(~self.visible, HIDDEN)
        return q, kv

    def gathered(
        self, kv: Tensor, rows: Tensor, lists: Tensor, room: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (G, 1, L s, width) of lists, and what is added to the scores (G, 1, s, L s), if anything.

        room: memory to gather in, of any size, because fresh memory takes as long as the rest.
        """
        room = kv.new_empty(0) if room is None else room
        if room.numel() < lists.numel() * kv[0].numel():
            room.resize_(lists.numel() * kv[0].numel())
        x = room[: lists.numel() * kv[0].numel()].view(lists.numel(), -1)
        x = torch.index_select(kv.flatten(1), 0, lists.flatten(), out=x).view(len(rows), -1, kv.shape[-1])
        bias = None
        if self.columns is None:
            bias = self.bias(rows, lists)
        else:
            if self.mask is not None:
                bias = self.q.new_zeros(()).masked_fill(~self.looks(rows, lists), -torch.inf)
            shift = (self.keys.middle[lists] - self.rows.middle[rows][:, None]).float()
            y = (self.keys.offset[lists] + shift[:, :, None]).mul_((lists < self.keys.compact)[..., None, None])
            y = y.flatten(1, 2).unbind(-1)
            for column, f in enumerate(self.columns.features[:-1], self.q.shape[-1]):
                x[..., column] = function(y, f)
        width = kv.shape[-1] // 2
        return x[:, None, :, :width], x[:, None, :, width:], bias

    def numbers(self) -> int:
        """How many numbers a key takes in a group, the widest tensors counted."""
        wide = 2 * (self.q.shape[-1] + 16)
        return wide if self.columns else wide + self.q.shape[1] * (3 + sum(len(t.exponents) for t in self.terms))


def forward(head: Head, needed: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a head over the tiles it needs, and the log-sum-exp of its rows: (Q, s, w) and (Q, s)."""
    q, kv = head.widened
    out, lse = q.new_empty(*q.shape[:2], head.v.shape[-1]), q.new_empty(q.shape[:2])
    for rows, lists in head.groups(needed, head.numbers()):
        k, v, bias = head.gathered(kv, rows, lists, room)
        y, log_sum = flash(q[rows][:, None], k, v, attn_mask=bias, scale=head.scale)
        out[rows], lse[rows] = y[:, 0, :, : out.shape[-1]], log_sum[:, 0]
    return out, lse


def backward(head: Head, needed: Tensor, lse: Tensor, dout: Tensor, out: Tensor, room: Tensor) -> list[Tensor]:
    """Gradients of q (Q, s, h), k (T, s, h), v (T, s, w) and coefficients (Q, s, f); dout and out are (n, w).

    Visits the tiles of the forward pass.
    """
    dy = head.order(dout).masked_fill(head.rows.index[..., None] < 0, 0.0)
    if head.columns is not None:
        grads = _columns_backward(head, needed, lse, dy, head.order(out), room)
        norms = torch.linalg.vector_norm(dy, dim=-1) * torch.linalg.vector_norm(head.v, dim=-1, dtype=head.dtype).amax()
        lost = torch.linalg.vector_norm(norms[..., None] * head.columns.bound[:, None])
        if bool(lost * head.scale * GRADIENT_ROUNDING <= ALLOWED * torch.linalg.vector_norm(grads[3])):
            return grads
        head.columns = None  # and as wide as before
    return _backward_from_d(head, needed, dy)


def _columns_backward(head: Head, needed: Tensor, lse: Tensor, dy: Tensor, y: Tensor, room: Tensor) -> list[Tensor]:
    assert head.columns is not None
    (q, kv), h, w = head.widened, head.q.shape[-1], head.v.shape[-1]
    e, width = len(head.columns.features), q.shape[-1]
    dy, y = (torch.nn.functional.pad(x, (0, width - w)) for x in (dy, y))
    dq, dkv = torch.empty_like(q), kv.new_zeros(*kv.shape[:2], h + w)
    for rows, lists in head.groups(needed, 3 * head.numbers()):
        k, v, bias = head.gathered(kv, rows, lists, room)
        args = (dy[rows][:, None], q[rows][:, None], k, v, y[rows][:, None], lse[rows][:, None])
        gq, gk, gv = flash_backward(*args, 0.0, False, attn_mask=bias, scale=head.scale)
        dq[rows] = gq[:, 0]
        both = torch.cat([gk[:, 0, :, :h], gv[:, 0, :, :w]], -1)
        dkv.flatten(1).index_add_(0, lists.flatten(), both.view(lists.numel(), -1))
    dc = (dq[..., None, h : h + e] @ head.columns.T.mT)[..., 0, :]
    return [dq[..., :h], dkv[..., :h], dkv[..., h:], dc]


def _backward_from_d(head: Head, needed: Tensor, dy: Tensor) -> list[Tensor]:
    q, k, v, scale = head.q, head.k, head.order_keys(head.v), head.scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dc = [torch.empty_like(c) for c in head.c]
    for rows, lists in head.groups(needed, head.numbers()):
        keys, values = (x[lists].flatten(1, 2) for x in (k, v))
        scores = torch.baddbmm(head.bias(rows, lists)[:, 0], q[rows], keys.mT, alpha=scale)
        weights = torch.softmax(scores, -1)
        ds = torch.ops.aten._softmax_backward_data(dy[rows] @ values.mT, weights, -1, head.dtype)
        dq[rows] = ds @ keys * scale
        for into, more in ((dk, ds.mT @ q[rows] * scale), (dv, weights.mT @ dy[rows])):
            into.flatten(1).index_add_(0, lists.flatten(), more.view(lists.numel(), -1))
        to = head.keys.at[lists].flatten(1, 2)
        for term, grad, factor in zip(head.terms, dc, head.factors, strict=True):
            basis = functions(head.rows.at[rows], to, term.exponents, head.dtype)
            grad[rows] = project(ds[:, None], basis, grad[rows][:, None])[:, 0] * factor
    return [dq, dk, dv, *dc]


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _scatter(into: Tensor, index: Tensor, tiles: Tensor) -> None:
    """Writes tiles (tiles, s, ...) to the tokens that index (tiles, s) names."""
    real = index >= 0
    into[index[real]] = tiles[real].to(into.dtype)


class _Attention(torch.autograd.Function):
    """Attention of all heads of a call, one after another. weighted: tiles are chosen for training."""

    @staticmethod
    def forward(ctx, call, terms, weighted, q, k, v, *coefficients):  # type: ignore[no-untyped-def]
        out, visits, room = empty_heads(q, v.shape[-1]), [], torch.empty(0, dtype=_wide(q))
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            head = Head(call, terms, coefficients, b, h)
            needed = head.needed(torch.arange(len(head.index)), call.tolerance, weighted)
            y, lse = forward(head, needed, room)
            _scatter(out[b, h], head.rows.index, y)
            visits.append((needed, lse))
        ctx.call, ctx.terms, ctx.visits = call, terms, visits
        ctx.save_for_backward(out, *coefficients)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        out, *coefficients = ctx.saved_tensors
        call, visits = ctx.call, iter(ctx.visits)
        room = torch.empty(0, dtype=_wide(call.q))
        dq, dk, dv = (empty_heads(x) for x in (call.q, call.k, call.v))
        learned = [torch.zeros_like(c) for c in coefficients]
        with no_autocast(dout.device):
            for b, h in product(range(len(dq)), range(dq.shape[1])):
                head = Head(call, ctx.terms, coefficients, b, h)
                needed, lse = next(visits)
                gq, gk, gv, *gc = backward(head, needed, lse, dout[b, h], out[b, h], room)
                _scatter(dq[b, h], head.rows.index, gq)
                for into, tiles in ((dk, gk), (dv, gv)):
                    into[b, h].zero_()  # a key that nobody may see is in no tile
                    _scatter(into[b, h], head.keys.index, tiles)
                for into, c in zip(learned, gc, strict=True):
                    real = head.rows.index >= 0
                    row = _of(_of(into, b), h)  # (n or 1, f)
                    if len(row) > 1:
                        row[head.rows.index[real]] += c[real].to(row.dtype)
                    else:
                        row += c[real].sum(0).to(row.dtype)
        return None, None, None, dq, dk, dv, *learned


@torch.no_grad()
def needed_tiles(call: Call, weighted: bool | None = None) -> list[list[sparse.HeadTiles]] | None:
    """The lists of tiles of a call, as [sample][head]; None if its terms have no bound or its tolerance is 0.

    For kernels of any device. Each query is in one tile. Run every tile of queries over the keys of the tiles that it
    needs: the result is attention, and no row loses more than `call.tolerance` of its weight. `queries.flatten()`
    without its -1 is an order that puts tiles side by side. Tokens without a position are in tiles of their own. Masks
    still apply, because a tile may hold keys that some queries must not see; a key in no tile is hidden from all.
    weighted: choose tiles for training (by default if the call wants gradients). Backward must visit the same tiles.
    """
    terms = sparse.shared_terms(call) if call.tolerance > 0 else None
    if terms is None:
        return None
    weighted = call.needs_grad if weighted is None else weighted
    coefficients = [term.coefficients(_wide(call.q)) for term in terms]

    def head_tiles(b: int, h: int) -> sparse.HeadTiles:
        head = Head(call, terms, coefficients, b, h)
        needed = head.needed(torch.arange(len(head.index), device=call.q.device), call.tolerance, weighted)
        return sparse.HeadTiles(head.rows.index, head.keys.index[:-1], needed[:, :-1])

    return [[head_tiles(b, h) for h in range(call.q.shape[1])] for b in range(call.q.shape[0])]


@torch.no_grad()
def share(
    call: Call,
    terms: Sequence[Relative],
    coefficients: Sequence[Tensor],
    sampled: tuple[int | None, int | None] = (None, None),
) -> float:
    """The share of pairs of tiles that a call needs. sampled: estimated from so many heads and tiles of queries."""
    visited, pairs = 0, 0
    for head_index in sparse.spread(prod(call.q.shape[:2]), sampled[0]):
        head = Head(call, terms, coefficients, *divmod(head_index, call.q.shape[1]))
        rows = torch.tensor(sparse.spread(len(head.index), sampled[1]))
        needed = head.needed(rows, call.tolerance, call.needs_grad)
        visited, pairs = visited + int(needed.sum()), pairs + needed[:, 1:].numel()
    return visited / max(pairs, 1)


def describe(call: Call) -> str | None:
    """What `attention` would do, in words; None where it would do nothing."""
    terms = sparse.served(call)
    if terms is None:
        return None
    coefficients = [term.coefficients(_wide(call.q)) for term in terms]
    if sparse.cost(call, share(call, terms, coefficients, SAMPLED)) >= 1.0:
        return None
    needed = share(call, terms, coefficients)
    where = "columns centred in each tile" if Head(call, terms, coefficients, 0, 0).columns else "scores formed from D"
    gain = f"about {sparse.cost(call, needed):.2f} of the time of all tiles"
    return f"{call.names} over the {needed:.1%} of tiles that may have weight, {where}; expected: {gain}"


def attention(call: Call) -> Tensor | None:
    """Attention over the tiles that a call needs; None where dense attention is as fast or the bound does not apply."""
    terms = sparse.served(call)
    if terms is None:
        return None
    coefficients = [term.coefficients(_wide(call.q)) for term in terms]
    if sparse.cost(call, share(call, terms, coefficients, SAMPLED)) >= 1.0:
        return None
    out: Tensor = _Attention.apply(call, terms, call.needs_grad, call.q, call.k, call.v, *coefficients)
    return out
