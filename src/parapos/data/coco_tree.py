"""Generated copies of COCO's layout: one of seconds, with every oddity of the true files, and one to learn from.

    annotations/instances_<split>2017.json, <split>2017/<image id, 12 digits>.jpg    for train, val and test
    annotations/image_info_test-dev2017.json                                        as test, without annotations

`write_tiny` draws rectangles of three colours. `write_desk` draws ten digits and three shapes on textured ground: 1 to
8 an image, their longer sides log-uniform from 12 to 96 pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from . import FormatError
from .digits import SPLITS  # which samples of scikit-learn's digits are whose
from .generated import ensure

Array = np.ndarray[Any, Any]
YEAR = "2017"
TINY = ((1, "red"), (3, "green"), (90, "blue"))  # ids have gaps, as those of COCO
SHAPES = ("disc", "triangle", "cross")
DESK = tuple(zip((*range(1, 11), 13, 14, 17), (*(f"digit {n}" for n in range(10)), *SHAPES), strict=True))
DESK_SIDE = 192  # pixels of an image
DESK_IMAGES = {"train": 4000, "val": 200, "test": 500}
SIDES = (12.0, 96.0)  # pixels of the longer side of an object
MOST = 8  # objects of an image
Box = tuple[float, float, float, float]
Drawn = tuple[int, Box, bool]  # category, x y w h, whether a crowd


def write_tiny(root: str | Path, *, train: int = 20, val: int = 8, test: int = 8, seed: int = 0) -> None:
    """Writes images of 64 to 128 pixels with up to four rectangles to an empty or new folder. Among those of each split
    are a grey one, two without boxes, a crowd, a box at each border and one of 2 x 2 pixels; ids are in no order."""
    root = _new_folder(root)
    for number, (split, count) in enumerate({"train": train, "val": val, "test": test}.items()):
        if count < 6:
            raise ValueError(f"{split} must be at least 6 images, got {count}")
        rng = np.random.default_rng([seed, number])
        ids = (1000 * (number + 1) + 7 * rng.permutation(count)).tolist()
        drawn = [_tiny(i, rng) for i in range(count)]
        pictures = [(image.convert("L") if i == 4 else image, objects) for i, (image, objects) in enumerate(drawn)]
        _write_split(root, split, TINY, ids, pictures, rng)


def write_desk(root: str | Path, *, images: dict[str, int] | None = None, seed: int = 0) -> None:
    """Writes the generated data set of digits and shapes to an empty or new folder. images: of each split."""
    root = _new_folder(root)
    glyphs = _digits()
    for number, (split, count) in enumerate((images or DESK_IMAGES).items()):
        rng = np.random.default_rng([seed, number])
        ids = (100_000 * (number + 1) + rng.permutation(count)).tolist()
        pictures = [_desk(np.random.default_rng([seed, number, i]), glyphs[split]) for i in range(count)]
        _write_split(root, split, DESK, ids, pictures, rng)


def _new_folder(root: str | Path) -> Path:
    root = Path(root)
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _write_split(
    root: Path,
    split: str,
    categories: Sequence[tuple[int, str]],
    ids: Sequence[int],
    pictures: Sequence[tuple[Image.Image, list[Drawn]]],
    rng: np.random.Generator,
) -> None:
    """Images as JPEG, and their lists with every key that COCO's have."""
    folder, labels = root / f"{split}{YEAR}", root / "annotations"
    for path in (folder, labels):
        path.mkdir(exist_ok=True)
    images, annotations = [], []
    for number, (picture, objects) in zip(ids, pictures, strict=True):
        name = f"{number:012d}.jpg"
        picture.save(folder / name, "JPEG", quality=95, subsampling=0)
        url = f"http://example.org/{split}{YEAR}/{name}"
        size = {"height": picture.height, "width": picture.width}
        dated = {"date_captured": "2017-01-01 00:00:00", "flickr_url": url}
        images.append({"license": 1, "file_name": name, "coco_url": url, **size, **dated, "id": number})
        for category, (x, y, w, h), crowd in objects:
            shape: Any = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            if crowd:
                shape = {"size": [picture.height, picture.width], "counts": _runs((x, y, w, h), picture.height)}
                rest = picture.height * picture.width - sum(shape["counts"])
                shape["counts"].append(rest)
            entry = {"segmentation": shape, "area": w * h, "iscrowd": int(crowd), "image_id": number}
            annotations.append({**entry, "bbox": [x, y, w, h], "category_id": category})
    order = rng.permutation(len(annotations)).tolist()
    annotations = [{**annotations[m], "id": 900_000 - 3 * m} for m in order]
    head = {
        "info": {"description": "generated", "url": "", "version": "1.0", "year": 2017, "contributor": "parapos"},
        "licenses": [{"url": "", "id": 1, "name": "CC0"}],
        "images": images,
    }
    kinds = [{"supercategory": "drawn", "id": number, "name": name} for number, name in categories]
    whole = {**head, "annotations": annotations, "categories": kinds}
    (labels / f"instances_{split}{YEAR}.json").write_text(json.dumps(whole))
    if split == "test":
        (labels / f"image_info_test-dev{YEAR}.json").write_text(json.dumps({**head, "categories": kinds}))


def _runs(box: Box, height: int) -> list[int]:
    """Lengths of runs without and with the box, down the columns, as COCO has crowds; what follows is left out."""
    x, y, w, h = map(int, box)
    counts = [x * height + y]
    for column in range(w):
        counts += [h] if column == w - 1 else [h, height - h]
    return counts


