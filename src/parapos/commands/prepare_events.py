"""`parapos prepare dvsgesture` and `parapos prepare gen1`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .base import UserError, command, judge

Track = Callable[[Sequence[int], str], Iterable[int]]


def add(datasets: Any, track: Track) -> None:
    """Adds both to the datasets of `parapos prepare`. track: shows how far a loop is."""
    for name, summary in (
        (
            "dvsgesture",
            "Count DvsGesture and cut its recordings into gestures, which training reads many times faster.",
        ),
        ("gen1", "Count Prophesee GEN1 and read every clip once, for a list of its samples with their events."),
    ):
        parser = command(datasets, name, summary, f"parapos prepare {name} --root data/{name} --check")
        parser.add_argument(
            "--root", type=Path, default=Path(f"data/{name}"), metavar="DIR", help="where the recordings are"
        )
        parser.add_argument(
            "--cache", type=Path, metavar="DIR", help="where to write, without it DIR/prepared of the root"
        )
        parser.add_argument("--partial", action="store_true", help="accept any number of recordings, and missing ones")
        parser.add_argument("--keep-truncated", action="store_true", help="take what is whole of files that end early")
        writes = parser.add_mutually_exclusive_group()
        writes.add_argument("--check", action="store_true", help="write nothing")
        writes.add_argument(
            "--synthetic", action="store_true", help="write a tiny generated copy first; DIR must be new"
        )
        parser.set_defaults(run=_runner(name, track))


def _runner(name: str, track: Track) -> Callable[[argparse.Namespace], None]:
    def run(args: argparse.Namespace) -> None:
        try:
            from ..data import FormatError, dvsgesture, events_tree, gen1_scan
        except ImportError as error:
            told = "install it with: pip install 'parapos[train,events]'"
            raise UserError(f"parapos prepare {name}: {error}; {told}") from None
        try:
            if name == "dvsgesture":
                _prepare(dvsgesture, events_tree.make_dvsgesture, args, track)
            else:
                _prepare(gen1_scan, events_tree.make_gen1, args, track)
        except (FormatError, OSError) as error:
            raise UserError(f"parapos prepare {name}: {error}") from None

    return run


def _prepare(data: Any, make: Callable[[Path], Any], args: argparse.Namespace, track: Track) -> None:
    """data: a module with `check` and `prepare`."""
    if args.synthetic:
        make(args.root)
    options = {
        "truncated": "keep" if args.keep_truncated else "error",
        "complete": not (args.partial or args.synthetic),
        "progress": track,
    }
    if not args.check:
        judge(data.check(args.root, args.cache, prepared=False, **options), show=False)
        now, before = data.prepare(args.root, args.cache, **options)
        print(f"prepared {now} recordings, {before} were prepared before\n")
    judge(data.check(args.root, args.cache, **options), show=True)
