"""Sensor files of a nuScenes keyframe: LiDAR sweeps brought into one frame, and camera images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import FormatError
from .images import read_image
from .nuscenes_frames import Camera, Frame
from .readers import sweeps as sweep_files

Array = np.ndarray[Any, Any]
NEAR = 1.0  # metres around the sensor in which points of older sweeps are the car itself


def sweep_points(root: Path, frame: Frame, count: int) -> Array:
    """float32 (n, 5) x, y, z, intensity, lag in the LiDAR frame of the keyframe and of count - 1 older sweeps. At the
    start of a scene, which has fewer, the oldest one is repeated, as in OpenPCDet."""
    used = frame.sweeps[:count]
    parts: list[Array] = []
    for number in range(count):
        if number >= max(2, len(used)):
            parts.append(parts[-1])
            continue
        sweep = used[min(number, len(used) - 1)]
        points = read_sweep(root, sweep.file, sweep.token)
        if number:
            points = points[(np.abs(points[:, :2]) >= NEAR).any(1)]
        moved = points[:, :3] @ sweep.transform[:3, :3].T + sweep.transform[:3, 3]
        lag = np.full((len(points), 1), sweep.lag)
        parts.append(np.concatenate([moved, points[:, 3:4], lag], 1).astype(np.float32))
    return np.concatenate(parts)


def read_sweep(root: Path, file: str, token: str) -> Array:
    """The points of a sweep. FormatError names the file, and its row of sample_data."""
    try:
        return sweep_files.read(root / file)
    except FormatError as error:
        raise FormatError(f"{error}; sample_data {token}") from None
    except OSError as error:
        raise FormatError(f"{root / file}: {error.strerror or error}; sample_data {token}") from None


def read_camera(root: Path, camera: Camera) -> Image.Image:
    """An image, which must have the size that its row of sample_data says."""
    path = root / camera.file
    try:
        pixels = read_image(path, upright=False)
    except FormatError as error:
        raise FormatError(f"{error}; sample_data {camera.token}") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; sample_data {camera.token}") from None
    if pixels.shape[1:] != (camera.height, camera.width):
        told = f"{pixels.shape[2]} x {pixels.shape[1]} pixels, expected {camera.width} x {camera.height}"
        raise FormatError(f"{path}: {told} as in sample_data {camera.token}")
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())
