"""Bytes of a file to arrays, or a FormatError that names the file and the place.

A reader believes no count in a file before it has seen the bytes: what it allocates is a small multiple of the file. Of
videos, which are packed, a frame may be far larger than its bytes, and has a constant for its bound: MAX_PIXELS.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .. import FormatError
from ..events import Events

TRUNCATED = ("error", "keep")
T = TypeVar("T")


class TruncatedError(FormatError):
    """A file ends too early."""


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
        keep = f"truncated='keep' takes the {kept} events before, and so does --keep-truncated of `parapos prepare`"
        raise TruncatedError(f"{path}: at byte {byte}: {told}; {keep}")
    warnings.warn(f"{path}: at byte {byte}: {told}; kept the {kept} events before", TruncatedWarning, stacklevel=4)


def told_if_early(read: Callable[[str], T], truncated: str) -> tuple[T, bool]:
    """What `read` gives, called with "error" or with "keep", and whether the file ends too early."""
    try:
        return read("error"), False
    except TruncatedError:
        if truncated == "error":
            raise
        return read(truncated), True


def read_bytes(path: str | Path, most: int) -> bytes:
    """All of a file, or its first `most` + 1 bytes if it has more. `read(n)` alone would take n bytes at once."""
    with open(path, "rb") as file:
        return file.read(min(most, os.fstat(file.fileno()).st_size) + 1)


def read_lines(path: str | Path, most: int) -> list[tuple[int, str]]:
    """Numbers from 1 and contents of the lines of a list that are not blank; it may have `most` bytes.

    A byte order mark and carriage returns are passed over.
    """
    data = read_bytes(path, most)
    if len(data) > most:
        raise FormatError(f"{path}: more than {most} bytes, expected a short list")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong_line(path, data.count(b"\n", 0, error.start) + 1, "not text in UTF-8") from None
    lines = enumerate(re.split(r"\r\n|\r|\n", text), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def wrong_line(path: str | Path, line: int, told: str) -> FormatError:
    """The error for what is in a line of a list."""
    return FormatError(f"{path}: line {line}: {told}")
