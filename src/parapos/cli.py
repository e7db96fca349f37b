"""The command line. It parses, calls and prints; the work is done elsewhere."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, plugins
from .commands import (
    analyze,
    bench_detection,
    bench_points,
    bench_sparse,
    bench_tokenizer,
    experiments,
    explore,
    figures,
    interop,
    overview,
    predict,
    prepare,
)
from .commands.base import (
    Parser,
    UserError,
    command,
    describe,
    image_size,
    integer,
    names,
    seconds,
    several,
    sides,
    wrote,
)


def _doctor(args: argparse.Namespace) -> None:
    from .commands import doctor

    print(doctor.report())


def _precision(args: argparse.Namespace) -> None:
    from .bench import precision

    rows = precision.experiment(grid=args.grid, dtype=args.dtype, encoding=args.encoding, settings=args.setting)
    print(f"{args.encoding} in {args.dtype} on a {args.grid} x {args.grid} grid, against float64:\n")
    print(precision.table(rows))


def _bench_attention(args: argparse.Namespace) -> None:
    import torch

    from .bench import attention as bench_attention
    from .bench import measure

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("parapos bench attention: --device cuda: torch finds no CUDA device here")
    torch.set_num_threads(args.threads)
    plot: Any = None
    if args.trained is not None:
        if args.device != "cpu":
            raise UserError("parapos bench attention: --trained measures on the CPU; leave --device out")
        from .bench import trained  # needs more than torch

        try:
            results = trained.run(args.trained, seconds=args.seconds, quick=args.quick)
        except (ValueError, OSError, RuntimeError) as error:
            raise UserError(f"parapos bench attention: {describe(error)}") from None
        message = trained.markdown(results)
    else:
        results = bench_attention.run(device=args.device, seconds=args.seconds, quick=args.quick)
        message, plot = bench_attention.markdown(results), bench_attention.plot
    print(message)
    try:
        wrote(measure.write(results, message, plot, args.out))
    except OSError as error:
        raise UserError(f"parapos bench attention: {describe(error)}") from None


ALIASES = {"--devices": "--run.devices", "--strategy": "--run.strategy", "--num-nodes": "--run.nodes"}  # of train


def _unalias(argv: list[str]) -> None:
    """Writes the short names of where training runs as the keys of the recipe; one of both may be given."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ALIASES:
            argv[i] = f"{ALIASES[name]}{equals}{value}"
            if sum(other.partition("=")[0] in (name, ALIASES[name]) for other in argv) > 1:
                raise UserError(f"parapos train: expected {name} or {ALIASES[name]} once")


def _load_plugins(argv: list[str]) -> None:
    """Takes every `--plugin MODULE` out of a command line, wherever it stands, and loads the modules. Other options may
    then name what they register."""
    plugins.given.clear()
    while places := [i for i, word in enumerate(argv) if word.partition("=")[0] == "--plugin"]:
        _, equals, value = argv.pop(places[0]).partition("=")
        if not equals:
            value = argv.pop(places[0]) if places[0] < len(argv) else ""
        if not value:
            raise UserError("parapos: --plugin: expected the name of a module")
        plugins.given.append(value)
    try:
        plugins.load(plugins.given)
    except plugins.PluginError as error:
        raise UserError(f"parapos: --plugin: {error}") from None


def _changes(argv: list[str]) -> dict[str, str]:
    """Takes `--section.key value` and `--section.key=value` out of a command line. The last for a key counts."""
    changes: dict[str, str] = {}
    for i in reversed([i for i, word in enumerate(argv) if word.startswith("--") and "." in word.partition("=")[0]]):
        key, equals, value = argv.pop(i).partition("=")
        if not equals and i == len(argv):
            raise UserError(f"parapos {argv[0]}: expected a value after {key}")
        changes.setdefault(key[2:], value if equals else argv.pop(i))
    return changes


def _train(args: argparse.Namespace) -> None:
    _engine("train", source=args.recipe, out=args.out, resume=args.resume, changes=args.changes)


def _eval(args: argparse.Namespace) -> None:
    names = ("split", "size", "scale", "root", "data", "batch", "relabel", "predictions")
    _engine("evaluate", folder=args.folder, changes=args.changes, **{name: getattr(args, name) for name in names})


def _engine(name: str, **options: Any) -> None:
    """Runs a command of the training engine, which needs more than torch."""
    told = f"parapos {'eval' if name == 'evaluate' else name}"
    try:
        from .data import FormatError
        from .training import command
        from .training.checkpoint import CheckpointError
        from .training.recipe import RecipeError
    except ImportError as error:
        raise UserError(f"{told}: {error}; install it with: pip install 'parapos[train]'") from None
    try:
        code = getattr(command, name)(**options)
    except (RecipeError, CheckpointError, FormatError, OSError) as error:
        raise UserError(f"{told}: {describe(error)}") from None
    if code:
        raise SystemExit(code)


