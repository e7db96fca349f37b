"""How detections are judged and handed in, by the data set that they are of: COCO's protocol, and GEN1's two.

Detections of a sample are (n, 6) float64: x and y of both corners in pixels of the original image or sensor, score and
class, best first. What is true of it comes with its batch, so that one task judges any split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..data import gen1
from ..data.readers import boxes as box_files
from .base import Metric
from .coco_scores import STATS, CocoScores, coco_scores, write_curves

Array = np.ndarray[Any, Any]
SHOWN = dict(
    map="mAP", map50="mAP50", map75="mAP75", map_small="mAP small", map_medium="mAP medium", map_large="mAP large"
)
SHOWN |= dict(mar1="AR of 1", mar10="AR of 10", mar100="AR of 100")
SHOWN |= dict(mar_small="AR small", mar_medium="AR medium", mar_large="AR large")
METRICS = tuple(Metric(name, SHOWN[name], "%", factor=100.0) for name in STATS)
TOOLBOX = ("map", "map50", "map75")  # told of the toolbox's protocol, too
SKIPPED_US = 500_000  # of GEN1: samples before it are not judged
WINDOW_US = 50_000  # detections this far from a label count for it


@dataclass(frozen=True, eq=False)
class Judged:
    """A sample: its detections, and the truth as the data set gives it, tensors as arrays."""

    detections: Array
    truth: Mapping[str, Any]


Samples = Mapping[int, Judged]  # by their ids


class Judging(Protocol):
    """metrics: what `score` gives, in order."""

    metrics: tuple[Metric, ...]

    def score(self, samples: Samples) -> dict[str, float]: ...

    def export(self, samples: Samples, folder: Path) -> list[Path]: ...


def class_metric(name: str) -> Metric:
    """The average precision of a class."""
    return Metric(f"ap_{name.replace(' ', '_')}", f"AP of {name}", "%", factor=100.0)


class CocoJudging:
    """By COCO's protocol, in pixels of the original images and with their crowds."""

    def __init__(self, dataset: Any, *, clip: bool, method: str) -> None:
        self.category_ids, self.clip, self.method = dataset.category_ids, clip, method
        self.categories: list[tuple[int, str]] = dataset.instances.categories
        self.names = [name for _, name in self.categories]
        self.split = dataset.instances.path.stem.removeprefix("instances_").removeprefix("image_info_")
        self.is_blind = not dataset.instances.labelled
        self.metrics = (*METRICS, *map(class_metric, self.names))

    def results(self, samples: Samples) -> list[dict[str, Any]]:
        """Detections as COCO's server takes them."""
        detections = []
        for number in sorted(samples):
            truth = samples[number].truth
            for left, top, right, bottom, score, label in samples[number].detections.tolist():
                if self.clip:
                    left, right = (min(max(0.0, x), truth["width"]) for x in (left, right))
                    top, bottom = (min(max(0.0, y), truth["height"]) for y in (top, bottom))
                place = {"image_id": truth["image_id"], "category_id": self.category_ids[int(label)]}
                detections.append({**place, "bbox": [left, top, right - left, bottom - top], "score": score})
        return detections

    def truth(self, samples: Samples) -> dict[str, Any]:
        """What is true, as COCO's files have it."""
        truths = [samples[number].truth for number in sorted(samples)]
        images = [{"id": t["image_id"], "height": t["height"], "width": t["width"]} for t in truths]
        notes: list[dict[str, Any]] = []
        for truth in truths:
            rows = zip(*(truth[name].tolist() for name in ("boxes", "labels", "area", "crowd")), strict=True)
            for box, label, area, crowd in rows:
                place = {"id": len(notes) + 1, "image_id": truth["image_id"], "category_id": self.category_ids[label]}
                notes.append({**place, "bbox": box, "area": area, "iscrowd": int(crowd)})
        categories = [{"id": number, "name": name} for number, name in self.categories]
        return {"images": images, "annotations": notes, "categories": categories}

    def scores(self, samples: Samples) -> CocoScores:
        return coco_scores(self.truth(samples), self.results(samples))

    def score(self, samples: Samples) -> dict[str, float]:
        found = self.scores(samples)
        return {**found.stats, **_by_class(self.names, found)}

    def export(self, samples: Samples, folder: Path) -> list[Path]:
        """detections_<split>2017_<method>_results.json, and curves if there is something to judge by."""
        path = folder / f"detections_{self.split}_{self.method}_results.json"
        rows = [
            {**entry, "bbox": [round(v, 2) for v in entry["bbox"]], "score": round(entry["score"], 5)}
            for entry in self.results(samples)
        ]
        path.write_text(json.dumps(rows), encoding="utf-8")
        return [path, *(() if self.is_blind else write_curves(self.scores(samples), self.names, folder))]


