"""Boxes with classes: YOLOv10's two-branch loss, judged by mean average precision.

B samples, G most boxes of a sample, k detections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batch import collate
from ..models.detector import branch_of, detection_loss, pad_images, postprocess
from .base import Batch, Evaluator, Forward, Loss, Metric, Task, answer
from .protocols import METRICS, Judged, Judging, class_metric, judging


class Detection(Task):
    """A data set says how many `classes` it has, their `class_names`, and by which `protocol` it is judged. Its samples
    hold boxes (M, 4), XYXY in pixels of what the network sees, `labels` (M,), `count`, and, if the network sees an
    image at another size than the file has it, its `scale` in x and y; those that are judged also hold the `truth`.

    min_score: detections below it are left out. max_det: most detections of a sample. clip_boxes: cuts boxes to the
    image. method: part of the name of the file of results.
    """

    metrics: tuple[Metric, ...] = METRICS
    headline = "map"
    parts = ("box", "cls", "dfl")
    normalizers = 2  # one for each branch of the head
    least_weight = 1.0

    def __init__(
        self,
        dataset: Any,
        *,
        min_score: float = 0.001,
        max_det: int = 100,
        clip_boxes: bool = False,
        method: str = "parapos",
    ) -> None:
        super().__init__(dataset)
        if not 0 <= min_score < 1:
            raise ValueError(f"min_score must be at least 0 and below 1, got {min_score!r}")
        if not 1 <= max_det <= 10_000:
            raise ValueError(f"max_det must be from 1 to 10000, got {max_det!r}")
        if not re.fullmatch(r"[\w.-]+", method):
            raise ValueError(f"method must be a word, as it is part of a file's name, got {method!r}")
        self.classes: int = dataset.classes
        self.class_names = [str(name) for name in dataset.class_names]
        self.category_ids = list(getattr(dataset, "category_ids", range(self.classes)))
        self.min_score, self.max_det = min_score, max_det
        self.judging = judging(dataset, clip=clip_boxes, method=method)
        self.metrics = self.judging.metrics

    @classmethod
    def outputs(cls, dataset: Any | None) -> dict[str, Any]:
        return {"num_classes": 2 if dataset is None else dataset.classes}

    @classmethod
    def metric(cls, name: str) -> Metric:
        if name.startswith("ap_"):
            return class_metric(name.removeprefix("ap_"))
        if name.startswith("psee_"):
            metric = super().metric(name.removeprefix("psee_"))
            return Metric(name, f"{metric.label} of the toolbox", metric.unit, factor=metric.factor)
        return super().metric(name)

    def learned(self) -> dict[str, Any]:
        return {"num_classes": self.classes, "class_names": self.class_names, "category_ids": self.category_ids}

    def adapt(self, learned: Mapping[str, Any], relabel: str = "") -> None:
        if relabel:
            raise ValueError(
                f"--relabel {relabel}: detections are judged by the names that were learned, expected none"
            )
        number, names = learned["num_classes"], learned.get("class_names")
        if number != self.classes:
            raise ValueError(f"has {self.classes} classes, the model has {number}")
        for i, (given, known) in enumerate(zip(self.class_names, names or self.class_names, strict=True)):
            if given != known:
                raise ValueError(f"class {i} is {given!r}, the model learned {known!r}")

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Boxes and labels are padded with zeros. Images of different sizes are padded to the right and below, and
        `mask` tells which patches hold something; it is None where all do."""
        images = [sample["image"] for sample in samples if "image" in sample]
        if len({image.shape for image in images}) < 2:
            return {**collate(samples, self.ragged), **({"mask": None} if images else {})}
        others = [{key: value for key, value in sample.items() if key != "image"} for sample in samples]
        padded, mask = pad_images(images)
        return {**collate(others, self.ragged), "image": padded, "mask": mask}

    def normalizer_of(self, parameter: str) -> int:
        """The branch of the loss that trains a parameter."""
        return branch_of(parameter)

    def gain(self, samples: int) -> float:
        """The released code multiplies its loss by the samples of a step."""
        return float(samples)

    def loss(self, model: Forward, batch: Batch) -> Loss:
        sums = detection_loss(answer(model, batch), batch["boxes"], batch["labels"], batch["count"])
        by_sample: Tensor = torch.stack(list(sums.parts.values())).sum(0)  # (B, 2)
        parts = {name: part.detach().sum(0) for name, part in sums.parts.items()}
        return Loss(by_sample.sum(0), sums.weight, parts, by_sample.detach())

    def evaluator(self, *, keep_predictions: bool = False) -> DetectionEvaluator:
        return DetectionEvaluator(self.judging, self.min_score, self.max_det)

    @classmethod
    def summary(cls, results: Mapping[str, float]) -> str:
        told = ", ".join(f"{cls.metric(name).label} {100 * results[name]:.1f}" for name in ("map", "map50", "map75"))
        return f"{told} % of {int(results['samples'])} samples"

    def export(self, evaluator: Evaluator, folder: Path) -> list[Path]:
        """Detections in the format of the benchmark, the AP of each class, and precision-recall curves."""
        assert isinstance(evaluator, DetectionEvaluator)
        folder.mkdir(parents=True, exist_ok=True)
        return self.judging.export(evaluator.samples, folder)


class DetectionEvaluator(Evaluator):
    """Keeps the detections of each sample, in pixels of the original, with what is true, and judges them at the end."""

    def __init__(self, judging: Judging, min_score: float, max_det: int) -> None:
        self.judging, self.min_score, self.max_det = judging, min_score, max_det
        self.samples: dict[int, Judged] = {}

    def update(self, model: Forward, batch: Batch) -> None:
        found = postprocess(answer(model, batch), self.max_det).detach().cpu().double()  # (B, k, 6)
        if not found.isfinite().all():
            bad = batch["id"].cpu()[~found.isfinite().all(-1).all(-1)].tolist()
            raise ValueError(f"detections of samples {bad[:5]} are not finite; the weights may have diverged")
        if "scale" in batch:
            found[..., :4] /= batch["scale"].cpu().double().repeat(1, 2)[:, None]
        for place, (number, rows) in enumerate(zip(batch["id"].tolist(), found, strict=True)):
            count = int(batch["count"][place])
            truth = {name: _plain(values[place], count) for name, values in batch["truth"].items()}
            self.samples[number] = Judged(rows[rows[:, 4] >= self.min_score].numpy(), truth)

    def state(self) -> Any:
        return self.samples

    def merge(self, states: Sequence[Any]) -> None:
        self.samples = {number: sample for state in states for number, sample in state.items()}

    def compute(self) -> dict[str, float]:
        return self.judging.score(self.samples)


def _plain(value: Any, count: int) -> Any:
    """A tensor as an array without padding, or as a number; a text as it is."""
    if not isinstance(value, Tensor):
        return value
    return value[:count].cpu().numpy() if value.ndim else value.item()
