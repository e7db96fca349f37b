"""Rotations and rigid transforms of 3D space, float64.

Quaternions are (w, x, y, z). A transform is 4 x 4 and takes columns (x, y, z, 1); `compose(a, b)` is a after b, a @ b.
Yaw is counter-clockwise about z, 0 along x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rotation(quaternion: Sequence[float] | Array) -> Array:
    """(..., 4) to (..., 3, 3). Quaternions are scaled to length 1."""
    q = np.asarray(quaternion, np.float64)
    w, x, y, z = np.moveaxis(q / np.linalg.norm(q, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, -1) for row in rows], -2)


def quaternion_of(matrix: Array) -> Array:
    """(3, 3) to (4,), with w >= 0."""
    from scipy.spatial.transform import Rotation

    x, y, z, w = Rotation.from_matrix(matrix).as_quat()
    return np.array([w, x, y, z]) * (1 if w >= 0 else -1)


def turn(yaw: float | Array) -> Array:
    """Rotations (..., 3, 3) about z."""
    c, s = np.cos(yaw), np.sin(yaw)
    zero, one = np.zeros_like(c), np.ones_like(c)
    return np.stack([np.stack(r, -1) for r in ([c, -s, zero], [s, c, zero], [zero, zero, one])], -2)


def yaw_of(matrix: Array) -> Array:
    """Of rotations (..., 3, 3): where they turn the x axis."""
    found: Array = np.arctan2(matrix[..., 1, 0], matrix[..., 0, 0])
    return found


def wrap(angle: Array) -> Array:
    """Angles in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def transform(matrix: Array, translation: Sequence[float] | Array) -> Array:
    """4 x 4 of a 3 x 3 matrix and a translation."""
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = matrix, translation
    return found


def pose(row: dict[str, Any]) -> Array:
    """The transform of a row with a `translation` and a `rotation`: from what it describes to what that stands in."""
    return transform(rotation(row["rotation"]), row["translation"])


def inverse(matrix: Array) -> Array:
    """Of a rigid transform, without solving."""
    r = matrix[:3, :3].T
    return transform(r, -r @ matrix[:3, 3])


def apply(matrix: Array, points: Array) -> Array:
    """Points (n, 3) in another frame."""
    moved: Array = points @ matrix[:3, :3].T + matrix[:3, 3]
    return moved


def corners(boxes: Array) -> Array:
    """(M, 8, 3) of boxes (M, 7+): x, y, z of the centre, size along the heading, across it and up, yaw."""
    signs = np.array([[x, y, z] for z in (-1, 1) for x, y in ((1, 1), (1, -1), (-1, -1), (-1, 1))]) / 2
    local = signs * boxes[:, None, 3:6]
    return np.einsum("mij,mkj->mki", turn(boxes[:, 6]), local) + boxes[:, None, :3]


def inside(points: Array, box: Array) -> Array:
    """Which points (n, 3) lie in a box (7+,), the border counted in."""
    local = (points - box[:3]) @ turn(box[6])
    return (np.abs(local) <= box[3:6] / 2).all(1)
