"""Transformer for event cameras: tokens are the spikes of patches, at the place and the time where they happened.

B batch, L tokens of the longest sample, P patch side, D width. A token has a fixed number of events, each told by its
code ((polarity * buckets + bucket) P + row) P + column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..positions import Positions, event_positions
from .base import Backbone, Classifier, at_least_one, check_scale, real


class EventBackbone(Backbone):
    """patch and buckets: those of the tokenizer. time_scale: what counts as one unit of time, in units of t.

    Other keywords are those of the class that it is mixed with.
    """

    inputs = ("codes", "x", "y", "t", "length")
    embedding: nn.Linear

    def __init__(
        self,
        *,
        dim: int,
        patch: int = 16,
        buckets: int = 10,
        time_scale: float = 50_000.0,
        **common: Any,
    ) -> None:
        at_least_one(patch=patch, buckets=buckets)
        if not 0 < time_scale < math.inf:
            raise ValueError(f"time_scale must be positive and finite, got {time_scale}")
        embedding = nn.Linear(2 * buckets * patch * patch, dim)
        super().__init__(embedding, axes=3, patch=patch, dim=dim, **common)
        self.buckets, self.time_scale = buckets, time_scale

    def counts(self, codes: Tensor, mask: Tensor) -> Tensor:
        """Events (B, L, 2 buckets P P) of each kind in each token, float32; none where mask (B, L) is False."""
        cells = self.embedding.in_features
        if codes.ndim != 3 or codes.is_floating_point():
            raise ValueError(f"codes must be integers (B, L, events), got {codes.dtype} {tuple(codes.shape)}")
        codes = codes.long().masked_fill(~mask[..., None], 0)  # uint16, as tokenizers give, has no masked_fill
        if not torch.compiler.is_compiling() and ((codes < 0) | (codes >= cells)).any():
            raise ValueError(f"codes must be in 0..{cells - 1}, got {codes.min()}..{codes.max()}")
        out = torch.zeros(*codes.shape[:2], cells, device=codes.device)
        return out.scatter_add_(2, codes, mask[..., None].float().expand(codes.shape))

    def _encoded(
        self,
        codes: Tensor,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        lengths: Tensor | Sequence[int] | None,
        position_scale: float | Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Encoded tokens and the mask (B, L) of real ones."""
        for name, value in (("x", x), ("y", y), ("t", t)):
            if value.shape != codes.shape[:2]:
                raise ValueError(f"{name} must be {tuple(codes.shape[:2])} as codes are, got {tuple(value.shape)}")
            if value.dtype in (torch.float16, torch.bfloat16):
                raise TypeError(f"{name} must be float32, float64 or integers, got {value.dtype}")
        size = codes.shape[:2]
        mask = codes.new_ones(size, dtype=torch.bool) if lengths is None else real(lengths, codes, size[1])
        return self.encode_counts(self.counts(codes, mask), x, y, t, mask, position_scale), mask

    def encode_counts(
        self,
        counts: Tensor,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor,
        position_scale: float | Sequence[float] = 1.0,
    ) -> Tensor:
        """Encoded tokens of counts as of `counts`, at x, y and t (B, L) where mask (B, L) is True."""
        check_scale(position_scale, 3)
        tokens = self.embedding(counts.log1p().to(self.embedding.weight.dtype))
        x, y, t = (value.masked_fill(~mask, 0) for value in (x, y, t))  # padding may hold anything, NaN too
        r = event_positions(x, y, t, time_scale=self.time_scale, cls=self.cls_token)
        r = r * torch.as_tensor(position_scale, dtype=r.dtype, device=r.device)
        return self.encode(tokens, Positions.of(r, 3), mask)

    def forward_features(
        self,
        codes: Tensor,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        position_scale: float | Sequence[float] = 1.0,
    ) -> Tensor:
        """Encoded tokens (B, L [+ 1], D), class token first if there is one; those of padding mean nothing."""
        return self._encoded(codes, x, y, t, lengths, position_scale)[0]


class EventViT(EventBackbone, Classifier):
    """Keywords are those of `EventBackbone` and `Classifier`."""

    def __init__(self, *, num_classes: int = 11, patch: int = 16, **common: Any) -> None:
        super().__init__(num_classes=num_classes, patch=patch, **common)

    def forward(
        self,
        codes: Tensor,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        position_scale: float | Sequence[float] = 1.0,
    ) -> Tensor:
        """Logits (B, classes) of tokens with codes (B, L, events), at patch x, y and time t, (B, L) each.

        The first lengths (B,) tokens are real, or all; any may be 0. position_scale multiplies positions: one factor,
        or one each for x, y and t.
        """
        return self.classify(*self._encoded(codes, x, y, t, lengths, position_scale))
