"""A recipe says what is trained, on what and how: TOML, read into typed dataclasses that are checked when made.

A recipe file has the sections [model], [data], [task], [augment], [optim] and [run]. Before them may stand
`extends = "other"`, the name or path of a recipe whose values it changes, and `plugins = ["module"]`, modules that
register what the recipe names. What a recipe does not say has the default in schema.py. The recipe of a run also has a
section [learned]: what its weights mean and how samples were prepared.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tomli_w
import torch

from .. import plugins as extensions
from .. import recipes
from ..blocks import Attention
from ..data import DATASETS, FormatError, Source, create_dataset, find_dataset
from ..encodings import ENCODINGS
from ..models import MODELS
from ..models.detector.image import MASK_PATCH
from ..tasks import TASKS, Task, create_task, task_class, task_options
from ..text import nearest
from .schema import Augment, Bad, Data, Model, Optim, Run, TaskChoice, make_section, typed


class RecipeError(ValueError):
    """A recipe cannot be followed. The message names the file and the key."""


MACHINE = ("accelerator", "devices", "nodes", "strategy", "keep", "tensorboard", "wandb")  # of Run: free on resume


@dataclass(frozen=True, kw_only=True)
class Recipe:
    model: Model
    data: Data
    optim: Optim
    augment: Augment = field(default_factory=Augment)
    task: TaskChoice = field(default_factory=TaskChoice)
    run: Run = field(default_factory=Run)
    plugins: tuple[str, ...] = ()
    learned: dict[str, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        """The whole recipe as TOML, defaults included."""
        return tomli_w.dumps(dataclasses.asdict(self))

    @property
    def task_name(self) -> str:
        return self.task.name or find_dataset(self.data.name).task

    @property
    def task_class(self) -> type[Task]:
        """The task, on no data yet: its metrics and its headline stand there."""
        return task_class(self.task_name)

    def make_task(self, dataset: Any) -> Task:
        """The task on a dataset, with the options of the recipe."""
        shared = {key: getattr(self.augment, key) for key in ("mixup", "cutmix", "smoothing")}
        given = {**self.task.options, **{key: value for key, value in shared.items() if value}}
        try:
            return create_task(self.task_name, dataset, **given)
        except (ValueError, TypeError) as error:
            raise RecipeError(f"task: {error}") from None
        except AttributeError as error:
            if error.obj is not dataset:
                raise
            reason = f"expected a dataset with `{error.name}`, {type(dataset).__name__} has none"
            raise RecipeError(f"task {self.task_name}: {reason}; change task.name or data.name") from None

    def judged(self, split: str, name: str | None = None, **changes: Any) -> Any:
        """`dataset` for an evaluation: samples of a training split are not varied."""
        return _as_judged(self.dataset(split, name, **changes))

    def dataset(self, split: str, name: str | None = None, **changes: Any) -> Any:
        """A split of the data. name: another dataset, with those of the options that it knows. changes: options."""
        if name is not None and name not in DATASETS:
            known = ", ".join(DATASETS)
            raise RecipeError(f"unknown dataset {name!r}, expected one of {known}{nearest(name, list(DATASETS))}")
        source = find_dataset(name or self.data.name)
        given = {"seed": self.run.seed, **self.data.options}
        if self.data.size:
            given["size"] = self.data.size
        if self.data.root:
            given["root"] = str(Path(self.data.root).expanduser())
        if self.augment.sample and split == "train":
            assert source.augment is not None
            given["augment"] = source.augment(**_tuples(self.augment.sample))
        optional = ("seed",) if name is None else tuple(given)
        given = {key: value for key, value in given.items() if key in source.options or key not in optional} | changes
        for key, parameter in source.options.items():
            if (
                parameter.default is parameter.empty
                and parameter.kind is not parameter.VAR_KEYWORD
                and key not in given
            ):
                raise RecipeError(f"data.{key}: missing, dataset {name or self.data.name} needs it; give --{key}")
        try:
            return create_dataset(name or self.data.name, split, **given)
        except FormatError:
            raise
        except ValueError as error:
            raise RecipeError(f"data: {error}") from None


SECTIONS: dict[str, Any] = {key: kind for key, kind in get_type_hints(Recipe).items() if dataclasses.is_dataclass(kind)}


def load(source: str | Path, changes: Mapping[str, str] | None = None) -> Recipe:
    """A recipe by path, or by name if it comes with the package. changes: "section.key" to the text of a value."""
    path = find(source)
    values, origins = _read(path, ())
    for key, text in (changes or {}).items():
        _change(values, key, text, path)
        origins[key] = path.name
    return make(values, path.name, origins)


def make(values: Mapping[str, Any], name: str, origins: Mapping[str, str] | None = None) -> Recipe:
    """A checked recipe from nested dictionaries. name is for error messages; origins has other names for keys that
    come from elsewhere."""

    def refused(key: str, message: str) -> RecipeError:
        parts = key.split(".")
        places = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        origin = next((origins[place] for place in places if place in origins), name) if origins else name
        return RecipeError(f"{origin}: {key}: {message}" + (f" ({name} extends it)" if origin != name else ""))

    known = [f.name for f in dataclasses.fields(Recipe)]
    for key in values:
        if key not in known:
            reason = f"expected one of {', '.join(SECTIONS)}{nearest(key, known)}"
            raise RecipeError(f"{name}: [{key}]: unknown section, {reason}")
    made: dict[str, Any] = {"plugins": tuple(values.get("plugins", ())), "learned": values.get("learned", {})}
    if not isinstance(values.get("plugins", []), list | tuple) or not all(type(p) is str for p in made["plugins"]):
        raise refused("plugins", f"expected a list of names of modules, got {values['plugins']!r}")
    made["plugins"] = tuple(dict.fromkeys([*made["plugins"], *extensions.given]))
    try:
        extensions.load(made["plugins"])
    except extensions.PluginError as error:
        raise refused("plugins", str(error)) from None
    for key, kind in {**SECTIONS, "learned": dict}.items():
        if key in values and not isinstance(values[key], dict):
            raise refused(key, f"expected a section [{key}], got {values[key]!r}")
        try:
            made[key] = make_section(kind, values.get(key, {})) if key in SECTIONS else made[key]
        except Bad as bad:
            raise refused(f"{key}.{bad.key}", bad.message) from None
    recipe = Recipe(**made)
    try:
        _check_together(recipe)
    except Bad as bad:
        raise refused(bad.key, bad.message) from None
    return recipe


def shelf() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return recipes.shelf()


def find(source: str | Path) -> Path:
    """The file of a recipe: a path that ends in .toml, or a name on the shelf."""
    try:
        path = recipes.find(source)
    except LookupError as error:
        raise RecipeError(str(error)) from None
    if not path.is_file():
        raise RecipeError(f"{path}: no such file")
    return path


def difference(old: Recipe, new: Recipe) -> str | None:
    """The first key in which two recipes differ and which a run may not change on its way, as "key: old, now new"."""
    for section in SECTIONS:
        for key, value in dataclasses.asdict(getattr(old, section)).items():
            now = getattr(getattr(new, section), key)
            free = (section == "run" and key in MACHINE) or (section, key) in (("data", "root"), ("data", "workers"))
            if value != now and not free:
                return f"{section}.{key}: {value!r}, now {now!r}"
    return None


def _read(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a file and of those that it extends, and the name of the file that set each key."""
    try:
        values = recipes.read(path)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    base = values.pop("extends", None)
    origins = dict.fromkeys(_keys(values), path.name)
    if base is None:
        return values, origins
    if not isinstance(base, str):
        raise RecipeError(f"{path.name}: extends: expected the name or path of a recipe, got {base!r}")
    other = find(path.parent / base if base.endswith(".toml") else base)
    if other.resolve() in (above := (*above, path.resolve())):
        raise RecipeError(f"{path.name}: extends: {base!r} leads back to itself")
    below, known = _read(other, above)
    return _merge(below, values), {**known, **origins}


