"""The fused kernel: PyTorch's attention, with score terms as extra query and key columns or as a bias formed from D.

A term of degree two in D = r_j - r_i is a product of something of the query and something of the key,

    sum_f c_if function_f(D) = psi_i . phi(r_j),   psi_i = c_i T(r_i),   phi = [r_u r_v for u <= v | r | 1],

so heads that are a few columns wider add it for the price of their width: 6 for p = 2, 10 for p = 3. phi, T and a bound
on their products are made once for a set of positions (`Columns`). Near the query large products cancel, which
costs digits. So positions are centred and scaled, and half precision holds every number as two. Where the bound says
that too many digits would be lost, scores are formed from D instead, in blocks of queries, as for all other terms.
Attention is one operator with a backward pass of its own; exported programs hold standard operators instead.
B batch, H heads, n queries, N keys, h query/key size, w value size, p position dims, f functions, e columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from math import comb, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions import centre, placed
from . import reference
from .basis import (
    Exponents,
    cast,
    contract,
    difference,
    function,
    is_transformed,
    monomials,
    no_autocast,
    project,
    refuse_second_derivative,
)
from .kernels import POSITIONS, TRANSFORM, WEIGHTS, Call, Kernel, Peak, register_kernel
from .memory import Sizes
from .terms import Relative, Table, Term

BLOCK_BYTES = 8 * 2**20  # scores formed from D at one time; a handful of such blocks are alive
PART_BYTES = 2 * 2**20  # widened tensors at one time, or one head of one sample
REACH_BITS = 6  # positions are scaled to |r| <= 2^6, so that float16 holds their products
# The largest error of a logit that columns may bring, and the rounding of a product that it is estimated from: 24 bits
# in float32 (errors average out, which is worth two more), 17 and 22 where two numbers of half precision hold one.
ALLOWED = {torch.float32: 5e-4, torch.bfloat16: 2e-3, torch.float16: 5e-4}
ROUNDING = {torch.float32: 1.5 * 2.0**-26, torch.bfloat16: 2.0**-17, torch.float16: 2.0**-22}


GRADIENT_ROUNDING = 2.0**-28  # of a sum over keys; a bound of its products is some sixteen times too large


class Columns(NamedTuple):
    """What columns take from the positions alone, in float32. Samples may share them (1 for B)."""

    T: Tensor  # (B or 1, n, f, e): coefficients to query columns
    phi: Tensor  # (B or 1, N, e): key columns
    bound: Tensor  # (B or 1, n, f): the largest sum of products that a unit of a coefficient may bring


def separable(call: Call) -> Relative | None:
    """The term of a call that can be columns, if that is its only one and the call is not to be exact."""
    if len(call.terms) != 1 or call.exact or not call.scale > 0 or call.q.device.type not in ("cpu", "meta"):
        return None
    term = call.terms[0]
    if not isinstance(term, Relative) or not term.scaled or call.q.dtype not in ALLOWED:
        return None
    return term if all(e[0] == -2 or 0 <= sum(e) <= 2 for e in term.exponents) else None


@cache
def key_features(exponents: Exponents, with_constant: bool) -> Exponents:
    """The monomials of a key's position that functions of D with these exponents are made of."""
    p = len(exponents[0])
    squares = any(e[0] < 0 for e in exponents)
    found = [e for e in monomials(p, 2) if sum(e) == 1 or e in exponents or (squares and max(e) == 2)]
    return (*found, (0,) * p) if with_constant else tuple(found)


def _features_of(term: Relative, dtype: torch.dtype) -> Exponents:
    """The features of a term. Its constant has a column where a key without a position must not get it, and in float32.

    There gradients come from columns too: that of the constant takes away what rounding leaves of a row's sum, which is
    multiplied by squares of positions where it should be by those of differences.
    """
    return key_features(term.exponents, dtype == torch.float32 or term.key_positions.unplaced is not False)


def columns(term: Relative, q: Tensor, v: Tensor) -> Columns:
    """The columns of a term of degree two for such heads, made once for its positions."""
    features = _features_of(term, q.dtype)
    more = head_width(q, v, len(features)) - q.shape[-1]
    key = ("columns", term.exponents, features, more, q.dtype, term.keys)
    return term.r.once(key, lambda: make_columns(term, features, more, q.dtype))


