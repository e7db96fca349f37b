"""What an encoding may add to attention scores: the one data type between encodings and kernels.

B batch, H heads, n queries, N keys, p position dims, f functions of D = r_j - r_i.
A term checks itself (`check`) and defines its scores densely (`scores`). `scaled` terms belong to q.k and share its
factor; the others are added after scaling.
Most terms are `Relative`: coefficients of the query times functions of D. Kernels work from those two alone, so they
serve a new relative term as it is. Where query or key has no position, the score is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..positions import Positions
from ..relative import Exponents, contract, functions, monomials


def fits(x: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether x is (B or 1, H or 1, n, N) for these queries and keys."""
    want = ((1, q.shape[0]), (1, q.shape[1]), (q.shape[2],), (k.shape[2],))
    return x.ndim == 4 and all(size in sizes for size, sizes in zip(x.shape, want, strict=True))


class Term(ABC):
    """What all terms share. `learned` names the tensors that may want a gradient."""

    scaled: ClassVar[bool]
    learned: ClassVar[tuple[str, ...]]
    ignores_mask = False

    @abstractmethod
    def check(self, q: Tensor, k: Tensor) -> None:
        """Raises ValueError or TypeError where this term does not fit queries q and keys k."""

    @abstractmethod
    def scores(self, dtype: torch.dtype) -> Tensor:
        """The definition: (B or 1, H or 1, n, N) in `dtype`, before scaling."""

    def hide(self, visible: Tensor) -> Self:
        """The term without what padding holds; visible (B, N) is True for real keys."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the term by its name."""
        return {name: x for name in self.learned if (x := getattr(self, name)) is not None}

    @property
    def needs_grad(self) -> bool:
        return any(x.requires_grad for x in self.tensors().values())

    def _fail(self, name: str, want: str, got: Tensor) -> None:
        raise ValueError(f"{type(self).__name__}.{name} must be {want}, got {tuple(got.shape)}")


