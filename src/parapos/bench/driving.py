"""Generated keyframes of six cameras and a LiDAR, of the shape that UniTR takes, for benchmarks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..models.unitr import UniTR

BEAMS, STEPS, SWEEPS, SECTORS, HEIGHT = 32, 1080, 10, 72, 1.84  # of the LiDAR, as nuScenes has it
HEADINGS = (90.0, 35.0, 145.0, 270.0, 200.0, 340.0)  # of the cameras, degrees in the LiDAR frame
ASPECT = 11 / 4  # width of an image over its height
BOXES = 30  # of a sample


def calibration(height: int, width: int) -> Tensor:
    """(6, 4, 4): cameras that look outwards, LiDAR frame -> pixels times depth."""
    found = []
    for heading in HEADINGS:
        c, s = math.cos(math.radians(heading)), math.sin(math.radians(heading))
        axes = torch.tensor([[s, -c, 0.0], [0.0, 0.0, -1.0], [c, s, 0.0]])  # right, down, forward
        focal = 0.79 * width
        lens = torch.tensor([[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]])
        matrix = torch.eye(4)
        matrix[:3, :3] = lens @ axes
        matrix[:3, 3] = lens @ axes @ torch.tensor([-0.5 * c, -0.5 * s, 0.3])
        found.append(matrix)
    return torch.stack(found)


def sweeps() -> Tensor:
    """(N, 5): points of ten turns of a LiDAR that moves, between walls of different distances, always the same. Beams
    go from 30 degrees below the horizon to 10 above it; each ends on the ground or at a wall."""
    g = torch.Generator().manual_seed(0)
    wall = 8 + 50 * torch.rand(SECTORS, generator=g)  # metres, by direction
    rise, azimuth, turn = torch.meshgrid(
        torch.deg2rad(torch.linspace(-30.0, 10.0, BEAMS)), torch.arange(STEPS) * (2 * math.pi / STEPS),
        torch.arange(SWEEPS) * 1.0, indexing="ij",
    )  # fmt: skip
    far = wall[(azimuth / (2 * math.pi) * SECTORS).long()] + 0.05 * torch.randn(azimuth.shape, generator=g)
    ground = torch.where(rise < 0, HEIGHT / torch.tan(-rise).clamp(min=1e-6), torch.inf)
    reach = torch.minimum(far, ground)
    x, y, z = azimuth.cos() * reach, azimuth.sin() * reach - 0.3 * turn, reach * torch.tan(rise)
    intensity = 255 * torch.rand(azimuth.shape, generator=g)
    return torch.stack([x, y, z, intensity, 0.05 * turn], -1).flatten(0, 2)


def keyframes(net: UniTR, batch: int, size: int, device: str) -> tuple[Tensor, ...]:
    """Inputs of a network, always the same: images of `size` rows and the points of `sweeps`. At full size that makes
    16,896 patches and about as many pillars."""
    g = torch.Generator().manual_seed(0)
    width = round(size * ASPECT / net.patch) * net.patch
    points, identity = sweeps(), torch.eye(4)
    inputs = (
        points.repeat(batch, 1),
        torch.arange(1, batch + 1) * len(points),
        torch.randn(batch, len(HEADINGS), 3, size, width, generator=g),
        torch.ones(batch, len(HEADINGS), dtype=torch.bool),
        calibration(size, width).repeat(batch, 1, 1, 1),
        identity.repeat(batch, len(HEADINGS), 1, 1),
        identity.repeat(batch, 1, 1),
    )
    return tuple(x.to(device) for x in inputs)


def objects(net: UniTR, batch: int, device: str) -> dict[str, Any]:
    """Boxes within the range of a network, as a loss takes them."""
    g = torch.Generator().manual_seed(1)
    low, high = (torch.tensor(x) for x in (net.grid.low, net.grid.high))
    centre = low + (high - low) * torch.rand(batch, BOXES, 3, generator=g)
    sides = 0.5 + 5 * torch.rand(batch, BOXES, 3, generator=g)
    more = torch.randn(batch, BOXES, 3, generator=g)
    labels = torch.randint(net.num_classes, (batch, BOXES), generator=g)
    found = {"boxes": torch.cat([centre, sides, more], 2), "labels": labels, "count": torch.full((batch,), BOXES)}
    return {name: x.to(device) for name, x in found.items()}
