"""Prophesee GEN1: cars and pedestrians seen by an event camera on the road, as tokens of Spiking Patches with boxes.

A sample is a time stamp with labels: the last events up to it, and its boxes. Events are taken from memory-mapped DAT
files by binary search, so nothing has to be prepared; gen1_scan.py says what is wrong with a copy, and how many events
each sample has.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..tokenizers.spiking_patches import BUCKETS
from . import FormatError
from .augment.events import GEN1, EventAugment, tokenize_augmented
from .event_tokens import RAGGED, Tokenizing, tensors
from .events import Events, clean
from .readers import boxes as box_files
from .readers.dat import DatFile
from .sampling import Key, sample_seed

Array = np.ndarray[Any, Any]
WIDTH, HEIGHT = 304, 240
CLASSES = ("car", "pedestrian")
CLIPS = {"train": 1460, "val": 429, "test": 470}
ARCHIVE = "detection_dataset_duration_60s_ratio_1.0"
TASK = "detection"
GIVES = (*RAGGED, "length")  # inputs of models
OF_MODELS = {"buckets": BUCKETS, "sensor": (HEIGHT, WIDTH)}  # options that models must have
LAST = 500_000  # events of a sample
LEAST_SIDE, LEAST_DIAGONAL = 10, 30  # pixels of a box
WIDEST = 9 * WIDTH // 10  # of a box in training; wider ones are faulty
EVENTS, BOXES = "_td.dat", "_bbox.npy"  # what names of files end in


@dataclass(frozen=True, kw_only=True)
class Augment(EventAugment):
    """As for gestures, without the operations that boxes do not follow, and with less rotation."""

    operations: tuple[str, ...] = GEN1.operations
    rotation: float = GEN1.rotation

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(self.operations) <= set(GEN1.operations):
            raise ValueError(f"operations must be some of {', '.join(GEN1.operations)}, got {self.operations!r}")


def find_root(root: str | Path) -> Path:
    """The folder that holds train, val and test: this one, or that of the archive in it."""
    root = Path(root)
    for folder in (root, root / ARCHIVE):
        if any((folder / split).is_dir() for split in CLIPS):
            return folder
    raise FormatError(f"{root}: none of the folders {', '.join(CLIPS)}, expected the folder of GEN1")


def list_clips(root: Path, split: str, *, complete: bool = True) -> list[str]:
    """Names of the clips of a split, sorted. complete=False accepts any number, and leaves out halves of a pair."""
    if split not in CLIPS:
        raise ValueError(f"split must be one of {', '.join(CLIPS)}, got {split!r}")
    folder = root / split
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder")
    halves = [
        {path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}") if not path.name.startswith(".")}
        for suffix in (EVENTS, BOXES)
    ]
    alone = sorted(halves[0] ^ halves[1])
    if complete and alone:
        missing = folder / (alone[0] + (BOXES if alone[0] in halves[0] else EVENTS))
        raise FormatError(f"{missing}: no such file; complete=False does without this clip")
    names = sorted(halves[0] & halves[1])
    if complete and len(names) != CLIPS[split]:
        raise FormatError(f"{folder}: {len(names)} clips, expected {CLIPS[split]}; complete=False accepts this")
    return names


def usable(boxes: Array, *, train: bool, name: str = "boxes") -> Array:
    """The boxes to learn from or to be judged by, cut to the frame, in the order of time.

    Left out are boxes with a side below 10 pixels or a diagonal below 30, in training those wider than 273 pixels, and,
    with a warning that has the name, those of unknown classes.
    """
    known = boxes["class_id"] < len(CLASSES)
    if not known.all():
        told = f"{int((~known).sum())} boxes are left out, the first of class {int(boxes['class_id'][~known][0])}"
        warnings.warn(f"{name}: {told}, expected 0 or 1", stacklevel=2)
    left, right = (np.clip(edge, 0, WIDTH - 1) for edge in _edges(boxes["x"], boxes["w"]))
    top, bottom = (np.clip(edge, 0, HEIGHT - 1) for edge in _edges(boxes["y"], boxes["h"]))
    w, h = right - left, bottom - top
    keep = known & (w >= LEAST_SIDE) & (h >= LEAST_SIDE) & (w**2 + h**2 >= LEAST_DIAGONAL**2)
    if train:
        keep &= w <= WIDEST
    found = boxes.copy()
    found["x"], found["y"], found["w"], found["h"] = left, top, w, h
    found = found[keep]
    return found[np.argsort(found["t"], kind="stable")]


def _edges(start: Array, size: Array) -> tuple[Array, Array]:
    first = start.astype(np.float64)
    return first, first + size


def last_events(file: DatFile, time: int, count: int = LAST, *, unique: bool = False) -> Events:
    """The last `count` events in the frame that are not later than a time; fewer if there are no more.

    unique: of events that are alike in everything, the first alone counts. FormatError if time goes back in what is
    read; elsewhere it would lead the search astray, for which there is `DatFile.check_order`.
    """
    stop, span = file.find(time, "right"), count
    while True:
        start = max(0, stop - span)
        if unique and start:
            start = file.find(file.time(start))  # so that no event is parted from its likes
        file.check_order(start, stop)
        found = clean(file.slice(start, stop), WIDTH, HEIGHT)
        if unique:
            found = found.select(_first_of_their_kind(found))
        if len(found) >= count or start == 0:
            return found.select(slice(max(0, len(found) - count), None))
        span *= 2


def _first_of_their_kind(events: Events) -> Array:
    place = (events.y.astype(np.int64) * WIDTH + events.x) * 2 + events.polarity
    _, first = np.unique(events.t * (2 * WIDTH * HEIGHT) + place, return_index=True)
    return np.sort(first)


def open_clip(path: Path, *, truncated: str = "error") -> DatFile:
    """The events of a clip; its header must not speak of another sensor."""
    file = DatFile(path, truncated=truncated)
    if (file.width or WIDTH, file.height or HEIGHT) != (WIDTH, HEIGHT):
        raise FormatError(f"{path}: a sensor of {file.width} x {file.height}, expected {WIDTH} x {HEIGHT}")
    return file


class Clips:
    """Samples {"codes", "x", "y", "t", "length", "boxes", "labels", "count", "time", "id"}, and "truth"
    if they are not varied.

    boxes: XYXY in pixels of the frame, float32 (M, 4), with classes int64 (M,) as `labels` and M as `count`. time:
    microseconds from the start of the clip. truth: what detections are judged by, the name of the clip, and boxes
    float64 (M, 4) as x, y, width and height, with labels.

    A clip is read through once, by whichever worker needs it first: its times must not go back.
    """

    classes = len(CLASSES)
    class_names = CLASSES
    protocol = "gen1"
    ragged = (*RAGGED, "boxes", "labels", "truth.boxes", "truth.labels")
    clock = "age"  # to the time of the labels

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        train: bool,
        tokenizing: Tokenizing,
        augment: Augment | None = None,
        seed: int = 0,
        last: int = LAST,
        unique: bool = False,
        truncated: str = "error",
    ) -> None:
        if last < 1:
            raise ValueError(f"last must be at least 1, got {last}")
        self.folder, self.names, self.tokenizing, self.augment = folder, list(names), tokenizing, augment
        self.seed, self.last, self.unique, self.truncated = seed, last, unique, truncated
        self.preprocessing = {**asdict(tokenizing), "clock": self.clock, "last": last, "unique": unique}
        kept, clips, times, starts, total = [], [], [], [], 0
        for i, name in enumerate(names):
            path = folder / f"{name}{BOXES}"
            boxes = usable(box_files.read(path), train=train, name=str(path))
            found, first = np.unique(boxes["t"], return_index=True)
            kept.append(boxes)
            clips.append(np.full(len(found), i))
            times.append(found)
            starts.append(first + total)
            total += len(boxes)
        if not total:
            raise FormatError(f"{folder}: no boxes, expected clips with labels")
        self.boxes, self.clips, self.times = (np.concatenate(parts) for parts in (kept, clips, times))
        self.bounds = np.append(np.concatenate(starts), total)
        self.in_order = torch.zeros(len(self.names), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.times)

    def events(self, index: int) -> Events:
        """The events of a sample as they were recorded."""
        clip = self.clips[index]
        file = open_clip(self.folder / f"{self.names[clip]}{EVENTS}", truncated=self.truncated)
        if not self.in_order[clip]:
            file.check_order()
            self.in_order[clip] = True
        return last_events(file, int(self.times[index]), self.last, unique=self.unique)

    def objects(self, index: int) -> Array:
        """(M, 5): x and y of the top left corner, width, height, in pixels; and the class."""
        boxes = self.boxes[self.bounds[index] : self.bounds[index + 1]]
        return np.stack([boxes[name].astype(np.float64) for name in ("x", "y", "w", "h", "class_id")], axis=1)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        events, boxes, time = self.events(index), self.objects(index), int(self.times[index])
        if self.augment is None:
            tokens = self.tokenizing(events)
        else:
            rng = np.random.default_rng(sample_seed(self.seed, epoch, index))
            tokens, changed = tokenize_augmented(
                events, rng, self.tokenizing, width=WIDTH, height=HEIGHT, settings=self.augment, boxes=boxes
            )
            assert changed.boxes is not None
            boxes = changed.boxes
        sample = tensors(tokens, self.clock, origin=time)
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:4]], axis=1)
        sample["boxes"] = torch.from_numpy(corners).float()
        sample["labels"] = torch.from_numpy(boxes[:, 4].astype(np.int64))
        sample |= {"count": len(boxes), "time": time, "id": index}
        return sample if self.augment is not None else {**sample, "truth": self.truth(index)}

    def truth(self, index: int) -> dict[str, Any]:
        """What detections of a sample are judged by."""
        boxes = torch.from_numpy(self.objects(index))
        name = {"clip": self.names[self.clips[index]], "time": int(self.times[index])}
        return {**name, "boxes": boxes[:, :4], "labels": boxes[:, 4].long()}


def gen1(
    split: str,
    *,
    root: str | Path,
    seed: int = 0,
    augment: Augment | None = None,
    patch: int = 16,
    threshold: int = 256,
    refractory_us: int = 100_000,
    last: int = LAST,
    unique: bool = False,
    truncated: str = "error",
    complete: bool = True,
) -> Clips:
    """A split of GEN1. augment is for "train", which has the paper's if none is given.

    last: most events of a sample. unique: events that the camera gave twice count once. truncated="keep" accepts DAT
    files that end within an event. complete=False accepts any number of clips, and does without clips that lack events
    or labels.
    """
    folder = find_root(root)
    names = list_clips(folder, split, complete=complete)
    return Clips(
        folder / split,
        names,
        train=split == "train",
        tokenizing=Tokenizing(
            height=HEIGHT, width=WIDTH, patch=patch, threshold=threshold, refractory_us=refractory_us
        ),
        augment=(augment or Augment()) if split == "train" else None,
        seed=seed,
        last=last,
        unique=unique,
        truncated=truncated,
    )
