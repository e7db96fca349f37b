"""Which kernel runs, and why. `attend` is the one entry to attention; `explain` tells what it would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from . import blockwise, features, flex, reference, triton
from .basis import no_autocast, transformed
from .terms import Polynomial, Quadratic, Table, Term

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class KernelError(RuntimeError):
    """The kernel that was asked for, or strict mode, cannot serve this call."""


@dataclass(frozen=True)
class Call:
    """All that a kernel may look at when it says yes or no."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: tuple[Term, ...]
    mask: Tensor | None
    return_weights: bool = False

    @property
    def needs_grad(self) -> bool:
        learned = (getattr(term, name) for term in self.terms for name in term.learned)
        tensors = (self.q, self.k, self.v, *learned)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@dataclass(frozen=True)
class Kernel:
    """refuse: the reason why a call cannot be served, or None. method: what would happen, in words.

    fused: scores are never all in memory, or take 8 MiB at most. automatic: `auto` may take it.
    """

    name: str
    fused: bool
    refuse: Callable[[Call], str | None]
    method: Callable[[Call], str]
    memory: Callable[[Call], int]
    run: Callable[[Tensor, Tensor, Tensor, Sequence[Term], Tensor | None, float], Tensor]
    automatic: bool = True


WEIGHTS = "a fused kernel never forms the attention weights"


def _features_refuse(call: Call) -> str | None:
    if transformed():
        return "a function transform or forward-mode differentiation is active"
    if call.return_weights:
        return WEIGHTS
    for term in call.terms:
        if not isinstance(term, Table) and term.r.requires_grad:
            return "the positions require a gradient"
    return None


def _features_method(call: Call) -> str:
    if not call.terms:
        return "PyTorch fused attention, no score terms"
    names = _names(call)
    if not features.separable(call.terms, call.q):
        return f"{names} formed in blocks of queries, which PyTorch fused attention adds to its scores"
    extra, width = features.widths(call.q, call.v, call.terms[0])
    text = f"{names} as at most {extra} extra query/key columns in PyTorch fused attention of width {width}"
    if call.q.dtype != torch.float64:
        text += "; formed in blocks of queries where columns would cost accuracy"
    if call.q.shape[2] > 4 * features.QUERIES:
        text += "; keys too far away to have a weight are skipped"
    return text


def _features_memory(call: Call) -> int:
    out = _output(call)
    if not call.terms:
        return out
    if features.separable(call.terms, call.q):
        extra, width = features.widths(call.q, call.v, call.terms[0])
        per_head = 3 * call.q.shape[2] * width * call.q.element_size()
        total = per_head * call.q.shape[0] * call.q.shape[1]
        chunk = min(total, max(per_head, features.CHUNK_BYTES))
        return out + chunk + call.q[..., :1].numel() * extra * 4
    return out + 3 * min(blockwise.BLOCK_BYTES, call.q[..., :1].numel() * call.q.shape[2] * 4) + _basis_memory(call, 1)


