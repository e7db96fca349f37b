"""Score terms as extra query and key columns, so that fused attention adds them at the price of a wider head.

    D^T M_i D + g_i.D = psi(M_i, g_i, r_i) . phi(r_j) + const_i,   D = r_j - r_i
    phi = [r_u r_v for u <= v | r],   psi = [M_uv, doubled off the diagonal | g - 2 M r_i]

B batch, H heads, N tokens, p position dims, f features: 2, 5, 9, 14 for p = 1..4; p + 1 if M is a multiple of
the identity. const_i cancels in softmax unless some key has no position.
Near the query the products are large and their sum is small, so digits are lost. Two remedies:
- positions are centred per sample and scaled by a power of two;
- psi and phi are split, psi.phi = psi_hi.phi_hi + psi_hi.phi_lo + psi_lo.phi. Half precision splits each number
  into two. float32 puts psi_hi and phi_hi on a grid so coarse that near the query all their products and partial
  sums are integers times one unit, hence exact; const_i then brings the sum back near 0 before the rest is added.
float64 has digits to spare and uses the bare features. What error is left grows with |M| |r|^2, so `columns` also
estimates it, and the kernel takes another way where it would show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..positions import centre, placed
from .terms import Quadratic

REACH_BITS = 6  # positions are scaled to |r| <= 2^6
CONST = 64.0  # what keys hold against const_i / 64, which then fits in float16


# Inside this file coordinates come first, so that every operation runs over long rows: M is (p, p, B, H, N), or
# (B, H, N) for a multiple of the identity; g (p, B, H, N); r (p, B or 1, 1, N); features (f, B, H or 1, N).


def planes(M: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M (B, H, N, p, p) or (B, H, N), g (B, H, N, p) and r (B or 1, N, p) with coordinates first."""
    M = M if M.ndim == 3 else M.permute(3, 4, 0, 1, 2)
    return M.contiguous(), g.permute(3, 0, 1, 2).contiguous(), r.permute(2, 0, 1)[:, :, None].contiguous()


def _pairs(p: int) -> list[tuple[int, int]]:
    return [(u, v) for u in range(p) for v in range(u, p)]


def phi(r: Tensor, M: Tensor) -> Tensor:
    """Key features. M only tells the kind."""
    quadratic = (
        r.square().sum(0, keepdim=True) if M.ndim == 3 else torch.stack([r[u] * r[v] for u, v in _pairs(len(r))])
    )
    return torch.cat([quadratic, r])


def phi_step(r: Tensor, step: Tensor, M: Tensor) -> Tensor:
    """phi(r + step) - phi(r) without cancellation: r_u s_v + s_u (r + s)_v."""
    if M.ndim == 3:
        return torch.cat([(step * (r + r + step)).sum(0, keepdim=True), step])
    end = r + step
    return torch.cat([torch.stack([r[u] * step[v] + step[u] * end[v] for u, v in _pairs(len(r))]), step])


