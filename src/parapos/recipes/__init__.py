"""What is on the shelf: recipes, tables, and the figures of the paper."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from ..text import nearest

HERE = Path(__file__).parent


def shelf(folder: str = ".") -> dict[str, Path]:
    """The TOML files of a folder that comes with the package, by name."""
    return {path.stem: path for path in sorted((HERE / folder).glob("*.toml"))}


def find(source: str | Path, folder: str = ".", what: str = "recipe") -> Path:
    """A path that ends in .toml as it is, or the file of a name on the shelf. LookupError for another name."""
    path, known = Path(source), shelf(folder)
    if path.suffix == ".toml":
        return path
    if str(source) not in known:
        expected = f"expected a .toml file or one of {', '.join(known)}{nearest(str(source), list(known))}"
        raise LookupError(f"unknown {what} {str(source)!r}, {expected}")
    return known[str(source)]


def read(path: Path) -> dict[str, Any]:
    """The values of a TOML file. ValueError for one that is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: not TOML: {error}") from None


@cache
def paper() -> dict[str, Any]:
    """The published figures, by section: names of columns, and a list per row."""
    return read(HERE / "published" / "tables.toml")


def published(section: str, row: str, column: str) -> float | None:
    """The paper's figure, if it has one."""
    known = paper().get(section, {"columns": [], "rows": {}})
    figure = dict(zip(known["columns"], known["rows"].get(row, ()), strict=False)).get(column)
    return None if figure is None or math.isnan(figure) else figure