def _keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All keys that are not tables, with dots."""
    keys: list[str] = []
    for key, value in values.items():
        keys += _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in values.items():
        old = both.get(key)
        both[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def _change(values: dict[str, Any], key: str, text: str, path: Path) -> None:
    """Sets "section.key" or "section.table.key" to the value that a text stands for."""
    section, *inner = key.split(".")
    if section not in SECTIONS or not inner:
        raise RecipeError(f"--{key}: expected a section of {', '.join(SECTIONS)}{nearest(section, list(SECTIONS))}")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if len(inner) == 1 and get_type_hints(SECTIONS[section]).get(inner[0]) is str:
        value = text
    table = values.setdefault(section, {})
    for name in inner[:-1]:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise RecipeError(f"{path.name}: {key}: {'.'.join([section, *inner[:-1]])} is not a table")
    table[inner[-1]] = value


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
    data, source = recipe.data, find_dataset(recipe.data.name)
    if not recipe.task.name and source.task not in TASKS:
        raise Bad("data.name", f"{data.name} is for {source.task}, which parapos cannot train yet")
    _check_data(data, source)
    known = task_options(recipe.task_class)
    for key in recipe.task.options:
        if key not in known:
            reason = f"expected some of {', '.join(known)}{nearest(key, known)}" if known else "it has none"
            raise Bad(f"task.options.{key}", f"task {recipe.task_name} has no such option, {reason}")
    for key in ("mixup", "cutmix", "smoothing"):
        if getattr(recipe.augment, key) and key not in known:
            raise Bad(f"augment.{key}", f"task {recipe.task_name} has no {key}, expected 0")
    if recipe.augment.sample:
        _known_fields(data.name, source.augment, recipe.augment.sample)
    if recipe.optim.ema and recipe.run.strategy == "fsdp":
        raise Bad("optim.ema", "cannot be combined with run.strategy = 'fsdp', which cuts the weights into pieces")
    inputs: tuple[str, ...] = getattr(MODELS[recipe.model.name][0], "inputs", ("image",))
    if not set(inputs) <= set(source.gives):
        reason = f"takes {', '.join(inputs)}, dataset {data.name} gives {', '.join(source.gives)}"
        raise Bad("model.name", f"{recipe.model.name} {reason}")
    for key in ("mixup", "cutmix"):
        if getattr(recipe.augment, key) and "image" not in inputs:
            raise Bad(f"augment.{key}", f"mixes images, model {recipe.model.name} takes {', '.join(inputs)}")
    _check_options(recipe.model)
    outputs = recipe.task_class.outputs(None)
    try:
        with torch.device("meta"):
            model = recipe.model.build(outputs)
    except Exception as error:  # layers raise whatever they stumble over
        if recipe.task.name and any(f"'{name}'" in str(error) for name in outputs):
            reason = f"{recipe.task_name} sets {', '.join(outputs)}, which model {recipe.model.name} does not take"
            raise Bad("task.name", reason) from None
        raise Bad("model", str(error) or type(error).__name__) from None
    _check_patches(data, source, model)


def _check_data(data: Data, source: Source) -> None:
    """Whether a dataset takes the options, the root and the size that it is given, and has those that it needs."""
    known = [key for key in source.options if key != "seed"]
    for key in data.options:
        if key not in known:
            reason = f"dataset {data.name} has no such option, expected some of {', '.join(known)}{nearest(key, known)}"
            raise Bad(f"data.options.{key}", reason)
    if data.root and "root" not in known:
        raise Bad("data.root", f"dataset {data.name} has no root, expected nothing, got {data.root!r}")
    if not data.root and "root" in known and source.options["root"].default is inspect.Parameter.empty:
        raise Bad("data.root", f"missing, expected the folder of dataset {data.name}; give it as --data.root FOLDER")
    if "size" in known and 0 in data.sides:
        raise Bad("data.size", f"missing, expected the side in pixels of the samples of dataset {data.name}")
    if "size" not in known and data.size:
        raise Bad("data.size", f"dataset {data.name} has no size, expected nothing, got {data.size}")
    if not isinstance(data.size, int) and source.options["size"].annotation in (int, "int"):
        raise Bad("data.size", f"samples of dataset {data.name} are square, expected one number, got {data.size}")


def _check_patches(data: Data, source: Source, model: torch.nn.Module) -> None:
    """Whether a model cuts samples as the data do, and without anything left over."""
    patch = getattr(model, "patch", 1)
    options = {key: data.options.get(key, parameter.default) for key, parameter in source.options.items()}
    if "patch" in options and options["patch"] != patch:
        raise Bad("data.options.patch", f"expected the model's patch size {patch}, got {options['patch']}")
    if options.get("fit") == "inside" and "mask" in getattr(model, "inputs", ()) and patch != MASK_PATCH:
        reason = f"images of several sizes (fit 'inside') are masked by patches, expected {MASK_PATCH}, got {patch}"
        raise Bad("model.options.patch", reason)
    for key in ("grid_size", "point_range"):
        built = getattr(model, key, None)
        given = tuple(options[key]) if isinstance(options.get(key), list) else options.get(key)
        if None not in (given, built) and given != built:
            raise Bad(f"data.options.{key}", f"expected the model's {key} {built}, got {given}")
    for key, value in source.model_options.items():
        if (got := getattr(model, key)) != value:
            raise Bad(f"model.options.{key}", f"expected {value}, which dataset {data.name} is made for, got {got}")
    for key in ("height", "width"):
        if key in options and (type(side := options[key]) is not int or side < 1 or side % patch):
            raise Bad(f"data.options.{key}", f"expected a multiple of the model's patch size {patch}, got {side!r}")
    if any(side % patch for side in data.sides):
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
            typed(f"model.options.{key}", value, kind)


def _known_fields(name: str, cls: Any, values: Mapping[str, Any]) -> None:
    if cls is None:
        raise Bad("augment.sample", f"dataset {name} does not vary its samples, expected nothing")
    fields = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in fields:
            reason = f"unknown key, expected one of {', '.join(fields)}{nearest(key, fields)}"
            raise Bad(f"augment.sample.{key}", reason)
    try:
        cls(**_tuples(values))
    except (TypeError, ValueError) as error:
        raise Bad("augment.sample", str(error)) from None
