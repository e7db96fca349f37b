"""The check of an exported detector: detections may change places, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parapos.interop import export
from parapos.models import DetectorViT


@pytest.fixture(scope="module")
def detector():
    """A subject, its inputs, its nine best detections, and the best thirty."""
    torch.manual_seed(0)
    net = DetectorViT(dim=24, heads=2, depth=1, mlp_dim=32, num_classes=3, patch=4, neck_dim=8, reg_max=4)
    for name, p in net.named_parameters():
        if "head" in name:
            nn.init.normal_(p, std=0.3)  # scores that tell boxes apart
    subject = export.describe(net, max_det=9)
    inputs = subject.example(2, 6, 8, 0)
    with torch.no_grad():
        return subject, inputs, subject.module(*inputs), net.detect(*inputs, max_det=30)


def distance(detector, detections):
    subject, inputs, want, _ = detector
    with torch.no_grad():
        return float(export._distance(subject, inputs, want, detections))


def test_detections_as_they_are_and_the_next_best(detector):
    want, more = detector[2:]
    assert distance(detector, want) == 0
    next_best = torch.cat([want[:, :-1], more[:, 9:10]], 1)
    assert distance(detector, next_best) == float((want[:, -1, 4] - more[:, 9, 4]).abs().max())


@pytest.mark.parametrize(("column", "change"), [(0, 1.0), (3, 1.0), (4, 1e-2)])
def test_another_box_or_score_is_noticed(detector, column, change):
    changed = detector[2].clone()
    changed[1, 2, column] += change
    assert distance(detector, changed) >= 5e-3


def test_another_class_is_noticed(detector):
    changed = detector[2].clone()
    changed[0, 0, 5] = (changed[0, 0, 5] + 1) % 3
    assert distance(detector, changed) >= 1e-3
