"""What a detector learns from: class scores, boxes and the distribution of their sides, for both branches of the head.

B images, G most boxes of an image, A anchors, C classes, R bins per side, m positives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .assign import TaskAlignedAssigner
from .boxes import Anchors, RawDetections, ciou, decode_boxes, expected_distances, flatten, make_anchors, to_boxes

GAINS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}
ONE_TO_MANY, ONE_TO_ONE = TaskAlignedAssigner(topk=10), TaskAlignedAssigner(topk=1)


class DetectionSums(NamedTuple):
    """A loss before it is divided. Columns: the one-to-many branch, the one-to-one branch.

    parts: "box", "cls" and "dfl", (B, 2) each, with their gains: sums over an image. weight (2,): what the sums of a
    whole step are divided by, the sum of the target scores, if that is more than 1.
    """

    parts: dict[str, Tensor]
    weight: Tensor


def branch_of(parameter: str) -> int:
    """The column of `DetectionSums` that a parameter learns from, by its name in a detector."""
    return int(parameter.startswith("head.o2o."))


def detection_loss(raw: RawDetections, boxes: Tensor, labels: Tensor, counts: Tensor) -> DetectionSums:
    """boxes (B, G, 4) XYXY in pixels of the network's input, with labels (B, G); the first counts (B,) are real."""
    if not raw.o2m:
        raise ValueError("a loss needs both branches of the head, got the one-to-one branch alone; call the model")
    size = raw.o2o[0].shape[0]
    if boxes.ndim != 3 or boxes.shape[::2] != (size, 4) or labels.shape != boxes.shape[:2] or counts.shape != (size,):
        told = ", ".join(str(tuple(x.shape)) for x in (boxes, labels, counts))
        raise ValueError(f"boxes must be ({size}, G, 4), labels ({size}, G), counts ({size},), got {told}")
    with torch.autocast(boxes.device.type, enabled=False):
        anchors = make_anchors(raw.o2o, raw.strides)
        pairs = ((raw.o2m, ONE_TO_MANY), (raw.o2o, ONE_TO_ONE))
        found = [
            _branch(*flatten(maps, len(raw.bins)), raw.bins, raw.mask, anchors, assigner, boxes, labels, counts)
            for maps, assigner in pairs
        ]
    parts = {name: torch.stack([sums[name] for sums, _ in found], dim=1) for name in GAINS}
    return DetectionSums(parts, torch.stack([weight for _, weight in found]))


def _branch(
    distances: Tensor,
    classes: Tensor,
    bins: Tensor,
    mask: Tensor | None,
    anchors: Anchors,
    assigner: TaskAlignedAssigner,
    boxes: Tensor,
    labels: Tensor,
    counts: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sums (B,) by name, and their weight, of logits (B, 4, R, A) and (B, C, A)."""
    boxes = boxes.to(distances)
    with torch.no_grad():
        predicted = decode_boxes(distances, bins, anchors)
    image, anchor, box, score = assigner(classes, predicted, anchors, boxes, labels, counts, mask)
    # The cross-entropy of a logit x with a target t is softplus(x) - t x, and almost all targets are zero.
    background = F.softplus(classes)
    background = background.sum((1, 2)) if mask is None else torch.where(mask[:, None], background, 0.0).sum((1, 2))
    stride, points = anchors.stride.to(boxes)[anchor], anchors.points.to(boxes)[anchor]
    target = boxes[image, box] / stride  # (m, 4), in cells
    logits = distances.permute(0, 3, 1, 2)[image, anchor]  # (m, 4, R)
    overlap = ciou(to_boxes(expected_distances(logits, bins, 2), points), target)
    sides = torch.cat([points - target[:, :2], target[:, 2:] - points], dim=1)
    by_pair = {
        "box": (1 - overlap) * score,
        "cls": -score * classes[image, labels[image, box], anchor],
        "dfl": distribution_loss(logits, sides) * score,
    }
    sums = {name: background.new_zeros(len(boxes)).index_add(0, image, value) for name, value in by_pair.items()}
    sums["cls"] = sums["cls"] + background
    return {name: gain * sums[name] for name, gain in GAINS.items()}, score.sum()


def distribution_loss(logits: Tensor, sides: Tensor) -> Tensor:
    """Cross-entropy (m,) of logits (m, 4, R) with distances (m, 4) in cells, shared out to the two nearest bins."""
    sides = sides.clamp(0, logits.shape[-1] - 1 - 0.01)
    low = sides.floor()
    logs = logits.log_softmax(-1)
    near, far = (logs.gather(-1, (low.long() + i)[..., None])[..., 0] for i in (0, 1))
    return -(near * (low + 1 - sides) + far * (sides - low)).mean(-1)
