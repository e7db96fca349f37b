"""Instances of a COCO file: images, boxes and categories as arrays, checked before anything is trained on them.

A box is x and y of the top left corner, width and height, in pixels of its image. M boxes, K categories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from reprlib import repr as shown  # short, however long or deep a value is
from typing import Any, TypeGuard

import numpy as np

from .. import FormatError

Array = np.ndarray[Any, Any]
_Row = tuple[int, int, list[float], int, bool, float, int]
SLACK = 1.0  # pixels by which boxes may leave their image: those of COCO are rounded


@dataclass(frozen=True)
class ImageInfo:
    """An image of the list: its id, the name of its file, and its size in pixels."""

    id: int
    file: str
    height: int
    width: int


@dataclass(eq=False)
class Instances:
    """What a file says. Images are sorted by id, boxes by image and then as in the file, categories by id.

    first: (images + 1,), boxes of image i are first[i] to first[i + 1]. boxes (M, 4) float64, labels (M,) rows of
    `categories`, crowd (M,) bool, area (M,) float64 as the file has it, ids (M,) of the annotations. A list of images
    without annotations, as COCO's test sets are, has `labelled` False. skipped: what was left out, and why.
    """

    path: Path
    images: list[ImageInfo]
    categories: list[tuple[int, str]]
    first: Array
    boxes: Array
    labels: Array
    crowd: Array
    area: Array
    ids: Array
    labelled: bool = True
    skipped: list[str] = field(default_factory=list)

    def of(self, index: int) -> slice:
        """The rows of an image's boxes."""
        return slice(int(self.first[index]), int(self.first[index + 1]))

    def dictionary(self, keep: Sequence[int] | None = None) -> dict[str, Any]:
        """As a COCO file has it; of these images alone, by their index, if given."""
        chosen = range(len(self.images)) if keep is None else keep
        rows = [(i, m) for i in chosen for m in range(*self.of(i).indices(len(self.boxes)))]
        annotations = [
            {
                "id": int(self.ids[m]),
                "image_id": self.images[i].id,
                "category_id": self.categories[int(self.labels[m])][0],
                "bbox": self.boxes[m].tolist(),
                "area": float(self.area[m]),
                "iscrowd": int(self.crowd[m]),
            }
            for i, m in rows
        ]
        images = [
            {"id": image.id, "file_name": image.file, "height": image.height, "width": image.width}
            for image in (self.images[i] for i in chosen)
        ]
        categories = [{"id": number, "name": name} for number, name in self.categories]
        return {"images": images, "annotations": annotations, "categories": categories}


def read(path: str | Path, *, skip: bool = False) -> Instances:
    """The instances of a file. Whatever cannot be right raises FormatError with the file and the id; skip=True leaves
    such boxes out and names them in `skipped`, but still raises where the file as a whole is broken."""
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file, expected a list of instances as COCO has it") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON, perhaps cut off: {error}") from None
    return parse(data, path, skip=skip)


def parse(data: Any, path: str | Path = "instances", *, skip: bool = False) -> Instances:
    """As `read`, of what a file holds."""
    path = Path(path)
    if not isinstance(data, dict):
        raise FormatError(f"{path}: expected a dictionary with images and categories, got {type(data).__name__}")
    images = _images(data, path)
    categories = _categories(data, path)
    labelled = "annotations" in data
    place = {image.id: i for i, image in enumerate(images)}
    label = {number: k for k, (number, _) in enumerate(categories)}
    rows: list[_Row] = []
    skipped: list[str] = []
    used: set[int] = set()
    for position, entry in enumerate(_list(data, "annotations", path) if labelled else ()):
        try:
            rows.append(_annotation(entry, position, images, place, label, used))
        except _Bad as bad:
            if not skip:
                raise FormatError(f"{path}: {bad}") from None
            skipped.append(str(bad))
    rows.sort(key=lambda row: row[:2])
    counts = np.bincount([row[0] for row in rows], minlength=len(images)) if rows else np.zeros(len(images), np.int64)
    return Instances(
        path,
        images,
        categories,
        first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        boxes=np.array([row[2] for row in rows], np.float64).reshape(-1, 4),
        labels=np.array([row[3] for row in rows], np.int64),
        crowd=np.array([row[4] for row in rows], np.bool_),
        area=np.array([row[5] for row in rows], np.float64),
        ids=np.array([row[6] for row in rows], np.int64),
        labelled=labelled,
        skipped=skipped,
    )


class _Bad(Exception):
    """What is wrong with an annotation."""


