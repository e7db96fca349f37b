"""The text files of UCF101's recognition task: classInd.txt and three pairs of trainlist0K.txt and testlist0K.txt.

A line of a list is <Class>/v_<Class>_gGG_cCC.avi, in training lists followed by the class number from 1. Lines may end
in CR. The class is told by the folder, compared without case: clips of HandstandPushups are v_HandStandPushups_... in
the lists and v_HandstandPushups_... in some copies of the videos. Clips of a group show the same person and place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import FormatError
from . import read_lines, wrong_line

CLASSES, CLIPS = 101, 13_320
FOLDS, SPLITS = (1, 2, 3), ("train", "val", "test")
COUNTS = {1: (9009, 528, 3783), 2: (9053, 533, 3734), 3: (9091, 533, 3696)}  # of a fold's splits
LISTS, VIDEOS = "ucfTrainTestlist", "UCF-101"  # folders of the root
MAX_BYTES = 16 * 1024**2  # of a list
_CLIP = re.compile(r"([^/\\]+)/([^/\\]+_g(\d{1,9})_c\d+\.avi)", re.IGNORECASE)


@dataclass(frozen=True)
class Clip:
    """path is as in the list, label counts from 0."""

    path: str
    label: int
    group: int


@dataclass(frozen=True)
class Fold:
    """The clips of a fold. val has, of each class, the group that the training list names first; train has the rest."""

    classes: list[str]
    train: list[Clip]
    val: list[Clip]
    test: list[Clip]


def read_classes(path: str | Path) -> list[str]:
    """classInd.txt: the names of the classes in the order of their numbers."""
    names: dict[int, str] = {}
    seen: set[str] = set()
    for number, line in read_lines(path, MAX_BYTES):
        found = re.fullmatch(r"(\d{1,9})\s+(\S+)", line)
        if not found:
            raise wrong_line(path, number, f"expected a number and a class, got {line[:80]!r}")
        label, name = int(found[1]), found[2]
        if label in names or name.lower() in seen:
            raise wrong_line(path, number, f"class {label} {name} is not the first of its number or name")
        names[label] = name
        seen.add(name.lower())
    if sorted(names) != list(range(1, len(names) + 1)):
        wrong = next(i for i in range(1, len(names) + 2) if i not in names)
        raise FormatError(f"{path}: class {wrong} is missing, expected numbers from 1 on")
    if not names:
        raise FormatError(f"{path}: no classes")
    return [names[i] for i in sorted(names)]


def read_list(path: str | Path, classes: list[str]) -> list[Clip]:
    """A training or test list. A number after the clip must be that of the folder's class."""
    labels = {name.lower(): label for label, name in enumerate(classes)}
    clips: list[Clip] = []
    seen: set[str] = set()
    for number, line in read_lines(path, MAX_BYTES):
        name, *told = line.split()
        found = _CLIP.fullmatch(name)
        if not found or len(told) > 1 or found[1].startswith("."):
            wanted = "<Class>/<name>_gGG_cCC.avi and perhaps a class number"
            raise wrong_line(path, number, f"expected {wanted}, got {line[:120]!r}")
        label = labels.get(found[1].lower())
        if label is None:
            raise wrong_line(path, number, f"folder {found[1]} is none of the {len(classes)} classes")
        if told and told[0] != str(label + 1):
            raise wrong_line(path, number, f"class {told[0]}, expected {label + 1}, the number of {found[1]}")
        if name.lower() in seen:
            raise wrong_line(path, number, f"{name} is there twice")
        seen.add(name.lower())
        clips.append(Clip(name, label, int(found[3])))
    if not clips:
        raise FormatError(f"{path}: no clips")
    return clips


def read_fold(root: str | Path, fold: int) -> Fold:
    """A fold, from root/ucfTrainTestlist. No group may be on both sides."""
    if fold not in FOLDS:
        raise ValueError(f"fold must be 1, 2 or 3, got {fold!r}")
    folder = Path(root) / LISTS
    if not folder.is_dir():
        raise FormatError(f"{root}: no folder {LISTS}, expected the folder of UCF101 with {LISTS} and {VIDEOS} in it")
    classes = read_classes(folder / "classInd.txt")
    train, test = (read_list(folder / f"{kind}list0{fold}.txt", classes) for kind in ("train", "test"))
    tested = {(clip.label, clip.group) for clip in test}
    held: dict[int, int] = {}
    for clip in train:
        if (clip.label, clip.group) in tested:
            told = f"group {clip.group} of {classes[clip.label]}"
            raise FormatError(f"{folder}: {told} is for training and for testing in fold {fold}")
        held.setdefault(clip.label, clip.group)
    val = [clip for clip in train if clip.group == held[clip.label]]
    return Fold(classes, [clip for clip in train if clip.group != held[clip.label]], val, test)


def find_clips(root: str | Path, clips: Iterable[Clip]) -> list[str | None]:
    """Where clips are below root/UCF-101: as listed, else spelt with other capitals, else None."""
    base = Path(root) / VIDEOS
    if not base.is_dir():
        raise FormatError(f"{base}: no such folder, expected {VIDEOS}/<Class>/<clip>.avi")
    folders = _by_lower(base)
    files: dict[str, dict[str, list[str]]] = {}
    found: list[str | None] = []
    for clip in clips:
        folder, name = clip.path.split("/")
        match = _pick(folders, folder)
        if match is not None and match not in files:
            files[match] = _by_lower(base / match)
        file = _pick(files[match], name) if match is not None else None
        found.append(None if file is None else f"{match}/{file}")
    return found


def _by_lower(folder: Path) -> dict[str, list[str]]:
    """Names in a folder by their lower-case form; none if it is not a folder."""
    names: dict[str, list[str]] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        names.setdefault(name.lower(), []).append(name)
    return names


def _pick(names: dict[str, list[str]], name: str) -> str | None:
    spelt = names.get(name.lower(), [])
    return name if name in spelt else next(iter(spelt), None)
