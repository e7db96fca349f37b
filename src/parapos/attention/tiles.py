"""Attention over lists of tiles: each tile of queries looks at the tiles of keys that sparse.py says it needs.

One head of one sample at a time, its tokens in the order of the tiles. Tiles of queries that need about as many tiles
of keys form a group. Their keys and values are gathered tile by tile, and the group runs as batched products, which
take less time than PyTorch's fused attention for so few queries. Terms of degree two are columns, centred in each tile
of queries; other terms, and tiles so wide for their forms that columns would lose digits, are formed from D. The
backward pass visits the same lists. A query is in one tile only, so no softmax is merged.
n queries, N keys, h query/key size, w value size, p position dims, f functions, e columns; Q tiles of queries, T tiles
of keys, s slots of a tile, G tiles of queries in a group, L tiles of keys that each of them visits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..relative import contract, functions, project
from ..tracing import no_autocast
from . import sparse
from .columns import ALLOWED, GRADIENT_ROUNDING
from .head import BLOCK, Head, of_index, wide_type
from .head import needed as needed_by
from .kernels import Call, refuse_batched_gradients
from .scores import empty_heads
from .terms import Relative
from .tiling import TILE, tilings

# The share of tiles is estimated from one head of so many, at most so many heads, and tiles of queries of each.
SAMPLED = (4, 3, 4)
PROBES = 16  # queries that tell whether a form looks everywhere


def forward(head: Head, needed: Tensor, room: Tensor, out: Tensor) -> None:
    """Attention of a head over the tiles it needs, written to out (n, w)."""
    for rows, lists in head.groups(needed, 1):
        weights, _, _, values = head.attention(rows, lists, room)
        y, index = torch.bmm(weights, values), head.rows.index[rows]
        if head.is_full:
            out[index.flatten()] = y.flatten(0, 1).to(out.dtype)
        else:
            _scatter(out, index, y)


def backward(head: Head, needed: Tensor, dout: Tensor, room: Tensor) -> list[Tensor]:
    """Gradients of q (Q, s, h), k (T, s, h), v (T, s, w) and coefficients (Q, s, f); dout is (n, w).

    Visits the tiles of the forward pass.
    """
    dy = head.order(dout).masked_fill(head.rows.index[..., None] < 0, 0.0)
    (h, w), scale, columns = (head.k.shape[-1], head.v.shape[-1]), head.scale, head.columns
    dq, dkv = dy.new_empty(*dy.shape[:2], h), dy.new_zeros(*head.key_index.shape, h + w)
    dc = [torch.empty_like(c) for c in head.c]
    for rows, lists in head.groups(needed, 2):
        weights, q, k, v = head.attention(rows, lists, room)
        dv, ds = weights.mT @ dy[rows], dy[rows] @ v.mT
        torch.ops.aten._softmax_backward_data.out(ds, weights, -1, head.dtype, grad_input=ds)
        both = torch.cat([ds.mT @ q[..., :h] * scale, dv], -1)
        dkv.flatten(1).index_add_(0, lists.flatten(), both.view(lists.numel(), -1))
        dx = ds @ k * scale
        dq[rows] = dx[..., :h]
        if columns is not None and head.fits[rows[0]]:
            dc[0][rows] = (dx[..., None, h:-1] @ columns.T[rows].mT)[..., 0, :]
            continue
        to = head.keys.at[lists].flatten(1, 2)
        for term, grad, factor in zip(head.terms, dc, head.factors, strict=True):
            basis = functions(head.rows.at[rows], to, term.exponents, head.dtype)
            grad[rows] = project(ds[:, None], basis, grad[rows][:, None])[:, 0] * factor
    if columns is not None:
        norms = torch.linalg.vector_norm(dy, dim=-1) * torch.linalg.vector_norm(head.v, dim=-1, dtype=head.dtype).amax()
        lost = torch.linalg.vector_norm((norms[..., None] * columns.bound[:, None])[head.fits])
        if not bool(lost * scale * GRADIENT_ROUNDING <= ALLOWED * torch.linalg.vector_norm(dc[0])):
            return backward(head.without_columns(), needed, dout, room)
    return [dq, dkv[..., :h], dkv[..., h:], *dc]


def _scatter(into: Tensor, index: Tensor, tiles: Tensor) -> None:
    """Writes tiles (tiles, s, ...) to the tokens that index (tiles, s) names."""
    real = index >= 0
    into[index[real]] = tiles[real].to(into.dtype)


def together(call: Call) -> list[range]:
    """Heads that are bounded at one time: they have to see the same keys, and their bounds have to fit in BLOCK."""
    heads, count = call.q.shape[1], -(-call.k.shape[2] // TILE)
    many = count > 4 * sparse.COARSE  # few tiles of queries at a time, and of keys those of coarse tiles
    pairs = sparse.COARSE * TILE * 4 * sparse.COARSE if many else call.q.shape[2] * count
    alike = call.mask is None or call.mask.shape[1] == 1
    count = max(1, min(heads, BLOCK // max(pairs, 1))) if alike else 1
    return [range(h, min(h + count, heads)) for h in range(0, heads, count)]


class _Attention(torch.autograd.Function):
    """Attention of all heads of a call, one after another. weighted: tiles are chosen for training."""

    @staticmethod
    def forward(ctx, call, terms, weighted, q, k, v, *coefficients):  # type: ignore[no-untyped-def]
        out, visits, room = empty_heads(q, v.shape[-1]), [], torch.empty(0, dtype=wide_type(q))
        for b, heads in product(range(q.shape[0]), together(call)):
            made = [Head(call, terms, coefficients, b, h) for h in heads]
            rows = torch.arange(len(made[0].index))
            for h, needed in zip(heads, needed_by(made, rows, call.tolerance, weighted), strict=True):
                head = made.pop(0)  # its wide tensors go before those of the next are made
                forward(head, needed, room, out[b, h])
                visits += [needed] if weighted else []
                del head
        ctx.call, ctx.terms, ctx.visits = call, terms, visits
        ctx.save_for_backward(q, k, v, *coefficients)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        refuse_batched_gradients(dout)
        q, k, v, *coefficients = ctx.saved_tensors  # which PyTorch watches for changes
        call, visits = replace(ctx.call, q=q, k=k, v=v), iter(ctx.visits)
        room = torch.empty(0, dtype=wide_type(call.q))
        dq, dk, dv = (empty_heads(x) for x in (call.q, call.k, call.v))
        learned = [torch.zeros_like(c) for c in coefficients]
        with no_autocast(dout.device):
            for b, h in product(range(len(dq)), range(dq.shape[1])):
                head = Head(call, ctx.terms, coefficients, b, h)
                gq, gk, gv, *gc = backward(head, next(visits), dout[b, h], room)
                _scatter(dq[b, h], head.rows.index, gq)
                for into, tiles in ((dk, gk), (dv, gv)):
                    into[b, h].zero_()  # a key that nobody may see is in no tile
                    _scatter(into[b, h], head.keys.index, tiles)
                for into, c in zip(learned, gc, strict=True):
                    real = head.rows.index >= 0
                    row = of_index(of_index(into, b), h)  # (n or 1, f)
                    if len(row) > 1:
                        row[head.rows.index[real]] += c[real].to(row.dtype)
                    else:
                        row += c[real].sum(0).to(row.dtype)
                del head, gq, gk, gv, gc, tiles, c
        return None, None, None, dq, dk, dv, *learned


def rounds_products(q: Tensor) -> bool:
    """Whether products on this device round float32 numbers to TF32 first, which the bound does not know."""
    return q.is_cuda and torch.backends.cuda.matmul.allow_tf32


@torch.no_grad()
def needed_tiles(call: Call, weighted: bool) -> list[list[sparse.HeadTiles]] | None:
    """The lists of tiles of a call, as [sample][head]; None if its terms have no bound, its tolerance is 0
    or products are in TF32.

    For kernels of any device. Each query is in one tile. Run every tile of queries over the keys of the tiles that it
    needs: the result is attention, and no row loses more than `call.tolerance` of its weight. `queries.flatten()`
    without its -1 is an order that puts tiles side by side. Tokens without a position are in tiles of their own. Masks
    still apply, because a tile may hold keys that some queries must not see; a key in no tile is hidden from all.
    weighted: choose tiles for training. Backward must visit the same tiles.
    """
    terms = sparse.shared_terms(call) if call.tolerance > 0 else None
    if terms is None or rounds_products(call.q):
        return None
    coefficients = [term.coefficients(wide_type(call.q)) for term in terms]

    lists: list[list[sparse.HeadTiles]] = [[] for _ in call.q]
    for b, heads in product(range(len(lists)), together(call)):
        made = [Head(call, terms, coefficients, b, h) for h in heads]
        rows = torch.arange(len(made[0].index), device=call.q.device)
        for head, needed in zip(made, needed_by(made, rows, call.tolerance, weighted), strict=True):
            lists[b].append(sparse.HeadTiles(head.rows.index, head.keys.index[:-1], needed[:, :-1]))
    return lists


@torch.no_grad()
def share(
    call: Call,
    terms: Sequence[Relative],
    coefficients: Sequence[Tensor],
    weighted: bool,
    sampled: tuple[int, int, int] | None = None,
) -> float:
    """The share of pairs of tiles that a call needs, for training if weighted. sampled: estimated as SAMPLED says."""
    visited, pairs, heads = 0, 0, prod(call.q.shape[:2])
    for head_index in sparse.spread(heads, sampled and min(-(-heads // sampled[0]), sampled[1])):
        head = Head(call, terms, coefficients, *divmod(head_index, call.q.shape[1]))
        rows = torch.tensor(sparse.spread(len(head.index), sampled and sampled[2]), device=call.q.device)
        needed = head.needed(rows, call.tolerance, weighted)
        visited, pairs = visited + int(needed.sum()), pairs + needed[:, 1:].numel()
    return visited / max(pairs, 1)


@torch.no_grad()
def looks_everywhere(call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor]) -> bool:
    """Whether the scores of most queries fall too little for a tile to lose its weight: then bounds are not worth it.

    A guess from the first sample that costs next to nothing: scores of PROBES queries of all heads at the middles of
    the tiles of keys. Dense attention is right in any case.
    """
    rows = sparse.spread(call.q.shape[2], PROBES)
    at, to = terms[0].r.r[:1, rows].detach().double(), tilings(terms[0].key_positions)[0].middle[None]
    if not to.numel():
        return True
    total = call.q.new_zeros((), dtype=wide_type(call.q))
    for term, c in zip(terms, coefficients, strict=True):
        c = c[:1].expand(-1, -1, call.q.shape[2], -1)[:, :, rows] * (call.scale if term.scaled else 1.0)
        total = total + contract(c, functions(at, to, term.exponents, total.dtype))  # (1, H, PROBES, T)
    falls = total.amax(-1) - total.amin(-1) + math.log(to.shape[1]) >= -math.log(call.tolerance)
    return float(falls.float().mean()) < 0.1


def expected(call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor], needed: float) -> float:
    """The time of tiles, of which this share is needed, in units of dense attention."""
    if not sparse.from_d(call):
        return sparse.cost(call, needed)
    chosen = sparse.spread(prod(call.q.shape[:2]), SAMPLED[1])
    heads = (Head(call, terms, coefficients, *divmod(i, call.q.shape[1])) for i in chosen)
    wide = sum(1 - float(head.fits.float().mean()) for head in heads) / len(chosen)  # the share that has no columns
    return sparse.cost(call, needed * (1 + sparse.FROM_D * wide))


def is_worth_it(
    call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor], costs: tuple[float, float] | None = None
) -> bool:
    """Whether tiles are expected to be faster than dense attention. costs: of a kernel that runs lists."""
    if looks_everywhere(call, terms, coefficients):
        return False
    needed = share(call, terms, coefficients, call.needs_grad, SAMPLED)
    return (expected(call, terms, coefficients, needed) if costs is None else sparse.cost(call, needed, costs)) < 1.0


def chosen(call: Call) -> tuple[tuple[Relative, ...], list[Tensor]] | None:
    """The terms of a call and their coefficients if tiles are expected to be faster than dense attention, else None."""
    terms = sparse.served(call)
    if terms is None:
        return None
    coefficients = [term.coefficients(wide_type(call.q)) for term in terms]
    return (terms, coefficients) if is_worth_it(call, terms, coefficients) else None


def describe(call: Call) -> str | None:
    """What `attention` would do, in words; None where it would do nothing."""
    if (made := chosen(call)) is None:
        return None
    needed = share(call, *made, call.needs_grad)
    fits = Head(call, *made, 0, 0).fits
    where = "columns centred in each tile" if fits.any() else "scores formed from D"
    where += ", or formed from D where those would lose digits" if fits.any() and not fits.all() else ""
    gain = f"about {expected(call, *made, needed):.2f} of the time of all tiles"
    return f"{call.names} over the {needed:.1%} of tiles that may have weight, {where}; expected: {gain}"


def attention(call: Call) -> Tensor | None:
    """Attention over the tiles that a call needs; None where dense attention is as fast or the bound does not apply."""
    if call.q.device.type != "cpu" or (made := chosen(call)) is None:
        return None
    out: Tensor = _Attention.apply(call, made[0], call.needs_grad, call.q, call.k, call.v, *made[1])
    return out
