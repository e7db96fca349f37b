"""Batch normalisation of points."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d of rows (N, C) in float32 at least. A single row, which has no variance, is normalised by the running
    statistics, and leaves them as they are."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and len(x) < 2:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, variance = self.running_mean.clone(), self.running_var.clone()  # which may change before backward
            return nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)
