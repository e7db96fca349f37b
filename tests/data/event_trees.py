"""Shared by the tests of event data: generated copies, and how samples and events are compared."""

import shutil
from pathlib import Path

import numpy as np
import torch

from parapos.data import dvsgesture, gen1
from parapos.data.events_tree import make_dvsgesture, make_gen1
from parapos.data.readers import boxes


def small_gestures(root):
    """DvsGesture with 3 users in 2 lights: one to train, one for validation, one to test."""
    make_dvsgesture(root, users=(4, 22, 24), seconds=0.2, rate=8000)
    return root


def small_gen1(root):
    make_gen1(root, seconds=1.0, rate=16_000)
    return root


def copy_of(made, folder):
    """A copy that a test may break."""
    return Path(shutil.copytree(made, folder / "copy"))


def load_gestures(split, root, **options):
    return dvsgesture.dvsgesture(split, root=root, **{"threshold": 16, "complete": False, **options})


def load_gen1(split, root, **options):
    return gen1.gen1(split, root=root, **{"threshold": 16, "complete": False, **options})


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(second[key])) for key in first)


def rows(events):
    return list(zip(*(getattr(events, name).tolist() for name in ("t", "x", "y", "polarity")), strict=True))


def made_of(*found, t=1000, kind=0):
    """Boxes (x, y, w, h) or (x, y, w, h, class)."""
    full = [(t, *box[:4], box[4] if len(box) > 4 else kind, i, 1.0) for i, box in enumerate(found)]
    return np.array(full, boxes.BOX)
