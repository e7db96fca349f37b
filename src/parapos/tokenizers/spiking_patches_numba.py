"""Spiking Patches as one compiled loop over events. Needs numba.

Every patch has a row of `threshold` slots for the time and the pixel (with polarity) of what it collects, so a spike
reads two short rows instead of events scattered over the stream, and a stream may come in pieces.
An event that the patch ignores is written too, but does not count, so the next one overwrites it: that costs less than
a branch that cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from .spiking_patches import BUCKETS, Settings

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

NEVER = np.iinfo(np.int64).min


def _array(dtype: Any, *, writable: bool = False, ndim: int = 1) -> Any:
    """The type of a C-contiguous array; what is only read may be read-only."""
    return numba.types.Array(dtype, ndim, "C", readonly=not writable)


def _compiled(*arguments: Any) -> Callable[[F], F]:
    """Compiles for these types alone, and keeps the result for the next process where there is a place for it."""

    def compile(function: F) -> F:
        signature = numba.int64(*arguments)
        try:
            return numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(signature, nogil=True)(function)

    return compile


@_compiled(
    _array(numba.int64),
    _array(numba.uint16),
    _array(numba.uint16),
    _array(numba.uint8),
    _array(numba.uint64),
    _array(numba.uint64),
    numba.uint64,
    numba.int64,
    numba.int64,
    _array(numba.int64, writable=True),
    _array(numba.int64, writable=True),
    _array(numba.int64, writable=True),
    _array(numba.uint16, writable=True),
    _array(numba.int64, writable=True),
    _array(numba.int32, writable=True),
    _array(numba.uint16, writable=True, ndim=2),
)
def _advance(
    t: Array,
    x: Array,
    y: Array,
    polarity: Array,
    of_column: Array,
    of_row: Array,
    of_polarity: int,
    area: int,
    refractory: int,
    held: Array,
    deaf_until: Array,
    times: Array,
    pixels: Array,
    out_t: Array,
    out_patch: Array,
    out_codes: Array,
) -> int:
    """Takes checked events (N,) and writes the tokens they complete. Returns how many.

    of_column (W,), of_row (H,), of_polarity: what x, y and polarity 1 add to patch * 2^16 + pixel.
    held, deaf_until (patches,): how many events a patch holds, and the time from which events count again.
    times, pixels (patches * threshold,): the events held. Indices are unsigned, which spares tests for negative ones.
    """
    threshold = out_codes.shape[1]
    found = 0
    for i in range(len(t)):
        where = of_column[x[i]] + of_row[y[i]] + of_polarity * numba.uint64(polarity[i])
        patch = where >> numba.uint64(16)
        now = t[i]
        count = held[patch]
        slot = patch * numba.uint64(threshold) + numba.uint64(count)
        times[slot] = now
        pixels[slot] = where & numba.uint64(0xFFFF)
        count += now >= deaf_until[patch]
        if count == threshold:
            count = 0
            deaf_until[patch] = now + refractory
            out_t[found] = now
            out_patch[found] = patch
            start = numba.int64(patch) * threshold
            end = start + threshold
            collected, places, codes = times[start:end], pixels[start:end], out_codes[found]
            for j in range(threshold):
                age = now - collected[j]
                bucket = 0
                for k in range(BUCKETS - 1):
                    bucket += age >= 1000 << k
                codes[j] = places[j] + bucket * area
            found += 1
        held[patch] = count
    return found


class State:
    """What the patches of one stream hold."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        patch, columns, patches = settings.patch, settings.columns, settings.rows * settings.columns
        place, pixel = np.divmod(np.arange(settings.width, dtype=np.uint64), patch)
        self._of_column = place * 2**16 + pixel
        place, pixel = np.divmod(np.arange(settings.height, dtype=np.uint64), patch)
        self._of_row = place * (columns * 2**16) + pixel * patch
        self._held = np.empty(patches, np.int64)
        self._deaf_until = np.empty(patches, np.int64)
        self._times = np.empty(patches * settings.threshold, np.int64)
        self._pixels = np.empty(patches * settings.threshold, np.uint16)
        self.reset()

    def reset(self) -> None:
        self.newest: int | None = None
        self._held.fill(0)
        self._deaf_until.fill(NEVER)

    def advance(
        self, t: Array, x: Array, y: Array, polarity: Array
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        """Time, column, row (L,) and codes (L, threshold) of the tokens that these checked events complete."""
        area, threshold = self.settings.patch**2, self.settings.threshold
        most = (int(self._held.sum()) + len(t)) // threshold
        times, patches = np.empty(most, np.int64), np.empty(most, np.int32)
        codes = np.empty((most, threshold), np.uint16)
        found = _advance(
            t,
            x,
            y,
            polarity,
            self._of_column,
            self._of_row,
            BUCKETS * area,
            area,
            self.settings.refractory_us,
            self._held,
            self._deaf_until,
            self._times,
            self._pixels,
            times,
            patches,
            codes,
        )
        if len(t):
            self.newest = int(t[-1])
        row, column = np.divmod(patches[:found], np.int32(self.settings.columns))
        return times[:found], column, row, codes[:found]
