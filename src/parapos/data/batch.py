"""Samples to a batch: tensors are stacked, numbers become tensors, ragged tensors are padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def collate(samples: Sequence[dict[str, Any]], ragged: Sequence[str] = ()) -> dict[str, Tensor]:
    """One tensor per name, with the batch first. Samples must agree in names, shapes and dtypes.

    ragged: names whose tensors may differ in their first dimension; they are padded to the longest of the batch.
    """
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            told = f"{', '.join(sample)}, sample {samples[0].get('id')} has {', '.join(names)}"
            raise ValueError(f"sample {sample.get('id')} has {told}")
    batch: dict[str, Tensor] = {}
    for name in names:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        free = name in ragged
        for value, sample in zip(values, samples, strict=True):
            if _kind(value, free) != _kind(values[0], free):
                told = f"{_told(value)}, sample {samples[0].get('id')} has {_told(values[0])}"
                raise ValueError(f"{name} of sample {sample.get('id')} is {told}")
        batch[name] = pad_sequence(values, batch_first=True) if free else torch.stack(values)
    return batch


def _kind(value: Tensor, free: bool) -> tuple[Any, ...]:
    """What must be equal within a batch; `free` leaves out the first dimension."""
    return (value.dtype, value.ndim, *value.shape[free:])


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
