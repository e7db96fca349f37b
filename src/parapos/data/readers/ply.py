"""PLY: points with any scalar properties, and faces, from files in ASCII and in both binary byte orders.

A header of lines names elements in the order of the file, each with a count and its properties. Here the element
"vertex" must have x, y and z and only scalar properties; "face" may have one list, its corners, beside scalars, and
faces of more than three corners become fans of triangles. Elements before these are passed over, those after them are
not looked at. No count is believed before the bytes are seen: memory is a small multiple of the file.

n vertices, f triangles.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .. import FormatError
from . import wrong

Array = np.ndarray[Any, Any]
MAX_HEADER = 64 * 1024  # bytes
FORMATS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
TYPES = {
    **{"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"},
    **{"float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2"},
    **{"int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8"},
}
CORNERS = ("vertex_indices", "vertex_index")
_COUNT = re.compile(rb"\d{1,18}")


@dataclass(frozen=True)
class Ply:
    """vertex: arrays (n,) by the name of their property, in the type of the file. faces: int32 (f, 3), or None if the
    file has no such element."""

    vertex: dict[str, Array]
    faces: Array | None = None

    def columns(self, *names: str) -> Array | None:
        """Properties side by side (n, names), or None if one of them is missing."""
        if not all(name in self.vertex for name in names):
            return None
        return np.stack([self.vertex[name] for name in names], axis=1)


@dataclass
class _Property:
    name: str
    type: str
    length: str = ""  # the type of the length, for a list


@dataclass
class _Element:
    name: str
    count: int
    at: int  # byte of its line
    properties: list[_Property]

    def dtype(self, order: str) -> np.dtype[Any]:
        return np.dtype([(p.name, order + p.type) for p in self.properties])

    @property
    def lists(self) -> list[_Property]:
        return [p for p in self.properties if p.length]


def read(path: str | Path) -> Ply:
    """The vertices of a file and its triangles. Coordinates must be finite, and corners must be vertices."""
    size = os.stat(path).st_size
    if not size:
        raise wrong(path, 0, "an empty file, expected a PLY header")
    with open(path, "rb") as file:
        head = file.read(MAX_HEADER)
    form, elements, start = _header(path, head)
    wanted = [element.name for element in elements if element.name in ("vertex", "face")]
    if "vertex" not in wanted:
        raise wrong(path, 0, "no element vertex in the header, expected one with x, y and z")
    data = np.memmap(path, np.uint8, "r")
    body: _Ascii | _Binary = _Ascii(path, data, start) if form == "ascii" else _Binary(path, data, start, FORMATS[form])
    vertex: dict[str, Array] = {}
    faces: Array | None = None
    begin = start
    for element in elements:
        if element.name == "vertex":
            begin = body.at
            _check_vertex(path, element)
            vertex = body.scalars(element)
            _check_finite(path, vertex, body, begin)
        elif element.name == "face":
            lists = element.lists
            if len(lists) != 1 or lists[0].name not in CORNERS or lists[0].type[0] == "f":
                raise wrong(path, element.at, f"faces without one list of whole numbers {' or '.join(CORNERS)}")
            faces = body.faces(element, lists[0])
        elif element.lists:
            raise wrong(path, element.at, f"element {element.name!r:.60} has lists and comes before faces or vertices")
        else:
            body.scalars(element)
        wanted = [name for name in wanted if name != element.name]
        if not wanted:
            break
    count = len(vertex["x"])
    if faces is not None and len(faces) and (faces.min() < 0 or faces.max() >= count):
        bad = int(np.flatnonzero((faces < 0).any(1) | (faces >= count).any(1))[0])
        raise wrong(path, start, f"triangle {bad} has corners {faces[bad].tolist()}, expected 0 to {count - 1}")
    return Ply(vertex, None if faces is None else faces.astype(np.int32))


def write(path: str | Path, vertex: Mapping[str, Array], faces: Array | None = None, form: str = "ascii") -> None:
    """Writes properties (n,) and triangles (f, 3) in one of the formats; the corners are counted by a uchar."""
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, got {form!r}")
    names = {np.dtype(kind): name for name, kind in list(TYPES.items())[:8]}
    lines = ["ply", f"format {form} 1.0", f"element vertex {len(next(iter(vertex.values())))}"]
    lines += [f"property {names[column.dtype]} {name}" for name, column in vertex.items()]
    if faces is not None:
        lines += [f"element face {len(faces)}", "property list uchar int vertex_indices"]
    with open(path, "wb") as file:
        file.write("\n".join([*lines, "end_header", ""]).encode())
        if form == "ascii":
            for row in zip(*vertex.values(), strict=True):
                file.write((" ".join(map(str, row)) + "\n").encode())
            for corners in faces if faces is not None else ():
                file.write(f"3 {corners[0]} {corners[1]} {corners[2]}\n".encode())
            return
        order = FORMATS[form]
        records = np.empty(
            len(next(iter(vertex.values()))), [(k, v.dtype.newbyteorder(order)) for k, v in vertex.items()]
        )
        for name, column in vertex.items():
            records[name] = column
        file.write(records.tobytes())
        if faces is not None:
            packed = np.empty(len(faces), [("n", "u1"), ("corners", f"{order}i4", 3)])
            packed["n"], packed["corners"] = 3, faces
            file.write(packed.tobytes())


def _header(path: str | Path, head: bytes) -> tuple[str, list[_Element], int]:
    """The format, the elements, and the byte after the header."""
    form, at, first = "", 0, True
    elements: list[_Element] = []
    while True:
        end = head.find(b"\n", at)
        if end < 0:
            raise wrong(path, at, f"the header does not end, expected end_header in the first {MAX_HEADER} bytes")
        words = head[at:end].split()
        if first:
            if words != [b"ply"]:
                raise wrong(path, 0, f"{head[: min(end, 20)]!r}, expected ply")
            first = False
        elif not words or words[0] in (b"comment", b"obj_info"):
            pass
        elif words == [b"end_header"]:
            if not form:
                raise wrong(path, at, "no format in the header")
            return form, elements, end + 1
        elif words[0] == b"format":
            form = words[1].decode(errors="replace") if len(words) == 3 and words[2] == b"1.0" else ""
            if form not in FORMATS or elements:
                raise wrong(path, at, f"{head[at:end][:60]!r}, expected format {' or '.join(FORMATS)} 1.0")
        elif words[0] == b"element":
            if len(words) != 3 or not _COUNT.fullmatch(words[2]):
                raise wrong(path, at, f"{head[at:end][:60]!r}, expected element NAME COUNT")
            name = words[1].decode(errors="replace")
            if any(element.name == name for element in elements):
                raise wrong(path, at, f"element {name!r:.60} is there twice")
            elements.append(_Element(name, int(words[2]), at, []))
        elif words[0] == b"property" and elements:
            elements[-1].properties.append(_property(path, at, words, elements[-1]))
        else:
            raise wrong(path, at, f"{head[at:end][:60]!r}, expected element, property, comment or end_header")
        at = end + 1


def _property(path: str | Path, at: int, words: list[bytes], element: _Element) -> _Property:
    kinds = [TYPES.get(word.decode(errors="replace"), "") for word in words[1:]]
    if len(words) == 5 and words[1] == b"list" and kinds[1] and kinds[2] and kinds[1][0] != "f":
        made = _Property(words[4].decode(errors="replace"), kinds[2], kinds[1])
    elif len(words) == 3 and kinds[0]:
        made = _Property(words[2].decode(errors="replace"), kinds[0])
    else:
        told = b" ".join(words)[:60]
        raise wrong(path, at, f"{told!r}, expected property TYPE NAME or property list TYPE TYPE NAME")
    if any(p.name == made.name for p in element.properties):
        raise wrong(path, at, f"property {made.name!r:.60} is there twice")
    return made


def _check_vertex(path: str | Path, element: _Element) -> None:
    if element.lists:
        raise wrong(path, element.at, "vertices have a list, expected numbers alone")
    missing = [name for name in "xyz" if name not in (p.name for p in element.properties)]
    if missing:
        raise wrong(path, element.at, f"vertices have no {missing[0]}, expected x, y and z")


def _check_finite(path: str | Path, vertex: dict[str, Array], body: _Ascii | _Binary, begin: int) -> None:
    for name in "xyz":
        good = np.isfinite(vertex[name])
        if not good.all():
            row = int((~good).argmax())
            at = body.place(begin, row)
            raise wrong(path, at, f"{name} of vertex {row} is {vertex[name][row]}, expected a finite number")


class _Binary:
    """Elements of a binary body, one after another."""

    def __init__(self, path: str | Path, data: Array, at: int, order: str) -> None:
        self.path, self.data, self.at, self.order, self.row = path, data, at, order, 1

    def place(self, begin: int, row: int) -> int:
        return begin + row * self.row

    def _take(self, element: _Element, dtype: np.dtype[Any], count: int) -> Array:
        left = len(self.data) - self.at
        if dtype.itemsize * count > left:
            told = f"{left} bytes are left, expected {element.count} of element {element.name!r:.60}"
            raise wrong(self.path, self.at, f"{told} ({dtype.itemsize} bytes each, at least)")
        found = np.frombuffer(self.data, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at, self.row = self.at + dtype.itemsize * count, dtype.itemsize
        return found

    def scalars(self, element: _Element) -> dict[str, Array]:
        dtype = element.dtype(self.order)
        if not dtype.itemsize:
            return {}
        records = self._take(element, dtype, element.count)
        return {p.name: records[p.name].astype(p.type) for p in element.properties}

    def faces(self, element: _Element, corners: _Property) -> Array:
        """Rows of three corners are read at once, others one by one."""
        before, after = _around(element, corners)
        head = [(p.name, self.order + p.type) for p in before] + [("", self.order + corners.length)]
        least = np.dtype([(f"f{i}", kind) for i, (_, kind) in enumerate([*head, *((p.name, p.type) for p in after)])])
        if least.itemsize * element.count > len(self.data) - self.at:
            self._take(element, least, element.count)
        tail = [(p.name, self.order + p.type) for p in after]
        parts = [*head, ("", self.order + corners.type, 3), *tail]
        triangle = np.dtype([(f"f{i}", *part[1:]) for i, part in enumerate(parts)])
        count = element.count
        if triangle.itemsize * count <= len(self.data) - self.at:
            records = np.frombuffer(self.data, triangle, count, self.at) if count else np.empty(0, triangle)
            if (records[f"f{len(before)}"] == 3).all():
                self.at += triangle.itemsize * count
                return records[f"f{len(before) + 1}"].astype(np.int64)
        return self._polygons(element, corners, before, after)

    def _polygons(
        self, element: _Element, corners: _Property, before: list[_Property], after: list[_Property]
    ) -> Array:
        found = array("q")
        length, index = np.dtype(self.order + corners.length), np.dtype(self.order + corners.type)
        skip, rest = (sum(np.dtype(p.type).itemsize for p in part) for part in (before, after))
        raw = memoryview(self.data)  # type: ignore[arg-type]
        for row in range(element.count):
            at = self.at + skip
            if at + length.itemsize > len(raw):
                raise wrong(self.path, self.at, f"the file ends in face {row}, expected {element.count}")
            number = int(np.frombuffer(raw, length, 1, at)[0])
            at += length.itemsize
            if number < 0 or at + number * index.itemsize + rest > len(raw):
                raise wrong(self.path, self.at, f"face {row} has {number} corners, which the file has no bytes for")
            _fan(found, np.frombuffer(raw, index, number, at).tolist() if number else [])
            self.at = at + number * index.itemsize + rest
        return np.array(found, np.int64).reshape(-1, 3)


class _Ascii:
    """Elements of a body of lines; blank ones are passed over."""

    def __init__(self, path: str | Path, data: Array, at: int) -> None:
        self.path, self.at = path, at
        self.text = data.tobytes()
        self.starts = array("q")  # of the rows of the last element

    def place(self, begin: int, row: int) -> int:
        return self.starts[row]

    def _lines(self, element: _Element) -> Iterator[list[bytes]]:
        """The words of each row. As a row takes two bytes, at least, a count is only believed up to that."""
        self.starts = array("q")
        for row in range(element.count):
            words: list[bytes] = []
            while not words:
                if self.at >= len(self.text):
                    told = f"the file ends, expected {element.count} of element {element.name!r:.60}, got {row}"
                    raise wrong(self.path, len(self.text), told)
                begin = self.at
                end = self.text.find(b"\n", begin)
                self.at = len(self.text) if end < 0 else end + 1
                words = self.text[begin : self.at].split()
            self.starts.append(begin)
            yield words

    def _number(self, word: bytes, kind: str) -> float | int:
        try:
            if b"_" in word or len(word) > 60:
                raise ValueError
            value = float(word) if kind[0] == "f" or not word.lstrip(b"+-").isdigit() else int(word)
            if kind[0] != "f":
                limits = np.iinfo(kind)
                if value != int(value) or not limits.min <= value <= limits.max:
                    raise ValueError
                return int(value)
            return value
        except (ValueError, OverflowError):
            raise wrong(self.path, self.starts[-1], f"{word[:40]!r}, expected a number of type {kind}") from None

    def scalars(self, element: _Element) -> dict[str, Array]:
        if not element.properties:
            return {}
        columns = [array("d" if p.type[0] == "f" else "q") for p in element.properties]
        for words in self._lines(element):
            if len(words) != len(columns):
                told = f"{len(words)} numbers, expected {len(columns)} of element {element.name!r:.60}"
                raise wrong(self.path, self.starts[-1], told)
            for column, word, p in zip(columns, words, element.properties, strict=True):
                column.append(self._number(word, p.type))  # type: ignore[arg-type]
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and told as such
            pairs = zip(element.properties, columns, strict=True)
            return {p.name: np.array(column, column.typecode).astype(p.type) for p, column in pairs}

    def faces(self, element: _Element, corners: _Property) -> Array:
        before, after = _around(element, corners)
        found = array("q")
        for words in self._lines(element):
            number = self._number(words[len(before)], corners.length) if len(words) > len(before) else -1
            if number < 0 or len(words) != len(before) + 1 + number + len(after):
                told = f"{len(words)} numbers in a face, expected its {number} corners" if number >= 0 else "no corners"
                raise wrong(self.path, self.starts[-1], told)
            first = len(before) + 1
            _fan(found, [int(self._number(word, corners.type)) for word in words[first : first + int(number)]])
        return np.array(found, np.int64).reshape(-1, 3)


def _around(element: _Element, corners: _Property) -> tuple[list[_Property], list[_Property]]:
    """The scalars of a face before and after its list."""
    place = element.properties.index(corners)
    return element.properties[:place], element.properties[place + 1 :]


def _fan(found: array[int], corners: list[int]) -> None:
    """Adds a polygon as triangles that share its first corner; fewer than three corners make none."""
    for second, third in pairwise(corners[1:]):
        found.extend((corners[0], second, third))


def cloud_columns(ply: Ply, path: str | Path) -> tuple[Array, Array | None, Array | None]:
    """Coordinates float32 (n, 3), colours uint8 (n, 3) or None, and normals float32 (n, 3) or None."""
    coord = ply.columns("x", "y", "z")
    assert coord is not None
    color, normal = ply.columns("red", "green", "blue"), ply.columns("nx", "ny", "nz")
    if color is not None and color.dtype != np.uint8:
        if (
            color.dtype.kind == "f"
            and np.isfinite(color).all()
            and 0 <= color.min(initial=0) <= color.max(initial=0) <= 1
        ):
            color = np.rint(color * 255)
        elif not np.isfinite(color).all() or color.min(initial=0) < 0 or color.max(initial=0) > 255:
            raise FormatError(f"{path}: at byte 0: colours outside of 0 to 255")
        color = color.astype(np.uint8)
    if normal is not None and not np.isfinite(normal).all():
        raise FormatError(f"{path}: at byte 0: normals that are not finite numbers")
    with np.errstate(over="ignore"):
        small = coord.astype(np.float32)
    if not np.isfinite(small).all():
        raise FormatError(f"{path}: at byte 0: coordinates up to {math.inf}, expected those of float32")
    return small, color, None if normal is None else normal.astype(np.float32)
