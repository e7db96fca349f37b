"""docs/results/desk-forms.md tells the numbers of its raw files."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean
from typing import Any

from parapos.experiments import tables
from parapos.experiments.store import Evaluation

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAGE = (RESULTS / "desk-forms.md").read_text(encoding="utf-8")
LARGER = ("2x", "3x", "4x")


def rows(name: str) -> list[dict[str, str]]:
    with open(RESULTS / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_quantiles_and_limits() -> None:
    decay = rows("desk-forms/decay.csv")
    layers = {(row["run"], row["at"]): row for row in decay if row["what"] == "layer"}
    runs = [f"desk_digits-{row}-30" for row in ("direct-no-floor", "direct-floor", "m-16")]
    assert set(layers) == {(run, layer) for run in runs for layer in "123"}
    for share in ("1%", "10%", "50%"):
        for layer in "123":
            told = " | ".join(layers[run, layer][share] for run in runs)
            assert f"| {share} | {layer} | {told} |" in PAGE
    limits = {(row["run"], float(row["at"])): row for row in decay if row["what"] == "limit"}
    for (run, limit), row in limits.items():
        if run == runs[0]:
            assert f"| {limit or 'none'} | {row['1x']} | {row['2x']} | {row['4x']} |" in PAGE
    row = limits[runs[2], 0.0]
    assert f"| 16 parabolas, as trained | {row['1x']} | {row['2x']} | {row['4x']} |" in PAGE


def cells(study: str) -> list[dict[str, Any]]:
    """A line for each evaluation of a study."""
    grid = tables.resolve(tables.load(study), Path("runs"), {})
    found = tables.read_raw(RESULTS / study).by_evaluation
    lines: list[dict[str, Any]] = []
    for (data, row, column), repeats in grid.places.items():
        for seed, repeat in zip(grid.table.seeds, repeats, strict=True):
            evaluation = repeat.evaluation
            assert isinstance(evaluation, Evaluation)
            metrics = found[repeat.run.name, str(evaluation)]
            scaled = evaluation.position_scale != 1
            place = dict(data=data, row=row, column=column, seed=seed, size=evaluation.size, interpolated=scaled)
            lines.append({**place, **metrics})
    return lines


def choices() -> dict[tuple[str, str], float]:
    """Top-1 in percent by row and column."""
    return {(x["row"], x["column"]): 100 * x["top1"] for x in cells("desk-forms-choice")}


def test_the_script_saw_the_runs_of_the_table() -> None:
    top1 = choices()
    for row in rows("desk-forms/decay.csv"):
        if row["what"] == "limit" and float(row["at"]) == 0:
            name = row["run"].removeprefix("desk_digits-").removesuffix("-30")
            for column in ("1x", "2x", "4x"):
                assert abs(top1[name, column] - float(row[column])) < 0.6, (name, column)  # one image of 178


def test_the_choice_follows_the_rule() -> None:
    top1 = choices()
    figures: dict[str, tuple[float, float, float]] = {}
    for name in ("direct-no-floor", "direct-floor"):
        means = (fmean(top1[name, column + end] for column in LARGER) for end in ("", " interpolated"))
        figures[name] = (top1[name, "1x"], *means)
    told = {"bounded": "bounded:", "positive": "a positive diagonal", "fast-g": "W_g stored at"}
    for row in rows("desk-forms-choice/variants.csv"):
        means = (fmean(float(row[column + end]) for column in LARGER) for end in ("", " interpolated"))
        figures[row["variant"]] = (float(row["1x"]), *means)
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {told[row['variant']]}"))
        assert line.endswith(" | " + " | ".join(f"{x:.1f}" for x in figures[row["variant"]]) + " |")
    plain = figures["direct-no-floor"]
    allowed = {n: f for n, f in figures.items() if f[0] >= plain[0] - 1 and f[2] >= plain[2] - 2}
    assert max(allowed, key=lambda name: allowed[name][1]) == "direct-floor"
    assert f"a gap of {figures['direct-floor'][1] - plain[1]:.0f} points" in PAGE


def test_what_the_page_says_of_test_images() -> None:
    study = cells("desk-forms")
    told = " ".join(PAGE.split())

    def gap(one: str, other: str, data: str, *, interpolated: bool) -> str:
        means = []
        for name in (one, other):
            some = [x for x in study if (x["row"], x["data"]) == (name, data) and x["size"] > 32]
            means.append(fmean(100 * x["top1"] for x in some if x["interpolated"] == interpolated))
        return f"{abs(means[0] - means[1]):.1f}"

    for sentence, other, interpolated in (
        ("gains {} points on digits and {} on Fashion-MNIST over", "direct-no-floor", False),
        ("is then {} and {} points above 16 parabolas", "m-16", False),
        ("Interpolated, it gains {} and {} points", "direct-no-floor", True),
        ("is {} points above 16 parabolas on digits and {} below them on Fashion-MNIST", "m-16", True),
    ):
        figures = [gap("direct", other, data, interpolated=interpolated) for data in ("digits", "fashion_mnist")]
        assert sentence.format(*figures) in told


def test_what_the_page_says_of_the_order() -> None:
    """The best and the worst number of parabolas, and where the direct form is behind all of 2 to 16."""
    study = cells("desk-forms")

    def beyond(data: str, row: str, *, interpolated: bool) -> float:
        some = [x for x in study if (x["data"], x["row"], x["interpolated"]) == (data, row, interpolated)]
        return fmean(x["top1"] for x in some if x["size"] > 32)

    counts = ("m-2", "m-4", "m-8", "m-16", "m-50")
    for data, interpolated, best in (("fashion_mnist", True, "m-16"), ("fashion_mnist", False, "m-4")):
        assert max(counts, key=lambda row: beyond(data, row, interpolated=interpolated)) == best
    assert min(counts, key=lambda row: beyond("fashion_mnist", row, interpolated=True)) == "m-50"
    for data in ("digits", "fashion_mnist"):
        direct = beyond(data, "direct", interpolated=False)
        assert all(direct > beyond(data, row, interpolated=False) for row in ("m-16", "m-50"))
    low = beyond("digits", "direct-no-floor", interpolated=False)
    assert all(low < beyond("digits", row, interpolated=False) for row in ("m-2", "m-4"))
