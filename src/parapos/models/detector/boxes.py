"""Boxes on a pyramid of maps: anchors, decoding, the best detections, overlap.

B images, A anchors (cells of all maps, row-major, finest map first), C classes, R bins per side, k detections.
Boxes are XYXY, float32 or float64 whatever the network computes in: half precision moves an edge by pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RawDetections(NamedTuple):
    """What a detector says of every cell, before it is decoded.

    o2m, o2o: maps (B, 4 R + C, h, w), one per stride; channels are R bins each for left, top, right and bottom, then
    logits of classes. o2m, the one-to-many branch, is empty if only detections are wanted.
    bins (R,): the distances, in cells, that the bins stand for.
    mask (B, A) boolean: True for anchors on the image, or None: all are.
    """

    o2m: tuple[Tensor, ...]
    o2o: tuple[Tensor, ...]
    strides: tuple[int, ...]
    bins: Tensor
    mask: Tensor | None = None


class Anchors(NamedTuple):
    """points (A, 2): centres (x, y) in cells of their map. stride (A, 1): pixels per cell."""

    points: Tensor
    stride: Tensor


def make_anchors(maps: Sequence[Tensor], strides: Sequence[int]) -> Anchors:
    """The anchors of maps (..., h, w)."""
    points, stride = [], []
    for level, pixels in zip(maps, strides, strict=True):
        x, y = (torch.arange(side, device=level.device) + 0.5 for side in (level.shape[-1], level.shape[-2]))
        points.append(torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2))
        stride.append(torch.full_like(points[-1][:, :1], pixels))
    return Anchors(torch.cat(points), torch.cat(stride))


def flatten(maps: Sequence[Tensor], bins: int) -> tuple[Tensor, Tensor]:
    """Maps -> logits of distances (B, 4, R, A) and of classes (B, C, A), at least float32."""
    x = torch.cat([level.flatten(2) for level in maps], dim=2)  # (B, 4 R + C, A)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x[:, : 4 * bins].unflatten(1, (4, bins)), x[:, 4 * bins :]


def to_boxes(distances: Tensor, points: Tensor) -> Tensor:
    """Distances (..., 4) of the sides left, top, right, bottom from points (..., 2) -> XYXY (..., 4), same unit."""
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], dim=-1)


def expected_distances(logits: Tensor, bins: Tensor, dim: int) -> Tensor:
    """The mean of the bins under the softmax of logits along `dim`, which goes."""
    shape = [1] * logits.ndim
    shape[dim] = -1
    return (logits.softmax(dim) * bins.to(logits).reshape(shape)).sum(dim)


def decode_boxes(logits: Tensor, bins: Tensor, anchors: Anchors) -> Tensor:
    """Logits of distances (B, 4, R, A) -> boxes (B, A, 4) in pixels."""
    distances = expected_distances(logits, bins, 2).transpose(1, 2)  # (B, A, 4)
    return to_boxes(distances, anchors.points.to(distances)) * anchors.stride.to(distances)


def decode(
    maps: Sequence[Tensor], strides: Sequence[int], bins: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Boxes (B, A, 4) in pixels, not clipped, and scores (B, A, C); scores off the image, by mask (B, A), are zero."""
    with torch.autocast(maps[0].device.type, enabled=False):
        distances, classes = flatten(maps, len(bins))
        boxes, scores = decode_boxes(distances, bins, make_anchors(maps, strides)), classes.transpose(1, 2).sigmoid()
        return boxes, scores if mask is None else scores.masked_fill(~mask[..., None], 0.0)


def select_topk(boxes: Tensor, scores: Tensor, max_det: int) -> Tensor:
    """The best detections (B, k, 6) of boxes (B, A, 4) and scores (B, A, C), best first; k = min(max_det, A).

    Columns: x1, y1, x2, y2, score, class. The k anchors with the best scores stay, then the k best pairs of an anchor
    and a class among them; an anchor may come with several classes.
    """
    k, classes = min(max_det, scores.shape[1]), scores.shape[2]
    kept = scores.amax(2).topk(k, dim=1).indices  # (B, k)
    table = scores.gather(1, kept[..., None].expand(-1, -1, classes))  # (B, k, C)
    best = table.flatten(1).topk(k, dim=1)
    anchor = kept.gather(1, best.indices // classes)
    found = boxes.gather(1, anchor[..., None].expand(-1, -1, 4))
    return torch.cat([found, best.values[..., None], (best.indices % classes)[..., None].to(found)], dim=2)


def postprocess(raw: RawDetections, max_det: int = 100) -> Tensor:
    """The detections (B, k, 6) of the one-to-one branch, as of `select_topk`. Thresholds are left to the caller."""
    if max_det < 1:
        raise ValueError(f"max_det must be at least 1, got {max_det}")
    return select_topk(*decode(raw.o2o, raw.strides, raw.bins, raw.mask), max_det)


def ciou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    """Complete IoU (...) of boxes (..., 4): overlap, less the distance of centres, less the difference of shapes."""
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.unbind(-1), b.unbind(-1)
    aw, ah, bw, bh = ax2 - ax1, ay2 - ay1 + eps, bx2 - bx1, by2 - by1 + eps
    wide = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    high = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    inner = wide * high
    iou = inner / (aw * ah + bw * bh - inner + eps)
    width = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    height = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    distance = ((bx1 + bx2 - ax1 - ax2) ** 2 + (by1 + by2 - ay1 - ay2) ** 2) / 4
    shape = (4 / math.pi**2) * (torch.atan(bw / bh) - torch.atan(aw / ah)) ** 2
    with torch.no_grad():
        weight = shape / (shape - iou + (1 + eps))
    return iou - distance / (width**2 + height**2 + eps) - weight * shape
