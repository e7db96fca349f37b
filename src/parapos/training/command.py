"""What `parapos train` and `parapos eval` do between the command line and the engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..malloc import keep_memory
from ..text import table
from . import fit, recipe, rows
from .callbacks import Stopped
from .module import NonFiniteLoss
from .recipe import Recipe, RecipeError


def train(source: str, out: Path | None, resume: bool, changes: Mapping[str, str]) -> int:
    """Trains a recipe, or takes up the run in a folder. Gives the exit code: 0, 1 for a loss that is not finite, or 128
    plus the number of the signal that ended it."""
    keep_memory()
    if _is_run(source, out):
        if out is not None:
            raise RecipeError(f"--out: {source} is a run already, expected a recipe; leave --out out")
        out, source = Path(source), str(Path(source) / "recipe.toml")
    wanted = recipe.load(source, changes)
    out = out or Path("runs") / f"{Path(source).stem}-{wanted.model.encoding}"
    try:
        ending = fit.train(wanted, out, must_exist=resume)
    except Stopped as stop:
        _say(str(stop))
        return 128 + stop.signal
    except NonFiniteLoss as error:
        _say(str(error))
        return 1
    if fit.is_first():
        print(ending)
        for line in _next_steps(wanted, out):
            _say(line)
    return 0


def _is_run(source: str, out: Path | None) -> bool:
    """Whether a run is meant, not a recipe. The name of a recipe is the recipe, also where a folder has that name."""
    is_run = (Path(source) / "recipe.toml").is_file()
    if source in recipe.shelf():
        if is_run and out is None:
            both = f"{source} is a recipe and the folder of a run"
            raise RecipeError(f"{both}; write ./{source} to resume the run, or give --out for a run of the recipe")
        return False
    if Path(source).is_dir() and not is_run:
        raise RecipeError(f"{source}: expected a recipe or the folder of a run, got a folder without recipe.toml")
    return is_run


def _next_steps(wanted: Recipe, out: Path) -> list[str]:
    """Where the results of a run are, and what to type to see them."""
    run = shlex.quote(str(out))
    lines = [f"Results: {out}: metrics.csv (losses and validations), weights.safetensors (the best validation)"]
    lines.append(f"Next: parapos eval {run}    judges it on the test split")
    lines.append(f"      parapos predict {run} FILE    applies it to files")
    if wanted.run.tensorboard:
        lines.append(f"      tensorboard --logdir {run}    shows the curves")
    return lines


def evaluate(
    folder: Path,
    split: str,
    size: int | tuple[int, int] | None,
    scale: str,
    root: str | None,
    data: str | None,
    batch: int | None,
    relabel: str = "",
    predictions: Path | None = None,
    changes: Mapping[str, str] | None = None,
) -> int:
    """Prints the metrics of a run and adds them to its evaluations.csv. scale: a number, or "interpolate". changes: of
    the options of the task, as "task.options.KEY" to the text of a value."""
    keep_memory()
    changes = dict(changes or {})
    for key in changes:
        if not key.startswith("task.options."):
            raise RecipeError(f"--{key}: a run is evaluated as it was trained, expected --task.options.KEY alone")
    wanted = fit.load_run(folder, changes)
    rows.read(folder / "evaluations.csv")  # tells that it is damaged before the work begins
    factor = _position_scale(wanted, size, scale)
    if predictions is not None and predictions.exists() and not predictions.is_dir():
        raise RecipeError(f"--predictions: expected a folder, got the file {predictions}")
    options: dict[str, Any] = {"root": root, "data": data, "batch": batch, "relabel": relabel}
    options |= {"predictions": predictions, "changes": changes}
    metrics = fit.evaluate(folder, split=split, size=size, position_scale=factor, **options)
    if fit.is_first():
        judged = size or wanted.data.size
        about = {
            "data": data or wanted.data.name,
            "split": split,
            "size": judged if isinstance(judged, int) else "x".join(map(str, judged)),
            "position_scale": factor,
            **changes,
        }
        row = {**about, **metrics, "samples": int(metrics["samples"])}
        shown = [f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()]
        print(table(list(row), [shown]))
        print(wanted.task_class.summary(metrics))
        _add_row(folder / "evaluations.csv", row)
    return 0


def _position_scale(wanted: Recipe, size: int | tuple[int, int] | None, scale: str) -> float:
    """The factor of positions that a text stands for."""
    if scale == "interpolate":
        if not wanted.data.size:
            raise RecipeError(f"--position-scale: dataset {wanted.data.name} has no size to interpolate from")
        sides = wanted.data.sides if size is None else (size, size) if isinstance(size, int) else size
        factors = {trained / side for trained, side in zip(wanted.data.sides, sides, strict=True)}
        if len(factors) > 1:
            message = f"from {wanted.data.sides} to {sides} both sides differ by other factors, expected one"
            raise RecipeError(f"--position-scale: {message}")
        return factors.pop()
    try:
        factor = float(scale)
    except ValueError:
        raise RecipeError(f"--position-scale: expected a number or interpolate, got {scale!r}") from None
    if not 0 < factor < float("inf"):
        raise RecipeError(f"--position-scale: expected a positive number, got {scale!r}")
    return factor


def _add_row(path: Path, row: Mapping[str, object]) -> None:
    """Adds a row to a CSV file. Columns that are new come last, and are empty in the rows before."""
    old = rows.read(path)
    columns = dict.fromkeys([*(old[0] if old else ()), *row])
    rows.write(path, list(columns), [[line.get(name, "") for name in columns] for line in (*old, row)])


def _say(text: str) -> None:
    if fit.is_first():
        print(text, file=sys.stderr)
