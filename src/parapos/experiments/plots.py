"""Plots of grids: values over the resolution, losses over the steps.

Colours and names of encodings are the same in every plot. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..encodings.looks import LOOKS
from ..tasks.base import Metric

DPI = 150


@dataclass(frozen=True)
class Line:
    """A curve: values by x, None where nothing was measured. dashed: with position interpolation. spread: how far the
    values reach up and down, drawn as a band. colour: instead of the encoding's."""

    name: str
    encoding: str
    values: Sequence[float | None]
    dashed: bool = False
    spread: Sequence[float | None] = ()
    colour: str = ""

    @property
    def ink(self) -> str:
        return self.colour or LOOKS[self.encoding][1]


def load_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights near the wanted ones and at least `gap` apart, so that labels do not lie on each other."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[list[int], float]] = []  # members from below, and the middle of the group
    for i in order:
        members, middle = [i], wanted[i]
        while groups and middle - gap * (len(members) - 1) / 2 - groups[-1][1] < gap * (len(groups[-1][0]) + 1) / 2:
            below, height = groups.pop()
            middle = (height * len(below) + middle * len(members)) / (len(below) + len(members))
            members = below + members
        groups.append((members, middle))
    heights = [0.0] * len(wanted)
    for members, middle in groups:
        for place, i in enumerate(members):
            heights[i] = middle + gap * (place - (len(members) - 1) / 2)
    return heights


def curves(
    path: Path, sizes: Sequence[int], lines: Sequence[Line], *, trained: int, title: str, metric: Metric
) -> None:
    """Values over the resolution, each curve with its name at its end; the trained resolution is marked."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.6, 4.6), layout="constrained")
    axis.axvline(trained, color="black", linewidth=0.8, linestyle=":")
    at = dict(xycoords=("data", "axes fraction"), textcoords="offset points")
    axis.annotate("trained here", (trained, 0.02), (3, 0), **at, fontsize=8, color="#444444")
    ends: list[tuple[float, Line]] = []
    for line in lines:
        points = [(size, v) for size, v in zip(sizes, line.values, strict=True) if v is not None]
        if not points:
            continue
        wide = 2.6 if line.encoding == "pape" else 1.6
        style: dict[str, Any] = dict(color=line.ink, linewidth=wide, marker="o", markersize=wide + 2)
        axis.plot(*zip(*points, strict=True), linestyle="--" if line.dashed else "-", **style)
        _band(axis, sizes, line)
        ends.append((points[-1][1], line))
    low, high = (0.0, 102.0) if metric.unit == "%" else axis.get_ylim()
    for height, (value, line) in zip(_spread([v for v, _ in ends], (high - low) / 20), ends, strict=True):
        axis.annotate(
            f"{line.name}  {value:.{1 if metric.unit == '%' else 2}f}",
            (1.0, height),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=line.ink,
            fontsize=9.5,
            fontweight="bold" if line.encoding == "pape" else "normal",
            va="center",
            annotation_clip=False,
        )
    ylabel = f"{metric.label}, {metric.unit}" if metric.unit else metric.label
    axis.set(title=title, xlabel="size of the test samples, pixels per side", ylabel=ylabel, ylim=(low, high))
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size}\n{size / trained:.3g}x" for size in sizes])
    axis.minorticks_off()
    axis.margins(x=0.02)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _band(axis: Any, xs: Sequence[float], line: Line) -> None:
    band = [
        (x, v - s, v + s)
        for x, v, s in zip(xs, line.values, line.spread or [None] * len(xs), strict=True)
        if v is not None and s is not None
    ]
    if band:
        axis.fill_between(*zip(*band, strict=True), color=line.ink, alpha=0.15, linewidth=0)


def losses(path: Path, steps: Sequence[int], lines: Sequence[Line], *, title: str) -> None:
    """Training losses over the steps, with a legend in the order of their last values."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.6, 4.6), layout="constrained")
    for line in sorted(lines, key=lambda line: -(line.values[-1] or 0.0)):
        points = [(step, v) for step, v in zip(steps, line.values, strict=True) if v is not None]
        axis.plot(*zip(*points, strict=True), color=line.ink, linewidth=1.6, label=line.name)
        _band(axis, steps, line)
    axis.set(title=title, xlabel="step", ylabel="training loss")
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    load_pyplot().close(figure)
