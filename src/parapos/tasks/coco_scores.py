"""Average precision as COCO defines it, by faster-coco-eval: mAP and friends, AP and precision-recall curves by class.

N detections, K categories. Undefined numbers, such as the AP of a class that does not occur, are NaN.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# as COCO lists them: average precision by overlap and size, average recall by number of detections and size
_PRECISION = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
STATS = (*_PRECISION, "mar1", "mar10", "mar100", "mar_small", "mar_medium", "mar_large")


@dataclass(frozen=True, eq=False)
class CocoScores:
    """stats: by the names of `STATS`. ap, ap50: (K,) of each category, over all overlaps and at one of 0.5. precision:
    (101, K) at the recalls 0, 0.01, ..., 1, for an overlap of 0.5."""

    stats: dict[str, float]
    categories: list[int]
    ap: Array
    ap50: Array
    precision: Array


def coco_scores(truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]]) -> CocoScores:
    """truth: a dictionary as COCO's files of instances. detections: a list as COCO's server takes them, of which equal
    scores keep their order. Boxes and scores must be finite."""
    from faster_coco_eval import COCO, COCOeval_faster  # type: ignore[import-untyped]

    categories = sorted(int(entry["id"]) for entry in truth["categories"])
    count = len(categories)
    empty = np.full(count, math.nan)
    known = {int(note["category_id"]) for note in truth["annotations"] if not note.get("iscrowd", 0)}
    if not known:
        return CocoScores(dict.fromkeys(STATS, math.nan), categories, empty, empty, np.full((101, count), math.nan))
    if not detections:
        ap = np.where(np.isin(categories, sorted(known)), 0.0, math.nan)
        stats = {name: 0.0 if _occurs(truth, name) else math.nan for name in STATS}
        return CocoScores(stats, categories, ap, ap, np.tile(ap, (101, 1)))
    numbers = np.array([[*entry["bbox"], entry["score"]] for entry in detections], dtype=np.float64)
    if not np.isfinite(numbers).all():
        row = int((~np.isfinite(numbers)).any(1).argmax())
        raise ValueError(f"detections must be finite, got {dict(detections[row])}")
    gt = COCO({**truth, "info": truth.get("info", {})})
    judge = COCOeval_faster(gt, gt.loadRes([dict(entry) for entry in detections]), "bbox", print_function=_silent)
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    precision = np.asarray(judge.eval["precision"])[:, :, :, 0, -1]  # (overlaps, 101, K), all sizes, 100 detections
    precision = np.where(precision < 0, math.nan, precision)
    stats = {name: _number(value) for name, value in zip(STATS, judge.stats[: len(STATS)], strict=True)}
    occurs = np.isin(categories, sorted(known))
    ap, ap50 = (
        np.where(occurs, part.mean(axis=tuple(range(part.ndim - 1))), math.nan) for part in (precision, precision[0])
    )
    return CocoScores(stats, categories, ap, ap50, precision[0])


def _occurs(truth: Mapping[str, Any], name: str) -> bool:
    """Whether a number is about boxes that there are."""
    low, high = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}.get(
        name.rpartition("_")[2], (0, 1e10)
    )
    return any(low <= note["area"] <= high and not note.get("iscrowd", 0) for note in truth["annotations"])


def _number(value: float) -> float:
    return math.nan if value < 0 else float(value)


def _silent(*line: object) -> None:
    """The table that COCO prints is told otherwise here."""


def write_curves(scores: CocoScores, names: Sequence[str], folder: Path) -> list[Path]:
    """classes.csv with the AP of each class, precision-recall.csv, and a plot of it if matplotlib is there."""
    table, curves = folder / "classes.csv", folder / "precision-recall.csv"
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["category", "name", "ap", "ap50"])
        rows = zip(scores.categories, names, scores.ap.tolist(), scores.ap50.tolist(), strict=True)
        writer.writerows([number, name, _shown(ap), _shown(ap50)] for number, name, ap, ap50 in rows)
    with open(curves, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recall", *names])
        writer.writerows([f"{i / 100:.2f}", *map(_shown, row)] for i, row in enumerate(scores.precision.tolist()))
    return [table, curves, *_plot(scores, names, folder / "precision-recall.png")]


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def _plot(scores: CocoScores, names: Sequence[str], path: Path) -> list[Path]:
    """At most 20 classes are named; the others are grey."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    recall = np.linspace(0, 1, 101)
    occurs = [k for k in range(len(names)) if not math.isnan(scores.ap50[k])]
    best = sorted(occurs, key=lambda k: -scores.ap50[k])
    for k in best:
        named = len(best) <= 20
        look = {"label": f"{names[k]} {100 * scores.ap50[k]:.1f}"} if named else {"color": "0.7", "linewidth": 0.7}
        axes.plot(recall, scores.precision[:, k], **look)
    if occurs:
        axes.plot(recall, scores.precision[:, occurs].mean(1), color="black", linewidth=2.5, label="mean of classes")
        axes.legend(fontsize=7, title="AP50 in %", loc="lower left")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.01), title="Overlap of at least 0.5")
    figure.savefig(path, dpi=120)
    return [path]
