"""Dense attention with any term in blocks of queries: exact, and memory that grows with N, not N squared.

The fused kernels use it for what they cannot fuse: bias terms without a separable form, and gradients,
where separable features lose the digits that this form keeps. B batch, H heads, N tokens, n query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .terms import Term

BLOCK_BYTES = 16 * 2**20  # one (B, H, n, N) block of scores; a handful are alive at a time


def blocks(q: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and query rows whose scores fit in BLOCK_BYTES."""
    b, h, n, _ = q.shape
    per_row = h * n * dtype.itemsize
    rows = max(1, min(n, BLOCK_BYTES // per_row))
    samples = max(1, min(b, BLOCK_BYTES // (per_row * n)))
    for i in range(0, b, samples):
        for j in range(0, n, rows):
            yield slice(i, i + samples), slice(j, j + rows)


def _weights(q: Tensor, k: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    """Attention weights (B, H, n, N) of the query rows that q and the terms hold."""
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    for term in terms:
        scores = scores.add_(term.scores(scores.dtype), alpha=scale if term.scaled else 1.0)
    if mask is not None:
        scores = scores.masked_fill_(~mask[:, None, None, :], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    return scores.softmax(-1).masked_fill_(top == -torch.inf, 0.0)


def _exact(dtype: torch.dtype, *tensors: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Key-side tensors in the type of the sums, with padding cleared."""
    out = [x.to(dtype) for x in tensors]
    return out if mask is None else [x.masked_fill(~mask[:, None, :, None], 0.0) for x in out]


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = _exact(dtype, k, v, mask=mask)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    for batch, rows in blocks(q, dtype):
        part = [term.take(batch, rows) for term in terms]
        seen = None if mask is None else mask[batch]
        weights = _weights(q[batch, :, rows].to(dtype), k[batch], part, seen, scale)
        out[batch, :, rows] = (weights @ v[batch]).to(q.dtype)
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
    k, v = _exact(dtype, k, v, mask=mask)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grads: list[dict[str, Tensor]] = [
        {name: torch.zeros_like(getattr(term, name), dtype=dtype) for name in names}
        for term, names in zip(terms, wanted, strict=True)
    ]
    for batch, rows in blocks(q, dtype):
        part = [term.take(batch, rows) for term in terms]
        seen = None if mask is None else mask[batch]
        queries, dy = q[batch, :, rows].to(dtype), dout[batch, :, rows].to(dtype)
        weights = _weights(queries, k[batch], part, seen, scale)
        dv[batch] += weights.transpose(-1, -2) @ dy
        ds = dy @ v[batch].transpose(-1, -2)  # gradient of the weights, then of the scores
        ds = torch.ops.aten._softmax_backward_data(ds, weights, -1, dtype)
        for term, grad in zip(part, grads, strict=True):
            values = term.gradients(ds) if grad else {}
            for name, whole in grad.items():
                if whole.ndim == 1:
                    whole += values[name]
                else:
                    (whole[batch] if whole.shape[0] > 1 else whole)[:, :, rows] += values[name]
        ds *= scale
        dq[batch, :, rows] = (ds @ k[batch]).to(q.dtype)
        dk[batch] += ds.transpose(-1, -2) @ queries
    for term, grad in zip(terms, grads, strict=True):
        if term.scaled:
            for value in grad.values():
                value *= scale
    return dq, dk.to(q.dtype), dv.to(q.dtype), grads
