"""The fused kernel: PyTorch's attention, with score terms as extra query and key columns or as a bias formed from D.

Heads that are a few columns wider add a term of degree two for the price of their width (columns.py): 6 for p = 2, 10
for p = 3. Few tokens are attended to by batched products, which take less time than PyTorch's fused attention then.
Where columns would lose too many digits, and for all other terms, scores are formed from D (scores.py).
Attention is one operator with a backward pass of its own; exported programs hold standard operators instead.
B batch, H heads, n queries, N keys, h query/key size, w value size, f functions, e columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..relative import Exponents, contract, function, project
from ..tracing import cast, no_autocast
from . import reference, tiles
from .columns import ALLOWED, GRADIENT_ROUNDING, columns, features_of, fits
from .kernels import Call, Kernel, refuse_second_derivative, register_kernel
from .scores import Scores, backward_from_d, cut, empty_heads, forward_from_d, pick, plain
from .terms import Relative, Table

PART_BYTES = 4 * 2**20  # what is made of heads at one time, or one head of one sample for each thread
FEW_SCORES = 2**20  # a sample of so few is not parted: an operation takes as long to begin
SHORT = 2**19  # scores of a head of which batched products are the faster way; four times as many of a narrow head
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def separable(call: Call) -> Relative | None:
    """The term of a call that can be columns, if that is its only one and the call is not to be exact."""
    can_be = call.scale > 0 and call.q.dtype != torch.float64 and call.q.device.type in ("cpu", "meta")
    if call.exact or not can_be or len(call.terms) != 1 or not isinstance(term := call.terms[0], Relative):
        return None
    return term if term.scaled and all(e[0] == -2 or 0 <= sum(e) <= 2 for e in term.exponents) else None


def is_short(q: Tensor, k: Tensor) -> bool:
    """Whether batched products attend to so few tokens, whose scores are then all there for some heads."""
    return q.shape[2] * k.shape[2] <= SHORT * (4 if q.shape[-1] <= 32 else 1)


def _width(q: Tensor, v: Tensor, columns: int) -> int:
    """The width of heads with columns in PyTorch's fused attention, which wants one for all, and a multiple of 8."""
    return -(-(max(q.shape[-1], v.shape[-1]) + columns) // 8) * 8


def _parts(q: Tensor, k: Tensor, width: int, copies: int) -> list[tuple[slice, slice]]:
    """Samples and heads whose tensors fit in PART_BYTES, or as few as keep all threads busy.

    copies: widened tensors of a head; where scores are there, once for every four of them.
    """
    b, h, n, threads = *q.shape[:2], max(q.shape[2], k.shape[2]), torch.get_num_threads()
    one = copies * n * width * 4 + (copies * q.shape[2] * k.shape[2] if is_short(q, k) else 0)
    # The backward pass gives each thread whole heads, so a part has as many for each.
    heads = h if h * n**2 <= FEW_SCORES else min(h, threads * max(1, round(PART_BYTES / (one * threads))))
    samples = max(1, min(b, PART_BYTES // (one * h)))
    starts = product(range(0, b, samples), range(0, h, heads))
    return [(slice(i, min(i + samples, b)), slice(j, min(j + heads, h))) for i, j in starts]


def _widen(part: tuple[slice, slice], *pairs: tuple[Tensor, Tensor | None], width: int = 0) -> list[Tensor]:
    """A part of tensors (B, H, N, size) in float32, with columns (B or 1, H or 1, N, e) if any, and zeros to width."""
    wide = []
    for x, more in pairs:
        x = x[part].float()
        row = [x] if more is None else [x, cut(more, *part).expand(*x.shape[:3], -1)]
        size = sum(y.shape[-1] for y in row)
        row += [x.new_zeros(()).expand(*x.shape[:3], width - size)] if width > size else []
        wide.append(torch.cat(row, dim=-1) if len(row) > 1 else x)
    return wide


def _bias(mask: Tensor | None, dtype: torch.dtype, *part: slice) -> Tensor | None:
    """The mask, or a part of it, as numbers that are added to scores."""
    if mask is None:
        return None
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~cut(mask, *part), -torch.inf)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """All weights of some heads, (B H, n, N)."""
    scores = q.new_empty(prod(q.shape[:2]), q.shape[2], k.shape[2])
    scores = torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale, out=scores)
    if bias is not None:
        scores.unflatten(0, q.shape[:2]).add_(bias)
    return torch.softmax(scores, -1, out=scores)


def _short_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention by batched products."""
    return torch.bmm(_weights(q, k, bias, scale), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def _short_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, size: int
) -> list[Tensor]:
    """Gradients of widened q, of the first `size` columns of k, and of v."""
    heads, weights = q.shape[:2], _weights(q, k, bias, scale)
    x, y, z, dy = (t.flatten(0, 1) for t in (q[..., :size] * scale, k, v, dout))
    dv, ds = torch.bmm(weights.mT, dy), torch.bmm(dy, z.mT)
    torch.ops.aten._softmax_backward_data.out(ds, weights, -1, ds.dtype, grad_input=ds)
    return [t.unflatten(0, heads) for t in (torch.bmm(ds, y).mul_(scale), torch.bmm(ds.mT, x), dv)]


def _columns_forward(
    out: Tensor, stats: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float,
    c: Tensor, T: Tensor, phi: Tensor,
) -> None:  # fmt: skip
    """Attention, written to out. Long rows: log-sum-exp of scores and mean position of keys, written to stats."""
    short, size, width, p = is_short(q, k), v.shape[-1], _width(q, v, phi.shape[-1]), stats.shape[-1] - 1
    psi, phi = contract(c, T), phi[:, None]
    for part in _parts(q, k, width, 4):
        bias = _bias(mask, torch.float32, *part)
        if short:
            wide = _widen(part, (q, psi), (k, phi), (v, None))
            out[part] = _short_forward(*wide, bias, scale)
        else:
            wide = _widen(part, (q, psi), (k, phi), (v, phi[..., :p]), width=width)  # means come for nothing
            y, stats[part][..., 0] = FLASH(*wide, attn_mask=bias, scale=scale)
            out[part], stats[part][..., 1:] = y[..., :size], y[..., size : size + p]


def _columns_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor | None, scale: float,
    features: Exponents, c: Tensor, T: Tensor, phi: Tensor, bound: Tensor,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of q, k, v and the coefficients, and of which samples (B,) those of the coefficients are good."""
    psi, size, width = contract(c, T).expand(*q.shape[:3], -1), q.shape[-1], _width(q, v, phi.shape[-1])
    dq, dk, dv = (empty_heads(x) for x in (q, k, v))
    dpsi, short = torch.empty_like(psi), is_short(q, k)
    pairs = ((q, psi), (k, phi[:, None]), (v, None), (dout, None), (out, None))
    for part in _parts(q, k, width, 8):
        bias = _bias(mask, torch.float32, *part)
        if short:
            *wide, dy = _widen(part, *pairs[:4])
            grads = _short_backward(dy, *wide, bias, scale, size)
        else:
            *wide, dy, y = _widen(part, *pairs, width=width)
            if q.dtype != torch.float32:  # the output was rounded, and gradients of coefficients would show it
                y = FLASH(*wide, attn_mask=bias, scale=scale)[0]
            lse = stats[part][..., 0].contiguous()
            grads = FLASH_BACKWARD(dy, *wide, y, lse, 0.0, False, attn_mask=bias, scale=scale)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into[part] = grad[..., : into.shape[-1]]
        dpsi[part] = grads[0][..., size : size + psi.shape[-1]]
    dc = project(dpsi if short else _balanced(dpsi, stats[..., 1:], features), T, c)
    return [dq, dk, dv, dc], _are_good(dc, dout, v, bound, scale)


def _balanced(dpsi: Tensor, mean: Tensor, features: Exponents) -> Tensor:
    """The gradient of query columns, without what rounding leaves of the sum of a row of ds.

    That sum is 0 and stands in the column after the features. What is left of it is taken away at the mean position of
    the keys (B, H, n, p), or it would count as much as the keys are far from the query.
    """
    left = dpsi[..., len(features), None]
    at = torch.stack([function(mean.unbind(-1), e) for e in features], dim=-1)
    return dpsi - F.pad(left * at, (0, dpsi.shape[-1] - len(features)))


def _are_good(dc: Tensor, dout: Tensor, v: Tensor, bound: Tensor, scale: float) -> Tensor:
    """Of which samples (B,) columns gave good gradients of coefficients."""
    # A sum over keys rounds to what its largest products allow: at most |dout| |v| of a query, times what T and phi
    # reach. Where that is too large a share of the result (far positions, one-hot weights), D must give the gradient.
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (dout, v)]
    reach = norms[0] * norms[1].amax(-1, keepdim=True) * torch.linalg.vector_norm(bound, dim=-1)[:, None]
    lost, whole = (torch.linalg.vector_norm(x.flatten(1), dim=1) for x in (reach, dc))
    most = ALLOWED / (scale * GRADIENT_ROUNDING) * whole
    # What counts is the gradient of all samples; if that is not good, those go whose own is not.
    if torch.linalg.vector_norm(lost) <= torch.linalg.vector_norm(most):
        return torch.ones_like(lost, dtype=torch.bool)
    return lost <= most if len(dc) > 1 else torch.zeros_like(lost, dtype=torch.bool)


