"""The specification: dense attention in plain eager operations, any floating type, no tricks.

B batch, H heads, n queries, N keys, h query/key size, w value size. Products run in the type of the input; scores,
terms and softmax in float32 (float64 for float64 input).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Call, Kernel, register_kernel


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, n, w) and the weights (B, H, n, N). A query that sees no key gets zeros."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(dtype) * call.scale  # (B, H, n, N)
    for term in call.terms:
        scores = scores + term.scores(dtype) * (call.scale if term.scaled else 1.0)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(q.dtype)
    return weights @ v, weights


HOW = "dense attention in plain operations, all scores in memory"
register_kernel(Kernel("reference", 100, False, lambda call: None, lambda call: HOW, lambda call: attention(call)[0]))
