"""Small generated copies of ScanNet and ModelNet40 in the true formats and layouts, for trials and tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from . import FormatError
from .points import sample_mesh
from .readers import modelnet_lists, off, ply
from .rooms import NAMES, make_room
from .shapes import SHAPES, make_shape

FORMS = ("binary_little_endian", "ascii", "binary_big_endian")
# raw category of what is in generated rooms, with its id in the table; a lamp is no class of the benchmark, and what a
# ball is called there the table does not have
CATEGORIES = {
    **{"floor": ("floor", 2), "wall": ("wall", 1), "table": ("dining table", 7), "bench": ("desk", 14)},
    **{"chair": ("office chair", 5), "lamp": ("ceiling lamp", 35), "ball": ("gym ball", None)},
    **{"picture": ("picture", 11), "heater": ("kitchen cabinet", 3)},
}
COLUMNS = ("id", "raw_category", "category", "count", "nyu40id")


def make_scannet(
    root: str | Path, *, train: int = 6, val: int = 2, test: int = 2, seed: int = 0, step: float = 0.1
) -> None:
    """Writes generated rooms as ScanNet, to an empty or new folder: meshes in all three forms of PLY, segments,
    objects, the table of labels and the lists of scenes."""
    root = _new(root)
    rows = [(i, raw, raw, 1, number) for i, (raw, number) in enumerate(CATEGORIES.values(), 1) if number is not None]
    rows.append((99, "dining table", "other", 1, 40))  # a category that is there twice: the first row counts
    lines = ["\t".join(map(str, row)) for row in (COLUMNS, *rows)]
    (root / "scannetv2-labels.combined.tsv").write_bytes(("\r\n".join(lines) + "\r\n").encode())
    rng, number = np.random.default_rng(seed), 0
    for split, count in (("train", train), ("val", val), ("test", test)):
        names = [f"scene{number + i:04d}_00" for i in range(count)]
        (root / f"scannetv2_{split}.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        for name in names:
            folder = root / ("scans_test" if split == "test" else "scans") / name
            _write_scene(folder, name, rng, split, FORMS[number % 3], step)
            number += 1


def _write_scene(folder: Path, name: str, rng: np.random.Generator, split: str, form: str, step: float) -> None:
    folder.mkdir(parents=True)
    room = make_room(rng, held_out=split != "train", step=step)
    vertex = {axis: room.coord[:, i] for i, axis in enumerate("xyz")}
    vertex |= {color: room.color[:, i] for i, color in enumerate(("red", "green", "blue"))}
    vertex["alpha"] = np.full(len(room.coord), 255, np.uint8)
    ply.write(folder / f"{name}_vh_clean_2.ply", vertex, room.faces, form)
    if split == "test":
        return
    # every object is cut in two over-segments by height, with ids that have gaps, as true ones have
    middle = np.array([np.median(room.coord[room.instance == i, 2]) for i in range(room.instance.max() + 1)])
    segments = 7 * (2 * room.instance + (room.coord[:, 2] > middle[room.instance])) + 3
    segs = {"params": {"kThresh": "0.0001"}, "sceneId": name, "segIndices": segments.tolist()}
    groups = []
    for i in range(int(room.instance.max())):  # the last object belongs to no group
        mine = np.unique(segments[room.instance == i]).tolist()
        label = CATEGORIES[NAMES[int(room.segment[room.instance == i][0])]][0]
        groups.append({"id": i, "objectId": i, "segments": mine, "label": label})
    aggregation = {"sceneId": f"scannet.{name}", "appId": "Aggregator.v2", "segGroups": groups}
    (folder / f"{name}_vh_clean_2.0.010000.segs.json").write_text(json.dumps(segs), encoding="utf-8")
    (folder / f"{name}.aggregation.json").write_text(json.dumps(aggregation), encoding="utf-8")


def make_modelnet40(
    root: str | Path, *, train: int = 10, test: int = 2, points: int = 600, meshes: bool = False, seed: int = 0
) -> None:
    """Writes generated objects as ModelNet40, to an empty or new folder: `train` and `test` of each of 12 classes, as
    resampled points, or as OFF files, every other with the counts directly behind the keyword."""
    root, rng = _new(root), np.random.default_rng(seed)
    classes = sorted(f"{name}_stand" if name == "table" else name for name in SHAPES)  # one has an underscore
    listed: dict[str, list[str]] = {"train": [], "test": []}
    for kind in classes:
        for part, count in (("train", train), ("test", test)):
            for i in range(count):
                name = f"{kind}_{len(listed['train']) if part == 'train' else 9000 + i:04d}"
                mesh = make_shape(kind.removesuffix("_stand"), rng)
                folder = root / kind / part if meshes else root / kind
                folder.mkdir(parents=True, exist_ok=True)
                if meshes:
                    off.write(folder / f"{name}.off", mesh.coord, mesh.faces, fused=i % 2 == 1)
                else:
                    made = sample_mesh(mesh.coord, mesh.faces, points, rng)
                    modelnet_lists.write_points(folder / f"{name}.txt", made)
                listed[part].append(name)
    if meshes:
        return
    (root / "modelnet40_shape_names.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    for part, names in listed.items():
        (root / f"modelnet40_{part}.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def _new(root: str | Path) -> Path:
    root = Path(root)
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    root.mkdir(parents=True, exist_ok=True)
    return root
