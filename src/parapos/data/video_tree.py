"""UCF101 of generated content in the true layout, seconds to write: to try commands, and for tests.

A class is a direction in which a square crosses the picture. The clips of one class, played backwards, are those of
another, so nothing but the order of the frames tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError
from .readers.ucf101_lists import FOLDS, LISTS, VIDEOS
from .readers.video import Image, write_video

DIRECTIONS = ("Right", "Left", "Down", "Up", "RightDown", "LeftUp", "LeftDown", "RightUp")
CROSSING = 41  # frames
_STEP = {"Right": (0, 1), "Left": (0, -1), "Down": (1, 0), "Up": (-1, 0)}  # y, x


def make_ucf101(
    root: str | Path,
    *,
    classes: int = 2,
    groups: int = 8,
    clips: int = 4,
    frames: tuple[int, int] = (42, 48),
    size: tuple[int, int] = (64, 48),
    seed: int = 0,
) -> list[str]:
    """Writes videos and the lists of three folds; the folder must be empty or new. Returns the names of the classes.

    Each class has `groups` groups of `clips` clips with a number of frames in a range. As in UCF101, each fold tests on
    7 of 25 groups of its own, lists have CR before LF, and test lists no class numbers. The files of the last class are
    spelt otherwise in the lists than on disk. size is width and height, even numbers.
    """
    root = Path(root)
    tested = groups * 7 // 25
    if not 2 <= classes <= len(DIRECTIONS):
        raise ValueError(f"classes must be from 2 to {len(DIRECTIONS)}, got {classes}")
    if not 4 <= groups <= 99 or not 1 <= clips <= 99 or not 1 <= frames[0] <= frames[1]:
        told = f"groups={groups}, clips={clips}, frames={frames}"
        raise ValueError(f"expected 4 to 99 groups of 1 to 99 clips and a range of frames from 1, got {told}")
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    rng = np.random.default_rng(seed)
    names = sorted(f"Square{direction}" for direction in DIRECTIONS[:classes])
    listed: list[tuple[int, str, int]] = []  # group, path, class number
    for number, name in enumerate(names, 1):
        (root / VIDEOS / name).mkdir(parents=True)
        spelt = name.replace("Square", "SQuare") if number == classes else name
        for group in range(1, groups + 1):
            for clip in range(1, clips + 1):
                tail = f"g{group:02d}_c{clip:02d}.avi"
                length = int(rng.integers(frames[0], frames[1] + 1))
                write_video(root / VIDEOS / name / f"v_{name}_{tail}", moving_square(name, length, size, rng))
                listed.append((group, f"{name}/v_{spelt}_{tail}", number))
    (root / LISTS).mkdir()
    _write(root / LISTS / "classInd.txt", [f"{number} {name}" for number, name in enumerate(names, 1)])
    for fold in FOLDS:
        test = range(1 + (fold - 1) * tested, 1 + fold * tested)
        _write(root / LISTS / f"trainlist0{fold}.txt", [f"{p} {n}" for group, p, n in listed if group not in test])
        _write(root / LISTS / f"testlist0{fold}.txt", [p for group, p, _ in listed if group in test])
    return names


def moving_square(name: str, frames: int, size: tuple[int, int], rng: np.random.Generator) -> Iterator[Image]:
    """Frames of a square that crosses the picture in the direction at the end of the name, and then stays."""
    width, height = size
    side = max(2, math.ceil(min(size) * rng.uniform(0.25, 0.4)))
    free = np.array([height - side, width - side])
    aside = rng.integers(free + 1)
    colour = rng.integers(192, 256, 3)
    ground: Any = rng.integers(0, 32, (height, width, 3)).astype(np.uint8)
    step = np.sum([step for word, step in _STEP.items() if word in name], axis=0)
    for t in range(frames):
        share = min(1, t / CROSSING)
        y, x = np.where(step == 0, aside, np.rint(free * np.where(step > 0, share, 1 - share))).astype(int)
        image = ground.copy()
        image[y : y + side, x : x + side] = colour
        yield image


def _write(path: Path, lines: list[str]) -> None:
    path.write_bytes("".join(f"{line}\r\n" for line in lines).encode())
