"""`parapos prepare ucf101`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .base import UserError, command, integer, judge

Track = Callable[[Sequence[int], str], Iterable[int]]
SHOWN = 20  # clips


def add(datasets: Any, track: Track) -> None:
    """Adds it to the datasets of `parapos prepare`. track: shows how far a loop is."""
    parser = command(
        datasets,
        "ucf101",
        "Count UCF101, and decode the frames that training sees once and for all (31 GB).",
        "parapos prepare ucf101 --root data/ucf101 --check",
    )
    parser.add_argument(
        "--root", type=Path, default=Path("data/ucf101"), metavar="DIR", help="with UCF-101 and ucfTrainTestlist in it"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where to write, without it DIR/prepared of the root")
    parser.add_argument("--sample", type=integer(1, 10**6), default=100, help="videos to decode for --check")
    parser.add_argument("--partial", action="store_true", help="accept any lists, and videos that are not there")
    writes = parser.add_mutually_exclusive_group()
    writes.add_argument("--check", action="store_true", help="write nothing")
    writes.add_argument("--synthetic", action="store_true", help="write a tiny generated copy first; DIR must be new")

    def run(args: argparse.Namespace) -> None:
        try:
            from ..data import FormatError, ucf101_cache, video_tree
        except ImportError as error:
            told = "install it with: pip install 'parapos[train,video]'"
            raise UserError(f"parapos prepare ucf101: {error}; {told}") from None
        try:
            if args.synthetic:
                video_tree.make_ucf101(args.root)
            complete = not (args.partial or args.synthetic)
            if not args.check:
                judge(ucf101_cache.check(args.root, args.cache, sample=0, complete=complete), show=False)
                done = ucf101_cache.prepare(args.root, args.cache, progress=track)
                print(f"prepared {done.now:,} clips, {done.before:,} were prepared before")
                for told in done.early[:SHOWN]:
                    print(f"ends too early: {told}")
                for told in done.unreadable[:SHOWN]:
                    print(f"unreadable: {told}")
                if done.unreadable:
                    print(
                        f'{len(done.unreadable):,} clips are unreadable; data.options.corrupt = "skip" trains without'
                    )
                    raise SystemExit(1)
            sample = args.sample if args.check else 0
            judge(ucf101_cache.check(args.root, args.cache, sample=sample, complete=complete, progress=track))
        except (FormatError, OSError, ImportError) as error:
            raise UserError(f"parapos prepare ucf101: {error}") from None

    parser.set_defaults(run=run)
