"""What is on the shelf: recipes, tables, and the figures of the paper."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def shelf(folder: str = ".") -> dict[str, Path]:
    """The TOML files of a folder that comes with the package, by name."""
    return {path.stem: path for path in sorted((HERE / folder).glob("*.toml"))}


@cache
def paper() -> dict[str, Any]:
    """The published figures, by section: names of columns, and a list per row."""
    return tomllib.loads((HERE / "published" / "tables.toml").read_text(encoding="utf-8"))


def published(section: str, row: str, column: str) -> float | None:
    """The paper's figure, if it has one."""
    known = paper().get(section, {"columns": [], "rows": {}})
    figure = dict(zip(known["columns"], known["rows"].get(row, ()), strict=False)).get(column)
    return None if figure is None or math.isnan(figure) else figure
