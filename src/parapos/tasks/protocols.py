"""How detections are judged and handed in, by the data set that they are of: COCO's protocol, and GEN1's two.

Detections of a sample are (n, 6) float64: x and y of both corners in pixels of the original image or sensor, score and
class, best first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..data import gen1
from ..data.readers import boxes as box_files
from .base import Metric
from .coco_scores import STATS, CocoScores, coco_scores, write_curves

Array = np.ndarray[Any, Any]
Detections = Mapping[int, Array]  # by the id of a sample
SHOWN = dict(
    map="mAP", map50="mAP50", map75="mAP75", map_small="mAP small", map_medium="mAP medium", map_large="mAP large"
)
SHOWN |= dict(mar1="AR of 1", mar10="AR of 10", mar100="AR of 100")
SHOWN |= dict(mar_small="AR small", mar_medium="AR medium", mar_large="AR large")
METRICS = tuple(Metric(name, SHOWN[name], "%", factor=100.0) for name in STATS)
SKIPPED_US = 500_000  # of GEN1: samples before it are not judged
WINDOW_US = 50_000  # detections this far from a label count for it


class Judging(Protocol):
    """metrics: names of what `score` gives."""

    metrics: tuple[Metric, ...]

    def score(self, detections: Detections) -> dict[str, float]: ...

    def export(self, detections: Detections, folder: Path) -> list[Path]: ...


def class_metric(name: str) -> Metric:
    """The average precision of a class."""
    return Metric(f"ap_{name.replace(' ', '_')}", f"AP of {name}", "%", factor=100.0)


class CocoJudging:
    """By COCO's protocol, in pixels of the original images and with their crowds."""

    def __init__(self, dataset: Any, *, clip: bool, method: str) -> None:
        self.instances, self.category_ids, self.clip, self.method = (
            dataset.instances,
            dataset.category_ids,
            clip,
            method,
        )
        self.names = [name for _, name in self.instances.categories]
        self.metrics = (*METRICS, *map(class_metric, self.names))

    def results(self, detections: Detections) -> list[dict[str, Any]]:
        """As COCO's server takes them."""
        found = []
        for index in sorted(detections):
            image = self.instances.images[index]
            for left, top, right, bottom, score, label in detections[index].tolist():
                if self.clip:
                    left, right = (min(max(0.0, x), image.width) for x in (left, right))
                    top, bottom = (min(max(0.0, y), image.height) for y in (top, bottom))
                box = [left, top, right - left, bottom - top]
                category = self.category_ids[int(label)]
                found.append({"image_id": image.id, "category_id": category, "bbox": box, "score": score})
        return found

    def scores(self, detections: Detections) -> CocoScores:
        return coco_scores(self.instances.dictionary(sorted(detections)), self.results(detections))

    def score(self, detections: Detections) -> dict[str, float]:
        found = self.scores(detections)
        return {**found.stats, **_by_class(self.names, found)}

    def export(self, detections: Detections, folder: Path) -> list[Path]:
        """detections_<split>2017_<method>_results.json, and curves if there is something to judge by."""
        split = self.instances.path.stem.removeprefix("instances_").removeprefix("image_info_")
        path = folder / f"detections_{split}_{self.method}_results.json"
        rows = [
            {**entry, "bbox": [round(v, 2) for v in entry["bbox"]], "score": round(entry["score"], 5)}
            for entry in self.results(detections)
        ]
        path.write_text(json.dumps(rows), encoding="utf-8")
        return [path, *(write_curves(self.scores(detections), self.names, folder) if self.instances.labelled else ())]


