"""Boxes and raw maps for the tests of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from parapos.models.detector import RawDetections

BINS, STRIDES = torch.arange(16.0), (8, 16, 32)


def padded(image: Tensor, labels: Tensor, boxes: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat boxes (n, 4) of images (n,) -> (B, G, 4), (B, G) and counts (B,)."""
    counts = torch.bincount(image, minlength=count)
    most = int(counts.max())
    out, names = torch.zeros(count, most, 4), torch.zeros(count, most, dtype=torch.long)
    for b in range(count):
        out[b, : counts[b]], names[b, : counts[b]] = boxes[image == b], labels[image == b]
    return out, names, counts


def to_pixels(boxes: Tensor, height: int, width: int) -> Tensor:
    """Centre and size in shares of the image (n, 4) -> XYXY in pixels."""
    centre, size = (boxes * torch.tensor([width, height, width, height])).split(2, dim=1)
    return torch.cat([centre - size / 2, centre + size / 2], dim=1)


def random_case(seed: int, *, batch: int = 3, classes: int = 3, height: int = 64, width: int = 96, most: int = 6):
    """Raw maps that need a gradient, and boxes, labels and counts; the first image may have none."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(height // s, width // s) for s in STRIDES]
    maps = [
        tuple(torch.randn(batch, 64 + classes, *shape, generator=g).mul(2).requires_grad_() for shape in shapes)
        for _ in range(2)
    ]
    counts = torch.randint(0, most + 1, (batch,), generator=g)
    counts[-1] = most
    corner = torch.rand(batch, most, 2, generator=g) * torch.tensor([width * 0.8, height * 0.8])
    size = 2 + torch.rand(batch, most, 2, generator=g) * torch.tensor([width * 0.7, height * 0.7])
    boxes = torch.cat([corner, torch.minimum(corner + size, torch.tensor([width, height]))], dim=2)
    boxes[torch.arange(most) >= counts[:, None]] = 0
    labels = torch.randint(0, classes, (batch, most), generator=g)
    return RawDetections(maps[0], maps[1], STRIDES, BINS), boxes, labels, counts
