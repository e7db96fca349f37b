"""What a kernel is, and the registry of kernels. A new kernel is one file that registers itself.

B batch, H heads, n queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tracing import is_transformed
from .terms import Relative, Term


@dataclass(frozen=True)
class Call:
    """One checked call of attention.

    mask: (B or 1, H or 1, n or 1, N) with True = may look, or None. tolerance: the weight that a row may lose.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    terms: tuple[Term, ...]
    mask: Tensor | None
    scale: float
    exact: bool = False
    return_weights: bool = False
    tolerance: float = 0.0

    @property
    def needs_grad(self) -> bool:
        tensors = any(x.requires_grad for x in (self.q, self.k, self.v))
        return torch.is_grad_enabled() and (tensors or any(term.needs_grad for term in self.terms))

    @property
    def needs_position_grad(self) -> bool:
        relative = (term for term in self.terms if isinstance(term, Relative))
        return torch.is_grad_enabled() and any(t.r.r.requires_grad or t.key_positions.r.requires_grad for t in relative)

    @property
    def names(self) -> str:
        return " + ".join(type(term).__name__ for term in self.terms) or "no score terms"


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    rank: `auto` takes the lowest that can serve a call. is_fused: scores are never all in memory, or take 10
    MiB for each thread at most. refuse: what this kernel cannot do in a call, or None. describe: what would run, in
    words. run: the output (B, H, n, w). by_name: why `auto` passes over this kernel and it must be asked for, or None.
    """

    name: str
    rank: int
    is_fused: bool
    refuse: Callable[[Call], str | None]
    describe: Callable[[Call], str]
    run: Callable[[Call], Tensor]
    by_name: Callable[[Call], str | None] = lambda call: None

    def reason_against(self, call: Call) -> str | None:
        """Why this kernel cannot serve a call, or None: what no fused kernel can do, and what this one cannot."""
        if self.is_fused and call.return_weights:
            return "a fused kernel never forms the attention weights"
        if self.is_fused and is_transformed():
            return "a function transform or forward-mode differentiation is active"
        if self.is_fused and call.needs_position_grad:
            return "the positions require a gradient"
        return self.refuse(call)


KERNELS: dict[str, Kernel] = {}
ALIASES = {"features": "fused"}


def register_kernel(kernel: Kernel) -> Kernel:
    """Makes a kernel known to `attend`, `explain` and `Attention`, in the order of ranks. A known name is replaced."""
    KERNELS[kernel.name] = kernel
    for name in sorted(KERNELS, key=lambda name: KERNELS[name].rank):
        KERNELS[name] = KERNELS.pop(name)
    return kernel


def find_kernel(name: str) -> Kernel:
    name = ALIASES.get(name, name)
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}, expected one of auto, {', '.join(KERNELS)}")
    return KERNELS[name]


def refuse_batched_gradients(dout: Tensor) -> None:
    if torch._C._functorch.is_batchedtensor(dout) or torch._C._functorch.is_legacy_batchedtensor(dout):
        raise RuntimeError("fused attention has no batched gradients; use kernel='reference', which has them")


def refuse_second_derivative(ctx: object, *grads: object) -> None:
    raise RuntimeError("fused attention has no second derivative; use kernel='reference', which has one")
