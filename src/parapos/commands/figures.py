"""The command `figure`: the figures of the paper."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import UserError, command, guarded, tell, wrote

OF_RUNS = {"2": "maps.png", "heads": "heads.png"}  # figures of a trained model, and the file that `analyze` has them in
NAMES = ("1a", "1b", "1c", "2", "heads", "alibi")


def _figure(args: argparse.Namespace) -> None:
    from .. import analysis
    from ..experiments import figures
    from ..training.checkpoint import check_writable

    name, path = args.name, args.out / f"figure-{args.name}.png"
    if name not in OF_RUNS:
        for option, given in (("--run", args.run_folder), ("--image", args.image)):
            if given is not None:
                raise UserError(f"parapos figure {name}: {option} is for figures of a trained model, 2 and heads")
        if args.dry_run:
            print(f"figure {name}: would write {path}; needs no data and no run")
            return
        check_writable(args.out)
        print(figures.FIGURES[name](path))
        wrote([path])
        return
    if args.dry_run:
        run = args.run_folder or "RUN"
        print(f"figure {name}: would write {args.out / OF_RUNS[name]} from {run}, as parapos analyze {run}")
        return
    if args.run_folder is None:
        raise UserError(f"parapos figure {name}: expected --run RUN, the folder of a run with pape or pape_ri")
    wrote(analysis.run(args.run_folder, args.out, image=args.image, tell=tell))


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    figure = command(
        commands,
        "figure",
        "Draw a figure of the paper: 1a, 1b, 1c and alibi from the package alone, 2 and heads from a trained run.",
        "parapos figure 1c --out figures",
    )
    figure.add_argument("name", choices=NAMES, help="which one")
    figure.add_argument("--run", type=Path, dest="run_folder", metavar="RUN", help="2 and heads: folder of a run")
    figure.add_argument("--image", type=Path, metavar="FILE", help="2 and heads: image for the maps")
    figure.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR", help="where it is written")
    figure.add_argument("--dry-run", action="store_true", help="only say what would be written")
    figure.set_defaults(run=guarded("figure", _figure))
