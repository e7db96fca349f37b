"""The fused kernel: PyTorch's attention, with score terms as extra query and key columns or as a bias formed from D.

Heads that are a few columns wider add a term of degree two for the price of their width (columns.py): 6 for p = 2, 10
for p = 3. Where columns would lose too many digits, and for all other terms, scores are formed from D (scores.py).
Attention is one operator with a backward pass of its own; exported programs hold standard operators instead.
B batch, H heads, n queries, N keys, h query/key size, w value size, f functions, e columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..relative import contract, project
from ..tracing import cast, no_autocast
from . import reference
from .columns import ALLOWED, GRADIENT_ROUNDING, columns, copies, features_of, fits, halves
from .kernels import Call, Kernel, refuse_second_derivative, register_kernel
from .scores import Scores, backward_from_d, cut, empty_heads, forward_from_d, plain
from .terms import Relative, Table

PART_BYTES = 2 * 2**20  # widened tensors at one time, or one head of one sample


def separable(call: Call) -> Relative | None:
    """The term of a call that can be columns, if that is its only one and the call is not to be exact."""
    can_be = call.scale > 0 and call.q.dtype in ALLOWED and call.q.device.type in ("cpu", "meta")
    if call.exact or not can_be or len(call.terms) != 1 or not isinstance(term := call.terms[0], Relative):
        return None
    return term if term.scaled and all(e[0] == -2 or 0 <= sum(e) <= 2 for e in term.exponents) else None


def _parts(q: Tensor, k: Tensor, width: int, copies: int) -> list[tuple[slice, slice]]:
    """Samples and heads whose widened tensors fit in PART_BYTES; at least as many heads as there are threads."""
    b, h, n, _ = q.shape
    one = copies * max(n, k.shape[2]) * width * q.element_size()
    heads = -(-h // max(1, min(round(h * one / PART_BYTES), h // min(h, torch.get_num_threads()))))
    samples = max(1, min(b, PART_BYTES // (one * h)))
    starts = product(range(0, b, samples), range(0, h, heads))
    return [(slice(i, min(i + samples, b)), slice(j, min(j + heads, h))) for i, j in starts]


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
        """The tensors of this part; the first two, queries and keys, with columns."""
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


def _bias(mask: Tensor | None, dtype: torch.dtype, part: tuple[slice, slice] | None = None) -> Tensor | None:
    """A mask as numbers. Of a part, a row without keys sees all, and what it gives is dropped afterwards."""
    if mask is None:
        return None
    if part is not None:
        mask = cut(mask, *part)
        mask = mask | ~mask.any(-1, keepdim=True)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _drop_empty(out: Tensor, mask: Tensor | None) -> Tensor:
    """A query that sees no key gives zeros."""
    return out if mask is None else out.masked_fill_(~mask.any(-1, keepdim=True), 0.0)


def _columns_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, c: Tensor, T: Tensor, phi: Tensor
) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of each query's scores."""
    psi = contract(c, T).expand(*q.shape[:3], -1)
    width, w = q.shape[-1] + phi.shape[-1], v.shape[-1]
    parts = _parts(q, k, width, 4)
    widen = _Wide(parts[0], width, q, k, v)
    out, lse = _outputs(q, w, width)
    for part in parts:
        wide, bias = widen(part, *_columns_of(part, psi, phi)), _bias(mask, q.dtype, part)
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
    psi, size, w = contract(c, T).expand(*q.shape[:3], -1), q.shape[-1], v.shape[-1]
    width = size + phi.shape[-1]
    dout = dout if mask is None else _drop_empty(dout.clone(), mask)
    parts = _parts(q, k, width, 8)
    dq, dk, dv = (empty_heads(x, x.shape[-1], width) for x in (q, k, v))
    dpsi, widen = psi.new_empty(psi.shape), _Wide(parts[0], width, q, k, v, dout, out)
    for part in parts:
        *wide, dy, y = widen(part, *_columns_of(part, psi, phi))
        bias = _bias(mask, q.dtype, part)
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
    # A sum over keys rounds to what its largest products allow: at most |dout| |v| of a query, times what T and phi
    # reach. Where that is too large a share of the result (far positions, one-hot weights), D gives the gradient.
    reach = torch.linalg.vector_norm(dout, dim=-1) * torch.linalg.vector_norm(v, dim=-1).amax(-1, keepdim=True)
    lost = torch.linalg.vector_norm(reach[..., None] * bound[:, None]) * (scale * GRADIENT_ROUNDING)
    return [dq, dk, dv, dc] if bool(lost <= ALLOWED[q.dtype] * torch.linalg.vector_norm(dc)) else None


