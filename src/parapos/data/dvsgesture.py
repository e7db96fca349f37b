"""DvsGesture: 11 hand and arm gestures of 29 users before an event camera, as tokens of Spiking Patches.

A sample is a row of a recording's labels: the events from its first to its last microsecond, both inclusive, with time
counted from the first. The official lists give users 1 to 23 for training and 24 to 29 for testing; of the former,
users 21 to 23 are held back as "val". Gestures are read from the cache that `prepare` writes, or else from the AEDAT
files, where one gesture takes as long as its whole recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..tokenizers.spiking_patches import BUCKETS
from . import FormatError
from .augment.events import MIRRORED, tokenize_augmented
from .augment.events import EventAugment as Augment
from .cache import (
    Array,
    Check,
    Progress,
    cache_folder,
    map_array,
    no_progress,
    read_manifest,
    save_array,
    sha256,
    write_manifest,
)
from .event_tokens import RAGGED, Tokenizing, tensors
from .events import Events, clean
from .readers import aedat, told_if_early
from .readers.gesture_lists import CLASSES, Row, read_labels, read_trials, user_of
from .sampling import Key, sample_seed

SIDE = 128  # pixels of the sensor
GIVES, OF_MODELS = (*RAGGED, "length"), {"buckets": BUCKETS}  # inputs of models, and options that they must have
VALIDATION = (21, 22, 23)  # users
SPLITS = ("train", "val", "test")
LISTED = {"train": 98, "test": 24}  # recordings of the official lists
TEST = 288  # gestures
NAMES = (  # as gesture_mapping.csv has them
    *("hand_clapping", "right_hand_wave", "left_hand_wave", "right_arm_clockwise", "right_arm_counter_clockwise"),
    *("left_arm_clockwise", "left_arm_counter_clockwise", "arm_roll", "air_drums", "air_guitar", "other_gestures"),
)
KIND, VERSION = "dvsgesture", 2
EVENT = np.dtype([("t", "<u4"), ("x", "u1"), ("y", "u1"), ("polarity", "u1")], align=True)  # 8 bytes
AGAIN = "run `parapos prepare dvsgesture` again"


class Sample(NamedTuple):
    """A gesture: the row of its recording, and the number of its events if it is prepared, else None."""

    recording: str
    row: int
    gesture: Row
    events: int | None


def find_root(root: str | Path) -> Path:
    """The folder that holds the lists: this one, or DvsGesture in it, as the archive has it."""
    root = Path(root)
    for folder in (root, root / "DvsGesture"):
        if (folder / "trials_to_train.txt").is_file():
            return folder
    raise FormatError(f"{root}: no trials_to_train.txt, expected the folder of DvsGesture")


def list_recordings(root: Path, split: str, *, complete: bool = True) -> list[str]:
    """Names of the recordings of a split in the order of the official lists, which `complete` says are whole."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    lists = {part: read_trials(root / f"trials_to_{part}.txt") for part in LISTED}
    both = sorted(set(lists["train"]) & set(lists["test"]))
    if both:
        raise FormatError(f"{root}: {both[0]} is in both lists, expected it in one")
    part = "test" if split == "test" else "train"
    if complete and len(lists[part]) != LISTED[part]:
        told = f"{len(lists[part])} recordings, expected {LISTED[part]}; complete=False accepts this"
        raise FormatError(f"{root / f'trials_to_{part}.txt'}: {told}")
    return [name for name in lists[part] if part == "test" or (user_of(name) in VALIDATION) == (split == "val")]


def cut(events: Events, gesture: Row) -> Events:
    """The events of a gesture that lie on the sensor, with time from its start. Times must not decrease."""
    first, stop = np.searchsorted(events.t, gesture.start), np.searchsorted(events.t, gesture.end, "right")
    part = events.select(slice(int(first), int(stop)))
    return clean(Events(part.t - gesture.start, part.x, part.y, part.polarity), SIDE, SIDE)


