"""Trains the demo's models with all seeds and stores what the package ships: weights of seed 0, raw numbers of all.

    python -m tools.demo_models --runs runs --jobs 2

Run the same command again to resume. `--only pape` makes some encodings anew, after a change that altered their
training, and keeps what is stored of the others. With --only-store nothing is trained: what is in RUNS is stored, if
complete.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from parapos import analysis, cli
from parapos.experiments import demo, demo_report, tables
from parapos.experiments.grid import Results, collect

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "demo"


def merge(stored: Results, new: Results, order: Sequence[str]) -> Results:
    """The numbers of two results. Runs that are in the new one have no others; runs are in the given order."""
    renewed = {run for run, _, _ in new.scores}
    kept = {key: metrics for key, metrics in stored.scores.items() if key[0] not in renewed}
    return Results(dict(sorted({**kept, **new.scores}.items(), key=lambda item: order.index(item[0][0]))))


def store(runs: Path, only: Sequence[str] = ()) -> list[Path]:
    """Copies finished runs into the package and draws the README's pictures from the numbers of all seeds. only: the
    encodings that are in `runs`; the numbers of the others stay."""
    table = tables.load("demo")
    grid, whole = tables.resolve(table, runs, {}, only), tables.resolve(table, runs, {})
    missing = [str(job.run.folder) for job in grid.jobs if not job.is_done()]
    if missing:
        raise SystemExit(f"not complete, expected all runs trained and evaluated: {', '.join(missing)}")
    shipped = demo.shipped_folder()
    shipped.mkdir(parents=True, exist_ok=True)
    results = collect(grid.jobs)
    if only:
        results = merge(tables.read_raw(RESULTS), results, [run.name for run in whole.runs])
    written = [*tables.write_raw(results, RESULTS), *tables.write(whole, results, RESULTS)]
    shutil.copyfile(RESULTS / "cells.csv", shipped / "cells.csv")
    for run in grid.runs:
        if run.wanted.run.seed == grid.table.seeds[0]:
            folder = shipped / run.wanted.model.encoding
            folder.mkdir(exist_ok=True)
            for name in ("recipe.toml", "weights.safetensors"):
                shutil.copyfile(run.folder / name, folder / name)
                written.append(folder / name)
    images = ROOT / "docs" / "images"
    demo_report.draw(images / "extrapolation.png", demo.committed(), None, Results())
    sizes = sorted({column.size or 0 for column in grid.table.columns.values()})
    return [*written, images / "extrapolation.png", *analysis.look_inside(shipped / "pape", images, sizes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--only", default="", help="some encodings, with commas between them")
    parser.add_argument("--only-store", action="store_true", help="train nothing")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    if not args.only_store:
        words = ["table", "demo", "--root", str(args.runs), "--jobs", str(args.jobs)]
        if code := cli.main([*words, *(["--only", args.only] if only else [])]):
            return code
    for path in store(args.runs, only):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
