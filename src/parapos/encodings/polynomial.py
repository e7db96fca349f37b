"""The appendix's generalisation of PaPE: polynomials of D of any degree, with coefficients read from the token.

B batch, N tokens, D model width, H heads, p position dims, K monomials. Degree 2 contains PaPE. Only an even top
degree with negative leading coefficients is bounded above; odd degrees grow without limit when extrapolating.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.terms import Polynomial, Table, Term
from ..positions import Positions
from ..relative import Exponents, difference, function, monomials
from ..tracing import cast
from .base import Encoding
from .claims import Claims


class PolynomialEncoding(Encoding):
    """score_ij = q.k + sum_k c_k(x_i) D^(e_k), with e_k all monomials of degree 1..degree ("multivariate") or only
    powers of one coordinate ("univariate"). Pure even powers of the top degree get -softplus, so they decay.

    key_dependent: coefficients are c_k(x_i) h_k(x_j), where h_k is an affine function of the projected key, so it also
    works for cross-attention; for the powers that decay it is a positive one, so they still do. All h_k start at 1. The
    scores are formed densely from D, with memory for H N^2 numbers: as products of columns, which they are too, they
    would lose digits that grow with the degree.
    """

    claims = Claims(translation=True, rotation=False, decay=False, direction=True, context=True)

    def __init__(
        self, *, degree: int = 2, kind: str = "univariate", key_dependent: bool = False, **common: Any
    ) -> None:
        super().__init__(**common)
        if degree not in (1, 2, 3, 4):
            raise ValueError(f"degree must be 1, 2, 3 or 4, got {degree!r}")
        if kind not in ("univariate", "multivariate"):
            raise ValueError(f"kind must be 'univariate' or 'multivariate', got {kind!r}")
        powers = monomials(self.pos_dim, degree)
        if kind == "univariate":
            powers = tuple(e for e in powers if max(e) == sum(e))
        self.exponents: Exponents = powers
        self.decaying = [degree % 2 == 0 and max(e) == degree for e in powers]
        bound = self.dim**-0.5
        self.w_c = nn.Parameter(torch.empty(self.heads, len(powers), self.dim).uniform_(-bound, bound))
        self.w_h = nn.Parameter(torch.zeros(self.heads, len(powers), self.head_dim)) if key_dependent else None

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        c = F.linear(x, self.w_c.flatten(0, 1).to(x.dtype))
        c = cast(c, torch.promote_types(c.dtype, torch.float32))
        c = c.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, K)
        c = torch.where(torch.tensor(self.decaying, device=c.device), -F.softplus(c), c)
        if self.w_h is None:
            return q, k, (Polynomial(c, r, self.exponents, keys),)
        return q, k, (Table(self.scale * keyed_scores(c, self.key_coefficients(k), self.exponents, r, keys)),)

    def key_coefficients(self, k: Tensor) -> Tensor:
        """h_k(x_j) (B, H, N, K), at least float32, from projected keys k (B, H, N, h)."""
        assert self.w_h is not None
        h = k.to(self.w_h.dtype) @ self.w_h.mT
        return torch.where(torch.tensor(self.decaying, device=h.device), F.softplus(h) / math.log(2), 1 + h)


def keyed_scores(c: Tensor, h: Tensor, exponents: Exponents, r: Positions, keys: Positions | None) -> Tensor:
    """sum_k c_ik h_jk D^(e_k), (B, H, n, N), of c (B, H, n, K) and h (B, H, N, K); 0 where a token has no position."""
    d = difference(r.r, (keys or r).r, torch.promote_types(c.dtype, h.dtype))  # (p, B or 1, n, N)
    columns = zip(c.unbind(-1), h.unbind(-1), exponents, strict=True)
    parts = (at[..., None] * to[..., None, :] * function(d, e)[:, None] for at, to, e in columns)
    return sum(parts, torch.zeros((), dtype=d.dtype, device=d.device))
