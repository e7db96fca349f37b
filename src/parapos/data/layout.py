"""A folder of images by class, split into training, validation and test as small copies."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from . import FormatError
from .images import list_folders, list_images, read_image
from .transforms import ResizeShorter

MOST_IMAGES, LEAST_IMAGES = 2000, 10  # of a folder in all, and of each of its classes
SPLITS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}  # tenths


def readable(name: str) -> str:
    """A file name as text; what is not UTF-8 in it is replaced."""
    return os.fsencode(name).decode(errors="replace")


def lay_out(source: Path, folder: Path, *, largest: int) -> Path:
    """root/<split>/<class>/<image> from a folder of class folders, as small copies: seven tenths of a class in "train",
    one in "val", two in "test", by a hash of their names. A source that has these splits is used itself."""
    if not source.is_dir():
        raise FormatError(f"{source}: no such folder, expected one with a folder of images for each class")
    names = list_folders(source)
    if set(SPLITS) <= set(names):
        return source.resolve()
    done = folder / "source.txt"
    if done.is_file():
        if (other := os.fsdecode(done.read_bytes())) != str(source.resolve()):
            raise FormatError(f"{folder}: made from {readable(other)}; take another --out")
        return folder.resolve()
    files = {name: list_images(source / name) for name in names}
    few = [name for name in names if len(files[name]) < LEAST_IMAGES]
    if len(names) < 2 or few:
        told = f"{few[0]} has {len(files[few[0]])}" if few else f"got {len(names)} folders"
        raise FormatError(f"{source}: expected two or more folders of {LEAST_IMAGES} or more images, {told}")
    most = max(LEAST_IMAGES, MOST_IMAGES // len(names))
    for name in names:
        order = sorted(files[name], key=lambda file: hashlib.blake2b(os.fsencode(f"{name}/{file}")).digest())
        for number, file in enumerate(order[:most]):
            split = next(split for split, tenths in SPLITS.items() if number % 10 in tenths)
            _copy_small(source / name / file, folder / split / name / f"{number:05d}.png", int(largest / 0.875))
    part = done.with_suffix(".part")
    part.write_bytes(os.fsencode(source.resolve()))
    part.replace(done)
    return folder.resolve()


def _copy_small(source: Path, path: Path, side: int) -> None:
    """A copy whose shorter side is at most `side`; an unreadable image is told and left out."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    try:
        image = read_image(source)
        image = ResizeShorter(side)(image) if min(image.shape[1:]) > side else image
    except FormatError as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    v2.functional.to_pil_image(image).save(path)
