"""Point clouds and what is done to them without chance: cells, fragments, centring, normals, choosing points.

A cloud has n points; cells are cubes of side `size`, counted from 0 at the cloud's lowest corner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import FormatError

Array = np.ndarray[Any, Any]
IGNORED = -1  # the label of points that do not count
MOST_CELLS = 2**16  # per axis, as curves have 16 bits
PACKED = ("feat", "coord", "grid_coord")  # entries with a row per point: a batch has them one after another
GIVES = (*PACKED, "offset")
FEATURES = {"color": 3, "normal": 3, "coord": 3}  # what a point may be described by, and their widths


@dataclass(frozen=True)
class Cloud:
    """coord (n, 3) float, and what else is known of each point: color (n, 3) from 0 to 255, normal (n, 3),
    segment (n,), -1 for points that do not count, cell (n, 3) whole numbers."""

    coord: Array
    color: Array | None = None
    normal: Array | None = None
    segment: Array | None = None
    cell: Array | None = None

    def __len__(self) -> int:
        return len(self.coord)

    def select(self, index: Array) -> Cloud:
        """These points of all arrays."""
        parts = {name: value[index] for name, value in vars(self).items() if value is not None}
        return Cloud(**parts)


def center_shift(coord: Array, *, z: bool = True) -> Array:
    """With the middle of the x and y ranges at 0 and, if wanted, the lowest z."""
    low, high = coord.min(0), coord.max(0)
    x, y, _ = (low + high) / 2
    return coord - np.array([x, y, low[2] if z else 0], coord.dtype)


def normalize(coord: Array) -> Array:
    """With the mean at 0 and the farthest point at distance 1; points that coincide all lie at 0."""
    coord = coord - coord.mean(0)
    radius = np.sqrt((coord**2).sum(1).max())
    return coord / radius if radius > 0 else coord


def cells(coord: Array, size: float, most: int = MOST_CELLS) -> Array:
    """The cell of each point, int64 (n, 3) from 0. There must be less than `most` along each axis."""
    with np.errstate(invalid="ignore"):
        index = np.floor(coord.astype(np.float64) / size)
        extent = index.max(0) - index.min(0)
    if not (extent < most).all():
        told = f"{extent.max():.3g} cells of {size} along an axis, expected less than {most}"
        raise FormatError(f"a cloud of {told}; take larger cells, cut the cloud, or check its unit")
    return (index - index.min(0)).astype(np.int64)


def keys(cell: Array) -> Array:
    """A number for each cell (n,) that no other has."""
    _, y, z = cell.max(0) + 1
    return (cell[:, 0] * y + cell[:, 1]) * z + cell[:, 2]


@dataclass(frozen=True)
class Grouping:
    """Points by cell. members (n,): points, those of a cell side by side in their own order; start, count (m,): where
    the members of each occupied cell lie; inverse (n,): the occupied cell of each point."""

    members: Array
    start: Array
    count: Array
    inverse: Array


def group(cell: Array) -> Grouping:
    """Occupied cells in the order of `keys`."""
    _, inverse, count = np.unique(keys(cell), return_inverse=True, return_counts=True)
    return Grouping(np.argsort(inverse, kind="stable"), np.cumsum(count) - count, count, inverse)


def grid_sample(coord: Array, size: float, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """One point of each cell by chance, all of a cell alike: its index (m,), its cell (m, 3), and for each point which
    of the m stands for its cell, (n,)."""
    cell = cells(coord, size)
    by = group(cell)
    index = by.members[by.start + np.floor(rng.random(len(by.count)) * by.count).astype(np.int64)]
    return index, cell[index], by.inverse


def fragments(coord: Array, size: float) -> Iterator[tuple[Array, Array]]:
    """Index (m,) and cell (m, 3) of one point of each cell, as often as the fullest cell has points: the i-th time each
    cell gives its member i modulo its number, so that every point comes at least once."""
    cell = cells(coord, size)
    by = group(cell)
    for i in range(int(by.count.max())):
        index = by.members[by.start + i % by.count]
        yield index, cell[index]


def sphere_crop(coord: Array, most: int, rng: np.random.Generator) -> Array:
    """The `most` points nearest to one that chance picks, by distance; all in their order if there are not more."""
    if len(coord) <= most:
        return np.arange(len(coord))
    center = coord[rng.integers(len(coord))]
    return np.argsort(((coord - center) ** 2).sum(1), kind="stable")[:most]


def farthest(coord: Array, count: int) -> Array:
    """Indices (count,) of points of which each is the farthest from those before it, from point 0 on."""
    coord = np.ascontiguousarray(coord, np.float64)
    count = min(count, len(coord))
    found = np.zeros(count, np.int64)
    distance = np.full(len(coord), np.inf)
    for i in range(1, count):
        difference = coord - coord[found[i - 1]]
        distance = np.minimum(distance, np.einsum("nd,nd->n", difference, difference))
        found[i] = distance.argmax()
    return found


def face_normals(coord: Array, faces: Array) -> tuple[Array, Array]:
    """Normals (f, 3) of triangles and their areas (f,)."""
    a, b, c = (coord[faces[:, i]].astype(np.float64) for i in range(3))
    cross = np.cross(b - a, c - a)
    length = np.sqrt((cross**2).sum(1)) + 1e-8
    return cross / length[:, None], length / 2


def vertex_normals(coord: Array, faces: Array) -> Array:
    """Normals float32 (n, 3): the sum of the normals of a vertex's triangles by their areas; 0 if it has none."""
    normal, area = face_normals(coord, faces)
    total = np.zeros((len(coord), 3))
    for corner in range(3):
        for axis in range(3):
            total[:, axis] += np.bincount(faces[:, corner], normal[:, axis] * area, len(coord))
    return (total / (np.sqrt((total**2).sum(1, keepdims=True)) + 1e-8)).astype(np.float32)


