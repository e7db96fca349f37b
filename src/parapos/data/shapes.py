"""Generated objects to learn on: 12 classes of solids in varied proportions, turned about z; "test" has other ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from . import meshes
from .meshes import Mesh, box, join, revolve
from .objects import ObjectAugment, Objects
from .points import GIVES as GIVES
from .points import sample_mesh
from .sampling import sample_seed

Array = np.ndarray[Any, Any]
SPLITS = {"train": 0, "val": 1, "test": 2}
Vary = Callable[[float, float], float]
Augment = ObjectAugment


def _stairs(u: Vary) -> Mesh:
    steps, rise, run, width = 3 + int(u(0, 3)), u(0.25, 0.35), u(0.3, 0.4), u(0.6, 1.2)
    return join([box((i * run, 0, 0), ((i + 1) * run, width, (i + 1) * rise)) for i in range(steps)])


def _cross(u: Vary) -> Mesh:
    a, b = u(0.8, 1.2), u(0.12, 0.2)
    return join([box((-a, -b, -b), (a, b, b)), box((-b, -a, -b), (b, a, b)), box((-b, -b, -a), (b, b, a))])


def _tent(u: Vary) -> Mesh:
    x, y, z = u(0.5, 0.8), u(0.7, 1.2), u(0.6, 1.1)
    sides = [meshes.panel((-x, -y, 0), (x, 0, z), (0, 2 * y, 0)), meshes.panel((x, -y, 0), (0, 2 * y, 0), (-x, 0, z))]
    return join([*sides, meshes.panel((-x, -y, 0), (0, 2 * y, 0), (2 * x, 0, 0))])


def _torus(u: Vary) -> Mesh:
    turn, r = np.linspace(0, 2 * np.pi, 17), u(0.2, 0.35)
    return revolve(1 + r * np.cos(turn), r * np.sin(turn))


def _bowl(u: Vary) -> Mesh:
    turn, h = np.linspace(0, np.pi / 2, 9), u(0.7, 1.1)
    return revolve(np.sin(turn), -h * np.cos(turn))


def _vase(u: Vary) -> Mesh:
    z, waist = np.linspace(-1, 1, 13), u(0.15, 0.3)
    return revolve(waist + u(0.4, 0.6) * z**2, u(0.9, 1.3) * z)


def _cone(u: Vary) -> Mesh:
    r = u(0.5, 0.8)
    return revolve((0, r, 0), (0, 0, u(1.0, 1.6)))


def _cylinder(u: Vary) -> Mesh:
    r, h = u(0.4, 0.6), u(1.0, 1.6)
    return revolve((0, r, r, 0), (0, 0, h, h))


SHAPES: dict[str, Callable[[Vary], Mesh]] = {
    "ball": lambda u: meshes.ball(1.0),
    "block": lambda u: box((0, 0, 0), (u(0.8, 1.2), u(0.8, 1.2), u(0.8, 1.2))),
    "bowl": _bowl,
    "chair": lambda u: meshes.chair(u(0.45, 0.55), u(0.4, 0.5), u(0.45, 0.6)),
    "cone": _cone,
    "cross": _cross,
    "cylinder": _cylinder,
    "stairs": _stairs,
    "table": lambda u: meshes.legged(u(0.8, 1.2), u(0.8, 1.2), u(0.6, 0.9)),
    "tent": _tent,
    "torus": _torus,
    "vase": _vase,
}


def make_shape(name: str, rng: np.random.Generator) -> Mesh:
    """A solid of a class, turned about z by chance."""
    made = SHAPES[name](lambda low, high: float(rng.uniform(low, high)))
    turn = rng.uniform(0, 2 * np.pi)
    c, s = np.cos(turn), np.sin(turn)
    return Mesh(made.coord @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]), made.faces)


@lru_cache(maxsize=4096)
def shape_points(split: str, seed: int, count: int, index: int) -> Array:
    """Coordinates and normals float32 (count, 6) of a solid of a split, always the same: class index modulo 12."""
    rng = np.random.default_rng(sample_seed(seed, SPLITS[split], index))
    mesh = make_shape(list(SHAPES)[index % len(SHAPES)], rng)
    points = sample_mesh(mesh.coord, mesh.faces, count, rng)
    points[:, :3] += rng.normal(0, 0.01, (count, 3)).astype(np.float32)
    points.flags.writeable = False
    return points


def shapes(
    split: str,
    *,
    seed: int = 0,
    augment: Augment | None = None,
    train: int = 480,
    test: int = 120,
    shape_seed: int = 0,
    points: int = 512,
    grid_size: float = 0.08,
    features: Sequence[str] = ("coord", "normal"),
    votes: int = 1,
) -> Objects:
    """A split of generated objects: `train` for training, `test` for validation and for testing each."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if train < 1 or test < 1 or points < 1:
        raise ValueError(f"expected objects and points, got train={train}, test={test}, points={points}")
    count = train if split == "train" else test
    return Objects(
        [f"{split}-{i:04d}" for i in range(count)],
        [i % len(SHAPES) for i in range(count)],
        partial(shape_points, split, shape_seed, points),
        list(SHAPES),
        grid_size=grid_size,
        features=features,
        augment=(augment or Augment()) if split == "train" else None,
        votes=votes,
        seed=seed,
        points=points,
    )


shapes_voting = partial(shapes, votes=10)
