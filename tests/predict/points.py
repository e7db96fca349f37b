"""Runs of points with random weights, and files to apply them to."""

import numpy as np

from parapos.data.readers import off, ply
from parapos.data.rooms import NAMES, make_room
from parapos.data.shapes import SHAPES, make_shape

from ..run_folders import make_run

TINY = dict(model__options__enc_dims=[16, 32], model__options__enc_depths=[1, 1], model__options__patch=64)


def make_scene_run(folder, encoding="pape", **changes):
    folder.mkdir(parents=True)
    known = {"cloud": "scene", "grid_size": 0.25, "features": ["color", "normal"]}
    targets = {"num_classes": 9, "class_names": list(NAMES)}
    grid = dict(model__options__grid_size=0.25, data__options__grid_size=0.25, data__options__step=0.25)
    learned = {"preprocessing": known, "targets": targets}
    return make_run(folder, encoding, source="rooms_desk", classes=9, learned=learned, **TINY, **grid, **changes)


def make_object_run(folder, encoding="pape", **changes):
    folder.mkdir(parents=True)
    known = {
        "cloud": "object",
        "grid_size": 0.2,
        "features": ["coord", "normal"],
        "points": 150,
        "sampling": "farthest",
    }
    targets = {"num_classes": 12, "class_names": list(SHAPES)}
    learned = {"preprocessing": known, "targets": targets}
    return make_run(folder, encoding, source="shapes_desk", classes=12, learned=learned, **TINY, **changes)


def write_room(path, *, label=True, color=True, faces=True, step=0.2, seed=0):
    """A room as PLY; gives it."""
    room = make_room(np.random.default_rng(seed), step=step)
    vertex = {axis: room.coord[:, i] for i, axis in enumerate("xyz")}
    if color:
        vertex |= {name: room.color[:, i] for i, name in enumerate(("red", "green", "blue"))}
    if label:
        vertex["label"] = room.segment.astype(np.int32)
    ply.write(path, vertex, room.faces if faces else None, "binary_little_endian")
    return room


def write_shape(path, kind="torus"):
    mesh = make_shape(kind, np.random.default_rng(0))
    off.write(path, mesh.coord, mesh.faces)
    return mesh
