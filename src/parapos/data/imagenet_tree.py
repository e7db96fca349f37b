"""Where the images of ImageNet-1K, ImageNetV2 and ImageNet-R lie on disk, and which class each is.

A class is the rank of its wnid among all wnids in sorted order. docs/imagenet.md shows the layouts.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from . import FormatError
from .images import Listing, list_classes, list_folders, list_images

CLASSES = 1000
VARIANTS = ("matched-frequency", "threshold0.7", "top-images")
BASES = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", ".")
CLASS_INDEX, VAL_JSON, VAL_CSV = "imagenet_class_index.json", "ILSVRC2012_val_labels.json", "LOC_val_solution.csv"
# fmt: off
R_CLASSES = (  # the classes of ImageNet-R among the 1000
    1, 2, 4, 6, 8, 9, 11, 13, 22, 23, 26, 29, 31, 39, 47, 63, 71, 76, 79, 84, 90, 94, 96, 97, 99, 100, 105, 107, 113,
    122, 125, 130, 132, 144, 145, 147, 148, 150, 151, 155, 160, 161, 162, 163, 171, 172, 178, 187, 195, 199, 203, 207,
    208, 219, 231, 232, 234, 235, 242, 245, 247, 250, 251, 254, 259, 260, 263, 265, 267, 269, 276, 277, 281, 288, 289,
    291, 292, 293, 296, 299, 301, 308, 309, 310, 311, 314, 315, 319, 323, 327, 330, 334, 335, 337, 338, 340, 341, 344,
    347, 353, 355, 361, 362, 365, 366, 367, 368, 372, 388, 390, 393, 397, 401, 407, 413, 414, 425, 428, 430, 435, 437,
    441, 447, 448, 457, 462, 463, 469, 470, 471, 472, 476, 483, 487, 515, 546, 555, 558, 570, 579, 583, 587, 593, 594,
    596, 609, 613, 617, 621, 629, 637, 657, 658, 701, 717, 724, 763, 768, 774, 776, 779, 780, 787, 805, 812, 815, 820,
    824, 833, 847, 852, 866, 875, 883, 889, 895, 907, 928, 931, 932, 933, 934, 936, 937, 943, 945, 947, 948, 949, 951,
    953, 954, 957, 963, 965, 967, 980, 981, 983, 988,
)
# fmt: on
_WNID = re.compile(r"n\d{8}")


class MissingError(FormatError):
    """A folder is not there."""


def find_base(root: Path) -> Path | None:
    """The folder that holds train and val, in any of the layouts; None if there is none."""
    for base in BASES:
        if any((root / base / part).is_dir() for part in ("train", "val")):
            return root / base
    return None


def class_list(root: str | Path) -> list[str] | None:
    """All wnids in sorted order, from the class index file, else the folders of train, else those of val."""
    root = Path(root)
    base = find_base(root)
    index = _metadata(root, CLASS_INDEX)
    if index:
        return _read_class_index(index)
    for part in ("train", "val"):
        if base and (base / part).is_dir():
            wnids = [name for name in list_folders(base / part) if _WNID.fullmatch(name)]
            if wnids:
                return wnids
    return None


def list_train(root: str | Path) -> Listing:
    """All training images, sorted by wnid, then by name: train/<wnid>/<image>."""
    base, wnids = _require(Path(root), "train")
    folders = list_folders(base / "train")
    if folders != wnids:
        name = min(set(folders) ^ set(wnids))
        told = "is no class of the class index" if name in folders else "is missing, though it is a class"
        raise FormatError(f"{base / 'train' / name}: {told}; expected {len(wnids)} folders, one per class")
    return list_classes(base / "train", _rank(wnids), len(wnids), wnids)


def list_test(root: str | Path) -> Listing:
    """The official validation images: val/<wnid>/<image>, or val/<image> with labels in a JSON or CSV file."""
    root = Path(root)
    base, wnids = _require(root, "val")
    rank = _rank(wnids)
    flat, folders = list_images(base / "val"), list_folders(base / "val")
    if flat and folders:
        raise FormatError(f"{base / 'val'}: has both images and folders, expected either")
    if folders:
        return list_classes(base / "val", rank, len(wnids), wnids)
    path = _metadata(root, VAL_JSON) or _metadata(root, VAL_CSV)
    if path is None:
        raise FormatError(f"{base / 'val'}: images without labels, expected {VAL_JSON} or {VAL_CSV} in {root}")
    wnid_of = _read_val_json(path) if path.name == VAL_JSON else _read_val_csv(path)
    names = {Path(name).stem for name in flat}
    odd = sorted(names ^ set(wnid_of))
    if odd:
        told = f"is not in {path.name}" if odd[0] in names else f"is in {path.name} and not on disk"
        raise FormatError(f"{base / 'val' / odd[0]}: {told}; {len(flat)} images, {len(wnid_of)} labels")
    unknown = sorted(set(wnid_of.values()) - set(wnids))
    if unknown:
        raise FormatError(f"{path}: {unknown[0]} is not one of the {len(wnids)} classes")
    return Listing(base / "val", len(wnids), flat, [rank[wnid_of[Path(name).stem]] for name in flat], wnids)


def list_v2(root: str | Path, variant: str = VARIANTS[0]) -> Listing:
    """ImageNetV2. A folder named by a number is that class, whatever its rank among names; old copies have wnids."""
    root = Path(root)
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    names = (f"imagenetv2-{variant}-format-val", f"imagenetv2-{variant}")
    folder = _first_folder(*(root / name for name in names), *([root] if root.name in names else []))
    wnids, found = class_list(root), list_folders(folder)
    classes = len(wnids) if wnids else CLASSES
    numbers = [name for name in found if name.isdecimal() and name.isascii()]
    if numbers:
        if len(numbers) < len(found):
            raise FormatError(f"{folder / min(set(found) - set(numbers))}: not a number, as other folders here are")
        rank = {name: int(name) for name in found}
        if len(set(rank.values())) < len(rank):
            raise FormatError(f"{folder}: two folders stand for the same number")
        if max(rank.values(), default=0) >= classes:
            raise FormatError(f"{folder}: folder {max(rank.values())}, expected numbers from 0 to {classes - 1}")
    else:
        rank = _ranks(folder, found, wnids if wnids else found if len(found) == CLASSES else None)
    return list_classes(folder, rank, classes, wnids)


def list_r(root: str | Path) -> Listing:
    """ImageNet-R: <wnid>/<image>. Without the class list of ImageNet its own 200 folders tell the classes."""
    root = Path(root)
    folder = _first_folder(root / "imagenet-r", *([root] if root.name == "imagenet-r" else []))
    wnids, found = class_list(root), list_folders(folder)
    if wnids is None and len(found) == len(R_CLASSES) and all(map(_WNID.fullmatch, found)):
        return list_classes(folder, dict(zip(found, R_CLASSES, strict=True)), CLASSES)
    listing = list_classes(folder, _ranks(folder, found, wnids), len(wnids or ()), wnids)
    if wnids is not None and len(wnids) == CLASSES and not set(listing.labels) <= set(R_CLASSES):
        label = min(set(listing.labels) - set(R_CLASSES))
        raise FormatError(f"{folder}: {wnids[label]} is class {label}, which is not one of the {len(R_CLASSES)} of it")
    return listing


def _require(root: Path, part: str) -> tuple[Path, list[str]]:
    base, wnids = find_base(root), class_list(root)
    if base is None or not (base / part).is_dir():
        raise MissingError(f"{root}: no folder {part!r}, expected it in one of {', '.join(BASES)}")
    if not wnids:
        raise FormatError(f"{root}: classes are unknown, expected {CLASS_INDEX} or folders named by wnid")
    return base, wnids


def _rank(wnids: list[str]) -> dict[str, int]:
    return {wnid: i for i, wnid in enumerate(wnids)}


def _first_folder(*folders: Path) -> Path:
    for folder in folders:
        if folder.is_dir():
            return folder
    raise MissingError(f"{folders[0]}: no such folder")


def _ranks(folder: Path, found: list[str], wnids: list[str] | None) -> dict[str, int]:
    if wnids is None:
        raise FormatError(f"{folder}: {len(found)} folders and no class list, expected {CLASS_INDEX} beside it")
    rank = _rank(wnids)
    for name in found:
        if name not in rank:
            raise FormatError(f"{folder / name}: not a class, expected one of {len(wnids)} wnids")
    return {name: rank[name] for name in found}


def _metadata(root: Path, name: str) -> Path | None:
    base = find_base(root)
    folders = [root, root / "ILSVRC", *([base, base.parent, base.parent.parent] if base and base != root else [])]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def _read_class_index(path: Path) -> list[str]:
    value = _read_json(path)
    wnids: list[str] = []
    for i in range(len(value)):
        entry = value.get(str(i))
        if not (isinstance(entry, list) and entry and isinstance(entry[0], str) and _WNID.fullmatch(entry[0])):
            raise FormatError(f'{path}: class {i}, expected "{i}": ["n01440764", "name"], got {entry!r}')
        wnids.append(entry[0])
    if not wnids or wnids != sorted(set(wnids)):
        raise FormatError(f"{path}: {len(wnids)} wnids, expected some, each once, in sorted order")
    return wnids


def _read_val_json(path: Path) -> dict[str, str]:
    return {Path(name).stem: _wnid(path, name, wnid) for name, wnid in _read_json(path).items()}


def _read_val_csv(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise FormatError(f"{path}: line {number}: expected two columns, got {row!r}")
    if rows and not _WNID.match(rows[0][1]):
        rows = rows[1:]
    return {Path(row[0]).stem: _wnid(path, row[0], row[1].split(" ")[0]) for row in rows}


def _wnid(path: Path, name: str, wnid: Any) -> str:
    if not (isinstance(wnid, str) and _WNID.fullmatch(wnid)):
        raise FormatError(f"{path}: {name}: expected a wnid such as n01440764, got {wnid!r}")
    return wnid
