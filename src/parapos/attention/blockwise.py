"""Attention with any term in blocks of queries: exact, and memory that grows with N, not N squared.

The scores of a block's terms are formed densely. On the CPU PyTorch's fused attention takes them as its mask;
elsewhere, and in the backward pass, so are the weights. B batch, H heads, N tokens, n query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .terms import Distance, Polynomial, Quadratic, Table, Term

BLOCK_BYTES = 8 * 2**20  # one (B, H, n, N) block of scores; a handful are alive at a time


def blocks(batch: int, heads: int, n: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and query rows whose scores fit in BLOCK_BYTES; all samples of some rows come in a row."""
    per_row = heads * n * itemsize
    count = -(-n // max(1, min(n, BLOCK_BYTES // per_row)))
    rows = -(-n // count)  # equal blocks
    samples = max(1, min(batch, BLOCK_BYTES // (per_row * n)))
    for j in range(0, n, rows):
        for i in range(0, batch, samples):
            yield slice(i, min(i + samples, batch)), slice(j, min(j + rows, n))


def _scaled(terms: Sequence[Term], scale: float) -> list[Term]:
    """Terms to be added after scaling: those that share the factor of q.k take it into their coefficients."""
    out = []
    for term in terms:
        values = {name: getattr(term, name) for name in term.learned} if term.scaled else {}
        wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in values.items() if x is not None}
        out.append(replace(term, **{name: x * scale for name, x in wide.items()}))
    return out


# The last basis functions that served all queries and samples: what they are, the bits of their positions, and they.
# Layers that share positions make them once. Bits, because compilers write to tensors without telling.
_last: tuple[object, Tensor, Tensor] | None = None


def _basis(term: Quadratic | Polynomial | Distance, rows: slice, dtype: torch.dtype) -> Tensor:
    """A term's basis functions for a block of queries, on the CPU not made anew if they are the last ones."""
    global _last
    r = term.r
    if r.shape[0] > 1 or r.device.type != "cpu" or (rows.start, rows.stop) != (0, r.shape[1]):
        return term.basis(dtype)
    shapes = [None if x is None else x.shape[3:] for name in term.learned for x in [getattr(term, name)]]
    key, bits, last = (type(term), getattr(term, "exponents", shapes), dtype), r.contiguous().view(torch.int32), _last
    if last is not None and last[0] == key and torch.equal(last[1], bits):
        return last[2]
    basis = term.basis(dtype)
    if basis.nbytes <= BLOCK_BYTES and not torch.is_inference_mode_enabled():
        _last = key, bits.clone(), basis
    return basis


class Bases:
    """Basis functions of the terms for a block of queries, kept while they are the same for all samples."""

    def __init__(self, terms: Sequence[Term], dtype: torch.dtype) -> None:
        self.dtype, self.rows = dtype, slice(0)
        self.shared = all(isinstance(term, Table) or term.r.shape[0] == 1 for term in terms)

    def __call__(self, terms: Sequence[Term], rows: slice) -> list[Tensor | None]:
        if not self.shared or rows != self.rows:
            self.found = [None if isinstance(term, Table) else _basis(term, rows, self.dtype) for term in terms]
            self.rows = rows
        return self.found


def _bias(terms: Sequence[Term], bases: Sequence[Tensor | None], mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum of the terms' scores with -inf for padding: (B or 1, H or 1, n, N)."""
    bias = terms[0].scores(dtype, bases[0])
    for term, basis in zip(terms[1:], bases[1:], strict=True):
        bias = bias + term.scores(dtype, basis)
    return bias if mask is None else torch.where(mask[:, None, None, :], bias, -torch.inf)


def empty(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, N, width), laid out as (B, N, H, width): the next to come are reshapes to (B, N, H width), now free."""
    b, h, n, _ = like.shape
    return like.new_empty((b, n, h, width), dtype=dtype).transpose(1, 2)


def _weights(q: Tensor, k: Tensor, bias: Tensor, some: bool) -> Tensor:
    """Attention weights (B, H, n, N) of some query rows, which are scaled. `some`: every row is known to see a key."""
    scores = (q @ k.transpose(-1, -2)).add_(bias)
    none = None if some else scores.amax(-1, keepdim=True) == -torch.inf
    weights = torch.softmax(scores, -1, out=scores)
    return weights if none is None else weights.masked_fill_(none, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, some: bool) -> Tensor:
    """PyTorch's fused attention with a mask of numbers."""
    none = None
    if not some:
        none = bias.amax(-1, keepdim=True) == -torch.inf
        bias = bias.masked_fill(none, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out if none is None else out.masked_fill_(none, 0.0)


def _clear(mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Key-side tensors with padding cleared: it may hold anything, NaN too."""
    return list(tensors) if mask is None else [x.masked_fill(~mask[:, None, :, None], 0.0) for x in tensors]


def _constant(term: Term) -> bool:
    """Whether a term's scores are the same for all samples."""
    return isinstance(term, Table | Distance) and (term.bias if isinstance(term, Table) else term.r).shape[0] == 1


def _some(terms: Sequence[Term], mask: Tensor | None) -> bool:
    """Whether every row is known to see a key."""
    return mask is None and not any(isinstance(term, Table) for term in terms)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    fused = q.device.type == "cpu"
    width = v.shape[-1]
    k, v = _clear(mask, k, v)
    if not fused:
        k, v = k.to(dtype), v.to(dtype)
    elif q.shape[-1] != width:  # unequal widths lose the fused path
        most = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    terms = _scaled(terms, scale)
    out = empty(q, width)
    batch, heads, n, _ = q.shape
    some = _some(terms, mask)
    constant = fused and mask is None and all(_constant(term) for term in terms)
    bases = Bases(terms, dtype)
    for samples, rows in blocks(1 if constant else batch, heads, n, dtype.itemsize):
        if constant:
            samples = slice(0, batch)
        part = [term.take(samples, rows) for term in terms]
        bias = _bias(part, bases(part, rows), None if mask is None else mask[samples], dtype)
        if fused:
            out[samples, :, rows] = _fused(q[samples, :, rows], k[samples], v[samples], bias, scale, some)[..., :width]
        else:
            weights = _weights(q[samples, :, rows].to(dtype) * scale, k[samples], bias, some)
            out[samples, :, rows] = (weights @ v[samples]).to(q.dtype)
    return out


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Term],
    mask: Tensor | None,
    scale: float,
    wanted: Sequence[Sequence[str]],
) -> tuple[Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
    """Gradients of q, k, v and of each term's wanted tensors, from weights computed anew per block."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Every tensor meets two products, each of which would copy what is not contiguous.
    k, v = _clear(mask, *(x.to(dtype).contiguous() for x in (k, v)))
    dq, dk, dv = empty(q, q.shape[-1]), *(empty(x, x.shape[-1], dtype).zero_() for x in (k, v))
    grads: list[dict[str, Tensor]] = [
        {name: torch.zeros_like(getattr(term, name), dtype=dtype) for name in names}
        for term, names in zip(terms, wanted, strict=True)
    ]
    batch, heads, n, _ = q.shape
    scaled, bases = _scaled(terms, scale), Bases(terms, dtype)
    for samples, rows in blocks(batch, heads, n, dtype.itemsize):
        part = [term.take(samples, rows) for term in scaled]
        queries = (q[samples, :, rows].to(dtype) * scale).contiguous()
        dy = dout[samples, :, rows].to(dtype).contiguous()
        known = bases(part, rows)
        bias = _bias(part, known, None if mask is None else mask[samples], dtype)
        weights = _weights(queries, k[samples], bias, _some(terms, mask))
        dv[samples] += weights.transpose(-1, -2) @ dy
        ds = dy @ v[samples].transpose(-1, -2)  # gradient of the weights, then of the scores
        ds = torch.ops.aten._softmax_backward_data(ds, weights, -1, dtype)
        for term, basis, grad in zip(part, known, grads, strict=True):
            values = term.gradients(ds, basis) if grad else {}
            for name, whole in grad.items():
                if whole.ndim == 1:
                    whole += values[name]
                else:
                    (whole[samples] if whole.shape[0] > 1 else whole)[:, :, rows] += values[name]
        dq[samples, :, rows] = (ds @ k[samples]).mul_(scale)
        dk[samples] += ds.transpose(-1, -2) @ queries
    for term, grad in zip(terms, grads, strict=True):
        if term.scaled:
            for value in grad.values():
                value *= scale
    return dq, dk.to(q.dtype), dv.to(q.dtype), grads
