"""The Lovász-softmax loss, which makes the mean Jaccard index (IoU) of classes something that can be learned."""

from __future__ import annotations

import torch
from torch import Tensor


def lovasz_softmax(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The loss of probabilities (N, C) for labels (N,) from 0, all points together: the mean over the classes that the
    labels have. Without any point it is 0, with a gradient of 0."""
    probabilities = probabilities.float()
    losses = []
    for c in labels.unique().tolist():
        truth = (labels == c).float()
        errors, order = (truth - probabilities[:, c]).abs().sort(descending=True, stable=True)
        losses.append(errors @ _gradient(truth[order]))
    return torch.stack(losses).mean() if losses else probabilities.sum() * 0


def _gradient(truth: Tensor) -> Tensor:
    """Steps of the Jaccard loss as points (N,), 1 where the class is, are taken in wrong one after another."""
    total = truth.sum()
    loss = 1 - (total - truth.cumsum(0)) / (total + (1 - truth).cumsum(0))
    return torch.cat([loss[:1], loss[1:] - loss[:-1]])