def _tiny(number: int, rng: np.random.Generator) -> tuple[Image.Image, list[Drawn]]:
    height, width = rng.integers(64, 129), rng.integers(64, 129)
    image = Image.new("RGB", (int(width), int(height)), (60, 60, 60))
    boxes: list[tuple[int, int, int, int]] = []  # edges
    if number in (0, 1):  # nothing in it
        count = 0
    elif number == 2:  # at the left and top border, and at the right and lower one
        count, boxes = 2, [(0, 0, 20, 24), (int(width) - 22, int(height) - 18, int(width), int(height))]
    elif number == 3:
        count, boxes = 2, [(5, 5, 7, 7), (20, 20, 50, 44)]
    else:
        count = int(rng.integers(1, 5))
    for _ in range(50):
        if len(boxes) == count:
            break
        w, h = rng.integers(12, 40, 2).tolist()
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        if all(x + w < a or x > c or y + h < b or y > d for a, b, c, d in boxes):
            boxes.append((x, y, x + w, y + h))
    draw, objects = ImageDraw.Draw(image), []
    for k, (left, top, right, bottom) in enumerate(boxes):
        which = (number + k) % 3
        draw.rectangle((left, top, right - 1, bottom - 1), fill=tuple(230 * (c == which) for c in range(3)))
        box = (float(left), float(top), float(right - left), float(bottom - top))
        objects.append((TINY[which][0], box, number == 5 and k == 0))
    return image, objects


def _digits() -> dict[str, list[tuple[int, Array]]]:
    """Class and strokes (rows, columns) in [0, 1] of each digit, without empty edges, by split."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    found: dict[str, list[tuple[int, Array]]] = {split: [] for split in SPLITS}
    counted = [0] * 10
    for picture, digit in zip(data.images, data.target.tolist(), strict=True):
        tenth = counted[digit] % 10
        counted[digit] += 1
        rows, columns = ((picture > 6).any(axis).nonzero()[0] for axis in (1, 0))
        strokes = picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] / 16
        next(found[split] for split, part in SPLITS.items() if tenth in part).append((digit, strokes))
    return found


def _desk(rng: np.random.Generator, glyphs: Sequence[tuple[int, Array]]) -> tuple[Image.Image, list[Drawn]]:
    side = DESK_SIDE
    image = _ground(rng, side)
    objects: list[Drawn] = []
    for _ in range(int(rng.integers(1, MOST + 1))):
        length = math.exp(rng.uniform(math.log(SIDES[0]), math.log(SIDES[1])))
        label = int(rng.integers(len(DESK)))
        if label < 10:
            strokes = [s for digit, s in glyphs if digit == label]
            mask = _enlarge(strokes[int(rng.integers(len(strokes)))], length)
        else:
            mask = _shape(SHAPES[label - 10], length, rng)
        h, w = mask.shape
        for _ in range(40):
            x, y = int(rng.integers(0, side - w + 1)), int(rng.integers(0, side - h + 1))
            if all(x >= a + c or x + w <= a or y >= b + d or y + h <= b for _, (a, b, c, d), _ in objects):
                colour = rng.uniform(0.6, 1.0, 3)
                part = image[y : y + h, x : x + w]
                part += mask[..., None] * (colour - part)
                objects.append((DESK[label][0], (float(x), float(y), float(w), float(h)), False))
                break
    image += rng.normal(0, 0.02, image.shape)
    return Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8)), objects


def _ground(rng: np.random.Generator, side: int) -> Array:
    """(side, side, 3): clouds of a dark colour, with stripes."""
    few = Image.fromarray((rng.random((7, 7, 3)) * 255).astype(np.uint8))
    clouds = few.resize((side, side), Image.Resampling.BICUBIC)
    y, x = np.mgrid[:side, :side]
    turn, period = rng.uniform(0, math.pi), rng.uniform(5, 25)
    stripes = np.sin(2 * math.pi * (x * math.cos(turn) + y * math.sin(turn)) / period)
    return rng.uniform(0.05, 0.2) + 0.25 * np.asarray(clouds) / 255 + 0.04 * stripes[..., None]


def _enlarge(mask: Array, length: float) -> Array:
    """The longer side becomes `length` pixels, rounded."""
    h, w = (max(2, round(length * side / max(mask.shape))) for side in mask.shape)
    grey = Image.fromarray((mask * 255).astype(np.uint8)).resize((w, h), Image.Resampling.BICUBIC)
    return ((np.asarray(grey) / 255 - 0.3) / 0.4).clip(0, 1)  # strokes with an edge, however large


def _shape(name: str, length: float, rng: np.random.Generator) -> Array:
    """A shape that fills its box, drawn larger and then reduced."""
    long, short = round(length), max(6, round(length * rng.uniform(0.7, 1.0)))
    w, h = (long, short) if rng.random() < 0.5 else (short, long)
    image = Image.new("L", (4 * w, 4 * h))
    draw, right, bottom = ImageDraw.Draw(image), 4 * w - 1, 4 * h - 1
    if name == "disc":
        draw.ellipse((0, 0, right, bottom), fill=255)
    elif name == "triangle":
        draw.polygon([(0, bottom), (right, bottom), (rng.uniform(0.2, 0.8) * right, 0)], fill=255)
    else:
        bar_x, bar_y = 0.16 * right, 0.16 * bottom
        draw.rectangle((right / 2 - bar_x, 0, right / 2 + bar_x, bottom), fill=255)
        draw.rectangle((0, bottom / 2 - bar_y, right, bottom / 2 + bar_y), fill=255)
    return np.asarray(image.resize((w, h), Image.Resampling.BOX)) / 255


def ensure_desk(root: str | Path) -> None:
    """Writes the generated data set unless it is there."""
    ensure(root, "annotations", write_desk)
