"""One label per sample: softmax cross-entropy on mixed and smoothed labels, judged by accuracy and friends.

B samples, C classes.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import recipes
from ..text import nearest
from .base import Batch, Evaluator, Forward, Loss, Metric, Task, answer
from .lovasz import lovasz_softmax


class Classification(Task):
    """A data set says how many `classes` it has, their `class_names` if they have any, and may name a `subset` of
    them: accuracy is then also counted with answers among these alone, as top1_<their number>.

    mixup, cutmix: parameters of their Beta distributions, 0 for never; a part gets one of those that are on, with equal
    chance. smoothing: of the labels. lovasz: weight of the Lovász loss of a part beside cross-entropy; it takes no
    mixed labels.

    In an evaluation a model may answer several times to a sample, to views of it one after another (B V, C): then the
    mean of their probabilities counts. The metric recall is what papers on shapes call mean class accuracy.
    """

    metrics: tuple[Metric, ...] = (
        Metric("loss", "loss", higher_is_better=False),
        Metric("top1", "top-1", "%", factor=100.0),
        Metric("precision", "precision", "%", factor=100.0),
        Metric("recall", "recall", "%", factor=100.0),
        Metric("f1", "F1", "%", factor=100.0),
    )
    headline = "top1"

    def __init__(
        self, dataset: Any, *, mixup: float = 0.0, cutmix: float = 0.0, smoothing: float = 0.0, lovasz: float = 0.0
    ) -> None:
        super().__init__(dataset)
        if lovasz and (mixup or cutmix):
            raise ValueError(f"lovasz: expected 0 with mixup or cutmix, whose labels are not one class, got {lovasz}")
        self.lovasz = lovasz
        self.classes: int = dataset.classes
        names = getattr(dataset, "class_names", None)
        self.class_names = None if names is None else [str(name) for name in names]
        self.subset: Sequence[int] | None = getattr(dataset, "subset", None)
        self.labels: Tensor | None = None  # (classes of the data,): the class of the model for each, if they differ
        self.smoothing = smoothing
        self.mixers = _mixers(self.classes, MixUp=mixup, CutMix=cutmix)
        if self.subset is not None:
            self.metrics = (*self.metrics, self.metric(f"top1_{len(self.subset)}"))

    @classmethod
    def outputs(cls, dataset: Any | None) -> dict[str, Any]:
        return {"num_classes": 2 if dataset is None else dataset.classes}

    @classmethod
    def metric(cls, name: str) -> Metric:
        if re.fullmatch(r"top1_(\d+|subset)", name):
            return Metric(name, f"top-1 of {name.removeprefix('top1_')}", "%", factor=100.0)
        return super().metric(name)

    def learned(self) -> dict[str, Any]:
        known = {} if self.class_names is None else {"class_names": self.class_names}
        return {"num_classes": self.classes, **known}

    def adapt(self, learned: Mapping[str, Any], relabel: str = "") -> None:
        """relabel: "order" trusts the numbers of the classes, "names" looks for each name of the data among those that
        were learned, and a TOML file has lines `"name in the data" = "name that was learned"`."""
        known, number = learned.get("class_names"), learned["num_classes"]
        if relabel in ("", "order"):
            if self.classes != number:
                advice = "parapos eval --relabel names, or a TOML file of pairs, says which are the same"
                raise ValueError(f"has {self.classes} classes, expected the model's {number}; {advice}")
            if relabel == "" and known is not None and self.class_names not in (None, known):
                assert self.class_names is not None
                i = next(i for i, (a, b) in enumerate(zip(self.class_names, known, strict=True)) if a != b)
                reason = f"class {i} is {self.class_names[i]!r}, the model learned {known[i]!r}"
                raise ValueError(f"{reason}; if that is meant, give --relabel order, names or a TOML file")
            return
        if known is None or self.class_names is None:
            raise ValueError(f"--relabel {relabel} needs names of classes, from the run and from the data; give order")
        pairs = {name: name for name in self.class_names} if relabel == "names" else _read_pairs(Path(relabel))
        place = {name: i for i, name in enumerate(known)}
        for name in self.class_names:
            if name not in pairs:
                raise ValueError(f"--relabel {relabel}: says nothing of class {name!r}{nearest(name, list(pairs))}")
            if pairs[name] not in place:
                reason = f"class {pairs[name]!r} was not learned{nearest(pairs[name], known)}"
                raise ValueError(f"--relabel {relabel}: {reason}")
        self.labels = torch.tensor([place[pairs[name]] for name in self.class_names])
        if self.subset is not None:
            self.subset = sorted({int(self.labels[i]) for i in self.subset})
        self.classes, self.class_names = number, list(known)

    def loss(self, model: Forward, batch: Batch) -> Loss:
        labels = batch["label"]
        if self.mixers:
            images, labels = self.mixers[int(torch.randint(len(self.mixers), ()))](batch["image"], labels)
            batch = {**batch, "image": images}
        logits = answer(model, batch)
        losses = F.cross_entropy(logits, labels, label_smoothing=self.smoothing, reduction="none")
        if self.lovasz:
            losses = losses + self.lovasz * lovasz_softmax(logits.float().softmax(-1), labels)
        return Loss(losses.sum(), losses.new_tensor(len(losses)), by_sample=losses.detach())

    def evaluator(self, *, keep_predictions: bool = False) -> ClassificationEvaluator:
        return ClassificationEvaluator(self.classes, self.subset, self.labels, keep_predictions)

    @classmethod
    def summary(cls, results: Mapping[str, float]) -> str:
        return f"right: {round(results['top1'] * results['samples'])}/{int(results['samples'])}"

    def export(self, evaluator: Evaluator, folder: Path) -> list[Path]:
        """predictions.csv: id, label and the five best answers of every sample, as numbers of classes."""
        assert isinstance(evaluator, ClassificationEvaluator)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "predictions.csv"
        answers = sorted(evaluator.answers)
        most = max((len(row[2]) for row in answers), default=1)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["id", "label", *(f"answer{i}" for i in range(1, most + 1))])
            writer.writerows([number, label, *best] for number, label, best in answers)
        return [path]


class ClassificationEvaluator(Evaluator):
    """Counts of right and wrong answers by class, by torchmetrics; they add up over processes."""

    def __init__(self, classes: int, subset: Sequence[int] | None, labels: Tensor | None, keep: bool) -> None:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassF1Score,
            MulticlassPrecision,
            MulticlassRecall,
        )

        self.classes, self.subset, self.labels, self.keep = classes, subset, labels, keep
        self.loss = torch.zeros(2, dtype=torch.float64)  # sum, samples
        alone: dict[str, Any] = {"sync_on_compute": False}  # `merge` brings processes together
        self.counts = MetricCollection(
            {
                "top1": MulticlassAccuracy(classes, average="micro", **alone),
                "precision": MulticlassPrecision(classes, average="macro", **alone),
                "recall": MulticlassRecall(classes, average="macro", **alone),
                "f1": MulticlassF1Score(classes, average="macro", **alone),
            }
        )
        self.among = MetricCollection({})
        if subset is not None:
            self.among = MetricCollection(
                {f"top1_{len(subset)}": MulticlassAccuracy(classes, average="micro", **alone)}
            )
        self.answers: list[tuple[int, int, list[int]]] = []  # id, label, best classes

    def update(self, model: Forward, batch: Batch) -> None:
        logits, labels = answer(model, batch).float(), batch["label"]
        if len(logits) != len(labels):  # views
            logits = logits.unflatten(0, (len(labels), -1)).softmax(-1).mean(1).log()
        if self.labels is not None:
            labels = self.labels.to(labels.device)[labels]
        if "readable" in batch:  # a file that cannot be read is answered wrongly
            wrong = F.one_hot((labels + 1) % self.classes, self.classes).to(logits)
            logits = torch.where(batch["readable"].bool()[:, None], logits, wrong)
        if self.loss.device != logits.device:
            self.loss, _ = self.loss.to(logits.device), [m.to(logits.device) for m in (self.counts, self.among)]
        loss = F.cross_entropy(logits, labels, reduction="none").sum()
        self.loss += torch.stack([loss, loss.new_tensor(len(labels))])
        self.counts.update(logits, labels)
        if self.subset is not None:
            few = torch.full_like(logits, -torch.inf)
            few[:, self.subset] = logits[:, self.subset]
            self.among.update(few, labels)
        if self.keep:
            best = logits.topk(min(5, self.classes)).indices
            self.answers += zip(batch["id"].tolist(), labels.tolist(), best.tolist(), strict=True)

    def _metrics(self) -> dict[str, Any]:
        return {name: m for group in (self.counts, self.among) for name, m in group.items(copy_state=False)}

    def state(self) -> Any:
        counts = {
            name: {key: value.cpu() for key, value in metric.metric_state.items()}
            for name, metric in self._metrics().items()
        }
        return self.loss.cpu(), counts, self.answers

    def merge(self, states: Sequence[Any]) -> None:
        self.loss = torch.stack([loss for loss, _, _ in states]).sum(0)
        for name, metric in self._metrics().items():
            metric.cpu().reset()
            for _, counts, _ in states:
                metric.merge_state(counts[name])
        self.answers = [row for _, _, answers in states for row in answers]

    def compute(self) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was called before the")  # a process may have had no batch
            metrics = {"loss": self.loss[0] / self.loss[1], **self.counts.compute(), **self.among.compute()}
        names = [*(metric.name for metric in Classification.metrics), *self.among]
        return {name: float(metrics[name]) for name in names}


def _mixers(classes: int, **alphas: float) -> list[Any]:
    """MixUp and CutMix, those that are on. Each has one weight per part, and partners are neighbours."""
    if not any(alphas.values()):
        return []
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    return [getattr(v2, name)(alpha=alpha, num_classes=classes) for name, alpha in alphas.items() if alpha]


def _read_pairs(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"--relabel: expected order, names or a TOML file, got {str(path)!r}")
    pairs = recipes.read(path)
    for name, value in pairs.items():
        if not isinstance(value, str):
            raise ValueError(f"{path}: {name}: expected the name of a class, got {value!r}")
    return pairs
