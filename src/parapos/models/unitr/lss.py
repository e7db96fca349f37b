"""Images from above by a learned depth: lift, splat. An option; without it images reach the map by attention alone.

B samples, V cameras, I images that there are, h x w patches of an image, Z depths, C channels of what is lifted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .grid import BevGrid
from .tokens import zero_of


class ConvUnit(nn.Sequential):
    """Convolution, norm, ReLU."""

    def __init__(self, dim: int, out: int, size: int) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(dim, out, size, padding=size // 2), nn.BatchNorm2d(out), nn.ReLU()


class CameraNeck(nn.Module):
    """Maps of all blocks, joined from the last to the first."""

    def __init__(self, dim: int, out: int, levels: int) -> None:
        super().__init__()
        steps = range(levels - 1)
        self.lateral_convs = nn.ModuleList(ConvUnit(dim + (dim if i == levels - 2 else out), out, 1) for i in steps)
        self.fpn_convs = nn.ModuleList(ConvUnit(out, out, 3) for _ in steps)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (I, dim, h, w), the first block's first -> (I, out, h, w)."""
        x = maps[-1]
        for i in reversed(range(len(self.lateral_convs))):
            x = self.fpn_convs[i](self.lateral_convs[i](torch.cat([maps[i], x], dim=1)))
        return x


def frustum(size: tuple[int, int], patches: tuple[int, int], depths: Tensor) -> Tensor:
    """(Z, h, w, 3): pixels (column, row) of an image of size (H, W), from edge to edge, at each depth."""
    v, u = (torch.linspace(0, n - 1, count, device=depths.device) for n, count in zip(size, patches, strict=True))
    d, v, u = torch.meshgrid(depths, v, u, indexing="ij")
    return torch.stack([u, v, d], dim=-1)


def unproject(points: Tensor, matrix: Tensor, image_aug: Tensor) -> Tensor:
    """Pixels with depth (..., 3) -> metres in the LiDAR frame (..., 3). matrix, image_aug (4, 4): as in `Cameras`."""
    raw = (points - image_aug[:3, 3]) @ torch.linalg.inv(image_aug[:3, :3]).mT
    h = torch.cat([raw[..., :2] * raw[..., 2:], raw[..., 2:], torch.ones_like(raw[..., :1])], dim=-1)
    return h @ torch.linalg.inv(matrix)[:3].mT


class Splat(nn.Module):
    """A distribution over depths and a context for each patch, summed on the map. depths: nearest, end, step."""

    def __init__(
        self,
        dim: int,
        context: int,
        grid: BevGrid,
        depths: tuple[float, float, float] = (1.0, 60.0, 0.5),
        z_range: tuple[float, float] = (-10.0, 10.0),
    ) -> None:
        super().__init__()
        self.grid, self.depths, self.z_range, self.context = grid, depths, z_range, context
        self.depthnet = nn.Conv2d(dim, self.bins(torch.device("cpu")).numel() + context, 1)

    def bins(self, device: torch.device) -> Tensor:
        low, high, step = self.depths
        return torch.arange(low, high, step, device=device)

    def forward(
        self, x: Tensor, sample: Tensor, matrix: Tensor, image_aug: Tensor, size: tuple[int, int], samples: int
    ) -> Tensor:
        """Maps x (I, dim, h, w) of images of samples (I,) with matrices (I, 4, 4) -> (B, C, rows, columns)."""
        cols, rows = self.grid.size
        out = x.new_zeros(samples * rows * cols, self.context, dtype=torch.promote_types(x.dtype, torch.float32))
        depths = self.bins(x.device)
        points = frustum(size, (x.shape[2], x.shape[3]), depths)
        weights, context = self.depthnet(x).float().split([len(depths), self.context], dim=1)
        for i, (weight, values) in enumerate(zip(weights.softmax(1), context, strict=True)):
            with torch.no_grad():
                at = unproject(points, matrix[i], image_aug[i])
                cells, inside = self.grid.cells(at[..., :2])
                inside &= (at[..., 2] >= self.z_range[0]) & (at[..., 2] < self.z_range[1])
                row = (sample[i] * rows + cells[..., 1]) * cols + cells[..., 0]
            lifted = weight[..., None] * values.permute(1, 2, 0)  # (Z, h, w, C)
            out = out.index_add(0, row[inside], lifted[inside])
        return out.view(samples, rows, cols, -1).permute(0, 3, 1, 2)


class Fuser(nn.Module):
    """Both maps as one."""

    def __init__(self, camera: int, lidar: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(camera + lidar, lidar, 3, padding=1, bias=False), nn.BatchNorm2d(lidar), nn.ReLU()]
        self.conv = nn.Sequential(*layers)

    def forward(self, camera: Tensor, lidar: Tensor) -> Tensor:
        return self.conv(torch.cat([camera.to(lidar.dtype), lidar], dim=1))


class CameraMap(nn.Module):
    """A map of what images show, joined with that of pillars. dim: width of tokens; levels: blocks of the backbone."""

    def __init__(self, dim: int, levels: int, grid: BevGrid, *, neck_dim: int = 256, context: int = 80) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(levels))
        self.neck = CameraNeck(dim, neck_dim, levels)
        self.vtransform = Splat(neck_dim, context, grid)
        self.fuser = Fuser(context, dim)

    def forward(
        self,
        tokens: Sequence[Tensor],
        patches: tuple[int, int],
        sample: Tensor,
        matrix: Tensor,
        image_aug: Tensor,
        size: tuple[int, int],
        lidar: Tensor,
    ) -> Tensor:
        """tokens: patches (I h w, D) after each block; lidar (B, D, rows, columns); others as of `Splat`."""
        if not len(sample):
            nothing = lidar.new_zeros(len(lidar), self.vtransform.context, *lidar.shape[2:])
            return self.fuser(nothing + zero_of(self), lidar)
        normed = (norm(x) for norm, x in zip(self.norms, tokens, strict=True))
        maps = [x.view(len(sample), *patches, -1).permute(0, 3, 1, 2) for x in normed]
        camera = self.vtransform(self.neck(maps), sample, matrix, image_aug, size, len(lidar))
        return self.fuser(camera, lidar)
