"""Fashion-MNIST: 70,000 grey pictures of clothes of 28 x 28 in ten classes, drawn at any size, from the original files.

These are four files in idx format, plain or with gzip, as Debian's package dataset-fashion-mnist has them: a header of
big-endian 32-bit numbers (a magic number with the count of dimensions in its last byte, then their sizes), then bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from . import FormatError
from .small_images import Augment as Augment
from .small_images import SmallImages, check_split
from .transforms import Size

SIDE, CLASSES, TRAIN, TEST = 28, 10, 60_000, 10_000
NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
VALIDATION = 5_000  # the last of the training images
LARGEST = 2**27  # bytes of a file, unpacked
SHA256 = {  # of the files without gzip
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def read_idx(path: Path, dims: int, sha256: str | None = None) -> Tensor:
    """A file of bytes in `dims` dimensions, uint8. sha256: what its content without gzip must have."""
    data = _unpacked(path)
    size = 4 + 4 * dims
    if data[:4] != (magic := bytes([0, 0, 8, dims])):
        raise FormatError(f"{path}: at byte 0: magic number {data[:4].hex() or 'missing'}, expected {magic.hex()}")
    if len(data) < size:
        raise FormatError(f"{path}: at byte {len(data)}: the file ends in its header, expected {size} bytes of it")
    shape = struct.unpack(f">{dims}I", data[4:size])
    if len(data) != size + math.prod(shape):
        told = f"{len(data) - size} bytes of content, expected {' x '.join(map(str, shape))} = {math.prod(shape)}"
        raise FormatError(f"{path}: at byte {size}: {told}")
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise FormatError(f"{path}: sha256 of its content is {found}, expected {sha256}")
    if not math.prod(shape):
        raise FormatError(f"{path}: at byte 4: sizes {shape}, expected at least one entry")
    return torch.frombuffer(data, dtype=torch.uint8, offset=size).view(shape)


def _unpacked(path: Path) -> bytearray:
    """The content of a file, without gzip if its name ends in .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = bytearray(file.read(LARGEST + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: not a whole gzip file: {error}") from None
    if len(data) > LARGEST:
        raise FormatError(f"{path}: more than {LARGEST} bytes, expected at most so many")
    return data


def _find(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{root / name}.gz: no such file, expected it there, or without .gz")


class FashionMNIST(SmallImages):
    """A split as float images (3, height, width) in [0, 1], with all three channels alike.

    "train" and "val" are the first 55,000 and the last 5,000 training images, "test" the test images. train_images,
    val_images, test_images: only the first so many of the split, 0 for all; the files are in random order.
    complete=False takes files of other content than the published one, and the last tenth for validation.
    """

    classes = CLASSES
    class_names = NAMES

    def __init__(
        self,
        split: str,
        *,
        root: str | Path,
        size: Size = 32,
        seed: int = 0,
        augment: Augment | None = None,
        train_images: int = 0,
        val_images: int = 0,
        test_images: int = 0,
        complete: bool = True,
    ) -> None:
        few = {"train": train_images, "val": val_images, "test": test_images}
        check_split(split, few)
        kind = "t10k" if split == "test" else "train"
        names = [f"{kind}-images-idx3-ubyte", f"{kind}-labels-idx1-ubyte"]
        paths = [_find(Path(root), name) for name in names]
        images, labels = (
            read_idx(path, dims, SHA256[name] if complete else None)
            for path, name, dims in zip(paths, names, (3, 1), strict=True)
        )
        if len(images) != len(labels):
            raise FormatError(f"{paths[1]}: at byte 4: {len(labels)} labels, expected one for each of {len(images)}")
        if images.shape[1:] != (SIDE, SIDE):
            raise FormatError(f"{paths[0]}: at byte 8: images of {tuple(images.shape[1:])}, expected {SIDE} x {SIDE}")
        if int(labels.max()) >= CLASSES:
            where = 8 + int((labels >= CLASSES).nonzero()[0])
            raise FormatError(f"{paths[1]}: at byte {where}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")
        held = VALIDATION if complete else len(labels) // 10
        part = {"train": slice(0, len(labels) - held), "val": slice(len(labels) - held, None), "test": slice(None)}
        images, labels = images[part[split]], labels[part[split]]
        super().__init__(split, images[:, None], labels.tolist(), size=size, seed=seed, augment=augment, few=few)
