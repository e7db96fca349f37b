"""The command line. It parses, calls and prints; the work is done elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__


class _UserError(Exception):
    """Something on the command line is wrong; the message is for the user."""


class _Parser(argparse.ArgumentParser):
    """Shows defaults in help, and tells an error in one line instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise _UserError(f"{self.prog}: {message}")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not (value.isdecimal() and low <= int(value) <= high):
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {value!r}")
        return int(value)

    return parse


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {value!r}")
    return seconds


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(value: str) -> list[str]:
        names = value.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}, expected some of {','.join(known)}")
        return names

    return parse


def _doctor(args: argparse.Namespace) -> None:
    from .report import doctor

    print(doctor.report())


def _precision(args: argparse.Namespace) -> None:
    from .report import precision

    rows = precision.experiment(grid=args.grid, dtype=args.dtype, encoding=args.encoding, settings=args.setting)
    print(f"{args.encoding} in {args.dtype} on a {args.grid} x {args.grid} grid, against float64:\n")
    print(precision.table(rows))


def _bench_attention(args: argparse.Namespace) -> None:
    import torch

    from .report import bench_attention

    if args.device == "cuda" and not torch.cuda.is_available():
        raise _UserError("parapos bench attention: --device cuda: torch finds no CUDA device here")
    torch.set_num_threads(args.threads)
    results = bench_attention.run(device=args.device, seconds=args.seconds, quick=args.quick)
    print(bench_attention.markdown(results))
    for path in bench_attention.write(results, args.out):
        print(f"wrote {path}", file=sys.stderr)


def _command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary, epilog=f"example: {example}")


def parser() -> argparse.ArgumentParser:
    from torch import get_num_threads

    from .report import bench_attention, precision

    top = _Parser(prog="parapos", description="Position encodings for vision transformers.")
    top.add_argument("--version", action="version", version=f"parapos {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    doctor = _command(commands, "doctor", "What this machine has, and which kernels run on it.", "parapos doctor")
    doctor.set_defaults(run=_doctor)
    checks = doctor.add_subparsers(metavar="CHECK")
    check = _command(
        checks,
        "precision",
        "How many digits each form of PaPE's scores keeps in a number type.",
        "parapos doctor precision --grid 32 --dtype fp16",
    )
    check.add_argument("--grid", type=_integer(2, precision.MAX_GRID), default=64, help="patches per side")
    check.add_argument("--dtype", choices=precision.DTYPES, default="bf16", help="number type of q, k and columns")
    check.add_argument("--encoding", choices=precision.ENCODINGS, default="pape", help="encoding to judge")
    check.add_argument(
        "--setting",
        type=_names(list(precision.SETTINGS)),
        default=",".join(precision.SETTINGS),
        help="initial coefficients (init), tripled ones (3x), or both with a comma",
    )
    check.set_defaults(run=_precision)

    benches = _command(commands, "bench", "Measure speed and memory.", "parapos bench attention --quick")
    bench = _command(
        benches.add_subparsers(metavar="BENCHMARK", required=True),
        "attention",
        "Time and memory of attention with PaPE, as ratios to attention without positions.",
        "parapos bench attention --seconds 60 --out results/attention",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    bench.add_argument("--seconds", type=_seconds, default=bench_attention.SECONDS, help="time for the timings")
    bench.add_argument(
        "--threads",
        type=_integer(1, 1024),
        default=get_num_threads(),
        help="CPU threads; 1 is steadier on a busy machine",
    )
    bench.add_argument("--quick", action="store_true", help="smallest size and two rounds: a smoke test, not a result")
    bench.add_argument(
        "--out", type=Path, default=Path("bench-attention"), metavar="PATH", help="writes PATH.json, PATH.md, PATH.png"
    )
    bench.set_defaults(run=_bench_attention)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 with one line on stderr if the command line is wrong."""
    try:
        args = parser().parse_args(argv)
        args.run(args)
    except _UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
