"""`parapos prepare NAME`: check and prepare any data set that is registered for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .base import UserError, command, describe, integer, judge

SHOWN = 20  # failures and notes


def add(commands: Any) -> None:
    """Adds a subcommand for each data set in the registry."""
    from ..data.preparations import PREPARATIONS

    parser = command(commands, "prepare", "Check and prepare a dataset on disk.", "parapos prepare imagenet --check")
    datasets = parser.add_subparsers(metavar="DATASET", required=True)
    for name, preparation in PREPARATIONS.items():
        one = command(datasets, name, preparation.summary, f"parapos prepare {name} --root data/{name} --check")
        one.add_argument("--root", type=Path, default=Path(f"data/{name}"), metavar="DIR", help="folder of the data")
        if preparation.items:
            one.add_argument("--cache", type=Path, metavar="DIR", help="where to write, without it ROOT/prepared")
            one.add_argument("--workers", type=integer(1, 1024), default=1, help="processes that prepare files")
        one.add_argument("--partial", action="store_true", help="accept a copy with other counts, or parts missing")
        writes = one.add_mutually_exclusive_group()
        writes.add_argument("--check", action="store_true", help="write nothing, and read what was prepared")
        writes.add_argument("--synthetic", action="store_true", help="first write a tiny generated copy to a new DIR")
        for option in preparation.options:
            kind: dict[str, Any] = {"default": option.default, "type": integer(0, 10**7)}
            if option.choices:
                kind = {"default": option.default, "choices": option.choices}
            elif option.default is False:
                kind = {"action": "store_true"}
            one.add_argument(f"--{option.name.replace('_', '-')}", help=option.help, **kind)
        one.set_defaults(run=_runner(name, preparation))


def _runner(name: str, preparation: Any) -> Callable[[argparse.Namespace], None]:
    def run(args: argparse.Namespace) -> None:
        try:
            from ..data import FormatError
            from ..data.roots import check_root

            data = import_module(preparation.module)
        except ImportError as error:
            install = f"pip install 'parapos[{preparation.extras}]'"
            raise UserError(f"parapos prepare {name}: {error}; install it with: {install}") from None
        try:
            check_root(args.root)
            _prepare(data, preparation, args)
        except (FormatError, OSError, ImportError) as error:
            raise UserError(f"parapos prepare {name}: {describe(error)}") from None

    return run


def _prepare(data: Any, preparation: Any, args: argparse.Namespace) -> None:
    from ..data import preparations

    if args.synthetic:
        data.synthetic(args.root)
    options = {option.name: getattr(args, option.name) for option in preparation.options}
    job = preparations.Job(args.root, complete=not (args.partial or args.synthetic), progress=track, options=options)
    if preparation.items:
        job = replace(job, cache=args.cache, workers=args.workers)
    if not args.check:
        judge(data.survey(replace(job, quick=True))[0], show=False)
        done = preparations.prepare(data, job)
        if preparation.items:
            print(f"prepared {done.now:,} {preparation.items}, {done.before:,} were prepared before\n")
        _print_some("", done.notes)
        _print_some("failed: ", done.failed)
        if done.failed:
            advice = f"; {preparation.advice}" if preparation.advice else ""
            print(f"{len(done.failed):,} {preparation.items or 'parts'} could not be prepared{advice}")
            raise SystemExit(1)
    judge(preparations.check(data, replace(job, quick=not args.check)))


def _print_some(title: str, lines: Sequence[str]) -> None:
    more = [f"and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    for line in [*(f"{title}{line}" for line in lines[:SHOWN]), *more]:
        print(line)


def track(items: Sequence[int], name: str) -> Iterator[int]:
    """The items, with a bar on a terminal and a line after every 500 elsewhere, on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, name, console=Console(stderr=True), transient=True)
        return
    for done, item in enumerate(items, 1):
        yield item
        if done % 500 == 0 or done == len(items):
            print(f"{name}: {done} of {len(items)}", file=sys.stderr)
