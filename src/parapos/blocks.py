"""Transformer blocks: attention with a position encoding, MLP, and the pre-norm stack they form.

B batch, N tokens, D model width, H heads, h query/key head size, w value head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import attend
from .attention.kernels import find_kernel
from .encodings import Encoding, create_encoding
from .positions import Positions


class Attention(nn.Module):
    """Multi-head attention. `encoding` is a name, with its options as keywords, or an Encoding.

    pos_dim is 2 by default. head_dim is the size of a value head (default dim / heads), qk_dim that of query and key
    heads (default head_dim). An additive encoding (sincos) acts once per model, in `Encoder`, or by `encoding.add`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        encoding: str | Encoding = "pape",
        pos_dim: int | None = None,
        *,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        kernel: str = "auto",
        strict: bool = False,
        exact: bool = False,
        tolerance: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}; give head_dim")
        if kernel != "auto":
            find_kernel(kernel)
        self.heads, self.head_dim = heads, dim // heads if head_dim is None else head_dim
        self.qk_dim = self.head_dim if qk_dim is None else qk_dim
        self.kernel, self.strict, self.exact, self.tolerance = kernel, strict, exact, tolerance
        pos_dim = pos_dim if pos_dim is not None else 2 if isinstance(encoding, str) else encoding.pos_dim
        want = {"dim": dim, "heads": heads, "head_dim": self.qk_dim, "pos_dim": pos_dim}
        if isinstance(encoding, str):
            encoding = create_encoding(encoding, **want, **options)
        elif options:
            raise TypeError(f"options {', '.join(options)} are for an encoding given by name")
        elif any(getattr(encoding, name) != value for name, value in want.items()):
            told = ", ".join(f"{name}={value}" for name, value in want.items())
            raise ValueError(f"encoding must have {told}, got {encoding}")
        if self.head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {self.head_dim}")
        self.qkv = nn.Linear(dim, heads * (2 * self.qk_dim + self.head_dim))
        self.proj = nn.Linear(heads * self.head_dim, dim)
        self.encoding = encoding

    def forward(
        self,
        x: Tensor,
        r: Tensor | Positions,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        keys: Tensor | Positions | None = None,
    ) -> Tensor:
        """x (B, n, D) at positions r (n, p) or (B, n, p) -> (B, n, D).

        mask: padding (B, N), True for real tokens, or (B or 1, H or 1, n, N), True where a token may look.
        context (B, N, D) at positions keys: the tokens to look at, for cross-attention; by default x itself.
        """
        if (context is None) != (keys is None):
            raise ValueError("cross-attention needs both context, the tokens to look at, and keys, their positions")
        q, k, v = self.project(x, context)
        q, k, terms = self.encoding(x, q, k, r, keys)
        padded = context is None and mask is not None and mask.dtype == torch.bool and mask.shape == x.shape[:2]
        if mask is not None and padded and not any(term.ignores_mask for term in terms):
            q = q.masked_fill(~mask[:, None, :, None], 0.0)  # what padding asks may be anything, NaN too
        scale = self.encoding.scale
        how = {"kernel": self.kernel, "strict": self.strict, "exact": self.exact, "tolerance": self.tolerance}
        out = attend(q, k, v, terms, mask, scale, **how)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        return self.proj(out.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of context or x: (B, H, tokens, h or w)."""
        sizes = [self.heads * self.qk_dim] * 2 + [self.heads * self.head_dim]
        if context is None:
            parts = self.qkv(x).split(sizes, dim=-1)
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x, weight[: sizes[0]], bias[: sizes[0]])
            parts = (q, *F.linear(context, weight[sizes[0] :], bias[sizes[0] :]).split(sizes[1:], dim=-1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        return q, k, v


class DropPath(nn.Module):
    """Drops a residual branch per sample with probability `rate` in training, and scales what stays."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop path rate must be in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * keep.to(x.dtype) / (1 - self.rate)


class MLP(nn.Sequential):
    """Linear, exact GELU, Linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)


class Block(nn.Module):
    """x + drop(attention(norm x)), then x + drop(mlp(norm x))."""

    def __init__(self, dim: int, mlp_dim: int, drop_path: float = 0.0, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, **attention)
        self.mlp = MLP(dim, mlp_dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, r: Tensor | Positions, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x), r, mask))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    """Additive encoding, norm, `depth` blocks, norm. Positions are prepared once and shared by all layers.

    grad_checkpointing: in training, blocks run again in the backward pass instead of keeping what they computed.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        mlp_dim: int,
        drop_path: float = 0.0,
        *,
        grad_checkpointing: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.grad_checkpointing = grad_checkpointing
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        if not isinstance(attention.get("encoding", ""), str):
            raise TypeError("an Encoder makes one encoding per layer, so encoding must be a name")
        self.norm_pre, self.norm_post = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            Block(dim, mlp_dim, drop_path, layer=layer, depth=depth, **attention) for layer in range(depth)
        )

    @property
    def encoding(self) -> Encoding:
        """The first layer's encoding, which also speaks for the stack."""
        first = self.layers[0]
        assert isinstance(first, Block)
        return first.attention.encoding

    def forward(self, x: Tensor, r: Tensor | Positions, mask: Tensor | None = None) -> Tensor:
        """x (B, N, D), r (N, p) or (B, N, p), mask (B, N) with True for real tokens -> (B, N, D)."""
        positions = self.encoding.prepare(r)
        x = self.norm_pre(self.encoding.add(x, positions))
        for layer in self.layers:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, positions, mask, use_reentrant=False)
            else:
                x = layer(x, positions, mask)
        return self.norm_post(x)
