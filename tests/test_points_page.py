"""What docs/points.md shows was measured in full, and the recipes reach what they promise."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from parapos.experiments import tables
from parapos.training import recipe

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results" / "points-desk"


def scores() -> dict[tuple[str, str, str], float]:
    with open(RESULTS / "table.csv", encoding="utf-8", newline="") as file:
        return {(row["block"], row["row"], row["column"]): float(row["mean"]) for row in csv.DictReader(file)}


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
