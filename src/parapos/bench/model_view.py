"""What `bench_model` measured, as tables and as a plot, beside the paper's own figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import text
from . import measure
from .model import BASE, MODES, paper

UNMEASURED, UNKNOWN = "not measured", "-"
PAPER, ANALYTIC = "paper", "analytic"
WITNESS, BASELINES = "pape m=50", ("sincos", "alibi", "rope", "rope_mixed", "lookhere")
KINDS = {"time": "time", "memory": "peak memory"}


def _find(results: dict[str, Any], kind: str, row: str, size: int, mode: str) -> dict[str, Any] | None:
    """The measurement, if there is one with a ratio."""
    found = (x for x in results[kind] if (x["row"], x["size"], x["mode"]) == (row, size, mode))
    return next((x for x in found if x["ratio"] is not None), None)


def published(results: dict[str, Any], row: str, size: int, column: str) -> float | None:
    """The paper's figure, where this is the model and the size of the paper's table."""
    same = (results["model"], size) == (paper()["model"], paper()["size"])
    return paper()["rows"].get(row, {}).get(column) if same else None


def paper_ratio(results: dict[str, Any], row: str, size: int, column: str) -> float | None:
    """The paper's figure over that of sincos: it has no row without an encoding, and sincos adds next to nothing."""
    over, under = (published(results, x, size, column) for x in (row, "sincos"))
    return None if over is None or under is None else over / under


Figure = Callable[[str], float | None]  # of a row


@dataclass(frozen=True)
class Column:
    """A column of a table: what a row's figure is, and how it is shown if not in a format."""

    title: str
    figure: Figure
    form: str = "{:.2f}"
    show_cell: Callable[[str], str] | None = None

    def show(self, row: str) -> str:
        if self.show_cell is not None:
            return self.show_cell(row)
        value = self.figure(row)
        return UNKNOWN if value is None else self.form.format(value)


def increase(figure: Figure) -> str:
    """By how much PaPE with 50 parabolas exceeds the cheapest baseline."""
    ours, others = figure(WITNESS), [x for name in BASELINES if (x := figure(name)) is not None]
    return UNKNOWN if ours is None or not others or not min(others) else f"{ours / min(others) - 1:+.0%}"


def _table(names: list[str], columns: list[Column]) -> str:
    """Columns of others are left out where they say nothing."""
    columns = [
        x for x in columns if x.title not in (PAPER, ANALYTIC) or any(x.figure(row) is not None for row in names)
    ]
    lines = [[row, *(column.show(row) for column in columns)] for row in names]
    if WITNESS in names:
        lines.append([f"increase, {WITNESS}", *(increase(column.figure) for column in columns)])
    return text.table(["row", *(column.title for column in columns)], lines)


def _counted(results: dict[str, Any], size: int) -> list[Column]:
    """Parameters and GFLOP."""
    rows = {x["row"]: x for x in results["rows"] if x["size"] == size}

    def ours(*keys: str) -> Figure:
        def figure(row: str) -> float | None:
            value: Any = rows.get(row)
            for key in keys:
                value = value and value[key]
            return value

        return figure

    def theirs(column: str, form: str) -> Column:
        return Column(PAPER, lambda row: published(results, row, size, column), form)

    columns = []
    for name in ("parameters", "positional"):
        columns += [Column(name, ours(name), "{:,}"), theirs(name, "{:,.0f}")]
    for mode in MODES:
        columns += [Column(f"{mode} GFLOP, counted", ours("gflop", mode)), Column(ANALYTIC, ours("analytic", mode))]
        columns.append(theirs(f"{mode}_gflop", "{:.1f}"))
    return columns


def _costs(results: dict[str, Any], size: int) -> list[Column]:
    """Time and memory as ratios; of the row without an encoding the figures themselves."""

    def ours(mode: str, kind: str) -> Column:
        def ratio(row: str) -> float | None:
            entry = _find(results, kind, row, size, mode)
            return None if entry is None else entry["ratio"]

        return Column(f"{mode} {KINDS[kind]}", ratio, show_cell=lambda row: _measured(results, kind, row, size, mode))

    def theirs(mode: str, kind: str) -> Column:
        return Column(PAPER, lambda row: paper_ratio(results, row, size, f"{mode}_{kind}"), "{:.2f}x")

    return [column(mode, kind) for mode in MODES for kind in KINDS for column in (ours, theirs)]