class Relative(Term):
    """A sum over f of coefficients_if times function_f(D_ij).

    r: positions of the queries, and of the keys too unless `keys` are given; tensors are taken as `Positions`.
    """

    r: Positions
    keys: Positions | None

    def __post_init__(self) -> None:
        for name in ("r", "keys"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                object.__setattr__(self, name, Positions.unchecked(value))

    @property
    @abstractmethod
    def exponents(self) -> Exponents:
        """Names of the functions, as `basis` reads them."""

    @abstractmethod
    def coefficients(self, dtype: torch.dtype) -> Tensor:
        """(B or 1, H, n or 1, f)."""

    def parts(self, dtype: torch.dtype) -> list[Tensor]:
        """The coefficients in one tensor after another, where they lie in memory."""
        return [self.coefficients(dtype)]

    @property
    def key_positions(self) -> Positions:
        return self.r if self.keys is None else self.keys

    def basis(self, dtype: torch.dtype) -> Tensor:
        """The functions of D: (B or 1, n, f, N)."""
        return functions(self.r.r, self.key_positions.r, self.exponents, dtype)

    def scores(self, dtype: torch.dtype) -> Tensor:
        return contract(self.coefficients(dtype), self.basis(dtype))

    def tensors(self) -> dict[str, Tensor]:
        found = {**super().tensors(), "r": self.r.r}
        return found if self.keys is None else {**found, "keys": self.keys.r}

    def hide(self, visible: Tensor) -> Self:
        if self.keys is not None:
            return replace(self, keys=self.keys.hide(visible))  # type: ignore[type-var]
        changes: dict[str, Any] = {"r": self.r.hide(visible)}
        for name, x in super().tensors().items():
            if x.ndim > 2:  # queries and keys are the same tokens, so padded queries are known
                shape = (*visible.shape[:1], 1, visible.shape[1], *[1] * (x.ndim - 3))
                changes[name] = x.masked_fill(~visible.reshape(shape), 0.0)
        return replace(self, **changes)  # type: ignore[type-var]

    def check(self, q: Tensor, k: Tensor) -> None:
        (b, _, n, _), count, kind = q.shape, k.shape[2], type(self).__name__
        if self.keys is None and n != count:
            raise ValueError(f"{kind}.keys must hold the positions of the {count} keys: there are {n} queries")
        for name, x, tokens in (("r", self.r.r, n), ("keys", self.key_positions.r, count)):
            if x.ndim != 3 or x.shape[0] not in (1, b) or x.shape[1] != tokens:
                self._fail(name, f"({b} or 1, {tokens}, p)", x)
            if x.shape[-1] != self.r.r.shape[-1]:
                self._fail(name, f"of {self.r.r.shape[-1]} dimensions as r is", x)
            if x.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{kind}.{name} must be float32 or float64, got {x.dtype}")


@cache
def _quadratic(p: int, form: int, linear: bool) -> Exponents:
    """Exponents of D_u D_v for all u and v (form 5), of |D|^2 (form 3) or of neither (0), and of D."""
    axes = [tuple(int(u == v) for v in range(p)) for u in range(p)]
    products = [tuple(a + b for a, b in zip(x, y, strict=True)) for x in axes for y in axes]
    length = (-2,) + (0,) * (p - 1)
    return (*(products if form == 5 else [length] if form == 3 else []), *(axes if linear else []))


@dataclass(frozen=True, eq=False)
class Quadratic(Relative):
    """D^T M_i D + g_i . D. PaPE and its kin.

    M: (B, H, n, p, p), (B, H, n) for a multiple of the identity, or None; g: (B, H, n, p) or None.
    """

    M: Tensor | None
    g: Tensor | None
    r: Positions
    keys: Positions | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("M", "g")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.M is None and self.g is None:
            raise ValueError("Quadratic needs M, g or both")

    @property
    def exponents(self) -> Exponents:
        return _quadratic(self.r.r.shape[-1], 0 if self.M is None else self.M.ndim, self.g is not None)

    def parts(self, dtype: torch.dtype) -> list[Tensor]:
        M = None if self.M is None else self.M[..., None] if self.M.ndim == 3 else self.M.flatten(-2)
        return [x.to(dtype) for x in (M, self.g) if x is not None]

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return torch.cat(self.parts(dtype), dim=-1)

    def check(self, q: Tensor, k: Tensor) -> None:
        super().check(q, k)
        shape, p = tuple(q.shape[:3]), self.r.r.shape[-1]
        if self.M is not None and tuple(self.M.shape) not in ((*shape, p, p), shape):
            self._fail("M", f"{(*shape, p, p)} or {shape}", self.M)
        if self.g is not None and tuple(self.g.shape) != (*shape, p):
            self._fail("g", str((*shape, p)), self.g)


@dataclass(frozen=True, eq=False)
class Polynomial(Relative):
    """sum_k c_ik D^(powers_k). Without powers: all monomials of the degree that c's width implies."""

    c: Tensor  # (B, H, n, K)
    r: Positions
    powers: Exponents = ()
    keys: Positions | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("c",)

    def __post_init__(self) -> None:
        super().__post_init__()
        p, k = self.r.r.shape[-1], self.c.shape[-1]
        degree = next(n for n in range(1, k + 2) if math.comb(n + p, p) > k)
        object.__setattr__(self, "powers", tuple(map(tuple, self.powers)) or monomials(p, degree))
        if len(self.powers) != k or any(len(e) != p or min(e) < 0 or not sum(e) for e in self.powers):
            want = f"{k} exponents of {p}, not all zero"
            raise ValueError(f"{k} coefficients in {p} variables need {want}, got {self.powers}")

    @property
    def exponents(self) -> Exponents:
        return self.powers

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return self.c.to(dtype)

    def check(self, q: Tensor, k: Tensor) -> None:
        super().check(q, k)
        if self.c.shape[:3] != q.shape[:3]:
            self._fail("c", f"({', '.join(map(str, q.shape[:3]))}, K)", self.c)


@dataclass(frozen=True, eq=False)
class Distance(Relative):
    """-slope_head * |D|, added after scaling. nD-ALiBi. `ignores_mask` is a quirk of the released code."""

    slopes: Tensor  # (H,)
    r: Positions
    ignores_mask: bool = False
    keys: Positions | None = None
    scaled: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ("slopes",)

    @property
    def exponents(self) -> Exponents:
        return ((-1,) + (0,) * (self.r.r.shape[-1] - 1),)

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return -self.slopes.to(dtype)[None, :, None, None]

    def check(self, q: Tensor, k: Tensor) -> None:
        super().check(q, k)
        if tuple(self.slopes.shape) != (q.shape[1],):
            self._fail("slopes", str((q.shape[1],)), self.slopes)


@dataclass(frozen=True, eq=False)
class Table(Term):
    """weight * bias, added after scaling: LookHere, and what a user brings. -inf hides a key; NaN is not allowed."""

    bias: Tensor  # (B or 1, H or 1, n, N)
    weight: float = 1.0
    scaled: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"Table.weight must be positive and finite, got {self.weight}")
        if not self.bias.dtype.is_floating_point:
            raise TypeError(f"Table.bias must be floating, got {self.bias.dtype}; to hide keys, give attend a mask")

    def scores(self, dtype: torch.dtype) -> Tensor:
        return self.bias.to(dtype) * self.weight

    def check(self, q: Tensor, k: Tensor) -> None:
        if not fits(self.bias, q, k):
            b, h, n = q.shape[:3]
            self._fail("bias", f"({b} or 1, {h} or 1, {n}, {k.shape[2]})", self.bias)
