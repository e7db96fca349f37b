"""Events of an event camera: what readers give, augmentations change and the tokenizer takes.

An event is a pixel that got brighter (polarity 1) or darker (polarity 0) at a time. t is in microseconds, x is the
column and y the row, both from 0 at the top left. Time is signed, because unsigned differences wrap; coordinates are
uint16, so cast them before arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Events", "clean", "concatenate", "enlarged"]

DTYPES: dict[str, np.dtype[Any]] = {
    "t": np.dtype(np.int64),
    "x": np.dtype(np.uint16),
    "y": np.dtype(np.uint16),
    "polarity": np.dtype(np.uint8),
}


@dataclass(frozen=True, eq=False)
class Events:
    """N events as four arrays (N,). Nothing is said about their order; `clean` sorts them."""

    t: npt.NDArray[np.int64]
    x: npt.NDArray[np.uint16]
    y: npt.NDArray[np.uint16]
    polarity: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
                raise ValueError(
                    f"events: {name} is {_kind(value)}, expected a NumPy array of {dtype} with one dimension"
                )
            if len(value) != len(self.t):
                raise ValueError(f"events: {name} has {len(value)} entries and t has {len(self.t)}, expected the same")

    @classmethod
    def of(cls, t: npt.ArrayLike, x: npt.ArrayLike, y: npt.ArrayLike, polarity: npt.ArrayLike) -> Events:
        """Events from whole numbers or booleans of any kind; ValueError if a value does not fit its field."""
        return cls(*(_cast(name, value) for name, value in zip(DTYPES, (t, x, y, polarity), strict=True)))

    @classmethod
    def empty(cls) -> Events:
        return cls(*(np.empty(0, dtype) for dtype in DTYPES.values()))

    def __len__(self) -> int:
        return len(self.t)

    def select(self, which: slice | npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]) -> Events:
        """The events that a slice, a mask or indices pick. A slice is a view, not a copy."""
        return Events(self.t[which], self.x[which], self.y[which], self.polarity[which])


def _kind(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _cast(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    found, limits = np.asarray(values), np.iinfo(DTYPES[name])
    if found.dtype.kind not in "iub" and found.size:
        raise ValueError(f"events: {name} is {found.dtype}, expected whole numbers")
    if (
        found.size
        and found.dtype != DTYPES[name]
        and not limits.min <= int(found.min()) <= int(found.max()) <= limits.max
    ):
        raise ValueError(f"events: {name} runs from {found.min()} to {found.max()}, which {limits.dtype} cannot hold")
    return found.astype(DTYPES[name], copy=False)


def concatenate(parts: list[Events]) -> Events:
    """The events of all parts, one part after the other."""
    return Events(*(np.concatenate([getattr(part, name) for part in [Events.empty(), *parts]]) for name in DTYPES))


def clean(events: Events, width: int, height: int, *, start: int = 0) -> Events:
    """Events inside the frame, in order of time; those before `start` move there. Equal times keep their order."""
    found = events
    if len(found) and found.t.min() < start:
        found = Events(np.maximum(found.t, start), found.x, found.y, found.polarity)
    inside = (found.x < width) & (found.y < height)
    if not inside.all():
        found = found.select(inside)
    if (found.t[1:] < found.t[:-1]).any():
        found = found.select(np.argsort(found.t, kind="stable"))
    return found


def enlarged(events: Events, factor: int) -> Events:
    """What a sensor of `factor` times as many pixels a side would see of the same: each pixel becomes a block, and each
    event one in every pixel of it, at the same time."""
    down, right = (offset.ravel() for offset in np.indices((factor, factor)))
    x = events.x.astype(np.int64)[:, None] * factor + right
    y = events.y.astype(np.int64)[:, None] * factor + down
    t, polarity = (np.repeat(values, factor**2) for values in (events.t, events.polarity))
    return Events.of(t, x.ravel(), y.ravel(), polarity)
