"""OFF meshes, the format of ModelNet: OFF, a line of counts, a line for each vertex and each face.

Many files of ModelNet40 have the counts directly behind the keyword (`OFF490 518 0`). Comments (#) and blank lines are
passed over; faces of more than three corners become fans of triangles; colours behind the corners are not looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from . import read_bytes, wrong

Array = np.ndarray[Any, Any]
MAX_BYTES = 1024**3


def read(path: str | Path) -> tuple[Array, Array]:
    """Vertices float64 (n, 3), all finite, and triangles int32 (f, 3), whose corners are vertices."""
    text = read_bytes(path, MAX_BYTES)
    if len(text) > MAX_BYTES:
        raise wrong(path, MAX_BYTES, f"more than {MAX_BYTES} bytes, expected a mesh")
    lines = _lines(text)
    at, words = next(lines, (0, [b""]))
    if not words[0].startswith(b"OFF"):
        raise wrong(path, at, f"{words[0][:20]!r}, expected OFF")
    words = [words[0][3:], *words[1:]] if words[0] != b"OFF" else words[1:]
    if not words:
        at, words = next(lines, (len(text), []))
    if len(words) not in (2, 3) or not all(word.isdigit() and len(word) < 19 for word in words):
        raise wrong(path, at, f"{b' '.join(words)[:60]!r}, expected the numbers of vertices, faces and edges")
    count, polygons = int(words[0]), int(words[1])
    found, corners = array("d"), array("q")
    for row in range(count):
        at, words = next(lines, (len(text), []))
        if len(words) < 3:
            raise wrong(path, at, f"{_told(words)}, expected x, y and z of vertex {row} of {count}")
        found.extend(_number(path, at, word) for word in words[:3])
    for row in range(polygons):
        at, words = next(lines, (len(text), []))
        number = int(words[0]) if words and words[0].isdigit() and len(words[0]) < 10 else -1
        if number < 0 or len(words) < 1 + number:
            raise wrong(path, at, f"{_told(words)}, expected the corners of face {row} of {polygons}")
        face = [int(word) if word.isdigit() and len(word) < 19 else -1 for word in words[1 : 1 + number]]
        if any(not 0 <= corner < count for corner in face):
            raise wrong(path, at, f"{_told(words)}, expected corners from 0 to {count - 1}")
        for second, third in pairwise(face[1:]):
            corners.extend((face[0], second, third))
    return np.array(found, np.float64).reshape(-1, 3), np.array(corners, np.int32).reshape(-1, 3)


def write(path: str | Path, vertices: Array, faces: Array, *, fused: bool = False) -> None:
    """Writes a mesh of triangles. fused: the counts directly behind the keyword."""
    lines = [f"OFF{'' if fused else chr(10)}{len(vertices)} {len(faces)} 0"]
    lines += [" ".join(f"{value:.6f}" for value in row) for row in np.asarray(vertices)]
    lines += [f"3 {a} {b} {c}" for a, b, c in np.asarray(faces)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(text: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """The words of lines that have some, with the byte at which they begin."""
    at = 0
    while at < len(text):
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        words = text[at:end].partition(b"#")[0].split()
        if words:
            yield at, words
        at = end + 1


def _number(path: str | Path, at: int, word: bytes) -> float:
    try:
        value = float(word) if b"_" not in word and len(word) < 60 else float("nan")
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e30:  # which float32 holds
        raise wrong(path, at, f"{word[:40]!r}, expected a finite number")
    return value


def _told(words: list[bytes]) -> str:
    return repr(b" ".join(words[:8])[:60]) if words else "the file ends"
