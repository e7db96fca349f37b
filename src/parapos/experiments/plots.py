"""Plots of grids: values over the resolution, losses over the steps.

Colours and names of encodings are the same in every plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..canvas import save, subplots
from ..encodings.looks import LOOKS
from ..tasks.base import Metric


@dataclass(frozen=True)
class Line:
    """A curve: values by x, None where nothing was measured. dashed: with position interpolation. colour: instead of
    the encoding's. low and high: where a band begins and ends. dots: single values beside it."""

    name: str
    encoding: str
    values: Sequence[float | None]
    dashed: bool = False
    colour: str = ""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dots: Sequence[float | None] = ()

    @property
    def ink(self) -> str:
        return self.colour or LOOKS[self.encoding][1]


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights near the wanted ones and at least `gap` apart, so that labels do not lie on each other."""
    from scipy.optimize import isotonic_regression

    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    lowered = isotonic_regression([wanted[i] - gap * place for place, i in enumerate(order)]).x if order else []
    return [lowered[order.index(i)] + gap * order.index(i) for i in range(len(wanted))]


def curves(
    path: Path, sizes: Sequence[int], groups: Mapping[str, Sequence[Line]], *, trained: int, title: str, metric: Metric
) -> None:
    """Values over the resolution, each curve with its name at its end; the trained resolution is marked. groups: lines
    by caption, drawn side by side with one scale."""
    size = (7.6, 4.6) if len(groups) == 1 else (5.4 * len(groups), 4.4)
    figure, axes = subplots(1, len(groups), size=size, squeeze=False)
    figure.get_layout_engine().set(wspace=0.06)
    for axis, (caption, lines) in zip(axes[0], groups.items(), strict=True):
        _curves(axis, sizes, lines, trained, metric)
        axis.set_title(caption, fontsize=11)
    axes[0][0].set_ylabel(f"{metric.label}, {metric.unit}" if metric.unit else metric.label)
    figure.suptitle(title, fontsize=11.5)
    save(figure, path)


def _curves(axis: Any, sizes: Sequence[int], lines: Sequence[Line], trained: int, metric: Metric) -> None:
    axis.axvline(trained, color="black", linewidth=0.8, linestyle=":")
    at = dict(xycoords=("data", "axes fraction"), textcoords="offset points")
    axis.annotate("training size", (trained, 0.02), (3, 0), **at, fontsize=8, color="#444444")
    for line in lines:
        single = [(x, v) for x, v in zip(sizes, line.dots or [None] * len(sizes), strict=True) if v is not None]
        if single:
            look: dict[str, Any] = dict(color=line.ink, markeredgecolor="white", markersize=6, zorder=4)
            axis.plot(*zip(*single, strict=True), linestyle="none", marker="D", **look)
    lines = [line for line in lines if any(v is not None for v in line.values)]
    ends = [[v for v in line.values if v is not None][-1] for line in lines]
    for line in lines:
        wide = 2.6 if line.encoding == "pape" else 1.6
        dot = dict(marker="" if line.dots else "o", markersize=wide + 2)
        _plot(axis, sizes, line, linewidth=wide, linestyle="--" if line.dashed else "-", **dot)
    low, high = (0.0, 102.0) if metric.unit == "%" else axis.get_ylim()
    for height, value, line in zip(_spread(ends, (high - low) / 20), ends, lines, strict=True):
        at = dict(xycoords=("axes fraction", "data"), textcoords="offset points", va="center")
        weight = "bold" if line.encoding == "pape" else "normal"
        look = dict(annotation_clip=False, color=line.ink, fontsize=9.5, fontweight=weight)
        text = f"{line.name}  {value:.{1 if metric.unit == '%' else 2}f}"
        axis.annotate(text, (1.0, height), (8, 0), **at, **look)
    axis.set(xlabel="size of the test samples, pixels per side", ylim=(low, high))
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size}\n{size / trained:.3g}x" for size in sizes])
    axis.minorticks_off()
    axis.margins(x=0.02)
    axis.grid(alpha=0.25)


def _plot(axis: Any, xs: Sequence[float], line: Line, **style: Any) -> None:
    """A curve through what was measured, and its band."""
    points = [(x, v) for x, v in zip(xs, line.values, strict=True) if v is not None]
    axis.plot(*zip(*points, strict=True), color=line.ink, **style)
    edges = zip(xs, line.low, line.high, strict=bool(line.low))
    if band := [edge for edge in edges if None not in edge]:
        axis.fill_between(*zip(*band, strict=True), color=line.ink, alpha=0.15, linewidth=0)


def losses(path: Path, steps: Sequence[int], lines: Sequence[Line], *, title: str) -> None:
    """Training losses over the steps, with a legend in the order of their last values."""
    figure, axis = subplots()
    for line in sorted(lines, key=lambda line: -(line.values[-1] or 0.0)):
        _plot(axis, steps, line, linewidth=1.6, label=line.name)
    axis.set(title=title, xlabel="step", ylabel="training loss")
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.25)
    save(figure, path)


def bars(axis: Any, groups: Sequence[str], lines: Sequence[Line]) -> None:
    """A group of bars per name, a bar per line, and a legend below."""
    wide = 0.85 / len(lines)
    for i, line in enumerate(lines):
        places = [x + (i - len(lines) / 2 + 0.5) * wide for x in range(len(groups))]
        axis.bar(places, line.values, wide, color=line.ink, label=line.name)
    axis.set_xticks(range(len(groups)), groups)
    axis.legend(ncols=7, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14))
