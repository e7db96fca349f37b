"""parapos bench tokenizer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .base import UserError, command, integer, seconds


def _run(args: argparse.Namespace) -> None:
    try:
        import numba  # noqa: F401

        from ..bench import measure
        from ..bench import tokenizer as bench_tokenizer
    except ModuleNotFoundError as error:
        raise UserError(f"parapos bench tokenizer: {error}; install it with: pip install 'parapos[events]'") from None
    results = bench_tokenizer.run(seconds=args.seconds, events=args.events, quick=args.quick)
    message = bench_tokenizer.markdown(results)
    print(message)
    for path in measure.write(results, message, bench_tokenizer.plot, args.out):
        print(f"wrote {path}", file=sys.stderr)


def add(benchmarks: Any) -> None:
    """Adds the command to the parser of benchmarks."""
    bench = command(
        benchmarks,
        "tokenizer",
        "Events per second of the Spiking Patches tokenizer on one core: numba, NumPy and plain Python.",
        "parapos bench tokenizer --seconds 30 --out results/tokenizer",
    )
    bench.add_argument("--seconds", type=seconds, default=60.0, help="time for the timings")
    bench.add_argument("--events", type=integer(1000, 10**8), default=500_000, help="events per stream")
    bench.add_argument("--quick", action="store_true", help="few events and three rounds: a smoke test, not a result")
    bench.add_argument(
        "--out", type=Path, default=Path("bench-tokenizer"), metavar="PATH", help="writes PATH.json, PATH.md, PATH.png"
    )
    bench.set_defaults(run=_run)
