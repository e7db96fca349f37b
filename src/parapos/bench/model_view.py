"""What `bench_model` measured, as tables and as a plot, beside the paper's own figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import recipes, text
from . import flops, measure
from .model import BASE, MODES

UNMEASURED, UNKNOWN = "not measured", "-"
PAPER, ANALYTIC = "paper", "analytic"
WITNESS, BASELINES = "pape m=50", ("sincos", "alibi", "rope", "rope_mixed", "lookhere")
KINDS = {"time": "time", "memory": "peak memory"}


def _find(results: dict[str, Any], kind: str, row: str, size: int, mode: str) -> dict[str, Any] | None:
    """The measurement, if there is one with a ratio."""
    entries = (x for x in results[kind] if (x["row"], x["size"], x["mode"]) == (row, size, mode))
    return next((x for x in entries if x["ratio"] is not None), None)


def published(results: dict[str, Any], row: str, size: int, column: str) -> float | None:
    """The paper's figure, where this is the model and the size of the paper's table."""
    same = (results["model"], size) == (flops.MODEL, flops.SIZE)
    return recipes.published("efficiency", row, column) if same else None


def paper_ratio(results: dict[str, Any], row: str, size: int, column: str) -> float | None:
    """The paper's figure over that of sincos: it has no row without an encoding, and sincos adds next to nothing."""
    over, under = (published(results, x, size, column) for x in (row, "sincos"))
    return None if over is None or under is None else over / under


@dataclass(frozen=True)
class Column:
    """A column of a table: figures by row, and how they are shown, in a format or as cells."""

    title: str
    figures: Mapping[str, float | None]
    form: str = "{:.2f}"
    cells: Mapping[str, str] = field(default_factory=dict)

    def show(self, row: str) -> str:
        value = self.figures[row]
        return self.cells.get(row) or (UNKNOWN if value is None else self.form.format(value))

    @property
    def increase(self) -> str:
        """By how much PaPE with 50 parabolas exceeds the cheapest baseline."""
        ours, others = self.figures.get(WITNESS), [x for name in BASELINES if (x := self.figures.get(name)) is not None]
        return UNKNOWN if ours is None or not others or not min(others) else f"{ours / min(others) - 1:+.0%}"


def _table(names: list[str], columns: list[Column]) -> str:
    """Columns of others are left out where they say nothing."""
    columns = [
        c for c in columns if c.title not in (PAPER, ANALYTIC) or any(c.figures[row] is not None for row in names)
    ]
    lines = [[row, *(column.show(row) for column in columns)] for row in names]
    if WITNESS in names:
        lines.append([f"increase, {WITNESS}", *(column.increase for column in columns)])
    return text.table(["row", *(column.title for column in columns)], lines)


def _counted(results: dict[str, Any], size: int) -> list[Column]:
    """Parameters and GFLOP."""
    rows = {x["row"]: x for x in results["rows"] if x["size"] == size}

    def theirs(column: str, form: str) -> Column:
        return Column(PAPER, {row: published(results, row, size, column) for row in (*rows, *BASELINES)}, form)

    columns = []
    for name in ("parameters", "positional"):
        columns += [Column(name, {row: x[name] for row, x in rows.items()}, "{:,}"), theirs(name, "{:,.0f}")]
    for mode in MODES:
        counted, analytic = ({row: x[key] and x[key][mode] for row, x in rows.items()} for key in ("gflop", "analytic"))
        columns += [Column(f"{mode} GFLOP, counted", counted), Column(ANALYTIC, analytic)]
        columns.append(theirs(f"{mode}_gflop", "{:.1f}"))
    return columns


def _costs(results: dict[str, Any], size: int) -> list[Column]:
    """Time and memory as ratios; of the row without an encoding the figures themselves."""
    names, columns = [x["row"] for x in results["rows"] if x["size"] == size], []
    for mode, kind in itertools.product(MODES, KINDS):
        found = {row: _find(results, kind, row, size, mode) for row in names}
        ratios = {row: None if entry is None else entry["ratio"] for row, entry in found.items()}
        cells = {row: _measured(row, entry) for row, entry in found.items()}
        columns.append(Column(f"{mode} {KINDS[kind]}", ratios, cells=cells))
        theirs = {row: paper_ratio(results, row, size, f"{mode}_{kind}") for row in (*names, *BASELINES)}
        columns.append(Column(PAPER, theirs, "{:.2f}x"))
    return columns


def _measured(row: str, entry: dict[str, Any] | None) -> str:
    if entry is None:
        return UNMEASURED
    if row == BASE:
        return f"{entry['bytes'] / 1e6:.0f} MB" if "bytes" in entry else f"{entry['seconds'] * 1000:.1f} ms"
    quartiles = f" ({' to '.join(f'{x:.2f}' for x in entry['quartiles'])})" if "quartiles" in entry else ""
    return f"{entry['ratio']:.2f}x{quartiles}"


def where(results: dict[str, Any]) -> str:
    """Model and machine in one line."""
    at = f", commit {results['commit']}" if results["commit"] else ""
    return f"{results['model']}, batch {results['batch']}, {results['dtype']}, on {measure.where(results)}{at}"


def markdown(results: dict[str, Any]) -> str:
    """Two tables per size: what was counted, and what was measured."""
    parts = [f"{where(results)}.", "\n".join(f"- {name}: {message}" for name, message in results["protocol"].items())]
    for size in results["sizes"]:
        names = [x["row"] for x in results["rows"] if x["size"] == size]
        rounds = max((x["rounds"] for x in results["time"] if x["size"] == size), default=0)
        parts.append(f"{size} x {size} pixels, rounds: {rounds}")
        parts += [_table(names, _counted(results, size)), _table(names, _costs(results, size))]
    parts += [f"{row}: {UNMEASURED}, {why}" for row, why in results["missing"].items()]
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """Ratios by row, with the paper's; of several sizes ratios over the size, PaPE alone if it is there."""
    sizes = results["sizes"]
    names = list(dict.fromkeys(x["row"] for x in results["rows"] if x["row"] != BASE))
    over_size = [name for name in names if name.startswith("pape")] or names

    def ratio(row: str, size: int, kind: str, mode: str) -> float:
        return (_find(results, kind, row, size, mode) or {"ratio": math.nan})["ratio"]

    def panel(kind: str, mode: str) -> measure.Panel:
        title, label = f"{mode}: {KINDS[kind]}", "ratio to no encoding"
        if len(sizes) > 1:
            return measure.Panel(title, label, {n: [(s, ratio(n, s, kind, mode)) for s in sizes] for n in over_size})
        theirs = [(n, paper_ratio(results, n, sizes[0], f"{mode}_{kind}")) for n in names]
        ours = [(n, ratio(n, sizes[0], kind, mode)) for n in names]
        return measure.Panel(title, label, {"measured here": ours, "paper, RTX 4090": [(n, x) for n, x in theirs if x]})

    measure.draw(path, [[panel(kind, mode) for kind in KINDS] for mode in MODES], where(results))
