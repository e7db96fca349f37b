"""What a driving data set hands to UniTR, to its loss and to whoever judges it.

B samples, N points of all of them, V cameras, H x W pixels, G most boxes of a sample.
Frames: LiDAR has x right, y forward, z up, in metres, at the time of the keyframe. A pixel is (column, row), counted
from 0 at the image's upper left corner.

A pillar's centre c of the augmented LiDAR frame is seen by a camera at

    h = lidar2image lidar_aug^-1 (c, 1),   depth = h_z,   raw = (h_x, h_y) / depth,
    pixel = image_aug[:2, :2] raw + image_aug[:2, 3]

A data set that names `packed = ("points",)` and `ragged = ("boxes", "labels")` gets this from `data.batch.collate`.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
CLASSES = (
    "car", "truck", "construction_vehicle", "bus", "trailer",
    "barrier", "motorcycle", "bicycle", "pedestrian", "traffic_cone",
)  # fmt: skip
POINT_FEATURES = ("x", "y", "z", "intensity", "lag")
BOX_FEATURES = ("x", "y", "z", "dx", "dy", "dz", "yaw", "vx", "vy")


class DrivingInputs(TypedDict):
    """The entries that the network takes, in the order of `UniTR.inputs`."""

    points: Tensor
    """(N, 5) float32, samples one after another: x, y, z in the augmented LiDAR frame, intensity as stored (0..255),
    lag in seconds (0 for the keyframe, positive for older sweeps). A sample may have none."""
    offset: Tensor
    """(B,) int64: where the points of each sample end."""
    images: Tensor
    """(B, V, 3, H, W) float32, RGB after resize, crop, flip and rotation, with ImageNet's mean and deviation taken
    out. Cameras stand in the order of `CAMERAS`, which decides which one a pillar belongs to. V may be 0."""
    image_mask: Tensor
    """(B, V) boolean: True where there is an image. A missing camera has False and any finite pixels."""
    lidar2image: Tensor
    """(B, V, 4, 4) float32: LiDAR frame before augmentation -> pixels of the raw image, times depth. A missing camera
    has its calibration too, which still groups pillars, or zeros if that is unknown: nothing is seen there."""
    image_aug: Tensor
    """(B, V, 4, 4) float32: pixels of the raw image -> pixels of `images`. A 2 x 2 matrix in the corner, a translation
    in column 3 of the first two rows, the identity elsewhere."""
    lidar_aug: Tensor
    """(B, 4, 4) float32: LiDAR frame -> augmented LiDAR frame. The identity in evaluation."""


class DrivingBatch(DrivingInputs):
    """A batch with what is true."""

    boxes: Tensor
    """(B, G, 9) float32, padded with zeros: centre x, y, z; size dx along the heading, dy across it, dz up (length,
    width, height); yaw in radians, 0 along x, counter-clockwise; velocity vx, vy in metres per second. All in the
    augmented LiDAR frame, all finite: an unknown velocity is 0."""
    labels: Tensor
    """(B, G) int64: index into `CLASSES`."""
    count: Tensor
    """(B,) int64: how many boxes of each sample are real. May be 0, and so may G."""