# The operator. It compiles to one node, which decides by the numbers it meets.


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, exponents: list[int], factors: list[float],
    weights: list[float], coefficients: list[Tensor], queries: list[Tensor], keys: list[Tensor], tables: list[Tensor],
    bases: list[Tensor], made: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and the log-sum-exp of the scores where columns were used. made: the parts of `Columns`, or nothing."""
    if made and fits(coefficients[0], made[2], scale, q.dtype):
        return _columns_forward(q, k, v, mask, scale, coefficients[0], *made[:2])
    s = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
    out, lse = _outputs(q, v.shape[-1], _room(q, made))
    forward_from_d(out, q, k, v, mask, scale, s)
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
            s = Scores(exponents, factors, weights, coefficients, queries, keys, tables, bases)
            grads = backward_from_d(dout, q, k, v, mask, scale, s, wanted, _room(q, made))
    learned = zip(grads[3:], [*coefficients, *tables], wanted, strict=True)
    return [*grads[:3], *(x.to(y.dtype).contiguous() if want else y.new_empty(0) for x, y, want in learned)]


@_attention_backward.register_fake
def _(dout, out, lse, wanted, q, k, v, mask, scale, exponents, factors, weights, coefficients, *rest):  # type: ignore[no-untyped-def]
    grads = [x.new_empty(x.shape if want else 0) for x, want in zip([*coefficients, *rest[2]], wanted, strict=True)]
    return [*(empty_heads(x, x.shape[-1], _room(q, rest[-1])) for x in (q, k, v)), *grads]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.counts = inputs[4:8], [len(x) for x in inputs[8:]]
    ctx.save_for_backward(*output, *inputs[:4], *chain.from_iterable(inputs[8:]))


def _grads(ctx, dout, _):  # type: ignore[no-untyped-def]
    out, lse, q, k, v, mask, *saved = ctx.saved_tensors
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
    return plain(q, k, v, bias, call.scale).to(call.q.dtype)


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
    term = separable(call)
    s = Scores.of(call.terms, call.scale, torch.promote_types(q.dtype, torch.float32), keep=term is None)
    made = [] if term is None else list(columns(term, q, v))
    # Without gradients there is no need to pass through PyTorch's dispatcher, which takes as long as a small call.
    watched = torch.compiler.is_compiling() or type(q) is not Tensor or torch._C._len_torch_dispatch_stack()
    direct = not (call.needs_grad or watched or q.is_meta)
    out: Tensor = (_attend if direct else _attention)(q, k, v, call.mask, call.scale, *s, made)[0]
    return out


def _refuse(call: Call) -> str | None:
    if not call.terms and call.q.is_cuda and call.q.dtype == torch.float64:
        return "PyTorch has no fused float64 attention on GPUs"
    unknown = [type(term).__name__ for term in call.terms if not isinstance(term, Relative | Table)]
    return f"{unknown[0]} is neither relative nor a table" if unknown else None


@torch.no_grad()
def _describe(call: Call) -> str:
    if not call.terms:
        return "PyTorch fused attention, no score terms"
    term, dtype = separable(call), call.q.dtype
    from_d = f"{call.names} formed from D in blocks of queries, added by PyTorch fused attention to its scores"
    if term is None or not prod(call.q.shape[:3]) * call.k.shape[2]:
        return from_d
    made = columns(term, call.q, call.v)
    if not call.q.is_meta and not fits(term.coefficients(torch.float32), made.bound, call.scale, dtype):
        return f"{from_d}; as columns these numbers would lose digits"
    e, width = len(features_of(term, dtype)) * copies(dtype), call.q.shape[-1] + made.phi.shape[-1]
    text = f"{call.names} as {e} extra query/key columns in PyTorch fused attention of width {width}"
    if call.q.is_meta:
        text += ", or formed from D in blocks of queries if the numbers would lose digits"
    if dtype != torch.float32:
        text += "; a backward pass forms scores from D in blocks of queries"
    return text


register_kernel(Kernel("fused", 20, True, _refuse, _describe, attention))
