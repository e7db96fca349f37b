"""Encodings that leave attention alone: nD-sincos, added to the tokens, and none at all.

B batch, N tokens, D model width, p position dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..positions import Positions
from .base import Encoding
from .claims import Claims


class NoEncoding(Encoding):
    """No position at all: attention sees a bag of tokens."""

    claims = Claims(translation=True, rotation=True, decay=False, direction=False, context=False)


class SinCos(Encoding):
    """nD-sincos: p blocks of D / p channels, the last also takes the remainder; in each all sines, then all cosines.

    Absolute, added once to the tokens before the first layer. A token without a position gets nothing.
    """

    claims = Claims(translation=False, rotation=False, decay=False, direction=True, context=False)

    def __init__(self, *, base: float = 10000.0, **common: Any) -> None:
        super().__init__(**common)
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        if self.dim < 2 * self.pos_dim:
            raise ValueError(f"dim must be at least {2 * self.pos_dim} for pos_dim {self.pos_dim}, got {self.dim}")
        self.base = base

    def table(self, r: Tensor) -> Tensor:
        """(B or 1, N, D) in the precision of r."""
        size = self.dim // self.pos_dim
        blocks = []
        for u in range(self.pos_dim):
            n = size + (self.dim % self.pos_dim if u == self.pos_dim - 1 else 0)
            index = torch.arange(n, dtype=torch.float64, device=r.device)
            divisors = self.base ** (2 * (index // 2) / n)
            angles = r[..., u : u + 1].double() / divisors  # (B or 1, N, n)
            blocks += [angles[..., 0::2].sin(), angles[..., 1::2].cos()]
        return torch.cat(blocks, dim=-1).nan_to_num(nan=0.0)

    def add(self, x: Tensor, r: Tensor | Positions) -> Tensor:
        table = self.table(self.prepare(r).r)
        if table.shape[0] not in (1, x.shape[0]) or table.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"x must be (B, N, {self.dim}) with a position each, got {tuple(x.shape)}, {tuple(table.shape)}"
            )
        return x + table.to(x.dtype)
