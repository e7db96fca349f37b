"""Rotary encodings: queries and keys are turned by angles that grow with position, so q.k sees differences.

B batch, N tokens, H heads, h head size, p position dims. Pairs are half-split: component i turns with i + h/2.
A token without a position is not turned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.terms import Term
from ..positions import Positions
from ..tracing import cast, no_autocast
from .base import Encoding
from .claims import Claims


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (B, H, N, 2s) by angles (B or 1, H or 1, N, s), in float32 at least, and give it back in its dtype."""
    first, second = cast(x, cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class RoPE(Encoding):
    """Axial RoPE: each position dimension owns an equal share of the frequencies base^(-2pk/h+).

    h+ is h rounded up to a multiple of 2p; the padded width is kept, which leaves scores exactly relative.
    """

    claims = Claims(translation=True, rotation=False, decay=False, direction=True, context=False)
    quirks = "when 2p does not divide the head size, the padded components are cut off after turning"

    def __init__(self, *, base: float = 10000.0, **common: Any) -> None:
        super().__init__(**common)
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        self.base = base
        self.padded = -(-self.head_dim // (2 * self.pos_dim)) * 2 * self.pos_dim

    def _turns(self, r: Positions) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, (B or 1, 1, N, h+/2) in float64, made once."""

        def make() -> tuple[Tensor, Tensor]:
            # float64, because at position 10^4 float32 angles are off by a thousandth of a turn.
            exponents = torch.arange(self.padded // (2 * self.pos_dim), dtype=torch.float64, device=r.r.device)
            divisors = self.base ** (exponents * (2 * self.pos_dim / self.padded))  # (F,)
            angles = r.r.nan_to_num(nan=0.0).double()[..., None] / divisors  # (B or 1, N, p, F)
            angles = angles.flatten(-2)[:, None]  # (B or 1, 1, N, h+/2)
            return angles.cos(), angles.sin()

        return r.once(("rope", self.padded, self.base), make)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        dtype, pad = torch.promote_types(q.dtype, torch.float32), self.padded - self.head_dim
        turned = []
        for t, positions in ((q, r), (k, r if keys is None else keys)):
            cos, sin = (x.to(dtype) for x in self._turns(positions))
            turned.append(rotate(F.pad(t, (0, pad)) if pad else t, cos, sin))
        q, k = turned
        if pad and self.compat == "official":
            q, k = q[..., :-pad], k[..., :-pad]
        return q, k, ()


class RoPEMixed(Encoding):
    """RoPE with learned frequencies that mix the position dimensions, per head.

    param: what is learned, "divisor" (as released) or "frequency". init: "shared_divisor" (as released: all heads and
    dimensions start equal, base 100) or "rotated" (base 10, each magnitude along the axes of a random rotation).
    """

    claims = Claims(translation=True, rotation=False, decay=False, direction=True, context=False)

    def __init__(
        self,
        *,
        param: str = "divisor",
        init: str = "shared_divisor",
        base: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rope_mixed, got {self.head_dim}")
        if param not in ("divisor", "frequency"):
            raise ValueError(f"param must be 'divisor' or 'frequency', got {param!r}")
        if init not in ("shared_divisor", "rotated"):
            raise ValueError(f"init must be 'shared_divisor' or 'rotated', got {init!r}")
        if base is not None and not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        if init == "rotated" and param == "divisor":
            raise ValueError("init='rotated' has zero frequencies, which no divisor expresses; use param='frequency'")
        self.param = param
        half, p = self.head_dim // 2, self.pos_dim
        k = torch.arange(half)
        if init == "shared_divisor":
            divisors = (100.0 if base is None else base) ** (2 * k / self.head_dim)
            start = divisors.expand(self.heads, p, half)
            start = start if param == "divisor" else 1 / start
        else:
            magnitudes = (10.0 if base is None else base) ** (-2 * p * (k // p) / self.head_dim)
            axes, _ = torch.linalg.qr(torch.randn(self.heads, p, p))  # orthonormal columns
            start = axes[..., k % p] * magnitudes
        self.frequencies = nn.Parameter(start.clone())  # (H, p, h/2)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device):
            learned = self.frequencies.to(dtype)
            frequencies = 1 / learned if self.param == "divisor" else learned
            turned = []
            for t, positions in ((q, r), (k, r if keys is None else keys)):
                angles = positions.r.nan_to_num(nan=0.0).to(dtype)[:, None] @ frequencies  # (B or 1, H, N, h/2)
                turned.append(rotate(t, angles.cos(), angles.sin()))
            return turned[0], turned[1], ()
