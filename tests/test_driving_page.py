"""docs/nuscenes.md shows what docs/results/nuscenes-heart/learn.py measured, and both sensors are needed there."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results" / "nuscenes-heart"


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return runpy.run_path(str(RESULTS / "learn.py"))


def rows(name: str) -> list[list[str]]:
    with open(RESULTS / name, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def check(losses: list[float], maps: dict[str, float]) -> None:
    """Learned by heart, and not without one of the sensors. maps: in %."""
    assert losses[-1] < 0.2 * losses[0]
    assert maps["both sensors"] >= 50
    for case in ("zeroed images", "no images", "no LiDAR"):
        assert maps[case] < maps["both sensors"] - 10, case


def test_the_page_has_the_measured_figures(study: dict[str, Any]) -> None:
    cells, losses = rows("cells.csv"), rows("losses.csv")
    assert (cells[0], losses[0]) == (study["CELLS"], study["LOSSES"])
    table = study["page"](cells[1:], losses[1:])
    assert (RESULTS / "table.md").read_text(encoding="utf-8") == table
    text = (DOCS / "nuscenes.md").read_text(encoding="utf-8")
    assert text.split("<!-- nuscenes-heart -->\n")[1].split("<!-- end -->")[0] == table


def test_both_sensors_were_needed(study: dict[str, Any]) -> None:
    cells, losses = rows("cells.csv")[1:], rows("losses.csv")[1:]
    assert {row[0] for row in cells} == {row[0] for row in losses} == {"pape", "rope"}
    for encoding in ("pape", "rope"):
        curve = [row for row in losses if row[0] == encoding]
        assert [int(row[1]) for row in curve] == list(range(study["STEPS"]))
        check([float(row[2]) for row in curve], {row[1]: float(row[2]) for row in cells if row[0] == encoding})
    assert sum(float([row for row in losses if row[0] == e][-1][3]) for e in ("pape", "rope")) < 20 * 60


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["pape", "rope"])
def test_both_sensors_are_needed(study: dict[str, Any], encoding: str, tmp_path: Path) -> None:
    data = study["frames"](tmp_path / "nuscenes")
    model, curve = study["train"](data, encoding)
    scores = study["judge"](data, model)
    check([loss for loss, _ in curve], {case: 100 * found["map"] for case, found in scores.items()})
