"""ImageNet-1K, ImageNetV2 and ImageNet-R as datasets, and a check of what a copy of them holds.

The official validation images are our "test"; "train" and "val" divide the training images 99 to 1, class by class.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from . import FormatError
from .imagenet_tree import (
    CLASSES,
    VARIANTS,
    MissingError,
    class_list,
    list_r,
    list_test,
    list_train,
    list_v2,
)
from .images import Images, Listing, open_images, read_image
from .preparations import Job
from .prepared import Check, Item, Prepared, Progress, no_progress
from .synthetic import write_imagenet as synthetic  # noqa: F401 (for `parapos prepare`)
from .transforms import CROP, Augment, Size

TRAIN, TEST, V2, R = 1_281_167, 50_000, 10_000, 30_000  # images
VALIDATION = ("stratified", "every_100th")


def validation_counts(sizes: Sequence[int]) -> list[int]:
    """How many of each class go to validation: a hundredth rounded down, at least one, and the rest of a hundredth of
    all, rounded down, to the classes with the largest remainders."""
    for label, size in enumerate(sizes):
        if size < 2:
            raise FormatError(f"class {label} has {size} training images, expected at least 2 to divide them")
    counts = [max(1, size // 100) for size in sizes]
    spare = sum(sizes) // 100 - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda label: (100 * counts[label] - sizes[label], label))
    for label in by_remainder[: max(0, spare)]:
        counts[label] += 1
    return counts


def validation_mask(listing: Listing, method: str = "stratified", seed: int = 0) -> list[bool]:
    """Which training images are for validation.

    stratified: per class, those first in the order of blake2b("seed/<wnid>/<image>"), so the choice depends on names
    and seed alone. every_100th: the first of every full hundred in sorted order; the seed must be 0.
    """
    if method not in VALIDATION:
        raise ValueError(f"validation must be one of {', '.join(VALIDATION)}, got {method!r}")
    total = len(listing.files)
    if method == "every_100th":
        if seed:
            raise ValueError(f"split_seed has no effect with validation='every_100th', got {seed}")
        return [i % 100 == 0 and i < total // 100 * 100 for i in range(total)]
    groups: list[list[int]] = [[] for _ in range(listing.classes)]
    for i, label in enumerate(listing.labels):
        groups[label].append(i)
    digest = [hashlib.blake2b(os.fsencode(f"{seed}/{name}"), digest_size=16).digest() for name in listing.files]
    mask = [False] * total
    for group, count in zip(groups, validation_counts([len(group) for group in groups]), strict=True):
        for i in sorted(group, key=digest.__getitem__)[:count]:
            mask[i] = True
    return mask


def imagenet(
    split: str,
    *,
    root: str | Path,
    size: Size = 224,
    seed: int = 0,
    augment: Augment | None = None,
    crop: float = CROP,
    normalize: bool = False,
    upright: bool = True,
    corrupt: str = "error",
    validation: str = "stratified",
    split_seed: int = 0,
    complete: bool = True,
) -> Images:
    """ImageNet-1K. complete=False accepts other numbers of classes and images than ImageNet's. Other options are those
    of `open_images`."""
    if split not in ("train", "val", "test"):
        raise ValueError(f"split must be 'train', 'val' or 'test', got {split!r}")

    def read() -> Listing:
        if split == "test":
            return _judged(list_test(root), TEST if complete else None)
        listing = _judged(list_train(root), TRAIN if complete else None)
        mask = validation_mask(listing, validation, split_seed)
        chosen = [i for i, held in enumerate(mask) if held == (split == "val")]
        files, labels = [listing.files[i] for i in chosen], [listing.labels[i] for i in chosen]
        return replace(listing, files=files, labels=labels)

    return open_images(
        read,
        split,
        size,
        seed=seed,
        augment=augment,
        crop=crop,
        normalize=normalize,
        upright=upright,
        corrupt=corrupt,
    )


def imagenet_v2(
    split: str = "test",
    *,
    root: str | Path,
    variant: str = VARIANTS[0],
    size: Size = 224,
    crop: float = CROP,
    normalize: bool = False,
    upright: bool = True,
    complete: bool = True,
) -> Images:
    """ImageNetV2, for testing. The paper's set is matched-frequency."""
    _test_only(split)

    def read() -> Listing:
        return _judged(list_v2(root, variant), V2 if complete else None)

    return open_images(read, split, size, crop=crop, normalize=normalize, upright=upright)


def imagenet_r(
    split: str = "test",
    *,
    root: str | Path,
    size: Size = 224,
    crop: float = CROP,
    normalize: bool = False,
    upright: bool = True,
    complete: bool = True,
) -> Images:
    """ImageNet-R, for testing. Labels are among all classes; `subset` has the 200 that occur."""
    _test_only(split)

    def read() -> Listing:
        return _judged(list_r(root), R if complete else None)

    return open_images(read, split, size, crop=crop, normalize=normalize, upright=upright, subset=True)


