"""Point clouds of one's own, from PLY, OFF and NPZ files: coordinates, and colours, normals and labels if there are.

    PLY   vertices with x, y, z; red, green, blue; nx, ny, nz; label (or segment, class); faces
    OFF   vertices and faces
    NPZ   arrays coord (or xyz, points, pos), color (colors, rgb), normal (normals), segment (label, labels)

n points, f triangles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import FormatError
from .points import Cloud, vertex_normals
from .readers import npz, off, ply, wrong

Array = np.ndarray[Any, Any]
SUFFIXES = (".ply", ".off", ".npz")
LABELS = ("segment", "label", "labels", "class")
ARRAYS = {
    "coord": ("coord", "xyz", "points", "pos"),
    "color": ("color", "colors", "rgb"),
    "normal": ("normal", "normals"),
    "segment": LABELS,
}
NEIGHBOURS, AT_ONCE = 16, 200_000  # of a point, for its normal; points whose normals are computed at one time


class PointFile(NamedTuple):
    """What a file says: arrays of the cloud are None where it says nothing. faces: int32 (f, 3), or None."""

    cloud: Cloud
    faces: Array | None


def read(path: str | Path) -> PointFile:
    """The points of a file, by its suffix. Coordinates are finite, normals come from the faces if the file has none."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise wrong(path, 0, f"a file {suffix or 'without suffix'}, expected one of {', '.join(SUFFIXES)}")
    found = {".ply": _ply, ".off": _off, ".npz": _npz}[suffix](path)
    if not len(found.cloud):
        raise wrong(path, 0, "no points, expected at least one")
    if found.cloud.normal is None and found.faces is not None and len(found.faces):
        return found._replace(cloud=Cloud(**{**vars(found.cloud), "normal": _normals(found)}))
    return found


def _normals(found: PointFile) -> Array:
    assert found.faces is not None
    return vertex_normals(found.cloud.coord, found.faces)


def _ply(path: str | Path) -> PointFile:
    found = ply.read(path)
    coord, color, normal = ply.cloud_columns(found, path)
    return PointFile(Cloud(coord, color, normal, _labels(path, found.vertex)), found.faces)


def _off(path: str | Path) -> PointFile:
    vertices, faces = off.read(path)
    return PointFile(Cloud(vertices.astype(np.float32)), faces)


def _npz(path: str | Path) -> PointFile:
    arrays = npz.read(path, [name for names in ARRAYS.values() for name in names])
    coord, color, normal = (_rows(path, arrays, key) for key in ("coord", "color", "normal"))
    if coord is None:
        raise wrong(path, 0, f"no array {' or '.join(ARRAYS['coord'])}, expected coordinates (n, 3)")
    for name, value in (("color", color), ("normal", normal)):
        if value is not None and len(value) != len(coord):
            raise wrong(path, 0, f"{name} of {len(value)} points, expected {len(coord)} as coord has")
    columns = {axis: coord[:, i] for i, axis in enumerate("xyz")}
    for names, value in ((("red", "green", "blue"), color), (("nx", "ny", "nz"), normal)):
        columns |= {} if value is None else {name: value[:, i] for i, name in enumerate(names)}
    whole, color, normal = ply.cloud_columns(ply.Ply(columns), path)
    labels = _labels(path, arrays)
    if labels is not None and labels.shape != (len(coord),):
        raise wrong(path, 0, f"labels {labels.shape}, expected ({len(coord)},)")
    return PointFile(Cloud(whole, color, normal, labels), None)


def _rows(path: str | Path, arrays: Mapping[str, Array], key: str) -> Array | None:
    """The array (n, 3) that stands for coord, color or normal."""
    name = _only(path, [name for name in ARRAYS[key] if name in arrays])
    if name is None:
        return None
    if arrays[name].ndim != 2 or arrays[name].shape[1] != 3:
        raise wrong(path, 0, f"array {name!r} is {arrays[name].shape}, expected (n, 3)")
    return arrays[name]


def _labels(path: str | Path, arrays: Mapping[str, Array]) -> Array | None:
    """Labels int64 (n,)."""
    name = _only(path, [name for name in LABELS if name in arrays])
    if name is None:
        return None
    labels = arrays[name]
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.int64)
        if not (whole == labels).all():
            raise wrong(path, 0, f"{name!r} has labels that are not whole numbers")
    return whole


def _only(path: str | Path, names: Sequence[str]) -> str | None:
    if len(names) > 1:
        raise wrong(path, 0, f"{' and '.join(map(repr, names))} mean the same, expected one of them")
    return names[0] if names else None


def check_labels(labels: Array, classes: int) -> None:
    """Labels must be classes of a model, or -1 for points that do not count."""
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
        told = f"labels from {labels.min()} to {labels.max()}, expected -1 to {classes - 1}, the model's classes"
        raise FormatError(f"{told}; rename them to predict without labels")


def estimate_normals(coord: Array, index: Array, towards: Array, *, away: bool = False) -> Array:
    """Normals float32 (k, 3) of some points (k,) of a cloud: of the planes through the points nearest to each. They
    point towards a place (3,), or away from it; 0 where points coincide."""
    from scipy.spatial import cKDTree

    coord = np.ascontiguousarray(coord, np.float64)
    tree, found = cKDTree(coord), np.zeros((len(index), 3), np.float32)
    count = min(NEIGHBOURS, len(coord))
    for start in range(0, len(index), AT_ONCE):
        part = coord[index[start : start + AT_ONCE]]
        near = coord[tree.query(part, count)[1].reshape(len(part), count)]
        near -= near.mean(1, keepdims=True)
        values, vectors = np.linalg.eigh(np.einsum("nki,nkj->nij", near, near))
        normal = vectors[:, :, 0] * (values[:, 1:2] > 0)  # points on a line have no plane
        sign = np.where(np.einsum("ni,ni->n", normal, towards - part) < 0, -1.0, 1.0)
        found[start : start + AT_ONCE] = normal * (-sign if away else sign)[:, None]
    return found
