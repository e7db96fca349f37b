"""The paper's tables as grids: rows are runs, columns are evaluations, the paper's figure stands beside each of ours.

What a table is stands in tables_spec.py. A run is the folder ROOT/RECIPE-ROW, with -foldN after it, so tables share
runs with one another and with `parapos train`; its cells are kept there, so a table that was killed goes on where it
was. A table with `seeds` is of the kind that tables_seeds.py makes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..encodings import ENCODINGS
from ..metrics import significance
from ..text import nearest
from ..text import table as as_text
from ..training import checkpoint, fit, recipe, rows, state
from ..training.recipe import Recipe, RecipeError
from . import plots
from .sweep import UNMEASURED, Cell, Cells, ReportError, check_sizes
from .tables_spec import Column, Row, Table, load, paper, shelf

__all__ = [
    "FINISHED",
    "UNBEGUN",
    "Column",
    "ReportError",
    "Row",
    "Run",
    "Table",
    "kept",
    "kept_of",
    "kept_others",
    "load",
    "make",
    "markdown",
    "paper",
    "resolve",
    "shelf",
    "write",
]

UNBEGUN, FINISHED = "not begun", "finished"
LOST = "unfinished, no checkpoints"  # nothing to go on from


@dataclass(frozen=True)
class Run:
    """A run that a table needs, and which of its cells, by row and column, are evaluations of it. metrics: what of an
    evaluation is shown, where that is not top1."""

    source: str
    changes: dict[str, str]
    folder: Path
    wanted: Recipe
    cells: dict[tuple[str, str], Cell]
    metrics: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What trains it, to be typed in or given to a cluster."""
        changes = [word for key, value in self.changes.items() for word in (f"--{key}", value)]
        return shlex.join(["parapos", "train", self.source, "--out", str(self.folder), *changes])

    def state(self) -> str:
        """not begun, step n of N, unfinished, or finished: its last epoch was validated. A run of another recipe in the
        same folder is an error."""
        if not (self.folder / "recipe.toml").is_file():
            return UNBEGUN
        if change := recipe.difference(fit.load_run(self.folder), self.wanted):
            raise ReportError(f"{self.folder}: holds a run of another recipe ({change}); take another --root")
        found = checkpoint.latest(self.folder / "checkpoints")[0]
        epochs = self.wanted.optim.epochs
        if found is None:  # they may be removed once a run is finished
            told = rows.read(self.folder / "metrics.csv", whole=["epoch"], needed=["epoch"], growing=True)
            if any(row["epoch"] == epochs and row.get("val_loss") for row in told):
                return FINISHED if (self.folder / "weights.safetensors").is_file() else LOST
            return LOST if told else UNBEGUN
        _, done, samples = state.load(found)
        if done.validated == epochs:
            return FINISHED
        return f"step {done.step} of {-(-samples // self.wanted.optim.batch) * epochs}"

    def shown(self, place: tuple[str, str], value: dict[str, float]) -> dict[str, float] | None:
        """An evaluation with what its column shows as top1, and the size of training as "trained"; None if it does not
        have what is shown."""
        metric = self.metrics.get(place, "top1")
        trained = float(self.wanted.data.size)
        return {**value, "top1": value[metric], "trained": trained} if metric in value else None


def check_rows(table: Table, only: Sequence[str]) -> None:
    for name in only:
        if name not in table.rows:
            known = list(table.rows)
            raise ReportError(
                f"--only: unknown row {name!r}, expected some of {', '.join(known)}{nearest(name, known)}"
            )
        if list(only).count(name) > 1:
            raise ReportError(f"--only: expected each row once, got {name} twice")


def check_changes(table: Table, changes: Mapping[str, str], only: Sequence[str] = ()) -> None:
    """A change for all runs may not undo what makes a row or a column."""
    own = {key for row, spec in table.rows.items() if not only or row in only for key in spec.changes}
    if any(column.folds for column in table.columns.values()):
        own.add("data.options.fold")
    if table.seeds:
        own.add("run.seed")
    for key in sorted(own & set(changes)):
        raise ReportError(f"--{key}: expected nothing, the table {table.name} sets it run by run")


