"""Plots of the image experiments: accuracy over resolution, scores of heads, maps of a query.

Colours and names of encodings are the same in every plot. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

NAMES = {
    "pape": "PaPE",
    "pape_ri": "PaPE-RI",
    "sincos": "sin-cos",
    "rope": "RoPE",
    "rope_mixed": "RoPE-Mixed",
    "alibi": "ALiBi",
    "lookhere": "LookHere",
    "none": "none",
    "polynomial": "polynomial",
}
COLOURS = {
    "pape": "#D55E00",
    "pape_ri": "#E69F00",
    "sincos": "#7A7A7A",
    "rope": "#0072B2",
    "rope_mixed": "#56B4E9",
    "alibi": "#009E73",
    "lookhere": "#CC79A7",
    "none": "#B8B8B8",
    "polynomial": "#8C6D31",
}
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
        return self.colour or COLOURS[self.encoding]


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


def curves(path: Path, sizes: Sequence[int], lines: Sequence[Line], *, trained: int, title: str, ylabel: str) -> None:
    """Percentages over the resolution, each curve with its name at its end; the trained resolution is marked."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.6, 4.6), layout="constrained")
    axis.axvline(trained, color="black", linewidth=0.8, linestyle=":")
    axis.annotate("trained here", (trained, 2), (3, 0), textcoords="offset points", fontsize=8, color="#444444")
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
    for height, (value, line) in zip(_spread([v for v, _ in ends], 5.0), ends, strict=True):
        axis.annotate(
            f"{line.name}{', interpolated' if line.dashed else ''}  {value:.1f}",
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
    axis.set(title=title, xlabel="resolution of the test images, pixels per side", ylabel=ylabel, ylim=(0, 102))
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


def heads(path: Path, score: Tensor, bounded: Tensor, *, title: str) -> None:
    """z (L, H) and the bounded score, one cell per layer and head: orange is positional, blue semantic."""
    pyplot = load_pyplot()
    depth, count = score.shape
    wide, tall = max(3.4, 0.55 * count + 1.6), max(2.4, 0.42 * depth + 1.4)
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * wide, tall), layout="constrained")
    shown = score.sign() * score.abs().clamp(max=1e300).log1p() / math.log(10)
    reach = max(float(shown.abs().max()), 1e-3)
    for axis, cells, values, limit, name in (
        (axes[0], shown, score, reach, "z = mean of (P - Y) / $\\gamma$, colour on a log scale"),
        (axes[1], bounded, bounded, 1.0, "mean of (P - Y) / (P + Y)"),
    ):
        axis.imshow(cells.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
        for layer in range(depth):
            for head in range(count):
                dark = abs(float(cells[layer, head])) > 0.6 * limit
                told = _short(float(values[layer, head]))
                axis.text(head, layer, told, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axis.set_xticks(range(count), [str(h + 1) for h in range(count)])
        axis.set_yticks(range(depth), [str(l + 1) for l in range(depth)])
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{title}   orange: positional, purple: semantic", fontsize=10)
    save(figure, path)


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}" if abs(value) < 1000 else f"{value:.0e}"


@dataclass(frozen=True)
class Maps:
    """What a query sees of an image: each map is (rows, cols); query is its row and column, counted from 0."""

    name: str
    image: Tensor  # (3, H, W) in [0, 1]
    query: tuple[int, int]
    distance: Tensor
    direction: Tensor
    semantics: Tensor
    attention: Tensor


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
        line[0].add_patch(pyplot.Rectangle(corner, wide, high, fill=False, edgecolor="#D55E00", linewidth=2))
        line[0].set_ylabel(found.name, fontsize=10)
        parts = [
            ("distance  $\\langle a_i, \\delta^2\\rangle$", found.distance, "magma", None),
            ("direction  $\\langle b_i, \\delta\\rangle$", found.direction, "RdBu_r", 0.0),
            ("semantics  $\\langle q_i, k_j\\rangle$", found.semantics, "RdBu_r", None),
            ("their sum", found.distance + found.direction + found.semantics, "magma", None),
            ("attention: its softmax", found.attention, "viridis", None),
        ]
        for axis, (name, values, colours, centre) in zip(line[1:], parts, strict=True):
            limits: dict[str, float] = {}
            if centre is not None:
                reach = max(float(values.abs().max()), 1e-9)
                limits = {"vmin": -reach, "vmax": reach}
            drawn = axis.imshow(values.numpy(), cmap=colours, **limits)
            axis.plot(
                col, row, "o", markersize=5, markerfacecolor="none", markeredgecolor="#D55E00", markeredgewidth=1.5
            )
            bar = figure.colorbar(drawn, ax=axis, fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=7)
            if place == 0:
                axis.set_title(name, fontsize=10)
        for axis in line:
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0][0].set_title("image and query", fontsize=10)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    load_pyplot().close(figure)
