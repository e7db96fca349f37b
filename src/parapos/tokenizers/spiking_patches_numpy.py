"""Spiking Patches with array operations: the events of each patch stand together, and whole tokens are cut from them.

The Python loop runs over tokens, not over events. N events, L tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .spiking_patches import BUCKETS, Settings

Array = npt.NDArray[Any]

EDGES = 1000 * 2 ** np.arange(BUCKETS - 1)  # microseconds of age at which buckets 1, 2, ... begin


def tokens(
    t: Array, x: Array, y: Array, polarity: Array, settings: Settings
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    """Time, column, row (L,) and codes (L, threshold) of checked events (N,)."""
    patch, threshold = settings.patch, settings.threshold
    column, row = np.divmod(np.arange(settings.width), patch), np.divmod(np.arange(settings.height), patch)
    number: type[np.unsignedinteger[Any]] = np.uint16 if settings.rows * settings.columns <= 2**16 else np.uint32
    place = column[0].astype(number)[x] + (row[0] * settings.columns).astype(number)[y]
    order = np.argsort(place, kind="stable")  # by counting where places are uint16
    ends = np.cumsum(np.bincount(place, minlength=settings.rows * settings.columns))
    times = t[order]

    starts: list[int] = []
    start = 0
    for end in ends.tolist():
        if settings.refractory_us == 0:
            starts.extend(range(start, end - threshold + 1, threshold))
        else:
            while start + threshold <= end:
                starts.append(start)
                start += threshold
                start += int(np.searchsorted(times[start:end], times[start - 1] + settings.refractory_us))
        start = end
    first = np.array(starts, np.int64)
    last = first + threshold - 1
    first = first[np.argsort(order[last])]  # tokens in the order of their last events

    members = first[:, None] + np.arange(threshold)  # (L, threshold)
    index, then = order[members], times[members]
    now = then[:, -1].copy()
    bucket = np.searchsorted(EDGES, now[:, None] - then, side="right")
    pixel = column[1].astype(np.uint16)[x] + (row[1] * patch).astype(np.uint16)[y]
    pixel += polarity * np.uint16(BUCKETS * patch**2)
    codes = pixel[index] + (bucket * patch**2).astype(np.uint16)
    where = place[index[:, -1]].astype(np.int32)
    return now, where % settings.columns, where // settings.columns, codes
