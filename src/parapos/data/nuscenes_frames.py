"""Keyframes of nuScenes with their geometry: sweeps and cameras as seen from the LiDAR, and boxes in both frames.

The LiDAR frame is that of LIDAR_TOP at the keyframe: x right, y forward, z up. Each sensor has its own time, and the
car moves in between: everything goes through the global frame. M boxes of a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import FormatError, rigid
from .nuscenes_classes import ATTRIBUTES, CAMERAS, CATEGORIES, CLASSES, LIDAR, RACK
from .readers.nuscenes_tables import Row, Tables

Array = np.ndarray[Any, Any]
SWEEPS = 9  # before the keyframe
NO_VIEW = -1
OBJECT = np.dtype(
    [
        *(
            ("frame", "<i4"),
            ("label", "|i1"),
            ("attribute", "|i1"),
            ("view", "|i1"),
            ("lidar", "<i4"),
            ("radar", "<i4"),
        ),
        *(("box", "<f8", (9,)), ("translation", "<f8", (3,)), ("size", "<f8", (3,)), ("rotation", "<f8", (4,))),
        *(("velocity", "<f8", (2,)), ("rectangle", "<f4", (4,))),
        *(("points_at", "<i8"), ("points", "<i4"), ("crop_at", "<i8"), ("crop", "<i4")),
    ]
)


@dataclass(frozen=True, eq=False)
class Sweep:
    """A LiDAR file. transform: its points to the LiDAR frame; lag: seconds that it is older than the keyframe."""

    file: str
    token: str
    transform: Array
    lag: float


@dataclass(frozen=True, eq=False)
class Camera:
    """An image file. lidar2image: 4 x 4, LiDAR frame to pixels times depth."""

    file: str
    token: str
    width: int
    height: int
    lidar2image: Array


@dataclass(eq=False)
class Frame:
    """A keyframe. sweeps: the keyframe itself first, then up to nine older ones, the newest first. cameras: in the
    order of `CAMERAS`, None for one that is not in the tables. car: where it is in the global frame. racks (r, 10):
    translation, size and rotation of racks of bicycles, global. objects: rows of `OBJECT`, which has of each box

    box         x, y, z, length, width, height, yaw, vx, vy in the LiDAR frame; the velocity is NaN if it is unknown
    translation, size (width, length, height), rotation, velocity    the same in the global frame
    view, rectangle     the first camera that sees it, or -1, and x1, y1, x2, y2 in its pixels
    lidar, radar        points that annotators counted in it
    points_at, points, crop_at, crop    where its points and its picture stand in prepared files
    """

    token: str
    scene: str
    timestamp: int
    lidar2global: Array
    car: Array
    sweeps: list[Sweep]
    cameras: list[Camera | None]
    racks: Array
    objects: Array = field(default_factory=lambda: np.zeros(0, OBJECT))

    def as_json(self) -> dict[str, Any]:
        """Everything but the objects, in plain types."""
        sweeps = [{**vars(sweep), "transform": sweep.transform.tolist()} for sweep in self.sweeps]
        cameras = [c and {**vars(c), "lidar2image": c.lidar2image.tolist()} for c in self.cameras]
        plain = {name: getattr(self, name).tolist() for name in ("lidar2global", "car", "racks")}
        known = {"token": self.token, "scene": self.scene, "timestamp": self.timestamp}
        return {**known, **plain, "sweeps": sweeps, "cameras": cameras}

    @classmethod
    def of(cls, value: Mapping[str, Any], objects: Array) -> Frame:
        """What `as_json` gave; KeyError, TypeError or ValueError if it is something else."""
        return cls(
            token=str(value["token"]),
            scene=str(value["scene"]),
            timestamp=int(value["timestamp"]),
            lidar2global=_matrix(value["lidar2global"]),
            car=np.array(value["car"], np.float64).reshape(3),
            sweeps=[Sweep(**{**sweep, "transform": _matrix(sweep["transform"])}) for sweep in value["sweeps"]],
            cameras=[c and Camera(**{**c, "lidar2image": _matrix(c["lidar2image"])}) for c in value["cameras"]],
            racks=np.array(value["racks"], np.float64).reshape(-1, 10),
            objects=objects,
        )


def _matrix(value: Any) -> Array:
    return np.array(value, np.float64).reshape(4, 4)


def scene_frames(tables: Tables, scene: str) -> Iterator[Frame]:
    """The keyframes of a scene, by its token, in the order of time."""
    name = tables["scene"][scene]["name"]
    for number, sample in enumerate(tables.samples(scene)):
        frame = make_frame(tables, sample, name)
        frame.objects["frame"] = number
        yield frame


def make_frame(tables: Tables, sample: Row, scene: str) -> Frame:
    """The keyframe of a sample."""
    rows = tables.keyframes(sample["token"])
    if LIDAR not in rows:
        raise FormatError(f"{tables.path('sample')}: token {sample['token']}: no key frame of {LIDAR} in sample_data")
    lidar = rows[LIDAR]
    lidar2global = sensor2global(tables, lidar)
    global2lidar = rigid.inverse(lidar2global)
    cameras = [_camera(tables, rows[name], global2lidar) if name in rows else None for name in CAMERAS]
    notes = tables.annotations[sample["token"]]
    frame = Frame(
        token=sample["token"],
        scene=scene,
        timestamp=lidar["timestamp"],
        lidar2global=lidar2global,
        car=np.array(tables["ego_pose"][lidar["ego_pose_token"]]["translation"], np.float64),
        sweeps=list(_sweeps(tables, lidar, global2lidar)),
        cameras=cameras,
        racks=np.array([_numbers(note) for note in notes if tables.category(note) == RACK]).reshape(-1, 10),
    )
    frame.objects = _objects(tables, notes, frame, global2lidar)
    return frame


def sensor2global(tables: Tables, row: Row) -> Array:
    """Of a row of sample_data, at its own time."""
    ego = rigid.pose(tables["ego_pose"][row["ego_pose_token"]])
    found: Array = ego @ rigid.pose(tables["calibrated_sensor"][row["calibrated_sensor_token"]])
    return found


def _sweeps(tables: Tables, lidar: Row, global2lidar: Array) -> Iterator[Sweep]:
    for row in tables.chain("sample_data", lidar["token"], "prev", 1 + SWEEPS):
        lag = 1e-6 * (lidar["timestamp"] - row["timestamp"])
        if lag < 0:
            told = f"later than {lidar['token']}, which follows it; expected times that rise"
            raise FormatError(f"{tables.path('sample_data')}: token {row['token']}: timestamp: {told}")
        transform = np.eye(4) if row is lidar else global2lidar @ sensor2global(tables, row)
        yield Sweep(row["filename"], row["token"], transform, lag)


def _camera(tables: Tables, row: Row, global2lidar: Array) -> Camera:
    token = row["calibrated_sensor_token"]
    intrinsic = tables["calibrated_sensor"][token]["camera_intrinsic"]
    if not intrinsic:
        told = "camera_intrinsic: expected a 3 x 3 camera matrix, as a camera has it, got an empty list"
        raise FormatError(f"{tables.path('calibrated_sensor')}: token {token}: {told}")
    if not row["width"] or not row["height"]:
        raise FormatError(f"{tables.path('sample_data')}: token {row['token']}: expected width and height of an image")
    camera2lidar = global2lidar @ sensor2global(tables, row)
    lens = rigid.transform(np.array(intrinsic, np.float64), np.zeros(3))
    return Camera(row["filename"], row["token"], row["width"], row["height"], lens @ rigid.inverse(camera2lidar))


def _numbers(note: Row) -> list[float]:
    return [*note["translation"], *note["size"], *note["rotation"]]


def _objects(tables: Tables, notes: Sequence[Row], frame: Frame, global2lidar: Array) -> Array:
    rows = [(note, CATEGORIES[name]) for note in notes if (name := tables.category(note)) in CATEGORIES]
    found = np.zeros(len(rows), OBJECT)
    turn = global2lidar[:3, :3]
    for place, (note, name) in zip(found, rows, strict=True):
        velocity = np.array(tables.velocity(note))
        heading = turn @ rigid.rotation(note["rotation"])
        width, length, height = note["size"]
        center = rigid.apply(global2lidar, np.array([note["translation"]], np.float64))[0]
        place["box"] = [*center, length, width, height, rigid.yaw_of(heading), *(turn @ velocity)[:2]]
        place["translation"], place["size"], place["rotation"] = note["translation"], note["size"], note["rotation"]
        place["velocity"], place["label"] = velocity[:2], CLASSES.index(name)
        place["lidar"], place["radar"] = (min(note[f"num_{kind}_pts"], 2**31 - 1) for kind in ("lidar", "radar"))
        place["attribute"] = _attribute(tables, note)
        place["view"], place["rectangle"] = first_view(place["box"], frame.cameras)
    return found


def _attribute(tables: Tables, note: Row) -> int:
    names = [tables["attribute"][token]["name"] for token in note["attribute_tokens"]]
    if len(names) > 1 or not set(names) <= set(ATTRIBUTES):
        told = f"expected at most one of {', '.join(ATTRIBUTES)}, got {', '.join(names)!r:.120}"
        raise FormatError(f"{tables.path('sample_annotation')}: token {note['token']}: attribute_tokens: {told}")
    return ATTRIBUTES.index(names[0]) if names else -1


def first_view(box: Array, cameras: Sequence[Camera | None]) -> tuple[int, Array]:
    """The number of the first camera that sees a box (7+,), and the rectangle of what it sees; -1 if none does."""
    corners = rigid.corners(box[None])[0]
    for number, camera in enumerate(cameras):
        if camera is not None:
            rectangle = seen(corners, camera)
            if rectangle is not None:
                return number, rectangle
    return NO_VIEW, np.zeros(4, np.float32)


def seen(points: Array, camera: Camera) -> Array | None:
    """The rectangle x1, y1, x2, y2 around the part in the image of the hull of points (n, 3), or None."""
    h = points @ camera.lidar2image[:3, :3].T + camera.lidar2image[:3, 3]
    h = h[h[:, 2] > 0]
    if not len(h):
        return None
    part = hull(h[:, :2] / h[:, 2:])
    for axis, most in ((0, camera.width), (1, camera.height)):
        part = _cut(_cut(part, axis, 0.0, 1), axis, float(most), -1)
    if len(part) < 2 or not np.isfinite(part).all() or not (np.ptp(part, axis=0) > 0).all():
        return None
    return np.concatenate([part.min(0), part.max(0)]).astype(np.float32)


def hull(points: Array) -> Array:
    """The convex hull of points (n, 2) as a polygon, counter-clockwise."""
    ordered = sorted(map(tuple, points.tolist()))

    def half(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
        kept: list[tuple[float, ...]] = []
        for row in rows:
            while len(kept) > 1 and _left(kept[-2], kept[-1], row) <= 0:
                kept.pop()
            kept.append(row)
        return kept[:-1]

    return np.array(half(ordered) + half(ordered[::-1]) or ordered[:1])


def _left(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _cut(polygon: Array, axis: int, border: float, side: int) -> Array:
    """The part of a convex polygon (n, 2) that lies on a side of a border: above it for 1, below it for -1."""
    rows: list[Array] = []
    for a, b in zip(polygon, np.roll(polygon, -1, 0), strict=True):
        near, far = side * (a[axis] - border), side * (b[axis] - border)
        if near >= 0:
            rows.append(a)
        if (near < 0) != (far < 0):
            rows.append(a + (b - a) * (near / (near - far)))
    return np.array(rows).reshape(-1, 2)
