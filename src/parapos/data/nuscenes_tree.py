"""A small generated copy of nuScenes in its own format: all tables, LiDAR sweeps and camera images of two scenes.

Each scene has two objects of every class on a plain around the car, which drives ahead with a gentle turn. LiDAR points
lie on the ground and on the objects; images have a rectangle in the colour of its class where an object is. Everything
is consistent in the global frame at every sensor's own time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError, rigid
from .nuscenes_classes import ATTRIBUTES, CAMERAS, CATEGORIES, IGNORED, LIDAR, RACK
from .nuscenes_frames import Camera, seen
from .readers import sweeps

Array = np.ndarray[Any, Any]
WIDTH, HEIGHT = 400, 225
FOCAL = 0.79 * WIDTH
HEADINGS = (0, -55, 55, 180, 110, -110)  # degrees of cameras, in their order
GROUND, SURFACE = 1500, 40  # points of a sweep: on the ground, and on each object
KEYFRAMES, BETWEEN = 3, 3  # keyframes of a scene, and sweeps between two of them
STEP = 500_000  # microseconds between keyframes
START = 1_600_000_000_000_000
KINDS: dict[str, tuple[tuple[float, float, float], str, float]] = {  # width, length, height; attribute; metres/second
    "vehicle.car": ((1.9, 4.6, 1.7), "vehicle", 1.0),
    "vehicle.truck": ((2.5, 6.2, 2.6), "vehicle", 0.8),
    "vehicle.construction": ((2.6, 6.0, 2.7), "vehicle", 0.0),
    "vehicle.bus.rigid": ((2.7, 6.6, 3.0), "vehicle", 0.8),
    "vehicle.trailer": ((2.6, 6.5, 3.1), "vehicle", 0.0),
    "movable_object.barrier": ((2.3, 0.6, 1.0), "", 0.0),
    "vehicle.motorcycle": ((0.8, 2.1, 1.5), "cycle", 1.2),
    "vehicle.bicycle": ((0.6, 1.8, 1.3), "cycle", 1.0),
    "human.pedestrian.adult": ((0.7, 0.8, 1.8), "pedestrian", 0.9),
    "movable_object.trafficcone": ((0.5, 0.5, 1.0), "", 0.0),
}
TWINS = {  # kinds that only a camera can tell apart, in scenes that are twins
    **{"vehicle.car": "movable_object.barrier", "vehicle.truck": "vehicle.construction"},
    **{"vehicle.bus.rigid": "vehicle.trailer", "vehicle.motorcycle": "vehicle.bicycle"},
    "human.pedestrian.adult": "movable_object.trafficcone",
}
COLOURS = {  # of the rectangles of classes
    name: tuple(int(c) for c in np.random.default_rng(number + 5).integers(0, 256, 3))
    for number, name in enumerate((*KINDS, *IGNORED))
}


def token(*names: Any) -> str:
    """32 hexadecimal digits for a name."""
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Thing:
    """An object. place, yaw: of its centre in the global frame at the start; surface (SURFACE, 3) about its centre, not
    turned."""

    name: str
    category: str
    size: tuple[float, float, float]
    place: Array
    yaw: float
    velocity: Array
    attribute: str
    surface: Array

    def at(self, seconds: float) -> Array:
        """As a row x, y, z, length, width, height, yaw in the global frame."""
        width, length, height = self.size
        return np.array([*(self.place + self.velocity * seconds), length, width, height, self.yaw])

    def points(self, seconds: float) -> Array:
        return self.surface @ rigid.turn(self.yaw).T + self.place + self.velocity * seconds


class Scene:
    """A scene of generated things, and where the car is at each time. swap: kinds that are twins have one size, and
    stand still; with True they have changed places, with False not. Two such scenes differ in their images alone."""

    def __init__(self, name: str, number: int, keyframes: int, swap: bool | None = None) -> None:
        self.name, self.keyframes, self.swap = name, keyframes, swap
        self.rng = np.random.default_rng([7, number])
        self.start = START + number * 3600 * 10**6
        self.origin = np.array([600.0 + 50 * number, 1600.0 - 30 * number, 0.0])
        self.yaw, self.speed, self.rate = 0.7 + 0.4 * number, 2.0, 0.06
        self.things = list(self._make_things())
        self.ground = np.column_stack([self.rng.uniform(-26, 26, (GROUND, 2)), np.zeros(GROUND)]) + self.origin

    def car(self, seconds: float) -> Array:
        """The frame of the car in the global one."""
        middle = self.yaw + self.rate * seconds / 2
        ahead = np.array([math.cos(middle), math.sin(middle), 0.0]) * self.speed * seconds
        return rigid.transform(rigid.turn(self.yaw + self.rate * seconds), self.origin + ahead)

    def _make_things(self) -> Iterator[Thing]:
        """Two of each kind, a rack for bicycles and an animal, each in a cell of its own, eight metres wide."""
        cells = [(x, y) for x in (-16, -8, 0, 8, 16) for y in (-16, -8, 0, 8, 16) if (x, y) != (0, 0)]
        kinds = [*KINDS, *KINDS, RACK, "animal"]
        order = self.rng.permutation(len(cells))
        start = rigid.transform(rigid.turn(self.yaw), self.origin)
        for number, kind in enumerate(kinds):
            size, family, speed = KINDS.get(kind, ((1.5, 4.0, 1.2) if kind == RACK else (0.4, 0.9, 0.6), "", 0.0))
            if self.swap is not None and kind in KINDS:
                others = {**TWINS, **{second: first for first, second in TWINS.items()}}
                size = KINDS[min(kind, others[kind])][0]
                kind = others[kind] if self.swap else kind
                family, speed = KINDS[kind][1], 0.0
            moves = speed > 0 and number < len(KINDS)
            x, y = np.array(cells[order[number]]) + self.rng.uniform(-0.4, 0.4, 2)
            place = rigid.apply(start, np.array([[x + 1.0, y, size[2] / 2]]))[0]
            yaw = float(self.rng.uniform(-math.pi, math.pi))
            ahead = np.array([math.cos(yaw), math.sin(yaw), 0.0])
            attribute = {
                "vehicle": "vehicle.moving" if moves else "vehicle.stopped" if "bus" in kind else "vehicle.parked",
                "cycle": "cycle.with_rider" if moves else "cycle.without_rider",
                "pedestrian": "pedestrian.moving" if moves else "pedestrian.standing",
            }.get(family, "")
            velocity = ahead * speed * moves
            yield Thing(f"{self.name}/{number}", kind, size, place, yaw, velocity, attribute, self._surface(size))

    def _surface(self, size: tuple[float, float, float]) -> Array:
        """Points on all faces but the one below."""
        width, length, height = size
        points = self.rng.uniform(-0.49, 0.49, (SURFACE, 3))
        axis, side = self.rng.integers(0, 3, SURFACE), self.rng.choice([-0.49, 0.49], SURFACE)
        points[np.arange(SURFACE), axis] = np.where(axis == 2, 0.49, side)
        return points * np.array([length, width, height])


def sensors() -> dict[str, tuple[Array, Array]]:
    """Sensor to car as rotation and translation, by channel."""
    found = {LIDAR: (rigid.turn(-math.pi / 2), np.array([0.94, 0.0, 1.84]))}
    for channel, degrees in zip(CAMERAS, HEADINGS, strict=True):
        psi = math.radians(degrees)
        columns = [[math.sin(psi), -math.cos(psi), 0], [0, 0, -1], [math.cos(psi), math.sin(psi), 0]]
        found[channel] = np.array(columns, float).T, np.array([1.5 * math.cos(psi), 0.5 * math.sin(psi), 1.5])
    return found


LENS = [[FOCAL, 0.0, WIDTH / 2], [0.0, FOCAL, HEIGHT / 2], [0.0, 0.0, 1.0]]


class Writer:
    """Writes a copy. Rows of tables are collected, and written at the end."""

    def __init__(self, root: Path, version: str) -> None:
        self.root, self.version = root, version
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def add(self, table: str, **row: Any) -> str:
        self.tables.setdefault(table, []).append(row)
        return str(row["token"])

    def finish(self) -> None:
        folder = self.root / self.version
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.tables.items():
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=0), encoding="utf-8")

    def constants(self) -> None:
        """Tables that are the same in every copy."""
        for name in (*CATEGORIES, *IGNORED):
            self.add("category", token=token("category", name), name=name, description="")
        for name in ATTRIBUTES:
            self.add("attribute", token=token("attribute", name), name=name, description="")
        for number, level in enumerate(("v0-40", "v40-60", "v60-80", "v80-100"), 1):
            self.add("visibility", token=str(number), level=level, description="")
        for channel in (LIDAR, *CAMERAS):
            modality = "lidar" if channel == LIDAR else "camera"
            self.add("sensor", token=token("sensor", channel), channel=channel, modality=modality)

    def scene(self, scene: Scene) -> None:
        log = self.add(
            "log", token=token("log", scene.name), logfile=scene.name, vehicle="n000", date_captured="2020-09-13",
            location="singapore-onenorth",
        )  # fmt: skip
        for channel, (matrix, translation) in sensors().items():
            self.add(
                "calibrated_sensor",
                token=token("calibrated_sensor", scene.name, channel),
                sensor_token=token("sensor", channel),
                translation=translation.tolist(),
                rotation=rigid.quaternion_of(matrix).tolist(),
                camera_intrinsic=[] if channel == LIDAR else LENS,
            )
        samples = [token("sample", scene.name, i) for i in range(scene.keyframes)]
        self.add(
            "scene", token=token("scene", scene.name), name=scene.name, description="generated", log_token=log,
            nbr_samples=len(samples), first_sample_token=samples[0], last_sample_token=samples[-1],
        )  # fmt: skip
        for i, one in enumerate(samples):
            self.add(
                "sample", token=one, timestamp=scene.start + i * STEP, scene_token=token("scene", scene.name),
                prev=samples[i - 1] if i else "", next=samples[i + 1] if i + 1 < len(samples) else "",
            )  # fmt: skip
        self._lidar(scene, samples)
        for number, channel in enumerate(CAMERAS):
            self._images(scene, samples, channel, 10_000 + 5_000 * number)
        self._annotate(scene, samples)

    def _records(
        self, scene: Scene, channel: str, rows: Sequence[tuple[int, str, bool]]
    ) -> Iterator[tuple[Path, Array]]:
        """Adds recordings at microseconds after the start, each of a sample and a key frame or not; gives the path and
        the frame of the sensor of each, in the global frame."""
        names = [token("sample_data", scene.name, channel, i) for i in range(len(rows))]
        turned, translation = sensors()[channel]
        for i, (after, sample, key) in enumerate(rows):
            car = scene.car(after * 1e-6)
            ego = self.add(
                "ego_pose", token=token("ego_pose", names[i]), timestamp=scene.start + after,
                translation=car[:3, 3].tolist(), rotation=rigid.quaternion_of(car[:3, :3]).tolist(),
            )  # fmt: skip
            end = ".pcd.bin" if channel == LIDAR else ".jpg"
            name = f"{scene.name}__{channel}__{scene.start + after}{end}"
            file = f"{'samples' if key else 'sweeps'}/{channel}/{name}"
            self.add(
                "sample_data", token=names[i], sample_token=sample, ego_pose_token=ego,
                calibrated_sensor_token=token("calibrated_sensor", scene.name, channel), filename=file,
                fileformat="pcd" if channel == LIDAR else "jpg", is_key_frame=key, timestamp=scene.start + after,
                width=0 if channel == LIDAR else WIDTH, height=0 if channel == LIDAR else HEIGHT,
                prev=names[i - 1] if i else "", next=names[i + 1] if i + 1 < len(rows) else "",
            )  # fmt: skip
            (path := self.root / file).parent.mkdir(parents=True, exist_ok=True)
            yield path, car @ rigid.transform(turned, translation)

    def _lidar(self, scene: Scene, samples: Sequence[str]) -> None:
        gap = STEP // (BETWEEN + 1)
        times = [i * gap for i in range((len(samples) - 1) * (BETWEEN + 1) + 1)]
        rows = [(time, samples[-(-time // STEP)], time % STEP == 0) for time in times]
        for (path, frame), time in zip(self._records(scene, LIDAR, rows), times, strict=True):
            points = np.concatenate([scene.ground, *(thing.points(time * 1e-6) for thing in scene.things)])
            local = rigid.apply(rigid.inverse(frame), points)
            more = np.column_stack([scene.rng.integers(0, 256, len(local)), scene.rng.integers(0, 32, len(local))])
            sweeps.write(path, np.concatenate([local, more], 1))

    def _images(self, scene: Scene, samples: Sequence[str], channel: str, delay: int) -> None:
        from PIL import Image, ImageDraw

        times = [i * STEP + delay for i in range(len(samples))]
        rows = [(time, sample, True) for time, sample in zip(times, samples, strict=True)]
        for (path, frame), time in zip(self._records(scene, channel, rows), times, strict=True):
            image = Image.fromarray(scene.rng.integers(90, 140, (HEIGHT, WIDTH, 3), dtype=np.uint8))
            draw = ImageDraw.Draw(image)
            lens = rigid.transform(np.array(LENS), np.zeros(3)) @ rigid.inverse(frame)
            camera = Camera("", "", WIDTH, HEIGHT, lens)
            boxes = [(thing, thing.at(time * 1e-6)) for thing in scene.things]
            boxes.sort(key=lambda pair: -float(np.linalg.norm(pair[1][:3] - frame[:3, 3])))  # the nearest last
            for thing, box in boxes:
                rectangle = seen(rigid.corners(box[None])[0], camera)
                if rectangle is not None:
                    draw.rectangle(tuple(rectangle.tolist()), fill=COLOURS[thing.category])
            image.save(path, quality=95)

    def _annotate(self, scene: Scene, samples: Sequence[str]) -> None:
        rows = [row for row in self.tables["sample_data"] if row["is_key_frame"] and row["fileformat"] == "pcd"]
        files = {row["sample_token"]: self.root / row["filename"] for row in rows}
        turned, translation = sensors()[LIDAR]
        for thing in scene.things:
            names = [token("annotation", thing.name, i) for i in range(len(samples))]
            self.add(
                "instance", token=token("instance", thing.name), category_token=token("category", thing.category),
                nbr_annotations=len(names), first_annotation_token=names[0], last_annotation_token=names[-1],
            )  # fmt: skip
            for i, sample in enumerate(samples):
                seconds = i * STEP * 1e-6
                box, frame = thing.at(seconds), scene.car(seconds) @ rigid.transform(turned, translation)
                points = rigid.apply(frame, sweeps.read(files[sample])[:, :3].astype(float))
                self.add(
                    "sample_annotation", token=names[i], sample_token=sample,
                    instance_token=token("instance", thing.name), visibility_token="4",
                    attribute_tokens=[token("attribute", thing.attribute)] if thing.attribute else [],
                    translation=box[:3].tolist(), size=list(thing.size),
                    rotation=rigid.quaternion_of(rigid.turn(thing.yaw)).tolist(),
                    num_lidar_pts=int(rigid.inside(points, box).sum()), num_radar_pts=0,
                    prev=names[i - 1] if i else "", next=names[i + 1] if i + 1 < len(names) else "",
                )  # fmt: skip


def write_tiny(root: str | Path, *, keyframes: int = KEYFRAMES, twins: bool = False) -> None:
    """Writes v1.0-mini with scene-0061, which is of training, and scene-0103, of validation, to a new folder. twins:
    also of training is scene-0553, which a LiDAR cannot tell from scene-0061, in which kinds have changed places."""
    from PIL import Image

    root = Path(root)
    if (root / "v1.0-mini").exists():
        raise FormatError(f"{root / 'v1.0-mini'}: is there already, expected a new folder to write to")
    if keyframes < 1:
        raise ValueError(f"keyframes must be at least 1, got {keyframes}")
    writer = Writer(root, "v1.0-mini")
    writer.constants()
    writer.scene(Scene("scene-0061", 0, keyframes, False if twins else None))
    writer.scene(Scene("scene-0103", 1, keyframes))
    if twins:
        writer.scene(Scene("scene-0553", 0, keyframes, True))
    (root / "maps").mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8)).save(root / "maps" / "plain.png")
    logs = [row["token"] for row in writer.tables["log"]]
    writer.add("map", token=token("map"), log_tokens=logs, category="semantic_prior", filename="maps/plain.png")
    writer.finish()
