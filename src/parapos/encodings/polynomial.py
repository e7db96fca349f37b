"""The appendix's generalisation of PaPE: polynomials of D of any degree, with coefficients read from the token.

B batch, N tokens, D model width, H heads, p position dims, K monomials. Degree 2 contains PaPE. Only an even top
degree with negative leading coefficients is bounded above; odd degrees grow without limit when extrapolating.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.terms import Polynomial, Term
from ..positions import Positions
from ..relative import Exponents, monomials
from ..tracing import cast
from .base import Encoding
from .claims import Claims


class PolynomialEncoding(Encoding):
    """score_ij = q.k + sum_k c_k(x_i) D^(e_k), with e_k all monomials of degree 1..degree ("multivariate") or only
    powers of one coordinate ("univariate"). Pure even powers of the top degree get -softplus, so they decay."""

    claims = Claims(translation=True, rotation=False, decay=False, direction=True, context=True)

    def __init__(self, *, degree: int = 2, kind: str = "univariate", **common: Any) -> None:
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

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        c = F.linear(x, self.w_c.flatten(0, 1).to(x.dtype))
        c = cast(c, torch.promote_types(c.dtype, torch.float32))
        c = c.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, K)
        c = torch.where(torch.tensor(self.decaying, device=c.device), -F.softplus(c), c)
        return q, k, (Polynomial(c, r, self.exponents, keys),)
