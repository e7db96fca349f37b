"""Which tiles of keys each tile of queries needs: a proof, from the numbers of a call, that the others have no weight.

Tokens are put into compact tiles (`Tiling`). For a query i and a tile T of keys with box B (of D = r_j - r_i), centroid
k_T and radius R_T, every key j of T has a score of at most

    U_iT = f(D0) + max over B of grad f(D0).(D - D0) + l max over B of |D - D0|^2 + scale (q_i.k_T + |q_i| R_T)

for f(D) = D'MD + g.D, any D0 in B, and l at least the largest eigenvalue of M and 0. Proof: f is quadratic, so
f(D) = f(D0) + grad f(D0).(D - D0) + (D - D0)'M(D - D0), and the last term is at most l |D - D0|^2; q_i.k_j =
q_i.k_T + q_i.(k_j - k_T), and Cauchy-Schwarz bounds the last product by |q_i| R_T. Where M is negative semidefinite
and D0 is the maximum over B, the gradient there points out of B and the bound of f is exact. A distance c |D| with
c < 0 is at most c u.D for any unit vector u, which is largest at a corner of B; with c > 0 it is at most c max |D|.

The softmax divides by exp of the row's log-sum-exp, which is at least l_i, the log-sum-exp over any visible keys: here
those of one anchor tile and all keys without a position. So a tile has a weight of at most n_T exp(U_iT - l_i) in row
i, and a tile of queries may skip tiles of keys as long as these weights add up to no more than the tolerance in every
row. For training a tile counts 1 + max |D|^2 times, because gradients of M sum weights times D D'. Rounding of
U and l is bounded by their largest summands and goes against skipping.
A heads, n queries, N keys, h head size, p position dims; Q tiles of queries, T tiles of keys, s slots of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .columns import columns, fits
from .kernels import Call
from .terms import Relative
from .tiling import Tiling

COARSE = 16  # tiles that are judged together first, where there are many
LEAST, LEAST_GPU = 4096, 32768  # keys, and queries times keys in its square: fewer are not worth a look
LEAST_FROM_D = 512  # likewise on a CPU, where dense attention would form scores from D
# What tiles cost, in units of dense attention: each pair of tiles, for small products are slower, and each query, for
# bounds and orders, as much as so many keys.
PAIR_COST, QUERY_COST = 1.7, 950.0
FROM_D = 8.0  # what scores formed from D take more than those by columns, at least
DEFAULTS = {torch.float64: 2.0**-52, torch.float32: 1e-7, torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13}


class Form(NamedTuple):
    """The positional score of some queries as a function of D: D'MD + g.D + c |D|, scaled as the score is."""

    M: Tensor  # (..., p, p), symmetric
    g: Tensor  # (..., p)
    c: Tensor  # (...)


def is_separable(term: Relative) -> bool:
    """Whether a term can be columns."""
    return term.scaled and all(e[0] == -2 or 0 <= sum(e) <= 2 for e in term.exponents)


def is_bounded(term: Relative) -> bool:
    """Whether `form` can write a term."""
    return all(e[0] in (-1, -2) or (min(e) >= 0 and sum(e) <= 2) for e in term.exponents)


def form(terms: Sequence[Relative], coefficients: Sequence[Tensor]) -> Form:
    """The sum of terms with coefficients (..., f), scaled, without what is the same for all keys."""
    p, like = terms[0].r.r.shape[-1], coefficients[0][..., 0]
    M, g, c = like.new_zeros(*like.shape, p, p), like.new_zeros(*like.shape, p), torch.zeros_like(like)
    for term, values in zip(terms, coefficients, strict=True):
        for e, value in zip(term.exponents, values.unbind(-1), strict=True):
            axes = [u for u, power in enumerate(e) for _ in range(power)]
            if e[0] == -1:
                c += value
            elif e[0] == -2:
                M.diagonal(dim1=-2, dim2=-1).add_(value[..., None])
            elif len(axes) == 1:
                g[..., axes[0]] += value
            elif len(axes) == 2:
                M[..., axes[0], axes[1]] += value / 2
                M[..., axes[1], axes[0]] += value / 2
    return Form(M, g, c)


