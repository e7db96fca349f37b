"""Tokens: patches of images, and pillars of points.

N points of all samples, P pillars, I images, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ptv3.norm import BatchNorm
from ..ptv3.rows import Groups, group_max, mean, spread
from .grid import BevGrid

EPS, MOMENTUM = 1e-3, 0.01  # of norms over points and over the bird's-eye map


def zero_of(module: nn.Module) -> Tensor:
    """A zero that gives all weights of a module a gradient of zero: where it has nothing to do, other processes of a
    training still wait for its gradients."""
    return torch.stack([p.flatten()[:0].sum() for p in module.parameters()]).sum()


class PatchEmbed(nn.Module):
    """Patches of an image, row by row: convolution and norm. Sides that the patch does not divide are padded with zeros
    to the right and below."""

    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Conv2d(3, dim, patch, patch)
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        """images (I, 3, H, W) -> (I, patches, D)."""
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch, 0, -height % self.patch))
        return self.norm(self.projection(images).flatten(2).transpose(1, 2))


class Pillars(NamedTuple):
    """Pillars that hold points, by sample, ix and iy."""

    x: Tensor  # (P, D)
    cells: Tensor  # (P, 2) ix, iy
    sample: Tensor  # (P,)


class PointLayer(nn.Module):
    """Linear layer, norm, ReLU, and the largest value of each pillar."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out, bias=False)
        self.norm = BatchNorm(out, EPS, MOMENTUM)

    def forward(self, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """x (N, C) -> features of points (N, out) and of pillars (P, out)."""
        x = F.relu(self.norm(self.linear(x)))
        return x, group_max(x, groups)


class PillarEncoder(nn.Module):
    """Any number of points in any number of pillars. Heights are not limited: a point counts wherever it is above its
    pillar's ground."""

    def __init__(self, grid: BevGrid, dim: int, features: int = 5) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, half of it are features of points and half of pillars, got {dim}")
        self.grid, self.dim = grid, dim
        self.pfn_layers = nn.ModuleList([PointLayer(features + 6, dim // 2), PointLayer(dim, dim)])

    @torch.no_grad()
    def group(self, points: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor, Groups]:
        """Points (N', 5) on the grid, their cells (N', 2) and samples (N',), and which of them share a pillar."""
        cells, inside = self.grid.cells(points[:, :2])
        points, cells, sample = points[inside], cells[inside], sample[inside]
        nx, ny = self.grid.size
        key, order = torch.sort((sample * nx + cells[:, 0]) * ny + cells[:, 1], stable=True)
        return points, cells, sample, Groups.of_sorted(key, order)

    def forward(self, points: Tensor, sample: Tensor) -> Pillars:
        """points (N, 5): x, y, z, intensity, lag, of samples (N,)."""
        points, cells, sample, groups = self.group(points, sample)
        if not len(points):
            return Pillars(points.new_zeros(0, self.dim) + zero_of(self), cells, sample)
        xyz = points[:, :3]
        centre = F.pad(self.grid.centres(cells), (0, 1), value=self.grid.middle)
        x = torch.cat([points, xyz - mean(xyz, groups)[groups.group], xyz - centre], dim=1)  # (N', 11)
        of_points, of_pillars = self.pfn_layers[0](x, groups)
        x = torch.cat([of_points, spread(of_pillars, groups)], dim=1)
        return Pillars(self.pfn_layers[1](x, groups)[1], cells[groups.first], sample[groups.first])
