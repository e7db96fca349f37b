"""A recipe says what is trained, on what and how: TOML, read into typed dataclasses that are checked when made.

A recipe file has the sections [model], [data], [augment], [optim] and [run], and may begin with `extends = "other"`,
the name or path of a recipe whose values it changes. What a recipe does not say has the default in schema.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, resources
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from ..blocks import Attention
from ..data import DATASETS, Dataset, FormatError, create_dataset
from ..encodings import ENCODINGS
from ..models import MODELS
from ..tasks.base import Metric
from ..text import nearest
from .schema import Augment, Bad, Data, Model, Optim, Run


class RecipeError(ValueError):
    """A recipe cannot be followed. The message names the file and the key."""


class _Judged:
    """What the only task is judged by, until recipes name tasks."""

    headline = "top1"

    @staticmethod
    def metric(name: str) -> Metric:
        if name == "loss":
            return Metric("loss", "loss", higher_is_better=False)
        if name not in ("top1", "precision", "recall", "f1"):
            raise ValueError(
                f"Classification has no metric {name!r}, expected one of loss, top1, precision, recall, f1"
            )
        return Metric(name, "top-1" if name == "top1" else name, "%", factor=100.0)


MACHINE = ("accelerator", "devices", "nodes", "strategy", "keep", "tensorboard", "wandb")  # of Run: free on resume


@dataclass(frozen=True, kw_only=True)
class Recipe:
    model: Model
    data: Data
    optim: Optim
    augment: Augment = field(default_factory=Augment)
    run: Run = field(default_factory=Run)

    def dumps(self) -> str:
        """The whole recipe as TOML, defaults included."""
        return "\n".join(_section(name, section) for name, section in dataclasses.asdict(self).items())

    @property
    def task_class(self) -> Any:
        """The task, on no data yet: its metrics and its headline stand there."""
        return _Judged

    def judged(self, split: str, name: str | None = None, **changes: Any) -> Dataset:
        """`dataset` for an evaluation: samples of a training split are not varied."""
        return _as_judged(self.dataset(split, name, **changes))

    def dataset(self, split: str, name: str | None = None, **changes: Any) -> Dataset:
        """A split of the data. name: another dataset, with those of the options that it knows. changes: options."""
        if name is not None and name not in DATASETS:
            known = ", ".join(DATASETS)
            raise RecipeError(f"unknown dataset {name!r}, expected one of {known}{nearest(name, list(DATASETS))}")
        module, factory = _factory(name or self.data.name)
        parameters = signature(factory).parameters
        given = {"seed": self.run.seed, **self.data.options}
        if self.data.size:
            given["size"] = self.data.size
        if self.data.root:
            given["root"] = str(Path(self.data.root).expanduser())
        if self.augment.sample and split == "train":
            given["augment"] = module.Augment(**_tuples(self.augment.sample))
        optional = ("seed",) if name is None else tuple(given)
        given = {key: value for key, value in given.items() if key in parameters or key not in optional} | changes
        for key, parameter in parameters.items():
            if parameter.default is parameter.empty and key != "split" and key not in given:
                raise RecipeError(f"data.{key}: missing, dataset {name or self.data.name} needs it; give --{key}")
        try:
            return create_dataset(name or self.data.name, split, **given)
        except FormatError:
            raise
        except ValueError as error:
            raise RecipeError(f"data: {error}") from None


def load(source: str | Path, changes: Mapping[str, str] | None = None) -> Recipe:
    """A recipe by path, or by name if it comes with the package. changes: "section.key" to the text of a value."""
    path = find(source)
    values = _read(path, ())
    for key, text in (changes or {}).items():
        _change(values, key, text, path)
    return make(values, str(path.name))


def make(values: Mapping[str, Any], name: str) -> Recipe:
    """A checked recipe from nested dictionaries. name is for error messages."""
    sections = {f.name: f for f in dataclasses.fields(Recipe)}
    kinds = get_type_hints(Recipe)
    for key in values:
        if key not in sections:
            told = f"expected one of {', '.join(sections)}{nearest(key, list(sections))}"
            raise RecipeError(f"{name}: [{key}]: unknown section, {told}")
    made: dict[str, Any] = {}
    for key in sections:
        if key in values and not isinstance(values[key], dict):
            raise RecipeError(f"{name}: {key}: expected a section [{key}], got {values[key]!r}")
        try:
            made[key] = _make_section(kinds[key], values.get(key, {}))
        except Bad as bad:
            raise RecipeError(f"{name}: {key}.{bad.key}: {bad.message}") from None
    recipe = Recipe(**made)
    try:
        _check_together(recipe)
    except Bad as bad:
        raise RecipeError(f"{name}: {bad.key}: {bad.message}") from None
    return recipe


def shelf() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(resources.files("parapos") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(source: str | Path) -> Path:
    """The file of a recipe: a path that ends in .toml, or a name on the shelf."""
    path = Path(source)
    if path.suffix == ".toml":
        if not path.is_file():
            raise RecipeError(f"{path}: no such file")
        return path
    known = shelf()
    if str(source) not in known:
        hint = nearest(str(source), list(known))
        raise RecipeError(f"unknown recipe {str(source)!r}, expected a .toml file or one of {', '.join(known)}{hint}")
    return known[str(source)]


def difference(old: Recipe, new: Recipe) -> str | None:
    """The first key in which two recipes differ and which a run may not change on its way, as "key: old, now new"."""
    for section, values in dataclasses.asdict(old).items():
        for key, value in values.items():
            now = getattr(getattr(new, section), key)
            free = (section == "run" and key in MACHINE) or (section, key) in (("data", "root"), ("data", "workers"))
            if value != now and not free:
                return f"{section}.{key}: {value!r}, now {now!r}"
    return None


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name}: not TOML: {error}") from None
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise RecipeError(f"{path.name}: extends: expected the name or path of a recipe, got {base!r}")
    other = find(path.parent / base if base.endswith(".toml") else base)
    if other.resolve() in (above := (*above, path.resolve())):
        raise RecipeError(f"{path.name}: extends: {base!r} leads back to itself")
    return _merge(_read(other, above), values)


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in values.items():
        old = both.get(key)
        both[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def _change(values: dict[str, Any], key: str, text: str, path: Path) -> None:
    """Sets "section.key" or "section.table.key" to the value that a text stands for."""
    section, *inner = key.split(".")
    kinds = get_type_hints(Recipe)
    if section not in kinds or not inner:
        raise RecipeError(f"--{key}: expected a section of {', '.join(kinds)}{nearest(section, list(kinds))}")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if len(inner) == 1 and get_type_hints(kinds[section]).get(inner[0]) is str:
        value = text
    table = values.setdefault(section, {})
    for name in inner[:-1]:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise RecipeError(f"{path.name}: {key}: {'.'.join([section, *inner[:-1]])} is not a table")
    table[inner[-1]] = value


def _make_section(cls: type, values: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kinds = get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise Bad(key, f"unknown key, expected one of {', '.join(fields)}{nearest(key, list(fields))}")
    for key, spec in fields.items():
        needed = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if needed and key not in values:
            raise Bad(key, f"missing, expected {_told(kinds[key])}")
    return cls(**{key: _typed(key, value, kinds[key]) for key, value in values.items()})


def _typed(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is dict and isinstance(value, dict):
        return value
    if get_origin(kind) is tuple and isinstance(value, list) and len(value) == len(get_args(kind)):
        return tuple(_typed(key, v, k) for v, k in zip(value, get_args(kind), strict=True))
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, float) and not abs(value) < float("inf"):
        raise Bad(key, f"expected a finite number, got {value!r}")
    if type(value) is not kind:
        raise Bad(key, f"expected {_told(kind)}, got {value!r}")
    return value


def _told(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is dict:
        return "a table"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]


def _factory(name: str) -> tuple[Any, typing.Callable[..., Any]]:
    module = import_module(f"..data.{DATASETS[name][0]}", __package__)
    return module, getattr(module, DATASETS[name][1])


def _as_judged(dataset: Any) -> Any:
    """A dataset without variation. Those that vary samples have either a method for it, or an attribute."""
    if hasattr(dataset, "as_judged"):
        return dataset.as_judged()
    for name in ("augment", "transform"):
        if hasattr(dataset, name):
            setattr(dataset, name, None)
    return dataset


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _check_together(recipe: Recipe) -> None:
    """What no section can see alone. Nothing of the data is read, and the model is built without memory."""
    data, run = recipe.data, recipe.run
    module, factory = _factory(data.name)
    if getattr(module, "TASK", "classification") != "classification":
        raise Bad("data.name", f"{data.name} is for {module.TASK}, which parapos cannot train yet")
    known = [key for key in signature(factory).parameters if key not in ("split", "seed")]
    for key in data.options:
        if key not in known:
            told = f"dataset {data.name} has no such option, expected some of {', '.join(known)}{nearest(key, known)}"
            raise Bad(f"data.options.{key}", told)
    if data.root and "root" not in known:
        raise Bad("data.root", f"dataset {data.name} has no root, expected nothing, got {data.root!r}")
    if not data.root and "root" in known and signature(factory).parameters["root"].default is signature(factory).empty:
        raise Bad("data.root", f"missing, expected the folder of dataset {data.name}; give it as --data.root FOLDER")
    if "size" in signature(factory).parameters and not data.size:
        raise Bad("data.size", f"missing, expected the side in pixels of the samples of dataset {data.name}")
    if "size" not in signature(factory).parameters and data.size:
        raise Bad("data.size", f"dataset {data.name} has no size, expected nothing, got {data.size}")
    if recipe.augment.sample:
        _known_fields(module.Augment, recipe.augment.sample)
    if recipe.optim.ema and run.strategy == "fsdp":
        raise Bad("optim.ema", "cannot be combined with run.strategy = 'fsdp', which cuts the weights into pieces")
    inputs: tuple[str, ...] = getattr(MODELS[recipe.model.name][0], "inputs", ("image",))
    gives = getattr(module, "GIVES", ("image",))
    if not set(inputs) <= set(gives):
        told = f"takes {', '.join(inputs)}, dataset {data.name} gives {', '.join(gives)}"
        raise Bad("model.name", f"{recipe.model.name} {told}")
    _check_options(recipe.model)
    try:
        with torch.device("meta"):
            model = recipe.model.build(2)
    except Exception as error:  # layers raise whatever they stumble over
        raise Bad("model", str(error) or type(error).__name__) from None
    for key in ("mixup", "cutmix"):
        if getattr(recipe.augment, key) and "image" not in inputs:
            raise Bad(f"augment.{key}", f"mixes images, model {recipe.model.name} takes {', '.join(inputs)}")
    patch = getattr(model, "patch", 1)
    options = {key: data.options.get(key, own.default) for key, own in signature(factory).parameters.items()}
    if "patch" in options and options["patch"] != patch:
        raise Bad("data.options.patch", f"expected the model's patch size {patch}, got {options['patch']}")
    for key, value in getattr(module, "OF_MODELS", {}).items():
        if (got := getattr(model, key)) != value:
            raise Bad(f"model.options.{key}", f"expected {value}, which dataset {data.name} is made for, got {got}")
    for key in ("height", "width"):
        if key in options and (type(side := options[key]) is not int or side < 1 or side % patch):
            raise Bad(f"data.options.{key}", f"expected a multiple of the model's patch size {patch}, got {side!r}")
    if data.size % patch:
        raise Bad("data.size", f"expected a multiple of the model's patch size {patch}, got {data.size}")


def _check_options(model: Model) -> None:
    """Types of a model's options, as far as its class, the attention and the encoding tell them in their signatures."""
    owners = (*MODELS[model.name][0].__mro__, Attention, *ENCODINGS[model.encoding].__mro__)
    kinds: dict[str, Any] = {}
    for owner in owners:
        if "__init__" in vars(owner) and owner.__module__.startswith("parapos."):
            kinds = {**get_type_hints(vars(owner)["__init__"]), **kinds}
    for key, value in model.chosen.items():
        kind = kinds.get(key)
        if type(None) in get_args(kind) and len(get_args(kind)) == 2:
            kind = get_args(kind)[0]
        if kind in (int, float, str, bool):
            _typed(f"model.options.{key}", value, kind)


def _known_fields(cls: Any, values: Mapping[str, Any]) -> None:
    fields = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in fields:
            told = f"unknown key, expected one of {', '.join(fields)}{nearest(key, fields)}"
            raise Bad(f"augment.sample.{key}", told)
    try:
        cls(**_tuples(values))
    except (TypeError, ValueError) as error:
        raise Bad("augment.sample", str(error)) from None


def _section(name: str, values: Mapping[str, Any]) -> str:
    """A TOML section; tables in it come last, as TOML wants."""
    lines = [f"[{name}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [_section(f"{name}.{_key(key)}", value) for key, value in values.items() if isinstance(value, dict)]
    return "\n".join([*lines, "", *tables]).rstrip() + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise RecipeError(f"a recipe cannot hold {type(value).__name__} {value!r}")
