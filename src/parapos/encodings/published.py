"""PaPE's scores in the two separable forms that were published, as oracles for tests and comparisons.

    <a_i, (W_p D)^2> + <b_i, W_p D> = query_i . key_j,   D = r_j - r_i

B batch, N tokens, D model width, H heads, p position dims, m parabolas. Both forms are exact in exact arithmetic and
lose digits otherwise, for they sum large numbers of opposite sign. All functions take tensors of any floating type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .parabolic import PaPE, PaPERI


def preactivations(encoding: PaPE | PaPERI, x: Tensor) -> tuple[Tensor, Tensor]:
    """W_a x and W_b x, each (B, H, N, m), of tokens x (B, N, D).

    PaPE-RI is the case m = p with one row of W_a for all parabolas and W_b = 0.
    """
    if isinstance(encoding, PaPERI):
        a = F.linear(x, encoding.w_a).transpose(1, 2)[..., None]  # (B, H, N, 1)
        a = a.expand(*a.shape[:3], encoding.pos_dim)
        return a, torch.zeros_like(a)
    if encoding.w_a is None or encoding.w_b is None:
        raise ValueError("the published forms are those of the full PaPE; this one has an ablation")
    a, b = (F.linear(x, w.flatten(0, 1)).unflatten(-1, w.shape[:2]) for w in (encoding.w_a, encoding.w_b))
    return a.transpose(1, 2), b.transpose(1, 2)


def projection(encoding: PaPE | PaPERI) -> Tensor:
    """W_p (H, m, p); for PaPE-RI w_p times the identity."""
    if isinstance(encoding, PaPERI):
        return encoding.w_p[:, None, None] * torch.eye(encoding.pos_dim).to(encoding.w_p)
    if encoding.w_p is None:
        raise ValueError("the published forms are those of the full PaPE; this one has an ablation")
    return encoding.w_p


def coefficients(encoding: PaPE | PaPERI, x: Tensor) -> tuple[Tensor, Tensor]:
    """a = -softplus(W_a x) and b = W_b x, each (B, H, N, m)."""
    a, b = preactivations(encoding, x)
    return -F.softplus(a), b


def collapse(a: Tensor, b: Tensor, w_p: Tensor) -> tuple[Tensor, Tensor]:
    """M = W_p^T diag(a) W_p (B, H, N, p, p) and g = W_p^T b (B, H, N, p) from a, b (B, H, N, m), w_p (H, m, p)."""
    outer = (w_p[..., :, None] * w_p[..., None, :]).flatten(-2)  # (H, m, p p)
    return (a @ outer).unflatten(-1, w_p.shape[-1:] * 2), b @ w_p


def paper(a: Tensor, b: Tensor, w_p: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's form: query (B, H, N, e) and key (B or 1, 1, N, e) columns, e = p^2 + 2p + 2.

    a, b (B, H, N, m), w_p (H, m, p), r (B or 1, N, p).
    """
    return paper_columns(*collapse(a, b, w_p), r)


def paper_columns(M: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """`paper` from M (B, H, N, p, p) and g (B, H, N, p).

    The query holds [r^T M r | vec M | -2 M r | g | -g.r], the key [1 | vec(r r^T) | r | r | 1].
    """
    r = r[:, None]  # (B or 1, 1, N, p)
    Mr = (M * r[..., None, :]).sum(-1)  # (B, H, N, p)
    rMr, gr = ((x * r).sum(-1, keepdim=True) for x in (Mr, g))
    one, outer = torch.ones_like(r[..., :1]), (r[..., :, None] * r[..., None, :]).flatten(-2)
    return torch.cat([rMr, M.flatten(-2), -2 * Mr, g, -gr], -1), torch.cat([one, outer, r, r, one], -1)


def released(
    a_positive: Tensor, b: Tensor, w_p: Tensor, r: Tensor, *, rounded: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The form of the released code: query (B, H, N, e) and key (B or 1, H, N, e) columns, e = 3m + 2.

    a_positive = softplus(W_a x) and b (B, H, N, m), w_p (H, m, p), r (B or 1, N, p). With P = W_p r the query holds
    [-<a, P^2> | a | 2 a P | <b, P> | b], the key [1 | -P^2 | P | 1 | -P]: the linear term is <b, P_i - P_j>, of the
    opposite sign to the paper's.
    rounded: the type that W_p, r and P are rounded to, as autocast does before it goes on in float32.
    """
    a, r = a_positive, r[:, None]
    if rounded is not None:
        r, w_p = r.to(rounded).to(r.dtype), w_p.to(rounded).to(w_p.dtype)
    P = r @ w_p.mT  # (B or 1, H, N, m)
    if rounded is not None:
        P = P.to(rounded).to(r.dtype)
    one = torch.ones_like(P[..., :1])
    query = [-(a * P * P).sum(-1, keepdim=True), a, 2 * a * P, (b * P).sum(-1, keepdim=True), b]
    return torch.cat(query, -1), torch.cat([one, -P * P, P, one, -P], -1)
