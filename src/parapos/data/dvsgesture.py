"""DvsGesture: 11 hand and arm gestures of 29 users before an event camera, as tokens of Spiking Patches.

A sample is a row of a recording's labels: the events from its first to its last microsecond, both inclusive, with time
counted from the first. The official lists give users 1 to 23 for training and 24 to 29 for testing; of the former,
users 21 to 23 are held back as "val". Gestures are read from what `prepare` wrote, or else from the AEDAT files, where
one gesture takes as long as its whole recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..tokenizers.spiking_patches import BUCKETS
from . import FormatError
from .augment.events import MIRRORED, tokenize_augmented
from .augment.events import EventAugment as Augment
from .event_tokens import RAGGED, Tokenizing, tensors
from .events import Events, clean, enlarged
from .events_tree import make_dvsgesture as synthetic  # noqa: F401 (for `parapos prepare`)
from .preparations import Job
from .prepared import Check, Entry, Item, Output, Store
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
VERSION = 3  # of prepared files
EVENT = np.dtype([("t", "<u4"), ("x", "u1"), ("y", "u1"), ("polarity", "u1")], align=True)  # 8 bytes


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


def open_store(job: Job) -> Store:
    """The prepared gestures of a root: <recording>/<row>.npy, in the cache or else in root/prepared."""
    return Store(find_root(job.root), job.cache, "dvsgesture", VERSION, "recordings")


def item_of(root: Path, name: str) -> Item:
    """A recording and its labels."""
    return Item(name, sized=(root / f"{name}.aedat",), hashed=(root / f"{name}_labels.csv",))


def list_samples(
    root: Path, store: Store, names: Sequence[str], *, truncated: str = "error", complete: bool = True
) -> list[Sample]:
    """The gestures of recordings, prepared or not. complete=False leaves out recordings of which there is neither."""
    entries = store.entries()
    samples: list[Sample] = []
    for name in names:
        item = item_of(root, name)
        recording, labels = item.sized[0], item.hashed[0]
        if name in entries:
            rows = rows_of(store, name, entries[name])
            if changed := store.changed(item, entries[name]):
                raise FormatError(f"{changed}: changed since it was prepared; {store.again}")
            if entries[name].facts["early"] and truncated == "error":
                problem = "prepared from a recording that ends early, expected a whole one"
                raise FormatError(f"{store.folder / name}: {problem}; truncated='keep' accepts this")
            samples += [Sample(name, i, row, count) for i, (row, count) in enumerate(rows)]
        elif labels.is_file() and recording.is_file():
            samples += [Sample(name, i, row, None) for i, row in enumerate(read_labels(labels))]
        elif complete:
            missing = labels if recording.is_file() else recording
            raise FormatError(f"{missing}: no such file; complete=False does without this recording")
    return samples


def rows_of(store: Store, name: str, entry: Entry) -> list[tuple[Row, int]]:
    """The gestures of a prepared recording, with the number of events of each."""
    try:
        rows = [Row(*map(int, row)) for row in entry.facts["gestures"]]
        counts = [entry.files[_file(name, i)][2][0] for i in range(len(rows))]
        if isinstance(entry.facts["early"], bool) and all(0 <= row.label < CLASSES for row in rows):
            return list(zip(rows, counts, strict=True))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        pass
    problem = f"what the manifest has of {name} is damaged; remove the manifest and {store.again}"
    raise FormatError(f"{store.folder}: {problem}")


class Gestures:
    """Samples {"codes", "x", "y", "t", "length", "label", "id"}."""

    classes = CLASSES
    class_names = NAMES
    ragged = RAGGED
    clock = "time"  # from the start of the gesture

    def __init__(
        self,
        root: Path,
        store: Store,
        samples: Sequence[Sample],
        *,
        tokenizing: Tokenizing,
        augment: Augment | None = None,
        seed: int = 0,
        truncated: str = "error",
        enlarge: int = 1,
    ) -> None:
        if not samples:
            raise FormatError(f"{root}: no gestures, expected recordings with labels")
        self.root, self.store, self.samples = root, store, list(samples)
        self.tokenizing, self.augment, self.seed, self.truncated = tokenizing, augment, seed, truncated
        self.enlarge = enlarge
        self.preprocessing = {**asdict(tokenizing), "clock": self.clock}

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
        return load_gesture(self.store, _file(sample.recording, sample.row), sample.gesture, sample.events)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        events, label = self.events(index), self.samples[index].gesture.label
        if self.augment is None:
            tokens = self.tokenizing(enlarged(events, self.enlarge) if self.enlarge > 1 else events)
        else:
            rng = np.random.default_rng(sample_seed(self.seed, epoch, index))
            tokens, changed = tokenize_augmented(
                events, rng, self.tokenizing, width=SIDE, height=SIDE, settings=self.augment
            )
            label = MIRRORED[label] if changed.change.flip else label
        return {**tensors(tokens, self.clock, origin=0), "label": label, "id": index}


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
    enlarge: int = 1,
) -> Gestures:
    """A split of DvsGesture. augment is for "train", which has the paper's if none is given.

    cache: where `prepare` wrote, without it root/prepared. truncated="keep" takes what is whole of an AEDAT file that
    ends too early. complete=False accepts other lists than the official ones, and does without recordings that are not
    there. enlarge: the sensor has so many times as many pixels a side, see `events.enlarged`; for testing alone.
    """
    if not 1 <= enlarge <= 256 or (enlarge > 1 and split == "train"):
        raise ValueError(f"enlarge must be from 1 to 256, and 1 for training, got {enlarge!r} for {split}")
    folder, side = find_root(root), SIDE * enlarge
    store, names = open_store(Job(folder, cache)), list_recordings(folder, split, complete=complete)
    samples = list_samples(folder, store, names, truncated=truncated, complete=complete)
    return Gestures(
        folder,
        store,
        samples,
        tokenizing=Tokenizing(height=side, width=side, patch=patch, threshold=threshold, refractory_us=refractory_us),
        augment=(augment or Augment()) if split == "train" else None,
        seed=seed,
        truncated=truncated,
        enlarge=enlarge,
    )


# Prepared gestures


def _file(recording: str, row: int) -> str:
    return f"{recording}/{row:02d}.npy"


def load_gesture(store: Store, file: str, gesture: Row, count: int) -> Events:
    """A prepared gesture of so many events."""
    found = store.array(file, EVENT, (count,))
    events = Events.of(found["t"], found["x"], found["y"], found["polarity"])
    good = (events.x < SIDE) & (events.y < SIDE) & (events.polarity < 2) & (events.t <= gesture.end - gesture.start)
    if not good.all() or (events.t[1:] < events.t[:-1]).any():
        raise FormatError(f"{store.folder / file}: not the events of a gesture; remove it and {store.again}")
    return events


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """Cuts a recording into gestures."""
    (recording,), (labels,) = item.sized, item.hashed
    rows, truncated = read_labels(labels), "keep" if options.get("keep_truncated") else "error"
    events, early = told_if_early(lambda how: aedat.read(recording, truncated=how), truncated)
    files: list[tuple[str, Any]] = []
    for i, row in enumerate(rows):
        if (length := row.end - row.start) >= 2**32:
            raise FormatError(f"{labels}: gesture {i} takes {length} microseconds, expected less than 2^32")
        check_times(labels, i, row, events, early=early)
        part = cut(events, row)
        packed = np.zeros(len(part), EVENT)
        for field in EVENT.names or ():
            packed[field] = getattr(part, field)
        files.append((_file(item.name, i), packed))
    if rows and not early and not any(len(packed) for _, packed in files):
        raise FormatError(f"{labels}: {_no_events(len(rows))}")
    return Output(files, facts={"early": early, "gestures": [list(row) for row in rows]})


def _no_events(gestures: int) -> str:
    return f"none of the {gestures} gestures has an event on the sensor, expected some"


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts lists, labels and recordings and, unless quick, the events of recordings, by the headers of packets."""
    result, items, folder = Check(), [], find_root(job.root)
    truncated = "keep" if job.options.get("keep_truncated") else "error"
    for part, total in LISTED.items():
        count = len(read_trials(folder / f"trials_to_{part}.txt"))
        result.count(f"recordings in trials_to_{part}.txt", count, total if job.complete else None)
    for split in SPLITS:
        names = list_recordings(folder, split, complete=False)
        missing = [path for name in names for path in _missing(folder, name)]
        result.problems += [f"{path}: not there" for path in missing if job.complete]
        there = [item_of(folder, name) for name in names if not _missing(folder, name)]
        result.rows.append((f"{split}: recordings with labels", f"{len(there):,}", f"{len(names):,}"))
        gestures = events = 0
        for i in job.progress(range(len(there)), f"{split} recordings"):
            try:
                gestures += len(read_labels(there[i].hashed[0]))
                events += 0 if job.quick else aedat.count(there[i].sized[0], truncated=truncated)
            except FormatError as error:
                result.problems.append(str(error))
        result.count(f"{split}: gestures", gestures, TEST if job.complete and split == "test" else None)
        if not job.quick:
            result.count(f"{split}: events", events)
        items += there
    return result, items


def _missing(folder: Path, name: str) -> list[Path]:
    item = item_of(folder, name)
    return [path for path in (*item.sized, *item.hashed) if not path.is_file()]


def review(store: Store, items: Sequence[Item], entries: Mapping[str, Entry], result: Check) -> None:
    """Counts prepared events, and names recordings that have none."""
    counts = {name: [count for _, count in rows_of(store, name, entry)] for name, entry in entries.items()}
    result.count("  their events on the sensor", sum(map(sum, counts.values())))
    for name, each in counts.items():
        if each and not sum(each) and not entries[name].facts["early"]:
            result.problems.append(f"{store.folder / name}: {_no_events(len(each))}; remove it and {store.again}")
