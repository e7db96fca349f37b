"""The figures of the paper that need no trained model: sums of parabolas, published curves and bars, two biases.

Published numbers are those of recipes/published/tables.toml; what runs gave stands in the tables.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.terms import Term
from ..canvas import save, subplots
from ..encodings import ENCODINGS, create_encoding
from ..encodings.looks import LOOKS, label
from ..recipes import paper
from ..tasks.base import Metric
from ..text import table as as_text
from . import plots
from .tables_spec import load

OURS = ("pape", "pape_ri")  # the encodings that the paper proposes
MATCH = 0.5  # points: a smaller gap to the best baseline counts as a match


def parabolas(path: Path, seed: int = 3, count: int = 4) -> str:
    """Figure 1a: parabolas of one query and their sum, along a line and over the plane. A fresh PaPE, not a trained
    one; the sum is the attention bias as the encoding itself gives it."""
    torch.manual_seed(seed)
    encoding = create_encoding("pape", dim=16, heads=1, head_dim=16, pos_dim=2, parabolas=count)
    x = 2 * torch.randn(1, 1, 16)
    a, b = -torch.nn.functional.softplus(x[0, 0] @ encoding.w_a[0].T), x[0, 0] @ encoding.w_b[0].T  # type: ignore[index]
    w_p = encoding.w_p[0]  # type: ignore[index]  # (m, p)
    line = torch.linspace(-4, 4, 161)
    along = w_p[:, :1] * line  # D = (x, 0), projected: (m, 161)
    each = (a[:, None] * along.square() + b[:, None] * along).detach()
    total = _bias(encoding, x, torch.stack([line, torch.zeros_like(line)], -1))
    side = torch.linspace(-4, 4, 41)
    plane = _bias(encoding, x, torch.cartesian_prod(side, side)).view(41, 41).T

    figure, axes = subplots(1, 2, size=(9.2, 3.8))
    for number, values in enumerate(each, 1):
        axes[0].plot(line, values, linewidth=1.2, color="#999999", label=f"{count} parabolas" if number == 1 else None)
    axes[0].plot(line, total, linewidth=2.6, color=LOOKS["pape"][1], label="their sum, the bias")
    axes[0].set(xlabel="relative position along x", ylabel="attention bias", title="one query, along a line")
    axes[0].set_ylim(float(total.min()) * 1.05, max(1.0, float(each.max())) * 1.3)
    axes[0].legend(frameon=False, fontsize=9)
    drawn = axes[1].imshow(plane.exp().numpy(), extent=(-4, 4, -4, 4), origin="lower", cmap="magma")
    axes[1].contour(side, side, plane, levels=8, colors="white", linewidths=0.5, alpha=0.6)
    axes[1].plot(0, 0, "o", color="#56B4E9", markersize=6)
    axes[1].set(xlabel="relative position along x", ylabel="along y", title="exp of the bias around the query (blue)")
    figure.colorbar(drawn, ax=axes[1], fraction=0.046, pad=0.03)
    save(figure, path)
    gap = float((each.sum(0) - total).abs().max())
    return f"{count} parabolas of one query; their sum is the encoding's bias to within {gap:.1e}."


def _bias(encoding: Any, x: Tensor, offsets: Tensor, head: int = 0) -> Tensor:
    """The bias (N,) of a head for a query of content x (1, 1, D) for keys at these offsets (N, p)."""
    n = len(offsets) + 1
    r = torch.cat([torch.zeros(1, offsets.shape[1]), offsets])
    q = k = torch.zeros(1, encoding.heads, n, encoding.head_dim)
    with torch.no_grad():
        terms: tuple[Term, ...] = encoding(x.expand(1, n, -1), q, k, r)[2]
        return torch.stack([term.scores(q.dtype) for term in terms]).sum(0)[0, head, 0, 1:]


def extrapolation(path: Path) -> str:
    """Figure 1b: the published curves."""
    table = load("extrapolation")
    sizes = [column.size for column in table.columns.values()]
    lines = [plots.Line(label(row), row, [table.published(row, c) for c in table.columns]) for row in table.rows]
    metric, title = Metric("published", "published score", "%"), f"{table.title} (the paper's figures)"
    plots.curves(path, sizes, {"": lines}, trained=sizes[0], title=title, metric=metric)
    ends = {line.name: line.values[-1] or 0.0 for line in lines}
    best, second = sorted(ends, key=lambda name: -ends[name])[:2]
    return f"At {sizes[-1]} px {best} is {ends[best] - ends[second]:.1f} points above the next best, {second}."


def verdicts(section: str = "generality", row: str = "pape") -> dict[str, tuple[str, float]]:
    """For every data set of a section: whether a row exceeds, matches or is below the best baseline, and the gap."""
    figures = paper()[section]
    columns = [name for name in figures["columns"] if name != "average"]
    judged = {}
    for place, name in enumerate(columns):
        rivals = [v[place] for other, v in figures["rows"].items() if other not in OURS and not math.isnan(v[place])]
        gap = round(figures["rows"][row][place] - max(rivals), 1)
        judged[name] = ("exceeds" if gap > MATCH else "matches" if gap >= -MATCH else "is below", gap)
    return judged


def generality(path: Path) -> str:
    """Figure 1c: the published scores as bars, and the verdict that follows from them."""
    figures, judged = paper()["generality"], verdicts()
    figure, axis = subplots(size=(11, 4))
    lines = [plots.Line(label(row), row, values[: len(judged)]) for row, values in figures["rows"].items()]
    plots.bars(axis, [f"{name}\n{word} ({gap:+.1f})" for name, (word, gap) in judged.items()], lines)
    axis.set(ylabel="published score, %", ylim=(0, 100), title="PaPE and the best baseline on each data set")
    save(figure, path)
    words = [word for word, _ in judged.values()]
    message = f"PaPE matches the best baseline on {words.count('matches')} data sets, exceeds it on "
    message += f"{words.count('exceeds')} and is below it on {words.count('is below')}; a match is a gap of at most "
    return f"{message}{MATCH:g} points, which is our threshold: the paper has none."


def distances(path: Path) -> str:
    """The appendix's comparison: how the biases of ALiBi and PaPE-RI fall with distance, by head and by content, and
    what moving and turning all positions does to them."""
    torch.manual_seed(0)
    reach = torch.linspace(0, 14, 57)
    figure, axes = subplots(1, 2, size=(9.2, 3.8), sharey=True)
    lines = []
    for axis, name, heads in ((axes[0], "alibi", 8), (axes[1], "pape_ri", 1)):
        encoding = create_encoding(name, dim=64, heads=heads, head_dim=8, pos_dim=2)
        contents = 3 * torch.randn(6, 1, 1, 64)
        line = torch.stack([reach, 0 * reach], -1)
        first = [_bias(encoding, x, line) for x in contents]
        shown = [_bias(encoding, contents[0], line, head) for head in range(heads)] if heads > 1 else first
        for curve in shown:
            axis.plot(reach, curve, color=LOOKS[name][1], linewidth=1.6)
        message = f"{heads} heads, any token" if heads > 1 else f"one head, {len(contents)} tokens"
        axis.set(title=f"{label(name)}: {message}", xlabel="distance", ylim=(-15, 0.5))
        spread = max(float((curve - first[0]).abs().max()) for curve in first)
        turn, points = torch.tensor([[0.6, -0.8], [0.8, 0.6]]), 4 * torch.randn(32, 2)
        plain, turned = (_bias(encoding, contents[0], r) for r in (points, points @ turn.T))
        half, whole = (float(_bias(encoding, contents[0], torch.tensor([[d, 0.0]]))) for d in (7.0, 14.0))
        moved = "yes" if ENCODINGS[name].claims.translation else "no"
        change = float((turned - plain).abs().max())
        lines.append([label(name), f"{whole / half:.2f}", f"{spread:.2f}", f"{change:.0e}", moved])
    axes[0].set_ylabel("attention bias")
    save(figure, path)
    header = ["", "bias at twice the distance", "spread over contents", "change when turned", "unchanged when moved"]
    return as_text(header, lines)


FIGURES = {"1a": parabolas, "1b": extrapolation, "1c": generality, "alibi": distances}
