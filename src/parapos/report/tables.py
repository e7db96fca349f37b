"""The paper's tables as grids: rows are runs, columns are evaluations, the paper's figure stands beside each of ours.

A table is a TOML file: `title`, `recipe`, `paper` (a section of paper.toml), [rows] with what each changes in it, and
[columns] with what each evaluates: size, data, interpolate (true, or the rows for which it is), recipe if another one,
split, measured = false for figures that only the paper has, folds (then a cell is the mean over runs of these), root (a
folder within --data.root). A run is the folder ROOT/RECIPE-ROW, with -foldN after it, so tables share runs with one
another and with `parapos train`; its cells are kept there, so a table that was killed goes on where it was.
[compare] names two rows, and columns whose figures are tested for a difference. A table with `seeds` is of the kind
that tables_seeds.py makes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..encodings import ENCODINGS, nearest
from ..metrics import significance
from ..training import checkpoint, fit, recipe
from ..training.recipe import Recipe, RecipeError
from . import plots
from .sweep import UNMEASURED, Cell, Cells, ReportError
from .text import table as as_text

UNBEGUN, FINISHED = "not begun", "finished"


@dataclass(frozen=True, kw_only=True)
class Column:
    """An evaluation. size: None for that of training. interpolate: true or false, or the rows for which it is true.
    loss_at: instead, the training loss at that step. folds: of the data; none leaves the choice to the recipe. root: a
    folder within the one that is given for all. count: show how many are right, too.
    without: rows that have no cell."""

    size: int | None = None
    data: str = ""
    interpolate: bool | tuple[str, ...] = False
    recipe: str = ""
    split: str = "test"
    measured: bool = True
    loss_at: int = 0
    folds: tuple[int, ...] = ()
    root: str = ""
    count: bool = False
    without: tuple[str, ...] = ()

    def cell(self, row: str, trained: int) -> Cell:
        """What is evaluated for a row."""
        interpolated = self.interpolate if isinstance(self.interpolate, bool) else row in self.interpolate
        size = self.size or trained
        return Cell.at(size, trained=trained, interpolated=interpolated, data=self.data, split=self.split)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row changes in the recipe, which may be one of its own. instead: another recipe for some of those that
    columns name."""

    recipe: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    title: str
    recipe: str = ""
    paper: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)  # of `bench_model.run`, for the table that trains nothing
    seeds: tuple[int, ...] = ()
    blocks: dict[str, str] = field(default_factory=dict)  # recipes by the name of what they train on
    minutes: float = 0.0  # of one core for a run, as measured
    compare: dict[str, list[str]] = field(default_factory=dict)  # rows (two) and columns (two or more)

    def published(self, row: str, column: str) -> float | None:
        """The paper's figure, if it has one."""
        section = paper().get(self.paper, {"columns": [], "rows": {}})
        figures = dict(zip(section["columns"], section["rows"].get(row, ()), strict=False))
        figure = figures.get(column)
        return None if figure is None or math.isnan(figure) else figure


@cache
def paper() -> dict[str, Any]:
    """The published figures, by section: names of columns, and a list per row."""
    return tomllib.loads((resources.files(__package__) / "paper.toml").read_text(encoding="utf-8"))


