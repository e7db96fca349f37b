"""What `bench_model` measured, as tables and as a plot, beside the paper's own figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import text
from .model import BASE, MODES, paper

UNMEASURED, UNKNOWN = "not measured", "-"
PAPER, ANALYTIC = "paper", "analytic"
WITNESS, BASELINES = "pape m=50", ("sincos", "alibi", "rope", "rope_mixed", "lookhere")
KINDS = {"time": "time", "memory": "peak memory"}


def _rows(results: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [x for x in results["rows"] if x["size"] == size]


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
    """A column of a table: what a row's figure is, and how it is shown."""

    title: str
    figure: Figure
    show: Callable[[str], str]


def _column(title: str, figure: Figure, form: str, end: str = "") -> Column:
    def show(row: str) -> str:
        value = figure(row)
        return UNKNOWN if value is None else f"{value:{form}}{end}"

    return Column(title, figure, show)


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


def _parameters(results: dict[str, Any], size: int) -> list[Column]:
    found = {x["row"]: x for x in _rows(results, size)}
    columns = []
    for name in ("parameters", "positional"):

        def ours(row: str, name: str = name) -> float | None:
            return found[row][name] if row in found else None

        def theirs(row: str, name: str = name) -> float | None:
            return published(results, row, size, name)

        columns += [_column(name, ours, ","), _column(PAPER, theirs, ",.0f")]
    return columns


def _gflop(results: dict[str, Any], size: int, mode: str) -> list[Column]:
    found = {x["row"]: x for x in _rows(results, size)}

    def ours(how: str) -> Figure:
        return lambda row: found[row][how][mode] if row in found and found[row][how] else None

    return [
        _column(f"{mode} GFLOP, counted", ours("gflop"), ".2f"),
        _column(ANALYTIC, ours("analytic"), ".2f"),
        _column(PAPER, lambda row: published(results, row, size, f"{mode}_gflop"), ".1f"),
    ]


def _cost(results: dict[str, Any], size: int, mode: str, kind: str) -> list[Column]:
    """Time or memory, as ratios; of the row without an encoding the figure itself."""

    def ratio(row: str) -> float | None:
        found = _find(results, kind, row, size, mode)
        return None if found is None else found["ratio"]

    return [
        Column(f"{mode} {KINDS[kind]}", ratio, lambda row: _measured(results, kind, row, size, mode)),
        _column(PAPER, lambda row: paper_ratio(results, row, size, f"{mode}_{kind}"), ".2f", "x"),
    ]


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
    machine = f"{results['machine']}, {results['device']}, threads: {results['threads']}, torch {results['torch']}"
    at = f", commit {results['commit']}" if results["commit"] else ""
    return f"{results['model']}, batch {results['batch']}, {results['dtype']}, on {machine}{at}"


def markdown(results: dict[str, Any]) -> str:
    """Two tables per size: what was counted, and what was measured."""
    parts = [f"{where(results)}.", "\n".join(f"- {name}: {told}" for name, told in results["protocol"].items())]
    for size in results["sizes"]:
        names = [x["row"] for x in _rows(results, size)]
        rounds = max((x["rounds"] for x in results["time"] if x["size"] == size), default=0)
        gflop = [column for mode in MODES for column in _gflop(results, size, mode)]
        costs = [column for mode in MODES for kind in KINDS for column in _cost(results, size, mode, kind)]
        parts.append(f"{size} x {size} pixels, rounds: {rounds}")
        parts += [_table(names, _parameters(results, size) + gflop), _table(names, costs)]
    parts += [f"{row}: {UNMEASURED}, {why}" for row, why in results["missing"].items()]
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """Ratios by row at the first size, with the paper's; with more sizes also ratios over the size, PaPE alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = results["sizes"]
    names = [x["row"] for x in _rows(results, sizes[0]) if x["row"] != BASE]
    tall = 1.4 + 0.27 * len(names)
    heights = [tall, tall] + ([3.6] if len(sizes) > 1 else [])
    figure, axes = pyplot.subplots(
        len(heights), 2, figsize=(11, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for row, mode in zip(axes, MODES, strict=False):
        for axis, kind in zip(row, KINDS, strict=True):
            _by_row(axis, results, names, sizes[0], mode, kind)
    if len(sizes) > 1:
        for axis, kind in zip(axes[2], KINDS, strict=True):
            _by_size(axis, results, [n for n in names if n.startswith("pape")] or names, kind)
    figure.suptitle(where(results), fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _by_row(axis: Any, results: dict[str, Any], names: list[str], size: int, mode: str, kind: str) -> None:
    """Dots with quartiles, hollow ones for the paper, a line at 1."""
    axis.axvline(1, color="black", linewidth=0.8)
    labelled: set[str] = set()

    def label(name: str) -> str | None:
        new = name not in labelled
        labelled.add(name)
        return name if new else None

    for y, row in enumerate(names):
        theirs = paper_ratio(results, row, size, f"{mode}_{kind}")
        if theirs is not None:
            style = dict(markersize=8, markerfacecolor="none", markeredgecolor="#D55E00", markeredgewidth=1.3)
            axis.plot(theirs, y, "o", **style, label=label("paper, RTX 4090"))
        found = _find(results, kind, row, size, mode)
        if found is None:
            axis.annotate(UNMEASURED, (1, y), (4, 0), textcoords="offset points", fontsize=7, va="center")
            continue
        if kind == "time":
            axis.plot(found["quartiles"], [y, y], color="#0072B2", linewidth=2, alpha=0.5, solid_capstyle="butt")
        axis.plot(found["ratio"], y, "o", color="#0072B2", markersize=5, label=label("measured here"))
    base = _measured(results, kind, BASE, size, mode)
    axis.set(title=f"{mode}: {KINDS[kind]}, {size} px", xlabel=f"ratio to no encoding ({base})")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    if labelled:
        axis.legend(fontsize=7, loc="best")


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
