"""The specification: dense attention in plain eager operations, any floating type, no tricks.

B batch, H heads, N tokens, h query/key size, w value size. Products run in the type of the input;
scores, terms and softmax in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .terms import Term


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k (B, H, N, h), v (B, H, N, w), mask (B, N) with True = real token.

    Returns the output (B, H, N, w) and the weights (B, H, N, N). A query that sees no key gets zeros.
    """
    if mask is not None:  # padding may hold anything, NaN too
        k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(dtype) * scale  # (B, H, N, N)
    for term in terms:
        scores = scores + term.scores(dtype) * (scale if term.scaled else 1.0)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(q.dtype)
    return weights @ v, weights
