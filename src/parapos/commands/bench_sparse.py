"""The command `bench sparse`: what sparse attention does in trained models far above their size."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import get_num_threads, set_num_threads

from .base import command, guarded, integer, names, seconds, several, tell, wrote

PARTS = ("shares", "predictions", "times", "models", "memory")
DATA = ("digits", "fashion_mnist", "clips", "gestures")


def _sparse(args: argparse.Namespace) -> None:
    from ..bench import sparse, sparse_view
    from ..training import checkpoint

    set_num_threads(args.threads)
    checkpoint.check_writable(args.out)
    numbers = sparse.Numbers.read(args.out / "numbers.csv")
    if not args.from_cache:
        found = sparse.subjects(args.root, args.data_root, args.jobs, args.data, tell)
        options = {"samples": args.samples, "seconds": args.seconds}
        sparse.run(found, numbers, parts=args.parts, factors=args.factors, **options)
    print(sparse_view.markdown(numbers))
    wrote([numbers.path, *sparse_view.plot(numbers, args.out)])


def add(commands: Any) -> None:
    """Adds the command to those of `bench`."""
    bench = command(
        commands,
        "sparse",
        "Which share of attention small trained models need at 1x to 16x their size, what that saves, and whether "
        "their predictions stay. Trains the models of four desk recipes first; nothing is measured twice.",
        "parapos bench sparse --data-root /usr/share/datasets/fashion-mnist --out docs/results/sparse",
    )
    bench.add_argument("--root", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    bench.add_argument("--data-root", default="", metavar="DIR", help="folder of Fashion-MNIST")
    bench.add_argument("--jobs", type=integer(1, 256), default=1, help="runs that are trained at a time")
    bench.add_argument("--data", type=names(DATA), default=",".join(DATA), help="some of the data sets")
    bench.add_argument("--parts", type=names(PARTS), default=",".join(PARTS), help="what to measure")
    bench.add_argument("--factors", type=several(integer(1, 16)), default="1,2,4,8,16", help="times the trained side")
    bench.add_argument("--samples", type=integer(1, 10**6), default=64, help="for predictions, of the test set")
    bench.add_argument("--seconds", type=seconds, default=4.0, help="for the timings of a model at a size")
    bench.add_argument("--threads", type=integer(1, 1024), default=get_num_threads(), help="CPU threads")
    bench.add_argument("--from-cache", action="store_true", help="only what was measured before")
    bench.add_argument("--out", type=Path, default=Path("bench-sparse"), metavar="DIR", help="of numbers.csv and plots")
    bench.set_defaults(run=guarded("bench sparse", _sparse))
