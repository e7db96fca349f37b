"""UCF101 decoded once: the frames that training sees, one .npy file per clip beside a manifest, and a check of a copy.

A file holds uint8 (2K, 3, H, W), 2.3 MB for most clips, and is read whole. Not HDF5, for the reasons in cache.py; and
not one file of 31 GB, which could not be replaced clip by clip. A prepared clip counts as long as its video has the
size that it had, and its file the size that was written; `check` also compares SHA-256.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import FormatError
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
from .clips import TUBELET, TUBELETS, read_clip
from .readers.ucf101_lists import CLASSES, CLIPS, COUNTS, FOLDS, SPLITS, VIDEOS, Clip, find_clips, read_fold

KIND, VERSION = "ucf101", 1
SAVE_EVERY = 200  # clips, then the manifest is written
SHOWN = 3  # names in a message
AGAIN = "run `parapos prepare ucf101` again"


def frames_path(cache: Path, file: str) -> Path:
    """Where the frames of <Class>/<clip>.avi are."""
    return cache / f"{file}.npy"


def load_frames(path: Path) -> Tensor:
    """Prepared frames, uint8 (2K, 3, H, W) with K from 1 to 5."""
    return torch.from_numpy(np.array(map_array(path, "uint8 frames (2K, 3, H, W)", _are_frames, AGAIN)))


def _are_frames(found: Array) -> bool:
    good = found.dtype == np.uint8 and found.ndim == 4 and found.shape[1] == 3 and found.size > 0
    return bool(good) and len(found) <= TUBELET * TUBELETS and len(found) % TUBELET == 0


def is_prepared(root: str | Path, cache: Path, files: Sequence[str]) -> list[bool]:
    """Of each video below root/UCF-101, whether its frames are in the cache and neither has changed since."""
    entries = read_manifest(cache, KIND, VERSION)
    return [_is_current(Path(root) / VIDEOS, cache, file, entries.get(file)) for file in files]


def _is_current(videos: Path, cache: Path, file: str, entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    try:
        sizes = os.stat(videos / file).st_size, os.stat(frames_path(cache, file)).st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    return sizes == (entry.get("video_bytes"), entry.get("bytes"))


@dataclass
class Prepared:
    """What `prepare` did: clips done now and before, clips without a readable frame, and clips that end too early."""

    now: int = 0
    before: int = 0
    unreadable: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)


def prepare(root: str | Path, cache: str | Path | None = None, *, progress: Progress = no_progress) -> Prepared:
    """Decodes all clips that lists name and that are there. Those that are done are left as they are."""
    folder, videos = cache_folder(root, cache), Path(root) / VIDEOS
    files = [file for file in find_clips(root, list_clips(root)) if file is not None]
    entries, result = read_manifest(folder, KIND, VERSION), Prepared()
    try:
        for i in progress(range(len(files)), "clips"):
            file = files[i]
            if _is_current(videos, folder, file, entries.get(file)):
                result.before += 1
                continue
            try:
                frames, problem = read_clip(videos / file)
            except FormatError as error:
                result.unreadable.append(str(error))
                continue
            if problem:
                result.early.append(f"{videos / file}: {problem}")
            path = frames_path(folder, file)
            digest = save_array(path, frames.numpy())
            sizes = {"video_bytes": (videos / file).stat().st_size, "bytes": path.stat().st_size}
            entries[file] = {"shape": list(frames.shape), **sizes, "sha256": digest, "problem": problem}
            result.now += 1
            if result.now % SAVE_EVERY == 0:
                write_manifest(folder, KIND, VERSION, entries)
    finally:
        if result.now:
            write_manifest(folder, KIND, VERSION, entries)
    return result


def list_clips(root: str | Path) -> list[Clip]:
    """Every clip that any list names, once."""
    folds = [read_fold(root, fold) for fold in FOLDS]
    clips = {clip.path.lower(): clip for lists in folds for split in SPLITS for clip in getattr(lists, split)}
    return list(clips.values())


def check(
    root: str | Path,
    cache: str | Path | None = None,
    *,
    sample: int = 100,
    complete: bool = True,
    progress: Progress = no_progress,
) -> Check:
    """Counts lists and videos, decodes `sample` clips evenly spaced, and compares prepared frames with their SHA-256.

    sample = 0 does neither of the latter two, nor does it look for prepared files that the manifest names.
    """
    result = Check()
    try:
        for fold in FOLDS:
            lists = read_fold(root, fold)
            if fold == 1:
                result.count("classes", len(lists.classes), CLASSES if complete else None)
            for split, expected in zip(SPLITS, COUNTS[fold], strict=True):
                result.count(f"fold {fold}, {split} clips", len(getattr(lists, split)), expected if complete else None)
        clips = list_clips(root)
        found = find_clips(root, clips)
    except (FormatError, FileNotFoundError) as error:
        result.problems.append(str(error))
        return result
    files = [file for file in found if file is not None]
    result.count("videos", len(files), CLIPS if complete else None)
    missing = [clip.path for clip, file in zip(clips, found, strict=True) if file is None]
    if missing:
        told = f"{len(missing):,} listed videos are not there: {', '.join(missing[:SHOWN])}"
        result.rows.append(("  listed but not there", f"{len(missing):,}", "0" if complete else ""))
        result.problems += [told] if complete else []
    named = {file.lower() for file in files}
    others = [p for p in Path(root, VIDEOS).glob("*/*.avi") if f"{p.parent.name}/{p.name}".lower() not in named]
    result.count("  there but not listed", len(others))
    if sample:
        _check_sample(Path(root) / VIDEOS, files, sample, progress, result)
    _check_cache(root, cache_folder(root, cache), files, bool(sample), progress, result)
    return result


def _check_sample(videos: Path, files: list[str], sample: int, progress: Progress, result: Check) -> None:
    chosen = [i * len(files) // min(sample, len(files)) for i in range(min(sample, len(files)))]
    bad = early = 0
    for i in progress(chosen, "videos"):
        try:
            early += bool(read_clip(videos / files[i])[1])
        except FormatError as error:
            bad += 1
            result.problems.append(f"unreadable: {error}")
    result.rows.append((f"  of {len(chosen):,} read, unreadable", f"{bad:,}", "0"))
    result.rows.append((f"  of {len(chosen):,} read, ending too early", f"{early:,}", ""))


def _wrong_size(path: Path, entry: Any) -> str:
    """What is wrong with the size of a prepared file, empty if nothing is."""
    expected = entry.get("bytes") if isinstance(entry, dict) else None
    size = path.stat().st_size if path.is_file() else None
    if size is not None and size == expected:
        return ""
    told = "not there" if size is None else f"{size} bytes, expected {expected} as in the manifest"
    return f"{path}: {told}; {AGAIN}"


def _check_cache(
    root: str | Path, cache: Path, files: list[str], compare: bool, progress: Progress, result: Check
) -> None:
    try:
        entries = read_manifest(cache, KIND, VERSION)
    except FormatError as error:
        result.problems.append(str(error))
        return
    current = [file for file, good in zip(files, is_prepared(root, cache, files), strict=True) if good]
    result.count("prepared clips", len(current))
    if compare:
        wrong = [
            told for file, entry in sorted(entries.items()) if (told := _wrong_size(frames_path(cache, file), entry))
        ]
        result.rows.append(("  in the manifest, file missing or of another size", f"{len(wrong):,}", "0"))
        result.problems += wrong
    if compare and current:
        damaged = [
            current[i]
            for i in progress(range(len(current)), "prepared clips")
            if sha256(frames_path(cache, current[i])) != entries[current[i]].get("sha256")
        ]
        result.rows.append(("  of them damaged", f"{len(damaged):,}", "0"))
        result.problems += [
            f"{frames_path(cache, file)}: not what was written; remove it and {AGAIN}" for file in damaged
        ]