def _measured(results: dict[str, Any], kind: str, row: str, size: int, mode: str) -> str:
    found = _find(results, kind, row, size, mode)
    if found is None:
        return UNMEASURED
    if row == BASE:
        return f"{found['seconds'] * 1000:.1f} ms" if kind == "time" else f"{found['bytes'] / 1e6:.0f} MB"
    if kind == "memory":
        return f"{found['ratio']:.2f}x"
    low, high = found["quartiles"]
    return f"{found['ratio']:.2f}x ({low:.2f} to {high:.2f})"


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
    """Ratios by row at the first size, with the paper's; with more sizes also ratios over the size, PaPE alone."""
    from ..experiments import plots

    sizes = results["sizes"]
    names = [x["row"] for x in results["rows"] if x["size"] == sizes[0] and x["row"] != BASE]
    tall = 1.4 + 0.27 * len(names)
    heights = [tall, tall] + ([3.6] if len(sizes) > 1 else [])
    figure, axes = plots.load_pyplot().subplots(
        len(heights), 2, figsize=(11, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for row, mode in zip(axes, MODES, strict=False):
        for axis, kind in zip(row, KINDS, strict=True):
            _by_row(axis, results, names, sizes[0], mode, kind)
    if len(sizes) > 1:
        for axis, kind in zip(axes[2], KINDS, strict=True):
            _by_size(axis, results, [n for n in names if n.startswith("pape")] or names, kind)
    figure.suptitle(where(results), fontsize=9)
    plots.save(figure, path)


def _by_row(axis: Any, results: dict[str, Any], names: list[str], size: int, mode: str, kind: str) -> None:
    """Dots with quartiles, hollow ones for the paper, a line at 1."""
    axis.axvline(1, color="black", linewidth=0.8)
    for y, row in enumerate(names):
        theirs = paper_ratio(results, row, size, f"{mode}_{kind}")
        if theirs is not None:
            style = dict(markersize=8, markerfacecolor="none", markeredgecolor="#D55E00", markeredgewidth=1.3)
            axis.plot(theirs, y, "o", **style, label="paper, RTX 4090")
        found = _find(results, kind, row, size, mode)
        if found is None:
            axis.annotate(UNMEASURED, (1, y), (4, 0), textcoords="offset points", fontsize=7, va="center")
            continue
        if kind == "time":
            axis.plot(found["quartiles"], [y, y], color="#0072B2", linewidth=2, alpha=0.5, solid_capstyle="butt")
        axis.plot(found["ratio"], y, "o", color="#0072B2", markersize=5, label="measured here")
    base = _measured(results, kind, BASE, size, mode)
    axis.set(title=f"{mode}: {KINDS[kind]}, {size} px", xlabel=f"ratio to no encoding ({base})")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        axis.legend(once.values(), once.keys(), fontsize=7, loc="best")


def _by_size(axis: Any, results: dict[str, Any], names: list[str], kind: str) -> None:
    """Ratios over the image size: training solid, inference dashed, darker for more parabolas, orange without them."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    shades, many = colormaps["viridis_r"], [name for name in names if " m=" in name]
    colours = {name: shades((many.index(name) + 1) / len(many)) if name in many else "#D55E00" for name in names}
    styles: dict[str, Any] = dict(zip(MODES, ("--", "-"), strict=True))
    for name in names:
        for mode in MODES:
            found = [(s, x["ratio"]) for s in results["sizes"] if (x := _find(results, kind, name, s, mode))]
            if found:
                axis.plot(*zip(*found, strict=True), styles[mode], color=colours[name], marker="o", markersize=3.5)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(title=f"{KINDS[kind]} over size", xlabel="pixels per side", ylabel="ratio to no encoding", xscale="log")
    axis.set_xticks(results["sizes"], [str(s) for s in results["sizes"]])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    handles = [Line2D([], [], color=colours[name], label=name) for name in names]
    handles += [Line2D([], [], color="grey", linestyle=styles[mode], label=mode) for mode in MODES]
    axis.legend(handles=handles, fontsize=7, ncols=2)
