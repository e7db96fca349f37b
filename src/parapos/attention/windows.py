"""Which keys a block of queries can see at all, when scores fall with distance.

Softmax gives a key whose score lies 104 below another's the weight exp(-104), which is 0 in float32. Parabolas get
there soon: with D* = -M^-1 g / 2 the vertex and h = -g^T M^-1 g / 4 its height, the term of key j seen from query i is

    (D - D*)^T M (D - D*) + h,   at most   (D_u - D*_u)^2 / (M^-1)_uu + h   along each axis u.

The query's own key has D = 0, so row i reaches at least q_i.k_i, and elsewhere q_i.k_j <= |q_i| |k|_max. What can
matter lies in a box around r_i + D*, and the keys in the boxes of a block of queries, in reading order, in one range.
B batch, H heads, N tokens, p position dims; coordinates come first, as in columns.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..positions import centre, placed
from .columns import planes
from .terms import Quadratic

ALIGN = 32  # ranges start and end at multiples of this
DEEP = {torch.float64: 746.0, torch.float32: 104.0}  # exp(-DEEP) is 0


def inverse(M: Tensor) -> tuple[Tensor, Tensor]:
    """M^-1 of symmetric M (p, p, ...) by elimination, and where all pivots are negative, that is M < 0."""
    p = len(M)
    left = [[M[u, v] for v in range(p)] for u in range(p)]
    right = [[torch.full_like(M[0, 0], float(u == v)) for v in range(p)] for u in range(p)]
    negative = torch.ones_like(M[0, 0], dtype=torch.bool)
    for u in range(p):
        pivot = left[u][u]
        negative = negative & (pivot < 0)
        left[u], right[u] = ([x / pivot for x in row] for row in (left[u], right[u]))
        for v in range(p):
            if v != u:
                factor = left[v][u]
                left[v] = [x - factor * y for x, y in zip(left[v], left[u], strict=True)]
                right[v] = [x - factor * y for x, y in zip(right[v], right[u], strict=True)]
    return torch.stack([torch.stack(row) for row in right]), negative


def boxes(q: Tensor, k: Tensor, term: Quadratic, r: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest coordinates (p, B, H, N) of keys that a query can see; infinite where scores do not fall."""
    assert term.M is not None
    slope = term.M.new_zeros((*term.M.shape[:3], r.shape[-1])) if term.g is None else term.g
    M, g, at = planes(term.M.double(), slope.double(), r.double())
    if M.ndim == 3:
        negative, axis, vertex = M < 0, (1 / M).expand(len(g), *M.shape), -g / (2 * M)
    else:
        inverted, negative = inverse((M + M.transpose(0, 1)) / 2)
        axis = torch.stack([inverted[u, u] for u in range(len(g))])
        vertex = (inverted * g).sum(1) / -2
    dtype = torch.promote_types(q.dtype, torch.float32)
    products = []  # head by head, to save memory
    for x, y in zip(q.unbind(1), k.unbind(1), strict=True):
        x, y = x.to(dtype), y.to(dtype)
        products.append(
            torch.stack([torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1), (x * y).sum(-1)])
        )
    size, length, own = torch.stack(products, dim=2)  # (B, H, N) each
    if mask is not None:
        length, own = (torch.where(mask[:, None], x, 0.0) for x in (length, own))
    farthest = size * length.amax(-1, keepdim=True)
    # A little more than needed, for the rounding of scores.
    gap = (farthest * 1.001 - own).double() + (DEEP[dtype] + 1) / scale + (vertex * g).sum(0) / 2
    half = (gap * -axis).clamp(min=0).sqrt() * 1.001
    known = negative & (half + vertex).isfinite().all(0)
    low, high = (
        torch.where(known, x, end) for x, end in ((at + vertex - half, -torch.inf), (at + vertex + half, torch.inf))
    )
    return low, high


def windows(
    q: Tensor, k: Tensor, term: Quadratic, mask: Tensor | None, scale: float, blocks: Sequence[slice]
) -> list[list[tuple[int, int]]] | None:
    """For each head and block of queries a range of keys that holds all it can see; None if that may be all keys."""
    here = placed(term.r)
    if term.M is None or not scale > 0 or not bool((here if mask is None else here | ~mask).all()):
        return None
    r = centre(term.r, mask)[0]
    low, high = boxes(q, k, term, r, mask, scale)
    keys = r.double().movedim(-1, 0)[:, :, None]  # (p, B or 1, 1, N)
    found = []
    for rows in blocks:
        least, most = low[..., rows].amin(-1, keepdim=True), high[..., rows].amax(-1, keepdim=True)
        seen = ((keys >= least) & (keys <= most)).all(0)  # (B, H, N)
        seen = seen if mask is None else seen & mask[:, None]
        seen = seen.any(0)
        start, end = (x.to(torch.uint8).argmax(-1) for x in (seen, seen.flip(-1)))
        end = seen.shape[-1] - end
        found.append(torch.stack([start, torch.where(seen.any(-1), end, 1)], dim=-1))
    ranges = torch.stack(found, dim=1).tolist()  # heads, blocks, 2
    return [[(start // ALIGN * ALIGN, -(-end // ALIGN) * ALIGN) for start, end in head] for head in ranges]
