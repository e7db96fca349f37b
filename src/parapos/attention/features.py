"""The fused kernel: PyTorch's scaled dot product attention on queries and keys widened by score columns.

Gradients of M and g would lose digits on their way back through the columns, so the backward pass recomputes the
weights in blocks and takes the moments of D that those gradients are in float64. Terms without a separable form go
blockwise altogether.
B batch, H heads, N tokens, h query/key size, w value size.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blockwise, reference
from .basis import no_autocast, once_only
from .columns import columns, moment_basis, moment_gradients, whole
from .terms import Distance, Polynomial, Quadratic, Table, Term
from .windows import ALIGN, windows

CHUNK_BYTES = 8 * 2**20  # widened q, k, v alive at one time
SMALL = 512  # up to so many tokens it costs less to form the scores of a term than to widen heads
QUERIES = 512  # rows of queries that share a range of keys; ranges pay from four such blocks on
HIDDEN = -1e30  # what a hidden key holds in the column that hides it, in float32
# Errors of a logit that columns may bring, each below what rounding q and k brings in that type; else blockwise.
ERRORS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 0.05}


def separable(terms: Sequence[Term], q: Tensor, scale: float = 1.0) -> bool:
    """Whether these terms become columns. Polynomials do not: no split saves their digits. Nor does a scale hide keys
    that is not positive, nor have GPUs fused attention in float64."""
    fused = not (q.is_cuda and q.dtype == torch.float64)
    return len(terms) == 1 and isinstance(terms[0], Quadratic) and q.shape[2] > SMALL and scale > 1e-20 and fused


def widths(q: Tensor, v: Tensor, term: Quadratic, whole: bool = False) -> tuple[int, int]:
    """The most columns that a separable term may need, and the width of the heads that carry them.

    whole: positions are whole numbers.
    """
    p = term.r.shape[-1]
    full = term.M is not None and term.M.ndim == 5
    extra = p * (p + 1) // 2 + p if full else p + 1
    if q.dtype == torch.float32:
        extra = (2 if whole else 3) * extra + 2
    elif q.dtype != torch.float64:
        extra *= 3
    extra += 0 if term.unplaced is False else 1 if q.dtype == torch.float64 else 2
    return extra, _rounded(extra, q, v)


def _rounded(extra: int, q: Tensor, v: Tensor) -> int:
    """Head width for so many extra columns: fused kernels like multiples of 8, CPU ones of 16."""
    unit = 16 if q.device.type == "cpu" else 8
    return -(-max(extra + q.shape[-1], v.shape[-1]) // unit) * unit


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Fused attention without terms. Widths are made equal first: unequal ones silently lose the fused path."""
    width = max(q.shape[-1], v.shape[-1])
    if mask is not None:  # padding may hold anything, NaN too
        k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    a, b, c = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    return _fused(a, b, c, mask, scale)[..., : v.shape[-1]]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's fused attention for equal widths; samples without any key give zeros."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    some = mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=(mask | ~some)[:, None, None, :], scale=scale)
    return torch.where(some[:, :, None, None], out, 0.0)


def _part(term: Quadratic, samples: slice, heads: slice) -> Quadratic:
    """The term for some samples and some heads."""
    learned = {name: x[samples, heads] for name in term.learned if (x := getattr(term, name)) is not None}
    return replace(term, r=term.r[samples] if term.r.shape[0] > 1 else term.r, **learned)


def _thin(keys: int) -> bool:
    """The CPU kernel works in blocks of 512 keys and 32, 64 or 256 queries. A thin last block is multiplied by code
    that sums in another order, which is not exact in float32."""
    return 0 < keys % 512 < 12


def _windows(
    q: Tensor, k: Tensor, term: Term, mask: Tensor | None, scale: float, blocks: Sequence[slice]
) -> list[list[tuple[int, int]]] | None:
    """`windows`, where skipping keys may pay for finding out which."""
    return (
        windows(q, k, term, mask, scale, blocks) if isinstance(term, Quadratic) and q.shape[2] > 4 * QUERIES else None
    )


