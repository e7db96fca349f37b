"""GEN1 labels, `*_bbox.npy`: a structured array with one row per box, in the old or the new layout of its makers.

The old layout calls the time `ts` and the confidence `confidence`, the new one `t` and `class_confidence`. (x, y) is
the top left corner in pixels, which may lie outside the frame. Pickles are never loaded.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from . import wrong

MAX_BYTES = 64 * 1024**2  # of a file; a clip of GEN1 has a few thousand boxes of 40 bytes
_CORNER = [("x", "<f4"), ("y", "<f4"), ("w", "<f4"), ("h", "<f4")]
_NEW = [("t", "<i8"), *_CORNER, ("class_id", "<u4"), ("track_id", "<u4"), ("class_confidence", "<f4")]
_OLD = [("ts", "<u8"), *_CORNER, ("class_id", "u1"), ("confidence", "<f4"), ("track_id", "<u4")]
BOX = np.dtype(_NEW, align=True)  # 40 bytes
LAYOUTS = {"new": BOX, "old": np.dtype(_OLD)}
_OLD_NAMES = {"t": "ts", "class_confidence": "confidence"}
_EXPECTED = {"f": "a finite number", "i": "0 to 2^63 - 1", "u": "0 to 2^32 - 1"}


def read(path: str | Path) -> np.ndarray[Any, Any]:
    """The boxes of a file in its order, as an array of `BOX`. Times are 0 or more, coordinates finite."""
    size = os.stat(path).st_size
    if size > MAX_BYTES:
        raise wrong(path, 0, f"{size} bytes, expected at most {MAX_BYTES}")
    data = Path(path).read_bytes()
    count, dtype, start = _header(path, data)
    if count * dtype.itemsize != len(data) - start:
        told = f"{len(data) - start} bytes of boxes, expected {str(count)[:20]} x {dtype.itemsize}"
        raise wrong(path, start, told)
    fields = {name: _field(path, dtype, name) for name in BOX.names or ()}
    if dtype.hasobject:
        raise wrong(path, 0, f"an array of {str(dtype)[:80]}, expected numbers alone")
    found = np.frombuffer(data, dtype, count, start)
    boxes = np.empty(count, BOX)
    for name, field in fields.items():
        bad = _bad(found[field], BOX[name])
        if bad.any():
            i = int(bad.argmax())
            byte = start + i * dtype.itemsize + dtype.fields[field][1]  # type: ignore[index] # it has this field
            raise wrong(path, byte, f"{field} of box {i} is {found[field][i]}, expected {_EXPECTED[BOX[name].kind]}")
        boxes[name] = found[field]
    return boxes


def write(path: str | Path, boxes: np.ndarray[Any, Any], *, layout: str = "new") -> None:
    """Writes an array of `BOX` in the "new" or the "old" layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if boxes.dtype != BOX or boxes.ndim != 1:
        raise ValueError(f"boxes must be an array of BOX with one dimension, got {boxes.dtype} {boxes.shape}")
    rows = np.zeros(len(boxes), LAYOUTS[layout])
    for name in BOX.names or ():
        rows[_OLD_NAMES.get(name, name) if layout == "old" else name] = boxes[name]
    with open(path, "wb") as file:
        np.lib.format.write_array(file, rows, version=(1, 0), allow_pickle=False)


def _header(path: str | Path, data: bytes) -> tuple[int, np.dtype[Any], int]:
    """Number of boxes, their dtype, and where they begin."""
    stream = io.BytesIO(data)
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = np.lib.format.read_magic(stream)
            if version not in readers:
                raise ValueError(f"version {version}")
            shape, _, dtype = readers[version](stream)
    except Exception as error:  # the parser of broken headers raises whatever it stumbles over
        told = f"not an array file of NumPy, version 1.0 or 2.0: {type(error).__name__}: {str(error)[:200]}"
        raise wrong(path, 0, told) from None
    if len(shape) != 1 or isinstance(shape[0], bool) or shape[0] < 0:
        raise wrong(path, 0, f"an array of shape {str(shape)[:80]}, expected one dimension")
    if dtype.itemsize == 0:  # or any number of boxes would fit
        raise wrong(path, 0, f"an array of {str(dtype)[:80]}, expected the fields of boxes")
    return shape[0], dtype, stream.tell()


def _field(path: str | Path, dtype: np.dtype[Any], name: str) -> str:
    """The field that holds what `BOX` calls `name`."""
    kinds = "f" if BOX[name].kind == "f" else "iu"
    for field in (name, _OLD_NAMES.get(name, name)):
        if field in (dtype.names or ()):
            if dtype[field].kind not in kinds:
                raise wrong(path, 0, f"field {field} is {str(dtype[field])[:80]}, expected a {BOX[name]}")
            return field
    raise wrong(path, 0, f"fields {str(dtype.names)[:200]}, expected {name} among them")


def _bad(values: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Which values do not fit: negative or too large integers, and floats that are not finite in float32."""
    if kind.kind != "f":
        return (values < 0) | (values > np.iinfo(np.int64 if kind.kind == "i" else kind).max)
    with np.errstate(all="ignore"):
        return ~np.isfinite(values.astype(kind))
