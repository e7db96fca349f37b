"""Variation of driving scenes: of the world, which LiDAR points and boxes follow, and of each camera image.

Both are matrices as well: a network that maps LiDAR to pixels needs to know what was done. Pixels are (column, row).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from .. import rigid
from ..nuscenes_classes import CLASSES

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class DrivingAugment:
    """How training samples are varied; the defaults are UniTR's.

    Images: resize is the range of factors, image_flip a chance, image_turn the largest angle in degrees. World: flip is
    the chance of each of two mirrorings, turn the largest angle in radians, scale the range of factors, shift the
    deviation in metres along each axis. paste: up to how many objects of each class a frame is filled with objects of
    other frames; least_points: of such an object; paste_weight: of its picture over what was there; paste_epochs: how
    many epochs do so, from the first on, after which frames are as they are.
    """

    resize: tuple[float, float] = (0.38, 0.55)
    image_flip: float = 0.5
    image_turn: float = 5.4
    flip: float = 0.5
    turn: float = math.pi / 4
    scale: tuple[float, float] = (0.9, 1.1)
    shift: float = 0.5
    paste: tuple[int, ...] = (2, 3, 7, 4, 6, 2, 6, 6, 2, 2)
    least_points: int = 5
    paste_weight: float = 0.7
    paste_epochs: int = 8

    def __post_init__(self) -> None:
        for name in ("resize", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high < 100:
                raise ValueError(f"{name} must be two positive numbers, the smaller first, got {low}, {high}")
        for name in ("image_flip", "flip", "paste_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        for name in ("image_turn", "turn", "shift", "least_points", "paste_epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if len(self.paste) != len(CLASSES) or any(type(n) is not int or not 0 <= n <= 100 for n in self.paste):
            raise ValueError(
                f"paste must be {len(CLASSES)} whole numbers from 0 to 100, a class each, got {self.paste}"
            )


@dataclass(frozen=True)
class ImageView:
    """What becomes of an image: resized, cut to (width, height) from (left, top) on, mirrored, turned."""

    resize: float
    left: int
    top: int
    width: int
    height: int
    flip: bool = False
    degrees: float = 0.0

    @property
    def matrix(self) -> Array:
        """4 x 4: pixels of the file to pixels of the result, 2 x 2 in the corner and a translation in column 3."""
        turn, shift = np.eye(2) * self.resize, -np.array([self.left, self.top], np.float64)
        if self.flip:
            mirror = np.diag([-1.0, 1.0])
            turn, shift = mirror @ turn, mirror @ shift + [self.width, 0]
        c, s = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        q, middle = np.array([[c, s], [-s, c]]), np.array([self.width, self.height]) / 2
        found = np.eye(4)
        found[:2, :2], found[:2, 3] = q @ turn, q @ shift + middle - q @ middle
        return found

    def apply(self, image: Image.Image) -> Image.Image:
        """What lies outside of the image is black."""
        size = (int(image.width * self.resize), int(image.height * self.resize))
        image = image.resize(size, Image.Resampling.BICUBIC)
        image = image.crop((self.left, self.top, self.left + self.width, self.top + self.height))
        if self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image.rotate(self.degrees) if self.degrees else image


def fixed_view(width: int, height: int, size: tuple[int, int], resize: float) -> ImageView:
    """How an image of width x height is evaluated at a size (height, width): the middle of its lowest rows."""
    wide, high = int(width * resize), int(height * resize)
    return ImageView(resize, int(max(0, wide - size[1]) / 2), high - size[0], size[1], size[0])


def random_view(
    width: int, height: int, size: tuple[int, int], augment: DrivingAugment, rng: np.random.Generator
) -> ImageView:
    resize = float(rng.uniform(*augment.resize))
    wide, high = int(width * resize), int(height * resize)
    left = int(rng.uniform(0, max(0, wide - size[1])))
    flip = bool(rng.random() < augment.image_flip)
    degrees = float(rng.uniform(-augment.image_turn, augment.image_turn))
    return ImageView(resize, left, high - size[0], size[1], size[0], flip, degrees)


@dataclass(frozen=True)
class World:
    """What becomes of the world: mirrored across the x axis and the y axis, turned, scaled, shifted; in this order."""

    across_x: bool = False
    across_y: bool = False
    turn: float = 0.0
    scale: float = 1.0
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def matrix(self) -> Array:
        """4 x 4: LiDAR frame to the varied one."""
        mirror = np.diag([-1.0 if self.across_y else 1.0, -1.0 if self.across_x else 1.0, 1.0])
        return rigid.transform(self.scale * rigid.turn(self.turn) @ mirror, self.shift)

    def boxes(self, boxes: Array) -> Array:
        """Of boxes (M, 9): x, y, z, size, yaw, vx, vy."""
        matrix, found = self.matrix, boxes.copy()
        found[:, :3] = rigid.apply(matrix, boxes[:, :3])
        found[:, 3:6] *= self.scale
        yaw = -boxes[:, 6] if self.across_x else boxes[:, 6]
        yaw = -(yaw + np.pi) if self.across_y else yaw
        found[:, 6] = rigid.wrap(yaw + self.turn)
        found[:, 7:9] = boxes[:, 7:9] @ matrix[:2, :2].T
        return found


def random_world(augment: DrivingAugment, rng: np.random.Generator) -> World:
    across_x, across_y = (bool(rng.random() < augment.flip) for _ in range(2))
    turn, scale = float(rng.uniform(-augment.turn, augment.turn)), float(rng.uniform(*augment.scale))
    x, y, z = (float(value) for value in rng.normal(0, augment.shift, 3))
    return World(across_x, across_y, turn, scale, (x, y, z))