def make_columns(term: Relative, features: Exponents, more: int, dtype: torch.dtype) -> Columns:
    """Columns of these features of a key, filled up to `more` for heads of this dtype."""
    at, to = term.r.r.detach().double(), term.key_positions.r.detach().double()
    both = to if term.keys is None else torch.cat([r.expand(max(len(at), len(to)), -1, -1) for r in (at, to)], dim=1)
    middle, reach = centre(both)
    unit = torch.exp2(torch.ceil(torch.log2(reach.clamp(min=1e-30))) - REACH_BITS)
    here, there = placed(at)[..., None], placed(to)[..., None]
    x = torch.where(here, (middle - at) / unit, 0.0).movedim(-1, 0)  # -r_i, so that D = y + x
    y = torch.where(there, (to - middle) / unit, 0.0).movedim(-1, 0)  # r_j
    phi = torch.where(there, torch.stack([function(y, e) for e in features], dim=-1), 0.0)
    rows = [
        torch.stack([_taylor(x, e, f) for f in features], dim=-1) * unit ** (2 if e[0] < 0 else sum(e))
        for e in term.exponents
    ]
    T = torch.where(here[..., None], torch.stack(rows, dim=-2), 0.0)
    bound = (T.abs() * phi.abs().amax(1)[:, None, None]).sum(-1)
    if dtype == torch.float32:  # zeros fill the heads up
        T = F.pad(T, (0, more - len(features)))
    return Columns(
        T.float(), F.pad(halves(phi.float(), dtype), (0, more - len(features) * _copies(dtype))), bound.float()
    )


def _taylor(x: Tensor, e: Sequence[int], f: Sequence[int]) -> Tensor:
    """The coefficient of y^f in function_e(x + y); x (p, ...)."""
    if e[0] < 0:  # |x + y|^2
        axes = [[2 * (u == v) for v in range(len(e))] for u in range(len(e))]
        return torch.stack([_taylor(x, axis, f) for axis in axes]).sum(0)
    both = list(zip(e, f, strict=True))
    if any(b > a for a, b in both):
        return torch.zeros_like(x[0])
    return function(x, [a - b for a, b in both]) * prod([comb(a, b) for a, b in both])


def fits(coefficients: Tensor, bound: Tensor, scale: float, dtype: torch.dtype) -> bool:
    """Whether columns of this dtype hold these numbers well enough."""
    size = float((coefficients.abs().amax(1) * bound).sum(-1).amax())
    return size * scale * ROUNDING[dtype] <= ALLOWED[dtype] and not (dtype == torch.float16 and size > 3e4)


def _copies(dtype: torch.dtype) -> int:
    """How many columns a feature takes."""
    return 1 if dtype == torch.float32 else 3


