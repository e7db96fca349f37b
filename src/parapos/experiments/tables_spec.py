"""What a table is: a TOML file, read into typed dataclasses and checked key by key.

The keys are `title`, `recipe`, `paper` (a section of recipes/published/tables.toml), [rows] with what each changes in
the recipe, and [columns] with what each evaluates: size, data, interpolate (true, or the rows for which it is), recipe
if another one, split, metric if not the headline of the task ("ap_*" is the first that fits), measured = false for
figures that only the paper has, folds (then a cell is the mean over runs of these), root (a folder within --data.root).
[compare] names two rows, and columns whose figures are tested for a difference; `choose` is the column by which a row
is best. [bench] has the options of a table that trains nothing.
`seeds` and [blocks] make a study: the same grid for every seed and each data set, shown as mean and spread; `minutes`
is what a run takes, and a column may be `loss_at` a step of training.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from ..data import DATASETS
from ..text import nearest
from ..training import recipe
from .store import Evaluation, ReportError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Column:
    """An evaluation. size: None for that of training. interpolate: true or false, or the rows for which it is true.
    metric: what is shown, "" for the headline of the task. loss_at: instead, the training loss at that step. folds: of
    the data; none leaves the choice to the recipe. root: a folder within the one that is given for all. count: show how
    many are right, too. without: rows that have no cell."""

    size: int | None = None
    data: str = ""
    interpolate: bool | tuple[str, ...] = False
    recipe: str = ""
    split: str = "test"
    metric: str = ""
    measured: bool = True
    loss_at: int = 0
    folds: tuple[int, ...] = ()
    root: str = ""
    count: bool = False
    without: tuple[str, ...] = ()

    def evaluation(self, row: str, trained: int) -> Evaluation:
        """What is evaluated for a row."""
        interpolated = self.interpolate if isinstance(self.interpolate, bool) else row in self.interpolate
        size = self.size or trained
        if not size:
            return Evaluation(data=self.data, split=self.split)
        if not trained:
            raise ReportError(f"size: expected none, as the model is not trained on squares, got {size}")
        return Evaluation.at(size, trained=trained, interpolated=interpolated, data=self.data, split=self.split)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row changes in the recipe, which may be one of its own. instead: another recipe for some of those that
    columns name. dashed: how its curve is drawn; no key of files."""

    recipe: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)
    dashed: bool = False


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
    choose: str = ""  # the column by which a row is chosen

    def published(self, row: str, column: str) -> float | None:
        """The paper's figure, if it has one."""
        section = paper().get(self.paper, {"columns": [], "rows": {}})
        figures = dict(zip(section["columns"], section["rows"].get(row, ()), strict=False))
        figure = figures.get(column)
        return None if figure is None or math.isnan(figure) else figure


@cache
def paper() -> dict[str, Any]:
    """The published figures, by section: names of columns, and a list per row."""
    file = resources.files("parapos") / "recipes" / "published" / "tables.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


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
    return _make(path, values)


Kind = tuple[Callable[[Any], bool], str]  # whether a value is one, and what it should be


def _list(each: Kind, expected: str) -> Kind:
    return (lambda x: isinstance(x, list) and all(map(each[0], x)) and len(set(x)) == len(x)), f"a list of {expected}"


def _table(each: Kind, expected: str) -> Kind:
    return (lambda x: isinstance(x, dict) and all(map(each[0], x.values()))), f"a table of {expected}"


def _one(known: tuple[str, ...]) -> Kind:
    return (lambda x: isinstance(x, str) and x in known), f"one of {', '.join(filter(None, known))}"


