"""Functions of relative positions D = r_j - r_i: their names, their values, their sums.

B batch, H heads, n queries, N keys, p position dims, f functions.
A function of D is named by p exponents: (1, 0) is D_x, (1, 1) is D_x D_y. A negative first exponent is a power of the
length instead: (-1, 0) is |D| and (-2, 0) is |D|^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import combinations_with_replacement
from math import comb, prod

import torch
from torch import Tensor

from .positions import Positions, centre

Exponents = tuple[tuple[int, ...], ...]


def monomials(p: int, degree: int) -> Exponents:
    """Exponents of all monomials in p variables of degree 1..degree: C(degree + p, p) - 1 of them."""
    return tuple(
        tuple(factors.count(u) for u in range(p))
        for n in range(1, degree + 1)
        for factors in combinations_with_replacement(range(p), n)
    )


def difference(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """D (p, B or 1, n, N) in `dtype`; 0 where the query or the key has no position.

    Subtracted in the widest of the types, then rounded. Coordinates come first: every operation runs over long rows.
    """
    wide = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), dtype)
    at, to = (x.to(wide).movedim(-1, 0) for x in (queries, keys))
    return (to[:, :, None, :] - at[:, :, :, None]).nan_to_num(nan=0.0).to(dtype)


def function(d: Sequence[Tensor] | Tensor, exponents: Sequence[int]) -> Tensor:
    """The function of D with these exponents. d: the p coordinates of D, of any shape."""
    if exponents and exponents[0] < 0:
        if exponents[0] == -1 and isinstance(d, Tensor):
            return torch.linalg.vector_norm(d, dim=0)  # its gradient at 0 is 0, that of a square root is not
        squared = sum((x * x for x in d[1:]), d[0] * d[0])
        return squared if exponents[0] == -2 else squared.sqrt()
    out: Tensor | None = None
    for x, power in zip(d, exponents, strict=True):
        for _ in range(power):
            out = x if out is None else out * x
    return torch.ones_like(d[0]) if out is None else out


def functions(queries: Tensor, keys: Tensor, exponents: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """The functions of D with these exponents, for positions (B or 1, n, p) and (B or 1, N, p): (B or 1, n, f, N)."""
    d = difference(queries, keys, dtype)
    return torch.stack([function(d, e) for e in exponents], dim=2)


@cache
def key_features(exponents: Exponents, with_constant: bool) -> Exponents:
    """The functions of a key's position that functions of D with these exponents, of degree two, are made of."""
    p = len(exponents[0])
    length = (-2,) + (0,) * (p - 1)
    found = [e for e in (*monomials(p, 2), length) if sum(e) == 1 or e in exponents]
    return (*found, (0,) * p) if with_constant else tuple(found)


def taylor(x: Tensor, e: Sequence[int], f: Sequence[int]) -> Tensor:
    """The coefficient of y^f in function_e(x + y); x (p, ...)."""
    if e[0] < 0:  # |x + y|^2 = |x|^2 + 2 x.y + |y|^2
        if sum(f) == 0:
            return function(x, e)
        return 2 * function(x, f) if sum(f) == 1 else torch.full_like(x[0], float(f == e))
    if f[0] < 0:
        return torch.zeros_like(x[0])
    both = list(zip(e, f, strict=True))
    if any(b > a for a, b in both):
        return torch.zeros_like(x[0])
    return function(x, [a - b for a, b in both]) * prod([comb(a, b) for a, b in both])


def contract(coefficients: Tensor, basis: Tensor) -> Tensor:
    """Sums coefficients (B or 1, H, n or 1, f) times functions (B or 1, n, f, N) to (B, H, n, N)."""
    b, h, n, f = coefficients.shape
    few = False  # rows of each of n matrix products, which have a start-up cost; a compiler would guard the numbers
    if not torch.compiler.is_compiling():
        few = (h if len(basis) > 1 else b * h) <= 4 and max(f, basis.shape[-1]) <= 16
    if few or (n == 1 and basis.shape[1] != 1):
        total = coefficients[..., :1] * basis[:, None, :, 0]
        for i in range(1, f):
            total = torch.addcmul(total, coefficients[..., i : i + 1], basis[:, None, :, i])
        return total
    if basis.shape[0] == 1:  # shared by all samples, never copied for each
        out = torch.bmm(coefficients.permute(2, 0, 1, 3).reshape(n, b * h, f), basis[0])  # (n, BH, N)
        return out.view(n, b, h, basis.shape[-1]).permute(1, 2, 0, 3)
    return (coefficients.transpose(1, 2) @ basis).transpose(1, 2)


def project(scores: Tensor, basis: Tensor, like: Tensor) -> Tensor:
    """The transpose of `contract`: the gradient of coefficients shaped as `like`, given that of the scores."""
    grad = contract(scores, basis.transpose(-1, -2))  # (B, H, n, f)
    summed = [i for i in (0, 2) if like.shape[i] == 1 and grad.shape[i] != 1]
    return grad.sum(summed, keepdim=True) if summed else grad


Parts = tuple[Tensor, Tensor | None]


def split(queries: Positions, keys: Positions) -> tuple[Parts, Parts]:
    """Positions in float32 from which D follows without loss: high parts, NaN where there is none, and low parts.

    D is the difference of the high parts plus that of the low ones. float32 positions stay as they are and need no low
    parts; float64 ones are taken about the middle that queries and keys share.
    """
    if queries.r.dtype == keys.r.dtype == torch.float32:
        return (queries.r, None), (keys.r, None)
    return queries.once(("split", keys), partial(_split, queries.r, keys.r))


def _split(queries: Tensor, keys: Tensor) -> tuple[Parts, Parts]:
    sets = [queries] if keys is queries else [queries, keys]
    batch = max(len(r) for r in sets)
    middle, _ = centre(torch.cat([r.double().expand(batch, -1, -1) for r in sets], dim=1))
    near = [r.double() - middle for r in sets]
    high = [r.float() for r in near]
    parts = [(x, (r - x).nan_to_num(nan=0.0).float()) for r, x in zip(near, high, strict=True)]
    return parts[0], parts[-1]
