"""A label for each point of a cloud: cross-entropy and Lovász loss, judged by the IoU of classes.

N points of a batch, n points of a scene, C classes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Batch, Evaluator, Forward, Loss, Metric, Task, answer
from .lovasz import lovasz_softmax

IGNORED = -1


class Segmentation(Task):
    """A data set says which `class_names` it has, and the `names` of its samples and numbers of classes, `submission`,
    for files of its benchmark. What its samples must have says `data.scenes`.

    lovasz: weight of the Lovász loss beside cross-entropy; it is that of each part by its labelled points, as a whole
    batch is known to no process. mix: chance that a part's samples become one cloud in pairs
    (Mix3D), each with its own cells.
    """

    metrics: tuple[Metric, ...] = (
        Metric("miou", "mIoU", "%", factor=100.0),
        Metric("macc", "mean class accuracy", "%", factor=100.0),
        Metric("allacc", "accuracy of points", "%", factor=100.0),
    )
    headline = "miou"
    parts = ("cross_entropy", "lovasz")

    def __init__(self, dataset: Any, *, lovasz: float = 1.0, mix: float = 0.0) -> None:
        super().__init__(dataset)
        if not 0 <= mix <= 1 or not 0 <= lovasz < float("inf"):
            raise ValueError(f"expected mix from 0 to 1 and lovasz of 0 or more, got {mix} and {lovasz}")
        self.dataset, self.lovasz, self.mix = dataset, lovasz, mix
        self.class_names: list[str] = [str(name) for name in dataset.class_names]
        self.metrics = (*self.metrics, *(self.metric(f"iou_{name}") for name in self.class_names))

    @classmethod
    def outputs(cls, dataset: Any | None) -> dict[str, Any]:
        return {"num_classes": 2 if dataset is None else dataset.classes}

    @classmethod
    def metric(cls, name: str) -> Metric:
        if name.startswith("iou_"):
            return Metric(name, f"IoU of {name.removeprefix('iou_')}", "%", factor=100.0)
        return super().metric(name)

    def learned(self) -> dict[str, Any]:
        return {"num_classes": len(self.class_names), "class_names": self.class_names}

    def loss(self, model: Forward, batch: Batch) -> Loss:
        if self.mix and torch.rand(()) < self.mix:
            batch = {**batch, "offset": mixed(batch["offset"])}
        logits = answer(model, batch).float()
        valid = batch["segment"] != IGNORED
        logits, labels = logits[valid], batch["segment"][valid]
        count = valid.sum()
        cross = F.cross_entropy(logits, labels, reduction="sum")
        lovasz = lovasz_softmax(logits.softmax(-1), labels) * count
        total = cross + self.lovasz * lovasz
        return Loss(total, count, {"cross_entropy": cross.detach(), "lovasz": lovasz.detach()})

    def evaluator(self, *, keep_predictions: bool = False) -> SegmentationEvaluator:
        return SegmentationEvaluator(self.class_names, self.dataset, keep_predictions)

    def export(self, evaluator: Evaluator, folder: Path) -> list[Path]:
        """<scene>.txt: the class of each point in a line, by the benchmark's numbers; classes.csv: scores by class."""
        assert isinstance(evaluator, SegmentationEvaluator)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = torch.tensor(getattr(self.dataset, "submission", None) or range(len(self.class_names)))
        written: list[Path] = []
        for index, found in sorted(evaluator.predictions.items()):
            path = folder / f"{self.dataset.names[index]}.txt"
            path.write_text("\n".join(map(str, numbers[found.long()].tolist())) + "\n", encoding="utf-8")
            written.append(path)
        with open(folder / "classes.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["class", "iou", "accuracy", "points"])
            iou, accuracy, target = (part.tolist() for part in evaluator.by_class())
            writer.writerows(zip(self.class_names, iou, accuracy, map(int, target), strict=True))
        return [*written, folder / "classes.csv"]


def mixed(offset: Tensor) -> Tensor:
    """Ends of clouds (B,) after samples 0 and 1, 2 and 3, ... became one each; a last one stays alone."""
    return torch.cat([offset[1::2], offset[-1:]]) if len(offset) % 2 else offset[1::2]


class SegmentationEvaluator(Evaluator):
    """Counts (C, C) of points by class and answer, which add up over processes."""

    def __init__(self, class_names: Sequence[str], dataset: Any, keep: bool) -> None:
        self.class_names, self.dataset, self.keep = class_names, dataset, keep
        self.counts = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)
        self.predictions: dict[int, Tensor] = {}  # by the number of the sample, int16 (n,)

    def update(self, model: Forward, batch: Batch) -> None:
        numbers = batch["id"].tolist()
        if "cloud" in batch:
            clouds = [{key: value[i] for key, value in batch["cloud"].items()} for i in range(len(numbers))]
            answers = [self._vote(model, cloud) for cloud in clouds]
        else:
            ends = batch["offset"].tolist()
            parts = answer(model, batch).split([b - a for a, b in zip([0, *ends], ends, strict=False)])
            answers = [part.argmax(-1)[inverse] for part, inverse in zip(parts, batch["inverse"], strict=True)]
        for number, found, labels in zip(numbers, answers, batch["labels"], strict=True):
            self.count(found, labels)
            if self.keep:
                self.predictions[number] = found.to("cpu", torch.int16)

    def _vote(self, model: Forward, cloud: dict[str, Tensor]) -> Tensor:
        """The class of each point (n,): by the sum of the probabilities of all pieces that it is part of."""
        points = len(cloud["coord"])
        total = torch.zeros(points, len(self.class_names), device=cloud["coord"].device)
        for piece, index in self.dataset.pieces(cloud):
            total.index_add_(0, index, answer(model, piece).float().softmax(-1))
        return total.argmax(-1)

    def count(self, found: Tensor, labels: Tensor) -> None:
        """Takes in answers (n,) and labels (n,)."""
        classes, valid = len(self.class_names), labels != IGNORED
        pairs = labels[valid] * classes + found[valid]
        self.counts += torch.bincount(pairs, minlength=classes**2).view(classes, classes).cpu()

    def state(self) -> Any:
        return self.counts, self.predictions

    def merge(self, states: Sequence[Any]) -> None:
        self.counts = torch.stack([counts for counts, _ in states]).sum(0)
        self.predictions = {number: found for _, predictions in states for number, found in predictions.items()}

    def by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """IoU, accuracy and number of points (C,) of each class, float64."""
        counts = self.counts.double()
        right, target = counts.diag(), counts.sum(1)
        return right / (target + counts.sum(0) - right + 1e-10), right / (target + 1e-10), target

    def compute(self) -> dict[str, float]:
        """A class that is neither there nor answered counts as 0. Without any label, all scores are NaN."""
        iou, accuracy, target = self.by_class()
        total = target.sum()
        every = self.counts.diag().sum() / (total + 1e-10)
        found = {"miou": iou.mean(), "macc": accuracy.mean(), "allacc": every}
        found |= {f"iou_{name}": value for name, value in zip(self.class_names, iou, strict=True)}
        return {name: float(value) if total else float("nan") for name, value in found.items()}