# The operators. Each compiles to one node, which decides by the numbers it meets.


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, exponents: list[int], factors: list[float],
    weights: list[float], coefficients: list[Tensor], queries: list[Tensor], keys: list[Tensor], tables: list[Tensor],
    bases: list[Tensor], made: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and, where columns were used, what `_outputs` has room for. made: the parts of `Columns`, or nothing."""
    out, stats = _outputs(q, v, queries[0].shape[-1] if queries else 0, made)
    good = _fitting(q, coefficients, made, scale)
    for chosen in (None,) if good.all() or not good.any() else (good, ~good):
        tensors = pick(chosen, q, k, v, mask)
        y, z = (out, stats) if chosen is None else _outputs(tensors[0], v, stats.shape[-1] - 1, made)
        if good[0] if chosen is None else chosen is good:
            _columns_forward(y, z, *[*tensors, scale, *pick(chosen, coefficients[0], *made[:2])])
        else:
            scores = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
            forward_from_d(y, *[*tensors, scale, scores.pick(chosen)])
        if chosen is not None:
            out[chosen], stats[chosen] = y, z
    return out, stats


def _fitting(q: Tensor, coefficients: Sequence[Tensor], made: Sequence[Tensor], scale: float) -> Tensor:
    """Which samples (B,) columns serve."""
    return (fits(coefficients[0], made[2], scale) if made else q.new_zeros(1, dtype=torch.bool)).expand(len(q))


def _outputs(q: Tensor, v: Tensor, p: int, made: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Room for the output and, with columns, what `_columns_forward` tells of each row, (B, H, n, 1 + p)."""
    size = (*q.shape[:3], 1 + p) if made else (0,)
    return empty_heads(q, v.shape[-1]), q.new_zeros(size, dtype=torch.float32)


