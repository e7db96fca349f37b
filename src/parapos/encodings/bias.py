"""Fixed score biases: nD-ALiBi, which fades with distance, and LookHere, which also gives heads a field of view.

B batch, N tokens, H heads, p position dims. Nothing here is learned. Biases are added after scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention.terms import Distance, Table, Term
from ..positions import Positions, placed
from .base import Encoding
from .claims import Claims


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8t/n) for n a power of two; else those of the power below, then every other one of twice that."""
    n = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * t / n) for t in range(1, n + 1)]
    return slopes + [2 ** (-8 * t / (2 * n)) for t in range(1, 2 * n, 2)][: heads - n]


class ALiBi(Encoding):
    """nD-ALiBi: score_ij = q.k / sqrt(h) - slope_head |r_j - r_i|."""

    claims = Claims(translation=True, rotation=True, decay=True, direction=False, context=False)
    quirks = "the padding mask is ignored"

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.slopes = alibi_slopes(self.heads)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        slopes = torch.tensor(self.slopes, dtype=r.r.dtype, device=q.device)
        return q, k, (Distance(slopes, r, self.compat == "official", keys),)


EDGE = 1 - 1e-4  # cones include their edge, also where rounding moved an interpolated grid

# What a head may see, from dx = x_j - x_i and dy = y_j - y_i; y grows downwards. Bounds are inclusive.
FIELDS = {
    "up-left": lambda dx, dy: (dy <= 0) & (dx <= 0),
    "up-right": lambda dx, dy: (dy <= 0) & (dx >= 0),
    "down-left": lambda dx, dy: (dy >= 0) & (dx <= 0),
    "down-right": lambda dx, dy: (dy >= 0) & (dx >= 0),
    "up": lambda dx, dy: -dy >= dx.abs() * EDGE,
    "down": lambda dx, dy: dy >= dx.abs() * EDGE,
    "left": lambda dx, dy: -dx >= dy.abs() * EDGE,
    "right": lambda dx, dy: dx >= dy.abs() * EDGE,
    "all": lambda dx, dy: torch.ones_like(dx, dtype=torch.bool),
}
_CORNERS = ("up-left", "up-right", "down-left", "down-right")
_SIDES = ("up", "down", "left", "right")
_OPEN = [("all", 4.0**-n) for n in (1, 2, 3, 4)]
LAYOUTS: dict[int, list[tuple[str, float]]] = {
    12: [(d, 0.5) for d in _CORNERS + _SIDES] + _OPEN,
    16: [(d, 0.5) for d in _CORNERS] + [(d, 0.25) for d in _CORNERS] + [(d, 0.5) for d in _SIDES] + _OPEN,
}


def _free(r: Tensor) -> Tensor:
    """(B or 1, N) boolean: tokens that see all and are seen by all, which are those without a place on the grid."""
    here, zero = placed(r), (r == 0).all(-1)
    grid = (r > 0).all(-1) | zero | ~here  # zeros may be padding
    cls = zero[:, :1] & grid.all(-1, keepdim=True)
    return ~here | torch.cat([cls, torch.zeros_like(here[:, 1:])], dim=1)[:, : r.shape[1]]


class LookHere(Encoding):
    """LookHere-90 for two-dimensional grids: distance decay, and per head a quadrant, a cone or everything in view.

    directions: one (field, slope) per head, needed unless there are 12 or 16 heads. schedule: "constant" (multiplier
    1.5 in all layers, as in the paper's runs) or "linear" (1.5 down to 0.5, as LookHere was published).
    The class token sees all and is seen by all: a token without a position, or the first one if it is at (0, 0) and all
    others have positive coordinates, no position, or are (0, 0) too, as padding is.
    """

    claims = Claims(translation=True, rotation=False, decay=True, direction=True, context=False, unbounded=False)
    quirks = "none: schedule='constant' already follows it"
    cls_token = "unplaced"

    def __init__(
        self,
        *,
        directions: Sequence[tuple[str, float]] | None = None,
        schedule: str = "constant",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if self.pos_dim != 2:
            raise ValueError(f"lookhere needs pos_dim 2, a grid of (x, y), got {self.pos_dim}")
        if schedule not in ("constant", "linear"):
            raise ValueError(f"schedule must be 'constant' or 'linear', got {schedule!r}")
        if directions is None:
            if self.heads not in LAYOUTS:
                raise ValueError(
                    f"lookhere is defined for {' or '.join(map(str, LAYOUTS))} heads, got {self.heads}; "
                    "pass directions=[(field, slope), ...], one per head"
                )
            directions = LAYOUTS[self.heads]
        if len(directions) != self.heads:
            raise ValueError(f"directions must name {self.heads} heads, got {len(directions)}")
        for field, _ in directions:
            if field not in FIELDS:
                raise ValueError(f"unknown field of view {field!r}, expected one of {', '.join(FIELDS)}")
        self.directions = [(field, float(slope)) for field, slope in directions]
        along = self.layer / (self.depth - 1) if self.depth > 1 else 0.0
        self.multiplier = 2.0 * (1.5 if schedule == "constant" else 1.5 - along)

    def bias(self, r: Positions, keys: Positions | None = None) -> Tensor:
        """The bias for multiplier 1, (B or 1, H, n, N), made once for all layers."""
        to = r if keys is None else keys
        return r.once(("lookhere", tuple(self.directions), keys), lambda: self._bias(r.r, to.r))

    def _bias(self, r: Tensor, keys: Tensor) -> Tensor:
        d = (keys[:, None, :, :] - r[:, :, None, :]).nan_to_num(nan=0.0)
        dx, dy = d.unbind(-1)
        distance = torch.linalg.vector_norm(d, dim=-1)
        bias = torch.stack(
            [torch.where(FIELDS[f](dx, dy), -slope * distance, -torch.inf) for f, slope in self.directions], 1
        )
        return bias.masked_fill_(_free(r)[:, None, :, None] | _free(keys)[:, None, None, :], 0.0)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        return q, k, (Table(self.bias(r, keys), weight=self.multiplier),)
