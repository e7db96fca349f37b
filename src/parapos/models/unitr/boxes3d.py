"""Boxes in space: overlap of turned rectangles and of turned boxes, and what suppresses doubles.

A box is x, y, z of its centre, length, width, height, yaw; a rectangle is x, y, length, width, yaw. Shapes (..., n).
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-6  # a corner this far outside, in metres, counts as inside


def rectangles(boxes: Tensor) -> Tensor:
    """Boxes (..., 7 or more) from above, (..., 5)."""
    return boxes[..., [0, 1, 3, 4, 6]]


def corners(rectangle: Tensor) -> Tensor:
    """(..., 4, 2), counter-clockwise."""
    signs = rectangle.new_tensor([[1, 1], [-1, 1], [-1, -1], [1, -1]]) / 2
    local = signs * rectangle[..., None, 2:4]  # (..., 4, 2)
    cos, sin = rectangle[..., 4:].cos(), rectangle[..., 4:].sin()
    turned = torch.stack([local[..., 0] * cos - local[..., 1] * sin, local[..., 0] * sin + local[..., 1] * cos], dim=-1)
    return turned + rectangle[..., None, :2]


def _inside(points: Tensor, rectangle: Tensor) -> Tensor:
    """(..., 4) whether points (..., 4, 2) are in a rectangle (..., 5)."""
    d = points - rectangle[..., None, :2]
    cos, sin = rectangle[..., 4:].cos(), rectangle[..., 4:].sin()
    local = torch.stack([d[..., 0] * cos + d[..., 1] * sin, d[..., 1] * cos - d[..., 0] * sin], dim=-1)
    return (local.abs() <= rectangle[..., None, 2:4] / 2 + TOLERANCE).all(-1)


def _crossings(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Points (..., 16, 2) where edges of two quadrilaterals (..., 4, 2) cross, and whether they do."""
    p, q = a[..., :, None, :], b[..., None, :, :]
    dp, dq = a.roll(-1, -2)[..., :, None, :] - p, b.roll(-1, -2)[..., None, :, :] - q
    det = dp[..., 0] * dq[..., 1] - dp[..., 1] * dq[..., 0]  # (..., 4, 4)
    w = q - p
    parallel = det.abs() < 1e-12
    safe = torch.where(parallel, 1.0, det)
    t = (w[..., 0] * dq[..., 1] - w[..., 1] * dq[..., 0]) / safe
    u = (w[..., 0] * dp[..., 1] - w[..., 1] * dp[..., 0]) / safe
    cross = ~parallel & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    return (p + t[..., None] * dp).flatten(-3, -2), cross.flatten(-2)


@torch.no_grad()
def overlap_area(a: Tensor, b: Tensor) -> Tensor:
    """(...): area that turned rectangles a and b (..., 5) share, in float64. Shapes broadcast."""
    a, b = torch.broadcast_tensors(a.double(), b.double())
    middle = a[..., :2]  # near the origin digits are not lost
    a, b = (torch.cat([x[..., :2] - middle, x[..., 2:]], dim=-1) for x in (a, b))
    ca, cb = corners(a), corners(b)
    crossings, cross = _crossings(ca, cb)
    points = torch.cat([ca, cb, crossings], dim=-2)  # (..., 24, 2)
    valid = torch.cat([_inside(ca, b), _inside(cb, a), cross], dim=-1)  # (..., 24)
    count = valid.sum(-1)
    centre = torch.where(valid[..., None], points, 0.0).sum(-2) / count.clamp(min=1)[..., None]
    d = points - centre[..., None, :]
    angle = torch.where(valid, torch.atan2(d[..., 1], d[..., 0]), torch.inf)
    order = angle.argsort(-1)
    d = d.gather(-2, order[..., None].expand_as(d))
    # Slots that hold nothing repeat the first point, which adds no area.
    real = torch.arange(d.shape[-2], device=d.device) < count[..., None]
    d = torch.where(real[..., None], d, d[..., :1, :])
    after = d.roll(-1, -2)
    area = (d[..., 0] * after[..., 1] - d[..., 1] * after[..., 0]).sum(-1).abs() / 2
    return torch.where(count >= 3, area, 0.0)


def rotated_iou(a: Tensor, b: Tensor) -> Tensor:
    """(...): intersection over union of turned rectangles (..., 5), in float64."""
    shared = overlap_area(a, b)
    total = a[..., 2].double() * a[..., 3] + b[..., 2].double() * b[..., 3]
    return shared / (total - shared).clamp(min=1e-12)


def iou_3d(a: Tensor, b: Tensor) -> Tensor:
    """(...): intersection over union of boxes (..., 7 or more), in float64. z is the centre's."""
    wide_a, wide_b = a.double(), b.double()
    low = torch.maximum(wide_a[..., 2] - wide_a[..., 5] / 2, wide_b[..., 2] - wide_b[..., 5] / 2)
    high = torch.minimum(wide_a[..., 2] + wide_a[..., 5] / 2, wide_b[..., 2] + wide_b[..., 5] / 2)
    shared = overlap_area(rectangles(a), rectangles(b)) * (high - low).clamp(min=0)
    volumes = wide_a[..., 3:6].prod(-1) + wide_b[..., 3:6].prod(-1)
    return shared / (volumes - shared).clamp(min=1e-12)


def diou_axis_aligned(a: Tensor, b: Tensor) -> Tensor:
    """(n,): IoU of boxes (n, 6 or more) as if they had no yaw, less the squared distance of their centres over the
    squared diagonal of what encloses both; from -1 to 1. Has gradients."""
    (ca, sa), (cb, sb) = ((x[..., :3], x[..., 3:6]) for x in (a, b))
    low_a, high_a, low_b, high_b = ca - sa / 2, ca + sa / 2, cb - sb / 2, cb + sb / 2
    shared = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    union = sa.prod(-1) + sb.prod(-1) - shared
    diagonal = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).clamp(min=0).square().sum(-1)
    distance = (cb - ca).square().sum(-1)
    return (shared / union - distance / diagonal).clamp(-1, 1)


def rotated_nms(rectangle: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Rows that stay, best score first: those that overlap none better by an IoU above the threshold."""
    order = scores.argsort(descending=True, stable=True)
    overlaps = rotated_iou(rectangle[order, None], rectangle[None, order]) > threshold
    keep = torch.ones(len(order), dtype=torch.bool)
    overlaps = overlaps.cpu()
    for i in range(len(order)):
        if keep[i]:
            keep[i + 1 :] &= ~overlaps[i, i + 1 :]
    return order[keep.to(order.device)]
