"""Which kernel runs, and why. `attend` is the one entry to attention; `explain` reports what it would do.

B batch, H heads, n queries, N keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tracing import no_autocast
from . import flex, fused, native, reference, sparse, triton  # noqa: F401 - each registers its kernel
from .kernels import KERNELS, Call, Kernel, find_kernel
from .terms import Relative, Term, fits

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class KernelError(RuntimeError):
    """The kernel that was asked for, or strict mode, cannot serve this call."""


@dataclass(frozen=True)
class AttentionPlan:
    """The decision for one call. `str(plan)` is meant to be read."""

    kernel: str
    method: str
    reason: str
    passed_over: dict[str, str]
    call: str

    def __str__(self) -> str:
        others = [f"not      {name}: {why}" for name, why in self.passed_over.items()]
        return "\n".join([self.call, f"kernel   {self.kernel} ({self.reason})", f"method   {self.method}", *others])


def _choose(call: Call, name: str, strict: bool) -> Kernel:
    """The kernel to use. Others are asked only as far as needed."""
    if name == "auto":
        chosen = next(k for k in KERNELS.values() if k.by_name(call) is None and k.reason_against(call) is None)
    elif (reason := (chosen := find_kernel(name)).reason_against(call)) is not None:
        raise KernelError(f"kernel {name!r} cannot serve this call: {reason}")
    if strict and not chosen.is_fused:
        reasons = "; ".join(f"{name}: {why}" for name, k in KERNELS.items() if (why := k.reason_against(call)))
        raise KernelError(f"strict mode wants a fused kernel, and {chosen.name!r} is not one. {reasons}".strip())
    return chosen


def _check(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None) -> None:
    heads, named = {"q": q, "k": k, "v": v}, {} if mask is None else {"mask": mask}
    for term in terms:
        named |= {f"{type(term).__name__}.{name}": x for name, x in term.tensors().items()}
    for name, x in (heads | named).items():
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {x.device}")
    for name, x in heads.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, tokens, size), got {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        want = "q (B, H, n, h), k (B, H, N, h) and v (B, H, N, w) must agree in B, H, N and h"
        raise ValueError(f"{want}, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    padding, each = (q.shape[0], k.shape[2]), "({} or 1, {} or 1, {}, {})".format(*q.shape[:3], k.shape[2])
    if mask is not None and (mask.dtype != torch.bool or not (tuple(mask.shape) == padding or fits(mask, q, k))):
        want = f"{padding} with True for real keys, or {each} with True where a query may look"
        raise ValueError(f"mask must be boolean, {want}, got {mask.dtype} {tuple(mask.shape)}")
    for term in terms:
        term.check(q, k)


def _call(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float | None, *rest: Any
) -> tuple[Call, Tensor | None]:
    """The arguments, checked and completed, and which queries see no key (B or 1, H or 1, n or 1, 1).

    The one place that clears what hidden keys hold, which may be NaN. Queries that see no key see all of them here, so
    kernels need no rule for them, and `attend` drops what they get.
    """
    _check(q, k, v, terms, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is None or any(term.ignores_mask for term in terms):
        return Call(q, k, v, tuple(terms), None, scale, *rest), None
    if mask.ndim == 2:
        visible, mask = mask, mask[:, None, None, :]
        terms = [term.hide(visible) for term in terms]
        if any(isinstance(term, Relative) and term.keys is None for term in terms):  # padded queries are known too
            q = q.masked_fill(~visible[:, None, :, None], 0.0)
    else:
        visible = mask.any(2).any(1)  # (B or 1, N): keys that some query sees
    k, v = (x.masked_fill(~visible[:, None, :, None], 0.0) for x in (k, v))
    blind = ~mask.any(-1, keepdim=True)
    return Call(q, k, v, tuple(terms), mask | blind, scale, *rest), blind


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    """The weight that a row may lose, by default what its dtype cannot tell."""
    if tolerance is None:
        return sparse.DEFAULTS.get(dtype, 0.0)
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share of a row's weight, 0 (look at every key) to 1, got {tolerance}")
    return tolerance


def explain(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term] = (), mask: Tensor | None = None, scale: float | None = None,
    kernel: str = "auto", *, exact: bool = False, strict: bool = False, return_weights: bool = False,
    tolerance: float | None = None,
) -> AttentionPlan:  # fmt: skip
    """What `attend` would do with the same arguments, and why. Print it."""
    with no_autocast(q.device):
        call, _ = _call(q, k, v, terms, mask, scale, exact, return_weights, _tolerance(tolerance, q.dtype))
        chosen = _choose(call, kernel, strict)
        later = "it comes later in the order of preference"
        reason = "the first in order of preference that can serve this" if kernel == "auto" else "asked for by name"
        passed_over = {
            name: other.reason_against(call)
            or ("another was asked for" if kernel != "auto" else other.by_name(call) or later)
            for name, other in KERNELS.items()
            if other is not chosen
        }
        (b, h, n, size), keys = q.shape, k.shape[2]
        tokens = f"{n} tokens" if n == keys else f"{n} queries and {keys} keys"
        about = f"attention of {b} x {h} heads x {tokens} x {size}, {str(q.dtype)[6:]} on {q.device.type}"
        return AttentionPlan(chosen.name, chosen.describe(call), reason, passed_over, about)


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term] = (), mask: Tensor | None = None, scale: float | None = None,
    kernel: str = "auto", *, exact: bool = False, strict: bool = False, return_weights: bool = False,
    tolerance: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * (q.k + scaled terms) + other terms) v.

    q (B, H, n, h), k (B, H, N, h), v (B, H, N, w) -> (B, H, n, w) in the same dtype.
    mask: key padding (B, N), True for real keys, or (B or 1, H or 1, n, N), True where a query may look. A query that
    sees no key gives zeros and has zero gradients.
    scale: h^-0.5 by default; with an encoding, pass its `scale`.
    exact: forms float32 scores from D instead of from columns, which may differ by 5e-4 in a row's weights.
    strict: raises KernelError rather than fall back to the dense kernel, the only one that holds all scores.
    tolerance: the summed weight that each row may lose. Keys are skipped where a bound proves that they have no more
    and where that saves time. By default 1e-7 in float32, less than rounding in other types; 0 looks at every key.
    return_weights: adds the weights (B, H, n, N), which only the reference kernel has.
    """
    with no_autocast(q.device):
        call, blind = _call(q, k, v, terms, mask, scale, exact, return_weights, _tolerance(tolerance, q.dtype))
        chosen = _choose(call, kernel, strict)
        out, weights = reference.attention(call) if return_weights else (chosen.run(call), None)
        out = out if blind is None else out.masked_fill(blind, 0.0)
        if weights is None:
            return out
        return out, weights if blind is None else weights.masked_fill(blind, 0.0)