def _backward(
    dout: Tensor, out: Tensor, stats: Tensor, wanted: list[bool], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    scale: float, exponents: list[int], factors: list[float], weights: list[float], coefficients: list[Tensor],
    queries: list[Tensor], keys: list[Tensor], tables: list[Tensor], bases: list[Tensor], made: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the coefficients and the tables; an empty tensor where none is wanted."""
    grads: list[Tensor] = []
    s = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
    with no_autocast(q.device):
        good = _fitting(q, coefficients, made, scale)
        if good.any():
            chosen = None if good.all() else good
            given = pick(chosen, dout, q, k, v, out, stats, mask, coefficients[0], *made)
            grads, kept = _columns_backward(*[*given[:7], scale, features_of(s.exponents_of(0)), *given[7:]])
            if chosen is not None:
                room = [*(empty_heads(x) for x in (q, k, v)), torch.zeros_like(coefficients[0])]
                grads = _placed(grads, room, chosen)
            if not kept.all():  # D writes over these; a sum over samples is made anew
                good = good.masked_scatter(good, kept) if len(coefficients[0]) > 1 else torch.zeros_like(good)
        if not good.all():
            chosen = ~good if good.any() else None
            found = backward_from_d(*[*pick(chosen, dout, q, k, v, mask), scale, s.pick(chosen), wanted])
            grads = found if chosen is None else _placed(found, grads, chosen)
    learned = zip(grads[3:], [*coefficients, *tables], wanted, strict=True)
    return [*grads[:3], *(x.to(y.dtype).contiguous() if want else y.new_empty(0) for x, y, want in learned)]


def _placed(found: Sequence[Tensor], room: list[Tensor], chosen: Tensor) -> list[Tensor]:
    """room with gradients of the chosen samples at their places; what samples share is summed."""
    for x, y in zip(room, found, strict=True):
        if len(y) and len(x) == len(chosen):
            x[chosen] = y
        elif len(y):  # else it is not wanted
            x += y
    return room


_forward_op = torch.library.custom_op("parapos::attention", _forward, mutates_args=())
_backward_op = torch.library.custom_op("parapos::attention_backward", _backward, mutates_args=())
_backward_op.register_autograd(refuse_second_derivative)


@_forward_op.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return _outputs(q, v, rest[6][0].shape[-1] if rest[6] else 0, rest[-1])


@_backward_op.register_fake
def _(dout, out, stats, wanted, q, k, v, mask, scale, exponents, factors, weights, coefficients, *rest):  # type: ignore[no-untyped-def]
    learned = zip([*coefficients, *rest[2]], wanted, strict=True)
    return [*(empty_heads(x) for x in (q, k, v)), *(x.new_empty(x.shape if want else 0) for x, want in learned)]


def _is_watched(q: Tensor) -> bool:
    """Whether something follows operators. If not, plain functions run: dispatch takes as long as a small call."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or q.is_meta or type(q) is not Tensor:
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.counts = inputs[4:8], [len(x) for x in inputs[8:]]
    ctx.save_for_backward(*output, *inputs[:4], *chain.from_iterable(inputs[8:]))


def _gradients(ctx, dout, _=None):  # type: ignore[no-untyped-def]
    """Gradients in the order of the operator's arguments."""
    out, stats, q, k, v, mask, *saved = ctx.saved_tensors
    lists = [[saved.pop(0) for _ in range(count)] for count in ctx.counts]
    wanted = [x.requires_grad for x in (*lists[0], *lists[3])]
    dq, dk, dv, *more = _backward_op(dout, out, stats, wanted, q, k, v, mask, *ctx.numbers, *lists)
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
        out, stats = _forward(*(q, k, v, mask, scale, *scores, made))
        ctx.fixed = mask, scale, scores._replace(coefficients=[], tables=[]), made
        ctx.save_for_backward(out, stats, q, k, v, *learned)
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        (out, stats, q, k, v, *learned), (mask, scale, scores, made) = ctx.saved_tensors, ctx.fixed
        count, wanted = len(scores.queries), list(ctx.needs_input_grad[7:])
        scores = scores._replace(coefficients=learned[:count], tables=learned[count:])
        run = _backward_op if torch.is_grad_enabled() else _backward  # the operator refuses a second derivative
        dq, dk, dv, *more = run(*(dout, out, stats, wanted, q, k, v, mask, scale, *scores, made))
        return *[None] * 4, dq, dk, dv, *(x if want else None for x, want in zip(more, wanted, strict=True))


def _exported(call: Call) -> Tensor:
    """The same in standard operators, in float32 at least: columns where there can be, whatever their numbers."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (cast(x, dtype) for x in (call.q, call.k, call.v))
    bias, term = _bias(call.mask, dtype), separable(call)
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
        return plain(q, k, v, _bias(call.mask, q.dtype), call.scale)
    if not _is_watched(q) and (out := tiles.attention(replace(call, q=q, k=k, v=v))) is not None:
        return out
    term = separable(call)
    s = Scores.of(call.terms, call.scale, torch.promote_types(q.dtype, torch.float32), keep=term is None)
    made = [] if term is None else list(columns(term))
    args = (q, k, v, call.mask, call.scale, *s, made)
    if _is_watched(q):
        return _forward_op(*args)[0]
    if not call.needs_grad:
        return _forward(*args)[0]
    trained: Tensor = _Attention.apply(call.mask, call.scale, s, made, q, k, v, *s.coefficients, *s.tables)
    return trained


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
    made = columns(term)
    good = b if call.q.is_meta else int(_fitting(call.q, [term.coefficients(torch.float32)], made, call.scale).sum())
    if not good:
        return f"{from_d}; as columns these numbers would lose digits"
    how = f"PyTorch fused attention of width {_width(call.q, call.v, made.phi.shape[-1])}"
    how = "batched products" if is_short(call.q, call.k) else how
    text = f"{call.names} as {len(features_of(term.exponents))} extra query/key columns in {how}"
    text += "" if call.q.dtype == torch.float32 else ", in float32"
    if call.q.is_meta:
        return f"{text}, or formed from D in blocks of queries if the numbers would lose digits"
    return text if good == b else f"{text}; formed from D for {b - good} of {b} samples, which would lose digits"


register_kernel(Kernel("fused", 20, True, _refuse, _describe, attention))
