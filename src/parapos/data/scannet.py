"""ScanNet v2: rooms as meshes, 20 classes. Scenes are read from what `parapos prepare scannet` wrote.

    <root>/scans/<scene>/<scene>_vh_clean_2.ply, .segs.json, .aggregation.json      training and validation
    <root>/scans_test/<scene>/<scene>_vh_clean_2.ply                                test, whose labels are not public
    <root>/scannetv2-labels.combined.tsv, <root>/[Tasks_Benchmark/]scannetv2_{train,val,test}.txt

Prepared are <root>/prepared/{train,val,test}/<scene>/{coord,color,normal,segment20,instance}.npy, the layout of
Pointcept; a folder that has such arrays already, from elsewhere, is read as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError
from .augment.points import PointAugment as Augment
from .point_trees import make_scannet as synthetic  # noqa: F401 (for `parapos prepare`)
from .points import GIVES as GIVES
from .points import Cloud, vertex_normals
from .preparations import Job
from .prepared import Check, Item, Output, Store, map_array
from .readers import ply
from .readers.scannet_lists import label_vertices, read_categories, read_groups, read_scenes, read_segments
from .scenes import Scenes

TASK = "segmentation"
SPLITS = ("train", "val", "test")
LISTED = {"train": 1201, "val": 312, "test": 100}
TABLE = "scannetv2-labels.combined.tsv"
CLASSES = {  # NYU40 ids, in the order of the benchmark
    **{1: "wall", 2: "floor", 3: "cabinet", 4: "bed", 5: "chair", 6: "sofa", 7: "table", 8: "door", 9: "window"},
    **{10: "bookshelf", 11: "picture", 12: "counter", 14: "desk", 16: "curtain", 24: "refrigerator"},
    **{28: "shower curtain", 33: "toilet", 34: "sink", 36: "bathtub", 39: "otherfurniture"},
}
NYU40 = {number: i for i, number in enumerate(CLASSES)}
VERSION = 1  # of prepared files
ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {  # name: dtype, and the shape after the points
    **{"coord": ("<f4", (3,)), "color": ("|u1", (3,)), "normal": ("<f4", (3,))},
    **{"segment20": ("<i8", ()), "instance": ("<i8", ())},
}


def list_scenes(root: Path, split: str, *, complete: bool = True) -> list[str]:
    """Names of the scenes of a split, as the benchmark lists them."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    name = f"scannetv2_{split}.txt"
    path = next((p for p in (root / name, root / "Tasks_Benchmark" / name) if p.is_file()), None)
    if path is None:
        raise FormatError(f"{root / name}: not there, expected the list of the benchmark's scenes")
    names = read_scenes(path)
    if complete and len(names) != LISTED[split]:
        told = f"{len(names)} scenes, expected {LISTED[split]}; complete=False accepts this"
        raise FormatError(f"{path}: {told}")
    return names


def item_of(root: Path, split: str, scene: str) -> Item:
    """The files of a scene."""
    folder = root / ("scans_test" if split == "test" else "scans") / scene
    mesh = folder / f"{scene}_vh_clean_2.ply"
    if split == "test":
        return Item(f"{split}/{scene}", sized=(mesh,))
    labels = (folder / f"{scene}_vh_clean_2.0.010000.segs.json", folder / f"{scene}.aggregation.json", root / TABLE)
    return Item(f"{split}/{scene}", sized=(mesh,), hashed=labels)