class Gen1Judging:
    """GEN1 as the released code judges it, one prediction for each labelled time; beside it, by the protocol of the
    makers' toolbox, as psee_*."""

    names = gen1.CLASSES

    def __init__(self, dataset: gen1.Clips) -> None:
        self.dataset = dataset
        names = ("map", "map50", "map75")
        beside = tuple(Metric(f"psee_{name}", f"{SHOWN[name]} of the toolbox", "%", factor=100.0) for name in names)
        self.metrics = (*METRICS, *map(class_metric, self.names), *beside)

    def scores(self, detections: Detections) -> CocoScores:
        data = self.dataset
        judged = [i for i in sorted(detections) if data.times[i] >= SKIPPED_US]
        truth = [(i, x, y, w, h, label) for i in judged for x, y, w, h, label in data.objects(i).tolist()]
        found = []
        for i in judged:
            x, y, right, bottom, score, label = detections[i].T
            x, right = (np.clip(edge, 0, gen1.WIDTH - 1) for edge in (x, right))
            y, bottom = (np.clip(edge, 0, gen1.HEIGHT - 1) for edge in (y, bottom))
            w, h = right - x, bottom - y
            keep = large(w, h)
            rows = np.stack([x, y, w, h, label, score], axis=1)[keep]
            found += [(i, *row) for row in rows.tolist()]
        return _scores(judged, truth, found)

    def score(self, detections: Detections) -> dict[str, float]:
        found = self.scores(detections)
        clips = self.recordings(detections)
        truth: list[list[Array]] = [[np.empty(0, box_files.BOX)] for _ in clips]
        for i in sorted(detections):
            truth[self.dataset.clips[i]].append(self.dataset.boxes[self.dataset.bounds[i] : self.dataset.bounds[i + 1]])
        toolbox = psee_scores([np.concatenate(parts) for parts in truth], clips)[0]
        beside = {f"psee_{name}": toolbox.stats[name] for name in ("map", "map50", "map75")}
        return {**found.stats, **_by_class(self.names, found), **beside}

    def recordings(self, detections: Detections) -> list[Array]:
        """An array of boxes for each clip, as the toolbox reads them, in the order of time."""
        found: list[list[Array]] = [[] for _ in self.dataset.names]
        for i in sorted(detections):
            rows = detections[i]
            boxes = np.zeros(len(rows), box_files.BOX)
            boxes["t"], boxes["class_id"], boxes["class_confidence"] = self.dataset.times[i], rows[:, 5], rows[:, 4]
            boxes["x"], boxes["y"] = rows[:, 0], rows[:, 1]
            boxes["w"], boxes["h"] = rows[:, 2] - rows[:, 0], rows[:, 3] - rows[:, 1]
            found[self.dataset.clips[i]].append(boxes)
        return [np.concatenate([np.empty(0, box_files.BOX), *parts]) for parts in found]

    def export(self, detections: Detections, folder: Path) -> list[Path]:
        """<clip>_bbox.npy for each clip, as the toolbox takes detections, and curves."""
        paths = [folder / f"{name}{gen1.BOXES}" for name in self.dataset.names]
        for path, boxes in zip(paths, self.recordings(detections), strict=True):
            box_files.write(path, boxes)
        return [*paths, *write_curves(self.scores(detections), self.names, folder)]


def large(w: Array, h: Array) -> Array:
    """Which boxes are judged: sides of at least 10 pixels and a diagonal of at least 30."""
    return (w >= gen1.LEAST_SIDE) & (h >= gen1.LEAST_SIDE) & (w**2 + h**2 >= gen1.LEAST_DIAGONAL**2)


def psee_scores(truth: Sequence[Array], detections: Sequence[Array]) -> tuple[CocoScores, int]:
    """By the protocol of Prophesee's toolbox: of each recording, all boxes as arrays of `BOX`. Also the number of times
    that were judged.

    Boxes of the first 0.5 s and small ones are left out of both. For each time with labels, detections up to 50 ms
    before or after count, so one may count for two times.
    """
    labels, found, image = [], [], 0
    for number, (real, said) in enumerate(zip(truth, detections, strict=True)):
        for name, rows in (("truth", real), ("detections", said)):
            if (np.diff(rows["t"]) < 0).any():
                raise ValueError(f"{name} of recording {number} must be in the order of time")
        real, said = (rows[(rows["t"] > SKIPPED_US) & large(rows["w"], rows["h"])] for rows in (real, said))
        for time in np.unique(real["t"]).tolist():
            image += 1
            now = real[real["t"] == time]
            first, last = np.searchsorted(said["t"], [time - WINDOW_US, time + WINDOW_US + 1])
            near = said[first:last]
            labels += [(image, *row) for row in zip(*_columns(now), strict=True)]
            found += [(image, *row) for row in zip(*_columns(near), near["class_confidence"].tolist(), strict=True)]
    return _scores(range(1, image + 1), labels, found), image


def _columns(rows: Array) -> list[list[Any]]:
    return [rows[name].tolist() for name in ("x", "y", "w", "h", "class_id")]


def _scores(images: Sequence[int], truth: Sequence[Any], detections: Sequence[Any]) -> CocoScores:
    """truth: rows of image, x, y, w, h and class. detections: the same, and the score."""
    notes = [
        {"id": m, "image_id": i, "category_id": int(label) + 1, "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
        for m, (i, x, y, w, h, label) in enumerate(truth, 1)
    ]
    found = [
        {"image_id": i, "category_id": int(label) + 1, "bbox": [x, y, w, h], "score": score}
        for i, x, y, w, h, label, score in detections
    ]
    whole = {
        "images": [{"id": i, "height": gen1.HEIGHT, "width": gen1.WIDTH} for i in images],
        "annotations": notes,
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(gen1.CLASSES)],
    }
    return coco_scores(whole, found)


def _by_class(names: Sequence[str], found: CocoScores) -> dict[str, float]:
    return {class_metric(name).name: float(ap) for name, ap in zip(names, found.ap, strict=True)}


def judging(dataset: Any, *, clip: bool, method: str) -> Judging:
    """By what a data set calls its `protocol`."""
    kind = getattr(dataset, "protocol", None)
    if kind == "coco":
        return CocoJudging(dataset, clip=clip, method=method)
    if kind == "gen1":
        return Gen1Judging(dataset)
    raise ValueError(f"expected a data set with the protocol 'coco' or 'gen1', got {kind!r}")


__all__ = ["METRICS", "CocoJudging", "Gen1Judging", "Judging", "class_metric", "judging", "psee_scores"]
