"""The paper's claim in minutes on a CPU: small models, one per encoding, tested at up to four times their resolution.

Each model is a run of the recipe `demo` in OUT/runs, which trains what the recipe says however long it takes; the clock
only tells the time left. A demo that was killed goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.layout import lay_out, readable
from ..encodings.looks import label
from ..training import recipe
from ..training.checkpoint import check_writable
from . import render, tables
from .grid import Grid, Results, Run, collect, of_sizes
from .store import ReportError

ENCODINGS = ("pape", "rope", "alibi", "sincos")
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
QUICK = {
    "optim.epochs": "1",
    "optim.batch": "256",
    "optim.part": "256",
    "model.options.dim": "32",
    "model.options.depth": "2",
    "model.options.mlp_dim": "32",
}
SMOKE = "SMOKE TEST, NOT A RESULT (--quick)"


@dataclass(frozen=True)
class Demo:
    """What came out: the grid and its numbers, the sentence that sums them up, and the files."""

    grid: Grid
    results: Results
    reading: str
    files: tuple[Path, ...]


def run(
    out: Path,
    *,
    data: Path | None = None,
    encodings: Sequence[str] = ENCODINGS,
    quick: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> Demo:
    """Trains, tests, draws. data: a folder with a folder of images per class; without it, scikit-learn's digits."""
    for place, name in enumerate(encodings):
        if name in encodings[:place]:
            raise ReportError(f"encodings: expected each once, got {name} twice")
    check_writable(out)
    grid = resolve(out, data, encodings, quick)
    tables.make(grid, min(2, os.cpu_count() or 1, len(encodings)), out / "log.txt", tell)
    results = collect(grid.jobs)
    reading = f"{SMOKE}. {read(grid, results)}" if quick else read(grid, results)
    files = render.write(grid, results, out / "demo.md", out / "extrapolation.csv", out / "extrapolation.png")
    with open(files[0], "a", encoding="utf-8") as file:
        file.write(f"\n{reading}\n")
    return Demo(grid, results, reading, tuple(files))


def resolve(out: Path, data: Path | None, encodings: Sequence[str], quick: bool) -> Grid:
    """A row per encoding, a column per size."""
    changes = dict(QUICK) if quick else {}
    if data is not None:
        changes["data.root"] = str(lay_out(data, out / "data", largest=int(32 * FACTORS[-1])))
    source, what = ("demo", "handwritten digits") if data is None else ("demo_images", readable(data.resolve().name))
    rows = {}
    for name in encodings:
        given = {**changes, "model.encoding": name}
        run = Run(source, given, out / "runs" / name, recipe.load(source, given), label=label(name))
        run.state()  # a run of another recipe is refused before anything is trained
        rows[label(name)] = run, False
    trained, epochs = run.side, run.wanted.optim.epochs
    title = f"Small ViTs trained on {what} at {trained} px for {epochs} epochs, tested far above"
    sizes = [int(trained * factor) for factor in (FACTORS if not quick else FACTORS[:3:2])]
    return of_sizes(f"{SMOKE}: {title}" if quick else title, rows, sizes)


def read(grid: Grid, results: Results) -> str:
    """One sentence on PaPE, or the first encoding, and its best rival at twice the resolution and at the largest."""
    sizes, trained = [column.size for column in grid.table.columns.values()], grid.trained("")
    ours = next((row for row in grid.rows if grid.encodings.get(row) == "pape"), grid.rows[0])
    double = min(sizes, key=lambda size: abs(size - 2 * trained))
    parts = []
    for size in dict.fromkeys((double, sizes[-1])):
        values = {row: grid.values(results, ("", row, f"{size} px"))[0] for row in grid.rows}
        metric = grid.places["", ours, f"{size} px"][0].metric
        score = values.pop(ours)
        message = f"at {size} px ({size / trained:g}x) {ours} gets {score:.1f}{metric.unit} {metric.label}"
        if values:
            best = max(values, key=lambda row: values[row])
            gap = score - values[best]
            how = f"{gap:.1f} points ahead of the next best," if gap > 0 else f"{-gap:.1f} points behind"
            message += f", {how if gap else 'level with'} {best} with {values[best]:.1f}{metric.unit}"
        parts.append(message)
    return f"Trained at {trained} px: {'; '.join(parts)}."