TEXT: Kind = (lambda x: isinstance(x, str)), "a text"
FLAG: Kind = (lambda x: isinstance(x, bool)), "true or false"
COUNT: Kind = (lambda x: type(x) is int and x >= 0), "a whole number of 0 or more"
SIZE: Kind = (lambda x: type(x) is int and x >= 1), "a whole number of 1 or more"
TIME: Kind = (lambda x: type(x) in (int, float) and 0 <= x < math.inf), "a number of 0 or more"
ANY: Kind = (lambda x: True), "anything"
TEXTS, NUMBERS = _list(TEXT, "different texts"), _list(COUNT, "different whole numbers of 0 or more")
TABLE: Kind = (lambda x: isinstance(x, dict)), "a table"
KINDS: dict[Any, Kind] = {
    **{str: TEXT, bool: FLAG, int: COUNT, int | None: SIZE, float: TIME},
    **{tuple[str, ...]: TEXTS, tuple[int, ...]: NUMBERS, dict[str, str]: _table(TEXT, "recipes")},
    dict[str, list[str]]: _table(TEXTS, "lists of different texts"),
}
KEYS, COLUMN = ({key: KINDS.get(t, TABLE) for key, t in get_type_hints(cls).items()} for cls in (Table, Column))
COLUMN["interpolate"] = (lambda x: FLAG[0](x) or TEXTS[0](x)), "true, false or a list of different rows"
COLUMN["split"] = _one(SPLITS)
BENCH: dict[str, Kind] = {
    "model": TEXT,
    "encodings": TEXTS,
    "parabolas": NUMBERS,
    "sizes": NUMBERS,
    "batch": SIZE,
    "seconds": TIME,
    "rounds": SIZE,
}
ROW: dict[str, Kind] = {"recipe": TEXT, "instead": _table(TEXT, "recipes")}
CHANGE: Kind = (lambda x: isinstance(x, (str, bool, int, float, list))), "a value of the recipe"


def _check(path: Path, where: str, values: Mapping[str, Any], kinds: Mapping[str, Kind], other: Kind = ANY) -> None:
    for key, value in values.items():
        is_good, expected = kinds.get(key, other)
        if not is_good(value):
            raise ReportError(f"{path.name}: {where}{key}: expected {expected}, got {value!r}")


def _make(path: Path, values: dict[str, Any]) -> Table:
    _known(path, "", values, [name for name in Table.__dataclass_fields__ if name != "name"])
    _check(path, "", values, {**KEYS, "paper": _one(("", *paper()))})
    for key in ("rows", "columns"):
        _check(path, f"{key}.", values.get(key, {}), {}, TABLE)
    for key in ("rows", "blocks"):  # their names are those of folders and files
        for name in values.get(key, {}):
            if name in ("", ".", "..") or set(name) & set("/\\\0"):
                raise ReportError(f"{path.name}: {key}.{name!r}: expected a name without slashes, as files have it")
    needed = {"blocks" if "seeds" in values else "recipe", "rows", "columns"}
    if "title" not in values or not ("bench" in values or needed <= set(values)):
        message = "either [bench] or recipe, [rows] and [columns], with seeds [blocks] instead of recipe"
        raise ReportError(f"{path.name}: expected title, and {message}")
    _known(path, "bench.", values.get("bench", {}), list(BENCH))
    _check(path, "bench.", values.get("bench", {}), BENCH)
    for key in BENCH if "bench" in values else ():
        if key not in values["bench"] and key != "rounds":
            raise ReportError(f"{path.name}: bench.{key}: missing")
    values["seeds"] = tuple(values.get("seeds", ()))
    rows = {}
    for name, row in values.pop("rows", {}).items():
        _check(path, f"rows.{name}.", row, ROW, CHANGE)
        instead = row.pop("instead", {})
        changes = {key: value if isinstance(value, str) else str(value).lower() for key, value in row.items()}
        rows[name] = Row(recipe=changes.pop("recipe", ""), instead=instead, changes=changes)
    columns = {}
    for name, column in values.pop("columns", {}).items():
        _known(path, f"columns.{name}.", column, list(Column.__dataclass_fields__))
        _check(path, f"columns.{name}.", column, COLUMN)
        if column.get("data", "") not in ("", *DATASETS):
            for source in filter(None, [values.get("recipe"), *values.get("blocks", {}).values()]):
                recipe.load(source)  # its plug-ins may bring the data set
        _check(path, f"columns.{name}.", column, {"data": _one(("", *DATASETS))})
        for key in ("interpolate", "without"):
            some = column.get(key, [])
            _known(path, f"columns.{name}.{key}: ", dict.fromkeys(some if isinstance(some, list) else ()), list(rows))
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in column.items()}
        columns[name] = Column(**fields)
        if columns[name].loss_at and not values["seeds"]:
            raise ReportError(f"{path.name}: columns.{name}.loss_at: expected in a table with seeds only")
        if "recipe" in column and values["seeds"]:
            raise ReportError(f"{path.name}: columns.{name}.recipe: expected in a table without seeds only")
    _known(path, "choose: ", dict.fromkeys(filter(None, [values.get("choose")])), list(columns))
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
