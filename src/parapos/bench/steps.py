"""One step of each kind of image model, for benchmarks: targets, inference and the loss of a training step.

B images, G boxes of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.base import Backbone, Classifier
from ..models.detector import Detector, RawDetections, detection_loss

BOXES = 8  # of an image, about as many as COCO has


@dataclass(frozen=True)
class Job:
    """targets(net, B, size, device): what a loss needs. infer(net, images): the answer that a user gets. loss(net,
    images, targets): the loss of a step. product(net, images, training): a number whose arithmetic is all that of the
    model, without that of decoding and losses."""

    targets: Callable[[Any, int, int, str], Any]
    infer: Callable[[Any, Tensor], object]
    loss: Callable[[Any, Tensor, Any], Tensor]
    product: Callable[[Any, Tensor, bool], Tensor]


def make_boxes(batch: int, count: int, size: int, device: str, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random boxes (B, G, 4) with sides from 16 pixels to half of the image, evenly by their logarithm, classes (B, G)
    and counts (B,)."""
    low, high = torch.tensor(16.0).log(), torch.tensor(max(17.0, size / 2)).log()
    sides = (low + (high - low) * torch.rand(batch, count, 2, device=device)).exp()
    corner = torch.rand(batch, count, 2, device=device) * (size - sides).clamp(min=0)
    boxes = torch.cat([corner, corner + sides], dim=2).clamp(max=size)
    labels = torch.randint(classes, (batch, count), device=device)
    return boxes, labels, torch.full((batch,), count, device=device)


def _maps(raw: RawDetections) -> Tensor:
    return torch.stack([level.sum() for level in (*raw.o2m, *raw.o2o)]).sum()


def detector_loss(net: Detector, images: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """As the task of detection has it for one part on one device."""
    sums = detection_loss(net(images), *targets)
    total = torch.stack(list(sums.parts.values())).sum((0, 1))  # (2,)
    return len(images) * (total / sums.weight.clamp(min=1)).sum()


JOBS: dict[type[nn.Module], Job] = {
    Classifier: Job(
        targets=lambda net, batch, size, device: torch.randint(net.classifier.out_features, (batch,), device=device),
        infer=lambda net, images: net(images),
        loss=lambda net, images, labels: F.cross_entropy(net(images), labels),
        product=lambda net, images, training: net(images).sum(),
    ),
    Detector: Job(
        targets=lambda net, batch, size, device: make_boxes(batch, BOXES, size, device, net.num_classes),
        infer=lambda net, images: net.detect(images),
        loss=detector_loss,
        product=lambda net, images, training: _maps(net(images, deploy=not training)),
    ),
}


def job_of(net: Backbone) -> Job:
    return next(job for kind, job in JOBS.items() if isinstance(net, kind))
