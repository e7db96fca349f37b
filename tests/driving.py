"""A generated copy of nuScenes, prepared, which many tests read and none may write to."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from parapos.data import create_dataset, nuscenes_prepare, preparations
from parapos.data.nuscenes_tree import write_tiny

SMALL = dict(size=(64, 176), tables="v1.0-mini", complete=False, sweeps=3)
RANGE = (-21.6, -21.6, -5.0, 21.6, 21.6, 3.0)
_FOLDER = tempfile.TemporaryDirectory(prefix="parapos-driving-")


@functools.cache
def tree() -> Path:
    """The root of the copy."""
    root = Path(_FOLDER.name) / "nuscenes"
    write_tiny(root)
    done = preparations.prepare(nuscenes_prepare, preparations.Job(root, complete=False))
    assert (done.now, done.failed) == (2, [])
    return root


def driving(split="train", root=None, **options):
    """A split of the copy, as small as the smoke recipe has it."""
    return create_dataset("nuscenes", split, root=root or tree(), **{**SMALL, "point_range": RANGE, **options})
