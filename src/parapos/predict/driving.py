"""Cameras and LiDAR of a car: keyframes of nuScenes become frames, and boxes are drawn in the images and from above.

An input is a LiDAR file. If it lies in <root>/samples/LIDAR_TOP of a copy of nuScenes, its tables say which images and
older sweeps belong to it, how the sensors stand, and what is true. Images that are not there are done without, and a
LiDAR file from elsewhere is looked at alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from ..data import FormatError, rigid
from ..data.batch import collate
from ..data.nuscenes import POINT_RANGE, NuScenes
from ..data.nuscenes_classes import CAMERAS, CLASSES, LIDAR, VERSIONS
from ..data.nuscenes_frames import Camera, Sweep, make_frame
from ..data.nuscenes_frames import Frame as Keyframe
from ..data.nuscenes_prepare import open_tables
from ..models.unitr import UniTR, decode
from ..tasks.base import Batch, answer
from . import Frame, PredictError
from .drawing import COLOURS, GREY, INK, PAPER, _font
from .sources import SOURCES, Medium, Source, _path, _sides
from .views import VIEWS, View

Array = np.ndarray[Any, Any]
WIDE, HIGH = 400, 225  # of an image's panel
ABOVE = 600  # of a panel from above
HEAD = 22  # of a panel's title
LAYOUT = ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT")
EDGES = (
    [(i, (i + 1) % 4) for i in range(4)] + [(i + 4, (i + 1) % 4 + 4) for i in range(4)] + [(i, i + 4) for i in range(4)]
)
NEAREST = 0.1  # metres before a camera from which on something is drawn
TRUTH = "#ffffff"


@dataclass(frozen=True)
class DrivingFrame(Frame):
    """A frame with what its picture is drawn from. extent: what is seen from above, least and largest x and y."""

    keyframe: Keyframe | None = None
    images: Mapping[int, Image.Image] = field(default_factory=dict)
    extent: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    @property
    def truth(self) -> list[dict[str, Any]]:
        """Boxes that are true, if there are any; those without a LiDAR point are left out."""
        assert self.keyframe is not None
        rows = self.keyframe.objects[self.keyframe.objects["lidar"] > 0]
        return [_plain(np.nan_to_num(row["box"]), int(row["label"]), CLASSES[row["label"]]) for row in rows]


def _plain(box: Array, label: int, name: str) -> dict[str, Any]:
    place = [round(float(value), 3) for value in box]
    return {"box": place[:7], "velocity": place[7:], "class": label, "name": name}


class DrivingFiles(Source):
    """LiDAR files, each with all that belongs to it."""

    suffixes = (".bin",)

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        super().__init__(model, known, size=size, every=every)
        if every is not None:
            raise PredictError("every has no effect: this model answers once for a keyframe")
        self.size = _sides(size if size is not None else known.get("size") or 0)
        if any(side < 1 or side % self.patch for side in self.size):
            told = f"{self.size[0]} x {self.size[1]}"
            raise PredictError(f"size must be a multiple of the model's patch size {self.patch}, got {told}")

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return collate([dict(sample) for sample in samples], NuScenes.ragged, (), NuScenes.packed)

    def read(self, thing: Any) -> Medium:
        path = _path(thing)
        keyframe, root = find_keyframe(path)
        near = self.known.get("point_range", POINT_RANGE)
        options = {name: self.known[name] for name in ("resize", "sweeps") if name in self.known}
        data = NuScenes([keyframe], root, size=self.size, point_range=near, missing="mask", **options)
        sample, images = data.sample(0), data.images(keyframe)
        missing = [name for i, name in enumerate(CAMERAS) if i not in images]
        about = {"sample": keyframe.token, "points": len(sample["points"]), "missing_cameras": missing}
        extent = (float(near[0]), float(near[1]), float(near[3]), float(near[4]))
        frame = DrivingFrame(sample, torch.empty(0), about, keyframe=keyframe, images=images, extent=extent)
        picture = torch.from_numpy(np.array(draw_scene(frame, []))).permute(2, 0, 1)
        return Medium([DrivingFrame(sample, picture, about, keyframe=keyframe, images=images, extent=extent)])


def find_keyframe(path: Path) -> tuple[Keyframe, Path]:
    """The keyframe of a LiDAR file, and the folder that its files are in."""
    full = path.resolve()
    if len(full.parts) > 3 and full.parts[-3:-1] == ("samples", LIDAR):
        root, file = full.parents[2], "/".join(full.parts[-3:])
        for version in VERSIONS:
            if (root / version).is_dir():
                tables = open_tables(root / version)
                row = next((row for row in tables["sample_data"].values() if row["filename"] == file), None)
                if row is not None:
                    sample = tables["sample"][row["sample_token"]]
                    scene = tables["scene"][sample["scene_token"]]["name"]
                    return make_frame(tables, sample, scene), root
    if not path.is_file():
        raise FormatError(f"{path}: no such file")
    sweep = Sweep(full.name, "none", np.eye(4), 0.0)
    nothing: list[Camera | None] = [None] * len(CAMERAS)
    return Keyframe(full.stem, "", 0, np.eye(4), np.zeros(3), [sweep], nothing, np.zeros((0, 10))), full.parent


class Boxes3DView(View):
    """Boxes in the LiDAR frame: x, y, z of the centre, length, width, height and yaw, in metres and radians, with
    velocities. The picture has them in the images and from above; what is true is white there, and beside it."""

    key = "boxes"
    least = 0.25

    def answers(self, model: nn.Module, batch: Batch, frames: Sequence[Frame]) -> list[list[dict[str, Any]]]:
        return [self._boxes(found) for found in decode(answer(model, batch))]

    def _boxes(self, found: Any) -> list[dict[str, Any]]:
        order = found.scores.argsort(descending=True, stable=True)
        rows = zip(found.boxes[order].double().cpu().numpy(), *(x[order].tolist() for x in found[1:]), strict=True)
        return [
            {**_plain(box, label, self.name(label)), "score": round(score, 6)}
            for box, score, label in rows
            if score >= self.threshold
        ]

    def read(
        self, model: nn.Module, batch: Batch, frames: Sequence[Frame]
    ) -> Iterable[tuple[list[dict[str, Any]], Mapping[str, Any]]]:
        for frame, answers in zip(frames, self.answers(model, batch, frames), strict=True):
            assert isinstance(frame, DrivingFrame)
            picture = torch.from_numpy(np.array(draw_scene(frame, answers))).permute(2, 0, 1)
            yield answers, {"picture": picture, "metrics": {"truth": frame.truth} if frame.truth else {}}

    def draw(self, picture: Image.Image, answers: Sequence[Mapping[str, Any]]) -> Image.Image:
        return picture  # with everything on it


def draw_scene(frame: DrivingFrame, answers: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Six images, if there is any, and below them the scene from above, beside what is true if that is known."""
    truth = frame.truth
    cameras = 2 * (HIGH + HEAD) if frame.images else 0
    width = 3 * WIDE if frame.images or truth else ABOVE
    page = Image.new("RGB", (width, cameras + HEAD + ABOVE), PAPER)
    assert frame.keyframe is not None
    for place, name in enumerate(LAYOUT) if frame.images else ():
        number = CAMERAS.index(name)
        left, top = place % 3 * WIDE, place // 3 * (HIGH + HEAD)
        _title(page, left, top, WIDE, name)
        if number in frame.images:
            camera = frame.keyframe.cameras[number]
            assert camera is not None
            page.paste(draw_camera(frame.images[number], camera, answers, truth), (left, top + HEAD))
        else:
            ImageDraw.Draw(page).rectangle((left, top + HEAD, left + WIDE - 1, top + HEAD + HIGH - 1), fill="#dddddd")
            _title(page, left, top + HEAD + HIGH // 2, WIDE, "no image")
    panels = [("found", answers)] + ([("true", truth)] if truth else [])
    for place, (name, boxes) in enumerate(panels):
        left = place * ABOVE + (width - ABOVE * len(panels)) // 2
        _title(page, left, cameras, ABOVE, f"{name}: {len(boxes)} boxes from above, the car looks up")
        page.paste(draw_above(frame, boxes), (left, cameras + HEAD))
    return page


def _title(page: Image.Image, left: int, top: int, width: int, text: str) -> None:
    ImageDraw.Draw(page).text((left + width / 2, top + HEAD / 2), text, INK, _font(13), anchor="mm")


def draw_camera(
    image: Image.Image, camera: Camera, answers: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]
) -> Image.Image:
    """An image with the edges of boxes; what is true is thin and white."""
    page = image.resize((WIDE, HIGH))
    draw = ImageDraw.Draw(page)
    zoom = np.array([WIDE / camera.width, HIGH / camera.height])
    for boxes, width in ((truth, 1), (list(reversed(answers)), 2)):
        for one in boxes:
            colour = TRUTH if boxes is truth else COLOURS[one["class"] % len(COLOURS)]
            lines = edges_in(np.array(one["box"]), camera)
            for a, b in lines:
                draw.line([tuple((a * zoom).tolist()), tuple((b * zoom).tolist())], fill=colour, width=width)
            if lines and boxes is not truth:
                left, top = (np.array(lines).reshape(-1, 2).min(0) * zoom).clip(0, [WIDE - 60, HIGH - 12]).tolist()
                draw.text((left, top), f"{one['name']} {one['score']:.2f}", colour, _font(10))
    return page


