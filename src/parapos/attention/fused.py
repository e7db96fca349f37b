"""The fused kernel: PyTorch's operators, with score terms as extra query and key columns or as a bias formed from D.

Heads that are a few columns wider add a term of degree two for the price of their width (columns.py): 6 for p = 2, 10
for p = 3. Where columns would lose too many digits, and for all other terms, scores are formed from D (scores.py).
Attention is one operator with a backward pass of its own; exported programs hold standard operators instead.
B batch, H heads, n queries, N keys, h query/key size, w value size, f functions, e columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..relative import contract, project
from ..tracing import cast, is_watched, no_autocast
from . import reference, sparse, tiles
from .columns import ALLOWED, GRADIENT_ROUNDING, columns, fits
from .kernels import Call, Kernel, refuse_batched_gradients, refuse_second_derivative, register_kernel
from .scores import Scores, backward, empty_heads, forward_from_d, forward_of_columns, hidden, pick, plain
from .terms import Relative, Table


def separable(call: Call) -> Relative | None:
    """The term of a call that can be columns, if that is its only one and the call is not to be exact."""
    can_be = call.scale > 0 and call.q.dtype != torch.float64 and call.q.device.type in ("cpu", "meta")
    if call.exact or not can_be or len(call.terms) != 1 or not isinstance(term := call.terms[0], Relative):
        return None
    return term if sparse.is_separable(term) else None


def _are_good(good: Tensor, dc: Tensor, dout: Tensor, v: Tensor, bound: Tensor, scale: float) -> Tensor:
    """Of which good samples (B,) columns gave good gradients of coefficients too."""
    # A sum over keys rounds to what its largest products allow: at most |dout| |v| of a query, times what T and phi
    # reach. Where that is too large a share of the result (far positions, one-hot weights), D must give the gradient.
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (dout, v)]
    reach = norms[0] * norms[1].amax(-1, keepdim=True) * torch.linalg.vector_norm(bound, dim=-1)[:, None]
    lost, whole = (torch.linalg.vector_norm(x.flatten(1), dim=1).where(good, 0.0) for x in (reach, dc))
    most = ALLOWED / (scale * GRADIENT_ROUNDING) * whole
    # What counts is the gradient of all samples; if that is not good, those go whose own is not.
    if torch.linalg.vector_norm(lost) <= torch.linalg.vector_norm(most):
        return good
    return good & (lost <= most) if len(dc) > 1 else torch.zeros_like(good)


# The operators. Each compiles to one node, which decides by the numbers it meets.


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, exponents: list[int], factors: list[float],
    weights: list[float], coefficients: list[Tensor], queries: list[Tensor], keys: list[Tensor], tables: list[Tensor],
    bases: list[Tensor], made: list[Tensor],
) -> Tensor:  # fmt: skip
    """The output. made: the parts of `Columns`, or nothing. Samples that columns do not serve are formed from D."""
    out = empty_heads(q, v.shape[-1])
    good = _fitting(q, coefficients, made, scale)
    if good.any():
        forward_of_columns(out, q, k, v, mask, scale, contract(coefficients[0], made[0]), made[1][:, None])
    if not good.all():
        chosen = ~good if good.any() else None
        tensors = pick(chosen, q, k, v, mask)
        y = out if chosen is None else empty_heads(tensors[0], v.shape[-1])
        s = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
        forward_from_d(*[y, *tensors, scale, s.pick(chosen)])
        if chosen is not None:
            out[chosen] = y
    return out


def _fitting(q: Tensor, coefficients: Sequence[Tensor], made: Sequence[Tensor], scale: float) -> Tensor:
    """Which samples (B,) columns serve."""
    return (fits(coefficients[0], made[2], scale) if made else q.new_zeros(1, dtype=torch.bool)).expand(len(q))


def _backward(
    dout: Tensor, wanted: list[bool], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float,
    exponents: list[int], factors: list[float], weights: list[float], coefficients: list[Tensor],
    queries: list[Tensor], keys: list[Tensor], tables: list[Tensor], bases: list[Tensor], made: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the coefficients and the tables; an empty tensor where none is wanted."""
    with no_autocast(q.device):
        good = _fitting(q, coefficients, made, scale)
        if good.any():
            c, (T, phi, bound) = coefficients[0], made
            columns = contract(c, T).expand(*q.shape[:3], -1), phi[:, None]
            *grads, dpsi = backward(dout, q, k, v, mask, scale, None, [True], columns)
            grads.append(project(dpsi, T, c))
            good = _are_good(good, grads[3], dout, v, bound, scale)
            good = good if good.all() or len(c) > 1 else torch.zeros_like(good)  # what samples share is made anew
        if not good.all():
            chosen = ~good if good.any() else None
            s = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases).pick(chosen)
            found = backward(*[*pick(chosen, dout, q, k, v, mask), scale, s, wanted])
            for x, y in zip(grads, found, strict=True) if chosen is not None else ():
                x[chosen] = y if len(y) else 0.0
            grads = found if chosen is None else grads
    learned = zip(grads[3:], [*coefficients, *tables], wanted, strict=True)
    return [*grads[:3], *(x.to(y.dtype).contiguous() if want else y.new_empty(0) for x, y, want in learned)]