def resolve(table: Table, root: Path, changes: Mapping[str, str], only: Sequence[str] = ()) -> list[Run]:
    """The runs of a table, in the order of its rows. changes: for all of them. only: some rows."""
    check_rows(table, only)
    check_changes(table, changes, only)
    runs: dict[Path, Run] = {}
    for row, spec in table.rows.items():
        for name, column in table.columns.items():
            if (only and row not in only) or not column.measured or row in column.without:
                continue
            source = spec.recipe or column.recipe or table.recipe
            source = spec.instead.get(source, source)
            for fold in column.folds or (None,):
                folder = root / f"{Path(source).stem}-{row}{'' if fold is None else f'-fold{fold}'}"
                if folder not in runs:
                    both = {**spec.changes, **changes}
                    if fold is not None:
                        both["data.options.fold"] = str(fold)
                    if column.root and "data.root" in both:
                        both["data.root"] = str(Path(both["data.root"]) / column.root)
                    runs[folder] = Run(source, both, folder, recipe.load(source, both), {})
                runs[folder].cells[row, name] = column.cell(row, runs[folder].wanted.data.size)
                if column.metric != "top1":
                    runs[folder].metrics[row, name] = column.metric
    for run in runs.values():
        check_cells(table, run)
    return list(runs.values())


def check_cells(table: Table, run: Run) -> None:
    """Whether the model of a run can take the sizes of its cells."""
    other = {cell.size for cell in run.cells.values()} - {run.wanted.data.size}
    if other:
        check_sizes(f"{table.name}: {run.folder.name}", run.wanted, sorted(other))


Found = dict[tuple[str, str], dict[str, float]]


def kept_of(run: Run) -> Found:
    """The cells of a run that were evaluated before, if it is finished and its recipe is the wanted one."""
    if not (run.folder / "weights.safetensors").is_file() or run.state() != FINISHED:
        return {}
    cells, found = Cells(run.folder), {}
    for place, cell in run.cells.items():
        value = cells.get(cell)
        if value is not None and (told := run.shown(place, value)) is not None:
            found[place] = told
    return found


def kept(runs: Sequence[Run]) -> Found:
    """The cells of which every run has been evaluated before."""
    return _whole(runs, {run.folder: kept_of(run) for run in runs})


def kept_others(table: Table, root: Path, changes: Mapping[str, str], only: Sequence[str]) -> Found:
    """The cells of the rows that are not asked for. One that the changes make impossible has none."""
    found: Found = {}
    for row in table.rows if only else ():
        if row not in only:
            with contextlib.suppress(RecipeError, ReportError):
                found |= kept(resolve(table, root, changes, [row]))
    return found


def _whole(runs: Sequence[Run], parts: Mapping[Path, Found]) -> Found:
    """Cells by place; where a cell has several runs, the means over them and "std", the spread of top1."""
    found: Found = {}
    for place in dict.fromkeys(place for run in runs for place in run.cells):
        values = [parts[run.folder].get(place) for run in runs if place in run.cells]
        there = [value for value in values if value is not None]
        if len(there) < len(values):
            continue
        found[place] = there[0]
        if len(there) > 1:
            mean = {name: statistics.fmean(value[name] for value in there) for name in there[0]}
            spread = statistics.stdev(value["top1"] for value in there)
            found[place] = {**mean, "samples": sum(value["samples"] for value in there), "std": spread}
    return found


