"""Runs at many resolutions, with and without position interpolation: a grid of runs as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..encodings.looks import label
from ..training import fit
from .grid import Grid, Results, Run, collect, fill
from .schedule import run_all
from .store import Cells, ReportError
from .tables_spec import Column, Row, Table

INTERPOLATE = {"both": (False, True), "on": (True,), "off": (False,)}


def resolve(
    runs: Sequence[Path],
    sizes: Sequence[int],
    *,
    interpolate: str = "both",
    data: str = "",
    split: str = "test",
    root: str = "",
) -> Grid:
    """The grid of a sweep. Impossible requests are refused here, before anything is evaluated."""
    given = [Run("", {}, folder, fit.load_run(folder), given=True) for folder in runs]
    if len({run.wanted.data.size for run in given}) > 1:
        message = ", ".join(f"{run.folder} {run.wanted.data.size}" for run in given)
        raise ReportError(f"runs of one sweep must be trained at one size, got {message}")
    name, trained = given[0].wanted.data.name, given[0].side
    if not trained:
        raise ReportError(f"{runs[0]}: dataset {name} has no size to sweep, or is not square")
    if len({run.name for run in given}) < len(given):
        raise ReportError("runs of one sweep must be different ones with different names, got one of them twice")
    encodings = [run.wanted.model.encoding for run in given]
    rows: dict[str, Row] = {}
    found: dict[str, Run] = {}
    for run, encoding in zip(given, encodings, strict=True):
        run.check_sizes(str(run.folder), sizes)
        Cells(run.folder)  # tells that there are no weights, or that cells.csv is damaged
        known = label(encoding) if encodings.count(encoding) == 1 else run.name
        for is_dashed in INTERPOLATE[interpolate]:
            row = f"{known}, interpolated" if is_dashed else known
            rows[row], found[row] = Row(encoding=encoding, dashed=is_dashed), replace(run, label=known)
    title = f"{data or name}, {split}: trained at {trained} px, tested at other sizes"
    interpolated = tuple(row for row, spec in rows.items() if spec.dashed)
    columns = {f"{size} px": Column(size=size, interpolate=interpolated) for size in sorted(set(sizes))}
    table = Table(title=title, rows=rows, columns=columns)
    return fill(table, lambda block, row, column: [found[row]], data=data, split=split, root=root)


def run(grid: Grid, tell: Callable[[str], object] = lambda line: None, batch: int | None = None) -> Results:
    """Evaluates what was not evaluated before. tell: hears of every evaluation."""
    run_all(grid.jobs, 0, Path(), tell, lambda: None, batch=batch)
    return collect(grid.jobs)
