"""nuScenes: six cameras and a LiDAR on the roof of a car, boxes of ten classes in 3D. Frames are read from what
`parapos prepare nuscenes` wrote.

    <root>/v1.0-{trainval,mini,test}/*.json     13 tables
    <root>/{samples,sweeps}/<CHANNEL>/*         images and LiDAR sweeps
    <root>/prepared/<version>/<split>/<scene>/  frames.json, objects.npy, and of training scenes points.npy, crops.npy

What a sample holds says `models.unitr.batch`. Everything random in it follows from seed, epoch and index, so all
processes and workers agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from . import FormatError
from .augment.driving import DrivingAugment, ImageView, fixed_view, random_view, random_world
from .nuscenes_classes import CAMERAS, CLASSES, SAMPLES, VERSIONS
from .nuscenes_frames import SWEEPS, Camera, Frame
from .nuscenes_prepare import load_database, load_frames, open_version
from .nuscenes_sensors import read_camera, sweep_points
from .pasting import Database, choose, paste_pictures, paste_points
from .sampling import Key, sample_seed
from .transforms import MEAN, STD

Array = np.ndarray[Any, Any]
TASK = "detection3d"
GIVES = ("points", "offset", "images", "image_mask", "lidar2image", "image_aug", "lidar_aug")
SPLITS = ("train", "val", "test")
SENSORS = ("both", "lidar", "cameras")
MOST_TRIES = 100
POINT_RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Augment(DrivingAugment):
    """How training frames are varied."""


class NuScenes:
    """Samples of keyframes: {"points", "images", "image_mask", "lidar2image", "image_aug", "lidar_aug", "boxes",
    "labels", "count", "id"}. id: the place in `frames`.

    size: height and width of images for the network, which show the file resized by `resize`. sweeps: LiDAR sweeps of a
    sample, the keyframe among them. point_range: least x, y, z and largest x, y, z in metres; points outside in x or y
    are left out, and in training boxes whose centre is outside. sensors: "lidar" or "cameras" leaves the other one out.
    missing="mask" does without images that are not there. order: indices of frames, if others than each once.
    """

    packed = ("points",)
    ragged = ("boxes", "labels")
    class_names = CLASSES
    classes = len(CLASSES)

    def __init__(
        self,
        frames: Sequence[Frame],
        root: Path,
        *,
        size: tuple[int, int],
        resize: float = 0.48,
        sweeps: int = SWEEPS + 1,
        point_range: Sequence[float] = POINT_RANGE,
        sensors: str = "both",
        missing: str = "error",
        augment: DrivingAugment | None = None,
        database: Database | None = None,
        order: Array | None = None,
        seed: int = 0,
    ) -> None:
        if not 1 <= sweeps <= SWEEPS + 1:
            raise ValueError(f"sweeps must be from 1 to {SWEEPS + 1}, got {sweeps}")
        if not 0 < resize < 100:
            raise ValueError(f"resize must be a positive number, got {resize}")
        if len(point_range) != 6 or not all(a < b for a, b in zip(point_range[:3], point_range[3:], strict=True)):
            raise ValueError(f"point_range must be least x, y, z and largest x, y, z, got {list(point_range)}")
        for name, value, known in (("sensors", sensors, SENSORS), ("missing", missing, ("error", "mask"))):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.frames, self.root, self.size, self.resize, self.sweeps = list(frames), root, size, resize, sweeps
        self.sensors, self.missing, self.augment, self.database, self.seed = sensors, missing, augment, database, seed
        self.point_range = np.array(point_range, np.float64)
        self.order = np.arange(len(self.frames)) if order is None else order
        self.preprocessing = {"resize": resize, "sweeps": sweeps, "point_range": [float(x) for x in point_range]}

    def __len__(self) -> int:
        return len(self.order)

    def as_judged(self) -> NuScenes:
        """Each frame once, not varied."""
        other = copy(self)
        other.augment, other.order = None, np.arange(len(self.frames))
        return other

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        place, epoch = key if isinstance(key, Key) else (key, 0)
        place = range(len(self))[place]
        if self.augment is None:
            return self.sample(int(self.order[place]))
        rng = np.random.default_rng(sample_seed(self.seed, epoch, place))
        index = int(self.order[place])
        for _ in range(MOST_TRIES):
            sample = self._varied(index, epoch, rng)
            if sample["count"]:
                return sample
            index = int(rng.integers(len(self.frames)))  # nothing to learn there: another frame instead
        raise FormatError(f"{self.root}: {MOST_TRIES} frames without a box in the range, expected boxes to learn from")

    def sample(self, index: int) -> dict[str, Any]:
        """A frame as it is judged."""
        frame = self.frames[index]
        images = self.images(frame)
        views = [self._fixed(camera) for camera in frame.cameras]
        points = self._inside(self.points(frame))
        objects = frame.objects[frame.objects["lidar"] > 0]
        return self._tensors(index, points, images, views, np.eye(4), objects["box"], objects["label"])

    def _fixed(self, camera: Camera | None) -> ImageView:
        width, height = (camera.width, camera.height) if camera else self.size[::-1]
        return fixed_view(width, height, self.size, self.resize)

    def _varied(self, index: int, epoch: int, rng: np.random.Generator) -> dict[str, Any]:
        assert self.augment is not None
        frame, settings = self.frames[index], self.augment
        views = [
            random_view(camera.width, camera.height, self.size, settings, rng) if camera else self._fixed(camera)
            for camera in frame.cameras
        ]
        points, images = self.points(frame), self.images(frame)
        objects = frame.objects[frame.objects["lidar"] > 0]
        if self.database is not None and epoch < settings.paste_epochs:
            numbers = choose(frame.objects, self.database, settings, rng)
            if self.sensors != "cameras":
                oldest = max(sweep.lag for sweep in frame.sweeps[: self.sweeps])
                points = paste_points(points, self.database, numbers, oldest)
            images = paste_pictures(images, frame.objects, self.database, numbers, settings.paste_weight)
            objects = np.concatenate([objects, self.database.objects[numbers]])
        world = random_world(settings, rng)
        boxes, labels = world.boxes(objects["box"]), objects["label"]
        low, high = self.point_range[:3], self.point_range[3:]
        kept = ((boxes[:, :3] >= low) & (boxes[:, :3] <= high)).all(1)
        moved = points[:, :3] @ world.matrix[:3, :3].T + world.matrix[:3, 3]
        points = self._inside(np.concatenate([moved, points[:, 3:]], 1))
        points = points[rng.permutation(len(points))]
        return self._tensors(index, points, images, views, world.matrix, boxes[kept], labels[kept])

    def _inside(self, points: Array) -> Array:
        low, high = self.point_range[:2], self.point_range[3:5]
        return points[((points[:, :2] >= low) & (points[:, :2] < high)).all(1)]

    def points(self, frame: Frame) -> Array:
        """float32 (n, 5) x, y, z, intensity, lag of a frame's sweeps."""
        if self.sensors == "cameras":
            return np.zeros((0, 5), np.float32)
        return sweep_points(self.root, frame, self.sweeps)

    def images(self, frame: Frame) -> dict[int, Image.Image]:
        """The images of a frame by the number of their camera."""
        if self.sensors == "lidar":
            return {}
        found = {}
        for number, camera in enumerate(frame.cameras):
            if camera is None:
                if self.missing == "error":
                    told = f"sample {frame.token} has no image of {CAMERAS[number]}"
                    raise FormatError(f"{self.root}: {told}; missing='mask' does without it")
            elif self.missing == "error" or (self.root / camera.file).is_file():
                found[number] = read_camera(self.root, camera)
        return found

    def _tensors(
        self,
        index: int,
        points: Array,
        images: dict[int, Image.Image],
        views: Sequence[ImageView],
        world: Array,
        boxes: Array,
        labels: Array,
    ) -> dict[str, Any]:
        frame = self.frames[index]
        pixels = torch.zeros(len(CAMERAS), 3, *self.size)
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        for number, image in images.items():
            array = torch.from_numpy(np.array(views[number].apply(image)))
            pixels[number] = (array.permute(2, 0, 1).float() / 255 - mean) / deviation
        lens = np.stack([camera.lidar2image if camera else np.zeros((4, 4)) for camera in frame.cameras])
        return {
            "points": torch.from_numpy(points.astype(np.float32)),
            "images": pixels,
            "image_mask": torch.tensor([number in images for number in range(len(CAMERAS))]),
            "lidar2image": torch.from_numpy(lens).float(),
            "image_aug": torch.from_numpy(np.stack([view.matrix for view in views])).float(),
            "lidar_aug": torch.from_numpy(world).float(),
            "boxes": torch.from_numpy(np.nan_to_num(boxes)).float(),
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "count": len(boxes),
            "id": index,
        }


