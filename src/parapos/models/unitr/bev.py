"""The map from above: pillars on it, and a residual network that sees it at four scales.

B samples, P pillars, C channels, rows along y, columns along x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokens import EPS, MOMENTUM

STRIDE = 2  # of what the network gives, to what it is given
DEPTHS = (2, 3, 3, 3)  # residual blocks of each stage


def scatter(x: Tensor, cells: Tensor, sample: Tensor, samples: int, size: tuple[int, int]) -> Tensor:
    """Pillars x (P, C) in cells (P, 2) of samples (P,) -> (B, C, rows, columns), zero where there is none."""
    cols, rows = size
    flat = x.new_zeros(samples * rows * cols, x.shape[1])
    flat = flat.index_copy(0, (sample * rows + cells[:, 1]) * cols + cells[:, 0], x)
    return flat.view(samples, rows, cols, -1).permute(0, 3, 1, 2).contiguous()


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, EPS, MOMENTUM)


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 cells. is_first: the shortcut is a convolution, whether shapes change or not."""

    def __init__(self, dim: int, out: int, stride: int, is_first: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(dim, out, 3, stride, 1, bias=False), norm(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
        shortcut = [nn.Conv2d(dim, out, 1, stride, bias=False), norm(out)] if is_first else [nn.Identity()]
        self.downsample_layer = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample_layer(x))


class BevNetwork(nn.Module):
    """(B, dim, rows, columns) -> (B, 4 out, rows / 2, columns / 2); sides must be multiples of 8.

    dims: channels of the four stages, of strides 1, 2, 4, 8. out: channels that each of them gives.
    """

    def __init__(self, dim: int, dims: Sequence[int], out: int) -> None:
        super().__init__()
        if len(dims) != len(DEPTHS):
            raise ValueError(f"dims of the bird's-eye network must name {len(DEPTHS)} stages, got {list(dims)}")
        self.blocks, self.deblocks = nn.ModuleList(), nn.ModuleList()
        for stage, (width, depth) in enumerate(zip(dims, DEPTHS, strict=True)):
            before = dims[stage - 1] if stage else dim
            first = ResidualBlock(before, width, 2 if stage else 1, is_first=True)
            others = [ResidualBlock(width, width, 1, is_first=False) for _ in range(depth - 1)]
            self.blocks.append(nn.Sequential(first, *others))
            up = 2**stage // STRIDE  # from this stage to the output
            kind, step = (nn.ConvTranspose2d, up) if up else (nn.Conv2d, STRIDE)
            self.deblocks.append(nn.Sequential(kind(width, out, step, step, bias=False), norm(out), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block, lateral in zip(self.blocks, self.deblocks, strict=True):
            x = block(x)
            found.append(lateral(x))
        return torch.cat(found, dim=1)
