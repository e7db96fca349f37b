"""Attention with any score terms, formed from D in blocks of queries: exact, and memory that grows with N alone.

The terms of a block are summed densely, and PyTorch's fused attention adds them to its scores. The backward pass forms
the weights of a block anew. B batch, H heads, n queries, N keys, f functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..relative import Exponents, contract, functions, project
from .terms import Relative, Table, Term

BLOCK_BYTES = 8 * 2**20  # scores formed from D at one time; a handful of such blocks are alive


def empty_heads(like: Tensor, width: int | None = None) -> Tensor:
    """Room for (B, H, N, width), laid out (B, N, H, width) as the projection that follows wants it."""
    b, h, n, size = like.shape
    return like.new_empty((b, n, h, size if width is None else width)).transpose(1, 2)


def cut(x: Tensor, samples: slice = slice(None), heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
    """A part of x (B or 1, H or 1, n or 1, ...), in which what is shared stays whole."""
    x = x[samples] if x.shape[0] > 1 else x
    x = x[:, heads] if x.shape[1] > 1 else x
    return x[:, :, rows] if x.shape[2] > 1 else x


def pick(chosen: Tensor | None, *tensors: Any) -> Any:
    """Tensors (B or 1, ...) of the chosen samples, (B,) boolean or None for all; what samples share stays."""
    return [x if chosen is None or x is None or len(x) == 1 else x[chosen] for x in tensors]


class Scores(NamedTuple):
    """All terms of a call as numbers and tensors, which is what an operator takes.

    Of the relative terms: exponents (all in a row) and factors, coefficients, positions of queries and keys, and
    functions of D where those are kept for all layers (`bases`). Of the others: tables and their weights.
    """

    exponents: list[int]
    factors: list[float]
    weights: list[float]
    coefficients: list[Tensor]
    queries: list[Tensor]
    keys: list[Tensor]
    tables: list[Tensor]
    bases: list[Tensor]

    @classmethod
    def of(cls, terms: Sequence[Term], scale: float, dtype: torch.dtype, keep: bool) -> Scores:
        relative = [term for term in terms if isinstance(term, Relative)]
        tables = [term for term in terms if isinstance(term, Table)]
        if keep and not torch.compiler.is_compiling():
            shared = all(len(x.r) == 1 for t in relative for x in (t.r, t.key_positions))
            pairs = (t.r.r.shape[1] * t.key_positions.r.shape[1] * len(t.exponents) for t in relative)
            keep = shared and sum(pairs) * dtype.itemsize <= BLOCK_BYTES
        return cls(
            [power for term in relative for power in chain.from_iterable(term.exponents)],
            [scale if term.scaled else 1.0 for term in relative],
            [table.weight for table in tables],
            [term.coefficients(dtype) for term in relative],
            [term.r.r for term in relative],
            [term.key_positions.r for term in relative],
            [table.bias for table in tables],
            [t.r.once(("basis", t.exponents, t.keys, dtype), partial(t.basis, dtype)) for t in relative if keep],
        )

    def pick(self, chosen: Tensor | None) -> Scores:
        """The terms of the chosen samples."""
        return Scores(*self[:3], *(pick(chosen, *tensors) for tensors in self[3:]))

    def exponents_of(self, index: int) -> Exponents:
        """The exponents of a relative term."""
        p = self.queries[index].shape[-1]  # all terms have one
        start, count = sum(c.shape[-1] for c in self.coefficients[:index]), self.coefficients[index].shape[-1]
        return tuple(tuple(self.exponents[i * p : (i + 1) * p]) for i in range(start, start + count))

    def basis(self, samples: slice, rows: slice, dtype: torch.dtype) -> list[Tensor]:
        """The relative terms' functions of D for some queries: (B or 1, n, f, N) each."""
        if self.bases:
            return [x[:, rows] for x in self.bases]
        found = []
        for index, (at, to) in enumerate(zip(self.queries, self.keys, strict=True)):
            at, to = (x[samples] if x.shape[0] > 1 else x for x in (at, to))
            found.append(functions(at[:, rows], to, self.exponents_of(index), dtype))
        return found

    def block(
        self, basis: Sequence[Tensor], mask: Tensor | None, samples: slice, rows: slice, dtype: torch.dtype
    ) -> Tensor:
        """All terms of a block of scores, with -inf where the mask hides a key: (B or 1, H or 1, n, N) in `dtype`."""
        bias: Tensor | None = None
        for c, f, factor in zip(self.coefficients, basis, self.factors, strict=True):
            more = contract(cut(c, samples, rows=rows) * factor, f)
            bias = more if bias is None else bias + more
        for table, weight in zip(self.tables, self.weights, strict=True):
            more = cut(table, samples, rows=rows).to(dtype) * weight
            bias = more if bias is None else bias + more
        assert bias is not None
        return bias if mask is None else bias.masked_fill(~cut(mask, samples, rows=rows), -torch.inf)