_forward_op = torch.library.custom_op("parapos::attention", _forward, mutates_args=())
_backward_op = torch.library.custom_op("parapos::attention_backward", _backward, mutates_args=())
_backward_op.register_autograd(refuse_second_derivative)


@_forward_op.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return empty_heads(q, v.shape[-1])


@_backward_op.register_fake
def _(dout, wanted, q, k, v, mask, scale, exponents, factors, weights, coefficients, *rest):  # type: ignore[no-untyped-def]
    learned = zip([*coefficients, *rest[2]], wanted, strict=True)
    return [*(empty_heads(x) for x in (q, k, v)), *(x.new_empty(x.shape if want else 0) for x, want in learned)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.counts = inputs[4:8], [len(x) for x in inputs[8:]]
    ctx.save_for_backward(*inputs[:4], *chain.from_iterable(inputs[8:]))


def _gradients(ctx, dout):  # type: ignore[no-untyped-def]
    """Gradients in the order of the operator's arguments."""
    q, k, v, mask, *saved = ctx.saved_tensors
    lists = [[saved.pop(0) for _ in range(count)] for count in ctx.counts]
    wanted = [x.requires_grad for x in (*lists[0], *lists[3])]
    dq, dk, dv, *more = _backward_op(dout, wanted, q, k, v, mask, *ctx.numbers, *lists)
    more = [x if want else None for x, want in zip(more, wanted, strict=True)]
    grads: list[list[Any]] = [[None] * count for count in ctx.counts]
    grads[0], grads[3] = more[: len(lists[0])], more[len(lists[0]) :]
    # PyTorch takes an empty list for a list of tensors, and None for no gradient of numbers.
    return dq, dk, dv, None, *([] if x == [] else None for x in ctx.numbers), *grads


_forward_op.register_autograd(_gradients, setup_context=_save)


class _Attention(torch.autograd.Function):
    """The operator where nothing follows it: PyTorch's way to differentiate an operator loads a compiler, 120 MB."""

    @staticmethod
    def forward(ctx, mask, scale, scores, made, q, k, v, *learned):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v, *learned)
        ctx.fixed = mask, scale, scores._replace(coefficients=[], tables=[]), made
        return _forward(*(q, k, v, mask, scale, *scores, made))

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        refuse_batched_gradients(dout)
        (q, k, v, *learned), (mask, scale, scores, made) = ctx.saved_tensors, ctx.fixed
        count, wanted = len(scores.queries), list(ctx.needs_input_grad[7:])
        scores = scores._replace(coefficients=learned[:count], tables=learned[count:])
        run = _backward_op if torch.is_grad_enabled() else _backward  # the operator refuses a second derivative
        dq, dk, dv, *more = run(*(dout, wanted, q, k, v, mask, scale, *scores, made))
        return *[None] * 4, dq, dk, dv, *(x if want else None for x, want in zip(more, wanted, strict=True))