def edges_in(box: Array, camera: Camera) -> list[tuple[Array, Array]]:
    """The edges of a box (7,) as pairs of pixels, as far as they are before the camera; none if it does not see it."""
    corners = rigid.corners(box[None])[0]
    h = corners @ camera.lidar2image[:3, :3].T + camera.lidar2image[:3, 3]
    found = []
    for i, j in EDGES:
        a, b = h[i], h[j]
        if max(a[2], b[2]) < NEAREST:
            continue
        if min(a[2], b[2]) < NEAREST:  # cut where it passes the camera
            cut = a + (b - a) * (NEAREST - a[2]) / (b[2] - a[2])
            a, b = (cut, b) if a[2] < NEAREST else (a, cut)
        found.append((a[:2] / a[2], b[:2] / b[2]))
    pixels = np.array(found).reshape(-1, 2)
    size = np.array([camera.width, camera.height])
    seen = len(pixels) and (pixels.max(0) > 0).all() and (pixels.min(0) < size).all()
    return found if seen else []


def draw_above(frame: DrivingFrame, boxes: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Points and boxes from above, x to the right and y up; a line leads from each centre to its front."""
    page = Image.new("RGB", (ABOVE, ABOVE), PAPER)
    draw = ImageDraw.Draw(page)
    low_x, low_y, high_x, high_y = frame.extent
    zoom = ABOVE / max(high_x - low_x, high_y - low_y)

    def place(points: Array) -> list[tuple[float, ...]]:
        x, y = (points[:, 0] - low_x) * zoom, ABOVE - (points[:, 1] - low_y) * zoom
        return [tuple(row) for row in np.stack([x, y], 1).tolist()]

    points = frame.sample["points"].numpy()
    for x, y in place(points[points[:, 4] == 0]):
        draw.point((x, y), fill=GREY)
    for one in reversed(boxes):
        box = np.array(one["box"])
        colour = COLOURS[one["class"] % len(COLOURS)]
        draw.polygon(place(rigid.corners(box[None])[0][:4]), outline=colour, width=2)
        front = box[:2] + box[3] / 2 * np.array([np.cos(box[6]), np.sin(box[6])])
        draw.line(place(np.stack([box[:2], front])), fill=colour, width=2)
    draw.polygon(place(np.array([[0.0, 1.0], [-0.6, -1.0], [0.6, -1.0]])), fill=INK)
    draw.rectangle((0, 0, ABOVE - 1, ABOVE - 1), outline=GREY)
    return page


SOURCES[UniTR.inputs] = DrivingFiles
VIEWS["detection3d"] = Boxes3DView
