"""Windows of a grid, and sets of equal size within them: who attends to whom, and where. Integers alone.

T tokens, W windows, S sets, K slots of a set.
A window with n tokens has s = ceil(n / K) sets. Its tokens are sorted, and slot t of set k takes the token of rank
floor((k K + t) n / (s K)). So every token is in exactly one set; a slot that repeats the one before it is padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...positions import Positions


class Windows(NamedTuple):
    """Tokens by window."""

    order: Tensor  # (T,) tokens, window after window, sorted within each
    counts: Tensor  # (W,) tokens of each window
    inside: Tensor  # (T, 2) the cell of each token within its window


class Partition(NamedTuple):
    """Sets of one space, with the positions of their tokens, so that the two cannot disagree."""

    tokens: Tensor  # (S, K) the token in each slot
    mask: Tensor  # (S, K) True where a token belongs; False for a slot that repeats the one before
    slot: Tensor  # (T,) the slot, of S K, where each token belongs
    positions: Positions  # (1, T, 2) counted from the middle of a token's window, in cells

    @property
    def in_sets(self) -> Positions:
        """Positions (S, K, 2) of the slots, made once."""
        return self.positions.once(("sets",), lambda: self.positions.gather(self.tokens))


def windows(cells: Tensor, group: Tensor, side: int, shift: int, major: str) -> Windows:
    """Windows of side x side cells, moved by `shift` cells, of tokens in cells (T, 2) of a group (T,), such as a sample
    or a view of one. major: the axis, "x" or "y", by which tokens are sorted first. Ties keep their order."""
    if major not in ("x", "y"):
        raise ValueError(f"major must be 'x' or 'y', got {major!r}")
    moved = cells + shift
    at = torch.div(moved, side, rounding_mode="floor")
    inside = moved - at * side
    if not len(cells):
        return Windows(group.new_zeros(0), group.new_zeros(0), inside)
    at = at - at.amin(0)
    nx, ny = (at.amax(0) + 1).tolist()
    first, second = (inside[:, 1], inside[:, 0]) if major == "y" else (inside[:, 0], inside[:, 1])
    window = (group * nx + at[:, 0]) * ny + at[:, 1]
    key, order = torch.sort((window * side + first) * side + second, stable=True)
    counts = torch.unique_consecutive(key // side**2, return_counts=True)[1]
    return Windows(order, counts, inside)


def sets(order: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sets of `size` slots: tokens (S, K), mask (S, K) and slot (T,), as in `Partition`."""
    number = -torch.div(-counts, size, rounding_mode="floor")  # of sets of each window
    window = torch.repeat_interleave(torch.arange(len(counts), device=order.device), number)
    first = (number.cumsum(0) - number)[window]
    k = torch.arange(len(window), device=order.device) - first
    t = torch.arange(size, device=order.device)
    n, begin = counts[window, None], (counts.cumsum(0) - counts)[window, None]
    rank = begin + torch.div((k[:, None] * size + t) * n, number[window, None] * size, rounding_mode="floor")
    mask = torch.ones_like(rank, dtype=torch.bool)
    mask[:, 1:] = rank[:, 1:] != rank[:, :-1]
    tokens = order[rank] if len(order) else rank
    slot = torch.empty_like(order)
    slot[tokens[mask]] = mask.flatten().nonzero()[:, 0]
    return tokens, mask, slot


def partition(
    cells: Tensor,
    group: Tensor,
    *,
    side: int,
    shift: int,
    size: int,
    major: str,
    scale: float = 1.0,
    fraction: Tensor | None = None,
) -> Partition:
    """Sets of tokens in cells (T, 2). scale: multiplies positions. fraction (T, 2): where a token is within its cell,
    counted from the cell's middle; by default there."""
    order, counts, inside = windows(cells, group, side, shift, major)
    at = inside.float() - side // 2
    at = at if fraction is None else at + fraction
    return Partition(*sets(order, counts, size), Positions((at * scale)[None], unplaced=False))


def join(first: Partition, second: Partition) -> Partition:
    """Both partitions as one; tokens of the second come after those of the first."""
    count, slots = len(first.slot), first.tokens.numel()
    return Partition(
        torch.cat([first.tokens, second.tokens + count]),
        torch.cat([first.mask, second.mask]),
        torch.cat([first.slot, second.slot + slots]),
        Positions.cat([first.positions, second.positions]),
    )
