"""ModelNet40: objects of 40 classes, as points that were sampled from meshes, or as the meshes themselves.

    modelnet40_normal_resampled/   lists, modelnet40_shape_names.txt, and <class>/<name>.txt of 10,000 points each
    ModelNet40/                    <class>/{train,test}/<name>.off; points are then sampled here, 10,000 of each mesh

`parapos prepare modelnet40` chooses 8192 points of each by farthest-point sampling of their coordinates, once. Of the
training shapes, a tenth of every class is held back as "val"; val="test" validates on the test shapes instead, as the
code of Point Transformer V3 does.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import FormatError
from .objects import ObjectAugment as Augment
from .objects import Objects
from .point_trees import make_modelnet40 as synthetic  # noqa: F401 (for `parapos prepare`)
from .points import GIVES as GIVES
from .points import farthest, sample_mesh
from .preparations import Job
from .prepared import Check, Item, Output, Store
from .readers import off
from .readers.modelnet_lists import read_classes, read_points, read_shapes

Array = np.ndarray[Any, Any]
SPLITS = ("train", "val", "test")
LISTED = {"train": 9843, "test": 2468}
CLASSES = 40
FOLDERS = ("", "modelnet40_normal_resampled", "ModelNet40", "ModelNet40_off")
NAMES = "modelnet40_shape_names.txt"
VERSION, MESH_POINTS = 1, 10_000
SAMPLINGS = ("farthest", "random", "first")
VALIDATION = ("tenth", "test")


class Shape(NamedTuple):
    """A shape, the number of its class, and the file of its points (.txt) or mesh (.off)."""

    name: str
    label: int
    path: Path


def find_root(root: str | Path) -> Path:
    """The folder that holds the lists, or folders of meshes by class: this one, or one in it, as archives have it."""
    for folder in (Path(root) / name for name in FOLDERS):
        if (folder / NAMES).is_file() or next(folder.glob("*/train/*.off"), None) is not None:
            return folder
    raise FormatError(f"{root}: neither {NAMES} nor <class>/train/*.off, expected the folder of ModelNet40")


def list_classes(root: Path) -> list[str]:
    """Names of the classes in the order of their numbers."""
    if (root / NAMES).is_file():
        return read_classes(root / NAMES)
    return sorted({path.parents[1].name for path in root.glob("*/train/*.off")})


def list_shapes(root: Path, part: str, classes: Sequence[str]) -> list[Shape]:
    """The shapes of "train" or "test", as the lists or else the folders have them."""
    if (root / NAMES).is_file():
        listed = read_shapes(root / f"modelnet40_{part}.txt", classes)
        return [Shape(name, label, root / classes[label] / f"{name}.txt") for name, label in listed]
    files = ((label, path) for label, name in enumerate(classes) for path in sorted((root / name / part).glob("*.off")))
    return [Shape(path.stem, label, path) for label, path in files]


def open_store(job: Job) -> Store:
    options = {"sampling": "farthest", "points": 8192, **job.options}
    settings = {key: options[key] for key in ("sampling", "points")}
    return Store(find_root(job.root), job.cache, "modelnet40", VERSION, "shapes", **settings)


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """The chosen points of a shape, float32 (k, 6)."""
    (path,) = item.sized
    sampling, count = options.get("sampling", "farthest"), options.get("points", 8192)
    rng = np.random.default_rng(zlib.crc32(item.name.encode()))
    if path.suffix == ".off":
        vertices, faces = off.read(path)
        try:
            points = sample_mesh(vertices, faces, MESH_POINTS, rng)
        except FormatError as error:
            raise FormatError(f"{path}: at byte 0: {error}") from None
    else:
        points = read_points(path)
    if sampling == "farthest":
        points = points[farthest(points[:, :3], count)]
    elif sampling == "random":
        points = points[rng.permutation(len(points))[:count]]
    note = f"{len(points)} points, expected {count}" if len(points) < count else ""
    return Output([(f"{item.name}.npy", np.ascontiguousarray(points[:count]))], note=note)


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts classes, lists and files and, unless quick, reads every file."""
    result, items, root = Check(), [], find_root(job.root)
    classes = list_classes(root)
    result.count("classes", len(classes), CLASSES if job.complete else None)
    for part, total in LISTED.items():
        shapes = list_shapes(root, part, classes)
        result.count(f"{part}: listed shapes", len(shapes), total if job.complete else None)
        there = [shape for shape in shapes if shape.path.is_file()]
        result.rows.append((f"{part}: shapes with a file", f"{len(there):,}", f"{len(shapes):,}"))
        if job.complete:
            result.problems += [f"{shape.path}: not there" for shape in shapes if not shape.path.is_file()]
        for i in job.progress(range(0 if job.quick else len(there)), f"{part} shapes"):
            try:
                (off.read if there[i].path.suffix == ".off" else read_points)(there[i].path)
            except FormatError as error:
                result.problems.append(str(error))
        items += [Item(f"{part}/{shape.name}", sized=(shape.path,)) for shape in there]
    return result, items


