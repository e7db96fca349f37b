"""Objects of other frames pasted into a frame: their LiDAR points, and their pictures into the camera images.

An object keeps the place in the LiDAR frame that it had. M boxes of a frame, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from . import rigid
from .augment.driving import DrivingAugment
from .nuscenes_classes import CLASSES

Array = np.ndarray[Any, Any]
MOST_OVERLAP = 0.5  # of rectangles in an image


class Database:
    """Objects of training frames. objects: rows of `OBJECT`; owner (n,): the scene of each; points and crops: of each
    scene, float32 (k, 5) relative to the centres of boxes, and bytes of JPEG files one after another."""

    def __init__(
        self, objects: Array, owner: Array, points: Sequence[Array], crops: Sequence[Array], least_points: int
    ) -> None:
        self.objects, self.owner, self._points, self._crops = objects, owner, points, crops
        enough = objects["points"] >= max(1, least_points)
        self.by_class = [np.flatnonzero(enough & (objects["label"] == label)) for label in range(len(CLASSES))]

    def points(self, number: int) -> Array:
        """float32 (k, 5) in the LiDAR frame."""
        row = self.objects[number]
        found = np.array(self._points[self.owner[number]][row["points_at"] : row["points_at"] + row["points"]])
        found[:, :3] += row["box"][:3].astype(np.float32)
        return found

    def picture(self, number: int) -> Image.Image | None:
        """What its camera sees of an object; None if none does."""
        import io

        row = self.objects[number]
        if not row["crop"]:
            return None
        data = self._crops[self.owner[number]][row["crop_at"] : row["crop_at"] + row["crop"]]
        return Image.open(io.BytesIO(data.tobytes())).convert("RGB")


def overlaps(a: Array, b: Array) -> Array:
    """(M, K): whether boxes (M, 7+) and (K, 7+) share ground, seen from above. Touching does not count."""
    if not len(a) or not len(b):
        return np.zeros((len(a), len(b)), bool)
    first, second = (rigid.corners(boxes)[:, :4, :2] for boxes in (a, b))  # (M, 4, 2), (K, 4, 2)
    apart = np.zeros((len(a), len(b)), bool)
    for boxes, of_first in ((a, True), (b, False)):
        axes = rigid.turn(boxes[:, 6])[:, :2, :2].transpose(0, 2, 1)  # (n, 2 axes, 2)
        for axis in (0, 1):
            line = axes[:, axis]  # (n, 2)
            if of_first:
                x, y = np.einsum("mcd,md->mc", first, line)[:, None], np.einsum("kcd,md->mkc", second, line)
            else:
                x, y = np.einsum("mcd,kd->mkc", first, line), np.einsum("kcd,kd->kc", second, line)[None]
            apart |= (x.max(-1) <= y.min(-1)) | (y.max(-1) <= x.min(-1))
    return ~apart


def rectangle_overlaps(a: Array, b: Array) -> Array:
    """(M, K) intersection over union of rows view, x1, y1, x2, y2; 0 for different views, and for no view."""
    low, high = np.maximum(a[:, None, 1:3], b[None, :, 1:3]), np.minimum(a[:, None, 3:], b[None, :, 3:])
    shared = (high - low).clip(0).prod(-1)
    areas = [((rows[:, 3:] - rows[:, 1:3]).clip(0)).prod(-1) for rows in (a, b)]
    same = (a[:, None, 0] == b[None, :, 0]) & (a[:, None, 0] >= 0)
    return np.where(same, shared / np.maximum(areas[0][:, None] + areas[1][None] - shared, 1e-9), 0.0)


def _rectangles(objects: Array) -> Array:
    return np.concatenate([objects["view"][:, None].astype(np.float64), objects["rectangle"]], 1)


def choose(objects: Array, database: Database, augment: DrivingAugment, rng: np.random.Generator) -> Array:
    """Numbers of objects of the database that fit into a frame with these objects (M,), class by class."""
    boxes, drawn = objects["box"], _rectangles(objects)
    accepted: list[int] = []
    for label, target in enumerate(augment.paste):
        pool = database.by_class[label]
        wanted = min(target - int((objects["label"] == label).sum()), len(pool))
        if wanted < 1:
            continue
        numbers = rng.choice(pool, wanted, replace=False)
        rows = database.objects[numbers]
        hits = overlaps(rows["box"], boxes).any(1)
        among = overlaps(rows["box"], rows["box"])
        covered = (rectangle_overlaps(_rectangles(rows), drawn) >= MOST_OVERLAP).any(1)
        covering = rectangle_overlaps(_rectangles(rows), _rectangles(rows)) >= MOST_OVERLAP
        for square in (among, covering):
            np.fill_diagonal(square, False)
        good = ~(hits | covered | among.any(1) | covering.any(1))
        accepted += numbers[good].tolist()
        boxes = np.concatenate([boxes, rows["box"][good]])
    return np.array(accepted, np.int64)


def paste_points(points: Array, database: Database, numbers: Array, oldest: float) -> Array:
    """Points (n, 5) with those of the objects, in place of what lay in their boxes. oldest: points of objects that are
    older than those of the frame, in seconds, are left out."""
    keep = np.ones(len(points), bool)
    for number in numbers:
        keep &= ~rigid.inside(points[:, :3].astype(np.float64), database.objects[number]["box"])
    added = [database.points(int(number)) for number in numbers]
    return np.concatenate([*(part[part[:, 4] <= oldest + 1e-3] for part in added), points[keep]])


@dataclass(frozen=True)
class _Layer:
    """A picture on its way into an image: how far away it is, and where it goes."""

    distance: float
    corner: tuple[int, int]
    picture: Image.Image


def pixels(rectangle: Array, width: int, height: int) -> tuple[int, int, int, int]:
    """Whole pixels left, top, right, bottom of a rectangle in an image; at least one."""
    left, top = (min(max(int(edge), 0), most - 1) for edge, most in zip(rectangle[:2], (width, height), strict=True))
    right, bottom = (int(np.ceil(edge)) for edge in rectangle[2:])
    return left, top, min(max(right, left + 1), width), min(max(bottom, top + 1), height)


def paste_pictures(
    images: Mapping[int, Image.Image], objects: Array, database: Database, numbers: Array, weight: float
) -> dict[int, Image.Image]:
    """Images by view with the objects, from far to near. What is there already is pasted again in its turn, so that it
    may cover what is farther away. Views without a new object stay as they are."""
    layers: dict[int, list[_Layer]] = {}
    for number in numbers:
        row, picture = database.objects[number], database.picture(int(number))
        view = int(row["view"])
        if picture is not None and view in images:
            left, top, right, bottom = pixels(row["rectangle"], *images[view].size)
            if picture.size == (right - left, bottom - top):  # of a camera of the same size
                distance = float(np.hypot(*row["box"][:2]))
                layers.setdefault(view, []).append(_Layer(distance, (left, top), picture))
    found = dict(images)
    for view, new in layers.items():
        image = images[view]
        there = []
        for row in objects[objects["view"] == view]:
            box = pixels(row["rectangle"], *image.size)
            there.append(_Layer(float(np.hypot(*row["box"][:2])), box[:2], image.crop(box)))
        result = image.copy()
        for layer in sorted(there + new, key=lambda one: -one.distance):
            (left, top), (wide, high) = layer.corner, layer.picture.size
            below = result.crop((left, top, left + wide, top + high))
            result.paste(Image.blend(below, layer.picture, weight), layer.corner)
        found[view] = result
    return found