def check_times(labels: Path, number: int, gesture: Row, events: Events, *, early: bool) -> None:
    """A gesture must share time with its recording; one that ends `early` may lack what is after its end."""
    first, last = (int(events.t[0]), int(events.t[-1])) if len(events) else (0, -1)
    if gesture.end < first or (gesture.start > last and not early):
        told = f"gesture {number} is from {gesture.start} to {gesture.end}, outside of the recording"
        expected = f"expected microseconds from {first} to {last}" if len(events) else "which has no events"
        raise FormatError(f"{labels}: {told}, {expected}")


def list_samples(
    root: Path, cache: Path, names: Sequence[str], *, truncated: str = "error", complete: bool = True
) -> list[Sample]:
    """The gestures of recordings, prepared or not. complete=False leaves out recordings of which there is neither."""
    entries = load(cache)
    samples: list[Sample] = []
    for name in names:
        labels = root / f"{name}_labels.csv"
        if name in entries:
            if labels.is_file() and sha256(labels) != entries[name].labels:
                raise FormatError(f"{labels}: not the labels that were prepared; {AGAIN}")
            recording = root / f"{name}.aedat"
            if recording.is_file() and recording.stat().st_size != entries[name].bytes:
                raise FormatError(f"{recording}: not the recording that was prepared; {AGAIN}")
            if entries[name].early and truncated == "error":
                told = "prepared from a recording that ends early, expected a whole one"
                raise FormatError(f"{cache / name}: {told}; truncated='keep' accepts this")
            samples += [Sample(name, i, row, n) for i, (row, n, _) in enumerate(entries[name].gestures)]
        elif labels.is_file() and (root / f"{name}.aedat").is_file():
            samples += [Sample(name, i, row, None) for i, row in enumerate(read_labels(labels))]
        elif complete:
            missing = labels if (root / f"{name}.aedat").is_file() else root / f"{name}.aedat"
            raise FormatError(f"{missing}: no such file; complete=False does without this recording")
    return samples


class Gestures:
    """Samples {"codes", "x", "y", "t", "length", "label", "id"}; t is in microseconds from the start of the gesture."""

    classes = CLASSES
    class_names = NAMES
    ragged = RAGGED

    def __init__(
        self,
        root: Path,
        cache: Path,
        samples: Sequence[Sample],
        *,
        tokenizing: Tokenizing,
        augment: Augment | None = None,
        seed: int = 0,
        truncated: str = "error",
    ) -> None:
        if not samples:
            raise FormatError(f"{root}: no gestures, expected recordings with labels")
        self.root, self.cache, self.samples = root, cache, list(samples)
        self.tokenizing, self.augment, self.seed, self.truncated = tokenizing, augment, seed, truncated

    def __len__(self) -> int:
        return len(self.samples)

    def events(self, index: int) -> Events:
        """The events of a gesture as they were recorded, with time from its start."""
        sample = self.samples[index]
        if sample.events is None:
            events = aedat.read(self.root / f"{sample.recording}.aedat", truncated=self.truncated)
            labels = self.root / f"{sample.recording}_labels.csv"
            check_times(labels, sample.row, sample.gesture, events, early=self.truncated == "keep")
            return cut(events, sample.gesture)
        return load_gesture(_path(self.cache, sample.recording, sample.row), sample.gesture, sample.events)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        events, label = self.events(index), self.samples[index].gesture.label
        if self.augment is None:
            tokens = self.tokenizing(events)
        else:
            rng = np.random.default_rng(sample_seed(self.seed, epoch, index))
            tokens, changed = tokenize_augmented(
                events, rng, self.tokenizing, width=SIDE, height=SIDE, settings=self.augment
            )
            label = MIRRORED[label] if changed.change.flip else label
        return {**tensors(tokens), "label": label, "id": index}