def shelf() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    folder = Path(str(resources.files("parapos") / "recipes" / "tables"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(source: str | Path) -> Table:
    """A table by path, or by name if it comes with the package."""
    path = Path(source)
    if path.suffix != ".toml":
        known = shelf()
        if str(source) not in known:
            hint = nearest(str(source), list(known))
            raise ReportError(
                f"unknown table {str(source)!r}, expected a .toml file or one of {', '.join(known)}{hint}"
            )
        path = known[str(source)]
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path.name}: not TOML: {error}") from None
    _known(path, "", values, [name for name in Table.__dataclass_fields__ if name != "name"])
    needed = {"blocks" if "seeds" in values else "recipe", "rows", "columns"}
    if "title" not in values or not ("bench" in values or needed <= set(values)):
        told = "either [bench] or recipe, [rows] and [columns], with seeds [blocks] instead of recipe"
        raise ReportError(f"{path.name}: expected title, and {told}")
    values["seeds"] = tuple(values.get("seeds", ()))
    rows = {}
    for name, row in values.pop("rows", {}).items():
        instead = row.pop("instead", {})
        changes = {key: value if isinstance(value, str) else str(value).lower() for key, value in row.items()}
        rows[name] = Row(recipe=changes.pop("recipe", ""), instead=instead, changes=changes)
    columns = {}
    for name, column in values.pop("columns", {}).items():
        _known(path, f"columns.{name}.", column, list(Column.__dataclass_fields__))
        for key in ("interpolate", "without"):
            some = column.get(key, [])
            _known(path, f"columns.{name}.{key}: ", dict.fromkeys(some if isinstance(some, list) else ()), list(rows))
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in column.items()}
        columns[name] = Column(**fields)
        if columns[name].loss_at and not values["seeds"]:
            raise ReportError(f"{path.name}: columns.{name}.loss_at: expected in a table with seeds only")
    compare = values.get("compare", {})
    _known(path, "compare.", compare, ["rows", "columns"])
    for key, names in (("rows", list(rows)), ("columns", list(columns))) if compare else ():
        _known(path, f"compare.{key}: ", dict.fromkeys(compare.get(key, ())), names)
        if len(compare.get(key, ())) < 2 or (key == "rows" and len(compare[key]) > 2):
            raise ReportError(f"{path.name}: compare.{key}: expected {'two' if key == 'rows' else 'two or more'}")
    return Table(name=path.stem, rows=rows, columns=columns, **values)


def _known(path: Path, where: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise ReportError(f"{path.name}: {where}{key}: expected one of {', '.join(known)}{nearest(key, known)}")


@dataclass(frozen=True)
class Run:
    """A run that a table needs, and which of its cells, by row and column, are evaluations of it."""

    source: str
    changes: dict[str, str]
    folder: Path
    wanted: Recipe
    cells: dict[tuple[str, str], Cell]

    @property
    def command(self) -> str:
        """What trains it, to be typed in or given to a cluster."""
        told = " ".join(f"--{key} {value}" for key, value in self.changes.items())
        return f"parapos train {self.source} --out {self.folder} {told}".rstrip()

    def state(self) -> str:
        """not begun, step n of N, or finished. A run of another recipe in the same folder is an error."""
        if not (self.folder / "recipe.toml").is_file():
            return UNBEGUN
        if change := recipe.difference(fit.load_run(self.folder), self.wanted):
            raise ReportError(f"{self.folder}: holds a run of another recipe ({change}); take another --root")
        found = checkpoint.latest(self.folder / "checkpoints")[0]
        if found is None:
            return FINISHED if (self.folder / "weights.safetensors").is_file() else UNBEGUN
        state = checkpoint.load(found)
        done, samples = state["parapos"]["progress"], state["parapos"]["samples"]
        if done["validated"] == self.wanted.optim.epochs:
            return FINISHED
        return f"step {done['step']} of {-(-samples // self.wanted.optim.batch) * self.wanted.optim.epochs}"


def check_rows(table: Table, only: Sequence[str]) -> None:
    for name in only:
        if name not in table.rows:
            known = list(table.rows)
            raise ReportError(
                f"--only: unknown row {name!r}, expected some of {', '.join(known)}{nearest(name, known)}"
            )


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
    return list(runs.values())


Found = dict[tuple[str, str], dict[str, float]]


def kept_of(run: Run) -> Found:
    """The cells of a run that were evaluated before, if it is finished and its recipe is the wanted one."""
    if not (run.folder / "weights.safetensors").is_file() or run.state() != FINISHED:
        return {}
    cells = Cells(run.folder)
    return {place: value for place, cell in run.cells.items() if (value := cells.get(cell)) is not None}


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
            parts[run.folder][place] = value = cells.measure(run.cells[place])
            tell(f"{run.folder.name}, {', '.join(place)}: top-1 {value['top1']:.2%}")
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
            names = (plots.NAMES[rows[0]], plots.NAMES[rows[1]])
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
        trained = recipe.load(table.recipe).data.size
        paths.append(base / f"{table.name}.png")
        plots.curves(paths[-1], sizes, lines, trained=trained, title=table.title, ylabel="top-1 accuracy, %")
    return paths
