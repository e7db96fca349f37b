"""What `parapos prepare nuscenes` checks and writes: keyframes with their geometry, and objects to paste.

Of each scene of a split

    frames.json   all of its keyframes but the objects
    objects.npy   rows of `OBJECT`, frame by frame
    points.npy    of training scenes: LiDAR points in each object, from ten sweeps, relative to the centre of its box
    crops.npy     of training scenes: what a camera sees of each object, as bytes of JPEG files one after another
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError, rigid
from .nuscenes_classes import CAMERAS, LIDAR, SAMPLES, VERSIONS, scenes
from .nuscenes_frames import OBJECT, SWEEPS, Camera, Frame, Sweep, scene_frames
from .nuscenes_sensors import read_camera, read_sweep, sweep_points
from .nuscenes_tree import write_tiny as synthetic  # noqa: F401 (for `parapos prepare`)
from .pasting import Database, pixels
from .preparations import Job
from .prepared import FOLDER, Check, Item, Output, Store, file_state, map_array
from .readers.nuscenes_tables import TABLES, Tables

Array = np.ndarray[Any, Any]
FILES = 2  # version of prepared files
QUALITY = 95  # of JPEG


def open_version(root: str | Path, cache: str | Path | None, version: str) -> Store:
    """The store of a version of the tables, each of which has a folder of its own."""
    folder = Path(cache) if cache else Path(root) / FOLDER
    return Store(root, folder / version, "nuscenes", FILES, "scenes", tables=version)


def open_store(job: Job) -> Store:
    return open_version(job.root, job.cache, find_version(Path(job.root), job.options))


def find_version(root: Path, options: Mapping[str, Any]) -> str:
    """The version of the tables that is asked for; for "auto" the largest one that is there."""
    version = str(options.get("tables", "auto"))
    if version not in ("auto", *VERSIONS):
        raise ValueError(f"tables must be auto or one of {', '.join(VERSIONS)}, got {version!r}")
    if version != "auto":
        return version
    there = next((name for name in VERSIONS if (root / name).is_dir()), None)
    if there is None:
        raise FormatError(f"{root}: none of {', '.join(VERSIONS)}, expected the folder of nuScenes")
    return there


def open_tables(folder: Path) -> Tables:
    """The tables in a folder; the last ones stay open until they change, as a process prepares many scenes of them."""
    paths = [folder / f"{name}.json" for name in TABLES]
    return _opened(folder, tuple(file_state(path) for path in paths if path.is_file()))


@lru_cache(maxsize=1)
def _opened(folder: Path, states: tuple[tuple[int, ...], ...]) -> Tables:
    return Tables(folder)


def survey(job: Job) -> tuple[Check, list[Item]]:
    """Counts scenes, keyframes, boxes and files and, unless job.quick, reads every sweep and every image."""
    root, result, items = Path(job.root), Check(), []
    version = find_version(root, job.options)
    tables = open_tables(root / version)
    of_scene = scenes(version)
    counts: dict[str, list[int]] = {split: [0, 0] for split in dict.fromkeys(of_scene.values())}
    missing: list[str] = []
    for row in tables["scene"].values():
        split = of_scene.get(row["name"])
        if split is None:
            result.problems += [f"{tables.path('scene')}: {row['name']} is in no split"] if job.complete else []
            continue
        samples = tables.samples(row["token"])
        counts[split][0] += 1
        counts[split][1] += len(samples)
        files = _files(tables, [sample["token"] for sample in samples])
        gone = [(file, token) for file, token, _ in files if not (root / file).is_file()]
        told = [f"{root / file}: not there, expected by sample_data {token}" for file, token in gone]
        missing += told
        if not any(file.endswith(".bin") for file, _ in gone):
            paths = tuple(root / file for file, _, _ in files if (root / file).is_file())
            items.append(Item(f"{split}/{row['name']}", sized=paths, hashed=tuple(map(tables.path, TABLES))))
    for split, (number, keyframes) in counts.items():
        wanted = sum(one == split for one in of_scene.values())
        result.count(f"{split}: scenes", number, wanted if job.complete else None)
        result.count(f"{split}: keyframes", keyframes, SAMPLES[version, split] if job.complete else None)
    result.count("boxes of all categories", len(tables["sample_annotation"]))
    result.rows.append(("files that are not there", f"{len(missing):,}", "0"))
    result.problems += missing if job.complete else []
    if not job.quick:
        _read_all(tables, root, job, result)
    return result, sorted(items, key=lambda item: item.name)


def _files(tables: Tables, samples: list[str]) -> list[tuple[str, str, str]]:
    """File, token and channel of the sensor files of samples: sweeps of the LiDAR and keyframes of the cameras."""
    found: dict[str, tuple[str, str, str]] = {}
    for sample in samples:
        rows = tables.keyframes(sample)
        if LIDAR in rows:
            for row in tables.chain("sample_data", rows[LIDAR]["token"], "prev", 1 + SWEEPS):
                found[row["token"]] = row["filename"], row["token"], LIDAR
        for channel in CAMERAS:
            if channel in rows:
                found[rows[channel]["token"]] = rows[channel]["filename"], rows[channel]["token"], channel
    return list(found.values())


def _read_all(tables: Tables, root: Path, job: Job, result: Check) -> None:
    """Reads every sweep and image once, and notes what is wrong with them."""
    frames = [frame for row in tables["scene"].values() for frame in scene_frames(tables, row["token"])]
    points, known = 0, set[str]()
    for number in job.progress(range(len(frames)), "keyframes"):
        frame = frames[number]
        files: list[Sweep | Camera] = [*frame.sweeps, *filter(None, frame.cameras)]
        for one in files:
            if one.token in known or not (root / one.file).is_file():
                continue
            known.add(one.token)
            try:
                if isinstance(one, Camera):
                    read_camera(root, one)
                else:
                    points += len(read_sweep(root, one.file, one.token))
            except FormatError as error:
                result.problems.append(str(error))
    result.count("LiDAR points", points)


def make(item: Item, options: Mapping[str, Any]) -> Output:
    """The files of a scene."""
    tables = open_tables(item.hashed[0].parent)
    root, (split, name) = tables.folder.parent, item.name.split("/")
    token = next(row["token"] for row in tables["scene"].values() if row["name"] == name)
    frames = list(scene_frames(tables, token))
    points: list[Array] = []
    crops = bytearray()
    for frame in frames if split == "train" else ():
        _cut_out(root, frame, points, crops)
    arrays: dict[str, Array] = {"objects": np.concatenate([np.zeros(0, OBJECT), *(f.objects for f in frames)])}
    if split == "train":
        arrays["points"] = np.concatenate([np.zeros((0, 5), np.float32), *points])
        arrays["crops"] = np.frombuffer(bytes(crops), np.uint8)
    text = json.dumps([frame.as_json() for frame in frames]).encode()
    files: list[tuple[str, Array | bytes]] = [(f"{item.name}/frames.json", text)]
    files += [(f"{item.name}/{key}.npy", array) for key, array in arrays.items()]
    facts = {"frames": len(frames), "objects": len(arrays["objects"])}
    return Output(files, facts={**facts, **{key: len(arrays[key]) for key in ("points", "crops") if key in arrays}})


def _cut_out(root: Path, frame: Frame, points: list[Array], crops: bytearray) -> None:
    """Adds the points and the picture of each object of a frame, and notes in the objects where they are."""
    cloud = sweep_points(root, frame, 1 + SWEEPS)
    images = {n: read_camera(root, c) for n, c in enumerate(frame.cameras) if c and (root / c.file).is_file()}
    at = sum(map(len, points))
    for row in frame.objects:
        inside = cloud[rigid.inside(cloud[:, :3].astype(np.float64), row["box"])]
        row["points_at"], row["points"] = at, len(inside)
        at += len(inside)
        points.append(inside - np.append(row["box"][:3], [0, 0]).astype(np.float32))
        if int(row["view"]) in images:
            image = images[int(row["view"])]
            buffer = io.BytesIO()
            image.crop(pixels(row["rectangle"], *image.size)).save(buffer, "JPEG", quality=QUALITY)
            row["crop_at"], row["crop"] = len(crops), buffer.tell()
            crops += buffer.getvalue()


def _entries(store: Store, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, entry in sorted(store.entries().items()):
        if name.startswith(f"{split}/"):
            yield name, entry.facts


def load_frames(store: Store, split: str) -> list[Frame]:
    """All prepared keyframes of a split, scene by scene."""
    frames: list[Frame] = []
    for name, facts in _entries(store, split):
        path = store.folder / name / "frames.json"
        objects = np.array(store.array(f"{name}/objects.npy", OBJECT, (facts["objects"],)))
        try:
            values = json.loads(path.read_bytes())
            parts = np.searchsorted(objects["frame"], np.arange(len(values) + 1))
            frames += [Frame.of(v, objects[a:b]) for v, a, b in zip(values, parts, parts[1:], strict=False)]
        except FileNotFoundError:
            raise FormatError(f"{path}: not there; {store.again}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{path}: damaged: {str(error)[:100]}; remove it and {store.again}") from None
    return frames


def load_database(store: Store, split: str, least_points: int) -> Database:
    """The objects of a training split that can be pasted. Points and pictures stay on disk until they are asked for."""
    objects, owner, points, crops = [np.zeros(0, OBJECT)], [np.zeros(0, np.int64)], [], []
    for number, (name, facts) in enumerate(_entries(store, split)):
        rows = np.array(store.array(f"{name}/objects.npy", OBJECT, (facts["objects"],)))
        objects.append(rows)
        owner.append(np.full(len(rows), number))
        points.append(_mapped(store, f"{name}/points.npy", "<f4", (facts["points"], 5)))
        crops.append(_mapped(store, f"{name}/crops.npy", "|u1", (facts["crops"],)))
    return Database(np.concatenate(objects), np.concatenate(owner), points, crops, least_points)


def _mapped(store: Store, file: str, kind: str, shape: tuple[int, ...]) -> Array:
    if 0 in shape:  # nothing can be mapped
        return np.zeros(shape, kind)
    want = (np.dtype(kind), shape)
    return map_array(store.folder / file, f"{kind} {shape}", lambda x: (x.dtype, x.shape) == want, store.again)
