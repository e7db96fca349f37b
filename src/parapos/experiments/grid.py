"""A grid: rows x columns x repeats, where each place is a number that an evaluation of a run gives.

Seeds and folds are repeats. Sweeps, the paper's tables, studies over seeds and the demo are grids; schedule.py trains
and evaluates what is missing, render.py shows what is there. Blocks are grids of the same rows and columns on different
data.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..tasks.base import Metric
from ..training import runs
from ..training.recipe import Recipe
from ..training.runs import FINISHED
from .store import Cells, Evaluation, ReportError, Scores, at_step, value_of
from .tables_spec import Column, Table

TRAINING_LOSS = Metric("train_loss", "training loss", higher_is_better=False)


@dataclass(frozen=True)
class Run:
    """A run that a grid needs: a recipe, what is changed in it, and the folder. label: for people. given: its weights
    are taken as they are, however far it was trained."""

    source: str
    changes: dict[str, str]
    folder: Path
    wanted: Recipe
    label: str = ""
    given: bool = False

    @property
    def name(self) -> str:
        """As results have it."""
        return self.folder.resolve().name

    @property
    def side(self) -> int:
        """The trained size in pixels per side; 0 if data have none or are not square."""
        height, width = self.wanted.data.sides
        return height if height == width else 0

    @property
    def command(self) -> str:
        """What trains it, to be typed in or given to a cluster."""
        changes = [word for key, value in self.changes.items() for word in (f"--{key}", value)]
        return shlex.join(["parapos", "train", self.source, "--out", str(self.folder), *changes])

    def state(self) -> str:
        """How far it is, as `runs.progress` says it."""
        return FINISHED if self.given else runs.progress(self.folder, self.wanted)

    @cached_property
    def patch(self) -> int:
        """The patch size of its model, 1 if it has none. The model is built without memory for its weights."""
        with torch.device("meta"):
            return getattr(self.wanted.model.build(self.wanted.task_class.outputs(None)), "patch", 1)

    def check_sizes(self, where: str, sizes: Iterable[int]) -> None:
        """Before anything is trained or evaluated: whether its model can take samples of these sizes."""
        for size in sorted(set(sizes) - {self.wanted.data.size, 0}):
            if size % self.patch:
                expected = f"a multiple of the model's patch size {self.patch}"
                raise ReportError(f"{where}: size: expected {expected}, got {size}")

    def is_finished(self) -> bool:
        return (self.folder / "weights.safetensors").is_file() and self.state() == FINISHED

    def metric(self, name: str = "") -> Metric:
        """A metric of its task, by default the headline. A pattern is shown as the headline is."""
        task = self.wanted.task_class
        if "*" in name:
            return replace(task.metric(task.headline), name=name)
        try:
            return task.metric(name or task.headline)
        except ValueError as error:
            raise ReportError(f"metric: {error}") from None


@dataclass(frozen=True)
class Repeat:
    """One of the numbers that a place of a grid is the mean of."""

    run: Run
    evaluation: Evaluation | str  # a step of training, as at_step has it
    metric: Metric


Place = tuple[str, str, str]  # block, row, column


@dataclass(frozen=True)
class Job:
    """A run, what it is evaluated on, and the metrics that are wanted of each evaluation."""

    run: Run
    evaluations: dict[Evaluation, set[str]] = field(default_factory=dict)

    def missing(self) -> list[Evaluation]:
        """What was not evaluated yet, with the weights of a finished run."""
        if not self.run.is_finished():
            return list(self.evaluations)
        cells = Cells(self.run.folder)
        return [evaluation for evaluation in self.evaluations if cells.get(evaluation) is None]

    def is_done(self) -> bool:
        return self.run.is_finished() and not self.missing()


@dataclass(frozen=True)
class Results:
    """What is known of the runs of a grid."""

    scores: Scores = field(default_factory=dict)

    @cached_property
    def by_evaluation(self) -> dict[tuple[str, str], dict[str, float]]:
        return {key[:2]: metrics for key, metrics in self.scores.items()}


def collect(jobs: Sequence[Job], *, curves: bool = False) -> Results:
    """What finished runs have. curves: also the losses and validations on the way."""
    scores: Scores = {}
    for job in jobs:
        if not job.run.is_finished():
            continue
        cells = Cells(job.run.folder)
        for evaluation in job.evaluations:
            if (metrics := cells.get(evaluation)) is not None:
                scores[job.run.name, str(evaluation), cells.weights] = metrics
        for step, metrics in runs.curve(job.run.folder) if curves else ():
            scores.setdefault((job.run.name, at_step(step), ""), {}).update(metrics)
    return Results(scores)


@dataclass(frozen=True)
class Grid:
    """Places and their repeats. only: the rows that are shown, if not all of the table, whether they have places or
    not."""

    table: Table
    places: dict[Place, tuple[Repeat, ...]]
    only: tuple[str, ...] = ()

    @cached_property
    def jobs(self) -> list[Job]:
        """Every run once. One repeat of the whole grid comes before the next."""
        jobs: dict[Path, Job] = {}
        for repeats in itertools.zip_longest(*self.places.values()):
            for repeat in filter(None, repeats):
                job = jobs.setdefault(repeat.run.folder, Job(repeat.run))
                if isinstance(repeat.evaluation, Evaluation):
                    job.evaluations.setdefault(repeat.evaluation, set()).add(repeat.metric.name)
        return list(jobs.values())

    @property
    def runs(self) -> list[Run]:
        return [job.run for job in self.jobs]

    @property
    def rows(self) -> list[str]:
        return [row for row in self.table.rows if not self.only or row in self.only]

    @property
    def blocks(self) -> list[str]:
        return list(dict.fromkeys(block for block, _, _ in self.places)) or [""]

    @property
    def has_curves(self) -> bool:
        """Whether a place is a step of training."""
        return any(isinstance(repeat.evaluation, str) for repeats in self.places.values() for repeat in repeats)

    def trained(self, block: str) -> int:
        """The size that the runs of a block are trained at."""
        return next(repeats[0].run.side for place, repeats in self.places.items() if place[0] == block)

    def metric(self, place: Place) -> Metric | None:
        return self.places[place][0].metric if place in self.places else None

    def repeats(self, results: Results, place: Place, metric: str = "") -> list[float | None]:
        """A number for each repeat, as shown. metric: another one, as files have it."""
        numbers: list[float | None] = []
        for repeat in self.places.get(place, ()):
            metrics = results.by_evaluation.get((repeat.run.name, str(repeat.evaluation)), {})
            value = value_of(metrics, metric or repeat.metric.name)
            numbers.append(value if value is None or metric else value * repeat.metric.factor)
        return numbers

    def values(self, results: Results, place: Place, metric: str = "") -> list[float]:
        """The repeats that are there; of a column that is a mean of others, the mean if all of these are whole."""
        if others := self._others(place):
            whole = not metric and all(self.is_whole(results, other) for other in others)
            means = [statistics.fmean(self.values(results, other)) for other in others] if whole else []
            return [statistics.fmean(means)] if means else []
        return [value for value in self.repeats(results, place, metric) if value is not None]

    def _others(self, place: Place) -> list[Place]:
        """The places whose mean a place is."""
        block, row, column = place
        return [(block, row, other) for other in self.table.columns[column].mean_of]

    def is_whole(self, results: Results, place: Place) -> bool:
        if others := self._others(place):
            return all(self.is_whole(results, other) for other in others)
        return place in self.places and None not in self.repeats(results, place)

    def beyond(self, results: Results, block: str, row: str, columns: Sequence[str]) -> list[float]:
        """The mean over some columns, for all repeats that have them all."""
        lines = zip(*(self.repeats(results, (block, row, column)) for column in columns), strict=False)
        return [statistics.fmean(v for v in line if v is not None) for line in lines if None not in line]


def fill(
    table: Table, find: Callable[[str, str, Column], Sequence[Run]], only: Sequence[str] = (), **more: Any
) -> Grid:
    """The grid of a table. find(block, row, column): the runs of a place. more: what all evaluations have beside that
    which columns say."""
    places: dict[Place, tuple[Repeat, ...]] = {}
    for row, block, (name, column) in itertools.product(table.rows, table.blocks or [""], table.columns.items()):
        if (only and row not in only) or column.mean_of or row in column.without:
            continue
        repeats = []
        for run in find(block, row, column):
            evaluation: Evaluation | str = at_step(column.loss_at)
            try:
                if not column.loss_at:
                    evaluation = replace(column.evaluation(row, run.side), **more)
                metric = TRAINING_LOSS if column.loss_at else run.metric(column.metric)
            except ReportError as error:
                raise ReportError(f"{table.name}: columns.{name}.{error}") from None
            repeats.append(Repeat(run, evaluation, metric))
        places[block, row, name] = tuple(repeats)
    return Grid(table, places, only=tuple(only))
