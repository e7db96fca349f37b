"""A run at many resolutions, with and without position interpolation, one cell at a time.

A cell is one evaluation of a run: dataset, split, size and factor of positions. Its result is kept in the run's
cells.csv with the checksum of the weights it belongs to, so it is never evaluated twice, and a sweep or a table that
was killed goes on with the cell that is missing.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..training import checkpoint, fit, recipe, rows
from . import plots
from .text import table

INTERPOLATE = ("both", "on", "off")
METRICS = ("samples", "loss", "top1", "precision", "recall", "f1")
SUBSET = "top1_subset"  # with answers among the classes that occur, where the benchmark also asks for that
UNMEASURED = "-"


class ReportError(ValueError):
    """What was asked for cannot be reported. The message says why."""


@dataclass(frozen=True)
class Cell:
    """One evaluation. size: 0 where data have none. data and root: "" for those of the run."""

    size: int
    position_scale: float = 1.0
    data: str = ""
    split: str = "test"
    root: str = ""

    @staticmethod
    def at(size: int, *, trained: int, interpolated: bool, **more: str) -> Cell:
        """At a size, with positions drawn together into the trained range or as they are."""
        return Cell(size, trained / size if interpolated else 1.0, **more)


KEY = ("weights", *Cell.__dataclass_fields__)
COLUMNS = (*KEY, *METRICS, SUBSET)


class Cells:
    """The cells that a run already has, in cells.csv, and a way to get the others."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "cells.csv"
        weights = run / "weights.safetensors"
        if not weights.is_file():
            raise ReportError(f"{run}: has no weights.safetensors yet, expected a trained run")
        with open(weights, "rb") as file:
            self.weights = hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def _key(self, cell: Cell) -> tuple[str, ...]:
        return (self.weights, *(repr(x) if isinstance(x, float) else str(x) for x in astuple(cell)))

    def _rows(self) -> dict[tuple[str, ...], dict[str, float]]:
        found = {}
        for number, row in enumerate(rows.read(self.path, COLUMNS, optional=[SUBSET], numbers=COLUMNS[len(KEY) :]), 2):
            values = {name: row[name] for name in (*METRICS, SUBSET) if name in row}
            if not values.keys() >= set(METRICS):
                raise checkpoint.CheckpointError(f"{self.path}: line {number}: expected a number for every metric")
            found[tuple(row[name] for name in KEY)] = values
        return found

    def get(self, cell: Cell) -> dict[str, float] | None:
        """The kept result for these weights, or None."""
        return self._rows().get(self._key(cell))

    def measure(self, cell: Cell, batch: int | None = None, root: str = "") -> dict[str, float]:
        """The kept result, or a new one. batch: images at a time; by default as many as hold the tokens that the
        recipe's batch has at the trained size. root: where the data are now, if the cell does not say it; it has no
        part in the result."""
        if (kept := self.get(cell)) is not None:
            return kept
        data = fit.load_run(self.run).data
        if not batch and cell.size:
            batch = max(1, data.eval_batch * data.size**2 // cell.size**2)
        found = fit.evaluate(
            self.run,
            split=cell.split,
            size=cell.size or None,
            position_scale=cell.position_scale,
            root=cell.root or (root if root != data.root else None) or None,
            data=cell.data or None,
            batch=batch,
        )
        names = {SUBSET if name.startswith("top1_") else name: name for name in found}
        found = {name: found[names[name]] for name in (*METRICS, SUBSET) if name in names}
        if fit.is_first():
            self._keep(cell, found)
        return found

    def _keep(self, cell: Cell, found: dict[str, float]) -> None:
        kept = self._rows()
        kept[self._key(cell)] = found
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key, values in kept.items():
            writer.writerow([*key, *(repr(float(values[x])) if x in values else "" for x in (*METRICS, SUBSET))])
        checkpoint.write(self.path, text.getvalue().encode())


@dataclass(frozen=True)
class Row:
    """A line of the table: a run with or without interpolation, and its cells by size."""

    name: str
    encoding: str
    interpolated: bool
    cells: tuple[dict[str, float] | None, ...]


@dataclass(frozen=True)
class Sweep:
    sizes: tuple[int, ...]
    trained: int
    data: str
    split: str
    rows: tuple[Row, ...]

    def values(self, row: Row, metric: str = "top1") -> list[float | None]:
        """In percent."""
        return [None if cell is None else 100 * cell[metric] for cell in row.cells]

    def markdown(self) -> str:
        header = ["encoding", "positions", *(f"{size} px" for size in self.sizes)]
        lines = []
        for row in self.rows:
            shown = [UNMEASURED if v is None else f"{v:.1f}" for v in self.values(row)]
            lines.append([row.name, "interpolated" if row.interpolated else "as they are", *shown])
        return table(header, lines, left=2)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["name", "encoding", "interpolated", "size", *METRICS])
        for row in self.rows:
            for size, cell in zip(self.sizes, row.cells, strict=True):
                if cell is not None:
                    writer.writerow([row.name, row.encoding, row.interpolated, size, *(cell[x] for x in METRICS)])
        return text.getvalue()

    def plot(self, path: Path, title: str = "") -> None:
        lines = [plots.Line(row.name, row.encoding, self.values(row), row.interpolated) for row in self.rows]
        title = title or f"{self.data}, {self.split}: accuracy at other resolutions"
        plots.curves(path, self.sizes, lines, trained=self.trained, title=title, ylabel="top-1 accuracy, %")

    def write(self, out: Path, title: str = "") -> list[Path]:
        """OUT/sweep.md, sweep.csv and sweep.png."""
        paths = [out / f"sweep.{end}" for end in ("md", "csv", "png")]
        checkpoint.write(paths[0], f"{self.markdown()}\n".encode())
        checkpoint.write(paths[1], self.csv().encode())
        self.plot(paths[2], title)
        return paths


