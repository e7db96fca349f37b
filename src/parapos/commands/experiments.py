"""The image experiments: demo, sweep, table, analyze."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..encodings import list_encodings
from .base import UserError, command, integer, names, seconds, several

SPLITS = ("train", "val", "test")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _wrote(paths: Sequence[Path]) -> None:
    for path in paths:
        _tell(f"wrote {path}")


def _guarded(name: str, work: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """The work of a command, with its errors as one line and missing packages by the name of what brings them."""

    def run(args: argparse.Namespace) -> None:
        try:
            from ..data import FormatError
            from ..report.sweep import ReportError
            from ..training.callbacks import Stopped
            from ..training.checkpoint import CheckpointError
            from ..training.recipe import RecipeError
            from ..training.task import NonFiniteLoss
        except ImportError as error:
            raise UserError(f"parapos {name}: {error}; install it with: pip install 'parapos[train,report]'") from None
        try:
            work(args)
        except (RecipeError, CheckpointError, FormatError, ReportError, OSError) as error:
            raise UserError(f"parapos {name}: {error}") from None
        except ModuleNotFoundError as error:
            raise UserError(f"parapos {name}: {error}; install it with: pip install 'parapos[train,report]'") from None
        except Stopped as stop:
            _tell(str(stop))
            raise SystemExit(128 + stop.signal) from None
        except NonFiniteLoss as error:
            _tell(str(error))
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            _tell(f"parapos {name}: stopped; the same command goes on")
            raise SystemExit(130) from None

    return run


def _sweep(args: argparse.Namespace) -> None:
    from ..malloc import keep_memory
    from ..report import sweep

    keep_memory()
    runs: list[Path] = args.runs
    if any(path.is_file() for path in runs):
        if len(runs) > 1 or not args.recipe or not args.out:
            told = "of weights alone: expected one file, --recipe to say how data are read, and --out"
            raise UserError(f"parapos sweep {told}")
        runs = [sweep.adopt(runs[0], args.recipe, args.out, args.changes)]
    elif args.recipe or args.changes:
        raise UserError("parapos sweep: --recipe and --section.key are for weights alone; a run has a recipe")
    found = sweep.run(
        runs,
        args.sizes,
        interpolate=args.interpolate,
        data=args.data or "",
        split=args.split,
        root=args.root or "",
        batch=args.batch,
        tell=_tell,
    )
    print(found.markdown())
    _wrote(found.write(args.out or runs[0] / "sweep"))


def _table(args: argparse.Namespace) -> None:
    from ..malloc import keep_memory
    from ..report import tables, tables_cost

    keep_memory()
    table = tables.load(args.name)
    if args.dry_run and args.from_cache:
        raise UserError("parapos table: --dry-run and --from-cache exclude each other")
    if table.bench:
        _bench_table(table, args)
        return
    runs = tables.resolve(table, args.root, args.changes, args.only)
    if args.dry_run:
        kept = tables.kept(runs)
        print(tables.markdown(table, kept, args.only) + "\n")
        print(tables_cost.estimate(runs, set(kept), args.tflops))
        return
    found = tables.kept(runs) if args.from_cache else tables.make(table, runs, args.root, _tell)
    print(tables.markdown(table, found, args.only))
    _wrote(tables.write(table, found, args.root))


def _bench_table(table: Any, args: argparse.Namespace) -> None:
    """The efficiency table, which `parapos bench model` measures."""
    import torch

    from ..report import bench_model, bench_model_view, measure

    if args.changes:
        raise UserError(f"parapos table {table.name}: trains nothing, so it has no recipe to change")
    options = dict(table.bench)
    for name in args.only:
        if name not in options["encodings"]:
            known = ", ".join(options["encodings"])
            raise UserError(f"parapos table {table.name}: --only: unknown row {name!r}, expected some of {known}")
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
        print(bench_model_view.markdown(json.loads(kept.read_text(encoding="utf-8"))))
    else:
        results = bench_model.run(**options)
        told = bench_model_view.markdown(results)
        print(told)
        _wrote(measure.write(results, told, bench_model_view.plot, prefix))


def _analyze(args: argparse.Namespace) -> None:
    from ..malloc import keep_memory
    from ..report import analysis

    keep_memory()
    wanted = ("images", "split", "index", "image", "size", "query", "layer", "head")
    paths = analysis.run(
        args.run_folder,
        args.out or args.run_folder / "analysis",
        root=args.root or "",
        tau=None if args.tau == 1 else args.tau,
        scaled=not args.unscaled,
        tell=_tell,
        **{name: getattr(args, name) for name in wanted},
    )
    _wrote(paths)


def _demo(args: argparse.Namespace) -> None:
    from ..report import demo

    found = demo.run(args.out, data=args.data, encodings=args.encodings, seconds=args.seconds, quick=args.quick)
    print(f"\n{found.found.markdown()}\n\n{found.reading}\n")
    _wrote(found.files)


def _query(value: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*,[1-9]\d*", value):
        raise argparse.ArgumentTypeError(f"expected row,col counted from 1, got {value!r}")
    row, col = value.split(",")
    return int(row), int(col)


def _share(value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {value!r}")
    return found


def _positive(value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value!r}")
    return found


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
    demo.add_argument("--encodings", type=names(list_encodings()), default="pape,rope,alibi,sincos", help="models")
    demo.add_argument(
        "--seconds", type=seconds, default=300.0, help="for training and testing; fewer epochs if need be"
    )
    demo.add_argument("--quick", action="store_true", help="next to no training: a smoke test, not a result")
    demo.set_defaults(run=_guarded("demo", _demo))

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
    sweep.set_defaults(run=_guarded("sweep", _sweep))

    table = command(
        commands,
        "table",
        "Make a table of the paper: train and test what is not there yet. Any --section.key VALUE is for all its runs.",
        "parapos table extrapolation --data.root data/imagenet --dry-run",
    )
    table.add_argument("name", metavar="NAME", help="a table that comes with the package, or a .toml file")
    table.add_argument("--dry-run", action="store_true", help="only say what is there and what the rest would cost")
    table.add_argument("--root", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    table.add_argument("--only", type=lambda value: value.split(","), default=[], metavar="ROWS", help="some rows")
    table.add_argument("--from-cache", action="store_true", help="only what was measured before")
    table.add_argument("--tflops", type=_positive, default=150.0, help="TFLOP/s that a GPU sustains, for the estimate")
    table.set_defaults(run=_guarded("table", _table))

    analyze = command(
        commands,
        "analyze",
        "Which heads of PaPE are positional, which semantic; and what a query sees of an image. Counts are from 1.",
        "parapos analyze runs/digits-pape --index 7 --query 3,5 --layer 2 --head 1",
    )
    analyze.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run with pape or pape_ri")
    analyze.add_argument("--images", type=integer(1, 10**7), default=1000, help="images to score heads on, at most")
    analyze.add_argument("--split", choices=SPLITS, default="test", help="part of the data")
    analyze.add_argument("--root", help="folder of the data, without it that of training")
    which = analyze.add_mutually_exclusive_group()
    which.add_argument("--image", type=Path, metavar="FILE", help="image for the maps")
    which.add_argument("--index", type=integer(0, 10**9), default=0, help="or its place in the data, from 0")
    analyze.add_argument("--size", type=integer(1, 65536), help="side of that image, without it that of training")
    analyze.add_argument("--query", type=_query, metavar="ROW,COL", help="patch that looks, without it the middle one")
    analyze.add_argument("--layer", type=integer(1, 10**6), help="without it that of the most positional head")
    analyze.add_argument("--head", type=integer(1, 10**6), help="without it the most positional one")
    analyze.add_argument(
        "--tau", type=_share, default=0.8, help="share of attention whose pairs count; 1 for all pairs"
    )
    analyze.add_argument("--unscaled", action="store_true", help="leave out the factor of q.k, as the paper does")
    analyze.add_argument("--out", type=Path, metavar="DIR", help="of plots and numbers; without it RUN/analysis")
    analyze.set_defaults(run=_guarded("analyze", _analyze))