def _basis_memory(call: Call, rows: int) -> int:
    """What the basis functions of dense terms take for `rows` rows, or for a block if rows is 1."""
    _, h, n, _ = call.q.shape
    rows = max(1, min(n, blockwise.BLOCK_BYTES // max(1, h * n * 4))) if rows == 1 else rows
    total = 0
    for term in call.terms:
        if not isinstance(term, Table):
            p = term.r.shape[-1]
            f = p * p + p if isinstance(term, Quadratic) else term.c.shape[-1] if isinstance(term, Polynomial) else p
            total += term.r.shape[0] * rows * n * f * max(4, call.q.element_size())
    return total


def _dense_memory(call: Call) -> int:
    scores = call.q[..., :1].numel() * call.q.shape[2]
    return scores * max(4, call.q.element_size()) * (3 + len(call.terms)) + _basis_memory(call, call.q.shape[2])


def _triton_refuse(call: Call) -> str | None:
    if call.return_weights:
        return WEIGHTS
    return triton.refuse(call.q, call.k, call.v, call.terms, call.mask, call.needs_grad)


def _flex_refuse(call: Call) -> str | None:
    if call.return_weights:
        return WEIGHTS
    return flex.refuse(call.q, call.k, call.v, call.terms, call.mask, call.needs_grad)


def _names(call: Call) -> str:
    return " + ".join(type(term).__name__ for term in call.terms) or "no score terms"


def _output(call: Call) -> int:
    return call.q[..., 0].numel() * call.v.shape[-1] * call.q.element_size()


KERNELS = {
    kernel.name: kernel
    for kernel in (  # in order of preference
        Kernel(
            "triton",
            True,
            _triton_refuse,
            lambda call: f"one fused Triton kernel, {_names(call)} computed inside it",
            lambda call: triton.memory(call.q, call.v),
            triton.attention,
        ),
        Kernel("features", True, _features_refuse, _features_method, _features_memory, features.attention),
        Kernel(
            "flex",
            True,
            _flex_refuse,
            lambda call: f"PyTorch FlexAttention, {_names(call)} computed inside it; compiled when first called",
            _output,
            flex.attention,
            automatic=False,
        ),
        Kernel(
            "reference",
            False,
            lambda call: None,
            lambda call: "dense attention in plain operations, all N x N scores in memory",
            _dense_memory,
            lambda *args: reference.attention(*args)[0],
        ),
    )
}


@dataclass(frozen=True)
class Plan:
    """The decision for one call. `str(plan)` is meant to be read."""

    kernel: str
    method: str
    reason: str
    passed_over: dict[str, str]
    memory: int
    call: str

    def __str__(self) -> str:
        lines = [
            self.call,
            f"kernel   {self.kernel} ({self.reason})",
            f"method   {self.method}",
            f"memory   about {self.memory / 2**20:.1f} MiB beyond the inputs",
        ]
        lines += [f"not      {name}: {why}" for name, why in self.passed_over.items()]
        return "\n".join(lines)


def _choose(call: Call, kernel: str, strict: bool) -> Kernel:
    """The kernel to use. Others are asked only as far as it takes."""
    if kernel != "auto":
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}, expected one of auto, {', '.join(KERNELS)}")
        if (reason := KERNELS[kernel].refuse(call)) is not None:
            raise KernelError(f"kernel {kernel!r} cannot serve this call: {reason}")
        if strict and not KERNELS[kernel].fused:
            raise KernelError(f"strict mode wants a fused kernel, and {kernel!r} is not one")
        return KERNELS[kernel]
    chosen = next(k for k in KERNELS.values() if k.automatic and k.refuse(call) is None)
    if strict and not chosen.fused:
        told = "; ".join(f"{name}: {why}" for name, k in KERNELS.items() if (why := k.refuse(call)))
        raise KernelError(f"strict mode wants a fused kernel and none can serve this call. {told}")
    return chosen


def _check(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None) -> None:
    tensors = [("q", q), ("k", k), ("v", v)] + ([] if mask is None else [("mask", mask)])
    for term in terms:
        values = ((f.name, getattr(term, f.name)) for f in fields(term))
        tensors += [(f"{type(term).__name__}.{name}", x) for name, x in values if isinstance(x, Tensor)]
    for name, x in tensors:
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {x.device}")
    for name, x in tensors[:3]:
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, tokens, size), got {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q and k must be equal in shape, and v in all but its last dimension, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    b, h, n, _ = q.shape
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (b, n)):
        raise ValueError(
            f"mask must be a boolean tensor ({b}, {n}) with True for real tokens, got {mask.dtype} {tuple(mask.shape)}"
        )
    for term in terms:
        kind = type(term).__name__
        if isinstance(term, Table):
            want = ((1, b), (1, h), (n,), (n,))
            if term.bias.ndim != 4 or any(s not in w for s, w in zip(term.bias.shape, want, strict=True)):
                raise ValueError(f"Table.bias must be ({b} or 1, {h} or 1, {n}, {n}), got {tuple(term.bias.shape)}")
            continue
        r = term.r
        if r.ndim != 3 or r.shape[0] not in (1, b) or r.shape[1] != n:
            raise ValueError(f"{kind}.r must be ({b} or 1, {n}, p), got {tuple(r.shape)}")
        if r.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{kind}.r must be float32 or float64, got {r.dtype}")
        p = r.shape[-1]
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {"slopes": ((h,),)}
        if isinstance(term, Quadratic):
            shapes = {"M": ((b, h, n, p, p), (b, h, n)), "g": ((b, h, n, p),)}
        for name in term.learned:
            x = getattr(term, name)
            if x is not None and name in shapes and tuple(x.shape) not in shapes[name]:
                raise ValueError(f"{kind}.{name} must be {' or '.join(map(str, shapes[name]))}, got {tuple(x.shape)}")
            if name == "c" and x.shape[:3] != (b, h, n):
                raise ValueError(f"{kind}.c must be ({b}, {h}, {n}, K), got {tuple(x.shape)}")


