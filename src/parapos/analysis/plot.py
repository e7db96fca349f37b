"""Draws the scores of heads, the maps of a query, and strips of such maps: in a strip time runs to the right, and the
maps of the query at that time stand below each picture.

A row has one colour scale, so that its columns can be compared. Cells without a token are hatched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..experiments.plots import load_pyplot, save
from .maps import Maps, Strip

if TYPE_CHECKING:
    from .clouds import CloudMaps

MARK = "#D55E00"  # of the query
RING: dict[str, Any] = dict(markersize=6, markerfacecolor="none", markeredgecolor=MARK, markeredgewidth=1.7)
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
    shown = bands(strip)
    width = LEFT + columns * (wide + GAP) + RIGHT
    height = TOP + (len(shown) + 1) * (tall + GAP) + BOTTOM
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
    for line, (name, values, colours, scale) in enumerate(shown, 1):
        for column in range(columns):
            axis = cell(line, column)
            empty = dict(facecolor="#f4f4f4", hatch="////", edgecolor="#cfcfcf", linewidth=0, zorder=0)
            axis.add_patch(pyplot.Rectangle((-0.5, -0.5), cols, rows, **empty))
            drawn = axis.imshow(values[column].numpy(), cmap=colours, norm=scale, zorder=1)
            if column == when:
                axis.plot(col, row, "o", zorder=2, **RING)
            if column == 0:
                _name(axis, name)
            if line == len(shown):
                axis.set_xlabel(_percent(float(strip.shares[column])), fontsize=9)
        numbers = None if isinstance(scale, SymLogNorm) else "%.3g"
        bar = figure.colorbar(drawn, cax=place(line, LEFT + columns * (wide + GAP), BAR), format=numbers)
        bar.ax.tick_params(labelsize=7)
    middle = (LEFT + columns * (wide + GAP) / 2) / width
    figure.text(middle, 1 - 0.08 / height, title, ha="center", va="top", fontsize=11)
    figure.text(middle, 1 - 0.3 / height, f"query: {strip.query_name}", ha="center", va="top", fontsize=10, color=MARK)
    rest = 1 - float(strip.shares.sum())
    message = "share of the attention that all tokens of a column get" + (
        f"; class token {_percent(rest)}" if rest > 1e-9 else ""
    )
    figure.text(middle, 0.08 / height, message, ha="center", va="bottom", fontsize=8, color="#555555")
    save(figure, path)


def bands(maps: Maps | Strip | CloudMaps) -> list[tuple[str, Tensor, str, Any]]:
    """Name, values, colours and colour scale of each kind of map."""
    total, direction = maps.distance + maps.direction + maps.semantics, maps.direction
    return [
        ("distance\n$\\langle a_i, \\delta^2\\rangle$", maps.distance, "magma", _scale(maps.distance)),
        ("direction\n$\\langle b_i, \\delta\\rangle$", direction, "RdBu_r", _scale(direction, centred=True)),
        ("semantics\n$\\langle q_i, k_j\\rangle$", maps.semantics, "cividis", _scale(maps.semantics)),
        ("their sum", total, "magma", _scale(total)),
        ("attention:\nits softmax", maps.attention, "viridis", _scale(maps.attention, from_zero=True)),
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


def heads(path: Path, score: Tensor, bounded: Tensor, *, title: str) -> None:
    """z (L, H) and the bounded score, one cell per layer and head: orange is positional, blue semantic. NaN where a
    layer has fewer heads."""
    pyplot = load_pyplot()
    depth, count = score.shape
    wide, tall = max(3.4, 0.55 * count + 1.6), max(2.4, 0.42 * depth + 1.4)
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * wide, tall), layout="constrained")
    shown = score.sign() * score.abs().clamp(max=1e300).log1p() / math.log(10)
    reach = max(float(shown.nan_to_num().abs().max()), 1e-3)
    for axis, cells, values, limit, name in (
        (axes[0], shown, score, reach, "z = mean of (P - Y) / $\\gamma$, colour on a log scale"),
        (axes[1], bounded, bounded, 1.0, "mean of (P - Y) / (P + Y)"),
    ):
        axis.imshow(cells.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
        for layer in range(depth):
            for head in range(count):
                if cells[layer, head].isnan():
                    continue
                dark = abs(float(cells[layer, head])) > 0.6 * limit
                message = _short(float(values[layer, head]))
                axis.text(
                    head, layer, message, ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )
        axis.set_xticks(range(count), [str(h + 1) for h in range(count)])
        axis.set_yticks(range(depth), [str(l + 1) for l in range(depth)])
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{title}   orange: positional, purple: semantic", fontsize=10)
    save(figure, path)


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}" if abs(value) < 1000 else f"{value:.0e}"


def maps(path: Path, rows: Sequence[Maps], *, title: str) -> None:
    """One row per set of maps: image with the query, distance, direction, semantics, their sum, and its softmax."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(
        len(rows), 6, figsize=(14.5, 2.15 * len(rows) + 0.5), layout="constrained", squeeze=False
    )
    for place, (line, found) in enumerate(zip(axes, rows, strict=True)):
        grid_rows, grid_cols = found.distance.shape
        high, wide = found.image.shape[1] / grid_rows, found.image.shape[2] / grid_cols
        row, col = found.query
        line[0].imshow(found.image.permute(1, 2, 0).clamp(0, 1).numpy())
        corner = (col * wide - 0.5, row * high - 0.5)
        line[0].add_patch(pyplot.Rectangle(corner, wide, high, fill=False, edgecolor=MARK, linewidth=2))
        line[0].set_ylabel(found.name, fontsize=10)
        for axis, (name, values, colours, scale) in zip(line[1:], bands(found), strict=True):
            drawn = axis.imshow(values.numpy(), cmap=colours, norm=scale)
            axis.plot(col, row, "o", **RING)
            bar = figure.colorbar(drawn, ax=axis, fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=7)
            if place == 0:
                axis.set_title(name.replace("\n", "  "), fontsize=10)
        for axis in line:
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0][0].set_title("image and query", fontsize=10)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
