"""A pyramid of three maps from one: half, same and double stride.

B batch, D width of the encoder, F width of the pyramid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("lite", "vitdet")


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of (B, F, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def keep(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, F, h, w) with zeros where mask (B, h, w) is False: what a convolution sees beyond the border."""
    return x if mask is None else x.masked_fill(~mask[:, None], 0.0)


def pyramid_masks(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the three maps, of that (B, rows, cols) of the map in the middle. A cell counts if a part of it does."""
    fine = mask[:, :, None, :, None].expand(-1, -1, 2, -1, 2).flatten(3, 4).flatten(1, 2)  # each cell as 2 x 2
    return fine, mask, F.max_pool2d(mask[:, None].float(), 2)[:, 0] > 0


class Neck(nn.Module):
    """kind "lite": one projection and norm per map. "vitdet": the neck of ViTDet, with a 3 x 3 convolution more."""

    def __init__(self, dim: int, out: int = 256, kind: str = "lite") -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"neck must be one of {', '.join(KINDS)}, got {kind!r}")
        lite = kind == "lite"
        half = out if lite else dim // 2
        self.resize = nn.ModuleList([nn.ConvTranspose2d(dim, half, 2, 2), nn.Identity(), nn.MaxPool2d(2)])
        if lite:
            first = nn.Sequential(OrderedDict(norm=ChannelNorm(out)))
            stages = [[first], [_stage(dim, out, bias=True)], [_stage(dim, out, bias=True)]]
        else:
            stages = [[_stage(channels, out), _stage(out, out, 3)] for channels in (half, dim, dim)]
        self.project = nn.ModuleList(nn.ModuleList(level) for level in stages)

    def forward(self, x: Tensor, masks: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Maps (B, F, 2h, 2w), (B, F, h, w), (B, F, h // 2, w // 2) of x (B, D, h, w).

        masks of the three maps: all else has no influence and is zero in the answer."""
        maps = []
        for level, (resize, stages) in enumerate(zip(self.resize, self.project, strict=True)):
            mask = None if masks is None else masks[level]
            inner = x if masks is None else _hide(x, masks[1], -torch.inf if level == 2 else 0.0)
            y = keep(resize(inner), mask)
            assert isinstance(stages, nn.ModuleList)
            for stage in stages:
                y = keep(stage(y), mask)
            maps.append(y)
        return maps


def _hide(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x.masked_fill(~mask[:, None], value)


def _stage(channels: int, out: int, kernel: int = 1, bias: bool = False) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=bias)
    return nn.Sequential(OrderedDict(conv=conv, norm=ChannelNorm(out)))
