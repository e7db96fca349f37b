"""Draws the scores of heads, and the maps of a query: time runs to the right, and the maps of the query at that time
stand below each picture; the maps of an image stand beside it.

All maps of a kind and a strip have one colour scale, so that they can be compared. Cells without a token are hatched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..canvas import new_figure, save
from .maps import Strip

if TYPE_CHECKING:
    from .clouds import CloudMaps

MARK = "#D55E00"  # of the query
RING: dict[str, Any] = dict(markersize=6, markerfacecolor="none", markeredgecolor=MARK, markeredgewidth=1.7)
EMPTY: dict[str, Any] = dict(facecolor="#f4f4f4", hatch="////", edgecolor="#cfcfcf", linewidth=0, zorder=0)
GAP = 0.07  # inches between cells
WIDTH, SIDES = 9.5, (1.0, 1.9)  # inches for all cells of a row, and of a cell's longer side, least and most
LINEAR, FAR = 1.0, 20.0  # where scores go beyond +-FAR, those beyond +-LINEAR are drawn by their logarithm


def draw(path: Path, *strips: Strip, title: str) -> None:
    """Pictures, distance, direction, semantics, their sum, and its softmax: below each other, with time to the right.
    Of images, a row for each. The query is marked in orange."""
    from matplotlib.patches import Rectangle

    moments = [(strip, when) for strip in strips for when in range(len(strip.names))]
    lies = len(moments) == len(strips)
    rows, cols = strips[0].distance.shape[1:]
    side = min(max(WIDTH / len(moments), SIDES[0]), SIDES[1])
    wide, tall = side * min(1, cols / rows), side * min(1, rows / cols)
    shape = (len(moments), 6) if lies else (6, len(moments))
    size = (shape[1] * (wide + (0.5 if lies else GAP)) + 1.6, shape[0] * (tall + GAP) + (0.6 if lies else 1.2))
    figure = new_figure(size, "compressed")
    axes = figure.subplots(*shape, squeeze=False)
    figure.get_layout_engine().set(w_pad=GAP / 2, h_pad=GAP / 2, wspace=0, hspace=0)
    cells = axes if lies else axes.T  # a moment, then a kind of map
    first = 0
    for strip in strips:
        when, row, col = strip.query
        here = range(first, first + len(strip.names))
        first += len(strip.names)
        for i, name, picture in zip(here, strip.names, strip.pictures, strict=True):
            axis = cells[i, 0]
            axis.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy())
            (axis.set_ylabel if lies else axis.set_title)(name, fontsize=9)
            if i - here[0] == when:
                high, broad = picture.shape[1] / strip.distance.shape[1], picture.shape[2] / strip.distance.shape[2]
                corner = (col * broad - 0.5, row * high - 0.5)
                axis.add_patch(Rectangle(corner, broad, high, fill=False, edgecolor=MARK, linewidth=2))
                axis.title.set(color=MARK, weight="bold")
        for line, (_, values, colours, scale) in enumerate(bands(strip), 1):
            for i, value in zip(here, values, strict=True):
                axis = cells[i, line]
                axis.add_patch(Rectangle((-0.5, -0.5), value.shape[1], value.shape[0], **EMPTY))
                drawn = axis.imshow(value.numpy(), cmap=colours, norm=scale, zorder=1)
                if i - here[0] == when:
                    axis.plot(col, row, "o", zorder=2, **RING)
            bar = figure.colorbar(drawn, ax=[cells[i, line] for i in here], fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=7)
        for i, share in zip(here, strip.shares.tolist(), strict=True):
            cells[i, 5].set_xlabel("" if lies else _percent(share), fontsize=9)
    for axis, name in zip(cells[0], [strips[0].kind, *(name for name, *_ in bands(strips[0]))], strict=True):
        if lies:
            axis.set_title(name.replace("\n", "  "), fontsize=10)
        else:
            axis.set_ylabel(name, fontsize=9, rotation=0, ha="right", va="center", labelpad=8)
    for axis in cells.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle(f"{title}\nquery: {strips[0].query_name}" if len(strips) == 1 else title, fontsize=11)
    if not lies:
        class_token = 1 - float(strips[0].shares.sum())
        message = "share of the attention that all tokens of a column get"
        message += f"; class token {_percent(class_token)}" if class_token > 1e-9 else ""
        figure.supxlabel(message, fontsize=8, color="#555555")
    save(figure, path)


def bands(maps: Strip | CloudMaps) -> list[tuple[str, Tensor, str, Any]]:
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


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or share == 0 else "<1%"


def heads(path: Path, score: Tensor, bounded: Tensor, *, title: str) -> None:
    """z (L, H) and the bounded score, one cell per layer and head: orange is positional, blue semantic. NaN where a
    layer has fewer heads."""
    depth, count = score.shape
    wide, tall = max(3.4, 0.55 * count + 1.6), max(2.4, 0.42 * depth + 1.4)
    figure = new_figure((2 * wide, tall))
    axes = figure.subplots(1, 2)
    shown = score.sign() * score.abs().clamp(max=1e300).log1p() / math.log(10)
    reach = max(float(shown.nan_to_num().abs().max()), 1e-3)
    for axis, cells, values, limit, name in (
        (axes[0], shown, score, reach, "z = mean of (P - Y) / $\\gamma$, colour on a log scale"),
        (axes[1], bounded, bounded, 1.0, "mean of (P - Y) / (P + Y)"),
    ):
        axis.imshow(cells.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
        for layer, head in (~cells.isnan()).nonzero().tolist():
            ink = "white" if abs(float(cells[layer, head])) > 0.6 * limit else "black"
            axis.text(head, layer, _short(float(values[layer, head])), ha="center", va="center", fontsize=7, color=ink)
        axis.set_xticks(range(count), [str(h + 1) for h in range(count)])
        axis.set_yticks(range(depth), [str(l + 1) for l in range(depth)])
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{title}   orange: positional, purple: semantic", fontsize=10)
    save(figure, path)


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}" if abs(value) < 1000 else f"{value:.0e}"
