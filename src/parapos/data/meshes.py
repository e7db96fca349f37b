"""Triangle meshes of simple solids, for generated data: panels, boxes and solids of revolution.

n vertices, f triangles. z is up; sizes are in metres.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Numbers = Sequence[float] | Array


class Mesh(NamedTuple):
    """coord float64 (n, 3), faces int32 (f, 3), whose normals point outwards."""

    coord: Array
    faces: Array

    def moved(self, by: Sequence[float]) -> Mesh:
        return Mesh(self.coord + np.asarray(by), self.faces)


def join(parts: Sequence[Mesh]) -> Mesh:
    """One mesh of several."""
    starts = np.cumsum([0, *(len(part.coord) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, starts, strict=False)]
    return Mesh(np.concatenate([part.coord for part in parts]), np.concatenate(faces).astype(np.int32))


def lattice(points: Array) -> Mesh:
    """A surface over a grid of vertices (a, b, 3); its normals are those of the first axis times the second."""
    a, b = points.shape[:2]
    index = np.arange(a * b).reshape(a, b)
    one = np.stack([index[:-1, :-1], index[1:, :-1], index[1:, 1:]], -1)
    two = np.stack([index[:-1, :-1], index[1:, 1:], index[:-1, 1:]], -1)
    return Mesh(points.reshape(-1, 3), np.concatenate([one.reshape(-1, 3), two.reshape(-1, 3)]).astype(np.int32))


def panel(corner: Numbers, u: Numbers, v: Numbers, step: float = np.inf) -> Mesh:
    """The parallelogram of two edges at a corner, with vertices at most `step` apart; its normal is u times v."""
    start, u_, v_ = (np.asarray(x, np.float64) for x in (corner, u, v))
    sides = [np.linspace(0, 1, 1 + max(1, int(np.ceil(np.linalg.norm(edge) / step)))) for edge in (u_, v_)]
    return lattice(start + sides[0][:, None, None] * u_ + sides[1][None, :, None] * v_)


def box(low: Sequence[float], high: Sequence[float], step: float = np.inf) -> Mesh:
    """A cuboid between two corners."""
    x, y, z = np.diag(np.asarray(high, np.float64) - np.asarray(low, np.float64))
    a, b = np.asarray(low, np.float64), np.asarray(high, np.float64)
    sides = [(a, y, x), (a, z, y), (a, x, z), (b, -x, -y), (b, -y, -z), (b, -z, -x)]
    return join([panel(corner, u, v, step) for corner, u, v in sides])


def revolve(radius: Numbers, height: Numbers, steps: int = 24) -> Mesh:
    """The surface that a line of (radius, height) sweeps around z; heights that rise make normals point outwards."""
    turn = np.linspace(0, 2 * np.pi, steps + 1)
    r, z = np.asarray(radius, np.float64)[None, :], np.asarray(height, np.float64)[None, :]
    x, y = r * np.cos(turn)[:, None], r * np.sin(turn)[:, None]
    return lattice(np.stack([x, y, np.broadcast_to(z, x.shape)], -1))


def ball(radius: float, step: float = np.inf) -> Mesh:
    """A sphere about the origin."""
    rings = max(6, int(np.ceil(np.pi * radius / step)))
    turn = np.linspace(-np.pi / 2, np.pi / 2, rings + 1)
    return revolve(radius * np.cos(turn), radius * np.sin(turn), 2 * rings)


def legged(width: float, depth: float, height: float, step: float = np.inf, thick: float = 0.06) -> Mesh:
    """A table about the origin: a board of this size on four legs."""
    x, y, t = width / 2, depth / 2, thick
    parts = [box((-x, -y, height - t), (x, y, height), step)]
    for sx in (-x, x - t):
        parts += [box((sx, sy, 0), (sx + t, sy + t, height - t), step) for sy in (-y, y - t)]
    return join(parts)


def chair(side: float, seat: float, back: float, step: float = np.inf) -> Mesh:
    """A table with a back."""
    t = 0.06
    board = box((-side / 2, side / 2 - t, seat), (side / 2, side / 2, seat + back), step)
    return join([legged(side, side, seat, step), board])
