"""`parapos prepare coco_desk`: writes the generated digits and shapes, and checks them as any copy in COCO's layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import coco
from .coco_tree import DESK_IMAGES, ensure_desk, write_desk
from .preparations import Job
from .prepared import Check, Item, Prepared


def synthetic(root: str | Path) -> None:
    """Writes a copy of few images, for trials and tests."""
    write_desk(root, images={split: count // 40 for split, count in DESK_IMAGES.items()})


def survey(job: Job) -> tuple[Check, list[Item]]:
    """As of COCO, with any number of images."""
    if job.quick and not Path(job.root).exists():
        return Check(), []  # `prepare` is about to write it
    return coco.survey(replace(job, complete=False))


def prepare(job: Job) -> Prepared:
    """Writes the data set unless it is there."""
    ensure_desk(job.root)
    return coco.prepare(replace(job, complete=False))