def open_store(job: Job) -> Store:
    return Store(job.root, job.cache, "scannet", VERSION, "scenes")


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """The arrays of a scene."""
    (mesh,) = item.sized
    found = ply.read(mesh)
    coord, color, _ = ply.cloud_columns(found, mesh)
    if not len(coord):
        raise FormatError(f"{mesh}: at byte 0: no vertices, expected a scene")
    if color is None or found.faces is None:
        raise FormatError(f"{mesh}: at byte 0: expected colours and faces, which normals are computed from")
    arrays: dict[str, Any] = {"coord": coord, "color": color, "normal": vertex_normals(coord, found.faces)}
    note = ""
    if item.hashed:
        segs, groups, table = item.hashed
        segments, objects, categories = read_segments(segs), read_groups(groups), read_categories(table)
        if len(segments) != len(coord):
            told = f"over-segments of {len(segments)} vertices, {mesh.name} has {len(coord)}"
            raise FormatError(f"{segs}: at byte 0: {told}; expected files of one scene")
        labels, instance = label_vertices(groups, segments, objects, categories, NYU40)
        arrays |= {"segment20": labels, "instance": instance}
        unknown = sorted({group.label for group in objects} - set(categories))
        note = f"no class for {', '.join(unknown[:5])!r:.200}, which the table does not have" if unknown else ""
    files = ((f"{item.name}/{name}.npy", array) for name, array in arrays.items())
    return Output(files, facts={"points": len(coord)}, note=note)


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts lists and scenes and, unless quick, reads every mesh."""
    result, items, root = Check(), [], Path(job.root)
    if not root.is_dir():
        raise FormatError(f"{root}: not there, expected the folder of ScanNet")
    if (root / TABLE).is_file():
        result.count(f"categories in {TABLE}", len(read_categories(root / TABLE)))
    elif job.complete:
        result.problems.append(f"{root / TABLE}: not there")
    for split in SPLITS:
        try:
            names = list_scenes(root, split, complete=False)
        except FormatError as error:
            result.problems += [str(error)] if job.complete else []
            continue
        result.count(f"{split}: listed scenes", len(names), LISTED[split] if job.complete else None)
        all_items = [item_of(root, split, name) for name in names]
        there = [item for item in all_items if all(path.is_file() for path in (*item.sized, *item.hashed))]
        if job.complete:
            result.problems += [
                f"{path}: not there" for item in all_items for path in (*item.sized, *item.hashed) if not path.is_file()
            ]
        result.rows.append((f"{split}: scenes with all files", f"{len(there):,}", f"{len(names):,}"))
        points = 0
        for i in job.progress(range(len(there)) if not job.quick else range(0), f"{split} scenes"):
            try:
                points += len(ply.read(there[i].sized[0]).vertex["x"])
            except FormatError as error:
                result.problems.append(str(error))
        if not job.quick:
            result.count(f"{split}: points", points)
        items += there
    return result, items


def load_scene(folder: Path, again: str) -> Cloud:
    """A prepared scene, memory-mapped."""
    arrays: dict[str, Any] = {}
    for name, (kind, rest) in list(ARRAYS.items())[:4]:
        path = folder / f"{name}.npy"
        if name == "segment20" and not path.is_file():
            continue
        count = len(arrays["coord"]) if arrays else None

        def good(found: Any, rest: tuple[int, ...] = rest, count: int | None = count, kind: str = kind) -> bool:
            numbers = found.dtype.kind in ("iu" if kind == "<i8" else "iuf")
            return bool(
                numbers and found.ndim == 1 + len(rest) and found.shape[1:] == rest and count in (None, len(found))
            )

        told = f"an array of {'points' if count is None else count} x {rest or 1}"
        arrays[name] = map_array(path, told, good, again)
    for name, told in (("coord", "coordinates"), ("normal", "normals")):
        if not np.isfinite(arrays[name]).all():
            raise FormatError(f"{folder / name}.npy: {told} that are not finite; remove it and {again}")
    return Cloud(arrays["coord"], arrays["color"], arrays["normal"], arrays.get("segment20"))


def scannet(
    split: str,
    *,
    root: str | Path,
    seed: int = 0,
    augment: Augment | None = None,
    grid_size: float = 0.02,
    point_max: int = 102_400,
    features: Sequence[str] = ("color", "normal"),
    evaluation: str = "quick",
    cache: str | Path | None = None,
    complete: bool = True,
) -> Scenes:
    """A split of ScanNet, prepared. augment is for "train", which has that of Point Transformer V3 if none is given.

    evaluation: as in `scenes`. cache: where `prepare` wrote, without it root/prepared. complete=False accepts other
    lists than the official ones, and does without scenes that are not prepared.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    store = open_store(Job(root, cache))
    folder, entries = store.folder, store.entries()
    if not entries and (Path(root) / split).is_dir():  # arrays from elsewhere
        folder = Path(root)
    base = folder / split
    found = sorted(path.name for path in base.iterdir() if (path / "coord.npy").is_file()) if base.is_dir() else []
    names = [name for name in found if not entries or f"{split}/{name}" in entries]
    if complete and len(names) != LISTED[split]:
        told = f"{len(names)} prepared scenes, expected {LISTED[split]}; {store.again}, or complete=False accepts this"
        raise FormatError(f"{base}: {told}")
    if not names:
        raise FormatError(f"{base}: no prepared scenes; {store.again}")
    return Scenes(
        names,
        partial(_load, [base / name for name in names], store.again),
        list(CLASSES.values()),
        grid_size=grid_size,
        point_max=point_max,
        features=features,
        augment=(augment or Augment()) if split == "train" else None,
        evaluation=evaluation,
        seed=seed,
        submission=list(CLASSES),
    )


def _load(folders: Sequence[Path], again: str, index: int) -> Cloud:
    return load_scene(folders[index], again)


scannet_precise = partial(scannet, evaluation="precise")
scannet_tta = partial(scannet, evaluation="precise_tta")
