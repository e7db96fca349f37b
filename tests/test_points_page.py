"""docs/points.md tells the numbers of its raw files, and the recipes reach what they promise."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from parapos.experiments import tables
from parapos.training import recipe

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "points.md").read_text(encoding="utf-8")
RESULTS = DOCS / "results" / "points-desk"


def scores() -> dict[tuple[str, str, str], float]:
    with open(RESULTS / "table.csv", encoding="utf-8", newline="") as file:
        return {(row["block"], row["row"], row["column"]): float(row["mean"]) for row in csv.DictReader(file)}


def test_the_table_is_what_was_measured(tmp_path: Path) -> None:
    told = re.search(r"<!-- results/points-desk -->\n(.*?)<!-- /results/points-desk -->", PAGE, re.S)
    assert told
    assert told[1] == (RESULTS / "table.md").read_text(encoding="utf-8")
    grid = tables.resolve(tables.load("points-desk"), tmp_path, {})
    written = tables.write(grid, tables.read_raw(RESULTS), tmp_path / "out")
    (text,) = (path for path in written if path.suffix == ".md")
    assert text.read_text(encoding="utf-8") == (RESULTS / "table.md").read_text(encoding="utf-8")


def test_every_cell_was_measured() -> None:
    table = tables.load("points-desk")
    want = {(block, row, column) for block in table.blocks for row in table.rows for column in table.columns}
    assert set(scores()) == want
    assert {"pape", "rope", "sincos", "none"} <= set(table.rows)


@pytest.mark.parametrize(("block", "least"), [("rooms", 60.0), ("shapes", 90.0)])
def test_pape_learns_generated_points(block: str, least: float) -> None:
    assert scores()[block, "pape", "test"] >= least
    head = Path(recipe.find(f"{block}_desk")).read_text(encoding="utf-8")
    assert f"{scores()[block, 'pape', 'test']:.1f}" in head
