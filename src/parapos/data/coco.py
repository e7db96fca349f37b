"""COCO 2017 as a data set of boxes, any data set in its layout, and a check of what a copy holds.

    root/annotations/instances_<split>2017.json, image_info_test-dev2017.json; images in root/<split>2017, or below
    root/images

"test" is a list with annotations if there is one, as in generated copies, and else COCO's test-dev, whose boxes only
its server knows.
"""

from __future__ import annotations

import os
import warnings
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import FormatError
from .augment.boxes import BoxAugment, pad, resize, sanitize
from .augment.boxes import augment as vary
from .coco_tree import YEAR, ensure_desk, write_tiny
from .images import MAX_IN_A_ROW, read_image
from .preparations import Job
from .prepared import Check, Item, Prepared
from .readers import coco_json
from .readers.coco_json import Instances
from .sampling import Key, sample_seed
from .transforms import MEAN, STD, Size, sides

TASK = "detection"
GIVES = ("image", "mask")
SPLITS = ("train", "val", "test")
FITS = ("stretch", "pad", "inside")
IMAGES = {"train": 118_287, "val": 5_000, "test": 20_288}
CATEGORIES = 80


@dataclass(frozen=True, kw_only=True)
class Augment(BoxAugment):
    """How training images and their boxes are varied."""


def find_list(root: Path, split: str) -> Path:
    """The file of instances of a split, or that of test-dev."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    path = root / "annotations" / f"instances_{split}{YEAR}.json"
    blind = root / "annotations" / f"image_info_test-dev{YEAR}.json"
    return blind if split == "test" and not path.is_file() and blind.is_file() else path


def find_images(root: Path, split: str) -> Path:
    """The folder of a split's images."""
    for folder in (root / f"{split}{YEAR}", root / "images" / f"{split}{YEAR}"):
        if folder.is_dir():
            return folder
    raise FormatError(f"{root / f'{split}{YEAR}'}: no such folder, expected the images of {split}")


