"""The paper's claim in minutes on a CPU: small models, one per encoding, tested at up to four times their resolution.

The package ships the demo's models, trained with seed 0 of the recipe `demo`, and what eight seeds of it gave. The demo
shows those first, then trains the same models here, one thread each, and puts both side by side. Training follows the
recipe however long it takes; the clock only tells the time left. A demo that was stopped resumes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from ..data.layout import lay_out, readable
from ..encodings.looks import label
from ..training import recipe
from . import demo_report, render, store, tables
from .demo_report import Committed
from .grid import Grid, Results, Run, collect, fill
from .schedule import Tell
from .tables_spec import Column, Row, Table

ENCODINGS = ("pape", "lookhere", "rope", "sincos")
QUICK = {
    "optim.epochs": "1",
    "optim.batch": "256",
    "optim.part": "256",
    "model.options.dim": "32",
    "model.options.depth": "2",
    "model.options.mlp_dim": "32",
}
SMOKE = "SMOKE TEST, NOT A RESULT (--quick)"
PROCESSES = min(2, os.cpu_count() or 1)


def shipped_folder() -> Path:
    """The demo's models as they come with the package: a folder of a run per encoding, and cells.csv of all seeds."""
    return Path(str(resources.files("parapos") / "shipped" / "demo"))


def committed() -> Committed:
    """What all seeds of the recipe gave, as it comes with the package."""
    grid = tables.resolve(tables.load("demo"), Path("runs"), {})
    return Committed(grid, Results(store.read(shipped_folder() / "cells.csv")))


@dataclass(frozen=True)
class Demo:
    """A part of the demo: its grid, what it says, its files, and whether it reached what it should."""

    grid: Grid
    text: str
    files: tuple[Path, ...]
    is_reached: bool = True


def introduce(out: Path, encodings: Sequence[str]) -> Demo:
    """What all seeds gave, drawn and in words: at once, because nothing is computed."""
    grid = _shipped_grid(out, encodings)
    plot = out / "shipped" / "extrapolation.png"
    demo_report.draw(plot, committed(), None, Results())
    return Demo(grid, demo_report.introduction(committed(), grid.table.title), (plot,))


def _shipped_grid(out: Path, encodings: Sequence[str]) -> Grid:
    """The shipped models, copied to a folder that can be written. Encodings that are not shipped are left out."""
    known = [name for name in encodings if (shipped_folder() / name).is_dir()]
    for name in known:
        folder = out / "shipped" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("recipe.toml", "weights.safetensors"):
            shutil.copyfile(shipped_folder() / name / file, folder / file)
    return _grid(out / "shipped", "demo", {}, known, "handwritten digits", is_given=True)


def show_shipped(out: Path, encodings: Sequence[str], tell: Tell = lambda line: None) -> Demo:
    """Tests the shipped models here and draws them beside all seeds."""
    grid = _shipped_grid(out, encodings)
    tables.make(grid, PROCESSES, out / "log.txt", tell)
    results, seeds = collect(grid.jobs), committed()
    text = demo_report.shipped(seeds, grid, results)
    plot = out / "shipped" / "extrapolation.png"
    demo_report.draw(plot, seeds, grid, results, "dots: shipped weights")
    return Demo(grid, text, (plot,))


def train(
    out: Path,
    *,
    data: Path | None = None,
    encodings: Sequence[str] = ENCODINGS,
    quick: bool = False,
    tell: Tell = lambda line: None,
) -> Demo:
    """Trains, tests, draws. data: a folder with a folder of images per class; without it, scikit-learn's digits, which
    are compared with what the package has of the same models."""
    grid = resolve(out, data, encodings, quick)
    tables.make(grid, PROCESSES, out / "log.txt", tell)
    results, seeds = collect(grid.jobs), committed() if data is None and not quick else None
    if seeds is not None:
        text, is_reached = demo_report.side_by_side(seeds, grid, results, collect(_shipped_grid(out, encodings).jobs))
    else:
        reading = demo_report.reading(grid, results)
        text, is_reached = f"{render.markdown(grid, results)}\n\n{SMOKE + '. ' if quick else ''}{reading}", True
    files = (out / "demo.md", out / "extrapolation.csv", out / "extrapolation.png")
    files[0].write_text(f"{text}\n", encoding="utf-8")
    render.write_numbers(grid, results, files[1])
    demo_report.draw(files[2], seeds, grid, results, "dots: trained on this machine" if seeds else "")
    return Demo(grid, text, files, is_reached)


def resolve(out: Path, data: Path | None, encodings: Sequence[str], quick: bool) -> Grid:
    """A row per encoding, a column per size and setting of the positions."""
    changes = dict(QUICK) if quick else {}
    source, what = ("demo", "handwritten digits") if data is None else ("demo_images", readable(data.resolve().name))
    if data is not None:
        largest = max(column.size for column in _columns(recipe.load(source).data.sides[0]).values())
        changes["data.root"] = str(lay_out(data, out / "data", largest=largest))
    grid = _grid(out / "runs", source, changes, encodings, what, is_quick=quick)
    for run in grid.runs:
        run.state()  # a run of another recipe is refused before anything is trained
    return grid


def _columns(trained: int) -> dict[str, Column]:
    """The columns of the table `demo`, for models trained at another size."""
    columns = tables.load("demo").columns
    base = min(column.size for column in columns.values())
    return {name: replace(column, size=trained * column.size // base) for name, column in columns.items()}


def _grid(
    folder: Path,
    source: str,
    changes: dict[str, str],
    encodings: Sequence[str],
    what: str,
    *,
    is_given: bool = False,
    is_quick: bool = False,
) -> Grid:
    runs = {}
    for name in encodings:
        merged = {**changes, "model.encoding": name}
        runs[name] = Run(source, merged, folder / name, recipe.load(source, merged), label=label(name), given=is_given)
    wanted = recipe.load(source, changes)
    trained = wanted.data.sides[0]
    columns = _columns(trained)
    if is_quick:
        columns = {name: column for name, column in columns.items() if column.size in (trained, 2 * trained)}
    title = f"Small ViTs trained on {what} at {trained} px for {wanted.optim.epochs} epochs, tested on larger images"
    table = Table(
        name="demo",
        title=f"{SMOKE}: {title}" if is_quick else title,
        rows={row: Row(changes={"model.encoding": row}) for row in runs},
        columns=columns,
        seeds=(wanted.run.seed,),
        blocks={"digits" if source == "demo" else what: source},
    )
    return fill(table, lambda block, row, column: [runs[row]])
