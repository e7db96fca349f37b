"""The contract of a position encoding: what it is told, what it may answer, what it promises.

B batch, N tokens, D model width, H heads, h query/key head size, p position dims.
An encoding is told the tokens x (B, N, D) that feed the query/key projection, the projected q, k (B, H, N, h) and
positions r. It may answer with an addition to the tokens (`add`), changed queries and keys, and score terms.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..attention.terms import Term
from ..positions import ClassToken, Positions
from .claims import Claims


class Encoding(nn.Module):
    """Base class. Subclasses override `add`, `prepare` and `encode` as needed; the defaults do nothing.

    layer and depth place the encoding in a stack. compat="official" reproduces the quirks of the authors' release,
    which each subclass lists under `quirks`.
    """

    claims: ClassVar[Claims]
    quirks: ClassVar[str] = "none"
    cls_token: ClassVar[ClassToken] = True  # where this encoding wants a class token: at the origin or "unplaced"

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        head_dim: int,
        pos_dim: int,
        layer: int = 0,
        depth: int = 1,
        compat: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("head_dim", head_dim), ("pos_dim", pos_dim)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not 0 <= layer < depth:
            raise ValueError(f"layer must be in 0..{depth - 1}, got {layer}")
        if compat not in (None, "official"):
            raise ValueError(f"compat must be None or 'official', got {compat!r}")
        self.dim, self.heads, self.head_dim, self.pos_dim = dim, heads, head_dim, pos_dim
        self.layer, self.depth, self.compat = layer, depth, compat

    @property
    def scale(self) -> float:
        """The factor of q.k. Give it to `attend`: an encoding may widen q and k, which must not change it."""
        return self.head_dim**-0.5

    def add(self, x: Tensor, r: Tensor | Positions) -> Tensor:
        """Tokens (B, N, D) with an additive encoding; most encodings return x."""
        return x

    def fold(self) -> None:
        """Replace parameters by smaller ones that serve inference as well, if there are such."""

    def prepare(self, r: Tensor | Positions) -> Positions:
        """Checked positions with all that depends on them alone: once per forward, shared by layers."""
        return Positions.of(r, self.pos_dim)

    def encode(self, x: Tensor, q: Tensor, k: Tensor, r: Positions) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        return q, k, ()

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, r: Tensor | Positions
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        """Queries and keys, possibly changed, and score terms for `parapos.attend`."""
        if q.ndim != 4 or q.shape != k.shape or q.shape[1] != self.heads or q.shape[3] != self.head_dim:
            raise ValueError(
                f"q and k must be (B, {self.heads}, N, {self.head_dim}), got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        if x.shape != (q.shape[0], q.shape[2], self.dim):
            raise ValueError(f"x must be ({q.shape[0]}, {q.shape[2]}, {self.dim}), got {tuple(x.shape)}")
        positions = self.prepare(r)
        if positions.r.shape[0] not in (1, q.shape[0]) or positions.r.shape[1] != q.shape[2]:
            want = f"({q.shape[0]} or 1, {q.shape[2]}, {self.pos_dim})"
            raise ValueError(f"positions must be {want} for these tokens, got {tuple(positions.r.shape)}")
        return self.encode(x, q, k, positions)

    def extra_repr(self) -> str:
        text = f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, pos_dim={self.pos_dim}"
        return text + (f", compat={self.compat!r}" if self.compat else "")
