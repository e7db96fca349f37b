"""parapos bench points."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..encodings import ENCODINGS
from .base import UserError, command, seconds


def _run(args: argparse.Namespace) -> None:
    try:
        from ..bench import measure, points
    except ModuleNotFoundError as error:
        raise UserError(f"parapos bench points: {error}; install it with: pip install 'parapos[train]'") from None
    parts = args.parts.split(",")
    wrong = [part for part in parts if part not in points.PARTS]
    if wrong:
        raise UserError(f"parapos bench points: --parts: expected some of {', '.join(points.PARTS)}, got {wrong[0]!r}")
    results = points.run(encoding=args.encoding, seconds=args.seconds, parts=parts, quick=args.quick)
    told = points.markdown(results)
    print(told)
    for path in measure.write(results, told, None, args.out):
        print(f"wrote {path}", file=sys.stderr)


def add(benchmarks: Any) -> None:
    """Adds the command to the parser of benchmarks."""
    bench = command(
        benchmarks,
        "points",
        "Point clouds: sparse convolution, serialization and attention in patches as ratios, and growth with points.",
        "parapos bench points --seconds 600 --out results/points",
    )
    known = [name for name, cls in ENCODINGS.items() if cls.claims.unbounded and name != "none"]
    bench.add_argument("--encoding", choices=known, default="pape", help="what attention is measured with")
    bench.add_argument("--seconds", type=seconds, default=150.0, help="time for ratios, and as much for growth of time")
    bench.add_argument(
        "--parts", default="ratios,time,memory", help="some of ratios, time and memory (both of passes of a network)"
    )
    bench.add_argument("--quick", action="store_true", help="few points and three rounds: a smoke test, not a result")
    bench.add_argument(
        "--out", type=Path, default=Path("bench-points"), metavar="PATH", help="writes PATH.json, PATH.md"
    )
    bench.set_defaults(run=_run)
