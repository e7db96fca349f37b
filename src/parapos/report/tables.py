"""The paper's tables as grids: rows are runs, columns are evaluations, the paper's figure stands beside each of ours.

A table is a TOML file: `title`, `recipe`, `paper` (a section of paper.toml), [rows] with what each changes in it, and
[columns] with what each evaluates: size, data, interpolate (true, or the rows for which it is), recipe if another one,
measured = false for figures that only the paper has. A run is the folder ROOT/RECIPE-ROW, so tables share runs with one
another and with `parapos train`; its cells are kept there, so a table that was killed goes on where it was.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..encodings import ENCODINGS, nearest
from ..training import checkpoint, fit, recipe
from ..training.recipe import Recipe
from . import plots
from .sweep import UNMEASURED, Cell, Cells, ReportError
from .text import table as as_text

UNBEGUN, FINISHED = "not begun", "finished"


@dataclass(frozen=True, kw_only=True)
class Column:
    """An evaluation. size: None for that of training. interpolate: true or false, or the rows for which it is true."""

    size: int | None = None
    data: str = ""
    interpolate: bool | tuple[str, ...] = False
    recipe: str = ""
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row changes in the recipe, which may be one of its own."""

    recipe: str = ""
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

    def published(self, row: str, column: str) -> float | None:
        """The paper's figure, if it has one."""
        section = paper().get(self.paper, {"columns": [], "rows": {}})
        figures = dict(zip(section["columns"], section["rows"].get(row, ()), strict=False))
        return figures.get(column)


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
    _known(path, "", values, ["title", "recipe", "paper", "rows", "columns", "bench"])
    if "title" not in values or not ("bench" in values or {"recipe", "rows", "columns"} <= set(values)):
        raise ReportError(f"{path.name}: expected title, and either [bench] or recipe, [rows] and [columns]")
    rows = {}
    for name, row in values.pop("rows", {}).items():
        changes = {key: value if isinstance(value, str) else str(value).lower() for key, value in row.items()}
        rows[name] = Row(recipe=changes.pop("recipe", ""), changes=changes)
    columns = {}
    for name, column in values.pop("columns", {}).items():
        _known(path, f"columns.{name}.", column, list(Column.__dataclass_fields__))
        some = column.get("interpolate", False)
        for row in some if isinstance(some, list) else ():
            _known(path, f"columns.{name}.interpolate: ", {row: None}, list(rows))
        columns[name] = Column(**{**column, "interpolate": tuple(some) if isinstance(some, list) else some})
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


def resolve(table: Table, root: Path, changes: Mapping[str, str], only: Sequence[str] = ()) -> list[Run]:
    """The runs of a table, in the order of its rows. changes: for all of them. only: some rows."""
    for name in only:
        if name not in table.rows:
            known = list(table.rows)
            raise ReportError(
                f"--only: unknown row {name!r}, expected some of {', '.join(known)}{nearest(name, known)}"
            )
    runs: dict[Path, Run] = {}
    for row, spec in table.rows.items():
        for name, column in table.columns.items():
            if (only and row not in only) or not column.measured:
                continue
            source = spec.recipe or column.recipe or table.recipe
            folder = root / f"{Path(source).stem}-{row}"
            if folder not in runs:
                both = {**spec.changes, **changes}
                runs[folder] = Run(source, both, folder, recipe.load(source, both), {})
            trained = runs[folder].wanted.data.size
            interpolated = column.interpolate if isinstance(column.interpolate, bool) else row in column.interpolate
            size = column.size or trained
            cell = Cell.at(size, trained=trained, interpolated=interpolated, data=column.data)
            runs[folder].cells[row, name] = cell
    return list(runs.values())


Found = dict[tuple[str, str], dict[str, float]]


def kept(runs: Sequence[Run]) -> Found:
    """The cells that were evaluated before, of runs whose recipe is the wanted one."""
    found: Found = {}
    for run in runs:
        if not (run.folder / "weights.safetensors").is_file() or run.state() != FINISHED:
            continue
        cells = Cells(run.folder)
        found.update({place: value for place, cell in run.cells.items() if (value := cells.get(cell)) is not None})
    return found


def make(table: Table, runs: Sequence[Run], root: Path, tell: Callable[[str], object]) -> Found:
    """Trains what is not trained, evaluates what is not evaluated, and writes the table after every run."""
    found = kept(runs)
    for run in runs:
        missing = [place for place in run.cells if place not in found]
        if not missing:
            tell(f"{run.folder}: all of its {len(run.cells)} cells are there")
            continue
        if (state := run.state()) != FINISHED:
            tell(f"{run.folder}: {state}, training")
            tell(fit.train(run.wanted, run.folder))
        cells = Cells(run.folder)
        for place in missing:
            found[place] = cells.measure(run.cells[place])
            tell(f"{', '.join(place)}: top-1 {found[place]['top1']:.2%}")
        if fit.is_first():
            write(table, found, root)
    return found


def markdown(table: Table, found: Found, only: Sequence[str] = ()) -> str:
    """Ours, and the paper's in parentheses."""
    lines = []
    for row in only or table.rows:
        cells = [row]
        for column in table.columns:
            ours, theirs = found.get((row, column)), table.published(row, column)
            told = UNMEASURED if ours is None else f"{100 * ours['top1']:.1f}"
            cells.append(f"{told} ({UNMEASURED if theirs is None else f'{theirs:.1f}'})")
        lines.append(cells)
    measured = sum(1 for row, _ in found if row in (only or table.rows))
    total = len(only or table.rows) * len(table.columns)
    legend = f"In %, the paper's figure in parentheses; {UNMEASURED}: not measured. Measured: {measured} of {total}."
    return f"{table.title}\n\n{as_text(['', *table.columns], lines)}\n\n{legend}"


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
            told = ["", ""] if ours is None else [100 * ours["top1"], int(ours["samples"])]
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
