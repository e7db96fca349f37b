"""What the head learns from: a heatmap of objects, and boxes of queries that are matched to them.

B samples, C classes, Q queries, G boxes of a sample, m matched pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .boxes3d import diou_axis_aligned, iou_3d
from .decode import decode_boxes
from .grid import BevFrame
from .head import HeadOutputs
from .targets import box_codes, heatmap_targets

LOSS_PARTS = ("heatmap", "cls", "box", "iou", "iou_reg")
GAINS = {"heatmap": 1.0, "cls": 1.0, "box": 0.25, "iou": 0.5, "iou_reg": 0.5}
CODE_WEIGHTS = (1.0,) * 8 + (0.2, 0.2)  # velocities are hard to see
CLASS_COST, CENTRE_COST, OVERLAP_COST = 0.15, 0.25, 0.25
ALPHA = 0.25


class HeadLoss(NamedTuple):
    """The loss of a batch, and its parts by the names of LOSS_PARTS, weighted; they add up to it."""

    total: Tensor
    parts: dict[str, Tensor]


class Matches(NamedTuple):
    """Queries that learn a box, m of all samples."""

    sample: Tensor  # (m,)
    query: Tensor  # (m,)
    box: Tensor  # (m,) row among the boxes of the sample


@torch.no_grad()
def match(outputs: HeadOutputs, boxes: Tensor, labels: Tensor, count: Tensor) -> Matches:
    """The assignment of boxes (B, G, 9) with labels (B, G), the first count (B,) of which are real, to queries that
    costs least: by class, by distance of centres, by overlap. Each box gets one query as long as there are any. Boxes
    without length or width get none."""
    from scipy.optimize import linear_sum_assignment

    predicted = decode_boxes(outputs)
    found: list[Tensor] = [boxes.new_zeros(3, 0, dtype=torch.int64)]
    for b, number in enumerate(count.tolist()):
        real = (boxes[b, :number, 3:5] > 0).all(-1).nonzero()[:, 0]
        cost = matching_cost(predicted[b], outputs.heatmap[b].T, boxes[b, real], labels[b, real], outputs.frame)
        # Diverged weights give no assignment that means anything; the loss, which is not finite, tells.
        rows, columns = linear_sum_assignment(cost.nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6).cpu().numpy())
        query, column = (torch.from_numpy(x).to(real) for x in (rows, columns))
        found.append(torch.stack([torch.full_like(query, b), query, real[column]]))
    return Matches(*torch.cat(found, dim=1))


def matching_cost(predicted: Tensor, logits: Tensor, boxes: Tensor, labels: Tensor, frame: BevFrame) -> Tensor:
    """(Q, G) of boxes predicted (Q, 9) with logits (Q, C), and boxes (G, 9) with labels (G,)."""
    p, tiny = logits.sigmoid(), 1e-12
    there = -ALPHA * (1 - p).square() * (p + tiny).log()
    absent = -(1 - ALPHA) * p.square() * (1 - p + tiny).log()
    extent = boxes.new_tensor(frame.extent)
    apart = ((predicted[:, None, :2] - boxes[None, :, :2]).abs() / extent).sum(-1)
    overlap = iou_3d(predicted[:, None, :7], boxes[None, :, :7]).to(apart)
    return CLASS_COST * (there - absent)[:, labels] + CENTRE_COST * apart - OVERLAP_COST * overlap


def gaussian_focal(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over cells of a focal loss whose target is 1 at objects and falls off around them."""
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    peak = target == 1
    at = -(1 - p).square() * p.log()
    around = -((1 - target) ** 4) * p.square() * (1 - p).log()
    return torch.where(peak, at, around).sum()


def focal(logits: Tensor, target: Tensor) -> Tensor:
    """The sum of sigmoid focal losses, alpha 0.25, gamma 2; target is 0 or 1."""
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    wrong = torch.where(target == 1, 1 - p, p)
    alpha = torch.where(target == 1, ALPHA, 1 - ALPHA)
    return (alpha * wrong.square() * entropy).sum()


def head_loss(outputs: HeadOutputs, batch: Any) -> HeadLoss:
    """The loss of a `DrivingBatch`, of which boxes, labels and count are read. A batch without any box is legal."""
    boxes, labels, count = batch["boxes"].float(), batch["labels"], batch["count"]
    samples, classes, _ = outputs.heatmap.shape
    if boxes.ndim != 3 or boxes.shape[::2] != (samples, 9) or labels.shape != boxes.shape[:2]:
        got = f"{tuple(boxes.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"boxes must be ({samples}, G, 9) and labels ({samples}, G), got {got}")
    if count.shape != (samples,):
        raise ValueError(f"count must be ({samples},), got {tuple(count.shape)}")
    real = torch.arange(boxes.shape[1], device=boxes.device) < count[:, None]
    if bool((real & ((labels < 0) | (labels >= classes))).any()):
        raise ValueError(f"labels must be in 0..{classes - 1}, got {labels[real].tolist()}")
    with torch.autocast(boxes.device.type, enabled=False):
        outputs = outputs.float()
        found = match(outputs, boxes, labels, count)
        return _loss(outputs, found, boxes, labels, count)


def _loss(outputs: HeadOutputs, found: Matches, boxes: Tensor, labels: Tensor, count: Tensor) -> HeadLoss:
    target = heatmap_targets(boxes, labels, count, outputs.heatmap.shape[1], outputs.frame)
    peaks = (target == 1).sum().clamp(min=1)
    positives = max(len(found.query), 1)
    true = boxes[found.sample, found.box]  # (m, 9)
    one_hot = torch.zeros_like(outputs.heatmap)
    one_hot[found.sample, labels[found.sample, found.box], found.query] = 1.0
    codes = torch.cat([outputs.center, outputs.height, outputs.dim, outputs.rot, outputs.vel], dim=1)  # (B, 10, Q)
    codes = codes.transpose(1, 2)[found.sample, found.query]
    predicted = decode_boxes(outputs)[found.sample, found.query]
    overlap = iou_3d(predicted.detach(), true).to(true)
    estimate = outputs.iou[found.sample, 0, found.query]
    alike = diou_axis_aligned(predicted, true)
    sums = {
        "heatmap": gaussian_focal(outputs.dense_heatmap, target) / peaks,
        "cls": focal(outputs.heatmap, one_hot) / positives,
        "box": ((codes - box_codes(true, outputs.frame)).abs() * codes.new_tensor(CODE_WEIGHTS)).sum() / positives,
        "iou": _mean((estimate - (2 * overlap - 1)).abs(), overlap > 0),
        "iou_reg": _mean(1 - alike, alike > 0),
    }
    parts = {name: GAINS[name] * value for name, value in sums.items()}
    return HeadLoss(torch.stack(list(parts.values())).sum(), parts)


def _mean(x: Tensor, where: Tensor) -> Tensor:
    """The mean of some numbers; 0 of none."""
    return torch.where(where, x, 0.0).sum() / where.sum().clamp(min=1)