def balanced(labels: Sequence[Array], seed: int) -> Array:
    """Indices of frames in which all classes occur about equally often: of the frames with a class, so many are drawn,
    with replacement, that each class has the same share. labels: of each frame."""
    lists = [[i for i, found in enumerate(labels) if label in found] for label in range(len(CLASSES))]
    total = sum(map(len, lists))
    rng = np.random.default_rng([seed, len(labels)])
    parts = []
    for places in filter(None, lists):
        share = len(places) / total
        parts.append(rng.choice(places, int(len(places) * (1 / len(CLASSES) / share)), replace=True))
    if not parts:
        raise FormatError("no frame has a box, expected some to learn from")
    return np.concatenate(parts)


def nuscenes(
    split: str,
    *,
    root: str | Path,
    size: tuple[int, int] = (256, 704),
    seed: int = 0,
    augment: Augment | None = None,
    tables: str = "v1.0-trainval",
    sweeps: int = SWEEPS + 1,
    resize: float = 0.48,
    point_range: tuple[float, ...] = POINT_RANGE,
    balance: bool = True,
    sensors: str = "both",
    missing: str = "error",
    cache: str | Path | None = None,
    complete: bool = True,
) -> NuScenes:
    """A split of nuScenes, prepared. augment is for "train", which has UniTR's if none is given.

    tables: their version; "test" of the full data set is v1.0-test. balance=True draws training frames so that rare
    classes occur as often as others (CBGS). cache: where `prepare` wrote, without it root/prepared. complete=False
    accepts any number of frames. Other options are those of `NuScenes`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if tables not in VERSIONS:
        raise ValueError(f"tables must be one of {', '.join(VERSIONS)}, got {tables!r}")
    version = "v1.0-test" if split == "test" and tables == "v1.0-trainval" else tables
    store = open_version(root, cache, version)
    frames = load_frames(store, split)
    expected = SAMPLES.get((version, split))
    if complete and len(frames) != expected:
        told = f"{len(frames)} prepared frames of {split}, expected {expected}"
        raise FormatError(f"{store.folder}: {told}; {store.again}, or complete=False accepts this")
    if not frames:
        known = ", ".join(one for one in SPLITS if (version, one) in SAMPLES)
        raise FormatError(f"{store.folder}: no prepared frames of {split}, {version} has {known}; {store.again}")
    settings = (augment or Augment()) if split == "train" else None
    order = database = None
    if settings is not None and any(settings.paste) and settings.paste_epochs:
        database = load_database(store, split, settings.least_points)
    if settings is not None and balance:
        order = balanced([_learned(frame)["label"] for frame in frames], seed)
    return NuScenes(
        frames,
        Path(root),
        size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        resize=resize,
        sweeps=sweeps,
        point_range=point_range,
        sensors=sensors,
        missing=missing,
        augment=settings,
        database=database,
        order=order,
        seed=seed,
    )


nuscenes_lidar = partial(nuscenes, sensors="lidar")
nuscenes_cameras = partial(nuscenes, sensors="cameras")


def _learned(frame: Frame) -> Array:
    """Objects that a sensor has points of."""
    found: Array = frame.objects[(frame.objects["lidar"] > 0) | (frame.objects["radar"] > 0)]
    return found
