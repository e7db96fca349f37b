"""Results as long rows: a line per run, evaluation and metric, with the checksum of the weights that it belongs to.

A run keeps its own in cells.csv, so nothing is evaluated twice, and what was killed goes on with what is missing. The
raw numbers of a study are the same rows of all its runs. Files of older versions, with a column per metric, are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlencode

from ..training import checkpoint, fit, rows

COLUMNS = ("run", "evaluation", "metric", "value", "weights")
Key = tuple[str, str, str]  # run, evaluation, weights
Scores = dict[Key, dict[str, float]]  # metrics by name


class ReportError(ValueError):
    """What was asked for cannot be reported. The message says why."""


@dataclass(frozen=True)
class Evaluation:
    """What a run is evaluated on. size: 0 where data have none. position_scale: below 1, positions are
    drawn together, as into the trained range. data and root: "" for those of the run."""

    size: int = 0
    position_scale: float = 1.0
    data: str = ""
    split: str = "test"
    root: str = ""

    @property
    def label(self) -> str:
        """For people."""
        positions = f"positions x {self.position_scale:.3g}" if self.position_scale != 1 else ""
        size, split = f"{self.size} px" if self.size else "", self.split if self.split != "test" else ""
        return ", ".join(filter(None, (self.data, split, size, positions))) or self.split

    def __str__(self) -> str:
        """As files have it: size=48&position_scale=1.0&split=test."""
        return urlencode({key: value for key, value in asdict(self).items() if value != ""})


def at_step(step: int) -> str:
    """The evaluation of a step of training, whose metrics are those of metrics.csv."""
    return f"step={step}"


def value_of(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric by its name, or the first that a pattern as "ap_*" fits."""
    return next((value for key, value in metrics.items() if fnmatchcase(key, name)), None)


def read(path: Path) -> Scores:
    """The rows of a file. One that is not there has none."""
    scores: Scores = {}
    with_header = rows.read(path)
    if with_header and tuple(with_header[0])[:2] == ("weights", "size"):
        return _read_wide(path)
    for number, row in enumerate(rows.read(path, COLUMNS, numbers=["value"]), 2):
        if "value" not in row:
            raise checkpoint.CheckpointError(f"{path}: line {number}: expected a number as value, got none")
        scores.setdefault((row["run"], row["evaluation"], row["weights"]), {})[row["metric"]] = row["value"]
    return scores


def _read_wide(path: Path) -> Scores:
    """Rows of an older version: what was evaluated, then a column per metric, blank where the task has no such one."""
    known = list(Evaluation.__dataclass_fields__)
    header = list(rows.read(path)[0])
    scores: Scores = {}
    for row in rows.read(path, whole=["size"], numbers=["position_scale", *header[1 + len(known) :]], needed=known):
        evaluation = Evaluation(**{key: row.pop(key) for key in known})
        scores[path.parent.name, str(evaluation), row.pop("weights")] = row
    return scores


def write(path: Path, scores: Scores) -> None:
    lines = [
        (run, evaluation, metric, repr(float(value)), weights)
        for (run, evaluation, weights), metrics in scores.items()
        for metric, value in metrics.items()
    ]
    rows.write(path, COLUMNS, lines)


class Cells:
    """The evaluations that a run already has, in cells.csv, and a way to get the others."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "cells.csv"
        weights = run / "weights.safetensors"
        if not weights.is_file():
            raise ReportError(f"{run}: has no weights.safetensors yet, expected a trained run")
        with open(weights, "rb") as file:
            self.weights = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        self.scores = {key[1:]: metrics for key, metrics in read(self.path).items()}

    def key(self, evaluation: Evaluation) -> Key:
        return self.run.resolve().name, str(evaluation), self.weights

    def get(self, evaluation: Evaluation) -> dict[str, float] | None:
        """The kept result for these weights, or None."""
        return self.scores.get(self.key(evaluation)[1:])

    def measure(self, evaluation: Evaluation, batch: int | None = None, root: str = "") -> dict[str, float]:
        """The kept result, or a new one. batch: samples at a time; by default as many as hold the tokens that the
        recipe's batch has at the trained size. root: where the data are now, if the evaluation does not say it; it has
        no part in the result."""
        if (kept := self.get(evaluation)) is not None:
            return kept
        data = fit.load_run(self.run).data
        if not batch and evaluation.size:
            batch = max(1, data.eval_batch * data.sides[0] * data.sides[1] // evaluation.size**2)
        metrics = fit.evaluate(
            self.run,
            split=evaluation.split,
            size=evaluation.size or None,
            position_scale=evaluation.position_scale,
            root=evaluation.root or (root if root != data.root else None) or None,
            data=evaluation.data or None,
            batch=batch,
        )
        if fit.is_first():
            write(self.path, {**read(self.path), self.key(evaluation): metrics})
        self.scores[self.key(evaluation)[1:]] = metrics
        return metrics
