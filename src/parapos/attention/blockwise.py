"""Attention with any term in blocks of queries: exact, and memory that grows with N, not N squared.

The scores of a block's terms are formed densely. On the CPU PyTorch's fused attention takes them as its mask;
elsewhere, and in the backward pass, so are the weights. B batch, H heads, N tokens, n query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .terms import Distance, Polynomial, Quadratic, Table, Term

BLOCK_BYTES = 8 * 2**20  # one (B, H, n, N) block of scores; a handful are alive at a time


def blocks(batch: int, heads: int, n: int, itemsize: int, share: int = 1) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and query rows whose scores fit in BLOCK_BYTES; all samples of some rows come in a row.

    Several whole samples only get a share of that: a backward pass, which goes over them more often, wants 2.
    """
    per_row = heads * n * itemsize
    count = -(-n // max(1, min(n, BLOCK_BYTES // per_row)))
    rows = -(-n // count)  # equal blocks
    samples = max(1, min(batch, BLOCK_BYTES // share // (per_row * n)))
    for j in range(0, n, rows):
        for i in range(0, batch, samples):
            yield slice(i, min(i + samples, batch)), slice(j, min(j + rows, n))


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


def _bias(
    terms: Sequence[Term], bases: Sequence[Tensor | None], mask: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Sum of the terms' scores, scaled as q.k is to be, with -inf for padding: (B or 1, H or 1, n, N)."""
    bias: Tensor | None = None
    for term, basis in zip(terms, bases, strict=True):
        more = term.scores(dtype, basis, scale if term.scaled else 1.0)
        bias = more if bias is None else bias.add_(more) if bias.shape == more.shape else bias + more
    assert bias is not None
    return bias if mask is None else torch.where(mask[:, None, None, :], bias, -torch.inf)


def empty(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, N, width), laid out as (B, N, H, width): the next to come are reshapes to (B, N, H width), now free."""
    b, h, n, _ = like.shape
    return like.new_empty((b, n, h, width), dtype=dtype).transpose(1, 2)


def _merged(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, n, w) -> (BH, n, w): one copy if strides ask for it, where each product to come would make its own."""
    return x.to(dtype).flatten(0, 1)


def _weights(q: Tensor, k: Tensor, bias: Tensor, heads: int, scale: float, some: bool) -> Tensor:
    """Attention weights (BH, n, N) of some query rows. `some`: every row is known to see a key."""
    if bias.shape[0] * bias.shape[1] == q.shape[0]:
        scores = torch.baddbmm(bias.flatten(0, 1), q, k.transpose(1, 2), alpha=scale)
    else:  # a bias that samples or heads share
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
        scores.unflatten(0, (-1, heads)).add_(bias)
    none = None if some else scores.amax(-1, keepdim=True) == -torch.inf
    weights = torch.softmax(scores, -1, out=scores)
    return weights if none is None else weights.masked_fill_(none, 0.0)


def _product(out: Tensor, a: Tensor, b: Tensor, factor: float, onto: bool) -> None:
    """out (B, H, n, w) = factor a b, for merged a and b; added to what is there if `onto`."""
    product = torch.bmm(a, b).view(out.shape)
    if onto:
        out.add_(product, alpha=factor)
    else:
        torch.mul(product, factor, out=out)


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


def constant_term(term: Term) -> bool:
    """Whether a term's scores are the same for all samples."""
    return isinstance(term, Table | Distance) and (term.bias if isinstance(term, Table) else term.r).shape[0] == 1


def _some(terms: Sequence[Term], mask: Tensor | None) -> bool:
    """Whether every row is known to see a key."""
    return mask is None and not any(isinstance(term, Table) for term in terms)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    fused = q.device.type == "cpu"
    batch, heads, n, _ = q.shape
    width = v.shape[-1]
    k, v = _clear(mask, k, v)
    if fused and q.shape[-1] != width:  # unequal widths lose the fused path
        most = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    some = _some(terms, mask)
    constant = fused and mask is None and all(constant_term(term) for term in terms)
    bases, out = Bases(terms, dtype), None
    parts = list(blocks(1 if constant else batch, heads, n, dtype.itemsize))
    single = len(parts) == 1
    if not fused and parts[0][1].stop < n:
        k, v = (x.to(dtype).contiguous() for x in (k, v))
    for samples, rows in parts:
        if constant:
            samples = slice(0, batch)
        part = terms if single else [term.take(samples, rows) for term in terms]
        bias = _bias(part, bases(part, rows), None if mask is None else mask[samples], scale, dtype)
        if fused:
            block = _fused(q[samples, :, rows], k[samples], v[samples], bias, scale, some)[..., :width]
        else:
            queries, keys, values = (_merged(x[samples], dtype) for x in (q[:, :, rows], k, v))
            block = torch.bmm(_weights(queries, keys, bias, heads, scale, some), values).unflatten(0, (-1, heads))
        if single and block.dtype == q.dtype and block.transpose(1, 2).is_contiguous():
            return block
        out = empty(q, width) if out is None else out
        out[samples, :, rows] = block
        del bias, block  # before the next are made
    assert out is not None
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
    batch, heads, n, _ = q.shape
    k, v = _clear(mask, k, v)
    dq, dk, dv = empty(q, q.shape[-1]), *(empty(x, x.shape[-1], dtype) for x in (k, v))
    bases = Bases(terms, dtype)
    parts = list(blocks(batch, heads, n, dtype.itemsize, share=2))
    single = len(parts) == 1
    if parts[0][1].stop < n:  # else each block of rows would copy them again
        k, v = (x.to(dtype).contiguous() for x in (k, v))
    grads: list[dict[str, Tensor]] = [
        {} if single else {name: torch.zeros_like(getattr(term, name), dtype=dtype) for name in names}
        for term, names in zip(terms, wanted, strict=True)
    ]
    for samples, rows in parts:
        part = terms if single else [term.take(samples, rows) for term in terms]
        queries, dy, keys, values = (_merged(x[samples], dtype) for x in (q[:, :, rows], dout[:, :, rows], k, v))
        known = bases(part, rows)
        bias = _bias(part, known, None if mask is None else mask[samples], scale, dtype)
        weights = _weights(queries, keys, bias, heads, scale, _some(terms, mask))
        del bias
        _product(dv[samples], weights.transpose(1, 2), dy, 1.0, rows.start > 0)
        ds = torch.bmm(dy, values.transpose(1, 2))  # gradient of the weights, then of the scores
        ds = torch.ops.aten._softmax_backward_data(ds, weights, -1, dtype)
        del weights
        _product(dq[samples, :, rows], ds, keys, scale, False)
        _product(dk[samples], ds.transpose(1, 2), queries, scale, rows.start > 0)
        for term, basis, grad, names in zip(part, known, grads, wanted, strict=True):
            found = term.gradients(ds.unflatten(0, (-1, heads)), basis) if names else {}
            if single:
                grad.update({name: found[name] for name in names})
            for name, whole in () if single else grad.items():
                if whole.ndim == 1:
                    whole += found[name]
                else:
                    (whole[samples] if whole.shape[0] > 1 else whole)[:, :, rows] += found[name]
        del ds, queries, dy, keys, values
    for term, grad in zip(terms, grads, strict=True):
        for value in grad.values() if term.scaled else ():
            value *= scale
    return dq, dk.to(q.dtype), dv.to(q.dtype), grads