def positive_part(M: Tensor) -> Tensor:
    """At least the largest eigenvalue of M (..., p, p) and 0; next to 0 where M is negative semidefinite: (...)."""
    p, planes = M.shape[-1], _planes(M, 2)
    size = _sum(x.abs() for x in planes)
    rounding = 4 * p * torch.finfo(M.dtype).eps * size
    # Elimination of rounding I - M: all pivots positive means that no eigenvalue of M is above that, twice to be safe.
    rows = [[-x for x in planes[u * p : u * p + p]] for u in range(p)]
    definite = torch.ones_like(size, dtype=torch.bool)
    for u in range(p):
        pivot = rows[u][u] + rounding
        definite &= pivot > 0
        pivot = torch.where(pivot > 0, pivot, 1.0)
        for v in range(u + 1, p):
            for w in range(v, p):
                rows[v][w] = rows[v][w] - rows[u][v] * rows[u][w] / pivot
    return torch.where((size == 0) | definite, 2 * rounding, size)


class Keys(NamedTuple):
    """What the bound takes of tiles of keys: boxes, centroids, radii, and how many keys they have."""

    low: Tensor  # (T, p), float64
    high: Tensor
    centroid: Tensor  # (A, T, h)
    radius: Tensor  # (A, T)
    count: Tensor  # type: ignore[assignment]  # (T,)

    @classmethod
    def of(cls, tiles: Tiling, heads: Iterable[Tensor], visible: Tensor) -> Keys:
        """Of keys (T, s, h) of each head, and which of them somebody sees (T, s): the others do not count."""
        count, centroids, radii = visible.sum(1), [], []
        for k in heads:
            k = k if visible.all() else torch.where(visible[..., None], k, 0.0)
            centroids.append(k.sum(1) / count.clamp(min=1)[:, None])
            radii.append(torch.where(visible, (k - centroids[-1][:, None]).norm(dim=-1), 0.0).amax(1))
        return cls(tiles.low, tiles.high, torch.stack(centroids), torch.stack(radii), count)

    def merged(self, size: int) -> Keys:
        """Runs of `size` tiles as one."""
        low, high = (x.unflatten(0, (-1, size)) for x in (self.low, self.high))
        count, centroid = self.count.view(-1, size), self.centroid.unflatten(1, (-1, size))
        middle = centroid.mean(2)
        apart = (centroid - middle[:, :, None]).norm(dim=-1) + self.radius.unflatten(1, (-1, size))
        radius = torch.where(count > 0, apart, 0.0).amax(2)
        return Keys(low.amin(1), high.amax(1), middle, radius, count.sum(1))

    def take(self, index: Tensor) -> Keys:
        return Keys(
            self.low[index], self.high[index], self.centroid[:, index], self.radius[:, index], self.count[index]
        )


def _planes(x: Tensor, dims: int = 1) -> list[Tensor]:
    """The numbers of small vectors or matrices, each for all of them: operations run over long rows."""
    return list(x.flatten(-dims).movedim(-1, 0).contiguous().unbind(0))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    return sum(others, first)