def make(
    table: Table, runs: Sequence[Run], root: Path, tell: Callable[[str], object], others: Found | None = None
) -> Found:
    """Trains what is not trained, evaluates what is not evaluated, and writes the table after every run, with the cells
    of `others`, which are not asked for."""
    parts = {run.folder: kept_of(run) for run in runs}
    for run in runs:
        missing = [place for place in run.cells if place not in parts[run.folder]]
        if not missing:
            tell(f"{run.folder}: all of its {len(run.cells)} cells are there")
            continue
        if (state := run.state()) != FINISHED:
            tell(f"{run.folder}: {state}, training")
            tell(fit.train(run.wanted, run.folder))
        cells = Cells(run.folder)
        for place in missing:
            value = run.shown(place, cells.measure(run.cells[place], root=run.wanted.data.root))
            if value is None:
                told = f"expected {run.metrics[place]}, which {run.cells[place].data or run.wanted.data.name} has not"
                raise ReportError(f"{run.folder}: {', '.join(place)}: {told}, or not yet when {cells.path} was written")
            parts[run.folder][place] = value
            tell(f"{run.folder.name}, {', '.join(place)}: {run.metrics.get(place, 'top-1')} {value['top1']:.2%}")
        if fit.is_first():
            write(table, {**(others or {}), **_whole(runs, parts)}, root)
    return _whole(runs, parts)


def markdown(table: Table, found: Found, only: Sequence[str] = ()) -> str:
    """Ours, and the paper's in parentheses."""
    lines = []
    for row in only or table.rows:
        cells = [row]
        for column in table.columns:
            ours, theirs = found.get((row, column)), table.published(row, column)
            told = UNMEASURED if ours is None else f"{100 * ours['top1']:.1f}"
            if ours is not None and "std" in ours:
                told += f" ± {100 * ours['std']:.1f}"
            if ours is not None and table.columns[column].count:
                told += f" = {round(ours['top1'] * ours['samples'])}/{round(ours['samples'])}"
            cells.append(f"{told} ({UNMEASURED if theirs is None else f'{theirs:.1f}'})")
        lines.append(cells)
    measured = sum(1 for row, _ in found if row in (only or table.rows))
    total = len(only or table.rows) * len(table.columns)
    legend = f"In %, the paper's figure in parentheses; {UNMEASURED}: not measured. Measured: {measured} of {total}."
    return "\n\n".join([table.title, as_text(["", *table.columns], lines), legend, *comparison(table, found)])


def comparison(table: Table, found: Found) -> list[str]:
    """The tests of [compare], on the paper's figures and on ours as far as there are any."""
    if not table.compare:
        return []
    rows, columns = table.compare["rows"], table.compare["columns"]
    out = []
    for whose in ("paper", "ours"):
        scores = []
        for row in rows:
            ours = [found.get((row, column)) for column in columns]
            if whose == "ours":
                scores.append([None if x is None else 100 * x["top1"] for x in ours])
            else:
                scores.append([table.published(row, column) for column in columns])
        a, b = ([x for x in some if x is not None] for some in scores)
        if len(a) == len(b) == len(columns):
            names = (plots.NAMES.get(rows[0], rows[0]), plots.NAMES.get(rows[1], rows[1]))
            out.append(f"{whose.capitalize()}, over {', '.join(columns)}:\n\n{significance.table(a, b, names)}")
    return out


def write(table: Table, found: Found, root: Path) -> list[Path]:
    """ROOT/tables/NAME.md and .csv, and a plot of what was measured if the columns are resolutions."""
    base = root / "tables"
    paths = [base / f"{table.name}.{end}" for end in ("md", "csv")]
    checkpoint.write(paths[0], f"{markdown(table, found)}\n".encode())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "top1_percent", "paper_percent", "samples"])
    for row in table.rows:
        for column in table.columns:
            ours = found.get((row, column))
            told = ["", ""] if ours is None else [100 * ours["top1"], round(ours["samples"])]
            writer.writerow([row, column, told[0], table.published(row, column), told[1]])
    checkpoint.write(paths[1], text.getvalue().encode())
    sizes = [column.size for column in table.columns.values() if column.size]
    if found and len(sizes) == len(table.columns) > 1:
        lines = []
        for row, spec in table.rows.items():
            values = [100 * x["top1"] if (x := found.get((row, column))) else None for column in table.columns]
            encoding = spec.changes.get("model.encoding", "pape")
            lines.append(plots.Line(plots.NAMES[row] if row in ENCODINGS else row, encoding, values))
        trained = round(next(iter(found.values()))["trained"])
        paths.append(base / f"{table.name}.png")
        plots.curves(paths[-1], sizes, lines, trained=trained, title=table.title, ylabel="top-1 accuracy, %")
    return paths
