"""Generated rooms to learn on: floor, walls, furniture and lamps, of which some differ in height alone.

A table and a bench are one shape at two heights, so are a lamp that hangs and a ball on the floor, and a picture and a
heater on a wall. Colours are random for every object and say nothing. Rooms of "train" and "val" have furniture of the
same sizes; those of "test" are smaller or larger than any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from . import meshes
from .augment.points import PointAugment
from .points import GIVES as GIVES
from .points import Cloud, vertex_normals
from .sampling import sample_seed
from .scenes import Scenes

Array = np.ndarray[Any, Any]
TASK = "segmentation"
NAMES = ("floor", "wall", "table", "bench", "chair", "lamp", "ball", "picture", "heater")
SPLITS = {"train": 0, "val": 1, "test": 2}
HEIGHT = 2.4  # of walls, in metres
TABLE, BENCH, LAMP, PICTURE, HEATER = 0.8, 0.4, 1.9, 1.5, 0.3  # heights


@dataclass(frozen=True, kw_only=True)
class Augment(PointAugment):
    """Turns, flips and small changes of size; no noise, as points are far apart."""

    jitter: float = 0.0
    elastic: float = 0.0
    contrast: float = 0.0
    tint: float = 0.0
    grain: float = 0.0


class Room(NamedTuple):
    """coord float32 (n, 3), faces (f, 3), color uint8 (n, 3), segment and instance int64 (n,)."""

    coord: Array
    faces: Array
    color: Array
    segment: Array
    instance: Array


def make_room(rng: np.random.Generator, *, held_out: bool = False, step: float = 0.1) -> Room:
    """A room with vertices about `step` apart. held_out: with furniture of other sizes."""
    width, depth = rng.uniform(2.4, 3.2, 2)
    size = partial(_size, rng, held_out)
    parts: list[tuple[str, meshes.Mesh]] = [("floor", meshes.panel((0, 0, 0), (width, 0, 0), (0, depth, 0), step))]
    walls = [
        ((0, 0, 0), (width, 0, 0), (0, 1, 0)),
        ((width, 0, 0), (0, depth, 0), (-1, 0, 0)),
        ((width, depth, 0), (-width, 0, 0), (0, -1, 0)),
        ((0, depth, 0), (0, -depth, 0), (1, 0, 0)),
    ]
    for i in rng.permutation(4)[: rng.integers(2, 4)]:
        corner, along, inward = (np.array(x, np.float64) for x in walls[i])
        parts.append(("wall", meshes.panel(corner, (0, 0, HEIGHT), along, step)))
        for share in (0.3, 0.7):
            name, height = [("picture", PICTURE), ("heater", HEATER)][rng.integers(2)]
            side = np.array([size(0.5), size(0.5)])
            if rng.random() < 0.75:
                place = corner + along * share - along / np.linalg.norm(along) * side[0] / 2 + 0.1 * inward
                edge = along / np.linalg.norm(along) * side[0]
                parts.append((name, meshes.panel(place + np.array([0, 0, height]), (0, 0, side[1]), edge, step)))
    spots = [(x, y) for x in (0.28, 0.72) for y in (0.28, 0.72)]
    for spot in rng.permutation(4):
        name = ("table", "bench", "chair", "ball", "lamp")[rng.integers(5)]
        if name in ("table", "bench"):
            made = meshes.legged(size(0.8), size(0.6), TABLE if name == "table" else BENCH, step)
        elif name == "chair":
            made = meshes.chair(size(0.45), 0.45, size(0.45), step)
        else:
            radius = size(0.2)
            made = meshes.ball(radius, step).moved((0, 0, radius if name == "ball" else LAMP))
        x, y = spots[spot]
        turn = rng.uniform(0, 2 * np.pi)
        c, s = np.cos(turn), np.sin(turn)
        made = meshes.Mesh(made.coord @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]), made.faces)
        parts.append((name, made.moved((x * width, y * depth, 0))))
    whole = meshes.join([mesh for _, mesh in parts])
    counts = [len(mesh.coord) for _, mesh in parts]
    colors = rng.uniform(40, 215, (len(parts), 3)).repeat(counts, 0) + rng.normal(0, 10, (sum(counts), 3))
    return Room(
        (whole.coord + rng.normal(0, step / 20, whole.coord.shape)).astype(np.float32),
        whole.faces,
        colors.clip(0, 255).astype(np.uint8),
        np.repeat([NAMES.index(name) for name, _ in parts], counts),
        np.repeat(np.arange(len(parts)), counts),
    )


def _size(rng: np.random.Generator, held_out: bool, usual: float) -> float:
    """A length near the usual one or, in held-out rooms, one that is smaller or larger than any of these."""
    if not held_out:
        return usual * rng.uniform(0.9, 1.15)
    return usual * (rng.uniform(0.75, 0.88) if rng.random() < 0.5 else rng.uniform(1.17, 1.35))


@lru_cache(maxsize=1024)
def room_cloud(split: str, seed: int, step: float, index: int) -> Cloud:
    """A room of a split as points, always the same."""
    rng = np.random.default_rng(sample_seed(seed, SPLITS[split], index))
    room = make_room(rng, held_out=split == "test", step=step)
    normal = vertex_normals(room.coord, room.faces)
    cloud = Cloud(room.coord, room.color, normal, room.segment)
    for array in vars(cloud).values():
        if array is not None:
            array.flags.writeable = False
    return cloud


def rooms(
    split: str,
    *,
    seed: int = 0,
    augment: Augment | None = None,
    train: int = 128,
    test: int = 24,
    room_seed: int = 0,
    step: float = 0.1,
    grid_size: float = 0.1,
    point_max: int = 102_400,
    features: Sequence[str] = ("color", "normal"),
    evaluation: str = "quick",
) -> Scenes:
    """A split of generated rooms: `train` for training, `test` for validation and for testing each."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if train < 1 or test < 1 or not step > 0:
        raise ValueError(f"expected rooms and a positive step, got train={train}, test={test}, step={step}")
    count = train if split == "train" else test
    return Scenes(
        [f"{split}-{i:04d}" for i in range(count)],
        partial(room_cloud, split, room_seed, step),
        NAMES,
        grid_size=grid_size,
        point_max=point_max,
        features=features,
        augment=(augment or Augment()) if split == "train" else None,
        evaluation=evaluation,
        seed=seed,
    )


rooms_precise = partial(rooms, evaluation="precise")
rooms_tta = partial(rooms, evaluation="precise_tta")