class Queries:
    """What the bound takes of tiles of queries. With D = y + x, y about the middle of the tile, the form without c is
    y'My + b.y + a.

    q (A, Q, s, h), times the scale of the scores; x (Q, s, p): the middle minus the positions; middle (Q, p) in
    float64; form of (A, Q, s). Coordinates come first here: operations run over long rows.
    """

    def __init__(self, q: Tensor, x: Tensor, middle: Tensor, form: Form) -> None:
        self.q, self.middle, self.p, self.c = q, middle, x.shape[-1], form.c
        self.has_distance = bool(form.c.any())
        x = x.movedim(-1, 0)[:, None].contiguous()  # (p, 1, Q, s)
        M, g = form.M.movedim((-2, -1), (0, 1)).contiguous(), form.g.movedim(-1, 0).contiguous()
        half = (M * x).sum(1)
        b = g + 2 * half
        self.M, self.b = M, b
        self.a, self.length, self.curve = ((half + g) * x).sum(0), q.norm(dim=-1), M.abs().sum((0, 1))
        self.steep, self.x = g.abs().sum(0) + form.c.abs(), x
        self.reach = x[:, 0].abs().amax(-1, keepdim=True).square().sum(0).sqrt()  # (Q, 1): |x| at most
        self.gradient = torch.cat([b[:, None], 2 * M], 1).movedim(1, -1).flatten(1, 2)  # (p, A Q, s, 1 + p), of 1 and y
        self.mean_M, self.mean_b, self.mean_q = M.mean(-1, keepdim=True), b.mean(-1, keepdim=True), q.mean(2)
        factors = [M[u, v] for u, v in self.products]
        factors += [*b, positive_part(form.M), self.curve, self.steep, self.length]
        if self.has_distance:
            factors += [form.c.clamp(min=0), form.c.clamp(max=0), *(form.c.clamp(max=0) * x)]
        self.factors = torch.stack([y.expand(q.shape[:3]) for y in factors]).movedim(0, -1).flatten(0, 1)  # (A Q, s, F)

    @property
    def products(self) -> list[tuple[int, int]]:
        """Pairs of coordinates, each once."""
        return [(u, v) for u in range(self.p) for v in range(u, self.p)]

    @property
    def columns(self) -> Tensor:
        """What multiplies [y_u y_v for u <= v | y | 1] in the form without c: (A, Q, s, e)."""
        products = [self.M[u, v] * (1 if u == v else 2) for u, v in self.products]
        return torch.stack([*products, *self.b, self.a], -1)

    @property
    def rounding(self) -> float:
        """The rounding of a bound or a score, as a share of the sizes of its summands."""
        return (16 + 8 * self.p**2 + self.q.shape[-1]) * torch.finfo(self.q.dtype).eps


class Pairs:
    """What the bound takes of pairs of tiles: positions of keys about the middle of each tile of queries.

    low and high (p, Q, T): the boxes of the keys; near (p, Q, T): what is nearest to the middle; peak (p, A, Q, T):
    where the mean form of the queries is about largest. far (Q, T): at least |D|; score (A, Q, T): the mean score at
    the peak.
    """

    def __init__(self, queries: Queries, keys: Keys) -> None:
        edges = ((e.mT[:, None] - queries.middle.mT[:, :, None]).to(queries.q.dtype) for e in keys[:2])
        self.low, self.high = edges
        self.far = torch.maximum(-self.low, self.high).square().sum(0).sqrt_() + queries.reach
        self.near = torch.zeros_like(self.low).clamp(self.low, self.high)
        M, b, axes = queries.mean_M, queries.mean_b, range(queries.p)
        y = list(self.near)
        for u in (*axes, *axes):  # towards the maximum, one coordinate after another; the bound holds for any point
            others = _sum([b[u], *(2 * M[u, v] * y[v] for v in axes if v != u)])
            down = torch.where(M[u, u] < 0, -0.5 / M[u, u], 0.0)
            y[u] = (others * down).clamp(self.low[u], self.high[u])
        self.peak = torch.stack(y)
        self.score = ((b + (M * self.peak).sum(1)) * self.peak).sum(0)
        self.score.baddbmm_(queries.mean_q, keys.centroid.mT)
        if queries.has_distance:
            self.score += queries.c.mean(-1, keepdim=True) * self.distance
        self.score.masked_fill_(keys.count == 0, -math.inf)

    @property
    def distance(self) -> Tensor:
        """From the middle of the queries to what is nearest: (Q, T)."""
        return self.near.square().sum(0).sqrt()


