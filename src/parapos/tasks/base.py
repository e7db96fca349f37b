"""What a task is: what a model learns on a data set, and how it is judged.

A task owns the collation of samples, the loss, the evaluator, the metrics and the export of predictions. It is no
module and holds no weights: the training engine holds a model and a task side by side and never looks inside either.

    task = create_task("classification", dataset, smoothing=0.1)
    batch = task.collate([dataset[0], dataset[1]])
    loss = task.loss(model, batch)              # sum and weight; the engine divides, once the step is complete
    evaluator = task.evaluator()
    evaluator.update(model, batch)
    evaluator.merge([evaluator.state()])        # the states of all processes, in the order of their ranks
    evaluator.compute()                         # {"loss": ..., "top1": ...}

Without a data set at hand, `task_class(name)` answers for names, units and directions of metrics: `.metrics`,
`.headline`, `.metric(name)`. A run answers through `training.fit.metrics_of(folder)` and `headline_of(folder)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..data.batch import collate

Batch = dict[str, Any]  # by name, with the batch first; "id" (B,) is always there
Forward = Callable[..., Any]  # a model; `inputs` names the entries of a batch that it takes


@dataclass(frozen=True)
class Metric:
    """A number that judges a model: its name in files, how people write it, and which direction is better.

    factor: what a value is multiplied by when it is shown, 100 for a share that is shown in percent; `unit` is that of
    the shown number.
    """

    name: str
    label: str
    unit: str = ""
    higher_is_better: bool = True
    factor: float = 1.0

    def better(self, value: float, other: float) -> bool:
        """Whether a value is better than another one. Any number is better than NaN."""
        if value != value or other != other:
            return value == value
        return value > other if self.higher_is_better else value < other


@dataclass
class Loss:
    """The loss of a part of a step's batch, as a sum and what it has to be divided by.

    The loss of a step is the sum of all totals over the sum of all weights, over all parts and processes. A weight is
    whatever normalises the loss: the number of samples, of boxes, of labelled pixels. If all weights of a step are
    zero, the sum is not divided.

    parts: named sums, detached, that are logged divided by the same weight; their names are the task's `parts`.
    by_sample: the losses (B,) of the samples, detached, if there are such; they tell which one is not finite.

    A task with several `normalizers` gives total, weight and parts as (normalizers,), by_sample as (B, normalizers):
    the loss is the sum over them of total / weight.
    """

    total: Tensor
    weight: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    by_sample: Tensor | None = None


class Evaluator(ABC):
    """Collects what a model answers on a data set, and judges it once. Made anew for each evaluation."""

    @abstractmethod
    def update(self, model: Forward, batch: Batch) -> None:
        """Takes in a batch. Every sample comes once, to one process."""

    @abstractmethod
    def state(self) -> Any:
        """What this process has collected, as plain types and tensors on the CPU."""

    @abstractmethod
    def merge(self, states: Sequence[Any]) -> None:
        """Replaces what was collected by the states of all processes, of which its own is one."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics by name, in the order of the task's `metrics`."""


class Task(ABC):
    """A task on a data set. Options of a subclass are keywords; a recipe gives them as `[task.options]`.

    metrics: what it is judged by. headline: the name of the metric that decides which weights are best.
    parts: names of the parts of the loss that are logged.
    normalizers: how many weights the loss has. Each parameter learns from the share of one, which `normalizer_of` says.
    least_weight: a step's weight counts at least as much.
    """

    metrics: tuple[Metric, ...]
    headline: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()
    normalizers: ClassVar[int] = 1
    least_weight: ClassVar[float] = 0.0

    def __init__(self, dataset: Any) -> None:
        self.ragged: tuple[str, ...] = tuple(getattr(dataset, "ragged", ()))
        self.listed: tuple[str, ...] = tuple(getattr(dataset, "listed", ()))
        self.packed: tuple[str, ...] = tuple(getattr(dataset, "packed", ()))

    @classmethod
    def outputs(cls, dataset: Any | None) -> dict[str, Any]:
        """Options of a model that the data decide, such as num_classes. Without a data set, any that are legal."""
        return {}

    @classmethod
    def metric(cls, name: str) -> Metric:
        """A metric by its name; also those that only some data sets have."""
        wanted = next((metric for metric in cls.metrics if metric.name == name), None)
        if wanted is None:
            known = ", ".join(metric.name for metric in cls.metrics)
            raise ValueError(f"{cls.__name__} has no metric {name!r}, expected one of {known}")
        return wanted

    def learned(self) -> dict[str, Any]:
        """What weights mean on these data, such as the names of classes, in plain types. A run keeps it."""
        return {}

    def adapt(self, learned: Mapping[str, Any], relabel: str = "") -> None:
        """Makes the task, which was made for other data, judge a model that learned `learned`.

        Raises a ValueError that says how both differ, unless `relabel` says what to do about it."""
        if relabel:
            raise ValueError(f"--relabel {relabel}: {type(self).__name__} has no labels to change")
        if learned != self.learned():
            raise ValueError(f"is for {self.learned()}, the model learned {dict(learned)}")

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Samples to a batch. Tensors that the data set calls ragged are padded, packed ones are joined."""
        return collate(samples, self.ragged, self.listed, self.packed)

    @abstractmethod
    def loss(self, model: Forward, batch: Batch) -> Loss:
        """The training loss of a part of a step's batch."""

    def normalizer_of(self, parameter: str) -> int:
        """The number of the weight that divides the gradient of a parameter, by its name in the model. The gradient of
        all other shares of the loss must be zero there."""
        return 0

    def gain(self, samples: int) -> float:
        """What the gradient of a step of so many samples is multiplied by, in the end. Logged losses are without it."""
        return 1.0

    @abstractmethod
    def evaluator(self, *, keep_predictions: bool = False) -> Evaluator:
        """A fresh evaluator. keep_predictions: it also keeps what `export` writes."""

    @classmethod
    def summary(cls, results: Mapping[str, float]) -> str:
        """A line for people about the metrics of an evaluation and its number of `samples`."""
        metric = cls.metric(cls.headline)
        unit = f" {metric.unit}" if metric.unit else ""
        return f"{metric.label}: {results[metric.name] * metric.factor:.4g}{unit} of {int(results['samples'])} samples"

    @abstractmethod
    def export(self, evaluator: Evaluator, folder: Path) -> list[Path]:
        """Writes the predictions of an evaluator that kept them, in the format of the benchmark; gives the files."""


def answer(model: Forward, batch: Batch) -> Any:
    """What a model says to the entries of a batch that it names as its `inputs`."""
    return model(*(batch[name] for name in getattr(model, "inputs", ("image",))))