def _parts(q: Tensor, rows: int, width: int) -> list[tuple[slice, slice]]:
    """Samples and heads whose widened q, k and v fit in CHUNK_BYTES, or one head of one sample."""
    batch, heads = q.shape[:2]
    per_head = 3 * rows * width * q.element_size()
    few_heads = max(1, min(heads, CHUNK_BYTES // per_head))
    few = max(1, min(batch, CHUNK_BYTES // (per_head * max(1, heads))))
    starts = product(range(0, batch, few), range(0, heads, few_heads))
    return [(slice(i, min(i + few, batch)), slice(j, min(j + few_heads, heads))) for i, j in starts]


def exact(q: Tensor, v: Tensor, term: Quadratic, mask: Tensor | None, scale: float, dtype: torch.dtype) -> bool:
    """Whether columns in this dtype hold these numbers well enough, as each pass finds when it makes them."""
    even = whole(term.r, mask)
    parts = _parts(q, q.shape[2], widths(q, v, term, even)[1])
    seen = [None if mask is None else mask[samples] for samples, _ in parts]
    errors = (columns(_part(term, *part), m, dtype, even)[2] for part, m in zip(parts, seen, strict=True))
    return all(error * scale <= ERRORS[dtype] for error in errors)


def _separable(q: Tensor, k: Tensor, v: Tensor, term: Quadratic, mask: Tensor | None, scale: float) -> Tensor:
    """Widen and attend, a few samples or heads at a time, in buffers that are made once."""
    n, h = q.shape[2:]
    w = v.shape[-1]
    rows = n
    while q.dtype == torch.float32 and not q.is_cuda and (_thin(rows) or 0 < rows % 32 < 4):
        rows += 1  # hidden tokens
    hiding = q.dtype == torch.float32 and (rows > n or mask is not None)  # by a column, which costs less than a mask
    starts = range(0, max(1, rows - QUERIES // 2), QUERIES)
    blocks = [slice(x, rows if x == starts[-1] else x + QUERIES) for x in starts]
    even = whole(term.r, mask)  # for all parts, because they share the buffers
    _, width = widths(q, v, term, even)
    parts = _parts(q, rows, width)
    few, few_heads = (x.stop - x.start for x in parts[0])
    buffers = q.new_zeros((3, few, few_heads, rows, width))
    out = blockwise.empty(q, w)
    for part in parts:
        i, j = part[0].start, part[1].start
        seen = None if mask is None else mask[part[0]]
        some = _part(term, *part)
        query, key, error = columns(some, seen, q.dtype, even)
        if not error * scale <= ERRORS[q.dtype]:
            del buffers, out, query, key
            return blockwise.forward(q, k, v, [term], mask, scale)
        extra = query.shape[-1] + hiding
        # float32 is exact if the columns are summed first; half precision rounds less if they come last.
        half = q.dtype in (torch.float16, torch.bfloat16)
        first = slice(h, h + extra) if half else slice(int(hiding), extra)
        second = slice(0, h) if half else slice(extra, extra + h)
        a, b, c = buffers[:, : part[0].stop - i, : part[1].stop - j]
        a[..., :n, first] = query
        a[..., :n, second] = q[part]
        b[..., :n, first] = key[:, None]
        b[..., :n, second] = k[part]
        c[..., :n, :w] = v[part]
        del query, key
        if seen is not None:
            for x in (b, c):
                x[..., :n, :].masked_fill_(~seen[:, None, :, None], 0.0)
        if hiding:
            a[..., 0] = 1.0
            b[..., 0] = 0.0
            b[..., n:, 0] = HIDDEN
            if seen is not None:
                b[..., :n, 0].masked_fill_(~seen[:, None, :], HIDDEN)
        ranges = _windows(q[part], k[part], some, seen, scale, blocks)
        if ranges is None:
            out[part] = _fused(a, b, c, None if hiding else seen, scale)[..., :n, :w]
            continue
        for index, queries in enumerate(blocks):
            start, end = min(head[index][0] for head in ranges), min(max(head[index][1] for head in ranges), rows)
            keys = slice(max(0, start - ALIGN) if _thin(end - start) else start, end)
            visible = None if hiding or seen is None else seen[:, keys]
            block = _fused(a[:, :, queries], b[:, :, keys], c[:, :, keys], visible, scale)
            out[part][:, :, queries] = block[:, :, : n - queries.start, :w]
    return out


def _separable_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, term: Quadratic, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]] | None:
    """Gradients of q, k, v and the term's tensors, in float32 at least; None where columns are not exact enough."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, n, _ = q.shape
    dq, dk, dv = (blockwise.empty(x, x.shape[-1]) for x in (q, k, v))
    grads = {name: torch.empty_like(x) for name in term.learned if (x := getattr(term, name)) is not None}
    grads = {name: x.contiguous() for name, x in grads.items()}
    size = n * n * dtype.itemsize
    few_heads = max(1, min(heads, blockwise.BLOCK_BYTES // size))
    few = max(1, min(batch, blockwise.BLOCK_BYTES // (size * heads)))
    count = -(-n * few_heads * n * dtype.itemsize // max(blockwise.BLOCK_BYTES, 16 * n * dtype.itemsize))
    rows_at_once = -(-n // count)  # equal blocks: a thin last one would not be exact
    for i in range(0, batch, few):
        samples = slice(i, min(i + few, batch))
        seen = None if mask is None else mask[samples]
        hidden = None if seen is None else ~seen[:, None, None, :]
        for j in range(0, heads, few_heads):
            part = (samples, slice(j, min(j + few_heads, heads)))
            some = _part(term, *part)
            query, key, error = columns(some, seen, dtype)
            if not error * scale <= ERRORS[dtype]:
                return None
            keys, values = (x[part].to(dtype) for x in (k, v))
            if hidden is not None:
                keys, values = (x.masked_fill(hidden.transpose(-1, -2), 0.0) for x in (keys, values))
            wide_k = torch.cat([key[:, None].expand(*keys.shape[:2], -1, -1), keys], dim=-1).transpose(-1, -2)
            sum_k, sum_v = torch.zeros_like(keys), torch.zeros_like(values)
            monomials, moments = moment_basis(some.r, seen), []
            blocks = [slice(x, min(x + rows_at_once, n)) for x in range(0, n, rows_at_once)]
            ranges = _windows(q[part], keys, some, seen, scale, blocks) or [[(0, n)] * len(blocks)]
            for index, rows in enumerate(blocks):
                near = slice(min(head[index][0] for head in ranges), min(max(head[index][1] for head in ranges), n))
                queries, dy = (x[part][:, :, rows].to(dtype) for x in (q, dout))
                scores = (torch.cat([query[:, :, rows], queries], dim=-1) @ wide_k[..., near]).mul_(scale)
                if hidden is not None:
                    scores.masked_fill_(hidden[..., near], -torch.inf)
                weights = scores.softmax(-1)
                del scores
                if seen is not None:  # a sample without keys
                    weights.masked_fill_(~seen.any(-1)[:, None, None, None], 0.0)
                sum_v[:, :, near] += weights.transpose(-1, -2) @ dy
                dweights = dy @ values[:, :, near].transpose(-1, -2)
                ds = torch.ops.aten._softmax_backward_data(dweights, weights, -1, dtype)
                del weights, dweights
                moments.append(ds.double() @ monomials[:, :, near])
                dq[part][:, :, rows] = (ds @ keys[:, :, near]).mul_(scale)
                sum_k[:, :, near] += ds.transpose(-1, -2) @ queries
            dk[part], dv[part] = sum_k.mul_(scale), sum_v
            for name, value in moment_gradients(some, seen, torch.cat(moments, dim=2) * scale).items():
                grads[name][part] = value.to(grads[name].dtype)
    return dq, dk, dv, grads


# The kernel is a custom operator with a backward of its own, so it compiles and exports as one node.

_TERMS: dict[str, Any] = {t.__name__: t for t in (Quadratic, Polynomial, Distance, Table)}


def _pack(terms: Sequence[Term]) -> tuple[list[Tensor], str]:
    """Terms as a flat list of tensors and a text: where each belongs, which want a gradient, and the other fields."""
    tensors: list[Tensor] = []
    entries = []
    for term in terms:
        slots, wanted, rest = [], [], []
        for field in fields(term):
            value = getattr(term, field.name)
            if isinstance(value, Tensor):
                tensors.append(value)
                slots.append(field.name)
                if field.name in term.learned and value.requires_grad:
                    wanted.append(field.name)
            else:
                rest.append(f"{field.name}={value}")
        entries.append("|".join([type(term).__name__, " ".join(slots), " ".join(wanted), ";".join(rest)]))
    return tensors, "&".join(entries)


@cache
def parse(spec: str) -> list[tuple[str, list[str], list[str], dict[str, Any]]]:
    """Per term: its name, its tensors' fields, those that want a gradient, and its other fields."""
    parsed = []
    for entry in spec.split("&"):
        name, slots, wanted, rest = entry.split("|")
        values = {k: literal_eval(v) for k, v in (pair.split("=") for pair in rest.split(";") if pair)}
        parsed.append((name, slots.split(), wanted.split(), values))
    return parsed


def _unpack(tensors: Sequence[Tensor], spec: str) -> list[Term]:
    flat = iter(tensors)
    return [_TERMS[name](**values, **{slot: next(flat) for slot in slots}) for name, slots, _, values in parse(spec)]


@torch.library.custom_op("parapos::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, tensors: list[Tensor], spec: str
) -> Tensor:
    terms = _unpack(tensors, spec)
    with no_autocast(q.device):
        if separable(terms, q, scale):
            assert isinstance(terms[0], Quadratic)
            return _separable(q, k, v, terms[0], mask, scale)
        return blockwise.forward(q, k, v, terms, mask, scale)


@_attention.register_fake
def _(q, k, v, mask, scale, tensors, spec):  # type: ignore[no-untyped-def]
    return blockwise.empty(q, v.shape[-1])


@torch.library.custom_op("parapos::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, tensors: list[Tensor], spec: str
) -> list[Tensor]:
    """Gradients of q, k, v and of each tensor; an empty tensor stands for none."""
    wanted = [entry[2] for entry in parse(spec)]
    terms = _unpack(tensors, spec)
    found = None
    with no_autocast(q.device):
        if separable(terms, q, scale):
            assert isinstance(terms[0], Quadratic)
            found = _separable_backward(dout, q, k, v, terms[0], mask, scale)
        if found is None:
            dq, dk, dv, grads = blockwise.backward(dout, q, k, v, terms, mask, scale, wanted)
    if found is not None:
        dq, dk, dv, grads = *found[:3], [{name: x for name, x in found[3].items() if name in wanted[0]}]
    out: list[Tensor] = []
    flat = iter(tensors)
    for entry, grad in zip(parse(spec), grads, strict=True):
        for slot in entry[1]:
            value = next(flat)
            out.append(grad[slot].to(value.dtype) if slot in grad else value.new_empty(0))
    return [dq, dk, dv, *(x.contiguous() for x in out)]


@_attention_backward.register_fake
def _(dout, q, k, v, mask, scale, tensors, spec):  # type: ignore[no-untyped-def]
    out, flat = [blockwise.empty(x, x.shape[-1]) for x in (q, k, v)], iter(tensors)
    for _, slots, wanted, _ in parse(spec):
        for slot in slots:
            value = next(flat)
            out.append(value.new_empty(value.shape if slot in wanted else 0))
    return out


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, mask, scale, tensors, spec = inputs
    ctx.scale, ctx.spec, ctx.masked = scale, spec, mask is not None
    ctx.save_for_backward(q, k, v, *([mask] if mask is not None else []), *tensors)


def _backward(ctx, dout):  # type: ignore[no-untyped-def]
    q, k, v, *rest = ctx.saved_tensors
    mask, tensors = (rest[0], rest[1:]) if ctx.masked else (None, rest)
    dq, dk, dv, *grads = _attention_backward(dout, q, k, v, mask, ctx.scale, list(tensors), ctx.spec)
    return (
        dq,
        dk,
        dv,
        None,
        None,
        [g if g.shape == t.shape else None for g, t in zip(grads, tensors, strict=True)],
        None,
    )


_attention.register_autograd(_backward, setup_context=_setup)
_attention_backward.register_autograd(once_only)


def attention(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    """As `reference.attention`, without the weights."""
    # Fused attention wants neighbours in a head to be neighbours in memory; else it silently forms all scores.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if not terms:
        return plain(q, k, v, mask, scale)
    if not q.shape[0] * q.shape[1] * q.shape[2]:  # no samples, or no tokens
        return reference.attention(q, k, v, terms, mask, scale)[0]
    tensors, spec = _pack(terms)
    return _attention(q, k, v, mask, scale, tensors, spec)
