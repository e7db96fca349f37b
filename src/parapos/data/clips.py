"""Which frames of a clip a model sees, and as which numbers.

Up to K = 5 tubelets of 2 frames are taken from the start of a clip, in training as in testing. A shorter clip has fewer
tubelets. A clip of one frame has it twice. The paper has "10 frames separating consecutive 2-tubelets", which can be
read in two ways; `SPACINGS` names both:

    starts  10 frames from the start of a tubelet to the next start, as in the released code: 0, 1, 10, 11, ..., 40, 41
    gaps    10 unused frames between two tubelets: 0, 1, 12, 13, ..., 48, 49
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2  # type: ignore[import-untyped]

from .readers.video import read_frames
from .transforms import MEAN, STD

TUBELET, TUBELETS = 2, 5  # frames of a tubelet, tubelets of a clip
SPACINGS = {"starts": 10, "gaps": 10 + TUBELET}  # frames from the start of a tubelet to the next start
SCALES = ("raw255", "unit", "imagenet")


def frame_indices(spacing: str = "starts") -> tuple[int, ...]:
    """The frames of all tubelets, counted from 0."""
    return tuple(SPACINGS[spacing] * k + i for k in range(TUBELETS) for i in range(TUBELET))


def complete_tubelets(frames: int, spacing: str = "starts") -> int:
    """How many tubelets a clip of so many frames has in full."""
    return min(TUBELETS, (frames - TUBELET) // SPACINGS[spacing] + 1) if frames >= TUBELET else 0


def read_clip(path: str | Path, spacing: str = "starts") -> tuple[Tensor, str]:
    """The frames of a clip's K complete tubelets, uint8 (2K, 3, H, W), and why decoding ended too early, if it did.

    A single frame is repeated, so K is at least 1. Frames are of the size of the first one.
    """
    indices = frame_indices(spacing)
    found = read_frames(path, indices)
    count = TUBELET * complete_tubelets(found.count, spacing)
    images = [found.images[i] for i in indices[:count]] or [found.images[0]] * TUBELET
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


def unscale_pixels(frames: Tensor, scale: str) -> Tensor:
    """Frames as `scale_pixels` gives them as pictures, from 0 to 1."""
    if scale == "imagenet":
        mean, std = (frames.new_tensor(values)[:, None, None] for values in (MEAN, STD))
        frames = frames * std + mean
    return (frames / 255 if scale == "raw255" else frames).clamp(0, 1)