def log_weights(queries: Queries, floor: Tensor, keys: Keys, pairs: Pairs, weighted: bool) -> Tensor:
    """At least the log of the weight that a tile of keys has in any row of a tile of queries: (A, Q, T).

    floor (A, Q, s): at most the log-sum-exp of each row. weighted: times 1 + max |D|^2. All but the positive parts of
    the gradient are sums of products of what a query has and what a pair of tiles has, which are matrix products.
    """
    eps, q, y, far, shape = queries.rounding, queries.q, pairs.peak, pairs.far, queries.q.shape[:3]
    below = pairs.low[:, None] - y
    # At the peak and, for each axis, at the lower end of the box; the way up to the higher end follows.
    end, twice = y + below, y + 2 * below
    factors = [y[u] * twice[u] if u == v else y[u] * twice[v] + y[v] * twice[u] for u, v in queries.products]
    reach = torch.maximum(pairs.high[:, None] - y, -below).square().sum(0)
    spread = keys.radius + eps * (keys.centroid.norm(dim=-1) + keys.radius)
    factors += [*end, reach, eps * far.square(), eps * far, spread[:, None]]
    if queries.has_distance:  # |D| >= unit.D, a plane that touches it
        unit = pairs.near / pairs.distance.clamp(min=torch.finfo(q.dtype).tiny)
        factors += [far, torch.minimum(unit * pairs.low, unit * pairs.high).sum(0), *unit]
    of_pair = torch.stack([z.expand(y.shape[1:]) for z in factors], 2).flatten(0, 1)
    start = (queries.a - floor + eps * floor.abs().nan_to_num(posinf=0.0)).flatten(1)[..., None]
    bound = torch.baddbmm(start, q.flatten(1, 2), keys.centroid.mT).view(*queries.factors.shape[:2], -1)
    bound.baddbmm_(queries.factors, of_pair)
    at = torch.cat([torch.ones_like(y[:1]), y]).movedim(0, 2).flatten(0, 1)  # (A Q, 1 + p, T)
    gradient = torch.empty_like(bound)
    for of_query, side in zip(queries.gradient, pairs.high - pairs.low, strict=True):
        torch.bmm(of_query, at, out=gradient).clamp_(min=0.0)
        bound.view(*shape, -1).addcmul_(gradient.view(*shape, -1), side[:, None])
    logs = bound.view(*shape, -1).amax(2).nan_to_num_(nan=math.inf) + keys.count.log().to(q.dtype)
    logs = logs + torch.log1p(far.square()) if weighted else logs
    return logs.masked_fill(keys.count == 0, -math.inf)


def skipped(logs: Tensor, tolerance: float) -> Tensor:
    """The lightest tiles, whose weights sum to at most the tolerance: (..., T) boolean, given logs of weights."""
    weights, order = (logs.double() - math.log(tolerance or 5e-324)).exp().sort(-1)
    # In whole shares of the tolerance, rounded up: a GPU adds up floating numbers in any order.
    light = weights.mul_(2.0**40).ceil_().clamp_(max=2.0**44).long().cumsum(-1) <= 2**40 * (1 - 1e-3)
    return torch.zeros_like(light).scatter(-1, order, light)


