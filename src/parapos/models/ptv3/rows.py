"""Moves of rows between points, cells and patches. Gradients are gathers and sums over given groups: no result depends
on the order in which threads add, on any device.

N rows, M groups, S slots, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

SUM, MEAN, MAX = range(3)  # modes of torch.embedding_bag


class Groups(NamedTuple):
    """A partition of rows."""

    members: Tensor  # (N,) rows, group after group
    offsets: Tensor  # (M,) where each group begins among them
    group: Tensor  # (N,) the group of each row

    @classmethod
    def of_sorted(cls, keys: Tensor, members: Tensor) -> Groups:
        """Groups of equal keys (N,), which are sorted and belong to rows `members` (N,)."""
        starts = torch.ones_like(keys, dtype=torch.bool)
        starts[1:] = keys[1:] != keys[:-1]
        group = torch.empty_like(members)
        group[members] = starts.cumsum(0) - 1
        return cls(members, starts.nonzero()[:, 0], group)

    @property
    def first(self) -> Tensor:
        """(M,): the first member of each group."""
        return self.members[self.offsets]


def _reduce(x: Tensor, groups: Groups, mode: int) -> tuple[Tensor, Tensor]:
    """Reduced rows (M, C), and the rows that were the largest, (M, C), for MAX."""
    result = torch.embedding_bag(x, groups.members, groups.offsets, False, mode)
    return result[0], result[3]


def mean(x: Tensor, groups: Groups) -> Tensor:
    """Means (M, C) of groups, without gradients."""
    return _reduce(x, groups, MEAN)[0]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _reduce(x, groups, SUM)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.groups.group), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return x.index_select(0, groups.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad.contiguous(), ctx.groups, SUM)[0], None


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        result, winners = _reduce(x, groups, MAX)
        ctx.save_for_backward(winners)
        ctx.rows = len(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (winners,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).scatter_(0, winners, grad), None


def group_sum(x: Tensor, groups: Groups) -> Tensor:
    """Sums (M, C) of the rows (N, C) of each group."""
    return _Sum.apply(x, groups)


def group_max(x: Tensor, groups: Groups) -> Tensor:
    """Largest values (M, C) of the rows (N, C) of each group. Of equal ones, the first gets the gradient."""
    return _Max.apply(x, groups)


def spread(x: Tensor, groups: Groups) -> Tensor:
    """Rows (N, C) from one row (M, C) per group."""
    return _Spread.apply(x, groups)


class _Pick(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.size = rows, len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.size, grad.shape[1]).index_copy_(0, ctx.rows, grad), None


def pick(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for rows that all differ."""
    return _Pick.apply(x, rows)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slot: Tensor, twice: Tensor) -> Tensor:
        ctx.source, ctx.slot, ctx.twice = source, slot, twice
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total = grad.index_select(0, ctx.slot)
        if len(ctx.twice):  # the rows of these slots all differ, so each gets one addition
            total.index_add_(0, ctx.source[ctx.twice], grad.index_select(0, ctx.twice))
        return total, None, None, None


def copy_rows(x: Tensor, source: Tensor, slot: Tensor, twice: Tensor) -> Tensor:
    """x[source] (S, C), where each row has its slot (N,), and the slots `twice` have second copies of rows that all
    differ. Further slots are padding: they get some row and give it no gradient."""
    return _Copy.apply(x, source, slot, twice)
