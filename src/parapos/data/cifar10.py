"""CIFAR-10: 60,000 colour pictures of 32 x 32 in ten classes, from the files of its "python version".

These are data_batch_1 to data_batch_5 and test_batch, each a pickle of a dictionary: `data` is a matrix of bytes (N,
3072), a row being the red, the green and the blue plane of a picture, and `labels` has N numbers. They are read without
unpickling, see readers/pickled.py.

The files have no validation split; ours is the last 5,000 training pictures by index, half of data_batch_5. The
pictures of each file are in random order.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import FormatError
from .readers import pickled
from .small_images import Augment as Augment
from .small_images import SmallImages, check_split
from .transforms import Size

FOLDER, SIDE, CLASSES = "cifar-10-batches-py", 32, 10
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VALIDATION = 5_000  # the last of the training pictures
LARGEST = 2**26  # bytes of a file; the true ones have 31 million
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
MD5 = {  # as published
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def read_batch(path: Path, md5: str | None = None) -> tuple[Tensor, list[int]]:
    """The pictures uint8 (N, 3, 32, 32) and the labels of a file. md5: what its content must have."""
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            raise FormatError(f"{path}: {size} bytes, expected at most {LARGEST}")
        data = file.read()
    if md5 is not None and (digest := hashlib.md5(data, usedforsecurity=False).hexdigest()) != md5:
        raise FormatError(f"{path}: md5 is {digest}, expected {md5}; complete=False accepts other files")
    content = pickled.loads(data, path)
    images, labels = (content.get("data"), content.get("labels")) if isinstance(content, dict) else (None, None)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3 * SIDE**2:
        shape = getattr(images, "shape", type(images).__name__)
        raise FormatError(f"{path}: at byte 0: data is {shape}, expected bytes (N, {3 * SIDE**2})")
    if type(labels) is not list or len(labels) != len(images):
        count = f"{len(labels)} labels" if type(labels) is list else "no list of labels"
        raise FormatError(f"{path}: at byte 0: {count}, expected one for each of {len(images)} pictures")
    for label in labels:
        if type(label) is not int or not 0 <= label < CLASSES:
            raise FormatError(f"{path}: at byte 0: label {str(label)[:20]!r}, expected 0 to {CLASSES - 1}")
    return torch.tensor(images).view(-1, 3, SIDE, SIDE), labels


class CIFAR10(SmallImages):
    """A split as float images (3, height, width) in [0, 1].

    "train" and "val" are the first 45,000 and the last 5,000 training pictures, "test" the test pictures. root: the
    folder of the files, or the one above it. train_images, val_images, test_images: only the first so many of the
    split, 0 for all. complete=False takes files of other content, and the last tenth for validation.
    """

    classes, class_names = CLASSES, NAMES

    def __init__(
        self,
        split: str,
        *,
        root: str | Path,
        size: Size = SIDE,
        seed: int = 0,
        augment: Augment | None = None,
        train_images: int = 0,
        val_images: int = 0,
        test_images: int = 0,
        complete: bool = True,
    ) -> None:
        few = {"train": train_images, "val": val_images, "test": test_images}
        check_split(split, few)
        folder = Path(root) / FOLDER if (Path(root) / FOLDER).is_dir() else Path(root)
        names = TEST if split == "test" else TRAIN
        for name in names:
            if not (folder / name).is_file():
                told = f"no such file, expected {', '.join((*TRAIN, *TEST))} of CIFAR-10's python version in {root}"
                raise FileNotFoundError(f"{folder / name}: {told}")
        batches = [read_batch(folder / name, MD5[name] if complete else None) for name in names]
        images, labels = torch.cat([batch for batch, _ in batches]), [label for _, batch in batches for label in batch]
        held = VALIDATION if complete else len(labels) // 10
        part = {"train": slice(0, len(labels) - held), "val": slice(len(labels) - held, None), "test": slice(None)}
        images, labels = images[part[split]], labels[part[split]]
        if not labels:
            raise FormatError(f"{folder}: no pictures for {split}, expected some")
        super().__init__(split, images, labels, size=size, seed=seed, augment=augment, few=few)