def _exported(call: Call) -> Tensor:
    """The same in standard operators, in float32 at least: columns where there can be, whatever their numbers."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (cast(x, dtype) for x in (call.q, call.k, call.v))
    bias, term = hidden(call.mask, dtype), separable(call)
    if term is not None:
        T, phi, _ = columns(term)
        q = torch.cat([q, contract(term.coefficients(dtype), T)], dim=-1)
        k = torch.cat([k, phi[:, None].expand(*k.shape[:3], -1)], dim=-1)
    for other in call.terms if term is None else ():
        more = other.scores(dtype) * (call.scale if other.scaled else 1.0)
        bias = more if bias is None else bias + more
    return plain(q, k, v, bias, call.scale, hides=any(isinstance(x, Table) for x in call.terms)).to(call.q.dtype)


def attention(call: Call) -> Tensor:
    """As `reference.attention`, without the weights."""
    # PyTorch's fused attention wants the numbers of a head side by side in memory; else it silently forms all scores.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    if torch.compiler.is_exporting():
        return _exported(call)
    if not prod(q.shape[:3]) * k.shape[2]:  # nothing to attend to
        return reference.attention(call)[0]
    if not call.terms:
        return plain(q, k, v, hidden(call.mask, q.dtype), call.scale)
    # If nothing follows operators, plain functions run: dispatch takes as long as a small call.
    if not is_watched(q) and (out := tiles.attention(replace(call, q=q, k=k, v=v))) is not None:
        return out
    term = separable(call)
    s = Scores.of(call.terms, call.scale, torch.promote_types(q.dtype, torch.float32), keep=term is None)
    made = [] if term is None else list(columns(term))
    plainly = (call.mask, call.scale, s, made, q, k, v, *s.coefficients, *s.tables)
    watched = (q, k, v, call.mask, call.scale, *s, made)
    result: Tensor = _forward_op(*watched) if is_watched(q) else _Attention.apply(*plainly)
    return result


def _refuse(call: Call) -> str | None:
    if not call.terms and call.q.is_cuda and call.q.dtype == torch.float64:
        return "PyTorch has no fused float64 attention on GPUs"
    unknown = [type(term).__name__ for term in call.terms if not isinstance(term, Relative | Table)]
    return f"{unknown[0]} is neither relative nor a table" if unknown else None


@torch.no_grad()
def _describe(call: Call) -> str:
    if not call.terms:
        return "PyTorch fused attention, no score terms"
    term, b = separable(call), len(call.q)
    from_d = f"{call.names} formed from D in blocks of queries, added by PyTorch fused attention to its scores"
    if term is None or not prod(call.q.shape[:3]) * call.k.shape[2]:
        return from_d
    if not call.q.is_meta and (text := tiles.describe(call)) is not None:
        return text
    made, is_known = columns(term), not call.q.is_meta
    good = int(_fitting(call.q, [term.coefficients(torch.float32)], made, call.scale).sum()) if is_known else b
    if not good:
        return f"{from_d}; as columns these numbers would lose digits"
    count = made.phi.shape[-1]
    text = f"{call.names} as {count} extra query/key columns in batched products of width {call.q.shape[-1] + count}"
    text += "" if call.q.dtype == torch.float32 else ", in float32"
    if not is_known:
        return f"{text}, or formed from D in blocks of queries if the numbers would lose digits"
    return text if good == b else f"{text}; formed from D for {b - good} of {b} samples, which would lose digits"


register_kernel(Kernel("fused", 20, True, _refuse, _describe, attention))
