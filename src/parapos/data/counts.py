"""Published numbers of samples, for estimates where the data need not be there. Of GEN1 that of clips is published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import coco, dvsgesture, gen1, modelnet40, scannet
from .imagenet import TEST, TRAIN, V2, R
from .nuscenes_classes import SAMPLES
from .readers import ucf101_lists

COUNTS = {
    ("imagenet", "train"): TRAIN - TRAIN // 100,
    ("imagenet", "test"): TEST,
    ("imagenet_v2", "test"): V2,
    ("imagenet_r", "test"): R,
    ("dvsgesture", "train"): 1020,  # 85 trials of 12 gestures
    ("dvsgesture", "test"): dvsgesture.TEST,
    ("scannet", "train"): scannet.LISTED["train"],
    **{(f"scannet{end}", "val"): scannet.LISTED["val"] for end in ("", "_precise", "_tta")},
    ("modelnet40", "train"): modelnet40.LISTED["train"] - 985,  # a tenth of each class, rounded
    **{(f"modelnet40{end}", "test"): modelnet40.LISTED["test"] for end in ("", "_voting")},
    **{("coco", split): count for split, count in coco.IMAGES.items()},
    **{("gen1", split): 60 * count for split, count in gen1.CLIPS.items()},  # a guess: labels once in a second
    ("nuscenes", "train"): 123_580,  # drawn anew so that classes are balanced
    ("nuscenes", "val"): SAMPLES["v1.0-trainval", "val"],
    ("cifar10", "train"): 45000,
    ("cifar10", "val"): 5000,
    ("cifar10", "test"): 10000,
}


def published(name: str, split: str, options: Mapping[str, Any]) -> int | None:
    """How many samples a split of a data set has, as its publishers say; None if it is not known here."""
    if name == "ucf101":
        return ucf101_lists.COUNTS[options.get("fold", 1)][ucf101_lists.SPLITS.index(split)]
    return COUNTS.get((name, split))
