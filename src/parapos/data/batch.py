"""Samples to a batch: tensors are stacked, numbers become tensors, ragged tensors are padded with zeros, packed ones
lie one after another.

Texts become a list, and dictionaries a dictionary of what their entries become. Tensors that are too different to be
padded, such as the boxes of an image, become a list, too, if they are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def collate(
    samples: Sequence[dict[str, Any]],
    ragged: Sequence[str] = (),
    listed: Sequence[str] = (),
    packed: Sequence[str] = (),
) -> dict[str, Any]:
    """One entry per name, with the batch first. Samples must agree in names, shapes and dtypes.

    ragged: names whose tensors may differ in their first dimension; they are padded to the longest of the batch.
    listed: names whose tensors may differ in any dimension; they become a list. An entry of a dictionary is named
    with a dot: "target.boxes".
    packed: names whose tensors have a row for each point of a sample, the same number in all of them; they are joined,
    and "offset" (B,) says where each sample ends. A sample may have `views`, the sizes (V,) of several clouds that its
    rows hold one after another; offset then ends each of these (B V,), and every sample must have as many.
    """
    inner = [{key: value for key, value in sample.items() if key not in packed} for sample in samples]
    batch = _collate(inner, [sample.get("id") for sample in samples], "", ragged, listed)
    joined = [name for name in packed if name in samples[0]]
    for name in joined:
        batch[name] = torch.cat([sample[name] for sample in samples])
    if joined:
        sizes = _sizes(samples, joined)
        batch["offset"] = torch.as_tensor(batch.pop("views", sizes)).flatten().cumsum(0)
    return batch


def _sizes(samples: Sequence[dict[str, Any]], joined: Sequence[str]) -> Tensor:
    """The number of rows of each sample."""
    for sample in samples:
        rows = {name: len(sample[name]) for name in joined if name in sample}
        views = sample.get("views")
        if (
            len(rows) < len(joined)
            or len(set(rows.values())) > 1
            or (views is not None and views.sum() != rows[joined[0]])
        ):
            told = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise ValueError(f"sample {sample.get('id')} has rows: {told}; expected as many of {', '.join(joined)}")
    return torch.tensor([len(sample[joined[0]]) for sample in samples])


def _collate(
    samples: Sequence[dict[str, Any]], ids: list[Any], prefix: str, ragged: Sequence[str], listed: Sequence[str]
) -> dict[str, Any]:
    names = samples[0].keys()
    for number, sample in zip(ids, samples, strict=True):
        if sample.keys() != names:
            where = f" in {prefix[:-1]}" if prefix else ""
            told = f"{', '.join(sample)}{where}, sample {ids[0]} has {', '.join(names)}"
            raise ValueError(f"sample {number} has {told}")
    batch: dict[str, Any] = {}
    for key in names:
        name, values = f"{prefix}{key}", [sample[key] for sample in samples]
        kind = _same(name, [_type(value) for value in values], ids)
        if kind == "text":
            batch[key] = values
        elif kind == "dictionary":
            batch[key] = _collate(values, ids, f"{name}.", ragged, listed)
        else:
            tensors = [torch.as_tensor(value) for value in values]
            free = tensors[0].ndim if name in listed else int(name in ragged)
            _same(name, [_Kind(value, free) for value in tensors], ids)
            if name in listed:
                batch[key] = tensors
            else:
                batch[key] = pad_sequence(tensors, batch_first=True) if free else torch.stack(tensors)
    return batch


def _same(name: str, kinds: list[Any], ids: list[Any]) -> Any:
    for number, kind in zip(ids, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(f"{name} of sample {number} is {kind}, sample {ids[0]} has {kinds[0]}")
    return kinds[0]


def _type(value: Any) -> str:
    return "text" if isinstance(value, str) else "dictionary" if isinstance(value, dict) else "tensor"


class _Kind:
    """What must be equal within a batch; the first `free` dimensions are left out."""

    def __init__(self, value: Tensor, free: int) -> None:
        self.key = (value.dtype, value.ndim, *value.shape[free:])
        self.told = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self.key == other.key

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.told
