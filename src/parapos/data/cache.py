"""Prepared data on disk: files that are whole or absent, a manifest of what they hold, and a report of what is there.

Arrays are .npy files, which are memory-mapped, beside one JSON manifest. Not HDF5: an .npy file is replaced as a whole,
so a killed writer damages nothing; it is read without a library, its open handle does not have to survive a fork, and
events are taken as slices, for which compressed chunks would first be unpacked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from . import FormatError

FOLDER, MANIFEST = "prepared", "manifest.json"
Array = np.ndarray[Any, Any]
Progress = Callable[[Sequence[int], str], Iterable[int]]


def no_progress(items: Sequence[int], name: str) -> Iterable[int]:
    """Shows nothing."""
    return items


@dataclass
class Check:
    """What is there: rows of what, found, expected ("" if nothing is expected), and what is wrong."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, what: str, found: int, expected: int | None = None) -> None:
        self.rows.append((what, f"{found:,}", "" if expected is None else f"{expected:,}"))
        if expected is not None and found != expected:
            self.problems.append(f"{what.strip()}: found {found:,}, expected {expected:,}")


def cache_folder(root: str | Path, cache: str | Path | None = None) -> Path:
    """Where prepared data of a root is: in this folder, or else in one of the root."""
    return Path(cache) if cache else Path(root) / FOLDER


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when all of it is on disk; a failure leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save_array(path: Path, array: Array) -> str:
    """Writes a .npy file; its SHA-256."""
    with whole_file(path) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
    return sha256(path)


def map_array(path: Path, expected: str, is_good: Callable[[Array], bool], again: str) -> Array:
    """A .npy file, memory-mapped. FormatError with what was expected, and how to get it `again`, if it is not there or
    not good, of which dtype and shape alone are looked at."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # which believes no shape that the file is too small for
        if is_good(array):
            return array
        told = f"{array.dtype} {array.shape}"
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: not there, expected {expected}; {again}") from None
    except OSError:
        raise
    except Exception as error:  # NumPy reads the header as Python, and raises what that raises
        told = f"{type(error).__name__}: {error}"
    raise FormatError(f"{path}: expected {expected}, got {told[:200]}; remove it and {again}")


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, kind: str, version: int) -> dict[str, Any]:
    """The entries of a manifest by name; none if there is no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        entries = found["entries"]
        good = (found["kind"], found["version"]) == (kind, version) and isinstance(entries, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise FormatError(f"{path}: not a manifest of {kind}, version {version}; remove it and prepare the data again")
    return entries


def write_manifest(folder: Path, kind: str, version: int, entries: dict[str, Any]) -> None:
    """JSON with a line per entry."""
    lines = [f" {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    text = f'{{"kind": {json.dumps(kind)}, "version": {version}, "entries": {{\n' + ",\n".join(lines) + "\n}}\n"
    with whole_file(folder / MANIFEST) as file:
        file.write(text.encode())
