"""Attention in blocks of scores, whose memory grows with N alone.

Terms are columns of queries and keys, or are formed from D: then those of a block are summed densely, exactly, and
added to its scores. The backward pass forms the weights of a block anew.
B batch, H heads, n queries, N keys, f functions, e columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..relative import Exponents, contract, functions, project
from .terms import Relative, Table, Term

BLOCK_BYTES = 8 * 2**20  # scores formed from D at one time; a handful of such blocks are alive
PRODUCT_BYTES, ROWS = 4 * 2**20, 256  # scores of one batch of products, and the fewest queries that are worth one
MOST_BYTES = 10 * 2**20  # of such a batch for each thread
ALL = slice(None)


def empty_heads(like: Tensor, width: int | None = None) -> Tensor:
    """Room for (B, H, N, width), laid out (B, N, H, width) as the projection that follows wants it."""
    b, h, n, size = like.shape
    return like.new_empty((b, n, h, size if width is None else width)).transpose(1, 2)


def cut(x: Tensor, samples: slice = ALL, heads: slice = ALL, rows: slice = ALL) -> Tensor:
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
        coefficients, tables = ([cut(x, samples, rows=rows) for x in y] for y in (self.coefficients, self.tables))
        terms = (contract(c * factor, f) for c, factor, f in zip(coefficients, self.factors, basis, strict=True))
        others = (table.to(dtype) * weight for table, weight in zip(tables, self.weights, strict=True))
        bias = reduce(torch.add, chain(terms, others))  # of which two are there at one time
        return bias if mask is None else bias.masked_fill(~cut(mask, samples, rows=rows), -torch.inf)


def hidden(mask: Tensor | None, dtype: torch.dtype, *part: slice) -> Tensor | None:
    """The mask, or a part of it, as numbers that are added to scores."""
    if mask is None:
        return None
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~cut(mask, *part), -torch.inf)


Block = tuple[slice, slice, slice, list[Tensor], Tensor | None]  # samples, heads, queries, functions of D, bias


def blocks_of_columns(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[Block]:
    """Blocks for batched products: whole heads if PRODUCT_BYTES hold one for each thread, else few queries of some."""
    (b, h, n, size), threads, one = q.shape, torch.get_num_threads(), 4 * k.shape[2]  # bytes of a query's scores
    fitting, most = PRODUCT_BYTES // (max(n, size) * one), threads * MOST_BYTES  # keys are widened, for one query too
    heads = min(
        h, fitting - fitting % threads if fitting >= threads else max(1, min(2 * threads, most // (ROWS * one)))
    )
    rows = n if heads <= fitting else max(1, min(n, max(ROWS, PRODUCT_BYTES // (heads * one)), most // (heads * one)))
    samples = max(1, fitting // h)
    for i, j, start in product(range(0, b, samples), range(0, h, heads), range(0, n, rows)):
        part = slice(i, min(i + samples, b)), slice(j, min(j + heads, h)), slice(start, min(start + rows, n))
        yield *part, [], hidden(mask, torch.float32, *part)


def blocks_from_d(q: Tensor, k: Tensor, s: Scores, mask: Tensor | None, dtype: torch.dtype) -> Iterator[Block]:
    """Blocks of scores that fit in BLOCK_BYTES, of all heads, for which functions of D are the same."""
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
            yield samples, ALL, rows, basis, s.block(basis, mask, samples, rows, dtype)


def softmax_(scores: Tensor, hides: bool) -> Tensor:
    """Weights from scores, in place. hides: some scores are -inf.

    Weights below 1e-20 become 0, or 2e-22 where no score is -inf: their products would be subnormal numbers, which
    take many times as long on some processors.
    """
    if hides:
        return F.threshold(torch.softmax(scores, -1, out=scores), 1e-20, 0.0, inplace=True)
    largest = scores.amax(-1, keepdim=True)
    torch.maximum(scores, largest - largest.abs().mul_(2.0**-16).clamp_(min=50.0), out=scores)  # also of large scores
    return torch.softmax(scores, -1, out=scores)


def weights_of(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, hides: bool = False) -> Tensor:
    """All weights of some heads by batched products, (B H, n, N). hides: a row may be all -inf, which gives zeros."""
    scores = q.new_empty(prod(q.shape[:2]), q.shape[2], k.shape[2])
    torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale, out=scores)
    if bias is not None:
        scores.unflatten(0, q.shape[:2]).add_(bias)
    empty = scores.amax(-1, keepdim=True) == -torch.inf if hides else None
    weights = softmax_(scores, hides=bias is not None)
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


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


def widened(x: Tensor, columns: Tensor | None, *part: slice) -> Tensor:
    """A part of x (B, H, n, size) in float32, with columns (B or 1, H or 1, n, e) if any."""
    x = x[part].to(torch.promote_types(x.dtype, torch.float32))
    return x if columns is None else torch.cat([x, cut(columns, *part).expand(*x.shape[:3], -1)], dim=-1)


def forward_from_d(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: Scores) -> None:
    """Attention with scores formed from D, written to out."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    for samples, _, rows, _, bias in blocks_from_d(q, k, s, mask, dtype):
        out[samples, :, rows] = plain(q[samples, :, rows], k[samples], v[samples], bias, scale, bool(s.tables))
        del bias  # before the next is made


