"""Which frames of a clip a model sees, and as which numbers.

Of a clip, the frames 0, 1, 10, 11, ..., 40, 41 are taken, in training as in testing: up to K = 5 tubelets of 2 frames.
A shorter clip has fewer. A clip of one frame has it twice.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2  # type: ignore[import-untyped]

from .readers.video import read_frames
from .transforms import MEAN, STD

TUBELET, STRIDE, TUBELETS = 2, 10, 5  # frames of a tubelet, from one start to the next, tubelets of a clip
INDICES = tuple(STRIDE * k + i for k in range(TUBELETS) for i in range(TUBELET))
SCALES = ("raw255", "unit", "imagenet")


def complete_tubelets(frames: int) -> int:
    """How many tubelets a clip of so many frames has in full."""
    return min(TUBELETS, (frames - TUBELET) // STRIDE + 1) if frames >= TUBELET else 0


def read_clip(path: str | Path) -> tuple[Tensor, str]:
    """The frames of a clip's K complete tubelets, uint8 (2K, 3, H, W), and why decoding ended too early, if it did.

    A single frame is repeated, so K is at least 1. Frames are of the size of the first one.
    """
    found = read_frames(path, INDICES)
    count = TUBELET * complete_tubelets(found.count)
    images = [found.images[i] for i in INDICES[:count]] or [found.images[0]] * TUBELET
    frames = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    return torch.stack([resize(frame, *frames[0].shape[1:]) for frame in frames]), found.problem


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """(..., H, W) to (..., height, width): bilinear, antialiased. As they are if they have that size."""
    if frames.shape[-2:] == (height, width):
        return frames
    return v2.functional.resize(frames, [height, width], InterpolationMode.BILINEAR, antialias=True)


def scale_pixels(frames: Tensor, scale: str) -> Tensor:
    """uint8 frames (..., 3, H, W) as float32: 0 to 255, 0 to 1, or also normalised by ImageNet's mean and deviation."""
    if scale == "raw255":
        return frames.float()
    unit = frames.float() / 255
    return unit if scale == "unit" else v2.functional.normalize(unit, MEAN, STD)
