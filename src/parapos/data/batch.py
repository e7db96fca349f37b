"""Samples to a batch: tensors are stacked, numbers become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """One tensor per name, with the batch first. Samples must agree in names, shapes and dtypes."""
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            told = f"{', '.join(sample)}, sample {samples[0].get('id')} has {', '.join(names)}"
            raise ValueError(f"sample {sample.get('id')} has {told}")
    batch: dict[str, Tensor] = {}
    for name in names:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        for value, sample in zip(values, samples, strict=True):
            if value.shape != values[0].shape or value.dtype != values[0].dtype:
                told = f"{_told(value)}, sample {samples[0].get('id')} has {_told(values[0])}"
                raise ValueError(f"{name} of sample {sample.get('id')} is {told}")
        batch[name] = torch.stack(values)
    return batch


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