def forward_of_columns(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, psi: Tensor, phi: Tensor
) -> None:
    """Attention with query and key columns by batched products, written to out."""
    for *part, rows, _, bias in blocks_of_columns(q, k, mask):
        x, y, z = widened(q, psi, *part, rows), widened(k, phi, *part), widened(v, None, *part)
        out[*part, rows] = torch.bmm(weights_of(x, y, bias, scale), z.flatten(0, 1)).unflatten(0, x.shape[:2])


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: Scores | None,
    wanted: Sequence[bool], columns: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v, and of the queries' columns or, without columns, of coefficients and tables of s."""
    dtype, size = torch.promote_types(q.dtype, torch.float32), q.shape[-1]
    psi, phi = columns or (None, None)
    dq, dk, dv = (empty_heads(x).to(dtype).zero_() for x in (q, k, v))
    learned = columns[:1] if s is None else [*s.coefficients, *s.tables]
    grads = [torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(learned, wanted, strict=True)]
    blocks = blocks_of_columns(q, k, mask) if s is None else blocks_from_d(q, k, s, mask, dtype)
    every: tuple[slice, ...] = ()
    for samples, heads, rows, basis, bias in blocks:
        part = samples, heads, rows
        if every != part[:2]:
            every = part[:2]
            y, z = widened(k, phi, *every), widened(v, None, *every)
        x, dy = widened(q, psi, *part), widened(dout, None, *part)
        weights = weights_of(x, y, bias, scale, s is not None and bool(s.tables))
        del bias
        lead, dy = x.shape[:2], dy.flatten(0, 1)
        dv[every] += torch.bmm(weights.mT, dy).unflatten(0, lead)
        ds = torch.bmm(dy, z.flatten(0, 1).mT)
        torch.ops.aten._softmax_backward_data.out(ds, weights, -1, dtype, grad_input=ds)
        del weights
        dx = torch.bmm(ds, y.flatten(0, 1)).mul_(scale).unflatten(0, lead)
        dq[part] = dx[..., :size]
        dk[every] += torch.bmm(ds.mT, (x[..., :size] * scale).flatten(0, 1)).unflatten(0, lead)
        ds = ds.unflatten(0, lead)
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            into = cut(grad, *part)
            if s is None:
                into.copy_(dx[..., size:])
            elif index < len(basis):
                into += project(ds, basis[index], into) * s.factors[index]
            else:
                summed = [i for i in (0, 1) if into.shape[i] == 1 and ds.shape[i] != 1]
                into += (ds.sum(summed, keepdim=True) if summed else ds) * s.weights[index - len(basis)]
        del ds
    return [*(x.to(q.dtype) for x in (dq, dk, dv)), *(q.new_empty(0) if x is None else x for x in grads)]
