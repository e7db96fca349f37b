"""What the clips of GEN1 hold: each is read once, in pieces, and what was found is kept in a manifest.

The manifest has the samples of every clip and the number of events in the frame up to each, by which batches of similar
length can be made. It has no copy of events: samples are read from the DAT files, which are memory-mapped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError
from .cache import Check, Progress, cache_folder, no_progress, read_manifest, sha256, write_manifest
from .gen1 import BOXES, CLIPS, EVENTS, HEIGHT, LAST, WIDTH, Clips, find_root, list_clips, open_clip, usable
from .readers import boxes as box_files
from .readers import told_if_early

KIND, VERSION = "gen1", 2
PIECE = 4_000_000  # events at a time: about 200 MB
SAVE_EVERY = 10  # clips; the manifest of all is some megabytes


@dataclass(frozen=True)
class Scan:
    """A clip: size of its DAT file, and whether that ends too early; SHA-256 of its labels, events, those in the frame,
    those that are earlier than the one before, boxes; and of each sample the time, the number of boxes, and the number
    of events in the frame up to it."""

    bytes: int
    early: bool
    labels: str
    events: int
    inside: int
    backward: int
    boxes: int
    samples: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, cache: Path, name: str, value: Any) -> Scan:
        """From what a manifest has."""
        try:
            numbers = {key: int(value[key]) for key in ("bytes", "events", "inside", "backward", "boxes")}
            samples = tuple((int(a), int(b), int(c)) for a, b, c in value["samples"])
            return cls(**numbers, early=bool(value["early"]), labels=str(value["labels"]), samples=samples)
        except (KeyError, TypeError, ValueError, OverflowError):
            told = "is damaged; remove the manifest and run `parapos prepare gen1` again"
            raise FormatError(f"{cache}: what the manifest has of {name} {told}") from None


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
    size = path.stat().st_size
    return Scan(size, early, sha256(labels), len(file), inside, backward, len(found), samples)


def prepare(
    root: str | Path,
    cache: str | Path | None = None,
    *,
    truncated: str = "error",
    complete: bool = True,
    progress: Progress = no_progress,
) -> tuple[int, int]:
    """Scans all clips of all splits. Clips that are done are left as they are. (done now, done before)."""
    folder = find_root(root)
    cache = cache_folder(folder, cache)
    entries = load(cache)
    now = before = 0
    for split in CLIPS:
        if not complete and not (folder / split).is_dir():
            continue
        names = list_clips(folder, split, complete=complete)
        for i in progress(range(len(names)), f"{split} clips"):
            key, old = f"{split}/{names[i]}", entries.get(f"{split}/{names[i]}")
            size, labels = (folder / f"{key}{EVENTS}").stat().st_size, sha256(folder / f"{key}{BOXES}")
            if old and (old.bytes, old.labels) == (size, labels) and not (old.early and truncated == "error"):
                before += 1
                continue
            entries[key] = scan(folder / split, names[i], train=split == "train", truncated=truncated)
            now += 1
            if now % SAVE_EVERY == 0:
                _save(cache, entries)
        _save(cache, entries)
    return now, before


def _save(cache: Path, entries: dict[str, Scan]) -> None:
    write_manifest(cache, KIND, VERSION, {name: asdict(entry) for name, entry in entries.items()})


def load(cache: Path) -> dict[str, Scan]:
    """What was scanned, by "<split>/<clip>"; nothing if there is no manifest."""
    return {name: Scan.of(cache, name, value) for name, value in read_manifest(cache, KIND, VERSION).items()}


def windows(dataset: Clips, cache: str | Path) -> list[int]:
    """The number of events of every sample of a dataset, from the manifest; events that occur twice count twice."""
    entries, found = load(Path(cache)), []
    for i, name in enumerate(dataset.names):
        entry = entries.get(f"{dataset.folder.name}/{name}")
        if entry is None or [time for time, _, _ in entry.samples] != dataset.times[dataset.clips == i].tolist():
            raise FormatError(f"{cache}: {name} is not as it was prepared; run `parapos prepare gen1` again")
        if entry.early and dataset.truncated == "error":
            told = f"{name} was prepared from a recording that ends early, expected a whole one"
            raise FormatError(f"{cache}: {told}; truncated='keep' accepts this")
        found += [min(events, dataset.last) for _, _, events in entry.samples]
    return found


def check(
    root: str | Path,
    cache: str | Path | None = None,
    *,
    truncated: str = "error",
    complete: bool = True,
    prepared: bool = True,
    progress: Progress = no_progress,
) -> Check:
    """What a copy holds and what it lacks: pairs of files, samples and boxes; and if `prepared`, what clips turned out
    to be when they were scanned."""
    found = Check()
    folder = find_root(root)
    cache = cache_folder(folder, cache)
    scanned = load(cache) if prepared else None
    for split, total in CLIPS.items():
        if not (folder / split).is_dir():
            found.rows.append((f"{split} clips", "not there", f"{total:,}" if complete else ""))
            if complete:
                found.problems.append(f"{folder / split}: no such folder")
            continue
        names = list_clips(folder, split, complete=False)
        found.count(f"{split} clips", len(names), total if complete else None)
        if complete:
            found.problems += _halves(folder / split)
        samples = boxes = 0
        for i in progress(range(len(names)), f"{split} clips"):
            try:
                path = folder / split / f"{names[i]}{BOXES}"
                kept = usable(box_files.read(path), train=split == "train", name=str(path))
                open_clip(folder / split / f"{names[i]}{EVENTS}", truncated=truncated)
            except FormatError as error:
                found.problems.append(str(error))
                continue
            samples += len(np.unique(kept["t"]))
            boxes += len(kept)
        found.count("  samples", samples)
        found.count("  boxes", boxes)
        if scanned is not None:
            clips = {name: scanned[f"{split}/{name}"] for name in names if f"{split}/{name}" in scanned}
            found.rows.append(("  clips scanned", f"{len(clips):,}", f"{len(names):,}"))
            _check_scanned(folder / split, clips, found)
    return found


def _halves(folder: Path) -> list[str]:
    """What pairs of files lack."""
    problems = []
    for suffix, other in ((EVENTS, BOXES), (BOXES, EVENTS)):
        missing = [path.name.removesuffix(suffix) + other for path in sorted(folder.glob(f"*{suffix}"))]
        problems += [f"{folder / name}: not there" for name in missing if not (folder / name).is_file()]
    return problems


def _check_scanned(folder: Path, clips: dict[str, Scan], found: Check) -> None:
    done = clips.values()
    found.count("    events", sum(entry.events for entry in done))
    found.count("    of them in the frame", sum(entry.inside for entry in done))
    found.count("    samples with fewer than 500,000", sum(n < LAST for entry in done for _, _, n in entry.samples))
    for name, entry in clips.items():
        if entry.backward:
            told = f"time goes back {entry.backward:,} times, expected never: samples are found by binary search"
            found.problems.append(f"{folder / name}{EVENTS}: {told}")
        if entry.inside * 2 < entry.events:
            found.problems.append(f"{folder / name}{EVENTS}: most events are outside {WIDTH} x {HEIGHT}")
