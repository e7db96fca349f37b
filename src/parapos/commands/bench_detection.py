"""parapos bench detection."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import UserError, command, describe, image_size, integer, seconds, wrote


def _run(args: argparse.Namespace) -> None:
    try:
        import faster_coco_eval  # type: ignore[import-untyped]  # noqa: F401
        import pycocotools  # type: ignore[import-untyped]  # noqa: F401
        import torch

        from ..bench import detection, measure
    except ModuleNotFoundError as error:
        told = f"{error}; install it with: pip install 'parapos[train,detect]' pycocotools"
        raise UserError(f"parapos bench detection: {told}") from None
    torch.set_num_threads(args.threads)
    options = ("model", "size", "batch", "boxes", "images", "seconds", "quick")
    results = detection.run(**{name: getattr(args, name) for name in options})
    told = detection.markdown(results)
    print(told)
    try:
        wrote(measure.write(results, told, None, args.out))
    except OSError as error:
        raise UserError(f"parapos bench detection: {describe(error)}") from None


def add(benchmarks: Any) -> None:
    """Adds the command to the parser of benchmarks."""
    from torch import get_num_threads

    from ..bench import detection
    from ..models import MODELS, DetectorViT

    models = [name for name, (cls, _) in MODELS.items() if issubclass(cls, DetectorViT)]
    bench = command(
        benchmarks,
        "detection",
        "The share of a detector's training step that assigning boxes takes, and the time of an evaluation beside "
        "pycocotools.",
        "parapos bench detection --seconds 300 --out results/detection",
    )
    bench.add_argument("--model", choices=models, default=detection.MODEL, help="detector")
    bench.add_argument("--size", type=image_size, default=detection.SIZE, help="pixels per side, a multiple of 16")
    bench.add_argument("--batch", type=integer(1, 4096), default=detection.BATCH, help="images per step")
    bench.add_argument("--boxes", type=integer(0, 10_000), default=detection.BOXES, help="boxes of an image")
    bench.add_argument("--images", type=integer(1, 10**6), default=detection.IMAGES, help="images to judge")
    bench.add_argument("--seconds", type=seconds, default=detection.SECONDS, help="time for the timings")
    bench.add_argument("--threads", type=integer(1, 1024), default=get_num_threads(), help="CPU threads")
    bench.add_argument("--quick", action="store_true", help="small sizes and three rounds: a smoke test, not a result")
    bench.add_argument(
        "--out", type=Path, default=Path("bench-detection"), metavar="PATH", help="writes PATH.json and PATH.md"
    )
    bench.set_defaults(run=_run)