def _hide(term: Term, mask: Tensor) -> Term:
    """The term without what padding says: its positions are none, its coefficients 0."""
    if isinstance(term, Table):
        return term
    changes = {"r": torch.where(mask[..., None], term.r, torch.nan)}
    for name in term.learned:
        x = getattr(term, name)
        if x is not None and x.ndim > 1:
            changes[name] = x.masked_fill(~mask.reshape(mask.shape[0], 1, -1, *[1] * (x.ndim - 3)), 0.0)
    return replace(term, **changes)  # type: ignore[arg-type]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Term] = (),
    mask: Tensor | None = None,
    *,
    kernel: str = "auto",
    strict: bool = False,
    return_weights: bool = False,
) -> Plan:
    """What `attend` would do with the same arguments, and why. Print it."""
    _check(q, k, v, terms, mask)
    call = Call(q, k, v, tuple(terms), mask, return_weights)
    chosen = _choose(call, kernel, strict)
    auto = kernel == "auto"

    def passed_over(other: Kernel) -> str:
        if reason := other.refuse(call):
            return reason
        if not auto:
            return "another was asked for"
        return (
            "slower, and needs more memory"
            if other.automatic
            else "it compiles for each kind of call; ask for it by name"
        )

    b, h, n, size = q.shape
    return Plan(
        kernel=chosen.name,
        method=chosen.method(call),
        reason="the first in order of preference that can serve the call" if auto else "asked for by name",
        passed_over={name: passed_over(k) for name, k in KERNELS.items() if name != chosen.name},
        memory=chosen.memory(call),
        call=f"attention of {b} x {h} heads x {n} tokens x {size}, {str(q.dtype)[6:]} on {q.device.type}",
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Term] = (),
    mask: Tensor | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    *,
    strict: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * (q.k + scaled terms) + other terms) v.

    q, k (B, H, N, h), v (B, H, N, w) -> (B, H, N, w) in the same dtype. mask (B, N) is key padding, True for real
    tokens; a query that sees no key gives zeros. scale defaults to h^-0.5; with an encoding, use its `scale`. strict
    raises KernelError rather than fall back to the dense kernel, the only one that holds all N x N scores.
    return_weights adds the weights (B, H, N, N), through the reference kernel.
    """
    _check(q, k, v, terms, mask)
    if any(getattr(term, "ignores_mask", False) for term in terms):
        mask = None
    chosen = _choose(Call(q, k, v, tuple(terms), mask, return_weights), kernel, strict)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:  # padding may hold anything, NaN too; here its queries, in the kernels its keys and values
        q, terms = q.masked_fill(~mask[:, None, :, None], 0.0), [_hide(term, mask) for term in terms]
    with no_autocast(q.device):
        if return_weights:
            return reference.attention(q, k, v, terms, mask, scale)
        return chosen.run(q, k, v, terms, mask, scale)
