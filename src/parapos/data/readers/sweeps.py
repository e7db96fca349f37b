"""LiDAR sweeps of nuScenes: points as five float32, little-endian: x, y, z in metres, intensity from 0 to 255, ring.

There is no header, although file names end in .pcd.bin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import FormatError
from . import read_bytes, wrong

Array = np.ndarray[Any, Any]
VALUES = 5  # of a point
MOST_BYTES = 2**28  # 13 million points; a sweep has about 35,000
FARTHEST = 1e6  # metres


def read(path: str | Path) -> Array:
    """The points of a sweep, float32 (n, 5). An empty file has none."""
    data = read_bytes(path, MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise wrong(path, MOST_BYTES, f"more than {MOST_BYTES} bytes, expected one sweep")
    whole = len(data) // (4 * VALUES) * (4 * VALUES)
    if whole < len(data):
        told = f"the file ends within a point: {len(data)} bytes, expected a multiple of {4 * VALUES}"
        raise wrong(path, whole, told)
    points = np.frombuffer(data, "<f4").reshape(-1, VALUES).astype(np.float32)
    with np.errstate(invalid="ignore"):
        bad = ~(np.isfinite(points).all(1) & (np.abs(points[:, :3]) < FARTHEST).all(1))
    if bad.any():
        row = int(bad.argmax())
        told = f"point {row} is {points[row].tolist()}, expected finite numbers of metres"
        raise wrong(path, row * 4 * VALUES, told)
    return points


def write(path: str | Path, points: Array) -> None:
    """Writes points (n, 5)."""
    Path(path).write_bytes(np.ascontiguousarray(points, "<f4").tobytes())


__all__ = ["FormatError", "read", "write"]
