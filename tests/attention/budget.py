"""The error budget of kernels: that of `criterion`, with one exception for the fused kernel in float32.

There, unless a call is exact, a row of weights may be off by 5e-4 in total variation, a gradient by 5e-4 of its norm.
B batch, H heads, n queries, N keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import KERNELS, attend, scores
from parapos.attention.kernels import Call

from . import criterion
from .criterion import DTYPES

__all__ = ["DTYPES", "FORWARD", "TRAINING", "Case", "assert_within_budget", "excess", "fed", "full", "make_case"]

LOOSE = 5e-4  # fused float32: total variation of a row, relative error of a gradient
CLOSE = 5e-6  # native float32: relative error of a gradient, whose row sums come from the rounded output
MOST_WEIGHTS = 700  # keys up to which all weights are compared


def _serving(needs_grad: bool) -> list[str]:
    """Kernels but the reference that serve a plain call on this machine."""
    q = torch.zeros(1, 1, 2, 16, requires_grad=needs_grad)
    call = Call(q, q, q, (), None, 1.0)
    return [name for name, kernel in KERNELS.items() if name != "reference" and kernel.reason_against(call) is None]


TRAINING, FORWARD = _serving(True), _serving(False)


@contextmanager
def fed() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Queries and keys, with their columns, that the fused kernel attends with in this context."""
    calls = []

    def spy(attention: Callable[..., Any], q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((q.clone(), k.clone()))
        return attention(q, k, *rest, **options)

    with patch.object(scores, "weights_of", partial(spy, scores.weights_of)):
        yield calls


def full(*values: object) -> object:
    """A case of an exhaustive grid."""
    return pytest.param(*values, marks=pytest.mark.full)


@dataclass
class Case:
    """One attention call, made in `dtype` and able to run in float64 on the very same numbers."""

    encoding: parapos.Encoding
    tensors: dict[str, Tensor]  # x, q of the queries, k, v of the keys, in dtype
    r: Tensor
    mask: Tensor | None
    dtype: torch.dtype
    keys: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """Queries that count, for factors: padding is known where queries and keys are the same tokens."""
        padded = self.mask is not None and self.mask.ndim == 2 and self.keys is None
        return self.mask[:, None, :, None] if padded else torch.ones((), dtype=torch.bool)  # type: ignore[index]

    def attend(self, kernel: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor, exact: bool = False) -> Tensor:
        q, k, terms = self.encoding(self.encoding.add(x, self.r), q, k, self.r, self.keys)
        out = attend(q, k, v, terms, self.mask, self.encoding.scale, kernel, exact=exact)
        assert isinstance(out, Tensor)
        assert out.dtype == x.dtype
        return out

    def run(self, kernel: str, dtype: torch.dtype, exact: bool = False, needs_grad: bool = True) -> dict[str, Tensor]:
        """Output and gradients of everything that has one, in float64 for comparison. Padded rows are left out."""
        case = replace(self, encoding=copy.deepcopy(self.encoding).to(dtype))
        leaves = {name: t.detach().clone().to(dtype).requires_grad_(needs_grad) for name, t in self.tensors.items()}
        if not needs_grad:
            with torch.no_grad():
                return {"out": (case.attend(kernel, **leaves, exact=exact) * self.real).double()}
        out = case.attend(kernel, **leaves, exact=exact)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(dtype)
        out = out * self.real
        wanted = leaves | dict(case.encoding.named_parameters())
        grads = torch.autograd.grad((out * weight).sum(), list(wanted.values()), allow_unused=True)
        found = {f"d{name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}
        return {"out": out.detach().double()} | {name: g.double() for name, g in found.items()}

    def output(self, kernel: str, dtype: torch.dtype, values: Tensor) -> Tensor:
        """The output for other values (N, w), in float64. The identity gives the weights as a kernel has them."""
        case = replace(self, encoding=copy.deepcopy(self.encoding).to(dtype))
        tensors = self.tensors | {"v": values.expand(*self.tensors["k"].shape[:2], -1, -1)}
        with torch.no_grad():
            return (case.attend(kernel, **{name: t.to(dtype) for name, t in tensors.items()}) * self.real).double()


def make_case(
    name: str,
    *,
    p: int = 2,
    dtype: torch.dtype = torch.float32,
    r: Tensor | None = None,
    keys: Tensor | None = None,
    n: int = 17,
    batch: int = 1,
    heads: int = 2,
    head_dim: int = 16,
    dim: int = 24,
    mask: Tensor | None = None,
    **options: object,
) -> Case:
    g = torch.Generator().manual_seed(0)
    if name == "lookhere":
        options.setdefault("directions", [("up-left", 0.5), ("right", 0.5), ("all", 0.25)][:heads])
    torch.manual_seed(0)
    encoding = parapos.create_encoding(name, dim=dim, heads=heads, head_dim=head_dim, pos_dim=p, **options)
    if r is None:
        side = max(1, round(n ** (1 / p)))
        r = torch.randint(1, 2 * side + 1, (n, p), generator=g).float()
    n = r.shape[-2]
    count = n if keys is None else keys.shape[-2]
    tensors = {"x": torch.randn(batch, n, dim, generator=g)}
    for key in "qkv":
        tensors[key] = torch.randn(batch, heads, n if key == "q" else count, head_dim, generator=g)
    return Case(encoding.to(dtype), {key: t.to(dtype) for key, t in tensors.items()}, r, mask, dtype, keys)


def excess(case: Case, kernel: str, exact: bool = False, needs_grad: bool = True) -> dict[str, float]:
    """For each quantity the kernel's error over its allowance; above 1 is a failure."""
    truth, theirs = (case.run("reference", t, needs_grad=needs_grad) for t in (torch.float64, case.dtype))
    ours = case.run(kernel, case.dtype, exact, needs_grad)
    ratios = criterion.excess(ours, theirs, truth, case.dtype, case.tensors["q"].shape[-1])
    if kernel not in ("fused", "native") or case.dtype != torch.float32 or exact:
        return ratios
    most = LOOSE if kernel == "fused" else CLOSE
    for name, ratio in ratios.items():
        if ratio > 1 and name != "out":
            norm = truth[name].norm().item()
            ratios[name] = min(ratio, ((ours[name] - truth[name]).norm().item() / (most * norm)) if norm else ratio)
    if ratios["out"] > 1 and kernel == "fused":
        ratios["out"] = min(ratios["out"], _variation(case) / LOOSE)
    return ratios


def _variation(case: Case) -> float:
    """The largest total variation between a row of weights and the true one; of many keys, what random signs show."""
    keys = case.tensors["k"].shape[2]
    few = keys <= MOST_WEIGHTS
    values = torch.eye(keys) if few else torch.randn(keys, 64, generator=torch.Generator().manual_seed(2)).sign()
    error = case.output("fused", torch.float32, values) - case.output("reference", torch.float64, values)
    return (error.abs().sum(-1) if few else error.abs()).max().item() / 2


def assert_within_budget(case: Case, kernel: str, exact: bool = False, needs_grad: bool = True) -> None:
    bad = {name: ratio for name, ratio in excess(case, kernel, exact, needs_grad).items() if not ratio <= 1}
    assert not bad, f"{kernel} in {case.dtype}: error over allowance {bad}"
