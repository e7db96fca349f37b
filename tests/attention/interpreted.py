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

import parapos
from parapos.attention import Distance, Quadratic, Table, Term, triton
from parapos.positions import Positions

from .criterion import assert_within_budget

SMALL = triton.Tiles(64, 128, 4, 1)


def start() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    assert torch.zeros(1).new_empty(3).isnan().all()


# What each kind of call learns or is given, from the generator `normal` and B, H, n, N, p.
Normal = Callable[..., Tensor]
Make = Callable[[Normal, int, int, int, int, int], dict[str, Tensor]]


def _form(normal: Normal, b: int, h: int, n: int, p: int) -> Tensor:
    root = normal(b, h, n, p, p)
    return -0.05 * root @ root.mT


TERMS: dict[str, Make] = {
    "M": lambda normal, b, h, n, N, p: {"M": _form(normal, b, h, n, p)},
    "g": lambda normal, b, h, n, N, p: {"g": 0.3 * normal(b, h, n, p)},
    "M, g": lambda normal, b, h, n, N, p: {"M": _form(normal, b, h, n, p), "g": 0.3 * normal(b, h, n, p)},
    "alpha": lambda normal, b, h, n, N, p: {"M": -0.1 * normal(b, h, n).abs()},
    "alpha, g": lambda normal, b, h, n, N, p: {"M": -0.1 * normal(b, h, n).abs(), "g": 0.3 * normal(b, h, n, p)},
    "slopes": lambda normal, b, h, n, N, p: {"slopes": normal(h).abs()},
    "bias": lambda normal, b, h, n, N, p: {"bias": normal(1, h, n, N)},
    "M, bias": lambda normal, b, h, n, N, p: {"M": _form(normal, b, h, n, p), "bias": normal(b, 1, n, N)},
    "none": lambda normal, b, h, n, N, p: {},
}
SPECIAL = ("", "padding", "mask", "earlier", "unplaced", "shared", "far", "mean")


@dataclass
class TermCase:
    """One call with one term, made from numbers of `dtype`, able to run in float64 on the very same numbers.

    keys: how many, if they are other tokens than the queries. special: padding hides keys from all queries; mask, keys
    from each query of each head; earlier, all keys that do not come before a query, so the first sees none.
    """

    term: str = "M, g"
    dtype: torch.dtype = torch.float32
    p: int = 2
    sizes: tuple[int, int] = (16, 16)
    n: int = 17
    keys: int | None = None
    special: str = ""
    heads: int = 2
    tensors: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    key_r: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.special in SPECIAL
        b, h, n, p = 2 if self.n < 100 and self.heads == 2 else 1, self.heads, self.n, self.p
        count = n if self.keys is None else self.keys
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        q, k, v = normal(b, h, n, self.sizes[0]), normal(b, h, count, self.sizes[0]), normal(b, h, count, self.sizes[1])
        v += 3.0 * (self.special == "mean")
        self.tensors = {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype)}
        self.tensors |= TERMS[self.term](normal, b, h, n, count, p)
        self.r = self._positions(torch.randint(1, 9, (1 if self.special == "shared" else b, n, p), generator=g).float())
        if self.keys is not None:
            self.key_r = self._positions(torch.randint(9, 17, (b, count, p), generator=g).float())  # another middle
        if self.special == "padding":
            self.mask = torch.arange(count) < torch.tensor([[count - count // 3], [count // 2]])[:b]
        if self.special == "mask":
            self.mask = torch.rand(b, h, n, count, generator=g) < 0.6
        if self.special == "earlier":
            self.mask = (torch.arange(count) < torch.arange(n)[:, None])[None, None]

    @property
    def reach(self) -> float:
        """The largest |D|^2 between a query and a key."""
        keys = self.r if self.key_r is None else self.key_r
        return float((keys[:, None] - self.r[:, :, None]).square().sum(-1).nan_to_num(0.0).amax())

    def _positions(self, r: Tensor) -> Tensor:
        if self.special == "unplaced":
            r[:, :: max(3, r.shape[1] // 3)] = torch.nan
        return r.double() / 3 + 1e9 if self.special == "far" else r

    def terms(self, leaves: dict[str, Tensor], order: Tensor | None = None) -> list[Term]:
        known = False if self.special in ("shared", "far") else None
        r = Positions(self.r, known)
        key_r = self.key_r if order is None else (self.r if self.key_r is None else self.key_r)[:, order]
        keys = None if key_r is None else Positions(key_r, known)
        found: list[Term] = []
        if "M" in leaves or "g" in leaves:
            found.append(Quadratic(leaves.get("M"), leaves.get("g"), r, keys))
        if "slopes" in leaves:
            found.append(Distance(leaves["slopes"], r, keys=keys))
        if "bias" in leaves:
            found.append(Table(leaves["bias"] if order is None else leaves["bias"][..., order], weight=1.5))
        return found

    def run(self, kernel: str, dtype: torch.dtype, order: Tensor | None = None) -> dict[str, Tensor]:
        """Output and gradients, in float64 for comparison. order: of the keys, which changes rounding alone."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: x.detach().clone().to(dtype if name in "qkv" else wide).requires_grad_(name != "bias")
            for name, x in self.tensors.items()
        }
        every = slice(None) if order is None else order
        k, v = (leaves[name][:, :, every] for name in "kv")
        mask = None if self.mask is None else self.mask[..., every]
        out = parapos.attend(leaves["q"], k, v, self.terms(leaves, order), mask, kernel=kernel)
        assert isinstance(out, Tensor)
        assert out.dtype == dtype
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(dtype)
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad((out * weight).sum(), list(wanted.values()))
        return {"out": out.detach().double()} | {f"d{name}": x.double() for name, x in zip(wanted, grads, strict=True)}


def with_tiles(check: Callable[..., Any], *args: Any, tiles: triton.Tiles | None = SMALL) -> Any:
    table = {key: (tiles or old[0], tiles or old[1]) for key, old in triton.TILES.items()}
    with mock.patch.dict(triton.TILES, table):
        return check(*args)


def numbers(case: TermCase) -> dict[str, Tensor]:
    return case.run("triton", case.dtype)


def orders(case: TermCase) -> list[Tensor | None]:
    """Orders of the keys in which the reference runs: the error of one order is luck, which differs by machine."""
    if case.special == "padding" and case.keys is None:  # padded tokens are padded queries too only in one order
        return [None]
    g = torch.Generator().manual_seed(2)
    return [None, *(torch.randperm(case.tensors["k"].shape[2], generator=g) for _ in range(3))]


def within_budget(case: TermCase, repeats: bool = False) -> None:
    """repeats: and equal to the last bit when repeated."""
    ours = numbers(case)
    truth = case.run("reference", torch.float64)
    runs = [case.run("reference", case.dtype, order) for order in orders(case)]
    theirs = {
        name: max((run[name] for run in runs), key=lambda x, name=name: (x - truth[name]).abs().max()) for name in truth
    }
    assert_within_budget(
        ours, theirs, truth, case.dtype, case.sizes[0], max(1.0, case.reach) if case.keys == 1 else 1.0
    )
    if repeats:
        again = numbers(case)
        assert all(torch.equal(ours[name], again[name]) for name in again)
