"""Runs at many resolutions, with and without position interpolation: a grid of runs as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..encodings.looks import label
from ..training import fit
from . import render
from .grid import Grid, Place, Repeat, Results, Run, check_sizes, collect
from .schedule import run_all
from .store import Cells, Evaluation, ReportError
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
    title: str = "",
) -> Grid:
    """The grid of a sweep. Impossible requests are refused here, before anything is evaluated."""
    if interpolate not in INTERPOLATE:
        raise ReportError(f"interpolate must be one of {', '.join(INTERPOLATE)}, got {interpolate!r}")
    recipes = [fit.load_run(folder) for folder in runs]
    if len({wanted.data.size for wanted in recipes}) > 1:
        message = ", ".join(f"{folder} {wanted.data.size}" for folder, wanted in zip(runs, recipes, strict=True))
        raise ReportError(f"runs of one sweep must be trained at one size, got {message}")
    trained = recipes[0].data.sides[0]
    if not trained or len(set(recipes[0].data.sides)) > 1:
        raise ReportError(f"{runs[0]}: dataset {recipes[0].data.name} has no size to sweep, or is not square")
    names = [folder.resolve().name for folder in runs]
    if len({folder.resolve() for folder in runs}) < len(runs) or len(set(names)) < len(names):
        raise ReportError("runs of one sweep must be different ones with different names, got one of them twice")
    columns = {f"{size} px": Column(size=size) for size in sorted(set(sizes))}
    encodings = [wanted.model.encoding for wanted in recipes]
    table_rows: dict[str, Row] = {}
    places: dict[Place, tuple[Repeat, ...]] = {}
    shown: dict[str, str] = {}
    for folder, wanted, name in zip(runs, recipes, names, strict=True):
        check_sizes(str(folder), wanted, sizes)
        Cells(folder)  # tells that there are no weights, or that cells.csv is damaged
        known = label(wanted.model.encoding) if encodings.count(wanted.model.encoding) == 1 else name
        run = Run("", {}, folder, wanted, label=known, given=True)
        for interpolated in INTERPOLATE[interpolate]:
            row = f"{known}, interpolated" if interpolated else known
            table_rows[row], shown[row] = Row(dashed=interpolated), wanted.model.encoding
            more = dict(data=data, split=split, root=root)
            for column, spec in columns.items():
                evaluation = Evaluation.at(spec.size or 0, trained=trained, interpolated=interpolated, **more)
                places["", row, column] = (Repeat(run, evaluation, run.metric()),)
    title = title or f"{data or recipes[0].data.name}, {split}: trained at {trained} px, tested at other sizes"
    return Grid(Table(name="sweep", title=title, rows=table_rows, columns=columns), places, shown)


def run(grid: Grid, tell: Callable[[str], object] = lambda line: None, batch: int | None = None) -> Results:
    """Evaluates what was not evaluated before. tell: hears of every evaluation."""
    run_all(grid.jobs, 0, Path(), tell, lambda job: None, batch=batch)
    return collect(grid.jobs)


def write(grid: Grid, found: Results, out: Path) -> list[Path]:
    """OUT/sweep.md, sweep.csv and sweep.png."""
    return render.write(grid, found, out / "sweep.md", out / "sweep.csv", out / "sweep.png")
