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
        """Checked positions. What is made from them alone is kept in them and shared by all layers."""
        return Positions.of(r, self.pos_dim)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        """As `forward`, for checked input. keys: positions of the keys where they are other tokens than the queries."""
        return q, k, ()

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, r: Tensor | Positions, keys: Tensor | Positions | None = None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        """Queries and keys, possibly changed, and score terms for `parapos.attend`.

        x (B, n, D) are the tokens of the queries, r their positions. For cross-attention, `keys` are those of the keys.
        """
        size = (self.heads, self.head_dim)
        shapes = [(t.shape[1], t.shape[3]) if t.ndim == 4 else None for t in (q, k)]
        if shapes != [size, size] or q.shape[0] != k.shape[0] or (keys is None and q.shape[2] != k.shape[2]):
            want = f"(B, {self.heads}, N, {self.head_dim})" + ("" if keys is not None else " of the same tokens")
            raise ValueError(
                f"q and k must be {want}, got {tuple(q.shape)} and {tuple(k.shape)}; "
                "for cross-attention, pass the positions of the keys as keys="
            )
        if x.shape != (q.shape[0], q.shape[2], self.dim):
            raise ValueError(f"x must be ({q.shape[0]}, {q.shape[2]}, {self.dim}), got {tuple(x.shape)}")
        positions = self.prepare(r)
        others = None if keys is None else self.prepare(keys)
        for name, found, t in (("positions", positions, q), ("keys", others, k)):
            if found is not None and (found.r.shape[0] not in (1, q.shape[0]) or found.r.shape[1] != t.shape[2]):
                want = f"({q.shape[0]} or 1, {t.shape[2]}, {self.pos_dim})"
                raise ValueError(f"{name} must be {want} for these tokens, got {tuple(found.r.shape)}")
        return self.encode(x, q, k, positions, others)

    def extra_repr(self) -> str:
        text = f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, pos_dim={self.pos_dim}"
        return text + (f", compat={self.compat!r}" if self.compat else "")
