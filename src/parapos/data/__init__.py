"""Datasets by name. A dataset answers an index, or a Key of index and epoch, with a sample: a dictionary with an "id".

What is random in a sample depends on the seed, the epoch and the index alone: not on workers, ranks or order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from ..text import nearest
from .sampling import Key

__all__ = [
    "DATASETS",
    "Dataset",
    "FormatError",
    "Source",
    "create_dataset",
    "find_dataset",
    "list_datasets",
    "register_dataset",
]


class FormatError(ValueError):
    """A file or folder is not what it should be. The message names it."""


class Dataset(Protocol):
    """Samples of tensors, numbers, texts and dictionaries, among them an "id", an int.

    What else a sample holds is what models of its kind name as their `inputs`, {"image": float (3, H, W)} for one, and
    what its task takes, {"label": int} for one. A dataset may also have
      ragged         names of tensors that differ in their first dimension: they are padded in a batch
      packed         names of tensors with a row per point: they lie one after another in a batch, see `batch.collate`
      listed         names of tensors that stay a list in a batch
      classes, class_names, subset   what the task of classification asks for
      preprocessing  what was done to the samples (size, crop, mean, scale), in plain types: a run keeps it
      __getitems__   many samples at once
    """

    def __len__(self) -> int: ...

    def __getitem__(self, key: int | Key) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a dataset comes from: what makes it, of `split` and options, and what a recipe has to know beforehand.

    gives: entries of a sample that are inputs of models. model_options: options that a model must have, such as how
    many buckets it cuts time into. augment: the dataclass of how training samples are varied, if they can be.
    """

    factory: Callable[..., Any]
    task: str = "classification"
    gives: tuple[str, ...] = ("image",)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    augment: type | None = None

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Options of the factory by name."""
        return {name: p for name, p in inspect.signature(self.factory).parameters.items() if name != "split"}


# name: module of this package and the factory in it, which is imported when it is needed; or the source itself
DATASETS: dict[str, tuple[str, str] | Source] = {
    "imagenet": ("imagenet", "imagenet"),
    "imagenet_v2": ("imagenet", "imagenet_v2"),
    "imagenet_r": ("imagenet", "imagenet_r"),
    "images": ("images", "image_folder"),
    "digits": ("digits", "Digits"),
    "ucf101": ("ucf101", "ucf101"),
    "dvsgesture": ("dvsgesture", "dvsgesture"),
    "desk_clips": ("desk_clips", "desk_clips"),
    "desk_gestures": ("desk_gestures", "desk_gestures"),
    "gen1": ("gen1", "gen1"),
    "coco": ("coco", "coco"),
    "coco_desk": ("coco", "coco_desk"),
    "fashion_mnist": ("fashion", "FashionMNIST"),
    "cifar10": ("cifar10", "CIFAR10"),
    "scannet": ("scannet", "scannet"),
    "scannet_precise": ("scannet", "scannet_precise"),
    "scannet_tta": ("scannet", "scannet_tta"),
    "modelnet40": ("modelnet40", "modelnet40"),
    "modelnet40_voting": ("modelnet40", "modelnet40_voting"),
    "nuscenes": ("nuscenes", "nuscenes"),
    "nuscenes_lidar": ("nuscenes", "nuscenes_lidar"),
    "nuscenes_cameras": ("nuscenes", "nuscenes_cameras"),
    "rooms": ("rooms", "rooms"),
    "rooms_precise": ("rooms", "rooms_precise"),
    "rooms_tta": ("rooms", "rooms_tta"),
    "shapes": ("shapes", "shapes"),
    "shapes_voting": ("shapes", "shapes_voting"),
}


def list_datasets() -> list[str]:
    """The names that `create_dataset` knows."""
    return list(DATASETS)


def register_dataset(
    name: str,
    factory: Callable[..., Any],
    *,
    task: str = "classification",
    gives: tuple[str, ...] = ("image",),
    model_options: Mapping[str, Any] | None = None,
    augment: type | None = None,
) -> None:
    """Makes a dataset known to recipes by a name. factory takes `split` and options; the others are as in `Source`. A
    name that is taken is an error."""
    source = Source(factory=factory, task=task, gives=gives, model_options=model_options or {}, augment=augment)
    if DATASETS.get(name, source) != source:
        raise ValueError(f"dataset {name!r} is there already, expected a new name")
    DATASETS[name] = source


def find_dataset(name: str) -> Source:
    """A dataset that is not opened yet. Nothing of its data is read."""
    if name not in DATASETS:
        known = list_datasets()
        raise ValueError(f"unknown dataset {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    entry = DATASETS[name]
    if isinstance(entry, Source):
        return entry
    module = import_module(f".{entry[0]}", __name__)
    return Source(
        factory=getattr(module, entry[1]),
        task=getattr(module, "TASK", "classification"),
        gives=getattr(module, "GIVES", ("image",)),
        model_options=getattr(module, "OF_MODELS", {}),
        augment=getattr(module, "Augment", None),
    )


def create_dataset(name: str, split: str, **options: Any) -> Any:
    """A split ("train", "val" or "test") of a dataset. Options are those of the dataset; unknown ones are errors."""
    source = find_dataset(name)
    allowed = list(source.options)
    for option in options:
        if option not in allowed:
            hint = nearest(option, allowed)
            raise ValueError(f"dataset {name} has no option {option!r}, expected some of {', '.join(allowed)}{hint}")
    return source.factory(split, **options)