def dvsgesture(
    split: str,
    *,
    root: str | Path,
    seed: int = 0,
    augment: Augment | None = None,
    patch: int = 16,
    threshold: int = 256,
    refractory_us: int = 100_000,
    cache: str | Path | None = None,
    truncated: str = "error",
    complete: bool = True,
) -> Gestures:
    """A split of DvsGesture. augment is for "train", which has the paper's if none is given.

    cache: where `prepare` wrote, without it root/prepared. truncated="keep" takes what is whole of an AEDAT file that
    ends too early. complete=False accepts other lists than the official ones, and does without recordings that are not
    there.
    """
    folder = find_root(root)
    cache, names = cache_folder(folder, cache), list_recordings(folder, split, complete=complete)
    samples = list_samples(folder, cache, names, truncated=truncated, complete=complete)
    return Gestures(
        folder,
        cache,
        samples,
        tokenizing=Tokenizing(height=SIDE, width=SIDE, patch=patch, threshold=threshold, refractory_us=refractory_us),
        augment=(augment or Augment()) if split == "train" else None,
        seed=seed,
        truncated=truncated,
    )


# The cache: <recording>/<row>.npy, and a manifest that knows a recording when all of its gestures are written


@dataclass(frozen=True)
class Entry:
    """A prepared recording: the size of its AEDAT file, and whether that ends too early; the SHA-256 of its labels, and
    each gesture with the number of its events and the SHA-256 of its file."""

    bytes: int
    early: bool
    labels: str
    gestures: tuple[tuple[Row, int, str], ...]

    @classmethod
    def of(cls, cache: Path, name: str, value: Any) -> Entry:
        """From what a manifest has."""
        try:
            gestures = [(Row(int(a), int(b), int(c)), int(n), str(digest)) for a, b, c, n, digest in value["gestures"]]
            if all(0 <= row.label < CLASSES and n >= 0 for row, n, _ in gestures):
                return cls(int(value["bytes"]), bool(value["early"]), str(value["labels"]), tuple(gestures))
        except (KeyError, TypeError, ValueError, OverflowError):
            pass
        raise FormatError(f"{cache}: what the manifest has of {name} is damaged; remove the manifest and {AGAIN}")

    def told(self) -> dict[str, Any]:
        gestures = [[*row, count, digest] for row, count, digest in self.gestures]
        return {"bytes": self.bytes, "early": self.early, "labels": self.labels, "gestures": gestures}

    def is_whole(self, cache: Path, name: str) -> bool:
        """Whether all files are there with their rows; says nothing of what the rows hold."""
        try:
            for i, (_, count, _) in enumerate(self.gestures):
                _map(_path(cache, name, i), count)
        except (FormatError, OSError):
            return False
        return True


def load(cache: Path) -> dict[str, Entry]:
    """What was prepared, by recording; nothing if there is no manifest."""
    return {name: Entry.of(cache, name, value) for name, value in read_manifest(cache, KIND, VERSION).items()}


def _path(cache: Path, recording: str, row: int) -> Path:
    return cache / recording / f"{row:02d}.npy"


def _map(path: Path, count: int) -> Array:
    return map_array(
        path, f"{count} rows of {EVENT}", lambda found: (found.dtype, found.shape) == (EVENT, (count,)), AGAIN
    )


def load_gesture(path: Path, gesture: Row, count: int) -> Events:
    """A prepared gesture of so many events."""
    found = _map(path, count)
    events = Events.of(found["t"], found["x"], found["y"], found["polarity"])
    good = (events.x < SIDE) & (events.y < SIDE) & (events.polarity < 2) & (events.t <= gesture.end - gesture.start)
    if not good.all() or (events.t[1:] < events.t[:-1]).any():
        raise FormatError(f"{path}: not the events of a gesture; remove it and {AGAIN}")
    return events


def prepare(
    root: str | Path,
    cache: str | Path | None = None,
    *,
    truncated: str = "error",
    complete: bool = True,
    progress: Progress = no_progress,
) -> tuple[int, int]:
    """Cuts all recordings into gestures. Recordings that are done are left as they are. (done now, done before)."""
    folder = find_root(root)
    cache = cache_folder(folder, cache)
    names = [name for split in SPLITS for name in list_recordings(folder, split, complete=complete)]
    entries = load(cache)
    now = before = 0
    for i in progress(range(len(names)), "recordings"):
        name = names[i]
        source, labels = folder / f"{name}.aedat", folder / f"{name}_labels.csv"
        if not complete and not (source.is_file() and labels.is_file()):
            continue
        size, digest, old = source.stat().st_size, sha256(labels), entries.get(name)
        same = old and (old.bytes, old.labels) == (size, digest) and not (old.early and truncated == "error")
        if old and same and old.is_whole(cache, name):
            before += 1
            continue
        events, early = _read(source, truncated)
        entries[name] = Entry(size, early, digest, tuple(_write_gestures(cache, name, labels, events, early)))
        write_manifest(cache, KIND, VERSION, {name: entry.told() for name, entry in entries.items()})
        now += 1
    return now, before


