"""The command `predict`: a run applied to images, videos, recordings and point clouds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import UserError, command, describe, guarded, integer, number, sides, tell, wrote
from .prepare import track

SHOWN = 20  # files that are named


def _predict(args: argparse.Namespace) -> None:
    from .. import predict
    from ..malloc import keep_memory
    from ..predict import files
    from ..training import fit

    keep_memory()
    folder: Path = args.run_folder
    out = args.out or folder / "predictions"
    options = {name: getattr(args, name) for name in ("size", "threshold", "every", "batch", "cells", "device")}
    try:
        wanted = fit.load_run(folder)
        predictor = predict.load(folder, **options)
        paths = files.list_files(args.inputs, predictor.source.suffixes, out)
        about = {
            "run": str(folder),
            "model": wanted.model.name,
            "encoding": wanted.model.encoding,
            "task": wanted.task_name,
            "threshold": predictor.view.threshold,
        }
        report = files.predict_files(predictor, paths, out, pictures=not args.no_pictures, track=track, about=about)
    except (predict.PredictError, ImportError) as error:
        raise UserError(f"parapos predict: {describe(error)}") from None
    wrote(report.written[:1])
    if not args.no_pictures:
        tell(f"wrote {len(report.written) - 1} pictures to {out / 'pictures'}")
    for name, reason in list(report.skipped.items())[:SHOWN]:
        tell(f"could not read {name}: {reason}")
    if len(report.skipped) > SHOWN:
        tell(f"and {len(report.skipped) - SHOWN} more, which {report.written[0]} names")
    print(f"{len(report.entries)} of {len(paths)} files predicted, {len(report.skipped)} with problems")
    if not report.entries:
        raise SystemExit(1)


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    predict = command(
        commands,
        "predict",
        "Apply a run to images, videos, event recordings or point clouds: one JSON file, and pictures with boxes, "
        "names and scores, or pages with the cloud to turn.",
        "parapos predict runs/coco photos/ 'more/*.jpg' --threshold 0.4 --out found",
    )
    predict.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    predict.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders with all below them, or patterns")
    predict.add_argument("--out", type=Path, metavar="DIR", help="of JSON and pictures; without it RUN/predictions")
    predict.add_argument(
        "--threshold",
        type=number("a number from 0 to 1", lambda value: 0 <= value <= 1),
        help="least score of an answer; without it 0.25 for boxes, 0 for classes",
    )
    predict.add_argument("--size", type=sides, help="side of the images or HEIGHTxWIDTH, without it that of training")
    predict.add_argument(
        "--every",
        type=number("a positive number of milliseconds", lambda value: 0 < value < float("inf")),
        metavar="MS",
        help="milliseconds between answers; without it every frame of a video, 500 for boxes of recordings, 6000 for "
        "their classes",
    )
    predict.add_argument("--batch", type=integer(1, 65536), default=8, help="frames at a time")
    predict.add_argument(
        "--cells", type=integer(1, 10**9), help="of a scene of points at a time, without it 100000; more are cut up"
    )
    predict.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    predict.add_argument("--no-pictures", action="store_true", help="write the JSON file alone")
    predict.set_defaults(run=guarded("predict", _predict))
