"""The commands `import` and `export`: runs of published checkpoints, and runs as graphs for other runtimes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import UserError, command, describe, guarded, integer, sides, tell, wrote


def _import(args: argparse.Namespace) -> None:
    from ..interop import importing
    from ..interop.published import CheckpointError

    try:
        config = importing.import_folder(args.published, args.out)
    except CheckpointError as error:
        raise UserError(f"parapos import: {describe(error)}") from None
    for name in config.unknown:
        tell(f"config.json: {repr(name)[:80]}: unknown key, left out")
    if config["model.dropout"]:
        tell(f"config.json: model.dropout: {config['model.dropout']} in training, which models here do not have")
    wrote([args.out / name for name in ("recipe.toml", "weights.safetensors", importing.NOTES)])
    print(f"{args.out}: {config.encoding} on {config.dataset}; parapos eval {args.out} --root DATA judges it")


def _export(args: argparse.Namespace) -> None:
    from ..interop import export

    try:
        report = export.export_run(
            args.run_folder,
            args.format,
            args.out,
            size=args.size,
            max_det=args.max_det,
            masked=args.mask,
            precision=args.precision,
        )
    except (export.ExportError, ImportError) as error:
        raise UserError(f"parapos export: {describe(error)}") from None
    wrote([report.path])
    print(report)


def add(commands: Any) -> None:
    """Adds both commands to a parser."""
    taken = command(
        commands,
        "import",
        "Make a run of a checkpoint that the authors published: a folder with config.json and model.pt.",
        "parapos import published/imagenet-pape --out runs/imagenet-official",
    )
    taken.add_argument("published", type=Path, metavar="FOLDER", help="folder with config.json and model.pt")
    taken.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the new run")
    taken.set_defaults(run=guarded("import", _import))

    given = command(
        commands,
        "export",
        "Write a run as a graph for other runtimes, and check it against PyTorch at sizes that it was not exported at.",
        "parapos export runs/digits --format onnx",
    )
    given.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    given.add_argument("--format", choices=("onnx", "pt2"), default="onnx", help="onnx, or pt2 of torch.export")
    given.add_argument("--out", type=Path, metavar="FILE", help="without it RUN/model.onnx or RUN/model.pt2")
    given.add_argument("--size", type=sides, help="side or HEIGHTxWIDTH to trace with, without it that of training")
    given.add_argument(
        "--max-det", type=integer(1, 10_000), help="most boxes of an image, without it 100; of detectors"
    )
    given.add_argument("--mask", action="store_true", help="the graph of an image model takes a mask of patches, too")
    given.add_argument(
        "--precision", choices=("float32", "int8"), default="float32", help="int8: dynamic quantization of onnx"
    )
    given.set_defaults(run=guarded("export", _export))
