"""Spiking Patches: a patch of the sensor becomes a token when it has collected enough events.

Every event goes to its patch. A patch that has collected `threshold` events spikes: these events are a token, at the
time of the last one, and the patch starts anew. For `refractory_us` after a spike the patch ignores events; one that
comes exactly that much later counts again. Tokens come in the order of their last events. What has not spiked at the
end of a stream is no token.

A token is the counts of its events over (polarity, bucket, row in patch, column in patch). The bucket tells the age of
an event when the token was made: bucket 0 is less than 1 ms, bucket b is from 2^(b-1) to 2^b ms, the last is open.
The counts are kept as one code per event, which takes 80 times less memory than dense int64 counts:
((polarity * buckets + bucket) * patch + row) * patch + column.

`reference` is the specification; `tokenize` and `Tokenizer` are compiled by numba, and tokenize(backend="numpy") does
without it. L tokens.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["BUCKETS", "Tokenizer", "Tokens", "reference", "tokenize"]

BUCKETS = 10
MOST_SLOTS = 2**28  # events that all patches together may hold: 2.7 GB, and no index leaves int32
LARGEST_TIME = 2**62 - 1  # so that differences and the end of a refractory period fit in int64
FIELDS = {"t": np.int64, "x": np.uint16, "y": np.uint16, "polarity": np.uint8}
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Tokens:
    """L tokens: time in microseconds, column and row of the patch from 0, and one code per event, oldest first."""

    t: npt.NDArray[np.int64]  # (L,)
    x: npt.NDArray[np.int32]  # (L,)
    y: npt.NDArray[np.int32]  # (L,)
    codes: npt.NDArray[np.uint16]  # (L, threshold), each below 2 * buckets * patch^2
    patch: int
    buckets: int = BUCKETS

    def __len__(self) -> int:
        return len(self.t)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes in pixels, the number of events of a token, and the microseconds without events after one."""

    height: int
    width: int
    patch: int = 16
    threshold: int = 256
    refractory_us: int = 100_000

    def __post_init__(self) -> None:
        largest_patch = int((2**16 / (2 * BUCKETS)) ** 0.5)  # codes are uint16
        limits = {
            "height": (1, 2**16),
            "width": (1, 2**16),
            "patch": (1, largest_patch),
            "threshold": (1, MOST_SLOTS),
            "refractory_us": (0, LARGEST_TIME),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            number = operator.index(value)
            if not least <= number <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value!r}")
            object.__setattr__(self, name, number)
        patches = self.rows * self.columns
        if self.threshold * patches > MOST_SLOTS:
            told = f"threshold {self.threshold} x {patches} patches, expected at most {MOST_SLOTS} in all"
            raise ValueError(f"{told}: every patch has room for its events")

    @property
    def columns(self) -> int:
        return -(-self.width // self.patch)

    @property
    def rows(self) -> int:
        return -(-self.height // self.patch)


def tokenize(
    t: npt.ArrayLike,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    polarity: npt.ArrayLike,
    *,
    height: int,
    width: int,
    patch: int = 16,
    threshold: int = 256,
    refractory_us: int = 100_000,
    backend: Literal["numba", "numpy"] = "numba",
) -> Tokens:
    """The tokens of a stream: whole numbers (N,), times in microseconds that never go back, polarity 0 or 1.

    backend="numpy" needs no numba and is slower, above all where the threshold is small.
    """
    options = dict(height=height, width=width, patch=patch, threshold=threshold, refractory_us=refractory_us)
    if backend == "numba":
        return Tokenizer(**options).feed(t, x, y, polarity)
    if backend != "numpy":
        raise ValueError(f"backend must be 'numba' or 'numpy', got {backend!r}")
    from . import spiking_patches_numpy

    settings = Settings(**options)
    events = checked(settings, t, x, y, polarity)
    return Tokens(*spiking_patches_numpy.tokens(*events, settings), settings.patch)


class Tokenizer:
    """Tokens of a stream that comes in pieces. However it is cut, the tokens are those of the whole stream."""

    def __init__(self, **settings: int) -> None:
        """settings: those of `tokenize`."""
        self.settings = Settings(**settings)
        try:
            from . import spiking_patches_numba
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ("numba", "llvmlite"):
                raise
            raise ModuleNotFoundError(
                f"the tokenizer needs {error.name}; install it with: pip install 'parapos[events]'", name=error.name
            ) from None
        self._state = spiking_patches_numba.State(self.settings)

    def feed(self, t: npt.ArrayLike, x: npt.ArrayLike, y: npt.ArrayLike, polarity: npt.ArrayLike) -> Tokens:
        """The tokens that these events complete. They may not be older than those fed before.

        Input that is refused with a ValueError leaves the tokenizer as it was.
        """
        events = checked(self.settings, t, x, y, polarity, self._state.newest)
        return Tokens(*self._state.advance(*events), self.settings.patch)

    def reset(self) -> None:
        """Forget all that was fed: the next stream starts."""
        self._state.reset()


def reference(t: npt.ArrayLike, x: npt.ArrayLike, y: npt.ArrayLike, polarity: npt.ArrayLike, **settings: int) -> Tokens:
    """What `tokenize` computes with these settings, event by event in plain Python."""
    chosen = Settings(**settings)
    patch, threshold, refractory_us = chosen.patch, chosen.threshold, chosen.refractory_us
    events = zip(*(field.tolist() for field in checked(chosen, t, x, y, polarity)), strict=True)
    collected: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    last_spike: dict[tuple[int, int], int] = {}
    tokens = []
    for now, px, py, sign in events:
        place = (px // patch, py // patch)
        if place in last_spike and now - last_spike[place] < refractory_us:
            continue
        collected[place].append((now, px, py, sign))
        if len(collected[place]) == threshold:
            codes = []
            for then, column, row, plane in collected.pop(place):
                bucket = min(BUCKETS - 1, ((now - then) // 1000).bit_length())
                codes.append(((plane * BUCKETS + bucket) * patch + row % patch) * patch + column % patch)
            tokens.append((now, *place, codes))
            last_spike[place] = now
    times, columns, rows, codes_of = zip(*tokens, strict=True) if tokens else ((), (), (), ())
    return Tokens(
        np.array(times, np.int64),
        np.array(columns, np.int32),
        np.array(rows, np.int32),
        np.array(codes_of, np.uint16).reshape(len(tokens), threshold),
        patch,
    )


def checked(
    settings: Settings,
    t: npt.ArrayLike,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    polarity: npt.ArrayLike,
    newest: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The events as contiguous arrays of the types in `FIELDS`; ValueError if they are no stream of this sensor."""
    limits = {
        "t": (-LARGEST_TIME, LARGEST_TIME),
        "x": (0, settings.width - 1),
        "y": (0, settings.height - 1),
        "polarity": (0, 1),
    }
    found: dict[str, Array] = {}
    for name, value in zip(FIELDS, (t, x, y, polarity), strict=True):
        array = np.asarray(value)
        if array.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
        if found and len(array) != len(found["t"]):
            raise ValueError(f"{name} has {len(array)} entries and t has {len(found['t'])}, expected the same number")
        if len(array) == 0:
            array = np.empty(0, FIELDS[name])
        elif array.dtype.kind not in "iub":
            raise ValueError(f"{name} must be of whole numbers, got {array.dtype}")
        elif name == "t":  # in order, so the ends are the extremes
            _in_order(array, newest)
            _in_limits(array, limits[name], np.array([array[0], array[-1]]), name)
        else:
            _in_limits(array, limits[name], array, name)
        found[name] = np.ascontiguousarray(array, FIELDS[name])
    return found["t"], found["x"], found["y"], found["polarity"]


def _in_order(t: Array, newest: int | None) -> None:
    """ValueError if times, of their own dtype, go back."""
    if newest is not None and int(t[0]) < newest:
        raise ValueError(f"t must not decrease, got {t[0]} after {newest} of the events fed before")
    back = t[1:] < t[:-1]
    if back.any():
        i = int(back.argmax()) + 1
        raise ValueError(f"t must not decrease, got {t[i]} at index {i} after {t[i - 1]}; sort the events")


def _in_limits(array: Array, limits: tuple[int, int], extremes: Array, name: str) -> None:
    """ValueError that names the first value out of range. `extremes` holds the least and the greatest value."""
    least, most = limits
    low = 0 if array.dtype.kind in "ub" and least <= 0 else int(extremes.min())
    if low < least or int(extremes.max()) > most:
        wrong = (array < least) | (array > most)
        i = int(wrong.argmax())
        raise ValueError(f"{name} must be from {least} to {most}, got {array[i]} at index {i}")
