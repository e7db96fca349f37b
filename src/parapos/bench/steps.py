"""One step of each kind of model, for benchmarks: inputs, targets, inference and the loss of a training step.

B samples, G boxes of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import MODELS
from ..models.base import Classifier
from ..models.detector import Detector, RawDetections, detection_loss
from ..models.unitr import HeadOutputs, UniTR, decode, head_loss
from .driving import keyframes, objects

BOXES = 8  # of an image, about as many as COCO has


@dataclass(frozen=True)
class Job:
    """targets(net, B, size, device): what a loss needs. infer(net, *inputs): the answer that a user gets. loss(net,
    targets, *inputs): the loss of a step. product(net, training, *inputs): a number whose arithmetic is all that of the
    model, without that of decoding and losses. inputs(net, B, size, device): what the network takes, images of size x
    size pixels by default. tiny: options of a network that has the same operators on next to no numbers.
    can_be_fake: shapes do not depend on numbers, so that operators can be counted without any. size: the size that is
    measured unless another is asked for."""

    targets: Callable[[Any, int, int, str], Any]
    infer: Callable[..., object]
    loss: Callable[..., Tensor]
    product: Callable[..., Tensor]
    inputs: Callable[[Any, int, int, str], tuple[Tensor, ...]] = lambda net, batch, size, device: (
        torch.randn(batch, 3, size, size, device=device),
    )
    tiny: Mapping[str, Any] = field(default_factory=lambda: {"depth": 1, "mlp_dim": 32})
    can_be_fake: bool = True
    size: int = 224


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


def _said(outputs: HeadOutputs) -> Tensor:
    learned = (x for x in outputs if isinstance(x, Tensor) and x.is_floating_point())
    return torch.stack([x.sum() for x in learned]).sum()


def detector_loss(net: Detector, images: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """As the task of detection has it for one part on one device."""
    sums = detection_loss(net(images), *targets)
    total = torch.stack(list(sums.parts.values())).sum((0, 1))  # (2,)
    return len(images) * (total / sums.weight.clamp(min=1)).sum()


JOBS: dict[type[nn.Module], Job] = {
    Classifier: Job(
        targets=lambda net, batch, size, device: torch.randint(net.classifier.out_features, (batch,), device=device),
        infer=lambda net, images: net(images),
        loss=lambda net, labels, images: F.cross_entropy(net(images), labels),
        product=lambda net, training, images: net(images).sum(),
    ),
    Detector: Job(
        targets=lambda net, batch, size, device: make_boxes(batch, BOXES, size, device, net.num_classes),
        infer=lambda net, images: net.detect(images),
        loss=lambda net, targets, images: detector_loss(net, images, targets),
        product=lambda net, training, images: _maps(net(images, deploy=not training)),
        tiny={"depth": 1, "mlp_dim": 32, "neck_dim": 16},
    ),
    UniTR: Job(
        targets=lambda net, batch, size, device: objects(net, batch, device),
        infer=lambda net, *inputs: decode(net(*inputs)),
        loss=lambda net, targets, *inputs: head_loss(net(*inputs), targets).total,
        product=lambda net, training, *inputs: _said(net(*inputs)),
        inputs=keyframes,
        tiny={**MODELS["unitr_nano"][1], "dim": 64, "heads": 8},
        can_be_fake=False,
        size=256,
    ),
}


def job_of(kind: type[nn.Module]) -> Job:
    """How a class of models is run. KeyError for one that is not known."""
    found = next((job for known, job in JOBS.items() if issubclass(kind, known)), None)
    if found is None:
        raise KeyError(kind.__name__)
    return found
