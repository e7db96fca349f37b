"""NPZ: named arrays of numbers, packed or not. Objects, which could run code, are refused.

A packed archive may be far smaller than its arrays: they may have RATIO times its bytes, or LEAST bytes.
"""

from __future__ import annotations

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from .. import FormatError
from . import wrong

Array = np.ndarray[Any, Any]
RATIO, LEAST = 100, 256 * 1024**2
NUMBERS = "biuf"
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, SyntaxError, TypeError, OverflowError, OSError, KeyError, IndexError),
)


def read(path: str | Path, names: Sequence[str]) -> dict[str, Array]:
    """The arrays of an archive that have one of these names, in any case; others are not looked at."""
    size = os.stat(path).st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            return {
                name.lower(): _array(path, archive, info, max(LEAST, RATIO * size))
                for name, info in members.items()
                if name.lower() in names
            }
    except FormatError:
        raise
    except _BROKEN as error:
        told = " ".join(str(error).split())[:200]
        raise wrong(path, 0, f"not a readable NPZ archive ({type(error).__name__}: {told})") from None


def _array(path: str | Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> Array:
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file)
        if dtype.kind not in NUMBERS:
            raise wrong(path, info.header_offset, f"array {info.filename!r:.60} of {dtype!s:.60}, expected numbers")
        count = 1
        for side in shape:
            count *= side
        rest = info.file_size - file.tell()
        if min(shape, default=0) < 0 or count * dtype.itemsize != rest:
            told = f"{rest} bytes of array {info.filename!r:.60}, expected {str(shape)[:60]} of {dtype}"
            raise wrong(path, info.header_offset, told)
        if rest > most:
            told = f"array {info.filename!r:.60} unpacks to {rest} bytes, expected at most {most}"
            raise wrong(path, info.header_offset, told)
        data = file.read(rest)
        if len(data) != rest:
            raise wrong(path, info.header_offset, f"array {info.filename!r:.60} ends after {len(data)} of {rest} bytes")
    return np.frombuffer(data, dtype, count).reshape(shape, order="F" if fortran else "C")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
