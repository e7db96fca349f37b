"""UCF101: 13,320 clips of 101 human actions, in three folds; how they are prepared, and a check of a copy.

Prepared are the frames that training sees, one array uint8 (2K, 3, H, W) per clip, 2.3 MB for most, which is read
whole. A clip that is not prepared, or no longer as it was, is decoded from its video.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import FormatError
from .augment.video import VideoAugment as Augment
from .augment.video import vary
from .clips import SCALES, SPACINGS, TUBELET, TUBELETS, read_clip, resize, scale_pixels
from .images import MAX_IN_A_ROW, Strings
from .preparations import Job
from .prepared import Array, Check, Item, Output, Store, map_array
from .readers.ucf101_lists import CLASSES, CLIPS, COUNTS, FOLDS, SPLITS, VIDEOS, Clip, find_clips, read_fold
from .sampling import Key, sample_seed
from .video_tree import make_ucf101 as synthetic  # noqa: F401 (for `parapos prepare`)

HEIGHT, WIDTH = 240, 320
VERSION = 2  # of prepared files
SHOWN = 3  # names in a message
GIVES, OF_MODELS = ("video", "tubelets"), {"tubelet": TUBELET}  # inputs of models, and options that they must have


class Videos:
    """Clips below a folder, with labels.

    An index in an epoch gives {"video": float32 (3, 10, height, width), "tubelets", "readable", "label", "id"}. The
    first 2K frames are real and the rest are zeros; "tubelets" is K. augment makes it training data, drawn from (seed,
    epoch, index) alone.

    corrupt: "error" raises the FormatError of a clip without a readable frame. "skip" notes it in `skipped`, which is
    shared by all workers; training then takes the next readable clip in its place, and an evaluation, which counts
    every clip once, gets zeros with K = 0 and "readable" False, to count as wrong whatever the answer is. What is
    wrong with prepared frames is always an error.

    store: where frames are prepared, and prepared: of each clip, whether they are. spacing: one of `SPACINGS`.
    """

    class_names: Sequence[str] | None = None

    def __init__(
        self,
        root: str | Path,
        files: Iterable[str],
        labels: Iterable[int],
        *,
        classes: int,
        height: int = HEIGHT,
        width: int = WIDTH,
        pixel_scale: str = "raw255",
        augment: Augment | None = None,
        seed: int = 0,
        corrupt: str = "error",
        spacing: str = "starts",
        store: Store | None = None,
        prepared: Sequence[bool] | None = None,
    ) -> None:
        if pixel_scale not in SCALES:
            raise ValueError(f"pixel_scale must be one of {', '.join(SCALES)}, got {pixel_scale!r}")
        if corrupt not in ("error", "skip"):
            raise ValueError(f"corrupt must be 'error' or 'skip', got {corrupt!r}")
        for name, side in (("height", height), ("width", width)):
            if not 1 <= side <= 4096:
                raise ValueError(f"{name} must be from 1 to 4096, got {side!r}")
        self.root, self.files, self.labels = Path(root), Strings(files), torch.tensor(list(labels), dtype=torch.int32)
        if len(self.files) == 0:
            raise FormatError(f"{root}: no clips, expected <Class>/<clip>.avi")
        self.classes, self.height, self.width, self.pixel_scale = classes, height, width, pixel_scale
        self.transform = augment.transform() if augment is not None else None
        self.seed, self.corrupt, self.spacing, self.store = seed, corrupt, spacing, store
        self.prepared = torch.tensor(prepared if prepared is not None else [False] * len(self.files))
        self.skipped = torch.zeros(len(self.files), dtype=torch.bool).share_memory_()
        self.preprocessing = {"height": height, "width": width, "pixel_scale": pixel_scale, "spacing": spacing}

    def __len__(self) -> int:
        return len(self.files)

    def path(self, index: int) -> Path:
        return self.root / self.files[index]

    def frames(self, index: int) -> Tensor:
        """uint8 (2K, 3, H, W), as they are in the video."""
        if self.store is not None and self.prepared[index]:
            return load_frames(frames_path(self.store, self.files[index]), self.store.again)
        return read_clip(self.path(index), self.spacing)[0]

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        for _ in range(min(MAX_IN_A_ROW, len(self))):
            try:
                return self._sample(index, self.frames(index), epoch)
            except FormatError:
                if self.corrupt == "error" or self.prepared[index]:  # what was prepared could be read
                    raise
                self.skipped[index] = True
                if self.transform is None:
                    return self._sample(index, torch.zeros(0, 3, self.height, self.width, dtype=torch.uint8), epoch)
                index = (index + 1) % len(self)
        raise FormatError(f"{self.path(index)}: this and the clips before it cannot be read, none of many in a row")

    def _sample(self, index: int, frames: Tensor, epoch: int) -> dict[str, Any]:
        count = len(frames)
        if self.transform is not None:
            frames = vary(frames, self.transform, sample_seed(self.seed, epoch, index))
        video = torch.zeros(3, TUBELET * TUBELETS, self.height, self.width)
        if count:
            frames = scale_pixels(resize(frames, self.height, self.width), self.pixel_scale)
            video[:, :count] = frames.transpose(0, 1)
        label = int(self.labels[index])
        return {"video": video, "tubelets": count // TUBELET, "readable": count > 0, "label": label, "id": index}


def ucf101(
    split: str,
    *,
    root: str | Path,
    fold: int = 1,
    height: int = HEIGHT,
    width: int = WIDTH,
    seed: int = 0,
    augment: Augment | None = None,
    pixel_scale: str = "raw255",
    spacing: str = "starts",
    corrupt: str = "error",
    cache: str | Path | None = None,
    complete: bool = True,
) -> Videos:
    """A split of a fold: root/UCF-101/<Class>/*.avi by the lists in root/ucfTrainTestlist.

    "test" is the official test list. "val" has, of each class, the first group of the training list, "train" the other
    groups. augment is for "train", which has the paper's if none is given. pixel_scale: "raw255" is what the released
    code does, "unit" the better choice for new runs. spacing: "starts" or "gaps", see clips.py. Frames come from where
    `prepare` wrote them, root/prepared or `cache`, as far as it did, and else from the videos. complete=False accepts
    other lists than the official ones, and does without clips that are not there.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    lists = read_fold(root, fold)
    clips: list[Clip] = getattr(lists, split)
    if complete:
        expected = COUNTS[fold][SPLITS.index(split)]
        if (len(clips), len(lists.classes)) != (expected, CLASSES):
            told = f"{len(clips)} clips for {split} in fold {fold} and {len(lists.classes)} classes"
            raise FormatError(f"{root}: {told}, expected {expected} and {CLASSES}; complete=False accepts this")
    found = find_clips(root, clips)
    missing = [clip.path for clip, file in zip(clips, found, strict=True) if file is None]
    if missing and complete:
        told = f"{len(missing)} of {len(clips)} clips for {split} are not there, the first is {missing[0]}"
        raise FormatError(f"{Path(root) / VIDEOS}: {told}; complete=False does without them")
    files = [file for file in found if file is not None]
    store = open_store(Job(root, cache, options={"spacing": spacing}))
    entries = store.entries()
    videos = Videos(
        Path(root) / VIDEOS,
        files,
        [clip.label for clip, file in zip(clips, found, strict=True) if file is not None],
        classes=len(lists.classes),
        height=height,
        width=width,
        pixel_scale=pixel_scale,
        augment=(augment or Augment()) if split == "train" else None,
        seed=seed,
        corrupt=corrupt,
        spacing=spacing,
        store=store,
        prepared=[store.is_current(item, entries.get(item.name)) for item in _items(root, files)],
    )
    videos.class_names = lists.classes
    return videos


# Prepared frames


def open_store(job: Job) -> Store:
    spacing = job.options.get("spacing", "starts")
    if spacing not in SPACINGS:
        raise ValueError(f"spacing must be one of {', '.join(SPACINGS)}, got {spacing!r}")
    return Store(job.root, job.cache, "ucf101", VERSION, "clips", spacing=spacing)


def frames_path(store: Store, file: str) -> Path:
    """Where the frames of <Class>/<clip>.avi are."""
    return store.folder / f"{file}.npy"


def load_frames(path: Path, again: str) -> Tensor:
    """Prepared frames, uint8 (2K, 3, H, W) with K from 1 to 5. again: what to run if they are not good."""
    return torch.from_numpy(np.array(map_array(path, "uint8 frames (2K, 3, H, W)", _are_frames, again)))


def _are_frames(array: Array) -> bool:
    good = array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] == 3 and array.size > 0
    return bool(good) and len(array) <= TUBELET * TUBELETS and len(array) % TUBELET == 0


def _items(root: str | Path, files: Iterable[str]) -> list[Item]:
    return [Item(file, sized=(Path(root) / VIDEOS / file,)) for file in files]


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """Decodes a clip."""
    frames, problem = read_clip(item.sized[0], options.get("spacing", "starts"))
    return Output([(f"{item.name}.npy", frames.numpy())], note=problem)


def list_clips(root: str | Path) -> list[Clip]:
    """Every clip that any list names, once."""
    folds = [read_fold(root, fold) for fold in FOLDS]
    clips = {clip.path.lower(): clip for lists in folds for split in SPLITS for clip in getattr(lists, split)}
    return list(clips.values())


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts lists and videos and, unless quick, decodes `sample` clips evenly spaced."""
    root, complete = job.root, job.complete
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
        return result, []
    files = [file for file in found if file is not None]
    result.count("videos", len(files), CLIPS if complete else None)
    missing = [clip.path for clip, file in zip(clips, found, strict=True) if file is None]
    if missing:
        problem = f"{len(missing):,} listed videos are not there: {', '.join(missing[:SHOWN])}"
        result.rows.append(("  listed but not there", f"{len(missing):,}", "0" if complete else ""))
        result.problems += [problem] if complete else []
    named = {file.lower() for file in files}
    others = [p for p in Path(root, VIDEOS).glob("*/*.avi") if f"{p.parent.name}/{p.name}".lower() not in named]
    result.count("  there but not listed", len(others))
    items = _items(root, files)
    if not job.quick:
        _check_sample(items, job, result)
    return result, items


def _check_sample(items: Sequence[Item], job: Job, result: Check) -> None:
    sample = job.options.get("sample", 100)
    chosen = [i * len(items) // min(sample, len(items)) for i in range(min(sample, len(items)))]
    bad = early = 0
    for i in job.progress(chosen, "videos"):
        try:
            early += bool(make(items[i], job.options).note)
        except FormatError as error:
            bad += 1
            result.problems.append(f"unreadable: {error}")
    result.rows.append((f"  of {len(chosen):,} read, unreadable", f"{bad:,}", "0"))
    result.rows.append((f"  of {len(chosen):,} read, ending too early", f"{early:,}", ""))