def walk(
    q: Tensor, k: Tensor, s: Scores, mask: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, list[Tensor], Tensor]]:
    """Blocks of scores that fit in BLOCK_BYTES: samples, queries, functions of D, and the bias."""
    b, h, n, _ = q.shape
    per_row = h * k.shape[2] * dtype.itemsize
    count = -(-n // -(-n // max(1, min(n, BLOCK_BYTES // per_row))))  # blocks of equal size
    most = max(1, min(b, BLOCK_BYTES // (per_row * n)))
    shared = all(len(x) == 1 for x in (*s.queries, *s.keys))  # the functions of D, by all samples
    for j in range(0, n, count):
        rows, basis = slice(j, min(j + count, n)), []
        for i in range(0, b, most):
            samples = slice(i, min(i + most, b))
            if i == 0 or not shared:
                basis = s.basis(samples, rows, dtype)
            yield samples, rows, basis, s.block(basis, mask, samples, rows, dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, hides: bool = False) -> Tensor:
    """PyTorch's fused attention with a bias or none. hides: a row of it may be all -inf, which gives zeros."""
    width = max(q.shape[-1], v.shape[-1])  # unequal widths would leave PyTorch's fused path
    q, k, v_ = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    empty = bias.amax(-1, keepdim=True) == -torch.inf if bias is not None and hides else None
    bias = bias if bias is None or empty is None else bias.masked_fill(empty, 0.0)
    if bias is not None and q.device.type != "cpu":
        bias = bias.to(q.dtype)  # PyTorch's CPU kernel takes float32 beside half precision
    out = F.scaled_dot_product_attention(q, k, v_, attn_mask=bias, scale=scale)[..., : v.shape[-1]]
    return out if empty is None else out.masked_fill(empty, 0.0)


def forward_from_d(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: Scores) -> None:
    """Attention with scores formed from D, written to out."""
    for samples, rows, _, bias in walk(q, k, s, mask, torch.promote_types(q.dtype, torch.float32)):
        out[samples, :, rows] = plain(q[samples, :, rows], k[samples], v[samples], bias, scale, bool(s.tables))
        del bias  # before the next is made


def backward_from_d(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: Scores,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, each term's coefficients and each table, from weights formed anew from D."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    dq, dk_, dv_ = (empty_heads(x) for x in (q, k, v))
    dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (k, v))
    learned = [*s.coefficients, *s.tables]
    grads = [torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(learned, wanted, strict=True)]
    k, v = (x.to(dtype).contiguous() for x in (k, v))
    for samples, rows, basis, bias in walk(q, k, s, mask, dtype):
        queries, dy, keys, values = (
            x.to(dtype).flatten(0, 1) for x in (q[samples, :, rows], dout[samples, :, rows], k[samples], v[samples])
        )
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        scores.unflatten(0, (-1, heads)).add_(bias)
        del bias
        empty = scores.amax(-1, keepdim=True) == -torch.inf if s.tables else None
        weights = torch.softmax(scores, -1, out=scores)
        weights = weights if empty is None else weights.masked_fill_(empty, 0.0)
        dv[samples] += torch.bmm(weights.transpose(1, 2), dy).view(dv[samples].shape)
        ds = torch.ops.aten._softmax_backward_data(torch.bmm(dy, values.transpose(1, 2)), weights, -1, dtype)
        del weights, scores
        dq[samples, :, rows] = torch.bmm(ds, keys).mul_(scale).unflatten(0, (-1, heads))
        dk[samples] += torch.bmm(ds.transpose(1, 2), queries).mul_(scale).view(dk[samples].shape)
        ds = ds.unflatten(0, (-1, heads))
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            into = cut(grad, samples, rows=rows)
            if index < len(basis):
                into += project(ds, basis[index], into) * s.factors[index]
            else:
                summed = [i for i in (0, 1) if into.shape[i] == 1 and ds.shape[i] != 1]
                into += (ds.sum(summed, keepdim=True) if summed else ds) * s.weights[index - len(basis)]
        del ds
    return [dq, dk_.copy_(dk), dv_.copy_(dv), *(q.new_empty(0) if x is None else x for x in grads)]