def needed(
    queries: Queries, keys: Keys, coarse: Keys | None, floor: Callable[[Tensor, Tensor], Tensor], tolerance: float,
    weighted: bool,
) -> Tensor:  # fmt: skip
    """Which tiles of keys each tile of queries needs: (A, Q, T) boolean.

    coarse: runs of COARSE tiles that are judged first. floor: the log-sum-exp of rows at least, given anchor tiles
    (A, Q, 1) and |D| there at most. Half of the tolerance is for coarse tiles, half for those inside the others.
    """
    if coarse is None:
        pairs = Pairs(queries, keys)
        anchor = pairs.score.argmax(-1, keepdim=True)
        least = floor(anchor, pairs.far.expand_as(pairs.score).gather(-1, anchor))
        return ~skipped(log_weights(queries, least, keys, pairs, weighted), tolerance)
    pairs, run = Pairs(queries, coarse), torch.arange(COARSE, device=queries.q.device)
    fine = (pairs.score.argmax(-1).unique()[:, None] * COARSE + run).flatten()
    local = Pairs(queries, keys.take(fine))
    place = local.score.argmax(-1, keepdim=True)
    least = floor(fine[place], local.far.expand_as(local.score).gather(-1, place))
    wanted = ~skipped(log_weights(queries, least, coarse, pairs, weighted), tolerance / 2)  # (A, Q, T / COARSE)
    fine = (wanted.flatten(0, 1).any(0).nonzero() * COARSE + run).flatten()
    near, inside = keys.take(fine), wanted.repeat_interleave(COARSE, -1)
    logs = log_weights(queries, least, near, Pairs(queries, near), weighted)
    inside[..., fine] &= ~skipped(logs.masked_fill(~inside[..., fine], -math.inf), tolerance / 2)
    return inside


class HeadTiles(NamedTuple):
    """Which tiles of keys each tile of queries of one head needs."""

    queries: Tensor  # (Q, s): the tokens of each tile, -1 in empty slots
    keys: Tensor  # (T, s): likewise
    needed: Tensor  # (Q, T): boolean


def shared_terms(call: Call) -> tuple[Relative, ...] | None:
    """The terms of a call if the bound covers all of them: relative, of degree two or a distance, with one geometry."""
    terms = tuple(term for term in call.terms if isinstance(term, Relative) and is_bounded(term))
    if not terms or len(terms) < len(call.terms) or call.scale <= 0:
        return None
    first = terms[0]
    same = all(t.r.r is first.r.r and t.key_positions.r is first.key_positions.r for t in terms)
    return terms if same else None


def is_large(call: Call, least: int) -> bool:
    """Whether a call has so many keys, or so many queries times keys in the square of that."""
    n, keys = call.q.shape[2], call.k.shape[2]
    return min(n, keys) * keys >= least**2


def served(call: Call) -> tuple[Relative, ...] | None:
    """The terms of a call that is large enough to look for tiles, if the bound covers them; else None."""
    large = is_large(call, LEAST if call.q.device.type == "cpu" else LEAST_GPU)
    return shared_terms(call) if call.tolerance > 0 and (large or from_d(call) > 0) else None


@torch.no_grad()
def from_d(call: Call) -> float:
    """The share of samples that dense attention forms from D, since their columns would lose digits.

    0 where that is not looked at: in large calls, whose columns take long to make, and in small ones.
    """
    if is_large(call, LEAST) or not is_large(call, LEAST_FROM_D) or call.q.device.type != "cpu" or call.scale <= 0:
        return 0.0
    term = call.terms[0] if len(call.terms) == 1 else None
    if not isinstance(term, Relative) or not is_separable(term) or call.exact or call.q.dtype == torch.float64:
        return 0.0
    good = fits(term.coefficients(torch.float32), columns(term).bound, call.scale)
    return 1.0 - float(good.float().mean())


def cost(call: Call, share: float, costs: tuple[float, float] | None = None) -> float:
    """The time of tiles, of which this share is needed, in units of dense attention. Both may form scores from D.

    costs: of a kernel whose scores take the same time however they are formed.
    """
    of_pair, of_query = costs or (PAIR_COST, QUERY_COST)
    dense = 1.0 if costs else 1 + FROM_D * from_d(call)
    return (of_pair * share + of_query / call.k.shape[2]) / dense


def spread(count: int, most: int | None) -> list[int]:
    """At most so many of 0..count - 1, evenly spread."""
    most = count if most is None else min(most, count)
    return [(2 * i + 1) * count // (2 * most) for i in range(most)]
