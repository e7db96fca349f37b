"""docs/detection.md tells the numbers of docs/results/coco-desk, and they are what was asked for."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from parapos.encodings.looks import label
from parapos.experiments import tables

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results" / "coco-desk"
PAGE = (DOCS / "detection.md").read_text(encoding="utf-8")
SIZES = ("1x", "1.33x", "2x", "1.33x interpolated", "2x interpolated")
METRICS = ("map50", "map", "map75", "map_small", "map_medium")


def cells() -> dict[tuple[str, str], dict[str, float]]:
    """Metrics in percent, by row and column of the table."""
    grid = tables.resolve(tables.load("coco-desk"), Path("runs"), {})
    found = tables.read_raw(RESULTS).by_evaluation
    return {
        (row, column): {k: 100 * v for k, v in found[repeat.run.name, str(repeat.evaluation)].items()}
        for (_, row, column), (repeat,) in grid.places.items()
        if (repeat.run.name, str(repeat.evaluation)) in found
    }


def test_figures_are_those_of_the_raw_files() -> None:
    values = cells()
    for row in ("pape", "rope", "none"):  # what was not measured is a dash
        told = " | ".join(f"{values[row, '1x'][name]:.1f}" if (row, "1x") in values else "-" for name in METRICS)
        assert f"| {label(row)} | {told} |" in PAGE
        told = " | ".join(f"{values[row, size]['map50']:.1f}" if (row, size) in values else "-" for size in SIZES)
        assert f"| {label(row)} | {told} |" in PAGE


def test_it_learns() -> None:
    assert cells()["pape", "1x"]["map50"] >= 50
    assert cells()["pape", "1x"]["samples"] == 100 * 500


def test_classes_and_curves_are_of_the_same_run() -> None:
    with open(RESULTS / "classes.csv", encoding="utf-8", newline="") as file:
        classes = list(csv.DictReader(file))
    assert len(classes) == 13
    for row in classes:
        name = f"ap_{row['name'].replace(' ', '_')}"
        assert 100 * float(row["ap"]) == pytest.approx(cells()["pape", "1x"][name], abs=1e-3)
    mean = sum(float(row["ap50"]) for row in classes) / 13
    assert 100 * mean == pytest.approx(cells()["pape", "1x"]["map50"], abs=1e-3)
