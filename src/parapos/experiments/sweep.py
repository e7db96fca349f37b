"""Runs at many resolutions, with and without position interpolation: a grid of runs as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..encodings.looks import label
from ..training import fit
from . import render
from .grid import Grid, Results, Run, check_sizes, collect, fill
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
    encodings = [wanted.model.encoding for wanted in recipes]
    rows: dict[str, Row] = {}
    found: dict[str, Run] = {}
    for folder, wanted, name in zip(runs, recipes, names, strict=True):
        check_sizes(str(folder), wanted, sizes)
        Cells(folder)  # tells that there are no weights, or that cells.csv is damaged
        known = label(wanted.model.encoding) if encodings.count(wanted.model.encoding) == 1 else name
        run = Run("", {}, folder, wanted, label=known, given=True)
        for is_dashed in INTERPOLATE[interpolate]:
            row = f"{known}, interpolated" if is_dashed else known
            rows[row], found[row] = Row(encoding=wanted.model.encoding, dashed=is_dashed), run
    title = title or f"{data or recipes[0].data.name}, {split}: trained at {trained} px, tested at other sizes"
    interpolated = tuple(row for row, spec in rows.items() if spec.dashed)
    columns = {f"{size} px": Column(size=size, interpolate=interpolated) for size in sorted(set(sizes))}
    table = Table(title=title, rows=rows, columns=columns)
    return fill(table, lambda block, row, column: [found[row]], data=data, split=split, root=root)


def run(grid: Grid, tell: Callable[[str], object] = lambda line: None, batch: int | None = None) -> Results:
    """Evaluates what was not evaluated before. tell: hears of every evaluation."""
    run_all(grid.jobs, 0, Path(), tell, lambda job: None, batch=batch)
    return collect(grid.jobs)


def write(grid: Grid, results: Results, out: Path) -> list[Path]:
    """OUT/sweep.md, sweep.csv and sweep.png."""
    return render.write(grid, results, out / "sweep.md", out / "sweep.csv", out / "sweep.png")
