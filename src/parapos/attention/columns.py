"""Score terms of degree two as extra columns of queries and keys.

    sum_f c_if function_f(D) = psi_i . phi(r_j),   psi_i = c_i T(r_i),   phi = [r_u r_v for u <= v | r | 1]

phi, T and a bound on their products are made once for a set of positions (`Columns`). Near the query large products
cancel, which costs digits. So positions are centred, columns are float32 whatever the queries are, and `fits` says
whether what is left is good enough.
B batch, H heads, n queries, N keys, p position dims, f functions, e columns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..positions import centre, placed
from ..relative import Exponents, function, key_features, taylor
from .terms import Relative

# The largest error of a logit that columns may bring, and the rounding of a product that it is estimated from: 24 bits,
# and as errors average out, two more.
ALLOWED, ROUNDING = 5e-4, 1.5 * 2.0**-26
GRADIENT_ROUNDING = 2.0**-28  # of a sum over keys; a bound of its products is some sixteen times too large


class Columns(NamedTuple):
    """What columns take from the positions alone, in float32. Samples may share them (1 for B)."""

    T: Tensor  # (B or 1, n, f, e): coefficients to query columns
    phi: Tensor  # (B or 1, N, e): key columns
    bound: Tensor  # (B or 1, n, f): the largest sum of products that a unit of a coefficient may bring


def columns(term: Relative) -> Columns:
    """The columns of a term of degree two, made once for its positions. The last is the constant of placed keys."""
    features = key_features(term.exponents, with_constant=True)
    return term.r.once(("columns", term.exponents, term.keys), partial(make_columns, term, features))


def make_columns(term: Relative, features: Exponents) -> Columns:
    """Columns of these features of a key."""
    at, to = term.r.r.detach().double(), term.key_positions.r.detach().double()
    both = to if term.keys is None else torch.cat([r.expand(max(len(at), len(to)), -1, -1) for r in (at, to)], dim=1)
    middle, _ = centre(both)
    here, there = placed(at)[..., None], placed(to)[..., None]
    x = torch.where(here, middle - at, 0.0).movedim(-1, 0)  # -r_i, so that D = y + x
    y = torch.where(there, to - middle, 0.0).movedim(-1, 0)  # r_j
    phi = torch.where(there, torch.stack([function(y, e) for e in features], dim=-1), 0.0)
    largest, made = phi.abs().amax(1)[:, None], []
    for e in term.exponents:  # one after another: these are many numbers in float64
        row = torch.where(here, torch.stack([taylor(x, e, f) for f in features], dim=-1), 0.0)
        made.append((row.float(), (row.abs() * largest).sum(-1).float()))
    T, bound = (torch.stack(parts, dim=2) for parts in zip(*made, strict=True))
    return Columns(T, phi.float(), bound)


def fits(coefficients: Tensor, bound: Tensor, scale: float) -> Tensor:
    """Of which samples columns hold these numbers of all heads well enough: (B or 1,) boolean."""
    return (coefficients.abs().amax(1) * bound).sum(-1).amax(-1) <= ALLOWED / (scale * ROUNDING)
