"""Calls of the Triton kernel in Triton's interpreter.

Triton decides between compiling and interpreting when it is imported, so kernels run in a process of their own that
was started with TRITON_INTERPRET=1 (the fixture `interpreter`). There uninitialised memory holds NaN, and tiles are
small: 130 tokens take several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parapos.attention import Distance, Quadratic, Table, Term, reference, triton
from parapos.attention.select import _hide

from .budget import assert_within_budget

SMALL = triton.Tiles(64, 128, 4, 1)


def start() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    assert torch.zeros(1).new_empty(3).isnan().all()


@dataclass
class TermCase:
    """One call with one term, made from numbers of `dtype`, able to run in float64 on the very same numbers."""

    term: str = "M, g"
    dtype: torch.dtype = torch.float32
    p: int = 2
    sizes: tuple[int, int] = (16, 16)
    n: int = 17
    special: str = ""
    heads: int = 2
    tensors: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        b, h, n, p = 2 if self.n < 100 and self.heads == 2 else 1, self.heads, self.n, self.p
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        q, k, v = normal(b, h, n, self.sizes[0]), normal(b, h, n, self.sizes[0]), normal(b, h, n, self.sizes[1])
        v += 3.0 * (self.special == "mean")
        root = normal(b, h, n, p, p)
        self.tensors = {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype)} | {
            "M": {"M": -0.05 * root @ root.mT},
            "g": {"g": 0.3 * normal(b, h, n, p)},
            "M, g": {"M": -0.05 * root @ root.mT, "g": 0.3 * normal(b, h, n, p)},
            "alpha": {"M": -0.1 * normal(b, h, n).abs()},
            "alpha, g": {"M": -0.1 * normal(b, h, n).abs(), "g": 0.3 * normal(b, h, n, p)},
            "slopes": {"slopes": normal(h).abs()},
            "bias": {"bias": normal(1, h, n, n)},
            "M, bias": {"M": -0.05 * root @ root.mT, "bias": normal(b, 1, n, n)},
            "none": {},
        }[self.term]
        self.r = torch.randint(1, 9, (1 if self.special == "shared" else b, n, p), generator=g).float()
        if self.special == "unplaced":
            self.r[:, :: max(3, n // 3)] = torch.nan
        if self.special == "far":
            self.r = self.r.double() / 3 + 1e9
        if self.special == "mask":
            self.mask = torch.arange(n) < torch.tensor([[n - n // 3], [n // 2]])[:b]

    def terms(self, leaves: dict[str, Tensor]) -> list[Term]:
        found: list[Term] = []
        if "M" in leaves or "g" in leaves:
            known = False if self.special in ("shared", "far") else None
            found.append(Quadratic(leaves.get("M"), leaves.get("g"), self.r, unplaced=known))
        if "slopes" in leaves:
            found.append(Distance(leaves["slopes"], self.r))
        if "bias" in leaves:
            found.append(Table(leaves["bias"], weight=1.5))
        return found if self.mask is None else [_hide(term, self.mask) for term in found]

    def run(self, kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output and gradients, in float64 for comparison."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: x.detach().clone().to(dtype if name in "qkv" else wide).requires_grad_(name != "bias")
            for name, x in self.tensors.items()
        }
        q, k, v, terms = leaves["q"], leaves["k"], leaves["v"], self.terms(leaves)
        if self.mask is not None:
            q = q.masked_fill(~self.mask[:, None, :, None], 0.0)
        if kernel == "triton":
            assert triton.refuse(q, k, v, terms, self.mask, True) is None
            out = triton.attention(q, k, v, terms, self.mask, self.sizes[0] ** -0.5)
        else:
            out, _ = reference.attention(q, k, v, terms, self.mask, self.sizes[0] ** -0.5)
        assert out.dtype == dtype
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(dtype)
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad((out * weight).sum(), list(wanted.values()))
        return {"out": out.detach().double()} | {f"d{name}": x.double() for name, x in zip(wanted, grads, strict=True)}


def with_tiles(check: Callable[..., Any], *args: Any, tiles: triton.Tiles | None = SMALL) -> Any:
    table = {key: (tiles or old[0], tiles or old[1]) for key, old in triton.TILES.items()}
    with mock.patch.dict(triton.TILES, table):
        return check(*args)


def within_budget(case: TermCase) -> None:
    assert_within_budget(case, "triton")  # type: ignore[arg-type]


def within_budget_twice(case: TermCase) -> None:
    """And equal to the last bit when repeated."""
    found = []
    run = case.run

    def recorded(kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
        numbers = run(kernel, dtype)
        if kernel == "triton":
            found.append(numbers)
        return numbers

    with mock.patch.object(case, "run", recorded):
        within_budget(case)
    again = run("triton", case.dtype)
    assert all(torch.equal(found[0][name], again[name]) for name in again)


def numbers(case: TermCase) -> dict[str, Tensor]:
    return case.run("triton", case.dtype)
