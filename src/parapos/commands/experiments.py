"""The experiments: demo, sweep, table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..encodings import list_encodings
from .base import SPLITS, UserError, command, guarded, integer, names, number, repeated, several, tell, wrote

ROOT = Path("runs")  # of the runs of tables, unless --root says another


def _sweep(args: argparse.Namespace) -> None:
    from ..experiments import render, sweep
    from ..malloc import keep_memory
    from ..training import checkpoint
    from ..training.runs import adopt

    keep_memory()
    runs: list[Path] = args.runs
    if any(path.is_file() for path in runs):
        if len(runs) > 1 or not args.recipe or not args.out:
            message = "of weights alone: expected one file, --recipe to say how data are read, and --out"
            raise UserError(f"parapos sweep {message}")
        runs = [adopt(runs[0], args.recipe, args.out, args.changes)]
    elif args.recipe or args.changes:
        raise UserError("parapos sweep: --recipe and --section.key are for weights alone; a run has a recipe")
    options = dict(interpolate=args.interpolate, data=args.data or "", split=args.split, root=args.root or "")
    grid, out = sweep.resolve(runs, args.sizes, **options), args.out or runs[0] / "sweep"
    checkpoint.check_writable(out)
    results = sweep.run(grid, tell, args.batch)
    print(render.markdown(grid, results))
    wrote(render.write(grid, results, out / "sweep"))


def _table(args: argparse.Namespace) -> None:
    from ..experiments import cost, hyperparameters, render, tables
    from ..experiments.grid import collect
    from ..malloc import keep_memory
    from ..training import checkpoint

    keep_memory()
    if args.name == hyperparameters.NAME:
        names = ("only", "from_cache", "jobs", "results", "tflops")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
        given += ["--root"] * (args.root != ROOT) + [f"--{key}" for key in args.changes]
        if given:
            raise UserError(f"parapos table {args.name}: {given[0]} has no effect: it trains and measures nothing")
        print(hyperparameters.markdown())
        return
    table = tables.load(args.name)
    if args.dry_run and args.from_cache:
        raise UserError("parapos table: --dry-run and --from-cache exclude each other")
    if args.tflops is not None and (table.bench or table.seeds or not args.dry_run):
        raise UserError(f"parapos table {table.name}: --tflops is for --dry-run of a table that trains on GPUs")
    for option, given in (("--jobs", args.jobs), ("--results", args.results)):
        if given is not None and not table.seeds:
            raise UserError(f"parapos table {table.name}: {option} is for tables with seeds")
    if table.bench:
        _bench_table(table, args)
        return
    default = Path("docs/results") if args.from_cache and table.seeds else args.root / "tables"
    out = args.results or default / table.name
    if table.seeds and args.from_cache and args.changes:
        raise UserError(f"parapos table {table.name}: --section.key is for runs, --from-cache has none")
    grid = tables.resolve(table, args.root, args.changes, args.only)
    if args.dry_run:
        print(render.markdown(grid, collect(grid.jobs, curves=grid.has_curves)) + "\n")
        print(cost.estimate_study(grid) if table.seeds else cost.estimate(grid, args.tflops or cost.TFLOPS))
        return
    if table.seeds and args.from_cache:
        results = tables.read_raw(out)
        print(render.markdown(grid, results))
        wrote(tables.write(tables.resolve(table, args.root, {}), results, out))
        return
    whole = tables.with_others(grid, args.root, args.changes)

    def write() -> list[Path]:
        results = collect(whole.jobs, curves=grid.has_curves)
        raw = tables.write_raw(results, out) if table.seeds else []
        return raw + tables.write(whole, results, out)

    if not args.from_cache:
        checkpoint.check_writable(out if table.seeds else out.parent)
        tables.make(grid, (args.jobs or 1) if table.seeds else 0, out / "log.txt", tell, write)
    print(render.markdown(grid, collect(grid.jobs, curves=grid.has_curves)))
    wrote(write())


def _bench_table(table: Any, args: argparse.Namespace) -> None:
    """The efficiency table, which `parapos bench model` measures."""
    import torch

    from ..bench import measure
    from ..bench import model as bench_model
    from ..bench import model_view as bench_model_view

    if args.changes:
        raise UserError(f"parapos table {table.name}: trains nothing, so it has no recipe to change")
    options = asdict(table.bench)
    for name in args.only:
        if name not in options["encodings"]:
            known = ", ".join(options["encodings"])
            raise UserError(f"parapos table {table.name}: --only: unknown row {name!r}, expected some of {known}")
    if (twice := repeated(args.only)) is not None:
        raise UserError(f"parapos table {table.name}: --only: expected each row once, got {twice} twice")
    options["encodings"] = args.only or options["encodings"]
    options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    options["dtype"] = "fp16" if torch.cuda.is_available() else "fp32"
    prefix = args.root / "tables" / table.name
    kept = prefix.with_name(f"{prefix.name}.json")
    if args.dry_run:
        rows = bench_model.make_rows(options["encodings"], options["parabolas"])
        about = f"{options['seconds'] / 3600:.2f} hours of this machine's {options['device']} for the timings"
        print(f"{table.title}\n\n{len(rows)} rows: {', '.join(map(str, rows))}\nno training; about {about}")
        print(f"{kept}: {'there' if kept.is_file() else 'not there'}")
    elif args.from_cache:
        if not kept.is_file():
            raise UserError(f"parapos table {table.name}: {kept}: no such file; measure it without --from-cache")
        try:
            message = bench_model_view.markdown(json.loads(kept.read_bytes()))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(f"parapos table {table.name}: {kept}: damaged, {type(error).__name__}: {error}") from None
        print(message)
    else:
        results = bench_model.run(**options)
        message = bench_model_view.markdown(results)
        print(message)
        wrote(measure.write(results, message, bench_model_view.plot, prefix))


def _demo(args: argparse.Namespace) -> None:
    from .. import analysis
    from ..experiments import demo
    from ..training import checkpoint

    checkpoint.check_writable(args.out)
    is_compared = args.data is None and not args.quick

    def show(part: demo.Demo, out: Path, *, with_maps: bool = True) -> None:
        print(f"\n{part.text}\n", flush=True)
        wrote(part.files)
        if not with_maps:
            return
        sizes = [column.size or 0 for column in part.grid.table.columns.values()]
        for run in part.grid.runs:
            if run.wanted.model.encoding == "pape":
                wrote(analysis.look_inside(run.folder, out, sorted(sizes)))

    if is_compared:
        demo.resolve(args.out, None, args.encodings, quick=False)  # an error should come before any work
        if any((demo.shipped_folder() / name).is_dir() for name in args.encodings):
            show(demo.introduce(args.out, args.encodings), args.out / "shipped")
            tell("\nThese models come with the package. Now those of seed 0 are tested on this machine.")
            show(demo.show_shipped(args.out, args.encodings, tell), args.out / "shipped", with_maps=False)
            tell("\nNow the same models are trained on this machine, as the recipe says. Stop it at any time: the same")
            tell("command resumes.")
    made = demo.train(args.out, data=args.data, encodings=args.encodings, quick=args.quick, tell=tell)
    show(made, args.out)
    if is_compared:
        tell("Next: `parapos explore` writes a page in which you drag a query over an image and see what PaPE does.")
    if not made.is_reached:
        raise SystemExit(1)


def add(commands: Any) -> None:
    """Adds the commands to a parser."""
    demo = command(
        commands,
        "demo",
        "Train small models with PaPE and its rivals, and test them at up to four times their resolution, in minutes.",
        "parapos demo --out demo",
    )
    demo.add_argument("--data", type=Path, metavar="DIR", help="folder with a folder of images per class, not digits")
    demo.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where everything is written")
    demo.add_argument("--encodings", type=names(list_encodings()), default="pape,lookhere,rope,sincos", help="models")
    demo.add_argument("--quick", action="store_true", help="next to no training: a smoke test, not a result")
    demo.set_defaults(run=guarded("demo", _demo))

    sweep = command(
        commands,
        "sweep",
        "Evaluate runs at many resolutions; a cell that was evaluated before is not evaluated again.",
        "parapos sweep runs/digits-pape runs/digits-rope --sizes 32,48,64",
    )
    sweep.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, or one weights file")
    sweep.add_argument("--sizes", type=several(integer(1, 65536)), required=True, help="pixels per side")
    sweep.add_argument("--interpolate", choices=("both", "on", "off"), default="both", help="position interpolation")
    sweep.add_argument("--data", help="another dataset")
    sweep.add_argument("--split", choices=SPLITS, default="test", help="part of the data")
    sweep.add_argument("--root", help="folder of the data, without it that of training")
    sweep.add_argument("--batch", type=integer(1, 65536), help="images at a time, without it by the number of tokens")
    sweep.add_argument("--recipe", help="for weights alone: how data are read; --section.key VALUE changes it")
    sweep.add_argument("--out", type=Path, metavar="DIR", help="of table, plot and CSV; without it RUN/sweep")
    sweep.set_defaults(run=guarded("sweep", _sweep))

    table = command(
        commands,
        "table",
        "Make a table of the paper: train and evaluate what is missing. Any --section.key VALUE applies to all runs.",
        "parapos table extrapolation --data.root data/imagenet --dry-run",
    )
    table.add_argument("name", metavar="NAME", help="a table that comes with the package, or a .toml file")
    table.add_argument("--dry-run", action="store_true", help="only print what is there and an estimate for the rest")
    table.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="where the runs are")
    table.add_argument(
        "--only",
        type=lambda value: value.split(","),
        action="extend",
        default=[],
        metavar="ROWS",
        help="some rows, with commas between them",
    )
    table.add_argument("--from-cache", action="store_true", help="only what was measured before")
    table.add_argument("--jobs", type=integer(1, 256), help="with seeds: runs at a time, of one thread each")
    table.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="with seeds: raw results, tables and plots; without it ROOT/tables/NAME, --from-cache docs/results/NAME",
    )
    table.add_argument(
        "--tflops",
        type=number("a positive number", lambda value: 0 < value < float("inf")),
        help="TFLOP/s that a GPU sustains, for the estimate of --dry-run; without it 150",
    )
    table.set_defaults(run=guarded("table", _table))