def _images(data: Mapping[str, Any], path: Path) -> list[ImageInfo]:
    found: dict[int, ImageInfo] = {}
    for position, entry in enumerate(_list(data, "images", path)):
        number = _id(entry, "image", position, path)
        if number in found:
            raise FormatError(f"{path}: image {number}: its id occurs twice, expected once")
        name = entry.get("file_name")
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if not parts or name[0] == "/" or ".." in parts or "\0" in name or not _is_text(name):
            told = f"expected a file_name within the folder of images, got {shown(name)}"
            raise FormatError(f"{path}: image {number}: {told}")
        height, width = (entry.get(key) for key in ("height", "width"))
        if not all(type(side) is int and 1 <= side < 2**20 for side in (height, width)):
            told = f"expected whole height and width, got {shown(height)}, {shown(width)}"
            raise FormatError(f"{path}: image {number}: {told}")
        found[number] = ImageInfo(number, str(name), height, width)
    if not found:
        raise FormatError(f"{path}: no images, expected at least one")
    return [found[number] for number in sorted(found)]


def _categories(data: Mapping[str, Any], path: Path) -> list[tuple[int, str]]:
    found: dict[int, str] = {}
    first_of: dict[str, int] = {}  # by name as metrics have it, without spaces
    for position, entry in enumerate(_list(data, "categories", path)):
        number, name = _id(entry, "category", position, path), entry.get("name")
        if number in found:
            raise FormatError(f"{path}: category {number}: its id occurs twice, expected once")
        if not isinstance(name, str) or not name.strip() or not _is_text(name):
            raise FormatError(f"{path}: category {number}: expected a name, got {shown(name)}")
        first = first_of.setdefault(name.replace(" ", "_"), number)
        if first != number:
            told = f"its name {shown(name)} gives the metric of category {first}, {shown(found[first])}"
            raise FormatError(f"{path}: category {number}: {told}; expected names that differ in more than spaces")
        found[number] = name
    if not found:
        raise FormatError(f"{path}: no categories, expected at least one")
    return sorted(found.items())


def _annotation(
    entry: Any,
    position: int,
    images: Sequence[ImageInfo],
    place: Mapping[int, int],
    label: Mapping[int, int],
    used: set[int],
) -> _Row:
    """Image, position in the file, box, label, whether a crowd, area and id."""
    if not isinstance(entry, dict) or not _is_id(number := entry.get("id")):
        raise _Bad(f"annotation at place {position}: expected a dictionary with a whole id, got {shown(entry)}")
    name = f"annotation {number}"
    if number in used:
        raise _Bad(f"{name}: its id occurs twice, expected once")
    used.add(number)
    image, category = entry.get("image_id"), entry.get("category_id")
    if type(image) is not int or image not in place:
        raise _Bad(f"{name}: image {shown(image)} is not in the list of images")
    if type(category) is not int or category not in label:
        raise _Bad(f"{name}: category {shown(category)} is not in the list of categories")
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(type(v) in (int, float) for v in box):
        raise _Bad(f"{name}: expected a bbox of four numbers, got {shown(box)}")
    x, y, w, h = (float(v) if abs(v) < 2**53 else math.inf for v in box)
    if not all(map(math.isfinite, (x, y, w, h))) or w < 0 or h < 0:
        raise _Bad(f"{name}: expected finite numbers and no negative width or height, got bbox {shown(box)}")
    info = images[place[image]]
    if x < -SLACK or y < -SLACK or x + w > info.width + SLACK or y + h > info.height + SLACK:
        told = f"bbox {shown(box)} leaves image {image} of {info.width} x {info.height} pixels"
        raise _Bad(f"{name}: {told}, expected it inside")
    area, crowd = entry.get("area", w * h), entry.get("iscrowd", 0)
    if type(area) not in (int, float) or not 0 <= area < 2**53:
        raise _Bad(f"{name}: expected an area of 0 or more, got {shown(area)}")
    if crowd not in (0, 1):
        raise _Bad(f"{name}: expected iscrowd to be 0 or 1, got {shown(crowd)}")
    return place[image], position, [x, y, w, h], label[category], bool(crowd), float(area), number


def _list(data: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    found = data.get(key)
    if not isinstance(found, list):
        raise FormatError(f"{path}: expected a list of {key}, got {type(found).__name__ if key in data else 'none'}")
    return found


def _id(entry: Any, what: str, position: int, path: Path) -> int:
    if not isinstance(entry, dict) or not _is_id(number := entry.get("id")):
        raise FormatError(f"{path}: {what} at place {position}: expected a whole id, got {shown(entry)}")
    return number


def _is_id(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 2**63


def _is_text(value: str) -> bool:
    """Whether UTF-8 has it. JSON may hold halves of characters, which no file and no terminal takes."""
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False