def run(
    runs: Sequence[Path],
    sizes: Sequence[int],
    *,
    interpolate: str = "both",
    data: str = "",
    split: str = "test",
    root: str = "",
    batch: int | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> Sweep:
    """Evaluates runs at all sizes; what was evaluated before is taken from there. tell: hears of every cell."""
    if interpolate not in INTERPOLATE:
        raise ReportError(f"interpolate must be one of {', '.join(INTERPOLATE)}, got {interpolate!r}")
    recipes = [fit.load_run(folder) for folder in runs]
    if len({wanted.data.size for wanted in recipes}) > 1:
        told = ", ".join(f"{folder} {wanted.data.size}" for folder, wanted in zip(runs, recipes, strict=True))
        raise ReportError(f"runs of one sweep must be trained at one size, got {told}")
    trained, sizes = recipes[0].data.size, sorted(set(sizes))
    if not trained:
        raise ReportError(f"{runs[0]}: dataset {recipes[0].data.name} has no size to sweep")
    if len({folder.resolve() for folder in runs}) < len(runs):
        raise ReportError("runs of one sweep must be different ones, got one of them twice")
    for folder, wanted in zip(runs, recipes, strict=True):
        check_sizes(str(folder), wanted, sizes)
    all_cells = [Cells(folder) for folder in runs]
    known = [wanted.model.encoding for wanted in recipes]
    lines = []
    for folder, wanted, cells in zip(runs, recipes, all_cells, strict=True):
        encoding = wanted.model.encoding
        name = plots.NAMES[encoding] if known.count(encoding) == 1 else folder.resolve().name
        for interpolated in {"both": (False, True), "on": (True,), "off": (False,)}[interpolate]:
            found = []
            for size in sizes:
                cell = Cell.at(size, trained=trained, interpolated=interpolated, data=data, split=split, root=root)
                old = cells.get(cell) is not None
                found.append(cells.measure(cell, batch))
                told = f"{name}, {size} px{', interpolated' if interpolated else ''}"
                tell(f"{told}: top-1 {found[-1]['top1']:.2%}{' (kept)' if old else ''}")
            lines.append(Row(name, encoding, interpolated, tuple(found)))
    return Sweep(tuple(sizes), trained, data or recipes[0].data.name, split, tuple(lines))


def check_sizes(where: str, wanted: recipe.Recipe, sizes: Iterable[int]) -> None:
    """Before anything is evaluated: whether a model can take images of these sizes."""
    with torch.device("meta"):
        patch = getattr(wanted.model.build(wanted.task_class.outputs(None)), "patch", 1)
    for size in sizes:
        if size % patch:
            raise ReportError(f"{where}: size: expected a multiple of the model's patch size {patch}, got {size}")


def adopt(weights: Path, source: str, folder: Path, changes: dict[str, str]) -> Path:
    """Makes a run of a weights file alone: the recipe says how data are read, the file what the model is."""
    about = checkpoint.load_weights(weights)[1]
    for key in changes:
        if not key.startswith(("data.", "run.")) or (key == "data.size" and "size" in about):
            raise ReportError(f"--{key}: expected nothing, {weights} says what the model is and was trained at")
    wanted = recipe.load(source, changes)
    values: dict[str, Any] = {name: dict(vars(getattr(wanted, name))) for name in ("data", "augment", "optim", "run")}
    values["optim"]["betas"] = list(values["optim"]["betas"])
    values["data"]["size"] = about.get("size", wanted.data.size)
    values["model"] = {"name": about["model"], "encoding": about["encoding"], "options": about["options"]}
    made = recipe.make(values, str(weights))
    known = folder / "recipe.toml"
    if known.is_file() and known.read_text(encoding="utf-8") != made.dumps():
        raise ReportError(f"{folder}: holds another run, expected a new folder for {weights}")
    link = folder / "weights.safetensors"
    if link.exists() and not os.path.samefile(link, weights):
        raise ReportError(f"{link}: is another file than {weights}, expected a new folder")
    checkpoint.write(known, made.dumps().encode())
    if not link.exists():
        link.symlink_to(weights.resolve())
    return folder