def _bench_model(args: argparse.Namespace) -> None:
    import torch

    from .bench import measure
    from .bench import model as bench_model
    from .bench import model_view as bench_model_view

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("parapos bench model: --device cuda: torch finds no CUDA device here")
    torch.set_num_threads(args.threads)
    names = ("model", "encodings", "parabolas", "direct", "sizes", "batch", "dtype", "device", "seconds", "rounds")
    options = {name: getattr(args, name) for name in (*names, "parts")}
    results = bench_model.run(**options)
    message = bench_model_view.markdown(results)
    print(message)
    try:
        wrote(measure.write(results, message, bench_model_view.plot, args.out))
    except OSError as error:
        raise UserError(f"parapos bench model: {describe(error)}") from None


def _bench_profile(args: argparse.Namespace) -> None:
    import torch

    from .bench import model as bench_model
    from .bench import profile as bench_profile

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("parapos bench profile: --device cuda: torch finds no CUDA device here")
    torch.set_num_threads(args.threads)
    setting = bench_model.Setting(args.model, args.size, args.batch, args.dtype, args.device)
    row = bench_model.Row(args.encoding, args.parabolas if args.encoding == "pape" else None)
    print(bench_profile.markdown(bench_profile.run(row, setting, args.rounds)))


def parser() -> argparse.ArgumentParser:
    from torch import get_num_threads

    from .bench import attention as bench_attention
    from .bench import model as bench_model
    from .bench import precision
    from .encodings import list_encodings

    top = overview.Overview(prog="parapos", description="Position encodings for vision transformers.")
    top.add_argument("--version", action="version", version=f"parapos {__version__}")
    top.add_argument(  # read before all else; here for the help
        "--plugin", metavar="MODULE", help="import a module that registers encodings, models, datasets or tasks"
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    doctor = command(
        commands, "doctor", "Report what this machine supports: devices, packages, kernels.", "parapos doctor"
    )
    doctor.set_defaults(run=_doctor)
    checks = doctor.add_subparsers(metavar="CHECK")
    check = command(
        checks,
        "precision",
        "How many digits each form of PaPE's scores keeps in a number type.",
        "parapos doctor precision --grid 32 --dtype fp16",
    )
    check.add_argument("--grid", type=integer(2, precision.MAX_GRID), default=64, help="patches per side")
    check.add_argument("--dtype", choices=precision.DTYPES, default="bf16", help="number type of q, k and columns")
    check.add_argument("--encoding", choices=precision.ENCODINGS, default="pape", help="encoding to judge")
    check.add_argument(
        "--setting",
        type=names(list(precision.SETTINGS)),
        default=",".join(precision.SETTINGS),
        help="initial coefficients (init), tripled ones (3x), or both with a comma",
    )
    check.set_defaults(run=_precision)

    benches = command(commands, "bench", "Measure speed and memory.", "parapos bench attention --quick")
    benchmarks = benches.add_subparsers(metavar="BENCHMARK", required=True)
    bench = command(
        benchmarks,
        "attention",
        "Time and memory of attention with PaPE, as ratios to attention without positions.",
        "parapos bench attention --seconds 60 --out results/attention",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    bench.add_argument("--seconds", type=seconds, default=bench_attention.SECONDS, help="time for the timings")
    bench.add_argument(
        "--threads",
        type=integer(1, 1024),
        default=get_num_threads(),
        help="CPU threads; 1 is steadier on a busy machine",
    )
    bench.add_argument("--quick", action="store_true", help="smallest size and two rounds: a smoke test, not a result")
    bench.add_argument(
        "--trained",
        type=Path,
        metavar="RUN",
        help="measure with the numbers of this trained run, at 1x to 8x its size",
    )
    bench.add_argument(
        "--out", type=Path, default=Path("bench-attention"), metavar="PATH", help="writes PATH.json, PATH.md, PATH.png"
    )
    bench.set_defaults(run=_bench_attention)

    bench = command(
        benchmarks,
        "model",
        "What each encoding costs a vision transformer: parameters, GFLOP, time, memory; the paper's efficiency table.",
        "parapos bench model --encodings sincos,pape --parabolas 2,50 --sizes 224,448 --seconds 300",
    )
    bench.add_argument("--model", choices=bench_model.MODELS, default="vit_base_patch16", help="vision transformer")
    bench.add_argument(
        "--encodings",
        type=names(list_encodings()),
        default=",".join(bench_model.ENCODINGS),
        help="rows of the table; 'none' is always there, the others are measured by it",
    )
    bench.add_argument(
        "--parabolas",
        type=several(integer(1, 1024)),
        default=",".join(map(str, bench_model.PARABOLAS)),
        help="one row of pape for each",
    )
    bench.add_argument("--direct", action="store_true", help="a row for pape's direct form too")
    bench.add_argument(
        "--sizes",
        type=several(image_size),
        help="pixels per side, multiples of 16, 224 by default; rows of a camera's image for unitr, 256 by default",
    )
    bench.add_argument("--batch", type=integer(1, 4096), default=1, help="images per step")
    bench.add_argument("--dtype", choices=bench_model.DTYPES, default="fp32", help="autocast type; the paper's is fp16")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    bench.add_argument("--threads", type=integer(1, 1024), default=get_num_threads(), help="CPU threads")
    bench.add_argument("--seconds", type=seconds, default=bench_model.SECONDS, help="time for the timings of all sizes")
    bench.add_argument(
        "--rounds",
        type=integer(2, 100000),
        default=bench_model.ROUNDS,
        help=f"most rounds per size; {bench_model.LEAST_ROUNDS} are run however long they take",
    )
    bench.add_argument(
        "--parts", type=names(list(bench_model.PARTS)), default=",".join(bench_model.PARTS), help="what to measure"
    )
    bench.add_argument(
        "--out", type=Path, default=Path("bench-model"), metavar="PATH", help="writes PATH.json, PATH.md, PATH.png"
    )
    bench.set_defaults(run=_bench_model)

    bench = command(
        benchmarks,
        "profile",
        "Where the time goes that an encoding adds to a model, next to the lower bound from its GFLOP.",
        "parapos bench profile --encoding pape --parabolas 50 --rounds 20",
    )
    bench.add_argument("--model", choices=bench_model.MODELS, default="vit_base_patch16", help="vision transformer")
    bench.add_argument("--encoding", choices=list_encodings(), default="pape", help="compared with none")
    bench.add_argument("--parabolas", type=integer(1, 1024), default=50, help="of pape")
    bench.add_argument("--size", type=image_size, default=224, help="pixels per side, a multiple of 16")
    bench.add_argument("--batch", type=integer(1, 4096), default=1, help="images per step")
    bench.add_argument("--dtype", choices=bench_model.DTYPES, default="fp32", help="autocast type")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    bench.add_argument("--threads", type=integer(1, 1024), default=get_num_threads(), help="CPU threads")
    bench.add_argument("--rounds", type=integer(1, 100000), default=10, help="steps of each model and mode")
    bench.set_defaults(run=_bench_profile)
    bench_points.add(benchmarks)
    bench_tokenizer.add(benchmarks)
    bench_detection.add(benchmarks)
    bench_sparse.add(benchmarks)

    prepare.add(commands)

    train = command(
        commands,
        "train",
        "Train a recipe, or resume the run in its folder. Any value may be given as --section.key VALUE; "
        "--devices, --strategy and --num-nodes are short for --run.devices, --run.strategy and --run.nodes.",
        "parapos train digits --out runs/digits --model.encoding rope",
    )
    train.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a recipe, a .toml file, or the folder of a run (./NAME if a recipe has its name)",
    )
    train.add_argument("--out", type=Path, metavar="RUN", help="folder of the run; without it, runs/RECIPE-ENCODING")
    train.add_argument("--resume", action="store_true", help="refuse to start a new run")
    train.set_defaults(run=_train)

    judge = command(
        commands,
        "eval",
        "Evaluate the weights of a run. Needs nothing but its folder and the data. Options of the task may be given as "
        "--task.options.KEY VALUE.",
        "parapos eval runs/digits --size 64 --position-scale interpolate",
    )
    judge.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    judge.add_argument("--split", choices=("train", "val", "test"), default="test", help="part of the data")
    judge.add_argument("--size", type=sides, help="side of the images or HEIGHTxWIDTH, without it that of training")
    judge.add_argument(
        "--position-scale", default="1", dest="scale", help="factor of positions; interpolate for trained / tested size"
    )
    judge.add_argument("--data", help="another dataset")
    judge.add_argument("--root", help="folder of the data, without it that of training")
    judge.add_argument("--batch", type=integer(1, 65536), help="images at a time, without it that of the recipe")
    judge.add_argument(
        "--relabel",
        default="",
        metavar="HOW",
        help="for data with other classes: order (same numbers), names (match by name), or a TOML file of pairs",
    )
    judge.add_argument("--predictions", type=Path, metavar="DIR", help="also write the predictions")
    judge.set_defaults(run=_eval)
    predict.add(commands)
    interop.add(commands)
    experiments.add(commands)
    figures.add(commands)
    analyze.add(commands)
    explore.add(commands)
    overview.add(commands, top)
    return top


def _leave_group() -> None:
    """Ends the threads that talk to other processes: one that lives when Python ends may abort it."""
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        group.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 with one line on stderr if the command line is wrong."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["train"]:
            _unalias(words)
        _load_plugins(words)
        changes = _changes(words) if words[:1] in (["train"], ["eval"], ["table"], ["sweep"]) else {}
        args = parser().parse_args(words)
        args.changes = changes
        args.run(args)
        _leave_group()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
