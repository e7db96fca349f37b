"""Draws a strip: time runs to the right; below each picture stand the maps of the query at that time.

A row has one colour scale, so that its columns can be compared. Cells without a token are hatched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .analysis_maps import Strip
from .plots import load_pyplot, save

MARK = "#D55E00"  # of the query
LEFT, RIGHT, TOP, BOTTOM = 1.1, 0.75, 0.76, 0.44  # inches around the cells
GAP, BAR = 0.07, 0.11  # inches between cells, and of a colour bar's width
WIDTH, SIDES = 9.5, (1.0, 1.9)  # inches for all cells of a row, and of a cell's longer side, least and most
LINEAR, FAR = 1.0, 20.0  # where scores go beyond +-FAR, those beyond +-LINEAR are drawn by their logarithm


def draw(path: Path, strip: Strip, *, title: str) -> None:
    """Rows: pictures, distance, direction, semantics, their sum, and its softmax. The query is marked in orange."""
    from matplotlib.colors import SymLogNorm

    pyplot = load_pyplot()
    columns, rows, cols = strip.distance.shape
    side = min(max(WIDTH / columns, SIDES[0]), SIDES[1])
    wide, tall = side * min(1, cols / rows), side * min(1, rows / cols)
    bands = _bands(strip)
    width = LEFT + columns * (wide + GAP) + RIGHT
    height = TOP + (len(bands) + 1) * (tall + GAP) + BOTTOM
    figure = pyplot.figure(figsize=(width, height))

    def place(line: int, left: float, across: float) -> Any:
        bottom = height - TOP - line * (tall + GAP) - tall
        axis = figure.add_axes((left / width, bottom / height, across / width, tall / height))
        axis.set_xticks([])
        axis.set_yticks([])
        return axis

    def cell(line: int, column: int) -> Any:
        return place(line, LEFT + column * (wide + GAP), wide)

    when, row, col = strip.query
    high, broad = strip.pictures.shape[2] / rows, strip.pictures.shape[3] / cols
    for column, name in enumerate(strip.names):
        axis = cell(0, column)
        axis.imshow(strip.pictures[column].permute(1, 2, 0).numpy())
        axis.set_title(name, fontsize=9, pad=4)
        if column == when:
            axis.title.set(color=MARK, weight="bold")
            corner = (col * broad - 0.5, row * high - 0.5)
            axis.add_patch(pyplot.Rectangle(corner, broad, high, fill=False, edgecolor=MARK, linewidth=2))
        if column == 0:
            _name(axis, strip.kind)
    for line, (name, values, colours, scale) in enumerate(bands, 1):
        for column in range(columns):
            axis = cell(line, column)
            empty = dict(facecolor="#f4f4f4", hatch="////", edgecolor="#cfcfcf", linewidth=0, zorder=0)
            axis.add_patch(pyplot.Rectangle((-0.5, -0.5), cols, rows, **empty))
            drawn = axis.imshow(values[column].numpy(), cmap=colours, norm=scale, zorder=1)
            if column == when:
                ring = dict(markersize=6.5, markerfacecolor="none", markeredgecolor=MARK, markeredgewidth=1.8)
                axis.plot(col, row, "o", zorder=2, **ring)
            if column == 0:
                _name(axis, name)
            if line == len(bands):
                axis.set_xlabel(_percent(float(strip.shares[column])), fontsize=9)
        numbers = None if isinstance(scale, SymLogNorm) else "%.3g"
        bar = figure.colorbar(drawn, cax=place(line, LEFT + columns * (wide + GAP), BAR), format=numbers)
        bar.ax.tick_params(labelsize=7)
    middle = (LEFT + columns * (wide + GAP) / 2) / width
    figure.text(middle, 1 - 0.08 / height, title, ha="center", va="top", fontsize=11)
    figure.text(middle, 1 - 0.3 / height, f"query: {strip.told}", ha="center", va="top", fontsize=10, color=MARK)
    rest = 1 - float(strip.shares.sum())
    told = "share of the attention that all tokens of a column get" + (
        f"; class token {_percent(rest)}" if rest > 1e-9 else ""
    )
    figure.text(middle, 0.08 / height, told, ha="center", va="bottom", fontsize=8, color="#555555")
    save(figure, path)


def _bands(strip: Strip) -> list[tuple[str, Tensor, str, Any]]:
    """Name, values, colours and colour scale of each row of maps."""
    total = strip.distance + strip.direction + strip.semantics
    return [
        ("distance\n$\\langle a_i, \\delta^2\\rangle$", strip.distance, "magma", _scale(strip.distance)),
        (
            "direction\n$\\langle b_i, \\delta\\rangle$",
            strip.direction,
            "RdBu_r",
            _scale(strip.direction, centred=True),
        ),
        ("semantics\n$\\langle q_i, k_j\\rangle$", strip.semantics, "cividis", _scale(strip.semantics)),
        ("their sum", total, "magma", _scale(total)),
        ("attention:\nits softmax", strip.attention, "viridis", _scale(strip.attention, from_zero=True)),
    ]


def _scale(values: Tensor, *, centred: bool = False, from_zero: bool = False) -> Any:
    """One colour scale for all values of a row. Scores far from 0 are drawn by their logarithm: else those of far
    tokens, which softmax does not see, would hide the differences between near ones."""
    from matplotlib.colors import Normalize, SymLogNorm

    there = values[~values.isnan()]
    low, high = 0.0 if from_zero else float(there.min()), float(there.max())
    if centred:
        high = max(abs(low), abs(high))
        low = -high
    if low == high:
        low, high = low - 1, high + 1
    far = max(abs(low), abs(high)) > FAR
    return SymLogNorm(LINEAR, vmin=low, vmax=high, base=10) if far else Normalize(low, high)


def _name(axis: Any, name: str) -> None:
    axis.set_ylabel(name, fontsize=9, rotation=0, ha="right", va="center", labelpad=8)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or share == 0 else "<1%"
