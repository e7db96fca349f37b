"""Point clouds of one's own for `parapos predict`: files to clouds, pieces that a network can hold, classes of points.

n points of a file, m occupied cells, of which the network sees one point each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..data import FormatError
from ..data.pieces import Piece, Pieces, Voxels, voxelize
from ..data.point_files import SUFFIXES, check_labels, estimate_normals
from ..data.point_files import read as read_points
from ..data.points import IGNORED, PACKED, Cloud, check_features, farthest, grid_sample, normalize, sample_mesh, tensors
from ..tasks.base import Batch, answer
from . import Frame, PredictError, drawing
from .sources import Medium, Source, register_source
from .views import View, register_view

Array = np.ndarray[Any, Any]
Answered = tuple[list[dict[str, Any]], Mapping[str, Any]]
INPUTS = ("feat", "coord", "grid_coord", "offset")
CELLS = 100_000  # that a network sees at one time
MESH_POINTS = 10_000  # on a mesh of an object, of which some are chosen
PER_CELL, MOST_SAMPLED = 2.0, 4_000_000  # points on a mesh of a scene: per cell of its surface, and at most
PAINTED, UNSURE = 200_000, -1  # points in a picture; the class of points that no class is likely enough for


class PointFiles(Source):
    """PLY, OFF and NPZ files, prepared as the evaluation of the run prepares them.

    known["cloud"] says how: a "scene" keeps its unit and is cut into pieces of at most `cells` cells; an "object" gets
    the size that all objects have, and known["points"] points by known["sampling"].
    """

    suffixes = SUFFIXES

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        super().__init__(model, known, size=size, every=every)
        for name, value in (("size", size), ("every", every)):
            if value is not None:
                raise PredictError(f"{name} has no effect: point clouds have neither pixels nor moments")
        missing = [name for name in ("cloud", "grid_size", "features") if name not in known]
        if missing or known["cloud"] not in ("scene", "object"):
            told = f"the run does not say {', '.join(missing) or 'cloud'} of its points"
            raise PredictError(f"{told}: it was trained by an older version, train it again")
        self.cells = CELLS
        self.kind, self.grid_size = known["cloud"], float(known["grid_size"])
        self.features = check_features(tuple(known["features"]))

    def read(self, thing: Any) -> Medium:
        """A path, or an array (n, 3) of coordinates."""
        rng = np.random.default_rng(0)  # the same answers every time
        if isinstance(thing, np.ndarray):
            if thing.ndim != 2 or thing.shape[1] != 3 or not len(thing) or not np.isfinite(thing).all():
                raise PredictError(f"expected coordinates (n, 3), finite, or the path of a file, got {thing.shape}")
            path, cloud, faces = Path("array"), Cloud(thing.astype(np.float32)), None
        elif isinstance(thing, str | os.PathLike):
            path = Path(thing)
            cloud, faces = read_points(path)
        else:
            raise PredictError(f"expected the path of a file or an array (n, 3), got {type(thing).__name__}")
        about: dict[str, Any] = {}
        is_mesh = faces is not None and len(faces) > 0
        if is_mesh and (self.kind == "object" or path.suffix.lower() == ".off"):
            cloud = self._on_mesh(path, cloud, faces, rng)
            about["sampled"] = len(cloud)
        if "normal" in self.features and cloud.normal is None:
            about["normals"] = "estimated"
        if "color" in self.features and cloud.color is None:
            about["colors"] = "none in the file; the model was trained with colours and sees black"
        about = {"points": len(cloud), **about}
        try:
            make = self._object if self.kind == "object" else self._scene
            return Medium([make(cloud, rng, about)], "cloud")
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None

    def _on_mesh(self, path: Path, cloud: Cloud, faces: Any, rng: np.random.Generator) -> Cloud:
        """Points spread over the triangles of a mesh."""
        count = MESH_POINTS
        if self.kind == "scene":
            a, b, c = (cloud.coord[faces[:, i]].astype(np.float64) for i in range(3))
            area = float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)
            count = int(min(max(PER_CELL * area / self.grid_size**2, 1), MOST_SAMPLED))
        try:
            points = sample_mesh(cloud.coord, faces, count, rng)
        except FormatError as error:
            raise FormatError(f"{path}: at byte 0: {error}") from None
        return Cloud(points[:, :3], normal=points[:, 3:])

    def _object(self, cloud: Cloud, rng: np.random.Generator, about: dict[str, Any]) -> Frame:
        most = self.known.get("points") or len(cloud)
        if len(cloud) > most:
            some = rng.permutation(len(cloud))[: MESH_POINTS if self.known.get("sampling") == "farthest" else most]
            cloud = cloud.select(some)
            cloud = cloud.select(farthest(cloud.coord, most)) if len(cloud) > most else cloud
        cloud = replace(cloud, coord=normalize(cloud.coord.astype(np.float64)), segment=None)
        index, cell, inverse = grid_sample(cloud.coord, self.grid_size, rng)
        voxels = self._with_normals(Voxels(replace(cloud.select(index), cell=cell), index, inverse), cloud.coord)
        sample = {**tensors(voxels.cloud, self.features), "voxels": voxels}
        return Frame(sample, paint_cloud(cloud.coord, _given_colors(cloud)), {**about, "cells": len(index)})

    def _scene(self, cloud: Cloud, rng: np.random.Generator, about: dict[str, Any]) -> Frame:
        voxels = self._with_normals(voxelize(cloud, self.grid_size, rng), cloud.coord)
        pieces = Pieces(voxels, self.cells)
        sample = {"voxels": voxels, "pieces": pieces, "features": self.features, "whole": cloud}
        about |= {"cells": len(voxels.index), "pieces": len(pieces)}
        return Frame(sample, paint_cloud(cloud.coord, _given_colors(cloud)), about)

    def _with_normals(self, voxels: Voxels, coord: Array) -> Voxels:
        """With normals, estimated if the network wants some that the file does not have: towards the middle of a scene,
        away from that of an object."""
        if "normal" not in self.features or voxels.cloud.normal is not None:
            return voxels
        middle = (coord.min(0) + coord.max(0)) / 2
        normal = estimate_normals(coord, voxels.index, middle, away=self.kind == "object")
        return replace(voxels, cloud=replace(voxels.cloud, normal=normal))

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.kind == "scene":
            return {"scenes": list(samples)}
        batch: dict[str, Any] = {name: torch.cat([sample[name] for sample in samples]) for name in PACKED}
        batch["offset"] = torch.tensor([len(sample["coord"]) for sample in samples]).cumsum(0)
        return batch


def piece_batch(piece: Piece, features: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """What a network takes of a piece."""
    batch = {name: value.to(device) for name, value in tensors(piece.cloud, features).items()}
    return {**batch, "offset": torch.tensor([len(piece.index)], device=device)}


class PointClasses(View):
    """The class of each point. Answers are the classes that some point got, the most frequent first.

    Beyond answers: labels int16 (n,), UNSURE where no class is as likely as the threshold asks, and scores float32
    (n,), the probability of the best class.
    """

    key = "classes"

    def read(
        self, model: nn.Module, batch: Batch, frames: Sequence[Frame]
    ) -> Iterator[tuple[list[dict[str, Any]], Any]]:
        if "scenes" not in batch:
            raise PredictError(f"{type(model).__name__} takes no point clouds, which alone can be segmented here")
        if self.names is None:
            raise PredictError("the run does not say the names of its classes: train it again")
        for sample, frame in zip(batch["scenes"], frames, strict=True):
            yield self._scene(model, sample, frame)

    def answers(self, model: nn.Module, batch: Batch, frames: Sequence[Frame]) -> list[list[dict[str, Any]]]:
        return [answers for answers, _ in self.read(model, batch, frames)]

    def _scene(self, model: nn.Module, sample: Mapping[str, Any], frame: Frame) -> Answered:
        voxels: Voxels = sample["voxels"]
        device = next(model.parameters()).device
        given = sample["whole"].segment
        if given is not None:
            check_labels(given, len(self.names or ()))
        best, score = np.empty(len(voxels.index), np.int16), np.empty(len(voxels.index), np.float32)
        for piece in sample["pieces"]:
            logits = answer(model, piece_batch(piece, sample["features"], device))[: piece.count]
            found = logits.float().softmax(-1).max(-1)
            own = piece.index[: piece.count]
            best[own], score[own] = found.indices.cpu().numpy(), found.values.cpu().numpy()
        if not np.isfinite(score).all():
            raise FormatError("the network's answers to this cloud are not finite; check its unit and colours")
        best[score < self.threshold] = UNSURE
        labels, scores = best[voxels.inverse], score[voxels.inverse]
        extra = {"cells": best, "cell_scores": score, "labels": labels, "scores": scores, **self._judge(given, labels)}
        colors = np.array(class_colors(len(self.names or ())), np.uint8)
        extra["picture"] = paint_cloud(sample["whole"].coord, colors[labels])
        return self._summary(labels, scores, extra), extra

    def _judge(self, given: Array | None, labels: Array) -> dict[str, Any]:
        """Metrics of a cloud whose labels are known; classes that are neither there nor answered do not count."""
        if given is None:
            return {}
        classes, judged = len(self.names or ()), given != IGNORED
        right = judged & (labels == given)
        there, answered, both = (
            np.bincount(values, minlength=classes)
            for values in (given[judged], labels[judged & (labels != UNSURE)], given[right])
        )
        union = there + answered - both
        iou = both / np.maximum(union, 1)
        metrics = {"labelled": int(judged.sum()), "accuracy": round(float(right.sum() / max(1, judged.sum())), 6)}
        metrics["miou"] = round(float(iou[union > 0].mean()) if union.any() else 0.0, 6)
        return {"metrics": metrics, "iou": {c: round(float(iou[c]), 6) for c in np.flatnonzero(union).tolist()}}

    def _summary(self, labels: Array, scores: Array, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = []
        for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
            mine = labels == label
            entry = {"class": int(label), "name": "unsure" if label == UNSURE else self.name(int(label))}
            entry |= {"points": int(count), "share": round(float(count / len(labels)), 6)}
            entry["score"] = round(float(scores[mine].mean()), 6)
            if label in extra.get("iou", {}):
                entry["iou"] = extra["iou"][label]
            found.append(entry)
        return sorted(found, key=lambda entry: -entry["points"])

    def draw(self, picture: Image, answers: Sequence[Mapping[str, Any]]) -> Image:
        return drawing.add_bars(picture, [(found["name"], found["share"]) for found in answers[:5]], 5)


def _rgb(label: int) -> tuple[int, int, int]:
    """The colour of a class."""
    if label == UNSURE:
        return (150, 150, 150)
    code = drawing.COLOURS[label % len(drawing.COLOURS)].lstrip("#")
    red, green, blue = (int(code[i : i + 2], 16) for i in (0, 2, 4))
    if label >= len(drawing.COLOURS):  # further classes are lighter
        red, green, blue = ((value + 255) // 2 for value in (red, green, blue))
    return red, green, blue


def class_colors(count: int) -> list[tuple[int, int, int]]:
    """Colours of classes, and of UNSURE points at the end."""
    return [_rgb(label) for label in [*range(count), UNSURE]]


def _given_colors(cloud: Cloud) -> Array:
    """Colours of the file or, without these, shades of grey by height."""
    if cloud.color is not None:
        return cloud.color
    z = cloud.coord[:, 2]
    shade = (60 + 150 * (z - z.min()) / max(float(np.ptp(z)), 1e-9)).astype(np.uint8)
    return np.stack([shade] * 3, 1)


def paint_cloud(coord: Array, colors: Array, height: int = 420, width: int = 560) -> Tensor:
    """uint8 (3, H, W): points from above and aside; near ones hide far ones."""
    step = -(-len(coord) // PAINTED)
    coord, colors = coord[::step].astype(np.float64), colors[::step]
    coord = coord - (coord.min(0) + coord.max(0)) / 2
    turn, tilt = np.pi / 5, np.pi / 5
    x = coord[:, 0] * np.cos(turn) - coord[:, 1] * np.sin(turn)
    away = coord[:, 0] * np.sin(turn) + coord[:, 1] * np.cos(turn)
    y = coord[:, 2] * np.cos(tilt) + away * np.sin(tilt)
    depth = away * np.cos(tilt) - coord[:, 2] * np.sin(tilt)
    zoom = min((width - 20) / max(float(np.ptp(x)), 1e-9), (height - 20) / max(float(np.ptp(y)), 1e-9))
    left = ((x - (x.min() + x.max()) / 2) * zoom + width / 2).astype(np.int64)
    top = (height / 2 - (y - (y.min() + y.max()) / 2) * zoom).astype(np.int64)
    side = 3 if len(coord) < 20_000 else 2
    order = np.argsort(-depth, kind="stable")  # the nearest are drawn last
    page = np.full((height, width, 3), 255, np.uint8)
    dy, dx = np.divmod(np.arange(side * side), side)
    rows, cols = top[order, None] + dy, left[order, None] + dx
    page[rows.clip(0, height - 1), cols.clip(0, width - 1)] = colors[order, None]
    return torch.from_numpy(page.transpose(2, 0, 1).copy())


register_source(INPUTS, PointFiles)
register_view("segmentation", PointClasses)
