"""The command `explore`: a page in which a trained model runs, to see what its attention looks at."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import SPLITS, command, guarded, tell, wrote


def _explore(args: argparse.Namespace) -> None:
    from ..analysis import explorer
    from ..experiments import demo

    shipped = demo.shipped_folder()
    runs = [args.run_folder or shipped / "pape"]
    if args.beside is not None:
        runs.append(args.beside)
    elif args.run_folder is None:
        runs.append(shipped / "rope")
    options = dict(dtype=args.dtype, split=args.split, root=args.root or "", tell=tell)
    wrote([explorer.build(runs, args.out, **options)])
    tell(f"Open it in a browser: {args.out.resolve().as_uri()}")


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    explore = command(
        commands,
        "explore",
        "Write one HTML file in which a trained ViT runs: drag a query over an image and see what its attention is "
        "made of. Without RUN, the demo's PaPE beside RoPE.",
        "parapos explore runs/digits-pape --out explore.html",
    )
    explore.add_argument("run_folder", type=Path, nargs="?", metavar="RUN", help="folder of a run of a ViT")
    explore.add_argument("--beside", type=Path, metavar="RUN", help="another run on the same data, shown below it")
    explore.add_argument("--dtype", choices=("float32", "float16", "int8"), default="float32", help="of the weights")
    explore.add_argument("--split", choices=SPLITS, default="test", help="part of the data that images are taken from")
    explore.add_argument("--root", help="folder of the data, without it that of training")
    explore.add_argument("--out", type=Path, default=Path("explore.html"), metavar="FILE", help="the page")
    explore.set_defaults(run=guarded("explore", _explore))
