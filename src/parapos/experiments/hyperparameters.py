"""The training settings of the recipes beside the paper's: `parapos table hyperparameters`."""

from __future__ import annotations

import inspect
from typing import Any

from ..models import MODELS
from ..recipes import paper
from ..text import table as as_text
from ..training import recipe
from ..training.recipe import Recipe

NAME = "hyperparameters"


def ours(wanted: Recipe) -> dict[str, Any]:
    """The settings of a recipe, by the names of the paper's rows; "-" for what is off, None for what is not
    its to say."""
    data, optim = wanted.data, wanted.optim
    cls, size = MODELS[wanted.model.name]
    patch = {**size, **wanted.model.chosen}.get("patch") or inspect.signature(cls).parameters["patch"].default
    return {
        "batch": optim.batch,
        "learning rate": optim.lr,
        "weight decay": optim.weight_decay,
        "beta 1": optim.betas[0],
        "beta 2": optim.betas[1],
        "warm-up epochs": optim.warmup * optim.epochs,
        "epochs": optim.epochs,
        "width": data.sides[1] or data.options.get("width"),
        "height": data.sides[0] or data.options.get("height"),
        "patch": patch,
        "drop path": wanted.model.options.get("drop_path", 0.0) or "-",
        "label smoothing": wanted.augment.smoothing or "-",
    }


def compare() -> dict[tuple[str, str], tuple[Any, Any]]:
    """By setting and data set: the paper's value and ours, None where that is not the recipe's to say."""
    section = paper()[NAME]
    known = {name: ours(recipe.load(name)) for name in section["columns"]}
    return {
        (row, name): (value, known[name][row])
        for row, values in section["rows"].items()
        for name, value in zip(section["columns"], values, strict=True)
    }


def markdown() -> str:
    """A column per data set: what both have, or the paper's value and then ours."""
    values, section = compare(), paper()[NAME]
    lines = [[row, *(_cell(*values[row, name]) for name in section["columns"])] for row in section["rows"]]
    return f"{as_text(['', *section['columns']], lines)}\n\nThe paper's values, and ours where they differ."


def _cell(theirs: Any, ours: Any) -> str:
    shown = [value if isinstance(value, str) else f"{value:g}" for value in (theirs, ours) if value is not None]
    return ", ours ".join(dict.fromkeys(shown))
