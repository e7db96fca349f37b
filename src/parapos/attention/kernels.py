"""What a kernel is, and the registry of kernels. A new kernel is one file that registers itself.

B batch, H heads, n queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .terms import Relative, Term

WEIGHTS = "a fused kernel never forms the attention weights"
TRANSFORM = "a function transform or forward-mode differentiation is active"
POSITIONS = "the positions require a gradient"


@dataclass(frozen=True)
class Call:
    """One checked call of attention. mask: (B or 1, H or 1, n or 1, N) with True = may look, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: tuple[Term, ...]
    mask: Tensor | None
    scale: float
    exact: bool = False
    return_weights: bool = False

    @property
    def needs_grad(self) -> bool:
        tensors = any(x.requires_grad for x in (self.q, self.k, self.v))
        return torch.is_grad_enabled() and (tensors or any(term.needs_grad for term in self.terms))

    @property
    def needs_position_grad(self) -> bool:
        return any(isinstance(term, Relative) and term.needs_position_grad for term in self.terms)

    @property
    def names(self) -> str:
        return " + ".join(type(term).__name__ for term in self.terms) or "no score terms"


@dataclass(frozen=True)
class Peak:
    """Peak bytes beyond the inputs: of a forward pass, and of a forward and a backward pass."""

    forward: int
    training: int


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    refuse: why it cannot serve a call, or None. describe: what would run, in words. memory: an estimate. run: the
    output (B, H, n, w). is_fused: scores are never all in memory, or take 8 MiB at most. rank: `auto` takes the lowest
    that does not refuse. by_name: why `auto` passes over this kernel and it must be asked for, or None.
    """

    name: str
    rank: int
    is_fused: bool
    refuse: Callable[[Call], str | None]
    describe: Callable[[Call], str]
    memory: Callable[[Call], Peak]
    run: Callable[[Call], Tensor]
    by_name: Callable[[Call], str | None] = lambda call: None


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