class CocoBoxes:
    """Samples {"image", "boxes", "labels", "count", "scale", "id"}, and "truth" if they are not varied.

    image: float (3, H, W). boxes: float32 (M, 4), XYXY in pixels of it, with classes int64 (M,) as `labels` and M as
    `count`. scale: float64 (2,), its pixels per pixel of the file, in x and in y. id: the index in `instances.images`.
    truth: what detections are judged by, in pixels of the file: boxes float64 (M, 4) as x, y, width and height, labels,
    crowd and area (M,), and the id, height and width of the image.

    fit: how an image gets its size. "stretch" changes both sides, as the released code does; "pad" fits the image into
    the size and fills up to the right and below; "inside" does not fill up, so images of a batch differ in size.
    """

    ragged = ("boxes", "labels", *(f"truth.{name}" for name in ("boxes", "labels", "crowd", "area")))
    protocol = "coco"

    def __init__(
        self,
        instances: Instances,
        folder: Path,
        *,
        size: Size,
        fit: str = "stretch",
        seed: int = 0,
        augment: BoxAugment | None = None,
        raw_ids: bool = False,
        drop_crowd: bool = False,
        normalize: bool = False,
        corrupt: str = "error",
    ) -> None:
        if fit not in FITS:
            raise ValueError(f"fit must be one of {', '.join(FITS)}, got {fit!r}")
        if corrupt not in ("error", "skip"):
            raise ValueError(f"corrupt must be 'error' or 'skip', got {corrupt!r}")
        if augment is not None and augment.mode == "lsj" and fit != "pad":
            raise ValueError(f"augment.mode 'lsj' pads images: fit must be 'pad', got {fit!r}")
        self.instances, self.folder, self.size, self.fit = instances, folder, sides(size), fit
        self.seed, self.augment, self.corrupt = seed, augment, corrupt
        self.drop_crowd, self.normalize = drop_crowd, normalize
        self.category_ids = [number for number, _ in instances.categories]
        self.class_names = [name for _, name in instances.categories]
        if raw_ids:  # a class for every number up to the highest id
            if self.category_ids[0] < 0 or self.category_ids[-1] >= 2**16:
                raise ValueError(f"raw_ids: expected ids of categories from 0 to {2**16 - 1}")
            names = dict(instances.categories)
            self.category_ids = list(range(self.category_ids[-1] + 1))
            self.class_names = [names.get(number, f"unused {number}") for number in self.category_ids]
        self.classes = len(self.category_ids)
        label = {number: k for k, number in enumerate(self.category_ids)}
        self._labels = torch.tensor([label[number] for number, _ in instances.categories])
        mean, scale = (MEAN, STD) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self.preprocessing = {"fit": fit, "mean": list(mean), "scale": list(scale)}
        self.skipped = torch.zeros(len(self), dtype=torch.bool).share_memory_()
        self._find_files()

    def _find_files(self) -> None:
        """Whether all images are there; their content is looked at when they are read."""
        names: dict[Path, set[str]] = {}
        for index, image in enumerate(self.instances.images):
            path = self.path(index)
            if path.parent not in names:
                names[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            if path.name not in names[path.parent]:
                if self.corrupt == "error":
                    told = f"image {image.id} of {self.instances.path}"
                    raise FormatError(f"{path}: no such file, expected {told}; corrupt='skip' trains without it")
                self.skipped[index] = True
        if self.skipped.all():
            raise FormatError(f"{self.folder}: none of the images of {self.instances.path}")

    def __len__(self) -> int:
        return len(self.instances.images)

    def path(self, index: int) -> Path:
        return self.folder / self.instances.images[index].file

    def as_judged(self) -> CocoBoxes:
        """The same images as an evaluation sees them: each once, not varied."""
        if self.skipped.any() or self.instances.skipped:
            raise FormatError(f"{self.instances.path}: what cannot be read cannot be judged, expected a whole data set")
        other = copy(self)
        other.augment, other.corrupt, other.drop_crowd = None, "error", False
        return other

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        for _ in range(min(MAX_IN_A_ROW, len(self))):
            if not self.skipped[index]:
                try:
                    return self._sample(index, epoch)
                except FormatError:
                    if self.corrupt == "error":
                        raise
                    self.skipped[index] = True
            index = (index + 1) % len(self)
        raise FormatError(f"{self.path(index)}: this and the images before it cannot be read, none of many in a row")

    def read(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """An image uint8 (3, H, W) as it is in its file, boxes (M, 4) XYXY float64 in its pixels, and their classes."""
        info, path = self.instances.images[index], self.path(index)
        try:
            image = read_image(path, upright=False)
        except OSError as error:
            raise FormatError(f"{path}: image {info.id} cannot be read: {error}") from None
        if image.shape[1:] != (info.height, info.width):
            given = f"{image.shape[2]} x {image.shape[1]}"
            raise FormatError(
                f"{path}: {given} pixels, expected {info.width} x {info.height} as in {self.instances.path}"
            )
        rows = self.instances.of(index)
        boxes, labels = torch.from_numpy(self.instances.boxes[rows]), torch.from_numpy(self.instances.labels[rows])
        if self.drop_crowd:
            alone = ~torch.from_numpy(self.instances.crowd[rows])
            boxes, labels = boxes[alone], labels[alone]
        return image, torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1), self._labels[labels]

    def _sample(self, index: int, epoch: int) -> dict[str, Any]:
        image, boxes, labels = self.read(index)
        height, width = image.shape[-2:]
        if self.augment is not None:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch, index))
            image, boxes = vary(image, boxes, self.augment, self.size, generator)
        image, boxes = self.fitted(image, boxes)
        scale = [image.shape[2] / width, image.shape[1] / height]
        if self.fit == "pad":
            image = pad(image, self.size)
        if self.augment is not None:  # what is judged is judged by the file itself
            boxes, keep = sanitize(boxes, *image.shape[-2:])
            boxes, labels = boxes[keep], labels[keep]
        pixels = image.float() / 255
        if self.normalize:
            pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        sample = {
            "image": pixels,
            "boxes": boxes.float(),
            "labels": labels,
            "count": len(labels),
            "scale": torch.tensor(scale, dtype=torch.float64),
            "id": index,
        }
        return sample if self.augment is not None else {**sample, "truth": self.truth(index)}

    def truth(self, index: int) -> dict[str, Any]:
        """What detections of an image are judged by."""
        info, rows = self.instances.images[index], self.instances.of(index)
        found = {name: torch.from_numpy(getattr(self.instances, name)[rows]) for name in ("boxes", "crowd", "area")}
        labels = self._labels[torch.from_numpy(self.instances.labels[rows])]
        return {**found, "labels": labels, "image_id": info.id, "height": info.height, "width": info.width}

    def fitted(self, image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Resized to the size, or to fit into it."""
        if self.fit == "stretch":
            return resize(image, boxes, self.size)
        height, width = image.shape[-2:]
        factor = min(self.size[0] / height, self.size[1] / width)
        return resize(image, boxes, (max(1, round(height * factor)), max(1, round(width * factor))))


def coco(
    split: str,
    *,
    root: str | Path,
    size: Size = 640,
    seed: int = 0,
    augment: Augment | None = None,
    fit: str = "stretch",
    raw_ids: bool = False,
    drop_crowd: bool = False,
    normalize: bool = False,
    corrupt: str = "error",
    complete: bool = True,
) -> CocoBoxes:
    """A split of COCO 2017, or of a data set in its layout. augment is for "train", which has the released code's if
    none is given.

    raw_ids=True: classes are the ids of the file, 91 for COCO, as the released code has them; else they are counted
    without gaps, in the order of ids. drop_crowd=True trains without crowds. corrupt="skip" trains without images that
    cannot be read and without boxes that cannot be right. complete=False accepts any number of images.
    """
    train = split == "train"
    path = find_list(Path(root), split)
    instances = coco_json.read(path, skip=train and corrupt == "skip")
    if instances.skipped:
        told = f"{len(instances.skipped)} boxes are left out, the first: {instances.skipped[0]}"
        warnings.warn(f"{path}: {told}", stacklevel=2)
    if complete and (len(instances.images), len(instances.categories)) != (IMAGES[split], CATEGORIES):
        found = f"{len(instances.images)} images, {len(instances.categories)} categories"
        expected = f"{IMAGES[split]} and {CATEGORIES}"
        raise FormatError(f"{path}: {found}, expected {expected}; complete=False accepts this")
    return CocoBoxes(
        instances,
        find_images(Path(root), split),
        size=size,
        fit=fit,
        seed=seed,
        augment=(augment or Augment()) if train else None,
        raw_ids=raw_ids,
        drop_crowd=drop_crowd and train,
        normalize=normalize,
        corrupt=corrupt if train else "error",
    )


def coco_desk(
    split: str,
    *,
    root: str | Path = "data/coco_desk",
    size: Size = 192,
    seed: int = 0,
    augment: Augment | None = None,
    fit: str = "stretch",
    normalize: bool = False,
) -> CocoBoxes:
    """Generated digits and shapes in COCO's layout, written to the root if they are not there yet (half a minute)."""
    ensure_desk(root)
    options: dict[str, Any] = dict(size=size, seed=seed, fit=fit, normalize=normalize, complete=False)
    return coco(split, root=root, augment=augment, **options)


def synthetic(root: str | Path) -> None:
    """Writes a copy of a few images, for trials and tests."""
    write_tiny(root)


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts images and boxes of each split, and decodes all images unless job.quick."""
    result, root = Check(), Path(job.root)
    for split in SPLITS:
        path, total = find_list(root, split), IMAGES[split]
        if not path.is_file():
            result.rows.append((f"{split} images", "not there", f"{total:,}" if job.complete else ""))
            if job.complete or split == "train":
                result.problems.append(f"{path}: no such file")
            continue
        try:
            instances = coco_json.read(path, skip=True)
            data = CocoBoxes(instances, find_images(root, split), size=32, corrupt="skip")
        except FormatError as error:
            result.problems.append(str(error))
            continue
        result.count(f"{split} images", len(data), total if job.complete else None)
        result.count("  categories", len(instances.categories), CATEGORIES if job.complete else None)
        if instances.labelled:
            result.count("  boxes", len(instances.boxes))
            result.count("  of them crowds", int(instances.crowd.sum()))
            result.count("  images without boxes", int((instances.first[1:] == instances.first[:-1]).sum()))
        result.problems += [f"{path}: {problem}" for problem in instances.skipped]
        missing = data.skipped.nonzero().flatten().tolist()
        result.problems += [f"{data.path(i)}: no such file, image {instances.images[i].id} of {path}" for i in missing]
        if job.quick:
            continue
        unreadable = 0
        for i in job.progress(range(len(data)), f"{split} images"):
            if not data.skipped[i]:
                try:
                    data.read(i)
                except FormatError as error:
                    unreadable += 1
                    result.problems.append(str(error))
        result.rows.append(("  unreadable", f"{unreadable:,}", "0"))
    return result, []


def prepare(job: Job) -> Prepared:
    """Nothing has to be written: samples are read from the files. What is wrong with them is told."""
    return Prepared(failed=survey(job)[0].problems)