def sample_mesh(coord: Array, faces: Array, count: int, rng: np.random.Generator) -> Array:
    """Coordinates and normals float32 (count, 6) of points spread evenly over the triangles of a mesh."""
    normal, area = face_normals(coord, faces)
    total = area.sum()
    if not len(faces) or not total > 1e-8 * len(faces):
        raise FormatError("a mesh without area, expected triangles to put points on")
    chosen = rng.choice(len(faces), count, p=area / total)
    u, v = rng.random((2, count, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    a, b, c = (coord[faces[chosen, i]] for i in range(3))
    return np.concatenate([a + u * (b - a) + v * (c - a), normal[chosen]], 1).astype(np.float32)


def features(cloud: Cloud, names: tuple[str, ...]) -> Array:
    """What describes each point, float32 (n, C): colours from 0 to 1, normals, coordinates; 0 for what is missing."""
    parts = []
    for name in names:
        value = getattr(cloud, name)
        value = np.zeros((len(cloud), 3), np.float32) if value is None else value
        parts.append(value / 255 if name == "color" else value)
    return np.concatenate(parts, 1).astype(np.float32)


def check_features(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or not set(names) <= set(FEATURES) or len(set(names)) != len(names):
        raise ValueError(f"features must be some of {', '.join(FEATURES)}, got {', '.join(names) or 'none'}")
    return names


def tensors(cloud: Cloud, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What models take of a cloud whose cells are known."""
    assert cloud.cell is not None
    return {
        "feat": torch.from_numpy(features(cloud, names)),
        "coord": torch.from_numpy(cloud.coord.astype(np.float32)),
        "grid_coord": torch.from_numpy(cloud.cell),
    }


def turned(cloud: Cloud, axis: int, angle: float, center: Array | None = None) -> Cloud:
    """Rotated by the right hand about an axis 0, 1 or 2 through `center`, or the origin; normals too."""
    s, c = np.sin(angle), np.cos(angle)
    i, j = [(1, 2), (2, 0), (0, 1)][axis]
    matrix = np.eye(3)
    matrix[[i, i, j, j], [i, j, i, j]] = c, -s, s, c
    origin = np.zeros(3) if center is None else center
    normal = None if cloud.normal is None else cloud.normal @ matrix.T
    return replace(cloud, coord=(cloud.coord - origin) @ matrix.T + origin, normal=normal)


def scaled(cloud: Cloud, factor: float | Array) -> Cloud:
    return replace(cloud, coord=cloud.coord * factor)


def flipped(cloud: Cloud, axes: tuple[int, ...]) -> Cloud:
    """With these coordinates of points and normals negated."""
    sign = np.ones(3)
    sign[list(axes)] = -1
    return replace(cloud, coord=cloud.coord * sign, normal=None if cloud.normal is None else cloud.normal * sign)
