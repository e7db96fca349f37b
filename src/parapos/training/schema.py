"""The sections of a recipe: every key, its default, and what it may be. A section is checked when it is made."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import torch

from ..data import DATASETS
from ..encodings import ENCODINGS
from ..models import MODELS, create_model
from ..tasks import list_tasks
from ..text import nearest

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true")
STRATEGIES = ("auto", "ddp", "fsdp")
ACCELERATORS = ("auto", "cpu", "gpu")
# More than these are a mistake, and would take all memory or for ever.
MOST = 1024  # threads, or workers, of a process; devices of a node
MOST_PIXELS = 2**16  # of a side of a sample
MOST_BATCH = 2**20
MOST_EPOCHS = 10**6
INTERNAL = {"internal": True}  # metadata of a field that is no key of files
MOST_OPTION = {"depth": 1024}  # options of models that are whole numbers; others up to 2**16


class Bad(Exception):
    """A key of a section, and what is wrong with it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def need(key: str, good: bool, expected: str, got: Any) -> None:
    if not good:
        raise Bad(key, f"expected {expected}, got {got!r}")


def need_known(key: str, name: str, known: list[str]) -> None:
    need(key, name in known, f"one of {', '.join(known)}{nearest(name, known)}", name)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def need_bounded(options: Mapping[str, Any]) -> None:
    """Refuses numbers, also in lists, that no model of this world has, before a model is built of them."""
    for key, value in options.items():
        most = MOST_OPTION.get(key, 2**16)
        for number in value if isinstance(value, list | tuple) else [value]:
            need(f"options.{key}", type(number) is not int or number <= most, f"at most {most}", number)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the registry; options are those of its class and of its encoding. encodings has a table of options per
    encoding, of which only that of the chosen one is used, so that another one may be chosen by its name alone.
    init: the folder of a run with the same encoding, from whose weights all but the outputs start."""

    name: str
    encoding: str = "pape"
    init: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    encodings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_known("name", self.name, list(MODELS))
        need_known("encoding", self.encoding, list(ENCODINGS))
        need("init", _is_utf8(self.init), "a path in UTF-8, as the recipe of a run is", self.init)
        for key in ("encoding", "num_classes"):
            if key in self.options:
                raise Bad(f"options.{key}", "not an option: it comes from model.encoding and from the data")

        need_bounded(self.options)
        for name, table in self.encodings.items():
            need_known(f"encodings.{name}", name, list(ENCODINGS))
            need(f"encodings.{name}", isinstance(table, dict), "a table", table)
            for key, value in table.items():
                good = type(value) is not int or value <= 2**16
                need(f"encodings.{name}.{key}", good, f"at most {2**16}", value)
        for key in self.options.keys() & self.encodings.get(self.encoding, {}).keys():
            raise Bad(f"options.{key}", f"has no effect, model.encodings.{self.encoding}.{key} is given too")

    @property
    def chosen(self) -> dict[str, Any]:
        """All options of the model with its encoding."""
        return {**self.options, **self.encodings.get(self.encoding, {})}

    def build(self, outputs: Mapping[str, Any]) -> torch.nn.Module:
        """outputs: options that the data decide, such as num_classes."""
        return create_model(self.name, encoding=self.encoding, **outputs, **self.chosen)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A dataset of the registry at `size` pixels: one number for a square, [height, width], or 0 for a dataset that has
    no such option; other options are its own. workers read and decode; results do not depend on how many. eval_batch
    is per process."""

    name: str
    root: str = ""
    size: int | tuple[int, int] = 0
    eval_batch: int = 64
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_known("name", self.name, list(DATASETS))
        reason = f"up to {MOST_PIXELS} pixels"
        need("size", all(0 <= side <= MOST_PIXELS for side in self.sides), reason, self.size)
        need("eval_batch", 1 <= self.eval_batch <= MOST_BATCH, f"from 1 to {MOST_BATCH}", self.eval_batch)
        need("workers", 0 <= self.workers <= MOST, f"from 0 to {MOST}", self.workers)
        need("root", _is_utf8(self.root), "a path in UTF-8, as the recipe of a run is", self.root)
        for key in ("root", "size", "seed", "augment"):
            if key in self.options:
                raise Bad(f"options.{key}", "not an option: it has a key of its own in the recipe")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """What is learned and how it is judged; without a name, what the dataset is for. Options are those of the task."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name:
            need_known("name", self.name, list_tasks())
        for key in ("mixup", "cutmix", "smoothing"):
            if key in self.options:
                raise Bad(f"options.{key}", f"not an option: it is augment.{key}")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """sample: how the dataset varies a sample (the fields of its own Augment). mixup, cutmix, smoothing: of tasks that
    take them, the parameter of their Beta distributions, 0 for never, and the smoothing of labels."""

    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    sample: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need("mixup", self.mixup >= 0, "0 or more", self.mixup)
        need("cutmix", self.cutmix >= 0, "0 or more", self.cutmix)
        need("smoothing", 0 <= self.smoothing < 1, "at least 0 and below 1", self.smoothing)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW. schedule = "cosine": the rate rises linearly over the share `warmup` of all steps, then falls along half a
    cosine to `final_lr`. schedule = "onecycle": torch's OneCycleLR, from `start_lr` (lr / 25 for 0) along a half cosine
    up to lr over the share `warmup`, then along another down to `final_lr` (start / 10,000 for 0); the first beta runs
    from 0.95 down to 0.85 and back, unless cycle_beta is false. rates: factors of the rate for parameters whose names
    contain a text; the first that fits counts.

    batch is the global batch of an optimizer step. part is how many samples go through the model at once, on one
    device; 0 takes the batch over the number of devices. Drop path and mixing draw per part, so a given part makes the
    result independent of the number of devices. decay: weight decay for "all" parameters, as in the released code, or
    for "matrices" alone. clip: the gradient's largest norm, 0 for none. ema: decay of the average of the weights that
    is evaluated and exported, 0 for none.
    """

    epochs: int
    batch: int
    lr: float
    final_lr: float = 0.0
    part: int = 0
    weight_decay: float = 0.05
    decay: str = "all"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: float = 0.05
    clip: float = 0.0
    ema: float = 0.0
    schedule: str = "cosine"
    start_lr: float = 0.0
    cycle_beta: bool = True
    rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, most in (("epochs", MOST_EPOCHS), ("batch", MOST_BATCH)):
            need(key, 1 <= getattr(self, key) <= most, f"from 1 to {most}", getattr(self, key))
        need("lr", self.lr > 0, "a positive number", self.lr)
        need("final_lr", 0 <= self.final_lr <= self.lr, "from 0 to optim.lr", self.final_lr)
        need("eps", self.eps > 0, "a positive number", self.eps)
        for key in ("part", "weight_decay", "clip"):
            need(key, getattr(self, key) >= 0, "0 or more", getattr(self, key))
        need_known("decay", self.decay, ["all", "matrices"])
        need_known("schedule", self.schedule, ["cosine", "onecycle"])
        need("betas", all(0 <= b < 1 for b in self.betas), "two numbers from 0 to below 1", self.betas)
        need("warmup", 0 <= self.warmup < 1, "at least 0 and below 1", self.warmup)
        need("ema", 0 <= self.ema < 1, "at least 0 and below 1", self.ema)
        need("start_lr", 0 <= self.start_lr <= self.lr, "from 0 to optim.lr", self.start_lr)
        for key, value in (("start_lr", self.start_lr), ("cycle_beta", not self.cycle_beta)):
            if value and self.schedule != "onecycle":
                raise Bad(
                    key, f"has no effect with optim.schedule = {self.schedule!r}, expected it with onecycle alone"
                )
        for key, factor in self.rates.items():
            good = type(factor) in (int, float) and 0 < factor < float("inf")
            need(f"rates.{key}", good and bool(key), "a positive number for a part of names", factor)
        if self.schedule == "onecycle" and self.cycle_beta and self.betas[0] != Optim.betas[0]:
            raise Bad("betas", f"the first has no effect with optim.schedule = 'onecycle', got {self.betas[0]}")
        if self.part and self.batch % self.part:
            raise Bad("part", f"expected a divisor of optim.batch = {self.batch}, got {self.part}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How and where it runs. devices: per node, 0 for all. threads: of the CPU, 0 leaves the choice to torch; their
    number changes the order of sums. save_every: steps between checkpoints, besides the one after each epoch, or 0.
    keep: checkpoints on disk. wandb: a project at Weights & Biases, empty for none."""

    seed: int = 0
    accelerator: str = "auto"
    threads: int = 0
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    compile: bool = False
    deterministic: bool = False
    log_every: int = 50
    save_every: int = 0
    keep: int = 2
    tensorboard: bool = True
    wandb: str = ""

    def __post_init__(self) -> None:
        need_known("accelerator", self.accelerator, list(ACCELERATORS))
        need_known("strategy", self.strategy, list(STRATEGIES))
        need_known("precision", self.precision, list(PRECISIONS))
        need("seed", 0 <= self.seed < 2**63, "from 0 to 2^63 - 1", self.seed)
        need("devices", 0 <= self.devices <= MOST, f"from 0 to {MOST}", self.devices)
        need("threads", 0 <= self.threads <= MOST, f"from 0 to {MOST}", self.threads)
        need("nodes", 1 <= self.nodes <= 2**16, f"from 1 to {2**16}", self.nodes)
        need("log_every", self.log_every >= 1, "at least 1", self.log_every)
        need("save_every", self.save_every >= 0, "0 or more", self.save_every)
        need("keep", self.keep >= 2, "at least 2, so that a damaged file has a predecessor", self.keep)
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            raise Bad("precision", "16-mixed needs a GPU; on the CPU take bf16-mixed or 32-true")
        if self.strategy == "fsdp" and self.accelerator == "cpu":
            raise Bad("strategy", "fsdp needs GPUs; on the CPU take ddp")


def make_section(cls: type, values: dict[str, Any]) -> Any:
    """A section from the values of a file. Raises `Bad` for unknown or missing keys and wrong types."""
    fields = {f.name: f for f in dataclasses.fields(cls) if "internal" not in f.metadata}
    kinds = get_type_hints(cls, include_extras=True)
    for key in values:
        if key not in fields:
            raise Bad(key, f"unknown key, expected one of {', '.join(fields)}{nearest(key, list(fields))}")
    made = {key: typed(key, value, kinds[key]) for key, value in values.items()}
    for key, spec in fields.items():
        needed = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if needed and key not in values:
            raise Bad(key, f"missing, expected {_name_of(kinds[key])}")
    return cls(**made)


def typed(key: str, value: Any, kind: Any) -> Any:
    """The value as the kind that an annotation names; lists become tuples, whole numbers floats, tables sections. A
    number in `Annotated` is the least that a value may be; entries of a list of any length must differ."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        raw = tuple if isinstance(value, list) else type(value)  # of what a file has
        fits = [k for k in of if raw in (k, get_origin(k), dict if dataclasses.is_dataclass(k) else None)]
        need(key, bool(fits), _name_of(kind), value)
        return typed(key, value, fits[0])
    if origin is Annotated:
        value = typed(key, value, of[0])
        need(key, value >= of[1], f"{_name_of(of[0])} of {of[1]} or more", value)
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        try:
            return make_section(cast(type, kind), value)
        except Bad as bad:
            raise Bad(f"{key}.{bad.key}", bad.message) from None
    elif origin is dict and isinstance(value, dict):
        return {name: typed(f"{key}.{name}", x, of[1]) for name, x in value.items()}
    elif origin is tuple and isinstance(value, list | tuple) and Ellipsis in of:
        need(key, len(set(map(repr, value))) == len(value), _name_of(kind), value)
        return tuple(typed(key, v, of[0]) for v in value)
    elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(of):
        return tuple(typed(key, v, k) for v, k in zip(value, of, strict=True))
    elif kind is float and type(value) in (int, float):
        need(key, abs(value) < float("inf"), "a finite number", value)
        return float(value)
    elif kind is not Any and type(value) is not kind:
        raise Bad(key, f"expected {_name_of(kind)}, got {value!r}")
    return value


def _name_of(kind: Any) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return " or ".join(_name_of(k) for k in of if k is not type(None))
    if origin is Annotated:
        return _name_of(of[0])
    if origin is tuple:
        entries = _name_of(of[0]).removeprefix("a ")
        return f"a list of different {entries}s" if Ellipsis in of else f"a list of {len(of)} numbers"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
