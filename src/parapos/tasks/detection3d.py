"""Boxes with classes, headings and velocities in 3D: TransFusion's loss, judged by the nuScenes detection score.

B samples, n boxes of a sample, C classes.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..models.unitr import CLASSES, LOSS_PARTS, decode, head_loss
from .base import Batch, Evaluator, Forward, Loss, Metric, Task, answer
from .nuscenes_results import MOST_BOXES, submission, to_global
from .nuscenes_scores import DISTANCES, ERRORS, Objects, Scores, score

Array = np.ndarray[Any, Any]
UNITS = {"translation": "m", "scale": "1 - IoU", "orientation": "rad", "velocity": "m/s", "attribute": "1 - accuracy"}
METRICS = (
    Metric("map", "mAP", "%", factor=100.0),
    Metric("nds", "NDS", "%", factor=100.0),
    *(Metric(f"{e}_error", f"mean {e} error", UNITS[e], higher_is_better=False) for e in ERRORS),
)


class Detection3D(Task):
    """A data set says its `frames`, keyframes of nuScenes that a sample's `id` counts, which `class_names` it has, and
    its `sensors`: "both", "lidar" or "cameras". What its samples hold says `models.unitr.batch`.

    max_boxes: most boxes of a frame, the best ones; the benchmark takes 500. min_score: boxes below it are left out.
    """

    metrics: tuple[Metric, ...] = METRICS
    headline = "map"
    parts = LOSS_PARTS

    def __init__(self, dataset: Any, *, max_boxes: int = MOST_BOXES, min_score: float = 0.0) -> None:
        super().__init__(dataset)
        if not 1 <= max_boxes <= MOST_BOXES:
            raise ValueError(f"max_boxes must be from 1 to {MOST_BOXES}, got {max_boxes!r}")
        if not 0 <= min_score < 1:
            raise ValueError(f"min_score must be at least 0 and below 1, got {min_score!r}")
        self.class_names = [str(name) for name in dataset.class_names]
        if self.class_names != list(CLASSES):
            raise ValueError(f"the score is of {', '.join(CLASSES)}; the data have {', '.join(self.class_names)}")
        self.frames, self.max_boxes, self.min_score = dataset.frames, max_boxes, min_score
        self.sensors = str(dataset.sensors)
        self.metrics = (*METRICS, *(self.metric(f"ap_{name}") for name in self.class_names))

    @classmethod
    def outputs(cls, dataset: Any | None) -> dict[str, Any]:
        return {"num_classes": len(CLASSES) if dataset is None else dataset.classes}

    @classmethod
    def metric(cls, name: str) -> Metric:
        if name.startswith("ap_"):
            return Metric(name, f"AP of {name.removeprefix('ap_')}", "%", factor=100.0)
        return super().metric(name)

    def learned(self) -> dict[str, Any]:
        return {"num_classes": len(self.class_names), "class_names": self.class_names}

    def adapt(self, learned: Mapping[str, Any], relabel: str = "") -> None:
        if relabel:
            raise ValueError(f"--relabel {relabel}: boxes are judged by the names that were learned, expected none")
        if learned["num_classes"] != len(self.class_names):
            raise ValueError(f"has {len(self.class_names)} classes, the model has {learned['num_classes']}")

    def loss(self, model: Forward, batch: Batch) -> Loss:
        """Each part is normalised over the samples that it is given, as in the original, so a step of several parts is
        their mean over samples."""
        found, samples = head_loss(answer(model, batch), batch), len(batch["id"])
        parts = {name: samples * part.detach() for name, part in found.parts.items()}
        return Loss(samples * found.total, found.total.new_tensor(samples), parts)

    def evaluator(self, *, keep_predictions: bool = False) -> Detection3DEvaluator:
        return Detection3DEvaluator(self.frames, self.max_boxes, self.min_score)

    def export(self, evaluator: Evaluator, folder: Path) -> list[Path]:
        """results_nusc.json: what the server and the devkit of nuScenes take; classes.csv: AP and errors by class."""
        assert isinstance(evaluator, Detection3DEvaluator)
        folder.mkdir(parents=True, exist_ok=True)
        path, table = folder / "results_nusc.json", folder / "classes.csv"
        results = {self.frames[number].token: evaluator.objects(number) for number in sorted(evaluator.found)}
        path.write_text(json.dumps(submission(results, self.sensors)), encoding="utf-8")
        scores = evaluator.scores()
        with open(table, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["class", "ap", *(f"ap_{distance:g}m" for distance in DISTANCES), *ERRORS])
            for name, ap, errors in zip(CLASSES, scores.ap, scores.errors, strict=True):
                shown = ["" if math.isnan(error) else f"{error:.6f}" for error in errors]
                writer.writerow([name, f"{ap.mean():.6f}", *(f"{value:.6f}" for value in ap), *shown])
        return [path, table]


class Detection3DEvaluator(Evaluator):
    """Keeps the boxes of each frame, rows (n, 11) of x, y, z, length, width, height, yaw, vx, vy, score and label in
    the LiDAR frame; judges them in the global one."""

    def __init__(self, frames: Sequence[Any], max_boxes: int, min_score: float) -> None:
        self.frames, self.max_boxes, self.min_score = frames, max_boxes, min_score
        self.found: dict[int, Array] = {}

    def update(self, model: Forward, batch: Batch) -> None:
        answers = decode(answer(model, batch))
        for number, one in zip(batch["id"].tolist(), answers, strict=True):
            self.add(number, one.boxes, one.scores, one.labels)

    def add(self, number: int, boxes: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Takes in the boxes (n, 9) of a frame with scores (n,) and labels (n,)."""
        columns = (boxes.double(), scores.double()[:, None], labels.double()[:, None])
        rows = np.concatenate([part.detach().cpu().numpy() for part in columns], 1)
        if not np.isfinite(rows).all():
            raise ValueError(f"boxes of sample {number} are not finite; the weights may have diverged")
        rows = rows[rows[:, 9] >= self.min_score]
        if len(rows) > self.max_boxes:
            rows = rows[np.sort(np.argsort(-rows[:, 9], kind="stable")[: self.max_boxes])]
        self.found[number] = rows

    def state(self) -> Any:
        return self.found

    def merge(self, states: Sequence[Any]) -> None:
        self.found = {number: rows for state in states for number, rows in state.items()}

    def objects(self, number: int, place: int = 0) -> Objects:
        """The boxes of a frame in the global frame, as those of sample `place`."""
        rows = self.found[number]
        return to_global(rows[:, :9], rows[:, 9], rows[:, 10].astype(np.int64), self.frames[number].lidar2global, place)

    def scores(self) -> Scores:
        numbers = sorted(self.found)
        parts = [Objects.empty(), *(self.objects(number, place) for place, number in enumerate(numbers))]
        return score([self.frames[number] for number in numbers], Objects.join(parts))

    def compute(self) -> dict[str, float]:
        """All NaN if the frames have no boxes to be judged by, as those of the test set."""
        known = sum(len(self.frames[number].objects) for number in self.found)
        scores = self.scores()
        found = {"map": scores.map, "nds": scores.nds}
        found |= {f"{error}_error": scores.mean_errors[error] for error in ERRORS}
        found |= {f"ap_{name}": float(scores.ap[i].mean()) for i, name in enumerate(CLASSES)}
        return found if known else dict.fromkeys(found, math.nan)
