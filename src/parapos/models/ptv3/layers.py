"""The parts of Point Transformer V3: stem, block, pooling, unpooling, and the stages that they form.

N points of all clouds of a batch, C channels. Features are one tensor (N, C) that every part is given and returns;
geometry comes beside it as a `Stage`. Names of parameters are those of Pointcept, so that weights can be exchanged;
those of blocks hold "block", which selects their learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks import MLP, Attention, DropPath
from .convolution import SparseConv3d
from .geometry import Stage
from .norm import BatchNorm
from .rows import copy_rows, group_max, pick, spread
from .spconv import BACKENDS

EPS, MOMENTUM = 1e-3, 0.01  # of all norms over points
AT_ONCE = 4096  # points whose hidden features fit in the cache, in evaluation


class Stem(nn.Module):
    """Convolution of 5 x 5 x 5 cells, norm, GELU."""

    def __init__(self, channels: int, dim: int, conv_backend: str) -> None:
        super().__init__()
        self.conv: SparseConv3d = BACKENDS[conv_backend](channels, dim, 5, bias=False)
        self.norm = BatchNorm(dim, EPS, MOMENTUM)

    def forward(self, x: Tensor, stage: Stage) -> Tensor:
        return nn.functional.gelu(self.norm(self.conv(x, stage.kernel_map(5))))


class Block(nn.Module):
    """x + cpe(x) if there is one, then x + drop(attention(norm x)), then x + drop(mlp(norm x)).

    Attention acts within patches of `patch` points along the curve of row `row`. cpe is the conditional encoding of the
    original: convolution of 3 x 3 x 3 cells, linear layer, norm. Drop path drops points, not clouds.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        patch: int,
        row: int,
        has_cpe: bool,
        conv_backend: str,
        mlp_ratio: float,
        drop_path: float,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.patch, self.row = patch, row
        conv = BACKENDS[conv_backend]
        self.cpe = nn.ModuleList([conv(dim, dim, 3), nn.Linear(dim, dim), nn.LayerNorm(dim)] if has_cpe else [])
        self.norm1, self.norm2 = nn.Sequential(nn.LayerNorm(dim)), nn.Sequential(nn.LayerNorm(dim))
        self.attn = Attention(dim, heads, pos_dim=3, **attention)
        self.mlp = nn.Sequential(MLP(dim, int(dim * mlp_ratio)))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, stage: Stage, convolved: Tensor | None = None) -> Tensor:
        """convolved: what the convolution sees instead of x."""
        if self.cpe:
            conv, linear, norm = self.cpe
            x = x + norm(linear(conv(x if convolved is None else convolved, stage.kernel_map(3))))
        x = x + self.drop_path(self._attend(self.norm1(x), stage))
        if self.training or torch.is_grad_enabled() or len(x) <= AT_ONCE:
            return x + self.drop_path(self.mlp(self.norm2(x)))
        # Fresh memory for the hidden features of many points would take longer than their arithmetic.
        return torch.cat([part + self.mlp(self.norm2(part)) for part in x.split(AT_ONCE)])

    def _attend(self, x: Tensor, stage: Stage) -> Tensor:
        """Attention within patches: windows are samples, and each point is read where it belongs."""
        windows = stage.windows(self.row % len(stage.codes), self.patch)
        slots = copy_rows(x, windows.source, windows.slot, windows.borrowed)  # (S, C)
        parts = slots.split([w * k for (w, k), _, _ in windows.tables])
        found = [
            self.attn(part.unflatten(0, shape), positions, mask).flatten(0, 1)  # (W K, C)
            for part, (shape, positions, mask) in zip(parts, windows.tables, strict=True)
        ]
        return pick(torch.cat(found) if len(found) > 1 else found[0], windows.slot)


class Pooling(nn.Module):
    """Linear layer, the largest value of each group, norm, GELU."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, out)
        self.norm = nn.Sequential(BatchNorm(out, EPS, MOMENTUM))

    def forward(self, x: Tensor, stage: Stage) -> Tensor:
        """x of the finer stage -> features of this one."""
        assert stage.groups is not None
        x = self.proj(x)
        x = group_max(x.to(torch.promote_types(x.dtype, torch.float32)), stage.groups)
        return nn.functional.gelu(self.norm(x))


class Unpooling(nn.Module):
    """Linear layer, norm and GELU on both sides; each finer point gets what its group has, and its own."""

    def __init__(self, dim: int, skip: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(dim, out), BatchNorm(out, EPS, MOMENTUM), nn.GELU())
        self.proj_skip = nn.Sequential(nn.Linear(skip, out), BatchNorm(out, EPS, MOMENTUM), nn.GELU())

    def forward(self, x: Tensor, skip: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        """x of a stage and skip of the finer one -> features of the finer one, and the part of them that skip made."""
        assert stage.groups is not None
        skip = self.proj_skip(skip)
        return skip + spread(self.proj(x), stage.groups), skip


class Blocks(nn.Module):
    """The blocks of a stage, block0, block1, ...; block i works along row i of the stage's curves."""

    def __init__(self, dim: int, heads: int, rates: Sequence[float], first: int, **options: Any) -> None:
        """rates: drop path of each block. first: how many blocks of the network come before."""
        super().__init__()
        for i, rate in enumerate(rates):
            self.add_module(f"block{i}", Block(dim, heads, row=i, drop_path=rate, layer=first + i, **options))
        self.count = len(rates)

    @property
    def blocks(self) -> list[Block]:
        found = [self.get_submodule(f"block{i}") for i in range(self.count)]
        return [block for block in found if isinstance(block, Block)]

    def run(self, x: Tensor, stage: Stage, convolved: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x, convolved = block(x, stage, convolved), None
        return x


class EncoderStage(Blocks):
    """Pooling, unless it is the first stage, and blocks."""

    def __init__(self, before: int | None, dim: int, *args: Any, **options: Any) -> None:
        super().__init__(dim, *args, **options)
        self.down = None if before is None else Pooling(before, dim)


class DecoderStage(Blocks):
    """Unpooling and blocks. skip_only: the convolution of the first block sees the skip branch alone, as in the
    original."""

    def __init__(self, before: int, skip: int, dim: int, *args: Any, skip_only: bool, **options: Any) -> None:
        super().__init__(dim, *args, **options)
        self.up, self.skip_only = Unpooling(before, skip, dim), skip_only

    def forward(self, x: Tensor, skip: Tensor, coarse: Stage, fine: Stage) -> Tensor:
        """x at the coarse stage, skip at the fine one -> features at the fine one."""
        x, skip = self.up(x, skip, coarse)
        return self.run(x, fine, skip if self.skip_only else None)