def head_width(q: Tensor, v: Tensor, features: int) -> int:
    """Width of heads with columns, for queries, keys and values alike: PyTorch's fused path wants a multiple of 8."""
    return -(-max(q.shape[-1] + features * _copies(q.dtype), v.shape[-1]) // 8) * 8


def halves(x: Tensor, dtype: torch.dtype, *, query: bool = False) -> Tensor:
    """x, or as numbers of half precision, arranged so that products sum x_hi y_hi + x_hi y_lo + x_lo y_hi."""
    if dtype == torch.float32:
        return x
    high = x.to(dtype)
    low = (x - high).to(dtype)
    return torch.cat([high, high, low] if query else [high, low, high], dim=-1)


def _empty(like: Tensor, width: int, room: int = 0) -> Tensor:
    """(B, H, N, width), laid out as PyTorch's kernel lays out heads that are `room` wide: (B, N, H, room)."""
    b, h, n, _ = like.shape
    return like.new_empty((b, n, h, max(room, width))).transpose(1, 2)[..., :width]


def _parts(q: Tensor, k: Tensor, width: int, copies: int) -> list[tuple[slice, slice]]:
    """Samples and heads whose widened tensors fit in PART_BYTES; at least as many heads as there are threads."""
    b, h, n, _ = q.shape
    one = copies * max(n, k.shape[2]) * width * q.element_size()
    heads = min(h, max(torch.get_num_threads(), PART_BYTES // one))
    samples = max(1, min(b, PART_BYTES // (one * h)))
    starts = product(range(0, b, samples), range(0, h, heads))
    return [(slice(i, min(i + samples, b)), slice(j, min(j + heads, h))) for i, j in starts]


def _cut(x: Tensor, samples: slice, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
    """A part of x (B or 1, H or 1, n or 1, ...), in which what is shared stays whole."""
    x = x[samples] if x.shape[0] > 1 else x
    x = x[:, heads] if x.shape[1] > 1 else x
    return x[:, :, rows] if x.shape[2] > 1 else x


class _Wide:
    """Parts of tensors (B, H, N, size), widened by columns or zeros, in buffers that serve one part after another."""

    def __init__(self, part: tuple[slice, slice], width: int, *tensors: Tensor) -> None:
        b, h = part[0].stop, part[1].stop  # the first part is the largest
        self.tensors = tensors
        # One block of memory, because several would go back to the system when freed and be mapped anew for each call.
        sizes = [b * h * x.shape[2] * width for x in tensors]
        pieces = tensors[0].new_empty(sum(sizes)).split(sizes)
        self.buffers = [y.view(b, h, x.shape[2], width) for x, y in zip(tensors, pieces, strict=True)]
        for x, y in zip(tensors, self.buffers, strict=True):
            y[..., x.shape[-1] :] = 0.0

    def __call__(self, part: tuple[slice, slice], *columns: Tensor) -> list[Tensor]:
        """The tensors of this part; the first of them with columns."""
        b, h = (x.stop - x.start for x in part)
        wide = [x[:b, :h] for x in self.buffers]
        for x, y in zip(self.tensors, wide, strict=True):
            y[..., : x.shape[-1]] = x[part]
        for x, y, more in zip(self.tensors, wide, columns, strict=False):
            y[..., x.shape[-1] : x.shape[-1] + more.shape[-1]] = more
        return wide


def _columns_of(part: tuple[slice, slice], psi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key columns of a part."""
    return halves(psi[part], phi.dtype, query=True), (phi[part[0]] if len(phi) > 1 else phi)[:, None]


def _bias_of(mask: Tensor | None, samples: slice, heads: slice, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers for PyTorch's kernel. A row without keys sees all: what it gives is dropped afterwards."""
    if mask is None:
        return None
    part = _cut(mask, samples, heads)
    part = part | ~part.any(-1, keepdim=True)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~part, -torch.inf)


def _drop_empty(out: Tensor, mask: Tensor | None) -> Tensor:
    """A query that sees no key gives zeros."""
    return out if mask is None else out.masked_fill_(~mask.any(-1, keepdim=True), 0.0)


def _query_columns(q: Tensor, c: Tensor, T: Tensor) -> Tensor:
    """psi (B, H, n, e), also where samples or queries share coefficients."""
    return contract(c, T).expand(*q.shape[:3], -1)


def _columns_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, c: Tensor, T: Tensor, phi: Tensor
) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of each query's scores."""
    psi = _query_columns(q, c, T)
    width, w = q.shape[-1] + phi.shape[-1], v.shape[-1]
    parts = _parts(q, k, width, 4)
    widen = _Wide(parts[0], width, q, k, v)
    out, lse = _outputs(q, w, width)
    for part in parts:
        wide, bias = widen(part, *_columns_of(part, psi, phi)), _bias_of(mask, *part, q.dtype)
        y, z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, attn_mask=bias, scale=scale)
        if len(parts) == 1:
            out, lse = y[..., :w], z
        else:
            out[part], lse[part] = y[..., :w], z
    return _drop_empty(out, mask), lse


def _columns_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float,
    c: Tensor, T: Tensor, phi: Tensor, bound: Tensor,
) -> list[Tensor] | None:  # fmt: skip
    """Gradients of q, k, v and the coefficients, in float32; None where those of the coefficients lose too much."""
    psi, size, w = _query_columns(q, c, T), q.shape[-1], v.shape[-1]
    width = size + phi.shape[-1]
    dout = dout if mask is None else _drop_empty(dout.clone(), mask)
    parts = _parts(q, k, width, 8)
    dq, dk, dv = (_empty(x, x.shape[-1], width) for x in (q, k, v))
    dpsi, widen = psi.new_empty(psi.shape), _Wide(parts[0], width, q, k, v, dout, out)
    for part in parts:
        *wide, dy, y = widen(part, *_columns_of(part, psi, phi))
        bias = _bias_of(mask, *part, q.dtype)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, *wide, y, lse[part], 0.0, False, attn_mask=bias, scale=scale
        )
        found = [x[..., :end] for x, end in zip(grads, (size, size, w), strict=True)]
        if len(parts) == 1:
            (dq, dk, dv), dpsi = found, grads[0][..., size:]
        else:
            dq[part], dk[part], dv[part] = found
            dpsi[part] = grads[0][..., size:]
    dc = project(dpsi, T, c)
    # A sum over keys rounds to what its largest products allow: at most |dout| |v| of a query times what T and phi reach.
    # Where that is more than a small share of the result, far positions or one-hot weights, it is taken from D instead.
    reach = torch.linalg.vector_norm(dout, dim=-1) * torch.linalg.vector_norm(v, dim=-1).amax(-1, keepdim=True)
    lost = torch.linalg.vector_norm(reach[..., None] * bound[:, None]) * (scale * GRADIENT_ROUNDING)
    return [dq, dk, dv, dc] if bool(lost <= ALLOWED[q.dtype] * torch.linalg.vector_norm(dc)) else None


class _Scores(NamedTuple):
    """All terms of a call as numbers and tensors, which is what an operator takes.

    Of the relative terms: exponents (all in a row) and factors, coefficients, positions of queries and keys, and their
    functions of D where those were made before (`bases`). Of the others: tables and their weights.
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
    def of(cls, terms: Sequence[Term], scale: float, dtype: torch.dtype, keep: bool) -> _Scores:
        """keep: functions of D that fit in a block are made once for their positions, if samples share those."""
        relative = [term for term in terms if isinstance(term, Relative)]
        tables = [term for term in terms if isinstance(term, Table)]
        scores = cls(
            [power for term in relative for power in chain.from_iterable(term.exponents)],
            [scale if term.scaled else 1.0 for term in relative],
            [table.weight for table in tables],
            [term.coefficients(dtype) for term in relative],
            [term.r.r for term in relative],
            [term.key_positions.r for term in relative],
            [table.bias for table in tables],
            [],
        )
        sizes = (c.shape[-1] * x.shape[1] * y.shape[1] for c, x, y in zip(*scores[3:6], strict=True))
        if not keep or torch.compiler.is_compiling() or not scores.shared or sum(sizes) * dtype.itemsize > BLOCK_BYTES:
            return scores
        keys = [("basis", term.exponents, term.keys, dtype) for term in relative]
        return scores._replace(
            bases=[t.r.once(key, partial(t.basis, dtype)) for t, key in zip(relative, keys, strict=True)]
        )

    def functions(self, samples: slice, rows: slice, dtype: torch.dtype) -> list[Tensor]:
        """The relative terms' functions of D for some queries: (B or 1, n, f, N) each."""
        if self.bases:
            return [x[:, rows] for x in self.bases]
        found, powers = [], iter(self.exponents)
        for c, at, to in zip(self.coefficients, self.queries, self.keys, strict=True):
            at, to = (x[samples] if x.shape[0] > 1 else x for x in (at, to))
            d = difference(at[:, rows], to, dtype)
            exponents = [[next(powers) for _ in range(at.shape[-1])] for _ in range(c.shape[-1])]
            found.append(torch.stack([function(d, e) for e in exponents], dim=2))
        return found

    def block(
        self, functions: Sequence[Tensor], mask: Tensor | None, samples: slice, rows: slice, dtype: torch.dtype
    ) -> Tensor:
        """All terms of a block of scores, with -inf where the mask hides a key: (B or 1, H or 1, n, N) in `dtype`."""
        bias: Tensor | None = None
        for c, f, factor in zip(self.coefficients, functions, self.factors, strict=True):
            more = contract(_cut(c, samples, rows=rows) * factor, f)
            bias = more if bias is None else bias + more
        for table, weight in zip(self.tables, self.weights, strict=True):
            more = _cut(table, samples, rows=rows).to(dtype) * weight
            bias = more if bias is None else bias + more
        assert bias is not None
        return bias if mask is None else bias.masked_fill(~_cut(mask, samples, rows=rows), -torch.inf)

    @property
    def shared(self) -> bool:
        """Whether the functions of D are the same for all samples."""
        return all(len(x) == 1 for x in (*self.queries, *self.keys))


def _blocks(q: Tensor, k: Tensor, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Samples and queries whose scores fit in BLOCK_BYTES; all samples of some queries come in a row."""
    b, h, n, _ = q.shape
    per_row = h * k.shape[2] * itemsize
    rows = -(-n // -(-n // max(1, min(n, BLOCK_BYTES // per_row))))  # blocks of equal size
    samples = max(1, min(b, BLOCK_BYTES // (per_row * n)))
    for j, i in product(range(0, n, rows), range(0, b, samples)):
        yield slice(i, min(i + samples, b)), slice(j, min(j + rows, n))


def _walk(
    q: Tensor, k: Tensor, s: _Scores, mask: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, list[Tensor], Tensor]]:
    """Blocks of scores: samples, queries, functions of D, and the bias."""
    last, functions = slice(0), []
    for samples, rows in _blocks(q, k, dtype.itemsize):
        if rows != last or not s.shared:
            functions, last = s.functions(samples, rows, dtype), rows
        yield samples, rows, functions, s.block(functions, mask, samples, rows, dtype)


def _forward(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: _Scores) -> None:
    """Attention with scores formed from D, written to out."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    width = max(q.shape[-1], v.shape[-1])
    wide = [F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v)] if q.shape[-1] != v.shape[-1] else [q, k, v]
    for samples, rows, _, bias in _walk(q, k, s, mask, dtype):
        empty = bias.amax(-1, keepdim=True) == -torch.inf if mask is not None or s.tables else None
        bias = bias if empty is None else bias.masked_fill(empty, 0.0)
        bias = bias if q.device.type == "cpu" else bias.to(q.dtype)  # PyTorch's CPU kernel takes float32 beside half
        block = F.scaled_dot_product_attention(
            wide[0][samples, :, rows], wide[1][samples], wide[2][samples], attn_mask=bias, scale=scale
        )[..., : v.shape[-1]]
        out[samples, :, rows] = block if empty is None else block.masked_fill(empty, 0.0)
        del bias, block  # before the next are made


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, s: _Scores,
    wanted: Sequence[bool], room: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, each term's coefficients and each table, from weights formed anew from D."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    dq, dk_, dv_ = (_empty(x, x.shape[-1], room) for x in (q, k, v))
    dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (k, v))
    learned = [*s.coefficients, *s.tables]
    grads = [torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(learned, wanted, strict=True)]
    k, v = (x.to(dtype).contiguous() for x in (k, v))
    for samples, rows, functions, bias in _walk(q, k, s, mask, dtype):
        queries, dy, keys, values = (
            x.to(dtype).flatten(0, 1) for x in (q[samples, :, rows], dout[samples, :, rows], k[samples], v[samples])
        )
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        scores.unflatten(0, (-1, heads)).add_(bias)
        del bias
        empty = scores.amax(-1, keepdim=True) == -torch.inf if mask is not None or s.tables else None
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
            into = _cut(grad, samples, rows=rows)
            if index < len(functions):
                into += project(ds, functions[index], into) * s.factors[index]
            else:
                summed = [i for i in (0, 1) if into.shape[i] == 1 and ds.shape[i] != 1]
                into += (ds.sum(summed, keepdim=True) if summed else ds) * s.weights[index - len(functions)]
        del ds
    return [dq, dk_.copy_(dk), dv_.copy_(dv), *(q.new_empty(0) if x is None else x for x in grads)]


# The operator. It compiles to one node, which decides by the numbers it meets.


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, exponents: list[int], factors: list[float],
    weights: list[float], coefficients: list[Tensor], queries: list[Tensor], keys: list[Tensor], tables: list[Tensor],
    bases: list[Tensor], made: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and the log-sum-exp of the scores where columns were used. made: the parts of `Columns`, or nothing."""
    if made and fits(coefficients[0], made[2], scale, q.dtype):
        return _columns_forward(q, k, v, mask, scale, coefficients[0], *made[:2])
    s = _Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
    out, lse = _outputs(q, v.shape[-1], _room(q, made))
    _forward(out, q, k, v, mask, scale, s)
    return out, lse


_attention = torch.library.custom_op("parapos::attention", _attend, mutates_args=())


def _room(q: Tensor, made: Sequence[Tensor]) -> int:
    """Width of the heads that columns widen."""
    return q.shape[-1] + made[1].shape[-1] if made else 0


def _outputs(q: Tensor, width: int, room: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, laid out as PyTorch's kernel does for widened queries; no log-sum-exp without columns."""
    b, h, n, _ = q.shape
    lse = q.new_empty((b, n, h), dtype=torch.float32).transpose(1, 2) if room else q.new_empty(0, dtype=torch.float32)
    return q.new_empty((b, h, n, max(room, width)))[..., :width], lse


@_attention.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return _outputs(q, v.shape[-1], _room(q, rest[-1]))


@torch.library.custom_op("parapos::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    scale: float, exponents: list[int], factors: list[float], weights: list[float], coefficients: list[Tensor],
    queries: list[Tensor], keys: list[Tensor], tables: list[Tensor], bases: list[Tensor], made: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the coefficients and the tables; an empty tensor where none is wanted."""
    with no_autocast(q.device):
        grads = None
        if made and q.dtype == torch.float32 and fits(coefficients[0], made[2], scale, q.dtype):
            grads = _columns_backward(dout, q, k, v, out, lse, mask, scale, coefficients[0], *made)
        if grads is None:
            s = _Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
            grads = _backward(dout, q, k, v, mask, scale, s, wanted, _room(q, made))
    learned = zip(grads[3:], [*coefficients, *tables], wanted, strict=True)
    return [*grads[:3], *(x.to(y.dtype).contiguous() if want else y.new_empty(0) for x, y, want in learned)]


@_attention_backward.register_fake
def _(dout, out, lse, wanted, q, k, v, mask, scale, exponents, factors, weights, coefficients, *rest):  # type: ignore[no-untyped-def]
    grads = [x.new_empty(x.shape if want else 0) for x, want in zip([*coefficients, *rest[2]], wanted, strict=True)]
    return [*(_empty(x, x.shape[-1], _room(q, rest[-1])) for x in (q, k, v)), *grads]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, mask, *ctx.numbers = inputs[:8]
    ctx.masked, ctx.counts = mask is not None, [len(x) for x in inputs[8:]]
    ctx.save_for_backward(
        *output, q, k, v, *([mask] if ctx.masked else []), *(x for group in inputs[8:] for x in group)
    )


def _grads(ctx, dout, _):  # type: ignore[no-untyped-def]
    out, lse, q, k, v, *saved = ctx.saved_tensors
    mask = saved.pop(0) if ctx.masked else None
    groups = [[saved.pop(0) for _ in range(count)] for count in ctx.counts]
    learned = [*groups[0], *groups[3]]
    wanted = [x.requires_grad for x in learned]
    dq, dk, dv, *more = _attention_backward(dout, out, lse, wanted, q, k, v, mask, *ctx.numbers, *groups)
    more = [x if want else None for x, want in zip(more, wanted, strict=True)]
    # PyTorch takes an empty list for a list of tensors, and None for no gradient of numbers.
    numbers: list[Any] = [[] if x == [] else None for x in ctx.numbers]
    rest = [[None] * count for count in ctx.counts]
    rest[0], rest[3] = more[: len(groups[0])], more[len(groups[0]) :]
    return dq, dk, dv, None, *numbers, *rest


_attention.register_autograd(_grads, setup_context=_setup)
_attention_backward.register_autograd(refuse_second_derivative)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """PyTorch's fused attention with a bias or none. Widths are made equal, or PyTorch would leave its fused path."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v_ = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    empty = None if bias is None else bias.amax(-1, keepdim=True) == -torch.inf
    bias = None if bias is None or empty is None else bias.masked_fill(empty, 0.0).to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v_, attn_mask=bias, scale=scale)[..., : v.shape[-1]]
    return out if empty is None else out.masked_fill(empty, 0.0)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _exported(call: Call) -> Tensor:
    """The same in standard operators, in float32 at least: columns where there can be, whatever their numbers."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (cast(x, dtype) for x in (call.q, call.k, call.v))
    bias, term = _bias(call.mask, dtype), separable(call)
    if term is not None:
        T, phi, _ = columns(term, q, v)
        q = torch.cat([q, contract(term.coefficients(dtype), T)], dim=-1)
        k = torch.cat([k, phi[:, None].expand(*k.shape[:3], -1)], dim=-1)
    for other in call.terms if term is None else ():
        more = other.scores(dtype) * (call.scale if other.scaled else 1.0)
        bias = more if bias is None else bias + more
    return _plain(q, k, v, bias, call.scale).to(call.q.dtype)


def attention(call: Call) -> Tensor:
    """As `reference.attention`, without the weights."""
    # PyTorch's fused attention wants the numbers of a head side by side in memory; else it silently forms all scores.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    if torch.compiler.is_exporting():
        return _exported(call)
    if not prod(q.shape[:3]) * k.shape[2]:  # nothing to attend to
        return reference.attention(call)[0]
    if not call.terms:
        return _plain(q, k, v, _bias(call.mask, q.dtype), call.scale)
    term = separable(call)
    s = _Scores.of(call.terms, call.scale, torch.promote_types(q.dtype, torch.float32), keep=term is None)
    made = [] if term is None else list(columns(term, q, v))
    # Without gradients there is no need to pass through PyTorch's dispatcher, which takes as long as a small call.
    watched = torch.compiler.is_compiling() or type(q) is not Tensor or torch._C._len_torch_dispatch_stack()
    direct = not (call.needs_grad or watched or q.is_meta)
    out: Tensor = (_attend if direct else _attention)(q, k, v, call.mask, call.scale, *s, made)[0]
    return out


def _refuse(call: Call) -> str | None:
    if is_transformed():
        return TRANSFORM
    if call.return_weights:
        return WEIGHTS
    if call.needs_position_grad:
        return POSITIONS
    if not call.terms and call.q.is_cuda and call.q.dtype == torch.float64:
        return "PyTorch has no fused float64 attention on GPUs"
    unknown = [type(term).__name__ for term in call.terms if not isinstance(term, Relative | Table)]
    return f"{unknown[0]} is neither relative nor a table" if unknown else None


def _as_columns(call: Call) -> Columns | None:
    """The columns that a call would use; without numbers (meta tensors), those that it may use."""
    term = separable(call)
    if term is None or not prod(call.q.shape[:3]) * call.k.shape[2]:
        return None
    with torch.no_grad():
        made = columns(term, call.q, call.v)
        c = term.coefficients(torch.float32)
        return made if call.q.is_meta or fits(c, made.bound, call.scale, call.q.dtype) else None


def _describe(call: Call) -> str:
    if not call.terms:
        return "PyTorch fused attention, no score terms"
    made = _as_columns(call)
    if made is None:
        why = "; as columns these numbers would lose digits" if separable(call) is not None else ""
        return f"{call.names} formed from D in blocks of queries, added by PyTorch fused attention to its scores{why}"
    term = separable(call)
    assert term is not None
    e = len(_features_of(term, call.q.dtype)) * _copies(call.q.dtype)
    width = call.q.shape[-1] + made.phi.shape[-1]
    text = f"{call.names} as {e} extra query/key columns in PyTorch fused attention of width {width}"
    if call.q.is_meta:
        text += ", or formed from D in blocks of queries if the numbers would lose digits"
    if call.needs_grad and call.q.dtype != torch.float32:
        text += "; its backward pass forms scores from D in blocks of queries"
    return text


def _memory(call: Call) -> Peak:
    s, made = Sizes(call), _as_columns(call)
    if not call.terms:
        return s.peak(s.out + s.hidden, s.gradients)
    block, functions = s.block(*(next(_blocks(call.q, call.k, s.wide)) if s.scores else (slice(0), slice(0))))
    from_d = 4 * block + functions + s.widened(2 * s.k + s.q)
    if made is None:
        return s.peak(s.out + 3 * block + functions, s.gradients + from_d)
    width = call.q.shape[-1] + made.phi.shape[-1]
    samples, heads = _parts(call.q, call.k, width, 4)[0]
    heads_at_once = (samples.stop - samples.start) * (heads.stop - heads.start)
    wide = heads_at_once * max(call.q.shape[2], call.k.shape[2]) * width * s.size
    psi = 2 * s.rows * made.T.shape[-1] * 4
    backward = 8 * wide + 2 * psi if call.q.dtype == torch.float32 else from_d
    return s.peak(s.out + 4 * wide + psi, s.gradients + backward)


register_kernel(Kernel("fused", 20, True, _refuse, _describe, _memory, attention))
