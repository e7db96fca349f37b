"""What a table is: a TOML file, read into typed dataclasses and checked key by key, as recipes are.

The keys are the fields of `Table`. `seeds` and [blocks] make a study: the same grid for every seed and each data set,
shown as mean and spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from .. import recipes
from ..data import DATASETS
from ..training import recipe
from ..training.schema import INTERNAL, Bad, make_section, need, need_known
from .store import Evaluation, ReportError

Count = Annotated[int, 0]
Positive = Annotated[int, 1]


@dataclass(frozen=True, kw_only=True)
class Column:
    """An evaluation. size: 0 for that of training. interpolate: true or false, or the rows for which it is true.
    recipe: if another one. metric: what is shown, "" for the headline of the task; "ap_*" is the first that fits.
    loss_at: instead, the training loss at that step. folds: of the data, the cell is the mean over runs of these; none
    leaves the choice to the recipe. root: a folder within --data.root. count: show how many are right, too. without:
    rows that have no cell. mean_of: columns whose figures a row must all have: the cell is their mean, and nothing is
    run for it."""

    size: Count = 0
    data: str = ""
    interpolate: bool | tuple[str, ...] = False
    recipe: str = ""
    split: str = "test"
    metric: str = ""
    loss_at: Count = 0
    folds: tuple[Count, ...] = ()
    root: str = ""
    count: bool = False
    without: tuple[str, ...] = ()
    mean_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_known("split", self.split, ["train", "val", "test"])
        is_alone = not self.mean_of or replace(self, mean_of=()) == Column()
        need("mean_of", is_alone, "no other key beside it", self.mean_of)

    def evaluation(self, row: str, trained: int) -> Evaluation:
        """What is evaluated for a row."""
        interpolated = self.interpolate if isinstance(self.interpolate, bool) else row in self.interpolate
        if self.size and not trained:
            raise ReportError(f"size: expected none, as the model is not trained on squares, got {self.size}")
        size = self.size or trained
        return Evaluation(size, trained / size if interpolated and size else 1.0, self.data, self.split)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row changes in the recipe, which may be one of its own. instead: another recipe for some of those that
    columns name. encoding: whose colour its curve has, if not that of its name. dashed: how it is drawn."""

    recipe: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)
    encoding: str = field(default="", metadata=INTERNAL)
    dashed: bool = field(default=False, metadata=INTERNAL)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The options of `bench.model.run`."""

    model: str
    encodings: tuple[str, ...]
    parabolas: tuple[Positive, ...]
    sizes: tuple[Positive, ...]
    batch: Positive
    seconds: Annotated[float, 0]
    rounds: Positive = 30


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Two rows, and two or more columns whose figures are tested for a difference."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        need("rows", len(self.rows) == 2, "two", self.rows)
        need("columns", len(self.columns) > 1, "two or more", self.columns)


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    name: str = field(default="", metadata=INTERNAL)  # that of its file
    recipe: str = ""
    paper: str = ""  # a section of recipes/published/tables.toml
    rows: dict[str, Row] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    bench: Bench | None = None  # of the table that trains nothing
    seeds: tuple[Count, ...] = ()
    blocks: dict[str, str] = field(default_factory=dict)  # recipes by the name of what they train on
    minutes: Annotated[float, 0] = 0.0  # of one core for a run, as measured
    compare: Compare | None = None
    choose: str = ""  # the column by which a row is chosen

    def __post_init__(self) -> None:
        for key in ("rows", "blocks"):
            for name in getattr(self, key):  # of folders and files
                good = name not in ("", ".", "..") and not set(name) & set("/\\\0")
                need(f"{key}.{name!r}", good, "a name without slashes, as files have it", name)
        if any(column.data and column.data not in DATASETS for column in self.columns.values()):
            for source in filter(None, [self.recipe, *self.blocks.values()]):
                recipe.load(source)  # its plug-ins may bring the data set
        named: dict[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {}  # what names what, by key
        named |= {"paper": ((self.paper,), recipes.paper()), "choose": ((self.choose,), self.columns)}
        for name, column in self.columns.items():
            drawn_in = () if isinstance(column.interpolate, bool) else column.interpolate
            named |= {f"columns.{name}.interpolate": (drawn_in, self.rows)}
            named |= {f"columns.{name}.without": (column.without, self.rows)}
            named |= {f"columns.{name}.data": ((column.data,), DATASETS)}
            plain = {other: one for other, one in self.columns.items() if not one.mean_of}
            named |= {f"columns.{name}.mean_of": (column.mean_of, plain)}
            for key, is_good in (("loss_at", self.seeds), ("recipe", not self.seeds)):
                how = f"in a table {'with' if key == 'loss_at' else 'without'} seeds only"
                need(f"columns.{name}.{key}", bool(is_good or not getattr(column, key)), how, getattr(column, key))
        if self.compare is not None:
            named |= {"compare.rows": (self.compare.rows, self.rows)}
            named |= {"compare.columns": (self.compare.columns, self.columns)}
        for key, (names, known) in named.items():
            for name in filter(None, names):
                need_known(key, name, list(known))

    def published(self, row: str, column: str) -> float | None:
        """The paper's figure, if it has one."""
        return recipes.published(self.paper, row, column)


def load(source: str | Path) -> Table:
    """A table by path, or by name if it comes with the package."""
    try:
        path = recipes.find(source, "tables", "table")
        values = recipes.read(path)
    except (LookupError, ValueError) as error:
        raise ReportError(str(error)) from None
    try:
        if isinstance(rows := values.get("rows"), dict):
            values["rows"] = {name: _row(f"rows.{name}", row) for name, row in rows.items()}
        table: Table = make_section(Table, values)
    except Bad as bad:
        raise ReportError(f"{path.name}: {bad.key}: {bad.message}") from None
    if not table.bench and not {"blocks" if table.seeds else "recipe", "rows", "columns"} <= set(values):
        raise ReportError(f"{path.name}: expected [bench], or [rows], [columns] and recipe, with seeds [blocks]")
    return replace(table, name=path.stem)


def _row(where: str, values: Any) -> Any:
    """What a file says of a row, with all changes of the recipe as texts in a table of their own."""
    if not isinstance(values, dict):
        return values
    row: dict[str, Any] = {key: value for key, value in values.items() if key in ("recipe", "instead")}
    row["changes"] = {}
    for key, value in values.items():
        if key not in row:
            need(f"{where}.{key}", isinstance(value, str | bool | int | float | list), "a value of the recipe", value)
            row["changes"][key] = value if isinstance(value, str) else str(value).lower()
    return row
