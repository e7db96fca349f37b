"""Figures to draw on, for every room that draws. matplotlib is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 150


def new_figure(size: tuple[float, float], layout: Any = "constrained") -> Any:
    """A figure of a size in inches. It belongs to its caller alone: no window, and nothing to close."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout=layout)


def subplots(*shape: int, size: tuple[float, float] = (7.6, 4.6), **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, open at the top and at the right."""
    figure = new_figure(size)
    axes = figure.subplots(*shape, **options)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
