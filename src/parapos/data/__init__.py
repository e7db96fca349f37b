"""Datasets by name. A dataset answers an index, or a Key of index and epoch, with a sample of tensors and numbers.

What is random in a sample depends on the seed, the epoch and the index alone: not on workers, ranks or order.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Protocol

from ..encodings import nearest
from .sampling import Key

__all__ = ["DATASETS", "Dataset", "FormatError", "create_dataset", "list_datasets"]


class FormatError(ValueError):
    """A file or folder is not what it should be. The message names it."""


class Dataset(Protocol):
    """Samples of tensors and numbers, among them "label" and "id", both int; and the number of classes.

    What else a sample holds is what models of its kind name as their `inputs`, {"image": float (3, H, W)} for one. A
    dataset whose tensors differ in their first dimension lists their names as `ragged`: they are padded in a batch.
    """

    classes: int

    def __len__(self) -> int: ...

    def __getitem__(self, key: int | Key) -> dict[str, Any]: ...


# name: module of this package, and the callable in it that takes `split` and options and returns a Dataset
DATASETS: dict[str, tuple[str, str]] = {
    "imagenet": ("imagenet", "imagenet"),
    "imagenet_v2": ("imagenet", "imagenet_v2"),
    "imagenet_r": ("imagenet", "imagenet_r"),
    "images": ("images", "image_folder"),
    "digits": ("digits", "Digits"),
    "ucf101": ("ucf101", "ucf101"),
    "dvsgesture": ("dvsgesture", "dvsgesture"),
    "gen1": ("gen1", "gen1"),
    "fashion_mnist": ("fashion", "FashionMNIST"),
    "cifar10": ("cifar10", "CIFAR10"),
}


def list_datasets() -> list[str]:
    """The names that `create_dataset` knows."""
    return list(DATASETS)


def create_dataset(name: str, split: str, **options: Any) -> Dataset:
    """A split ("train", "val" or "test") of a dataset. Options are those of the dataset; unknown ones are errors."""
    if name not in DATASETS:
        known = list_datasets()
        raise ValueError(f"unknown dataset {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    module, attribute = DATASETS[name]
    factory = getattr(import_module(f".{module}", __name__), attribute)
    allowed = [option for option in inspect.signature(factory).parameters if option != "split"]
    for option in options:
        if option not in allowed:
            hint = nearest(option, allowed)
            raise ValueError(f"dataset {name} has no option {option!r}, expected some of {', '.join(allowed)}{hint}")
    return factory(split, **options)
