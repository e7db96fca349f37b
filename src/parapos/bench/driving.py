"""Generated keyframes of six cameras and a LiDAR, of the shape that UniTR takes, for benchmarks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..models.unitr import UniTR

POINTS = 250_000  # about what ten sweeps of nuScenes have
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


def keyframes(net: UniTR, batch: int, size: int, device: str) -> tuple[Tensor, ...]:
    """Inputs of a network, always the same: images of `size` rows, and points that grow sparse with distance, three
    quarters of them on walls, so that a third of full size's tokens or more are pillars."""
    g = torch.Generator().manual_seed(0)
    width = round(size * ASPECT / net.patch) * net.patch
    low, high = (torch.tensor(x[:2]) for x in (net.grid.low, net.grid.high))
    count = POINTS * (net.grid.size[0] * net.grid.size[1]) // 360**2
    reach = float((high - low).max()) / 2
    radius = reach * torch.rand(batch * count, generator=g) ** 1.2
    angle = torch.rand(batch * count, generator=g) * 2 * math.pi
    wall = torch.rand(batch * count, generator=g) < 0.75
    angle = torch.where(wall, (angle * 90).round() / 90 + radius.round() * 0.3, angle)
    xy = (low + high) / 2 + torch.stack([angle.cos() * radius, angle.sin() * radius], 1)
    z = torch.where(wall, torch.rand(batch * count, generator=g) * 4 - 1.8, -1.8)
    more = torch.rand(batch * count, 2, generator=g) * torch.tensor([255.0, 0.5])
    identity = torch.eye(4)
    inputs = (
        torch.cat([xy, z[:, None], more], 1),
        torch.arange(1, batch + 1) * count,
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
