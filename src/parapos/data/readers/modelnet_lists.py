"""The text files of modelnet40_normal_resampled: names of classes, lists of shapes, and the points of a shape.

A shape is named after its class with a number, night_stand_0001, and lies in <class>/<name>.txt: lines of six numbers
with commas, coordinates and normal.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import read_bytes, read_lines, wrong, wrong_line

Array = np.ndarray[Any, Any]
MAX_LIST = 16 * 1024**2
MAX_POINTS = 256 * 1024**2  # bytes of the points of a shape; the true files have some 600 kB
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


def read_classes(path: str | Path) -> list[str]:
    """Names of classes in the order of their labels."""
    names: dict[str, None] = {}
    for number, line in read_lines(path, MAX_LIST):
        if not _NAME.fullmatch(line) or line in names:
            raise wrong_line(path, number, f"expected the name of a class that is not there yet, got {line[:80]!r}")
        names[line] = None
    return list(names)


def read_shapes(path: str | Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Names of shapes with their labels, in the order of the list. The class is all before the last underscore."""
    labels = {name: i for i, name in enumerate(classes)}
    found: dict[str, int] = {}
    for number, line in read_lines(path, MAX_LIST):
        kind, _, tail = line.rpartition("_")
        if kind not in labels or not re.fullmatch(r"\d{1,9}", tail, re.ASCII):
            raise wrong_line(path, number, f"expected a class of the list and a number, got {line[:80]!r}")
        if line in found:
            raise wrong_line(path, number, f"{line} is here twice, expected it once")
        found[line] = labels[kind]
    return list(found.items())


def read_points(path: str | Path) -> Array:
    """Coordinates and normals, float32 (n, 6), n at least 1; all finite."""
    text = read_bytes(path, MAX_POINTS)
    if len(text) > MAX_POINTS:
        raise wrong(path, MAX_POINTS, f"more than {MAX_POINTS} bytes, expected the points of a shape")
    values, at = array("d"), 0
    while at < len(text):
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end].strip()
        if line:
            row = _row(line)
            if row is None:
                raise wrong(path, at, f"{line[:60]!r}, expected six finite numbers with commas")
            values.extend(row)
        at = end + 1
    if not values:
        raise wrong(path, 0, "no points, expected lines of six numbers with commas")
    return np.array(values, np.float32).reshape(-1, 6)


def write_points(path: str | Path, points: Array) -> None:
    """Writes coordinates and normals (n, 6)."""
    lines = [",".join(f"{value:.6f}" for value in row) for row in points]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(line: bytes) -> list[float] | None:
    words = line.split(b",")
    if len(words) != 6 or b"_" in line or len(line) > 400:
        return None
    try:
        row = [float(word) for word in words]
    except ValueError:
        return None
    return row if all(abs(value) < 1e30 for value in row) else None
