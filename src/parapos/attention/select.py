"""Which kernel runs, and why. `attend` is the one entry to attention; `explain` tells what it would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from . import features, flex, memory, reference, triton
from .basis import no_autocast, transformed
from .terms import Quadratic, Table, Term

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
    scale: float = 1.0

    @property
    def sizes(self) -> memory.Sizes:
        return memory.Sizes(self.q, self.v, self.terms, self.mask is not None)

    @property
    def needs_grad(self) -> bool:
        learned = (getattr(term, name) for term in self.terms for name in term.learned)
        tensors = (self.q, self.k, self.v, *learned)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@dataclass(frozen=True)
class Kernel:
    """refuse: the reason why a call cannot be served, or None. method: what would happen, in words.

    fused: scores are never all in memory, or take 8 MiB at most. by_name: why `auto` does not take it, if so.
    """

    name: str
    fused: bool
    refuse: Callable[[Call], str | None]
    method: Callable[[Call], str]
    memory: Callable[[Call], memory.Peak]
    run: Callable[[Tensor, Tensor, Tensor, Sequence[Term], Tensor | None, float], Tensor]
    by_name: Callable[[Call], str | None] = lambda call: None


WEIGHTS = "a fused kernel never forms the attention weights"


def _features_refuse(call: Call) -> str | None:
    if transformed():
        return "a function transform or forward-mode differentiation is active"
    if call.return_weights:
        return WEIGHTS
    if not call.terms and call.q.is_cuda and call.q.dtype == torch.float64:
        return "PyTorch's fused attention has no float64 on GPUs"
    for term in call.terms:
        if not isinstance(term, Table) and term.r.requires_grad and torch.is_grad_enabled():
            return "the positions require a gradient"
    return None


def _as_columns(call: Call, dtype: torch.dtype) -> Quadratic | None:
    """The term that becomes columns of this dtype, if its numbers can."""
    if not features.separable(call.terms, call.q, call.scale):
        return None
    term = call.terms[0] if call.mask is None else _hide(call.terms[0], call.mask)
    assert isinstance(term, Quadratic)
    if call.q.is_meta:  # no numbers to ask
        return term
    with torch.no_grad(), no_autocast(call.q.device):
        return term if features.exact(call.q, call.v, term, call.mask, call.scale, dtype) else None


def _features_method(call: Call) -> str:
    if not call.terms:
        return "PyTorch fused attention, no score terms"
    names = _names(call)
    term = _as_columns(call, call.q.dtype)
    if term is None:
        text = f"{names} formed in blocks of queries, which PyTorch fused attention adds to its scores"
        if features.separable(call.terms, call.q, call.scale):
            text += "; as columns these numbers would lose digits"
        return text
    extra, width = features.widths(call.q, call.v, term)
    text = f"{names} as at most {extra} extra query/key columns in PyTorch fused attention of width {width}"
    if call.q.is_meta:
        text += ", in blocks of queries instead if the numbers would lose digits"
    if term.M is not None and call.q.shape[2] > 4 * features.QUERIES:
        text += "; keys are skipped where the parabolas leave them no weight"
    if call.needs_grad and _as_columns(call, torch.promote_types(call.q.dtype, torch.float32)) is None:
        text += "; its backward pass in blocks of queries"
    return text


def _features_memory(call: Call) -> memory.Peak:
    peaks = []
    for dtype in (call.q.dtype, torch.promote_types(call.q.dtype, torch.float32)):  # of the two passes
        term = _as_columns(call, dtype)
        peaks.append(
            memory.in_blocks(call.sizes) if term is None else memory.as_columns(call.sizes, call.q, call.v, term)
        )
    return memory.Peak(peaks[0].forward, max(peaks[0].forward, peaks[1].training))


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


KERNELS = {
    kernel.name: kernel
    for kernel in (  # in order of preference
        Kernel(
            "triton",
            True,
            _triton_refuse,
            lambda call: f"one fused Triton kernel, {_names(call)} computed inside it",
            lambda call: memory.in_kernel(call.sizes),
            triton.attention,
            by_name=lambda call: None if call.q.is_cuda else "it would run in Triton's interpreter; ask for it by name",
        ),
        Kernel(
            "features",
            True,
            _features_refuse,
            _features_method,
            _features_memory,
            features.attention,
        ),
        Kernel(
            "flex",
            True,
            _flex_refuse,
            lambda call: f"PyTorch FlexAttention, {_names(call)} computed inside it; compiled when first called",
            lambda call: memory.compiled(call.sizes),
            flex.attention,
            by_name=lambda call: "it compiles for each kind of call; ask for it by name",
        ),
        Kernel(
            "reference",
            False,
            lambda call: None,
            lambda call: "dense attention in plain operations, all N x N scores in memory",
            lambda call: memory.dense(call.sizes),
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
    training: int | None
    call: str

    def __str__(self) -> str:
        lines = [
            self.call,
            f"kernel   {self.kernel} ({self.reason})",
            f"method   {self.method}",
            f"memory   {_mib(self.memory)} beyond the inputs"
            + (f", {_mib(self.training)} with the backward pass" if self.training is not None else ""),
        ]
        lines += [f"not      {name}: {why}" for name, why in self.passed_over.items()]
        return "\n".join(lines)


def _mib(size: int) -> str:
    return f"about {size / 2**20:.1f} MiB"


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
    chosen = next(k for k in KERNELS.values() if k.refuse(call) is None and k.by_name(call) is None)
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
        if term.at is not None:
            raise ValueError(f"{kind}.at must be None: attention is over all rows")
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


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Term],
    mask: Tensor | None,
    scale: float | None,
    return_weights: bool,
) -> Call:
    """The arguments, checked and completed."""
    _check(q, k, v, terms, mask)
    if any(getattr(term, "ignores_mask", False) for term in terms):
        mask = None
    return Call(q, k, v, tuple(terms), mask, return_weights, q.shape[-1] ** -0.5 if scale is None else scale)


def _hide(term: Term, mask: Tensor) -> Term:
    """The term without what padding says: its positions are none, its coefficients 0."""
    if isinstance(term, Table):
        return term
    changes = {"r": torch.where(mask[..., None], term.r, torch.nan)}
    for name in term.learned:
        x = getattr(term, name)
        if x is not None and x.ndim > 1:
            changes[name] = x.masked_fill(~mask.reshape(mask.shape[0], 1, mask.shape[1], *[1] * (x.ndim - 3)), 0.0)
    return replace(term, **changes)  # type: ignore[arg-type]


def explain(
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
) -> Plan:
    """What `attend` would do with the same arguments, and why. Print it."""
    call = _call(q, k, v, terms, mask, scale, return_weights)
    chosen = _choose(call, kernel, strict)
    auto = kernel == "auto"

    def passed_over(other: Kernel) -> str:
        if reason := other.refuse(call):
            return reason
        if not auto:
            return "another was asked for"
        if reason := other.by_name(call):
            return reason
        return f"it comes later in the order of preference, and takes {_mib(_needed(other.memory(call)))}"

    def _needed(peak: memory.Peak) -> int:
        return peak.training if call.needs_grad else peak.forward

    b, h, n, size = q.shape
    return Plan(
        kernel=chosen.name,
        method=chosen.method(call),
        reason="the first in order of preference that can serve the call" if auto else "asked for by name",
        passed_over={name: passed_over(k) for name, k in KERNELS.items() if name != chosen.name},
        memory=chosen.memory(call).forward,
        training=chosen.memory(call).training if call.needs_grad else None,
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
    call = _call(q, k, v, terms, mask, scale, return_weights)
    chosen = _choose(call, kernel, strict)
    mask, scale = call.mask, call.scale
    if mask is not None:  # padding may hold anything, NaN too; here its queries, in the kernels its keys and values
        q, terms = q.masked_fill(~mask[:, None, :, None], 0.0), [_hide(term, mask) for term in terms]
    with no_autocast(q.device):
        if return_weights:
            return reference.attention(q, k, v, terms, mask, scale)
        return chosen.run(q, k, v, terms, mask, scale)
