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

import math
from collections.abc import Sequence
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
from .kernels import Call
from .scores import empty_heads
from .terms import Relative
from .tiling import TILE, tilings

# The share of tiles is estimated from one head of so many, at most so many heads, and tiles of queries of each.
SAMPLED = (4, 3, 4)
PROBES = 16  # queries that tell whether a form looks everywhere
COPY_BYTES = 2**20  # keys in the order of tiles, of heads that are bounded at one time

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(head: Head, needed: Tensor, room: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Attention of a head over the tiles it needs, written to out (n, w); the log-sum-exp of its rows to lse (Q, s)."""
    for rows, lists in head.groups(needed, head.numbers()):
        k, v, bias = head.gathered(rows, lists, room)
        y, log_sum = flash(head.wide_queries(rows)[:, None], k, v, attn_mask=bias, scale=head.scale)
        _scatter(out, head.rows.index[rows], y[:, 0, :, : out.shape[-1]])
        if lse is not None:
            lse[rows] = log_sum[:, 0]


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
    (n, size, h), w, e = (*dy.shape[:2], head.k.shape[-1]), head.v.shape[-1], len(head.columns.features)
    dy, y = (torch.nn.functional.pad(x, (0, head.width - w)) for x in (dy, y))
    dq, dc, dkv = dy.new_empty(n, size, h), torch.empty_like(head.c[0]), dy.new_zeros(*head.k.shape[:2], h + w)
    for rows, lists in head.groups(needed, 3 * head.numbers()):
        k, v, bias = head.gathered(rows, lists, room)
        args = (dy[rows][:, None], head.wide_queries(rows)[:, None], k, v, y[rows][:, None], lse[rows][:, None])
        gq, gk, gv = flash_backward(*args, 0.0, False, attn_mask=bias, scale=head.scale)
        dq[rows] = gq[:, 0, :, :h]
        dc[rows] = (gq[:, 0, :, None, h : h + e] @ head.columns.T[rows].mT)[..., 0, :]
        both = torch.cat([gk[:, 0, :, :h], gv[:, 0, :, :w]], -1)
        dkv.flatten(1).index_add_(0, lists.flatten(), both.view(lists.numel(), -1))
    return [dq, dkv[..., :h], dkv[..., h:], dc]


def _backward_from_d(head: Head, needed: Tensor, dy: Tensor) -> list[Tensor]:
    q, k, v, scale = head.order(head.queries), head.k, head.order_keys(head.v), head.scale
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


def _scatter(into: Tensor, index: Tensor, tiles: Tensor) -> None:
    """Writes tiles (tiles, s, ...) to the tokens that index (tiles, s) names."""
    real = index >= 0
    if real.all():
        into[index.flatten()] = tiles.flatten(0, 1).to(into.dtype)
    else:
        into[index[real]] = tiles[real].to(into.dtype)


def together(call: Call) -> list[range]:
    """Heads that are bounded at one time.

    They have to see the same keys, their bounds have to fit in BLOCK and their keys, which are copied, in COPY_BYTES.
    """
    copies = COPY_BYTES // (call.k.shape[2] * call.k.shape[3] * wide_type(call.q).itemsize)
    heads, count = call.q.shape[1], -(-call.k.shape[2] // TILE)
    many = count > 4 * sparse.COARSE  # few tiles of queries at a time, and of keys those of coarse tiles
    pairs = sparse.COARSE * TILE * count // 2 if many else call.q.shape[2] * count
    alike = call.mask is None or call.mask.shape[1] == 1
    count = max(1, min(heads, copies, BLOCK // max(pairs, 1))) if alike else 1
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
                lse = head.k.new_empty(head.index.shape) if weighted else None
                forward(head, needed, room, out[b, h], lse)
                visits += [(needed, lse)] if weighted else []
                del head
        ctx.call, ctx.terms, ctx.visits = call, terms, visits
        ctx.save_for_backward(out, *coefficients)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        out, *coefficients = ctx.saved_tensors
        call, visits = ctx.call, iter(ctx.visits)
        room = torch.empty(0, dtype=wide_type(call.q))
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
                    row = of_index(of_index(into, b), h)  # (n or 1, f)
                    if len(row) > 1:
                        row[head.rows.index[real]] += c[real].to(row.dtype)
                    else:
                        row += c[real].sum(0).to(row.dtype)
                del head, gq, gk, gv, gc, tiles, c
        return None, None, None, dq, dk, dv, *learned


@torch.no_grad()
def needed_tiles(call: Call, weighted: bool) -> list[list[sparse.HeadTiles]] | None:
    """The lists of tiles of a call, as [sample][head]; None if its terms have no bound or its tolerance is 0.

    For kernels of any device. Each query is in one tile. Run every tile of queries over the keys of the tiles that it
    needs: the result is attention, and no row loses more than `call.tolerance` of its weight. `queries.flatten()`
    without its -1 is an order that puts tiles side by side. Tokens without a position are in tiles of their own. Masks
    still apply, because a tile may hold keys that some queries must not see; a key in no tile is hidden from all.
    weighted: choose tiles for training. Backward must visit the same tiles.
    """
    terms = sparse.shared_terms(call) if call.tolerance > 0 else None
    if terms is None:
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


def is_worth_it(call: Call, terms: Sequence[Relative], coefficients: Sequence[Tensor]) -> bool:
    """Whether tiles are expected to be faster than dense attention."""
    if looks_everywhere(call, terms, coefficients):
        return False
    return sparse.cost(call, share(call, terms, coefficients, call.needs_grad, SAMPLED)) < 1.0


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
    where = "columns centred in each tile" if Head(call, *made, 0, 0).columns else "scores formed from D"
    gain = f"about {sparse.cost(call, needed):.2f} of the time of all tiles"
    return f"{call.names} over the {needed:.1%} of tiles that may have weight, {where}; expected: {gain}"


def attention(call: Call) -> Tensor | None:
    """Attention over the tiles that a call needs; None where dense attention is as fast or the bound does not apply."""
    if call.q.device.type != "cpu" or (made := chosen(call)) is None:
        return None
    out: Tensor = _Attention.apply(call, made[0], call.needs_grad, call.q, call.k, call.v, *made[1])
    return out
