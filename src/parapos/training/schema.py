"""The sections of a recipe: every key, its default, and what it may be. A section is checked when it is made."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

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
MOST_OPTION = {"depth": 1024}  # options of models that are whole numbers; others up to 2**16


class Bad(Exception):
    """A key of a section, and what is wrong with it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key, self.message = key, message


def _need(key: str, good: bool, expected: str, got: Any) -> None:
    if not good:
        raise Bad(key, f"expected {expected}, got {got!r}")


def _known(key: str, name: str, known: list[str]) -> None:
    _need(key, name in known, f"one of {', '.join(known)}{nearest(name, known)}", name)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        _known("name", self.name, list(MODELS))
        _known("encoding", self.encoding, list(ENCODINGS))
        _need("init", _is_utf8(self.init), "a path in UTF-8, as the recipe of a run is", self.init)
        for key in ("encoding", "num_classes"):
            if key in self.options:
                raise Bad(f"options.{key}", "not an option: it comes from model.encoding and from the data")

        for key, value in self.options.items():
            most = MOST_OPTION.get(key, 2**16)
            _need(f"options.{key}", type(value) is not int or value <= most, f"at most {most}", value)
        for name, table in self.encodings.items():
            _known(f"encodings.{name}", name, list(ENCODINGS))
            _need(f"encodings.{name}", isinstance(table, dict), "a table", table)
            for key, value in table.items():
                good = type(value) is not int or value <= 2**16
                _need(f"encodings.{name}.{key}", good, f"at most {2**16}", value)
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
        _known("name", self.name, list(DATASETS))
        reason = f"up to {MOST_PIXELS} pixels"
        _need("size", all(0 <= side <= MOST_PIXELS for side in self.sides), reason, self.size)
        _need("eval_batch", 1 <= self.eval_batch <= MOST_BATCH, f"from 1 to {MOST_BATCH}", self.eval_batch)
        _need("workers", 0 <= self.workers <= MOST, f"from 0 to {MOST}", self.workers)
        _need("root", _is_utf8(self.root), "a path in UTF-8, as the recipe of a run is", self.root)
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
            _known("name", self.name, list_tasks())
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
        _need("mixup", self.mixup >= 0, "0 or more", self.mixup)
        _need("cutmix", self.cutmix >= 0, "0 or more", self.cutmix)
        _need("smoothing", 0 <= self.smoothing < 1, "at least 0 and below 1", self.smoothing)


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
            _need(key, 1 <= getattr(self, key) <= most, f"from 1 to {most}", getattr(self, key))
        _need("lr", self.lr > 0, "a positive number", self.lr)
        _need("final_lr", 0 <= self.final_lr <= self.lr, "from 0 to optim.lr", self.final_lr)
        _need("eps", self.eps > 0, "a positive number", self.eps)
        for key in ("part", "weight_decay", "clip"):
            _need(key, getattr(self, key) >= 0, "0 or more", getattr(self, key))
        _known("decay", self.decay, ["all", "matrices"])
        _known("schedule", self.schedule, ["cosine", "onecycle"])
        _need("betas", all(0 <= b < 1 for b in self.betas), "two numbers from 0 to below 1", self.betas)
        _need("warmup", 0 <= self.warmup < 1, "at least 0 and below 1", self.warmup)
        _need("ema", 0 <= self.ema < 1, "at least 0 and below 1", self.ema)
        _need("start_lr", 0 <= self.start_lr <= self.lr, "from 0 to optim.lr", self.start_lr)
        for key, value in (("start_lr", self.start_lr), ("cycle_beta", not self.cycle_beta)):
            if value and self.schedule != "onecycle":
                raise Bad(
                    key, f"has no effect with optim.schedule = {self.schedule!r}, expected it with onecycle alone"
                )
        for key, factor in self.rates.items():
            good = type(factor) in (int, float) and 0 < factor < float("inf")
            _need(f"rates.{key}", good and bool(key), "a positive number for a part of names", factor)
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
        _known("accelerator", self.accelerator, list(ACCELERATORS))
        _known("strategy", self.strategy, list(STRATEGIES))
        _known("precision", self.precision, list(PRECISIONS))
        _need("seed", 0 <= self.seed < 2**63, "from 0 to 2^63 - 1", self.seed)
        _need("devices", 0 <= self.devices <= MOST, f"from 0 to {MOST}", self.devices)
        _need("threads", 0 <= self.threads <= MOST, f"from 0 to {MOST}", self.threads)
        _need("nodes", 1 <= self.nodes <= 2**16, f"from 1 to {2**16}", self.nodes)
        _need("log_every", self.log_every >= 1, "at least 1", self.log_every)
        _need("save_every", self.save_every >= 0, "0 or more", self.save_every)
        _need("keep", self.keep >= 2, "at least 2, so that a damaged file has a predecessor", self.keep)
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            raise Bad("precision", "16-mixed needs a GPU; on the CPU take bf16-mixed or 32-true")
        if self.strategy == "fsdp" and self.accelerator == "cpu":
            raise Bad("strategy", "fsdp needs GPUs; on the CPU take ddp")


def make_section(cls: type, values: dict[str, Any]) -> Any:
    """A section from the values of a file. Raises `Bad` for unknown or missing keys and wrong types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kinds = get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise Bad(key, f"unknown key, expected one of {', '.join(fields)}{nearest(key, list(fields))}")
    for key, spec in fields.items():
        needed = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if needed and key not in values:
            raise Bad(key, f"missing, expected {_name_of(kinds[key])}")
    return cls(**{key: typed(key, value, kinds[key]) for key, value in values.items()})


def typed(key: str, value: Any, kind: Any) -> Any:
    """The value as the kind that an annotation names; lists become tuples, whole numbers floats."""
    if isinstance(kind, types.UnionType):
        kind = next(
            (k for k in get_args(kind) if (get_origin(k) is tuple) == isinstance(value, list)), get_args(kind)[0]
        )
    if get_origin(kind) is dict and isinstance(value, dict):
        return value
    if get_origin(kind) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(kind)):
        return tuple(typed(key, v, k) for v, k in zip(value, get_args(kind), strict=True))
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, float) and not abs(value) < float("inf"):
        raise Bad(key, f"expected a finite number, got {value!r}")
    if type(value) is not kind:
        raise Bad(key, f"expected {_name_of(kind)}, got {value!r}")
    return value


def _name_of(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(map(_name_of, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is dict:
        return "a table"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
