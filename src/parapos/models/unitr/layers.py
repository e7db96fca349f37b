"""Attention in sets, and the layers and blocks around it. Pillars and patches share attention, not norms and MLPs.

T tokens of all samples, pillars first, D width, H heads, h head size, S sets, K slots of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...attention import attend
from ...attention.terms import Relative, Term
from ...blocks import MLP, Attention
from ...positions import Positions
from ..ptv3.rows import copy_rows, pick
from .partition import Partition

Shares = tuple[int, int]  # pillars and patches among the tokens


class SetAttention(Attention):
    """Attention within the sets of a partition, for tokens (T, D).

    Whatever depends on one token is computed once per token and copied to its slots: queries, keys, values, and the
    coefficients of relative score terms. Other terms are formed within sets.
    """

    def forward(self, x: Tensor, partition: Partition, added: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """added (T, D): what queries and keys see besides x."""
        if not len(x):
            return self.proj(x)
        tokens = x[None]
        seen = self.encoding.add(tokens, partition.positions)
        seen = x if seen is tokens else seen[0]
        seen = seen if added is None else seen + added
        q, k, v = self._project(x, seen)
        mask = None if bool(partition.mask.all()) else partition.mask
        if self._is_relative(x, q, k):
            q, k, terms = self.encoding(tokens, q, k, partition.positions)
            q, k, v = (self._to_sets(t, partition) for t in (q, k, v))
            terms = tuple(self._term_in_sets(term, partition) for term in terms)
        else:
            q, k, v = (self._to_sets(t, partition) for t in (q, k, v))
            in_sets = self._to_sets(tokens[None], partition)[:, 0]
            q, k, terms = self.encoding(in_sets, q, k, partition.in_sets)
        out = attend(
            q, k, v, terms, mask, self.encoding.scale, kernel=self.kernel, strict=self.strict, exact=self.exact
        )
        assert isinstance(out, Tensor)
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)  # (S K, D)
        return self.proj(pick(out, partition.slot))

    def _project(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of `seen`, values of x: (1, H, T, h)."""
        if seen is x:
            return self.project(x[None])
        size = 2 * self.heads * self.qk_dim
        weight, bias = self.qkv.weight, self.qkv.bias
        qk = F.linear(seen, weight[:size], bias[:size])
        q, k, v = (*qk.chunk(2, dim=-1), F.linear(x, weight[size:], bias[size:]))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for t in (q, k, v))
        return q, k, v

    @torch.no_grad()
    def _is_relative(self, x: Tensor, q: Tensor, k: Tensor) -> bool:
        """Whether the encoding's terms have no number for each pair of tokens, which all tokens are too many for."""
        two = slice(0, 2)
        r = Positions(x.new_zeros(1, len(x[two]), self.encoding.pos_dim, dtype=torch.float32), unplaced=False)
        terms = self.encoding.encode(x[None, two], q[:, :, two], k[:, :, two], r, None)[2]
        return all(isinstance(term, Relative) for term in terms)

    @staticmethod
    def _to_sets(x: Tensor, partition: Partition) -> Tensor:
        """(1, H, T, ...) -> (S, H, K, ...). Padding gives no gradient."""
        rows = x[0].transpose(0, 1)  # (T, H, ...)
        none = partition.slot.new_zeros(0)
        copied = copy_rows(rows.flatten(1), partition.tokens.flatten(), partition.slot, none)
        return copied.view(*partition.tokens.shape, *rows.shape[1:]).transpose(1, 2)

    def _term_in_sets(self, term: Term, partition: Partition) -> Term:
        """A term of all tokens as one of sets. Coefficients have the tokens in their third dimension."""
        assert isinstance(term, Relative)
        learned = {name: x for name in term.learned if (x := getattr(term, name)) is not None and x.ndim > 2}
        changes: dict[str, Any] = {name: self._to_sets(x, partition) for name, x in learned.items()}
        return replace(term, r=partition.in_sets, **changes)  # type: ignore[type-var]


class Branch(nn.Module):
    """What pillars and patches have of their own in a layer: norm, MLP, norm."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), MLP(dim, mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        return self.norm2(x + self.mlp(x))


class SetLayer(nn.Module):
    """Post-norm layer: attention, then each token's own branch, and one more residual around both."""

    def __init__(self, dim: int, mlp_dim: int, **attention: Any) -> None:
        super().__init__()
        self.attention = SetAttention(dim, pos_dim=2, **attention)
        self.lidar, self.image = Branch(dim, mlp_dim), Branch(dim, mlp_dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, shares: Shares, partition: Partition, added: Tensor | None = None) -> Tensor:
        pillars, patches = (x + self.attention(x, partition, added)).split(shares)
        return self.norm(x + torch.cat([self.lidar(pillars), self.image(patches)]))


class SetBlock(nn.Module):
    """Layers, each with its own partition, and a residual with a norm of its own for pillars and patches."""

    def __init__(self, dim: int, mlp_dim: int, first: int, layers: int = 2, **attention: Any) -> None:
        """first: how many layers of the network come before."""
        super().__init__()
        self.layers = nn.ModuleList(SetLayer(dim, mlp_dim, layer=first + i, **attention) for i in range(layers))
        self.lidar_norm, self.image_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(
        self,
        x: Tensor,
        shares: Shares,
        partitions: Sequence[Partition],
        added: Sequence[Tensor | None],
        recompute: bool = False,
    ) -> Tensor:
        """recompute: activations of a layer are computed again in the backward pass, to save memory."""
        y = x
        for layer, partition, more in zip(self.layers, partitions, added, strict=True):
            if recompute and torch.is_grad_enabled():
                y = checkpoint(layer, y, shares, partition, more, use_reentrant=False)
            else:
                y = layer(y, shares, partition, more)
        pillars, patches = (y + x).split(shares)
        return torch.cat([self.lidar_norm(pillars), self.image_norm(patches)])
