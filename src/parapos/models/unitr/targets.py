"""What the head should say: heatmaps with a hill for each object, and boxes as numbers.

B samples, C classes, G boxes of a sample, R x L rows and columns of the map.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .grid import BevFrame

OVERLAP = 0.1  # a box that is moved by the radius still overlaps its object by so much
LEAST_RADIUS = 2


def box_codes(boxes: Tensor, frame: BevFrame) -> Tensor:
    """(..., 10) of boxes (..., 9): centre in cells, z, logarithms of sides, sine and cosine of the yaw, velocity."""
    yaw = boxes[..., 6:7]
    centre = frame.to_cells(boxes[..., :2])
    return torch.cat([centre, boxes[..., 2:3], boxes[..., 3:6].log(), yaw.sin(), yaw.cos(), boxes[..., 7:9]], dim=-1)


def gaussian_radius(length: float, width: float) -> float:
    """How far from its centre an object of these sides, in cells, still counts. Roots are divided by 2 where they
    should be by 2a, as in all code that descends from CornerNet; radii are part of what published numbers mean."""
    total, area, o = length + width, length * width, OVERLAP
    b, c = total, area * (1 - o) / (1 + o)
    r1 = (b + math.sqrt(b * b - 4 * c)) / 2
    b, c = 2 * total, (1 - o) * area
    r2 = (b + math.sqrt(b * b - 16 * c)) / 2
    b, c = -2 * o * total, (o - 1) * area
    r3 = (b + math.sqrt(b * b - 16 * o * c)) / 2
    return min(r1, r2, r3)


def hill(radius: int) -> Tensor:
    """(2 radius + 1, 2 radius + 1): a Gaussian that is 1 in the middle."""
    side = 2 * radius + 1
    d = torch.arange(-radius, radius + 1, dtype=torch.float64)
    g = torch.exp(-(d[:, None] ** 2 + d**2) / (2 * (side / 6) ** 2))
    return torch.where(g < torch.finfo(g.dtype).eps * g.max(), 0.0, g).float()


@torch.no_grad()
def heatmap_targets(boxes: Tensor, labels: Tensor, count: Tensor, classes: int, frame: BevFrame) -> Tensor:
    """(B, C, R, L) of boxes (B, G, 9) with labels (B, G), the first count (B,) of which are real. Boxes without length
    or width, and those whose centre is off the map, leave no trace."""
    target = torch.zeros(len(boxes), classes, frame.rows, frame.cols)
    cells = frame.to_cells(boxes[..., :2]).floor().long().tolist()
    sides = (boxes[..., 3:5] / boxes.new_tensor(frame.cell)).tolist()
    for b, number in enumerate(count.tolist()):
        for g in range(number):
            (col, row), (length, width) = cells[b][g], sides[b][g]
            if min(length, width) <= 0 or not (0 <= col < frame.cols and 0 <= row < frame.rows):
                continue
            radius = max(LEAST_RADIUS, int(gaussian_radius(length, width)))
            top, left = max(row - radius, 0), max(col - radius, 0)
            bottom, right = min(row + radius + 1, frame.rows), min(col + radius + 1, frame.cols)
            part = target[b, int(labels[b, g]), top:bottom, left:right]
            y, x = row - radius, col - radius
            torch.maximum(part, hill(radius)[top - y : bottom - y, left - x : right - x], out=part)
    return target.to(boxes.device)
