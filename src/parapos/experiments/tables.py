"""The paper's tables and studies over seeds as grids, with the paper's figure beside each of ours.

What a table is stands in tables_spec.py. A run is the folder ROOT/RECIPE-ROW, with -foldN and -SEED after it if there
are any, so tables share runs with one another and with `parapos train`. A study over seeds is kept as raw numbers,
cells.csv and curves.csv; its tables, sentences and plots are made from these alone, here or where no run is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..text import nearest
from ..training import fit, recipe
from ..training.recipe import RecipeError
from . import render, schedule, store
from .grid import Grid, Results, Run, fill
from .store import ReportError
from .tables_spec import Column, Table
from .tables_spec import load as load  # for callers of this module


def check_rows(table: Table, only: Sequence[str]) -> None:
    for name in only:
        if name not in table.rows:
            expected = f"{', '.join(table.rows)}{nearest(name, list(table.rows))}"
            raise ReportError(f"--only: unknown row {name!r}, expected some of {expected}")
        if list(only).count(name) > 1:
            raise ReportError(f"--only: expected each row once, got {name} twice")


def check_changes(table: Table, changes: Mapping[str, str], only: Sequence[str] = ()) -> None:
    """A change for all runs may not undo what makes a row, a column or a repeat."""
    taken = {key for row, spec in table.rows.items() if not only or row in only for key in spec.changes}
    if any(column.folds for column in table.columns.values()):
        taken.add("data.options.fold")
    if table.seeds:
        taken.add("run.seed")
    for key in sorted(taken & set(changes)):
        raise ReportError(f"--{key}: expected nothing, the table {table.name} sets it run by run")


def resolve(table: Table, root: Path, changes: Mapping[str, str], only: Sequence[str] = ()) -> Grid:
    """The grid of a table. changes: for all runs; `data.root` goes to data sets that have one. only: some rows."""
    check_rows(table, only)
    check_changes(table, changes, only)
    rooted = {block: bool(recipe.load(source).data.root) for block, source in table.blocks.items()}
    if "data.root" in changes and rooted and not any(rooted.values()):
        raise ReportError(f"data.root: expected nothing, no data set of the table {table.name} has a root")
    runs: dict[Path, Run] = {}

    def find(block: str, row: str, column: Column) -> list[Run]:
        spec = table.rows[row]
        source = spec.recipe or column.recipe or table.blocks.get(block, table.recipe)
        source = spec.instead.get(source, source)
        both = {**spec.changes, **changes}
        if not rooted.get(block, True):
            both.pop("data.root", None)
        elif column.root and "data.root" in both:
            both["data.root"] = str(Path(both["data.root"]) / column.root)
        folders = {root / f"{Path(source).stem}-{row}{end}": repeat for end, repeat in _repeats(table, column).items()}
        for folder, repeat in folders.items():
            if folder not in runs:
                merged = {**both, **repeat}
                runs[folder] = Run(source, merged, folder, recipe.load(source, merged))
        first, *others = (runs[folder] for folder in folders)
        if not column.loss_at:
            first.check_sizes(f"{table.name}: {first.folder.name}", [column.size])
        return [first, *others]

    return fill(table, find, only)


def _repeats(table: Table, column: Column) -> dict[str, dict[str, str]]:
    """The changes of all repeats, folds and seeds, by the ends of folders' names."""
    folds = {f"-fold{fold}": {"data.options.fold": str(fold)} for fold in column.folds} or {"": {}}
    seeds = {f"-{seed}": {"run.seed": str(seed)} for seed in table.seeds} or {"": {}}
    return {one + other: {**a, **b} for other, b in seeds.items() for one, a in folds.items()}


def with_others(grid: Grid, root: Path, changes: Mapping[str, str]) -> Grid:
    """The grid with the rows that were not asked for. What the changes make impossible has no places."""
    places = dict(grid.places)
    for row in grid.table.rows:
        if row not in grid.rows:
            with contextlib.suppress(RecipeError, ReportError):
                other = resolve(grid.table, root, changes, [row])
                for run in other.runs:
                    run.state()  # of another recipe, perhaps
                places |= other.places
    return replace(grid, places=places, only=())


def make(
    grid: Grid, processes: int, log: Path, tell: Callable[[str], object], after: Callable[[], object] = lambda: None
) -> None:
    """Trains what is not trained and evaluates what is not evaluated. after: called after every run."""
    todo = [job for job in grid.jobs if not job.is_done()]
    processes = min(processes, len(todo))
    message = f" with {processes} processes" if processes else ""
    tell(f"{len(grid.jobs) - len(todo)} of {len(grid.jobs)} runs are there, {len(todo)} to do{message}")
    schedule.run_all(todo, processes, log, tell, lambda: fit.is_first() and after())


def write(grid: Grid, results: Results, out: Path) -> list[Path]:
    """OUT.md, OUT.csv and a plot; of a study over seeds table.md, table.csv and plots in the folder OUT."""
    return render.write(grid, results, out / "table" if grid.table.seeds else out)


def write_raw(results: Results, out: Path) -> list[Path]:
    """OUT/cells.csv and curves.csv: the evaluations, and what was logged during training."""
    paths = [out / "cells.csv", out / "curves.csv"]
    for path, of_curve in zip(paths, (False, True), strict=True):
        store.write(path, {key: x for key, x in results.scores.items() if key[1].startswith("step=") == of_curve})
    return paths


def read_raw(folder: Path) -> Results:
    """What `write_raw` wrote."""
    scores: store.Scores = {}
    for path in (folder / "cells.csv", folder / "curves.csv"):
        if not path.is_file():
            raise ReportError(f"{path}: no such file; give --results DIR, or make the table without --from-cache")
        scores |= store.read(path)
    return Results(scores)