def _read(recording: Path, truncated: str) -> tuple[Events, bool]:
    return told_if_early(lambda how: aedat.read(recording, truncated=how), truncated)


def _write_gestures(cache: Path, name: str, labels: Path, events: Events, early: bool) -> list[tuple[Row, int, str]]:
    gestures = []
    for i, row in enumerate(read_labels(labels)):
        if row.end - row.start >= 2**32:
            raise FormatError(
                f"{labels}: gesture {i} takes {row.end - row.start} microseconds, expected less than 2^32"
            )
        check_times(labels, i, row, events, early=early)
        part = cut(events, row)
        packed = np.zeros(len(part), EVENT)
        for field in EVENT.names or ():
            packed[field] = getattr(part, field)
        gestures.append((row, len(part), save_array(_path(cache, name, i), packed)))
    if gestures and not early and not any(count for _, count, _ in gestures):
        raise FormatError(f"{labels}: {_nothing(len(gestures))}")
    return gestures


def _nothing(gestures: int) -> str:
    return f"none of the {gestures} gestures has an event on the sensor, expected some"


def check(
    root: str | Path,
    cache: str | Path | None = None,
    *,
    truncated: str = "error",
    complete: bool = True,
    prepared: bool = True,
    progress: Progress = no_progress,
) -> Check:
    """What a copy holds and what it lacks: lists, labels, recordings, of which the headers of all packets are read; and
    if `prepared`, the files that `prepare` wrote with their checksums."""
    found = Check()
    folder = find_root(root)
    cache = cache_folder(folder, cache)
    for part, total in LISTED.items():
        count = len(read_trials(folder / f"trials_to_{part}.txt"))
        found.count(f"recordings in trials_to_{part}.txt", count, total if complete else None)
    for split in SPLITS:
        names = list_recordings(folder, split, complete=False)
        there = [name for name in names if _is_there(folder, name, found.problems if complete else [])]
        found.rows.append((f"{split}: recordings with labels", f"{len(there):,}", f"{len(names):,}"))
        gestures = events = 0
        for i in progress(range(len(there)), f"{split} recordings"):
            try:
                gestures += len(read_labels(folder / f"{there[i]}_labels.csv"))
                events += aedat.count(folder / f"{there[i]}.aedat", truncated=truncated)
            except FormatError as error:
                found.problems.append(str(error))
        found.count(f"{split}: gestures", gestures, TEST if complete and split == "test" else None)
        found.count(f"{split}: events", events)
    if prepared:
        _check_cache(cache, progress, found)
    return found


def _is_there(folder: Path, name: str, problems: list[str]) -> bool:
    missing = [file for file in (f"{name}.aedat", f"{name}_labels.csv") if not (folder / file).is_file()]
    problems += [f"{folder / file}: not there" for file in missing]
    return not missing


def _check_cache(cache: Path, progress: Progress, found: Check) -> None:
    try:
        entries = load(cache)
    except FormatError as error:
        found.problems.append(str(error))
        return
    names, events = list(entries), 0
    for i in progress(range(len(names)), "prepared recordings"):
        entry = entries[names[i]]
        if entry.gestures and not entry.early and not any(count for _, count, _ in entry.gestures):
            told = f"{_nothing(len(entry.gestures))}; remove it and {AGAIN}"
            found.problems.append(f"{cache / names[i]}: {told}")
        for row, (_, count, digest) in enumerate(entry.gestures):
            path = _path(cache, names[i], row)
            events += count
            if not path.is_file() or sha256(path) != digest:
                told = "damaged; remove it and" if path.is_file() else "not there;"
                found.problems.append(f"{path}: {told} {AGAIN}")
    found.count("prepared recordings", len(entries))
    found.count("  their events on the sensor", events)
