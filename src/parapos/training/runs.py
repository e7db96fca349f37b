"""Folders of runs, seen from outside: how far one is, its curves, and a run made of a weights file alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import checkpoint, fit, recipe, rows, state
from .recipe import Recipe, RecipeError

UNBEGUN, FINISHED = "not begun", "finished"
LOST = "unfinished, no checkpoints"  # nothing to resume from


def progress(folder: Path, wanted: Recipe) -> str:
    """not begun, step n of N, unfinished, or finished: its last epoch was validated. A run of another recipe in the
    folder is an error."""
    if not (folder / "recipe.toml").is_file():
        return UNBEGUN
    if change := recipe.difference(fit.load_run(folder), wanted):
        raise RecipeError(f"{folder}: holds a run of another recipe ({change}); choose another folder")
    newest = checkpoint.latest(folder / "checkpoints")[0]
    epochs = wanted.optim.epochs
    if newest is None:  # they may be removed once a run is finished
        written = rows.read(folder / "metrics.csv", whole=["epoch"], needed=["epoch"], growing=True)
        if any(row["epoch"] == epochs and row.get("val_loss") for row in written):
            return FINISHED if (folder / "weights.safetensors").is_file() else LOST
        return LOST if written else UNBEGUN
    _, done, samples = state.load(newest)
    if done.validated == epochs:
        return FINISHED
    return f"step {done.step} of {-(-samples // wanted.optim.batch) * epochs}"


def curve(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Losses and validation metrics by step, for every row of metrics.csv."""
    path = folder / "metrics.csv"
    header = next(iter(rows.read(path, growing=True)), {})
    numbers = [name for name in header if name.startswith(("train_", "val_"))]
    written = rows.read(path, whole=["step"], numbers=numbers, growing=True)
    return [(row["step"], {name: row[name] for name in numbers if name in row}) for row in written]


def adopt(weights: Path, source: str, folder: Path, changes: dict[str, str]) -> Path:
    """Makes a run of a weights file alone: the recipe says how data are read, the file what the model is."""
    plugins = recipe.load(source).plugins  # read first: the model may come from them
    about = checkpoint.load_weights(weights)[1]
    for key in changes:
        if not key.startswith(("data.", "run.")) or (key == "data.size" and "size" in about):
            raise RecipeError(f"--{key}: expected nothing, {weights} says what the model is and was trained at")
    wanted = recipe.load(source, changes)
    values: dict[str, Any] = {
        name: dict(vars(getattr(wanted, name))) for name in ("data", "task", "augment", "optim", "run")
    }
    values["plugins"] = plugins
    values["optim"]["betas"] = list(values["optim"]["betas"])
    values["data"]["size"] = about.get("size", wanted.data.size)
    values["model"] = {"name": about["model"], "encoding": about["encoding"], "options": about["options"]}
    made = recipe.make(values, str(weights))
    known = folder / "recipe.toml"
    if known.is_file() and known.read_text(encoding="utf-8") != made.dumps():
        raise RecipeError(f"{folder}: holds another run, expected a new folder for {weights}")
    link = folder / "weights.safetensors"
    if link.exists() and not os.path.samefile(link, weights):
        raise RecipeError(f"{link}: is another file than {weights}, expected a new folder")
    checkpoint.write(known, made.dumps().encode())
    if not link.exists():
        link.symlink_to(weights.resolve())
    return folder
