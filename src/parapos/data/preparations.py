"""How each data set is checked and prepared: what `parapos prepare NAME` runs, and the registry of names.

A data set has a module with

    synthetic(root)               writes a tiny generated copy, for trials and tests
    survey(job)                   a Check of what a copy holds and lacks, and its Items; it reads little if job.quick
    open_store(job)               the Store of its prepared files
    make(item, options)           the Output of an item
    review(store, items, entries, result)    if it has more to say of what is prepared

One that keeps no such files has `prepare(job)`, which returns a Prepared, in place of the last three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .nuscenes_classes import VERSIONS
from .prepared import Check, Prepared, Progress, no_progress


@dataclass(frozen=True)
class Job:
    """What to prepare, and how. options: those of the data set; what is not given has the default of the registry."""

    root: str | Path
    cache: str | Path | None = None
    complete: bool = True
    quick: bool = False
    workers: int = 1
    progress: Progress = no_progress
    options: Mapping[str, Any] = field(default_factory=dict)


class Option(NamedTuple):
    """An option of a data set: a flag if the default is False, a whole number, or one of several choices."""

    name: str
    default: bool | int | str
    help: str
    choices: tuple[str, ...] = ()


class Preparation(NamedTuple):
    """module: import path. items: what is counted, in the plural. advice: what to do about items that failed."""

    module: str
    summary: str
    items: str = ""
    extras: str = "train"
    options: tuple[Option, ...] = ()
    advice: str = ""


_KEEP = Option("keep_truncated", False, "take what is whole of files that end early")
_SPACING = Option("spacing", "starts", "what 10 frames apart means for tubelets, see docs", ("starts", "gaps"))
PREPARATIONS: dict[str, Preparation] = {
    "imagenet": Preparation(
        "parapos.data.imagenet",
        "Count and read ImageNet-1K, ImageNetV2 and ImageNet-R, then write the list of validation images.",
        options=(Option("sample", 1000, "images of each part to decode"),),
    ),
    "ucf101": Preparation(
        "parapos.data.ucf101",
        "Count UCF101, and decode the frames that training sees once and for all (31 GB).",
        "clips",
        "train,video",
        (Option("sample", 100, "videos to decode for --check"), _SPACING),
        'data.options.corrupt = "skip" trains without them',
    ),
    "dvsgesture": Preparation(
        "parapos.data.dvsgesture",
        "Count DvsGesture and cut its recordings into gestures, which training reads many times faster.",
        "recordings",
        "train,events",
        (_KEEP,),
    ),
    "gen1": Preparation(
        "parapos.data.gen1_scan",
        "Count Prophesee GEN1 and read every clip once, for a list of its samples with their events.",
        "clips",
        "train,events",
        (_KEEP,),
    ),
    "coco": Preparation(
        "parapos.data.coco",
        "Count and read COCO 2017, or another data set in its layout. Nothing has to be written.",
        extras="train,detect",
        advice='data.options.corrupt = "skip" trains without them',
    ),
    "coco_desk": Preparation(
        "parapos.data.coco_desk",
        "Write the generated digits and shapes that the recipe coco_desk trains on, and count them.",
        extras="train,detect",
    ),
    "scannet": Preparation(
        "parapos.data.scannet",
        "Count ScanNet, and write points, colours, normals and labels of its scenes as arrays.",
        "scenes",
    ),
    "modelnet40": Preparation(
        "parapos.data.modelnet40",
        "Count ModelNet40, resampled or as OFF meshes, and choose the points of its shapes once and for all.",
        "shapes",
        options=(
            Option("sampling", "farthest", "how points are chosen", ("farthest", "random", "first")),
            Option("points", 8192, "points of a shape"),
        ),
    ),
    "nuscenes": Preparation(
        "parapos.data.nuscenes_prepare",
        "Count nuScenes, and write its keyframes with their geometry and the objects that training pastes.",
        "scenes",
        options=(
            Option("tables", "auto", "version of the tables; auto: the largest that is there", ("auto", *VERSIONS)),
        ),
    ),
}


def register_preparation(name: str, preparation: Preparation) -> None:
    """Makes `parapos prepare NAME` work for a data set from outside the package."""
    if name in PREPARATIONS:
        raise ValueError(f"data set {name!r} has a preparation already, expected another name")
    PREPARATIONS[name] = preparation


def check(data: Any, job: Job) -> Check:
    """What a copy of a data set holds and lacks, and what of it is prepared. data: its module."""
    result, items = data.survey(job)
    if hasattr(data, "open_store") and items:
        store = data.open_store(job)
        entries = store.check(items, result, quick=job.quick, progress=job.progress)
        if hasattr(data, "review"):
            data.review(store, items, entries, result)
    return result


def prepare(data: Any, job: Job) -> Prepared:
    """Prepares all items that are not prepared yet. Those of files that end early count if keep_truncated is given."""
    if hasattr(data, "prepare"):
        return data.prepare(job)
    _, items = data.survey(replace(job, quick=True))
    return data.open_store(job).prepare(
        items,
        partial(data.make, options=job.options),
        workers=job.workers,
        progress=job.progress,
        redo=lambda entry: bool(entry.facts.get("early")) and not job.options.get("keep_truncated"),
    )