def psi(M: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """Query features."""
    linear = g - 2 * _apply(M, r)
    if M.ndim == 3:
        return torch.cat([M[None], linear])
    return torch.stack([M[u, v] if u == v else 2 * M[u, v] for u, v in _pairs(len(r))] + list(linear))


def constant(M: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """const_i = r^T M r - g.r: (B, H, N)."""
    return ((_apply(M, r) - g) * r).sum(0)


def _apply(M: Tensor, r: Tensor) -> Tensor:
    """M r: (p, B, H, N)."""
    return M * r if M.ndim == 3 else (M * r).sum(1)


def _split32(M: Tensor, g: Tensor, r: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Query columns, key columns, and what is left of const_i, for float32. Whole numbers have no phi_lo."""

    def on_grid(x: Tensor) -> Tensor:
        return (x / unit).round_().mul_(unit)

    # The unit (B, H, N) of psi_hi: small, yet the sums of near keys stay below 2^24 of it.
    size = constant(M.abs(), -g.abs(), r.abs() + 2.0**REACH_BITS)
    unit = torch.exp2(torch.ceil(torch.log2(size.clamp(min=1e-30))) - 24)
    M_hi, g_hi, coarse = on_grid(M), on_grid(g), r.round()
    M_lo, g_lo, fine = M - M_hi, g - g_hi, r - coarse
    high, low = psi(M_hi, g_hi, coarse), psi(M_lo, g_lo, r)
    low[-len(r) :] -= 2 * _apply(M_hi, fine)
    const_lo = constant(M_lo, g_lo, r) + ((_apply(M_hi, coarse + r) - g_hi) * fine).sum(0)
    shift = on_grid(const_lo)
    const_hi = constant(M_hi, g_hi, coarse) + shift
    one = torch.full_like(r[:1], CONST)
    middle = ([], []) if whole else ([high], [phi_step(coarse, fine, M)])
    query = torch.cat([const_hi[None] / CONST, high, *middle[0], low])
    key = torch.cat([one, phi(coarse, M), *middle[1], phi(r, M)])
    return query, key, const_lo - shift


def _split16(query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each number as two of half precision."""
    q_hi, k_hi = query.to(dtype), key.to(dtype)
    q_lo, k_lo = (query - q_hi).to(dtype), (key - k_hi).to(dtype)
    return torch.cat([q_hi, q_hi, q_lo]), torch.cat([k_hi, k_lo, k_hi])


def moment_basis(r: Tensor, mask: Tensor | None) -> Tensor:
    """[1 | r | r r^T] of every key, float64, (B or 1, 1, N, 1 + p + p p): sums of it give moments of D."""
    here = placed(r)[..., None]
    r = centre(r.double(), mask)[0]
    basis = torch.cat([torch.ones_like(r[..., :1]), r, (r[..., :, None] * r[..., None, :]).flatten(-2)], dim=-1)
    return torch.where(here, basis, 0.0)[:, None]


def moment_gradients(term: Quadratic, mask: Tensor | None, moments: Tensor) -> dict[str, Tensor]:
    """Gradients of M and g, sum_j ds_ij D D^T and sum_j ds_ij D, from sum_j ds_ij [1 | r_j | r_j r_j^T]."""
    p = term.r.shape[-1]
    r = centre(term.r.double(), mask)[0][:, None]  # (B or 1, 1, N, p)
    zeroth, first, second = moments[..., :1], moments[..., 1 : 1 + p], moments[..., 1 + p :].unflatten(-1, (p, p))
    here = placed(term.r)[:, None, :, None]
    out = {}
    if term.g is not None:
        out["g"] = torch.where(here, first - zeroth * r, 0.0)
    if term.M is not None:
        cross = first[..., :, None] * r[..., None, :]
        full = second - cross - cross.transpose(-1, -2) + zeroth[..., None] * r[..., :, None] * r[..., None, :]
        full = torch.where(here[..., None], full, 0.0)
        out["M"] = full if term.M.ndim == 5 else full.diagonal(dim1=-2, dim2=-1).sum(-1)
    return out


def _error(M: Tensor, g: Tensor, r: Tensor, dtype: torch.dtype) -> Tensor:
    """About how far off scores may be for the keys that matter, before scaling."""
    size = constant(M.abs(), -g.abs(), r.abs() + 2.0 ** (REACH_BITS - 3)).amax()
    if dtype == torch.bfloat16:
        return size * 2.0**-17
    if dtype == torch.float16:  # and nothing may overflow
        return torch.where(size < 2e6, size * 2.0**-22, torch.inf)
    if dtype == torch.float64:
        return size * 2.0**-53
    rest = 2.0**-11 + (r - r.round()).abs().amax() * 2.0 ** (1 - REACH_BITS)
    # The sum is exact near the query. Keys elsewhere win if the linear term lifts them or scores are not concave.
    diagonal = M[None] if M.ndim == 3 else torch.stack([M[u, u] for u in range(len(r))])
    slope = g.abs().sum(0)
    lift = torch.minimum(slope * 2.0**REACH_BITS, slope.square() / (4 * diagonal.abs().amin(0))).amax()
    concave = diagonal.amax() < 0
    for u, v in _pairs(len(r)) if M.ndim == 5 else []:
        if u < v:
            minor = diagonal[u] * diagonal[v] - M[u, v].square()
            concave = concave & (minor.amin() > -1e-6 * diagonal.square().amax())
    return torch.where(concave, (size * rest + 4 * lift) * 2.0**-24, torch.inf)


def _fitted(r: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions centred and scaled to |r| <= 2^REACH_BITS, and the power of two (B or 1, 1, 1) that does it."""
    r, reach = centre(r, mask)
    fit = torch.exp2(torch.ceil(torch.log2(reach.clamp(min=1e-30))) - REACH_BITS)
    return r / fit, fit


def whole(r: Tensor, mask: Tensor | None) -> bool:
    """Whether positions become whole numbers, which need fewer columns in float32."""
    fitted = _fitted(r, mask)[0].float()
    return bool((fitted == fitted.round()).all())


def columns(
    term: Quadratic, mask: Tensor | None, dtype: torch.dtype, even: bool | None = None
) -> tuple[Tensor, Tensor, float]:
    """Extra columns for q (B, H, N, e) and for k (B or 1, N, e), in `dtype`, and an estimate of their error.

    even: whether positions are whole, if that was decided for more samples than these.
    Their products sum to the term's scores, up to a number per query unless `term.unplaced`. Everything before the
    last rounding is float32, or float64 for float64 and float16.
    """
    # float16 keeps 22 bits of a feature in two halves, so features are made with more than the 24 of float32.
    wide = torch.float64 if dtype == torch.float16 else torch.promote_types(dtype, torch.float32)
    here = placed(term.r)
    r, fit = _fitted(term.r, mask)
    some = term.M if term.M is not None else term.g
    assert some is not None
    form = some.new_zeros(some.shape[:3]) if term.M is None else term.M
    slope = some.new_zeros((*some.shape[:3], r.shape[-1])) if term.g is None else term.g
    M, g, r = planes(form.to(wide), slope.to(wide), r.to(wide))
    fit = fit.to(wide)
    if M.ndim == 5:  # D^T M D sees the symmetric part alone
        M = (M + M.transpose(0, 1)) / 2
    M, g = M * fit.square(), g * fit
    shape, spread = M, r
    if mask is not None:  # padding has no say
        none = -1e-30 if M.ndim == 3 else -1e-30 * torch.eye(len(M), dtype=wide, device=M.device)[..., None, None, None]
        shape, spread = torch.where(mask[:, None], M, none), torch.where(mask[:, None], r, 0.0)
    estimate = _error(shape, g, spread, dtype)
    error, found = torch.stack([estimate, (r == r.round()).all().to(wide)]).tolist()
    if dtype == torch.float32:
        query, key, const = _split32(M, g, r, bool(found) if even is None else even)
    else:
        query, key, const = psi(M, g, r), phi(r, M), constant(M, g, r)
        if wide != dtype:
            query, key = _split16(query, key, dtype)
    if term.unplaced is not False:
        const = const / CONST
        high = const.to(dtype)
        halves = [high] if dtype == torch.float64 else [high, (const - high).to(dtype)]
        query = torch.cat([query, torch.stack(halves)])
        key = torch.cat([key, torch.full_like(key[: len(halves)], CONST)])
    if term.unplaced is not False or mask is not None:
        query = torch.where(here[:, None], query, 0.0)
        key = torch.where((here if mask is None else here & mask)[:, None], key, 0.0)
    return query.to(dtype).movedim(0, -1), key.to(dtype)[:, :, 0].movedim(0, -1), error
