"""Which sample, in which epoch, on which process, with which randomness.

Everything here is arithmetic on (seed, epoch, step): nothing depends on workers or processes, and nothing is state that
a checkpoint would have to hold. One optimizer step takes a global batch, which is cut into parts; processes share the
parts out, so any number of processes that divides the number of parts sees the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Key(NamedTuple):
    """A sample of a dataset in an epoch."""

    index: int  # type: ignore[assignment] # hides tuple.index
    epoch: int


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64-bit seed of a sample's randomness: the first 8 bytes, little-endian, of blake2b over "seed/epoch/index"."""
    return _hash(f"{seed}/{epoch}/{index}")


def order_seed(seed: int, epoch: int) -> int:
    """64-bit seed of an epoch's order: the same hash over "seed/epoch/order"."""
    return _hash(f"{seed}/{epoch}/order")


def step_seed(seed: int, step: int, part: int) -> int:
    """64-bit seed of what a model draws for a part of a step's batch: the same hash over "seed/step/step/part"."""
    return _hash(f"{seed}/step/{step}/{part}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation (samples,) in which an epoch visits a dataset."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(order_seed(seed, epoch)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How training walks through a dataset: steps of `batch` samples, each cut into parts of at most `part` samples.

    Process `rank` of `world` takes parts rank, rank + world, ... one after the other. The last step of an epoch has
    what is left, spread evenly over all parts; a part may then be empty.
    """

    samples: int
    batch: int
    part: int
    seed: int = 0
    world: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "part", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be in 0..{self.world - 1}, got {self.rank}")
        if self.batch % (self.part * self.world):
            told = f"part {self.part} x {self.world} processes"
            raise ValueError(f"batch must be a multiple of {told} = {self.part * self.world}, got {self.batch}")

    @property
    def parts(self) -> int:
        """Parts of a step, over all processes."""
        return self.batch // self.part

    @property
    def accumulate(self) -> int:
        """Parts of a step that one process takes."""
        return self.parts // self.world

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last one may be smaller."""
        return -(-self.samples // self.batch)

    def size(self, step: int) -> int:
        """Samples of a step, counted from the start of training."""
        start = step % self.steps * self.batch
        return min(self.batch, self.samples - start)

    def keys(self, step: int, part: int) -> list[Key]:
        """The samples of a part of a step; none if the step has fewer samples than parts."""
        epoch, step_of_epoch = divmod(step, self.steps)
        size, start = self.size(step), step_of_epoch * self.batch
        first, last = (start + size * p // self.parts for p in (part, part + 1))
        return [Key(i, epoch) for i in epoch_order(self.samples, self.seed, epoch)[first:last].tolist()]

    def part_of(self, turn: int) -> int:
        """The part that this process takes at its turn 0, 1, ... in a step."""
        return turn % self.accumulate * self.world + self.rank


class TrainBatches:
    """Batch sampler: this process's parts from step `position()` to the end of that step's epoch.

    An empty part is filled with the first sample of the epoch, so that all processes take the same number of turns;
    `Plan.keys` tells that it must not count.
    """

    def __init__(self, plan: Plan, position: Callable[[], int]) -> None:
        self.plan, self.position = plan, position

    def __iter__(self) -> Iterator[list[Key]]:
        start = self.position()
        epoch = start // self.plan.steps
        for step in range(start, (epoch + 1) * self.plan.steps):
            for turn in range(self.plan.accumulate):
                keys = self.plan.keys(step, self.plan.part_of(turn))
                yield keys or [Key(int(epoch_order(self.plan.samples, self.plan.seed, epoch)[0]), epoch)]


@dataclass(frozen=True, kw_only=True)
class EvalBatches:
    """Batch sampler for evaluation: every sample once, in order, over all processes.

    All processes take the same number of turns. One that has run out gets sample 0, which must not count: `real`.
    """

    samples: int
    batch: int
    world: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return -(-self.samples // (self.batch * self.world))

    def _start(self, turn: int) -> int:
        return (turn * self.world + self.rank) * self.batch

    def real(self, turn: int) -> bool:
        """Whether the batch of this process's turn counts."""
        return self._start(turn) < self.samples

    def __iter__(self) -> Iterator[list[Key]]:
        for turn in range(len(self)):
            start = self._start(turn)
            yield [Key(i, 0) for i in range(start, min(start + self.batch, self.samples))] or [Key(0, 0)]
