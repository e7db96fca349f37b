"""Variation of point clouds, as Point Transformer V3 is trained with. All chance comes from the given generator.

The steps run in the order of the fields of `PointAugment`; chances are independent draws. Angles are shares of pi.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import FormatError
from ..points import Cloud, flipped, scaled, turned

Array = np.ndarray[Any, Any]
MOST_NODES = 2**23  # of the grid of an elastic distortion


@dataclass(frozen=True, kw_only=True)
class PointAugment:
    """ScanNet's variation.

    dropout: chance that the share `dropout_share` of the points is left out. turn: largest angle about z, with chance
    turn_chance; tilt: about x and about y, through the middle of the box, with tilt_chance each. scale: range of a
    factor, one for each axis if anisotropic. shift: largest shift along each axis. flip: chance to negate x, and y.
    jitter: deviation of normal noise on coordinates, cut at jitter_limit. elastic: chance of distortions, one after
    another, by (grain, size) in metres. contrast: chance to stretch colours; tint and grain: chances of one offset for
    all points and of one for each, of which tint_range and grain_range are the size. shuffle: the points of a sample,
    one per cell, come in random order.
    compat="official" stretches a constant channel to 0, as the original does; "" leaves it as it is.
    """

    dropout: float = 0.2
    dropout_share: float = 0.2
    turn: float = 1.0
    turn_chance: float = 0.5
    tilt: float = 1 / 64
    tilt_chance: float = 0.5
    scale: tuple[float, float] = (0.9, 1.1)
    anisotropic: bool = False
    shift: float = 0.0
    flip: float = 0.5
    jitter: float = 0.005
    jitter_limit: float = 0.02
    elastic: float = 0.95
    elastic_passes: tuple[Any, ...] = ((0.2, 0.4), (0.8, 1.6))
    contrast: float = 0.2
    tint: float = 0.95
    tint_range: float = 0.05
    grain: float = 0.95
    grain_range: float = 0.05
    shuffle: bool = False
    compat: str = ""

    def __post_init__(self) -> None:
        for name in ("dropout", "turn_chance", "tilt_chance", "flip", "elastic", "contrast", "tint", "grain"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a chance from 0 to 1, got {getattr(self, name)}")
        for name in ("turn", "tilt", "shift", "jitter", "jitter_limit", "tint_range", "grain_range"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.dropout_share < 1:
            raise ValueError(f"dropout_share must be from 0 to below 1, got {self.dropout_share}")
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] < np.inf:
            raise ValueError(f"scale must be two positive numbers in order, got {self.scale}")
        if any(len(step) != 2 or not step[0] > 0 for step in self.elastic_passes):
            raise ValueError(f"elastic_passes must be pairs of a positive grain and a size, got {self.elastic_passes}")
        if self.compat not in ("", "official"):
            raise ValueError(f"compat must be empty or official, got {self.compat!r}")


def vary(cloud: Cloud, rng: np.random.Generator, by: PointAugment) -> Cloud:
    """A varied copy of a cloud; the given arrays are never written to."""
    if rng.random() < by.dropout:
        count = max(1, int(len(cloud) * (1 - by.dropout_share)))
        cloud = cloud.select(rng.choice(len(cloud), count, replace=False))
    if by.turn and rng.random() < by.turn_chance:
        cloud = turned(cloud, 2, np.pi * rng.uniform(-by.turn, by.turn))
    for axis in (0, 1):
        if by.tilt and rng.random() < by.tilt_chance:
            center = (cloud.coord.min(0) + cloud.coord.max(0)) / 2
            cloud = turned(cloud, axis, np.pi * rng.uniform(-by.tilt, by.tilt), center)
    if by.scale != (1.0, 1.0):
        cloud = scaled(cloud, rng.uniform(*by.scale, 3 if by.anisotropic else None))
    if by.shift:
        cloud = replace(cloud, coord=cloud.coord + rng.uniform(-by.shift, by.shift, 3))
    if by.flip:
        cloud = flipped(cloud, tuple(axis for axis in (0, 1) if rng.random() < by.flip))
    if by.jitter:
        noise = np.clip(rng.normal(0, by.jitter, cloud.coord.shape), -by.jitter_limit, by.jitter_limit)
        cloud = replace(cloud, coord=cloud.coord + noise)
    if by.elastic_passes and rng.random() < by.elastic:
        coord = cloud.coord
        for grain, size in by.elastic_passes:
            coord = elastic(coord, rng.standard_normal((*nodes(coord, grain), 3)), grain, size)
        cloud = replace(cloud, coord=coord)
    if cloud.color is not None:
        cloud = replace(cloud, color=_colors(cloud.color, rng, by))
    return cloud


def _colors(color: Array, rng: np.random.Generator, by: PointAugment) -> Array:
    color = color.astype(np.float32)
    if rng.random() < by.contrast:
        color = stretched(color, rng.random(), by.compat)
    if rng.random() < by.tint:
        color = (color + 255 * rng.uniform(-by.tint_range, by.tint_range, 3)).clip(0, 255)
    if rng.random() < by.grain:
        color = (color + 255 * rng.normal(0, by.grain_range, color.shape)).clip(0, 255)
    return color


def stretched(color: Array, blend: float, compat: str = "") -> Array:
    """Colours whose channels were stretched to 0..255, by the share `blend`. A constant channel stays as it is, or,
    with compat="official" and another channel that is not constant, is drawn to 0."""
    low, high = color.min(0), color.max(0)
    flat = high == low
    if flat.all():
        return color
    wide = (color - low) * (255 / np.where(flat, 255, high - low))
    return (1 - blend) * color + blend * np.where(flat & (compat != "official"), color, wide)


def nodes(coord: Array, grain: float) -> tuple[int, int, int]:
    """The shape of the grid of noise that covers a cloud."""
    shape = (coord.max(0) - coord.min(0)) // grain + 3
    if not np.prod(shape) <= MOST_NODES:
        told = f"{' x '.join(f'{side:.0f}' for side in shape)} nodes of {grain}"
        raise FormatError(f"a cloud that spans {told}, which is too large for an elastic distortion; check its unit")
    x, y, z = shape.astype(int).tolist()
    return x, y, z


def elastic(coord: Array, noise: Array, grain: float, size: float) -> Array:
    """Points (n, 3) moved by `size` times smooth noise: the grid (X, Y, Z, 3), blurred twice by three nodes along each
    axis, between its nodes linear."""
    for _ in range(2):
        for axis in range(3):
            pad = np.pad(noise, [(1, 1) if d == axis else (0, 0) for d in range(4)])
            side = noise.shape[axis]
            noise = np.stack([pad.take(range(i, i + side), axis) for i in range(3)]).mean(0)
    at = (coord - (coord.min(0) - grain)) / grain  # in nodes
    low = np.floor(at).astype(int).clip(0, np.array(noise.shape[:3]) - 2)
    share = at - low
    moved = np.zeros(coord.shape)
    for corner in np.ndindex(2, 2, 2):
        weight = np.where(corner, share, 1 - share).prod(1, keepdims=True)
        moved += weight * noise[tuple((low + corner).T)]
    return coord + size * moved
