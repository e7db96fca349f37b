"""How GEN1 is prepared, and a check of a copy: each clip is read once, in pieces, and the manifest keeps what it holds.

That is the samples of every clip and the number of events in the frame up to each, by which batches of similar length
can be made. There is no copy of events: samples are read from the DAT files, which are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError
from .events_tree import make_gen1 as synthetic  # noqa: F401 (for `parapos prepare`)
from .gen1 import BOXES, CLIPS, EVENTS, HEIGHT, LAST, WIDTH, Clips, find_root, list_clips, open_clip, usable
from .preparations import Job
from .prepared import Check, Entry, Item, Output, Store
from .readers import boxes as box_files
from .readers import told_if_early

VERSION = 3  # of prepared files
PIECE = 4_000_000  # events at a time: about 200 MB


@dataclass(frozen=True)
class Scan:
    """A clip: whether its DAT file ends too early, events, those in the frame, those that are earlier than the one
    before, boxes; and of each sample the time, the number of boxes, and the number of events in the frame up to it."""

    early: bool
    events: int
    inside: int
    backward: int
    boxes: int
    samples: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, store: Store, name: str, entry: Entry) -> Scan:
        """From what a manifest has."""
        try:
            facts = entry.facts
            numbers = {key: int(facts[key]) for key in ("events", "inside", "backward", "boxes")}
            samples = tuple((int(a), int(b), int(c)) for a, b, c in facts["samples"])
            return cls(**numbers, early=bool(facts["early"]), samples=samples)
        except (KeyError, TypeError, ValueError, OverflowError):
            problem = f"what the manifest has of {name} is damaged; remove the manifest and {store.again}"
            raise FormatError(f"{store.folder}: {problem}") from None


def scan(folder: Path, name: str, *, train: bool, truncated: str = "error", piece: int = PIECE) -> Scan:
    """Reads a clip."""
    path, labels = folder / f"{name}{EVENTS}", folder / f"{name}{BOXES}"
    found = box_files.read(labels)
    times, boxes = np.unique(usable(found, train=train, name=str(labels))["t"], return_counts=True)
    file, early = told_if_early(lambda how: open_clip(path, truncated=how), truncated)
    before = np.zeros(len(times), np.int64)
    inside = backward = newest = 0
    for start in range(0, len(file), piece):
        events = file.slice(start, min(start + piece, len(file)))
        good = (events.x < WIDTH) & (events.y < HEIGHT)
        backward += int((np.diff(events.t, prepend=newest) < 0).sum())
        newest = int(events.t[-1])
        before += np.searchsorted(np.sort(events.t[good]), times, "right")
        inside += int(good.sum())
    samples = tuple(zip(times.tolist(), boxes.tolist(), before.tolist(), strict=True))
    return Scan(early, len(file), inside, backward, len(found), samples)


def open_store(job: Job) -> Store:
    return Store(find_root(job.root), job.cache, "gen1", VERSION, "clips")


def _items(folder: Path, split: str, names: list[str]) -> list[Item]:
    base = folder / split
    return [Item(f"{split}/{n}", sized=(base / f"{n}{EVENTS}",), hashed=(base / f"{n}{BOXES}",)) for n in names]


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """Scans a clip."""
    truncated = "keep" if options.get("keep_truncated") else "error"
    (path,) = item.sized
    folder, name = path.parent, path.name.removesuffix(EVENTS)
    return Output(facts=asdict(scan(folder, name, train=folder.name == "train", truncated=truncated)))


def load(store: Store) -> dict[str, Scan]:
    """What was scanned, by "<split>/<clip>"; nothing if there is no manifest."""
    return {name: Scan.of(store, name, entry) for name, entry in store.entries().items()}


def windows(dataset: Clips, cache: str | Path | None = None) -> list[int]:
    """The number of events of every sample of a dataset, from the manifest; events that occur twice count twice."""
    store = open_store(Job(dataset.folder.parent, cache))
    scans, counts = load(store), []
    for i, name in enumerate(dataset.names):
        clip = scans.get(f"{dataset.folder.name}/{name}")
        if clip is None or [time for time, _, _ in clip.samples] != dataset.times[dataset.clips == i].tolist():
            raise FormatError(f"{store.folder}: {name} is not as it was prepared; {store.again}")
        if clip.early and dataset.truncated == "error":
            problem = f"{name} was prepared from a recording that ends early, expected a whole one"
            raise FormatError(f"{store.folder}: {problem}; truncated='keep' accepts this")
        counts += [min(events, dataset.last) for _, _, events in clip.samples]
    return counts


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts pairs of files, samples and boxes."""
    result, items, folder, complete = Check(), [], find_root(job.root), job.complete
    truncated = "keep" if job.options.get("keep_truncated") else "error"
    for split, total in CLIPS.items():
        if not (folder / split).is_dir():
            result.rows.append((f"{split} clips", "not there", f"{total:,}" if complete else ""))
            if complete:
                result.problems.append(f"{folder / split}: no such folder")
            continue
        clips = _items(folder, split, list_clips(folder, split, complete=False))
        items += clips
        result.count(f"{split} clips", len(clips), total if complete else None)
        if complete:
            result.problems += _halves(folder / split)
        samples = boxes = 0
        for i in job.progress(range(len(clips)), f"{split} clips"):
            (path,) = clips[i].hashed
            try:
                kept = usable(box_files.read(path), train=split == "train", name=str(path))
                open_clip(clips[i].sized[0], truncated=truncated)
            except FormatError as error:
                result.problems.append(str(error))
                continue
            samples += len(np.unique(kept["t"]))
            boxes += len(kept)
        result.count("  samples", samples)
        result.count("  boxes", boxes)
    return result, items


def _halves(folder: Path) -> list[str]:
    """What pairs of files lack."""
    problems = []
    for suffix, other in ((EVENTS, BOXES), (BOXES, EVENTS)):
        missing = [path.name.removesuffix(suffix) + other for path in sorted(folder.glob(f"*{suffix}"))]
        problems += [f"{folder / name}: not there" for name in missing if not (folder / name).is_file()]
    return problems


def review(store: Store, items: Sequence[Item], entries: Mapping[str, Entry], result: Check) -> None:
    """Counts scanned events, and names clips that cannot be right."""
    scans = [(item, Scan.of(store, item.name, entries[item.name])) for item in items if item.name in entries]
    result.count("  their events", sum(clip.events for _, clip in scans))
    result.count("  of them in the frame", sum(clip.inside for _, clip in scans))
    short = sum(count < LAST for _, clip in scans for _, _, count in clip.samples)
    result.count(f"  samples with fewer than {LAST:,}", short)
    for item, clip in scans:
        if clip.backward:
            problem = f"time goes back {clip.backward:,} times, expected never: samples are found by binary search"
            result.problems.append(f"{item.sized[0]}: {problem}")
        if clip.inside * 2 < clip.events:
            result.problems.append(f"{item.sized[0]}: most events are outside {WIDTH} x {HEIGHT}")
