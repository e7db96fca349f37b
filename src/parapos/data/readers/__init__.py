"""Bytes of a file to arrays, or a FormatError that names the file and the place.

A reader believes no count in a file before it has seen the bytes: what it allocates is a small multiple of the file.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from .. import FormatError
from ..events import Events

TRUNCATED = ("error", "keep")


class TruncatedWarning(UserWarning):
    """A file ends too early, and the whole events before its end were taken."""


def wrong(path: str | Path, byte: int, told: str) -> FormatError:
    """The error for what is at a byte of a file."""
    return FormatError(f"{path}: at byte {byte}: {told}")


def check_truncated(truncated: str) -> None:
    if truncated not in TRUNCATED:
        raise ValueError(f"truncated must be one of {', '.join(TRUNCATED)}, got {truncated!r}")


def check_bits(events: Events, **bits: int) -> None:
    """For writers: every value of these fields must fit in so many bits."""
    for name, count in bits.items():
        values = getattr(events, name)
        if len(values) and (int(values.min()) < 0 or int(values.max()) >> count):
            told = f"{int(values.min())} to {int(values.max())}"
            raise ValueError(f"{name} must be from 0 to 2^{count} - 1, got {told}")


def ends_early(path: str | Path, byte: int, told: str, kept: int, truncated: str) -> None:
    """Raises, or warns with the number of events that are kept, as `truncated` says."""
    if truncated == "error":
        raise wrong(path, byte, f"{told}; truncated='keep' takes the {kept} events before")
    warnings.warn(f"{path}: at byte {byte}: {told}; kept the {kept} events before", TruncatedWarning, stacklevel=4)
