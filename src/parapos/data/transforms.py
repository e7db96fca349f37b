"""Image pipelines on uint8 tensors (3, H, W), from torchvision's v2 transforms; what comes out is float in [0, 1].

The released code never normalises by mean and standard deviation; `normalize=True` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2  # type: ignore[import-untyped]

from . import FormatError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = 0.875  # side of the crop over the shorter side, at every resolution
MAX_RESIZED = 1024**3 // 3  # pixels of a resized image; 1 GiB of RGB
Size = int | Sequence[int]  # height and width in pixels, or one number for both


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How a training image is varied: a crop of random area and shape, a flip, then RandAugment.

    scale is the range of the crop's share of the area, ratio that of its width over height. ops of RandAugment are
    drawn per image, each at `magnitude` of 31 bins; ops = 0 leaves it out.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            pair = getattr(self, name)
            if len(pair) != 2 or not 0 < pair[0] <= pair[1]:
                raise ValueError(f"{name} must be two positive numbers, the smaller first, got {pair!r}")
        if self.scale[1] > 1:
            raise ValueError(f"scale must end at 1 or below, got {self.scale!r}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be a probability, got {self.flip!r}")
        if self.ops < 0:
            raise ValueError(f"ops must be 0 or more, got {self.ops!r}")
        if not 0 <= self.magnitude < 31:
            raise ValueError(f"magnitude must be from 0 to 30, got {self.magnitude!r}")


def train_transform(size: Size, augment: Augment | None = None, *, normalize: bool = False) -> nn.Module:
    """Random: crop and resize to the size, flip, RandAugment, float. The crop's ratio is by the size's: stretched by as
    much whatever the size is."""
    height, width = sides(size)
    augment = augment or Augment()
    low, high = (ratio * (width / height) for ratio in augment.ratio)
    steps: list[nn.Module] = [
        v2.RandomResizedCrop((height, width), augment.scale, (low, high), InterpolationMode.BILINEAR, antialias=True),
        v2.RandomHorizontalFlip(augment.flip),
    ]
    if augment.ops:
        steps.append(v2.RandAugment(augment.ops, augment.magnitude, interpolation=InterpolationMode.NEAREST))
    return nn.Sequential(*steps, *_to_float(normalize))


def eval_transform(size: Size, *, crop: float = CROP, normalize: bool = False) -> nn.Module:
    """Deterministic: resize to just cover int(side / crop) of both sides, cut the size from the centre, float."""
    height, width = sides(size)
    if not 0 < crop <= 1:
        raise ValueError(f"crop must be in (0, 1], got {crop!r}")
    cover = ResizeShorter(int(height / crop), int(width / crop))
    return nn.Sequential(cover, v2.CenterCrop((height, width)), *_to_float(normalize))


class ResizeShorter(nn.Module):
    """Makes the side that is shorter, by the proportions given, exactly what is given, and the other one in proportion,
    rounded down. Without a width, it is the height. Bilinear, antialiased."""

    def __init__(self, height: int, width: int | None = None) -> None:
        super().__init__()
        self.height, self.width = height, width or height

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        if self.width * height > self.height * width:  # the image is slimmer: its width decides
            size = [self.width * height // width, self.width]
        else:
            size = [self.height, self.height * width // height]
        if math.prod(size) > MAX_RESIZED:
            told = f"image of {width} x {height} would become {size[1]} x {size[0]}"
            raise FormatError(f"{told}, expected at most {MAX_RESIZED} pixels in all")
        return v2.functional.resize(image, size, InterpolationMode.BILINEAR, antialias=True)


def _to_float(normalize: bool) -> list[nn.Module]:
    steps: list[nn.Module] = [v2.ToDtype(torch.float32, scale=True)]
    return [*steps, v2.Normalize(MEAN, STD)] if normalize else steps


def sides(size: Size) -> tuple[int, int]:
    """Height and width; ValueError if they are not."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(type(side) is int and side >= 1 for side in pair):
        expected = "at least 1" if isinstance(size, int) else "a height and a width of at least 1"
        raise ValueError(f"size must be {expected}, got {size!r}")
    return pair
