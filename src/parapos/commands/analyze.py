"""The command `analyze`: heads of PaPE, and what a query sees of an image, a video, an event stream or a cloud."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .base import SPLITS, command, guarded, integer, number, tell, wrote

OPTIONS = ("samples", "split", "index", "image", "size", "query", "at", "columns", "layer", "head")


def _analyze(args: argparse.Namespace) -> None:
    from .. import analysis
    from ..malloc import keep_memory

    keep_memory()
    paths = analysis.run(
        args.run_folder,
        args.out or args.run_folder / "analysis",
        root=args.root or "",
        tau=None if args.tau == 1 else args.tau,
        scaled=not args.unscaled,
        tell=tell,
        **{name: getattr(args, name) for name in OPTIONS},
    )
    if args.tiles is not None:
        from ..analysis import tiles

        where = {"split": args.split, "root": args.root or "", "index": args.index}
        paths += tiles.run(args.run_folder, args.out or args.run_folder / "analysis", args.tiles, **where)
    wrote(paths)


def _query(value: str) -> tuple[float, ...]:
    """One to three numbers; what they mean, and how many there must be, depends on the model."""
    if not re.fullmatch(r"-?\d+(\.\d+)?(,-?\d+(\.\d+)?){0,2}", value):
        raise argparse.ArgumentTypeError(f"expected up to three numbers with commas between them, got {value!r}")
    return tuple(float(number) for number in value.split(","))


def _place(value: str) -> tuple[float, float]:
    """Two numbers."""
    if not re.fullmatch(r"\d+(\.\d+)?,\d+(\.\d+)?", value):
        raise argparse.ArgumentTypeError(f"expected x,y in pixels from the top left, got {value!r}")
    x, y = (float(number) for number in value.split(","))
    return x, y


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    analyze = command(
        commands,
        "analyze",
        "Which heads of PaPE are positional, which semantic; and what a query sees of an image, of a point cloud, or "
        "of a video or event stream through time. Counts are from 1.",
        "parapos analyze runs/digits-pape --index 7 --query 3,5 --layer 2 --head 1",
    )
    analyze.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run with pape or pape_ri")
    analyze.add_argument(
        "--samples",
        "--images",
        type=integer(1, 10**7),
        help="to score heads on, at most; without it 1000 images, 100 videos or event streams, 8 point clouds",
    )
    analyze.add_argument("--split", choices=SPLITS, default="test", help="part of the data")
    analyze.add_argument("--root", help="folder of the data, without it that of training")
    which = analyze.add_mutually_exclusive_group()
    which.add_argument("--image", type=Path, metavar="FILE", help="image for the maps")
    which.add_argument("--index", type=integer(0, 10**9), default=0, help="or place of a sample in the data, from 0")
    analyze.add_argument("--size", type=integer(1, 65536), help="side of an image, without it that of training")
    analyze.add_argument(
        "--query",
        type=_query,
        metavar="PLACE",
        help="patch that looks, without it the middle one; images: row,col; videos: tubelet,row,col; events: number of "
        "a token, or x,y,milliseconds for the nearest one, with x and y in patches; clouds: number of a point, or "
        "x,y,z for the nearest one (--query=-1,2,0 if the first is negative); cameras and LiDAR: number of a pillar, "
        "or x,y in metres",
    )
    analyze.add_argument(
        "--at", type=_place, metavar="X,Y", help="instead: place in an image that looks, in pixels of --image or sample"
    )
    analyze.add_argument("--columns", type=integer(1, 24), help="events: parts that time is divided into, without it 6")
    analyze.add_argument("--layer", type=integer(1, 10**6), help="without it that of the most positional head")
    analyze.add_argument("--head", type=integer(1, 10**6), help="without it the most positional one")
    analyze.add_argument(
        "--tau",
        type=number("a number above 0 and up to 1", lambda value: 0 < value <= 1),
        default=0.8,
        help="share of attention whose pairs count; 1 for all pairs",
    )
    analyze.add_argument(
        "--tiles",
        type=integer(1, 64),
        metavar="FACTOR",
        help="also draw which tiles of keys each head needs, at so many times the size of training: tiles-N.png for "
        "layer N, tiles.csv",
    )
    analyze.add_argument("--unscaled", action="store_true", help="leave out the factor of q.k, as the paper does")
    analyze.add_argument("--out", type=Path, metavar="DIR", help="of plots and numbers; without it RUN/analysis")
    analyze.set_defaults(run=guarded("analyze", _analyze))