def held_back(labels: Sequence[int], seed: int) -> Array:
    """Which training shapes are for validation, (n,): a tenth of each class, rounded, and never all of one."""
    rng, found = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for label in np.unique(np.asarray(labels)):
        members = np.flatnonzero(np.asarray(labels) == label)
        count = min(max(1, round(len(members) / 10)), len(members) - 1)
        found[rng.permutation(members)[:count]] = True
    return found


def modelnet40(
    split: str,
    *,
    root: str | Path,
    seed: int = 0,
    augment: Augment | None = None,
    grid_size: float = 0.01,
    features: Sequence[str] = ("coord", "normal"),
    votes: int = 1,
    val: str = "tenth",
    split_seed: int = 0,
    sampling: str = "farthest",
    points: int = 8192,
    cache: str | Path | None = None,
    complete: bool = True,
) -> Objects:
    """A split of ModelNet40, prepared. augment is for "train", which has that of Point Transformer V3 if none is given.

    votes: views of a shape whose probabilities are added. sampling and points: as `prepare` was told. cache: where it
    wrote, without it root/prepared. complete=False accepts other numbers of shapes, and does without those that are not
    prepared.
    """
    for name, value, known in (("split", split, SPLITS), ("val", val, VALIDATION), ("sampling", sampling, SAMPLINGS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    folder = find_root(root)
    store = open_store(Job(folder, cache, options={"sampling": sampling, "points": points}))
    classes, entries = list_classes(folder), store.entries()
    part = "test" if split == "test" or (split == "val" and val == "test") else "train"
    shapes = list_shapes(folder, part, classes)
    if complete and (len(classes), len(shapes)) != (CLASSES, LISTED[part]):
        told = f"{len(shapes)} {part} shapes of {len(classes)} classes, expected {LISTED[part]} of {CLASSES}"
        raise FormatError(f"{folder}: {told}; complete=False accepts this")
    if part == "train" and val == "tenth":
        back = held_back([shape.label for shape in shapes], split_seed)
        shapes = [shape for shape, held in zip(shapes, back, strict=True) if held == (split == "val")]
    missing = next((shape for shape in shapes if f"{part}/{shape.name}" not in entries), None)
    if missing is not None and complete:
        raise FormatError(f"{missing.path}: not prepared; {store.again}, or complete=False does without it")
    shapes = [shape for shape in shapes if f"{part}/{shape.name}" in entries]
    if not shapes:
        raise FormatError(f"{folder}: no prepared shapes of {split}; {store.again}")
    files = [f"{part}/{shape.name}.npy" for shape in shapes]
    sizes = [entries[f"{part}/{shape.name}"].files[file][2] for shape, file in zip(shapes, files, strict=True)]
    return Objects(
        [shape.name for shape in shapes],
        [shape.label for shape in shapes],
        partial(_load, store, files, sizes),
        classes,
        grid_size=grid_size,
        features=features,
        augment=(augment or Augment()) if split == "train" else None,
        votes=votes,
        seed=seed,
        points=points,
        sampling=sampling,
    )


def _load(store: Store, files: Sequence[str], sizes: Sequence[Sequence[int]], index: int) -> Array:
    found = store.array(files[index], np.dtype("<f4"), sizes[index])
    if found.ndim != 2 or found.shape[1] != 6 or not len(found) or not np.isfinite(found).all():
        raise FormatError(f"{store.folder / files[index]}: not the points of a shape; remove it and {store.again}")
    return found


modelnet40_voting = partial(modelnet40, votes=10)