class Gen1Judging:
    """GEN1 as the released code judges it, one prediction for each labelled time; beside it, by the protocol of the
    makers' toolbox, as psee_*."""

    names = gen1.CLASSES
    metrics = (
        *METRICS,
        *map(class_metric, gen1.CLASSES),
        *(Metric(f"psee_{name}", f"{SHOWN[name]} of the toolbox", "%", factor=100.0) for name in TOOLBOX),
    )

    def scores(self, samples: Samples) -> CocoScores:
        judged = [i for i in sorted(samples) if samples[i].truth["time"] >= SKIPPED_US]
        truth, found = [], []
        for i in judged:
            real = samples[i].truth
            truth += [
                (i, *box, label) for box, label in zip(real["boxes"].tolist(), real["labels"].tolist(), strict=True)
            ]
            x, y, right, bottom, score, label = samples[i].detections.T
            x, right = (np.clip(edge, 0, gen1.WIDTH - 1) for edge in (x, right))
            y, bottom = (np.clip(edge, 0, gen1.HEIGHT - 1) for edge in (y, bottom))
            w, h = right - x, bottom - y
            found += [(i, *row) for row in np.stack([x, y, w, h, label, score], axis=1)[large(w, h)].tolist()]
        return _scores(judged, truth, found)

    def score(self, samples: Samples) -> dict[str, float]:
        found, said, real = self.scores(samples), self.recordings(samples), self.recordings(samples, truth=True)
        toolbox = psee_scores(list(real.values()), list(said.values()))[0]
        beside = {f"psee_{name}": toolbox.stats[name] for name in TOOLBOX}
        return {**found.stats, **_by_class(self.names, found), **beside}

    def recordings(self, samples: Samples, truth: bool = False) -> dict[str, Array]:
        """Of each clip an array of boxes as the toolbox reads them, in the order of time: detections, or the truth."""
        boxes_by_clip: dict[str, list[Array]] = {}
        for i in sorted(samples, key=lambda i: (samples[i].truth["clip"], samples[i].truth["time"])):
            real, said = samples[i].truth, samples[i].detections
            corner, size = said[:, :2], said[:, 2:4] - said[:, :2]
            labels, score = said[:, 5], said[:, 4]
            if truth:
                corner, size = real["boxes"][:, :2], real["boxes"][:, 2:]
                labels, score = real["labels"], np.ones(len(corner))
            boxes = np.zeros(len(corner), box_files.BOX)
            boxes["t"], boxes["class_id"], boxes["class_confidence"] = real["time"], labels, score
            boxes["x"], boxes["y"], boxes["w"], boxes["h"] = *corner.T, *size.T
            boxes_by_clip.setdefault(real["clip"], []).append(boxes)
        return {clip: np.concatenate(parts) for clip, parts in boxes_by_clip.items()}

    def export(self, samples: Samples, folder: Path) -> list[Path]:
        """<clip>_bbox.npy for each clip, as the toolbox takes detections, and curves."""
        paths = []
        for clip, boxes in self.recordings(samples).items():
            paths.append(folder / f"{clip}{gen1.BOXES}")
            box_files.write(paths[-1], boxes)
        return [*paths, *write_curves(self.scores(samples), self.names, folder)]


def large(w: Array, h: Array) -> Array:
    """Which boxes are judged: sides of at least 10 pixels and a diagonal of at least 30."""
    return (w >= gen1.LEAST_SIDE) & (h >= gen1.LEAST_SIDE) & (w**2 + h**2 >= gen1.LEAST_DIAGONAL**2)


def psee_scores(truth: Sequence[Array], detections: Sequence[Array]) -> tuple[CocoScores, int]:
    """By the protocol of Prophesee's toolbox: of each recording, all boxes as arrays of `BOX`. Also the number of times
    that were judged.

    Boxes of the first 0.5 s and small ones are left out of both. For each time with labels, detections up to 50 ms
    before or after count, so one may count for two times.
    """
    labels: list[Any] = []
    found: list[Any] = []
    image = 0
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
        return Gen1Judging()
    raise ValueError(f"expected a data set with the protocol 'coco' or 'gen1', got {kind!r}")
