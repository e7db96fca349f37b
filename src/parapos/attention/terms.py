"""What an encoding may add to attention scores: the one data type between encodings and kernels.

B batch, H heads, N tokens, n query rows, p position dims, f basis functions. D = r_j - r_i.
Every term is linear in its coefficients, scores_ij = sum_f coefficient_if * basis_f(D_ij), and offers
- `scores(dtype, basis, factor)`: (B or 1, H, n, N), dense: the definition, times a factor; a basis may be given;
- `gradients(ds, basis)`: the gradients of its `learned` tensors, given that of the scores;
- `take(batch, rows)`: itself for some samples and some query rows (`at` then holds those rows' positions).
Where query or key has no position (NaN), D counts as 0 and so does the score.
`scaled` terms belong to q.k and share its factor; the others are added after scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .basis import Exponents, contract, difference, monomial, monomials, project


def _part(x: Tensor, batch: slice) -> Tensor:
    return x[batch] if x.shape[0] > 1 else x


def _take(term: Any, batch: slice, rows: slice) -> Any:
    """`take` for terms of D."""
    at = term.r if term.at is None else term.at
    changes = {"r": _part(term.r, batch), "at": _part(at, batch)[:, rows]}
    for name in term.learned:
        x = getattr(term, name)
        if x is not None and x.ndim > 1:  # slopes belong to heads, the rest to queries
            changes[name] = _part(x, batch)[:, :, rows]
    return replace(term, **changes)


@dataclass(frozen=True)
class Quadratic:
    """D^T M_i D + g_i . D. PaPE and its kin.

    M: (B, H, N, p, p), (B, H, N) for a multiple of the identity, or None; g: (B, H, N, p) or None.
    """

    M: Tensor | None
    g: Tensor | None
    r: Tensor
    unplaced: bool | None = None
    at: Tensor | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("M", "g")

    def __post_init__(self) -> None:
        if self.M is None and self.g is None:
            raise ValueError("Quadratic needs M, g or both")

    def basis(self, dtype: torch.dtype) -> Tensor:  # (B or 1, n, f, N)
        d = difference(self.r, self.at, dtype)
        parts = list(d) if self.g is not None else []
        if self.M is not None:
            parts += [d.square().sum(0)] if self.M.ndim == 3 else [u * v for u in d for v in d]
        return torch.stack(parts, dim=2)

    def scores(self, dtype: torch.dtype, basis: Tensor | None = None, factor: float = 1.0) -> Tensor:
        parts = [self.g] if self.g is not None else []
        if self.M is not None:
            parts.append(self.M[..., None] if self.M.ndim == 3 else self.M.flatten(-2))
        return contract(torch.cat(parts, dim=-1).to(dtype), self.basis(dtype) if basis is None else basis, factor)

    def gradients(self, ds: Tensor, basis: Tensor | None = None) -> dict[str, Tensor]:
        grad = project(ds, self.basis(ds.dtype) if basis is None else basis)
        p = 0 if self.g is None else self.g.shape[-1]
        out = {} if self.g is None else {"g": grad[..., :p].clone()}  # operators may not return views of one tensor
        if self.M is not None:
            out["M"] = grad[..., p:].reshape(self.M.shape)
        return out

    take = _take


@dataclass(frozen=True)
class Polynomial:
    """sum_k c_ik D^(exponents_k). Without exponents: all monomials of the degree that c's width tells."""

    c: Tensor  # (B, H, N, K)
    r: Tensor
    exponents: Exponents = ()
    unplaced: bool | None = None
    at: Tensor | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("c",)

    def __post_init__(self) -> None:
        p, k = self.r.shape[-1], self.c.shape[-1]
        if not self.exponents:
            degree = next(n for n in range(1, k + 2) if math.comb(n + p, p) > k)
            object.__setattr__(self, "exponents", monomials(p, degree))
        if len(self.exponents) != k or any(len(e) != p for e in self.exponents):
            raise ValueError(f"{k} coefficients in {p} variables need {k} exponents of {p}, got {self.exponents}")

    def basis(self, dtype: torch.dtype) -> Tensor:  # (B or 1, n, K, N)
        d = difference(self.r, self.at, dtype)
        return torch.stack([monomial(d, e) for e in self.exponents], dim=-2)

    def scores(self, dtype: torch.dtype, basis: Tensor | None = None, factor: float = 1.0) -> Tensor:
        return contract(self.c.to(dtype), self.basis(dtype) if basis is None else basis, factor)

    def gradients(self, ds: Tensor, basis: Tensor | None = None) -> dict[str, Tensor]:
        return {"c": project(ds, self.basis(ds.dtype) if basis is None else basis)}

    take = _take


@dataclass(frozen=True)
class Distance:
    """-slope_head * |D|, added after scaling. nD-ALiBi. `ignores_mask` is a quirk of the released code."""

    slopes: Tensor  # (H,)
    r: Tensor
    ignores_mask: bool = False
    at: Tensor | None = None
    scaled: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ("slopes",)

    def basis(self, dtype: torch.dtype) -> Tensor:  # (B or 1, n, 1, N)
        return torch.linalg.vector_norm(difference(self.r, self.at, dtype), dim=0)[:, :, None, :]

    def scores(self, dtype: torch.dtype, basis: Tensor | None = None, factor: float = 1.0) -> Tensor:
        basis = self.basis(dtype) if basis is None else basis
        return -factor * self.slopes.to(dtype)[:, None, None] * basis.transpose(1, 2)

    def gradients(self, ds: Tensor, basis: Tensor | None = None) -> dict[str, Tensor]:
        return {"slopes": -project(ds, self.basis(ds.dtype) if basis is None else basis).sum((0, 2, 3))}

    take = _take


@dataclass(frozen=True)
class Table:
    """weight * bias, added after scaling: LookHere, and what a user brings. -inf hides a key; no NaN anywhere."""

    bias: Tensor  # (B or 1, H or 1, N, N)
    weight: float = 1.0
    scaled: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"Table.weight must be positive and finite, got {self.weight}")

    def scores(self, dtype: torch.dtype, basis: Tensor | None = None, factor: float = 1.0) -> Tensor:
        return self.bias.to(dtype) * (self.weight * factor)

    def gradients(self, ds: Tensor, basis: Tensor | None = None) -> dict[str, Tensor]:
        summed = [i for i in (0, 1) if self.bias.shape[i] == 1]
        return {"bias": (ds.sum(summed, keepdim=True) if summed else ds) * self.weight}

    def take(self, batch: slice, rows: slice) -> Table:
        return replace(self, bias=_part(self.bias, batch)[:, :, rows])


Term = Quadratic | Polynomial | Distance | Table
