"""How the outputs of a task's model become answers, and how answers are drawn, by the name of the task.

Answers are plain types: what the JSON file has, and what Python gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..tasks.base import Batch, answer
from . import Frame, PredictError, drawing

TOP = 5  # answers of a classifier
MOST = 100  # boxes of a frame


class View(ABC):
    """targets: what the task learned, as `Task.learned` has it. threshold: least score of an answer.

    key: what answers are called in the JSON file. least: the threshold if none is given.
    """

    key: ClassVar[str]
    least: ClassVar[float] = 0.0

    def __init__(self, targets: Mapping[str, Any], threshold: float | None = None) -> None:
        self.threshold = self.least if threshold is None else threshold
        if not 0 <= self.threshold <= 1:
            raise PredictError(f"threshold must be from 0 to 1, got {threshold}")
        names = targets.get("class_names")
        self.names = names and [str(name) for name in names]

    def name(self, label: int) -> str:
        """The name of a class; its number if it has none."""
        return self.names[label] if self.names is not None and label < len(self.names) else str(label)

    @abstractmethod
    def answers(self, model: nn.Module, batch: Batch, frames: Sequence[Frame]) -> list[list[dict[str, Any]]]:
        """The answers to each frame of a batch, the best first."""

    def read(
        self, model: nn.Module, batch: Batch, frames: Sequence[Frame]
    ) -> Iterable[tuple[list[dict[str, Any]], Mapping[str, Any]]]:
        """The answers to each frame, and what goes beyond them, `Prediction.extra`. Some views override it."""
        return ((answers, {}) for answers in self.answers(model, batch, frames))

    @abstractmethod
    def draw(self, picture: Image, answers: Sequence[Mapping[str, Any]]) -> Image:
        """A picture with its answers. Pictures of one size give pictures of one size."""


class Classes(View):
    """The five best classes with their probabilities, as bars below the picture."""

    key = "classes"

    def answers(self, model: nn.Module, batch: Batch, frames: Sequence[Frame]) -> list[list[dict[str, Any]]]:
        scores = answer(model, batch).double().softmax(-1).cpu()
        best = scores.topk(min(TOP, scores.shape[1]))
        return [
            [
                {"class": label, "name": self.name(label), "score": round(score, 6)}
                for label, score in zip(labels, values, strict=True)
                if score >= self.threshold
            ]
            for labels, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def draw(self, picture: Image, answers: Sequence[Mapping[str, Any]]) -> Image:
        return drawing.add_bars(picture, [(found["name"], found["score"]) for found in answers], TOP)


class Boxes(View):
    """Boxes (left, top, right, bottom) in pixels of the picture, cut to it, with classes and scores."""

    key = "boxes"
    least = 0.25

    def answers(self, model: nn.Module, batch: Batch, frames: Sequence[Frame]) -> list[list[dict[str, Any]]]:
        found = model.detect(*(batch[name] for name in model.inputs), max_det=MOST)  # type: ignore[operator, union-attr]
        return [self._boxes(rows, frame) for rows, frame in zip(found.double().cpu(), frames, strict=True)]

    def _boxes(self, rows: Tensor, frame: Frame) -> list[dict[str, Any]]:
        height, width = frame.picture.shape[1:]
        rows = rows[rows[:, 4] >= self.threshold]
        most = torch.tensor([width, height] * 2, dtype=rows.dtype)
        corners = rows[:, :4] * torch.tensor(frame.zoom * 2) + torch.tensor(frame.shift * 2)
        corners = torch.minimum(corners.clamp(min=0), most)
        inside = (corners[:, 2:] > corners[:, :2]).all(1)
        return [
            {
                "box": [round(edge, 2) for edge in box],
                "class": int(row[5]),
                "name": self.name(int(row[5])),
                "score": round(float(row[4]), 6),
            }
            for box, row in zip(corners[inside].tolist(), rows[inside], strict=True)
        ]

    def draw(self, picture: Image, answers: Sequence[Mapping[str, Any]]) -> Image:
        boxes = [(found["box"], found["class"], found["name"], found["score"]) for found in answers]
        return drawing.add_boxes(picture, boxes)


VIEWS: dict[str, type[View]] = {"classification": Classes, "detection": Boxes}


def register_view(task: str, cls: type[View]) -> None:
    """Makes a view known for a task. A task that has one is an error."""
    if VIEWS.get(task, cls) is not cls:
        raise ValueError(f"task {task!r} has a view, {VIEWS[task].__qualname__}")
    VIEWS[task] = cls


def find_view(task: str) -> type[View]:
    if task not in VIEWS:
        told = f"task {task!r} has no view, expected one of {', '.join(VIEWS)}"
        raise PredictError(f"{told}; register one with parapos.predict.views.register_view")
    return VIEWS[task]
