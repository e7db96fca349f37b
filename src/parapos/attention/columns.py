"""Score terms of degree two as extra columns of queries and keys.

    sum_f c_if function_f(D) = psi_i . phi(r_j),   psi_i = c_i T(r_i),   phi = [r_u r_v for u <= v | r | 1]

phi, T and a bound on their products are made once for a set of positions (`Columns`). Near the query large products
cancel, which costs digits. So positions are centred and scaled, and half precision holds every number as two; `fits`
says whether what is left is good enough.
B batch, H heads, n queries, N keys, p position dims, f functions, e columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions import centre, placed
from ..relative import Exponents, function, key_features, taylor
from .terms import Relative

REACH_BITS = 6  # positions are scaled to |r| <= 2^6, so that float16 holds their products
# The largest error of a logit that columns may bring, and the rounding of a product that it is estimated from: 24 bits
# in float32 (errors average out, which is worth two more), 17 and 22 where two numbers of half precision hold one.
ALLOWED = {torch.float32: 5e-4, torch.bfloat16: 2e-3, torch.float16: 5e-4}
ROUNDING = {torch.float32: 1.5 * 2.0**-26, torch.bfloat16: 2.0**-17, torch.float16: 2.0**-22}
COPIES = {torch.float32: 1, torch.bfloat16: 3, torch.float16: 3}  # columns that a feature takes
GRADIENT_ROUNDING = 2.0**-28  # of a sum over keys; a bound of its products is some sixteen times too large


class Columns(NamedTuple):
    """What columns take from the positions alone, in float32. Samples may share them (1 for B)."""

    T: Tensor  # (B or 1, n, f, e): coefficients to query columns
    phi: Tensor  # (B or 1, N, e): key columns
    bound: Tensor  # (B or 1, n, f): the largest sum of products that a unit of a coefficient may bring


def features_of(term: Relative, dtype: torch.dtype) -> Exponents:
    """The features of a term. Its constant has a column where a key without a position must not get it, and in float32.

    There gradients come from columns too, and the constant's takes away what rounding leaves of the sum of a row.
    """
    return key_features(term.exponents, dtype == torch.float32 or term.key_positions.unplaced is not False)


def columns(term: Relative, q: Tensor, v: Tensor) -> Columns:
    """The columns of a term of degree two for such heads, made once for its positions."""
    features = features_of(term, q.dtype)
    more = head_width(q, v, len(features)) - q.shape[-1]
    key = ("columns", term.exponents, features, more, q.dtype, term.keys)
    return term.r.once(key, lambda: make_columns(term, features, more, q.dtype))


def make_columns(term: Relative, features: Exponents, more: int, dtype: torch.dtype) -> Columns:
    """Columns of these features of a key, filled up to `more` for heads of this dtype."""
    at, to = term.r.r.detach().double(), term.key_positions.r.detach().double()
    both = to if term.keys is None else torch.cat([r.expand(max(len(at), len(to)), -1, -1) for r in (at, to)], dim=1)
    middle, reach = centre(both)
    unit = torch.exp2(torch.ceil(torch.log2(reach.clamp(min=1e-30))) - REACH_BITS)
    here, there = placed(at)[..., None], placed(to)[..., None]
    x = torch.where(here, (middle - at) / unit, 0.0).movedim(-1, 0)  # -r_i, so that D = y + x
    y = torch.where(there, (to - middle) / unit, 0.0).movedim(-1, 0)  # r_j
    phi = torch.where(there, torch.stack([function(y, e) for e in features], dim=-1), 0.0)
    rows = [
        torch.stack([taylor(x, e, f) for f in features], dim=-1) * unit ** (2 if e[0] < 0 else sum(e))
        for e in term.exponents
    ]
    T = torch.where(here[..., None], torch.stack(rows, dim=-2), 0.0)
    most = phi.abs().amax(1).clamp(min=1.0)  # so that query columns are bounded too, where positions are small
    bound = (T.abs() * most[:, None, None]).sum(-1)
    if dtype == torch.float32:  # zeros fill the heads up
        T = F.pad(T, (0, more - len(features)))
    phi = F.pad(halves(phi.float(), dtype), (0, more - len(features) * COPIES[dtype]))
    return Columns(T.float(), phi, bound.float())


def fits(coefficients: Tensor, bound: Tensor, scale: float, dtype: torch.dtype) -> bool:
    """Whether columns of this dtype hold these numbers well enough."""
    largest = coefficients.abs().amax(1)  # over heads
    size = float((largest * bound).sum(-1).amax())
    return size * scale * ROUNDING[dtype] <= ALLOWED[dtype] and not (dtype == torch.float16 and size > 3e4)


def head_width(q: Tensor, v: Tensor, features: int) -> int:
    """Width of heads with columns, for queries, keys and values alike: PyTorch's fused path wants a multiple of 8."""
    return -(-max(q.shape[-1] + features * COPIES[q.dtype], v.shape[-1]) // 8) * 8


def halves(x: Tensor, dtype: torch.dtype, *, query: bool = False) -> Tensor:
    """x, or as numbers of half precision, arranged so that products sum x_hi y_hi + x_hi y_lo + x_lo y_hi."""
    if dtype == torch.float32:
        return x
    high = x.to(dtype)
    low = (x - high).to(dtype)
    return torch.cat([high, high, low] if query else [high, low, high], dim=-1)
