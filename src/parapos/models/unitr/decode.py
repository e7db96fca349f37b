"""Boxes from what the head says.

B samples, C classes, Q queries, n boxes of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .boxes3d import rectangles, rotated_nms
from .head import HeadOutputs

LARGEST_LOG = 10.0  # e^10 metres: a larger size overflows before it means anything
NMS_BEFORE, NMS_AFTER = 1000, 100


class Boxes3D(NamedTuple):
    """Boxes of a sample, in the order of its queries."""

    boxes: Tensor  # (n, 9) as `DrivingBatch.boxes`, float32
    scores: Tensor  # (n,) from 0 to 1
    labels: Tensor  # (n,) int64


def decode_boxes(outputs: HeadOutputs) -> Tensor:
    """(B, Q, 9): x, y, z, length, width, height, yaw, vx, vy."""
    xy = outputs.frame.to_metres(outputs.center.transpose(1, 2))
    yaw = torch.atan2(outputs.rot[:, 0], outputs.rot[:, 1])[..., None]
    sides = outputs.dim.clamp(max=LARGEST_LOG).exp().transpose(1, 2)
    return torch.cat([xy, outputs.height.transpose(1, 2), sides, yaw, outputs.vel.transpose(1, 2)], dim=-1)


@torch.no_grad()
def decode(
    outputs: HeadOutputs,
    *,
    limit: tuple[float, ...] = (-61.2, -61.2, -10.0, 61.2, 61.2, 10.0),
    overlap_weight: float = 0.5,
    nms_threshold: float = 0.175,
) -> list[Boxes3D]:
    """The boxes of each sample, at most one for each query.

    limit: corners that centres must be between, metres. overlap_weight: a score is s^(1 - w) o^w, where o is the
    overlap that the head estimates. Of small classes, a box that overlaps a better one of its class by an IoU from
    above of more than nms_threshold is dropped. Numbers that are not finite are an error.
    """
    outputs = outputs.float()
    boxes = decode_boxes(outputs)
    finite = boxes.isfinite().all(-1).all(-1) & outputs.heatmap.isfinite().all(-1).all(-1)
    if not bool(finite.all()):
        bad = (~finite).nonzero()[:, 0].tolist()
        raise ValueError(f"boxes of samples {bad} of the batch are not finite; the weights may have diverged")
    label = outputs.query_labels  # only the class by which a query was chosen has a score
    chosen = label[:, None]
    scores = (outputs.heatmap.sigmoid() * outputs.query_heatmap_score).gather(1, chosen)[:, 0]  # (B, Q)
    overlap = ((outputs.iou[:, 0] + 1) / 2).clamp(0, 1)
    low, high = boxes.new_tensor(limit[:3]), boxes.new_tensor(limit[3:])
    keep = (scores > 0) & ((boxes[..., :3] >= low) & (boxes[..., :3] <= high)).all(-1)
    scores = scores ** (1 - overlap_weight) * overlap**overlap_weight
    found = []
    for b in range(len(boxes)):
        kept = keep[b].nonzero()[:, 0]
        for small in outputs.small_classes:
            rows = kept[label[b, kept] == small]
            rows = rows[scores[b, rows].argsort(descending=True, stable=True)[:NMS_BEFORE]]
            left = rows[rotated_nms(rectangles(boxes[b, rows]), scores[b, rows], nms_threshold)[:NMS_AFTER]]
            kept = torch.cat([kept[label[b, kept] != small], left]).sort()[0]
        found.append(Boxes3D(boxes[b, kept], scores[b, kept], label[b, kept]))
    return found
