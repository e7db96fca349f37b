"""Augmentations of images with boxes: uint8 (3, H, W) and boxes (M, 4), XYXY in pixels, edges as real numbers.

A box follows every pixel: what moves pixels moves its edges, and what leaves the image is cut off. `randaug_like` is
what the released code does: a flip, then two of eleven operations with fixed strengths. `lsj` is the large scale jitter
of the paper's text: an image is resized by a random factor, cropped and padded, and gets two operations on colours.

All that is random comes from one generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]
from torchvision.transforms.v2 import functional as F  # type: ignore[import-untyped]

MODES = ("randaug_like", "lsj")
PAD = (124, 116, 104)  # the mean colour of ImageNet
Pair = tuple[Tensor, Tensor]  # image, boxes


@dataclass(frozen=True, kw_only=True)
class BoxAugment:
    """How a training image and its boxes are varied. flip: probability of a horizontal flip, which comes first. slots:
    how many operations are drawn, each evenly and with replacement. scale: range of the factor of the scale jitter; the
    side that fits decides what 1 is."""

    mode: str = "randaug_like"
    flip: float = 0.5
    slots: int = 2
    scale: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be from 0 to 1, got {self.flip!r}")
        if not 0 <= self.slots <= 16:
            raise ValueError(f"slots must be from 0 to 16, got {self.slots!r}")
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 16:
            raise ValueError(f"scale must be two numbers above 0 and up to 16, the smaller first, got {self.scale!r}")


def augment(image: Tensor, boxes: Tensor, settings: BoxAugment, size: tuple[int, int], generator: Generator) -> Pair:
    """A varied image and its boxes, of which some may be empty now. size: what the network sees, height and width; with
    "lsj" the result has it, with "randaug_like" the image is still to be resized."""
    if uniform(0, 1, generator) < settings.flip:
        image, boxes = flip(image, boxes)
    names = list(COLOURS)
    if settings.mode == "randaug_like":
        names += ["translate", "scale_jitter"]
    else:
        image, boxes = jitter_and_crop(image, boxes, size, generator, settings.scale)
    for _ in range(settings.slots):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        if name == "scale_jitter":
            image, boxes = scale_jitter(image, boxes, size, generator, settings.scale)
        elif name == "translate":
            image, boxes = translate(image, boxes, generator)
        else:
            image = COLOURS[name](image, generator)
    return image, boxes


def uniform(low: float, high: float, generator: Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def flip(image: Tensor, boxes: Tensor) -> Pair:
    """Left becomes right."""
    width = image.shape[-1]
    left, top, right, bottom = boxes.unbind(1)
    return image.flip(-1), torch.stack([width - right, top, width - left, bottom], dim=1)


def translate(image: Tensor, boxes: Tensor, generator: Generator, share: float = 0.14) -> Pair:
    """By up to a share of each side, in whole pixels. What is uncovered is black."""
    height, width = image.shape[-2:]
    dx, dy = (round(uniform(-share * side, share * side, generator)) for side in (width, height))
    return shift(image, boxes, dx, dy)


def shift(image: Tensor, boxes: Tensor, dx: int, dy: int) -> Pair:
    """Pixels move to the right and down."""
    height, width = image.shape[-2:]
    moved = torch.zeros_like(image)
    to_x, to_y = slice(max(0, dx), max(0, width + min(0, dx))), slice(max(0, dy), max(0, height + min(0, dy)))
    from_x, from_y = slice(max(0, -dx), max(0, width - max(0, dx))), slice(max(0, -dy), max(0, height - max(0, dy)))
    moved[:, to_y, to_x] = image[:, from_y, from_x]
    return moved, clip(boxes + torch.tensor([dx, dy, dx, dy]).to(boxes), height, width)


def resize(image: Tensor, boxes: Tensor, size: tuple[int, int]) -> Pair:
    """To a height and a width; bilinear, antialiased."""
    height, width = image.shape[-2:]
    if size == (height, width):
        return image, boxes
    factor = torch.tensor([size[1] / width, size[0] / height] * 2, dtype=boxes.dtype)
    return F.resize(image, list(size), InterpolationMode.BILINEAR, antialias=True), boxes * factor


def scale_jitter(
    image: Tensor, boxes: Tensor, size: tuple[int, int], generator: Generator, scale: tuple[float, float] = (0.1, 2.0)
) -> Pair:
    """Resizes by a random factor, without crop or padding. If another resize to a fixed size follows, as in the
    released code, all that is left of it is a blur."""
    height, width = image.shape[-2:]
    factor = uniform(*scale, generator) * min(size[0] / height, size[1] / width)
    return resize(image, boxes, (max(1, int(height * factor)), max(1, int(width * factor))))


def jitter_and_crop(
    image: Tensor, boxes: Tensor, size: tuple[int, int], generator: Generator, scale: tuple[float, float] = (0.1, 2.0)
) -> Pair:
    """Large scale jitter: a random factor of the size that fits, a random window, padding to the right and below."""
    height, width = image.shape[-2:]
    factor = uniform(*scale, generator) * min(size[0] / height, size[1] / width)
    image, boxes = resize(image, boxes, (max(1, round(height * factor)), max(1, round(width * factor))))
    offsets = [
        round(max(0, side - most) * uniform(0, 1, generator)) for side, most in zip(image.shape[-2:], size, strict=True)
    ]
    image = image[:, offsets[0] : offsets[0] + size[0], offsets[1] : offsets[1] + size[1]]
    boxes = boxes - torch.tensor([offsets[1], offsets[0]] * 2).to(boxes)
    return pad(image, size), clip(boxes, *image.shape[-2:])


def pad(image: Tensor, size: tuple[int, int]) -> Tensor:
    """With the mean colour, to the right and below."""
    height, width = image.shape[-2:]
    if size == (height, width):
        return image
    full = torch.tensor(PAD, dtype=torch.uint8)[:, None, None].repeat(1, *size)
    full[:, :height, :width] = image
    return full


def clip(boxes: Tensor, height: int, width: int) -> Tensor:
    """Cut to the image."""
    most = torch.tensor([width, height] * 2).to(boxes)
    return torch.minimum(boxes.clamp(min=0), most)


def sanitize(boxes: Tensor, height: int, width: int, least: float = 1.0) -> tuple[Tensor, Tensor]:
    """Boxes cut to the image, and which of them (M,) still have both sides of at least so many pixels."""
    boxes = clip(boxes, height, width)
    return boxes, ((boxes[:, 2:] - boxes[:, :2]) >= least).all(1)


def _saturation_and_hue(image: Tensor, generator: Generator) -> Tensor:
    saturation, hue = uniform(0.68, 1.32, generator), uniform(-0.16, 0.16, generator)
    if uniform(0, 1, generator) < 0.5:
        return F.adjust_hue(F.adjust_saturation(image, saturation), hue)
    return F.adjust_saturation(F.adjust_hue(image, hue), saturation)


COLOURS: dict[str, Callable[[Tensor, Generator], Any]] = {
    "identity": lambda image, g: image,
    "brightness": lambda image, g: F.adjust_brightness(image, uniform(0.68, 1.32, g)),
    "saturation_and_hue": _saturation_and_hue,
    "contrast": lambda image, g: F.adjust_contrast(image, uniform(0.68, 1.32, g)),
    "sharpness": lambda image, g: F.adjust_sharpness(image, 0.32),
    "posterize": lambda image, g: F.posterize(image, 7),
    "solarize": lambda image, g: F.solarize(image, 178.5),
    "autocontrast": lambda image, g: F.autocontrast(image),
    "equalize": lambda image, g: F.equalize(image),
}