def _test_only(split: str) -> None:
    if split != "test":
        raise ValueError(f"split must be 'test', got {split!r}")


def _judged(listing: Listing, total: int | None) -> Listing:
    """The listing, if it is as large as ImageNet's; total: its images, None for any number."""
    if total is not None and (listing.classes != CLASSES or len(listing.files) != total):
        raise FormatError(
            f"{listing.root}: {len(listing.files)} images, {listing.classes} classes, expected {total} and {CLASSES}; "
            "complete=False accepts this"
        )
    return listing


def check(
    root: str | Path,
    *,
    sample: int = 1000,
    complete: bool = True,
    quick: bool = False,
    progress: Progress = no_progress,
) -> Check:
    """Counts every part of a tree and reads `sample` images of each, evenly spaced, or none if quick. ImageNetV2 and
    ImageNet-R may be absent."""
    root = Path(root)
    result = Check()
    try:
        result.count("classes", len(class_list(root) or ()), CLASSES if complete else None)
    except FormatError as error:
        result.problems.append(f"classes: {error}")
        return result
    readers: list[tuple[str, Callable[[], Listing], int, int | None, bool]] = [
        ("train images", lambda: list_train(root), TRAIN, None, True),
        ("test images", lambda: list_test(root), TEST, 50, True),
        ("ImageNet-R images", lambda: list_r(root), R, None, False),
    ]
    for variant in VARIANTS:
        name = f"ImageNetV2 {variant} images"
        readers.append((name, lambda variant=variant: list_v2(root, variant), V2, 10, False))  # type: ignore[misc]
    for name, read, total, each, needed in readers:
        try:
            listing = read()
        except FormatError as error:
            absent = isinstance(error, MissingError)
            result.rows.append((name, "not there" if absent else "wrong", f"{total:,}" if complete else ""))
            if needed or not absent:
                result.problems.append(f"{name}: {error}")
            continue
        result.count(name, len(listing.files), total if complete else None)
        if name == "train images":
            _check_division(listing, complete, result)
        _check_classes(name, listing, each if complete else None, result)
        if not quick:
            _check_sample(name, listing, sample, progress, result)
    return result


def _check_division(listing: Listing, complete: bool, result: Check) -> None:
    try:
        mask = validation_mask(listing)
    except FormatError as error:
        result.problems.append(f"division of the train images: {error}")
        return
    held = sum(mask)
    for what, found, expected in (
        ("training", len(mask) - held, TRAIN - TRAIN // 100),
        ("validation", held, TRAIN // 100),
    ):
        result.rows.append((f"  of them for {what}", f"{found:,}", f"{expected:,}" if complete else ""))


def _check_classes(name: str, listing: Listing, each: int | None, result: Check) -> None:
    if each is None or not listing.labels:
        return
    counts = torch.bincount(torch.tensor(listing.labels), minlength=CLASSES)
    wrong = (counts != each).nonzero().flatten().tolist()
    if wrong:
        told = f"class {wrong[0]} has {int(counts[wrong[0]])}"
        result.problems.append(f"{name}: {len(wrong)} classes have not {each} images each; {told}")


def _check_sample(name: str, listing: Listing, sample: int, progress: Progress, result: Check) -> None:
    total = len(listing.files)
    chosen = [i * total // min(sample, total) for i in range(min(sample, total))]
    unreadable = 0
    for i in progress(chosen, name):
        try:
            read_image(listing.root / listing.files[i])
        except (FormatError, OSError) as error:
            unreadable += 1
            result.problems.append(f"unreadable: {error}")
    result.rows.append((f"  of {len(chosen):,} read, unreadable", f"{unreadable:,}", "0"))


def survey(job: Job) -> tuple[Check, list[Item]]:
    """`check` for `parapos prepare`; nothing of ImageNet is prepared item by item."""
    sample = job.options.get("sample", 1000)
    return check(job.root, sample=sample, complete=job.complete, quick=job.quick, progress=job.progress), []


def prepare(job: Job) -> Prepared:
    """Writes the list of validation images if a check finds nothing wrong."""
    if problems := survey(job)[0].problems:
        return Prepared(failed=problems)
    out = Path(job.root) / "validation.txt"
    return Prepared(now=1, notes=[f"wrote {out}, sha256 {write_split(job.root, out)}"])


def write_split(root: str | Path, out: str | Path, *, validation: str = "stratified", split_seed: int = 0) -> str:
    """Writes the names of the validation images, one <wnid>/<image> per line. Returns the SHA-256 of the file."""
    listing = list_train(root)
    mask = validation_mask(listing, validation, split_seed)
    text = os.fsencode("".join(f"{name}\n" for name, held in zip(listing.files, mask, strict=True) if held))
    Path(out).write_bytes(text)
    return hashlib.sha256(text).hexdigest()
