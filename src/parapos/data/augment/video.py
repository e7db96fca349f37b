"""How a training clip is varied: a flip, then RandAugment, the same for all of its frames.

T frames, C channels. One draw holds for the whole stack (T, C, H, W), so a static clip stays static; what an operation
computes from the pixels, such as a histogram, it computes per frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2  # type: ignore[import-untyped]


@dataclass(frozen=True, kw_only=True)
class VideoAugment:
    """flip: chance of a horizontal flip. ops of RandAugment are drawn per clip, each at `magnitude` of 31 bins; ops = 0
    leaves it out."""

    flip: float = 0.5
    ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be a probability, got {self.flip!r}")
        if self.ops < 0:
            raise ValueError(f"ops must be 0 or more, got {self.ops!r}")
        if not 0 <= self.magnitude < 31:
            raise ValueError(f"magnitude must be from 0 to 30, got {self.magnitude!r}")

    def transform(self) -> nn.Module:
        """Of uint8 frames (T, 3, H, W); it draws from torch's global generator."""
        steps: list[nn.Module] = [v2.RandomHorizontalFlip(self.flip)]
        if self.ops:
            steps.append(v2.RandAugment(self.ops, self.magnitude, interpolation=InterpolationMode.NEAREST))
        return nn.Sequential(*steps)


def vary(frames: Tensor, transform: nn.Module, seed: int) -> Tensor:
    """A transform of frames, as a function of the seed alone; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return transform(frames)
