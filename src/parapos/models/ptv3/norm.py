"""Batch normalisation of points that gives the same weights on any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d of rows (N, C). In training it normalises by the rows that it is given; a single row, which has no
    variance, by the running statistics. Those are updated by `update_statistics`, not by forward."""

    batch: tuple[Tensor, Tensor] | None = None  # mean and unbiased variance of the last rows in training

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.training or len(x) < 2:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, variance = self.running_mean, self.running_var
            if self.training:  # they may change before the backward pass
                mean, variance = mean.clone(), variance.clone()
            return nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        mean, variance = x.new_zeros(2, x.shape[1])
        x = nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)  # fills both
        self.batch = mean, variance
        return x


@torch.no_grad()
def update_statistics(module: nn.Module) -> None:
    """Moves the running statistics of all norms towards those of the last rows, of one process after another.

    Processes take the parts of a step in turns, so one process that takes all parts ends with the same numbers.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    found = []
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, variance = norm.batch or (norm.running_mean, norm.running_var)
        found += [
            mean.to(norm.running_mean),
            variance.to(norm.running_var),
            mean.new_full((1,), norm.batch is not None),
        ]
        norm.batch = None
    if not found:
        return
    sizes, mine = [len(x) for x in found], torch.cat(found)
    parts = [mine]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, mine)
    for part in parts:
        statistics = part.split(sizes)
        for norm, mean, variance, has in zip(norms, statistics[::3], statistics[1::3], statistics[2::3], strict=True):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert norm.num_batches_tracked is not None
            rate = has * (0.0 if norm.momentum is None else norm.momentum)  # rows without statistics change nothing
            norm.running_mean += rate * (mean - norm.running_mean)
            norm.running_var += rate * (variance - norm.running_var)
            norm.num_batches_tracked += has.long()[0]
