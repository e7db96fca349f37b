"""The arithmetic under the score terms: differences, monomials, and contraction of coefficients with a basis.

B batch, H heads, N tokens, n query rows, p position dims, f basis functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations_with_replacement

import torch
from torch import Tensor

Exponents = tuple[tuple[int, ...], ...]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Positional arithmetic is never cast; devices that know no autocast (meta) need no protection.

    A program that is being compiled or exported is protected from the autocast that it may meet later.
    """
    known = torch.amp.is_autocast_available(device.type)
    casts = known and (torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type))
    return torch.autocast(device.type, enabled=False) if casts else nullcontext()


def transformed() -> bool:
    """Whether a function transform or forward-mode differentiation is active; a compiler is neither."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def once_only(ctx: object, *grads: object) -> None:
    """The backward pass of a backward pass that has none."""
    raise RuntimeError("fused attention has no second derivative; ask for kernel='reference', which has")


def monomials(p: int, degree: int) -> Exponents:
    """Exponents of all monomials in p variables of degree 1..degree: C(degree + p, p) - 1 of them."""
    return tuple(
        tuple(factors.count(u) for u in range(p))
        for n in range(1, degree + 1)
        for factors in combinations_with_replacement(range(p), n)
    )


def monomial(d: Sequence[Tensor] | Tensor, exponents: tuple[int, ...]) -> Tensor:
    """The product of d[u]^exponents[u], by repeated products."""
    out = torch.ones_like(d[0])
    for u, power in enumerate(exponents):
        for _ in range(power):
            out = out * d[u]
    return out


def difference(r: Tensor, at: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D (p, B or 1, n, N) from keys r and queries `at`, subtracted at their own precision; 0 where one has none.

    Coordinates come first, so that every operation runs over long rows.
    """
    keys = r.movedim(-1, 0).contiguous()
    queries = keys if at is None else at.movedim(-1, 0).contiguous()
    return (keys[:, :, None, :] - queries[:, :, :, None]).nan_to_num_(nan=0.0).to(dtype)


def contract(coefficients: Tensor, basis: Tensor, factor: float = 1.0) -> Tensor:
    """(B, H, n, f), (B or 1, n, f, N) -> (B, H, n, N), times a factor. A shared basis is never copied per sample."""
    coefficients = coefficients if factor == 1 else coefficients * factor
    if basis.shape[0] != 1:
        return (coefficients.transpose(1, 2) @ basis).transpose(1, 2)
    b, h, n, f = coefficients.shape
    out = torch.bmm(coefficients.permute(2, 0, 1, 3).reshape(n, b * h, f), basis[0])  # (n, BH, N)
    return out.view(n, b, h, basis.shape[-1]).permute(1, 2, 0, 3)


def project(scores: Tensor, basis: Tensor) -> Tensor:
    """The transpose of `contract`: (B, H, n, N), (B or 1, n, f, N) -> (B, H, n, f)."""
    return contract(scores, basis.transpose(-1, -2))
