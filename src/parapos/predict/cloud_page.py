"""How a predicted cloud is written: a page to turn it, which needs nothing but itself, and a coloured PLY file.

m occupied cells; the page shows one point of each, or SHOWN of them. Attention comes along for some queries of each
block, evenly spread: the page takes the one nearest to the point that is picked.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.pieces import Pieces, Voxels
from ..data.readers import ply
from ..models.ptv3 import PointTransformerV3
from ..models.ptv3.look import ancestors, strongest, watch_blocks
from ..tasks.base import answer
from . import Prediction
from .albums import Album, register_album
from .points import UNSURE, class_colors, piece_batch

Array = np.ndarray[Any, Any]
SHOWN = 120_000  # points of a page
TOP = 48  # keys of a query
PAIRS = 1_200_000  # queries times keys of all blocks together


class CloudPage(Album):
    """<name>.html and, where points have classes, <name>.ply."""

    suffix = ".html"

    def __init__(self, stem: Path, title: str) -> None:
        super().__init__(stem, title)
        self._paths = [self.path]

    @property
    def paths(self) -> list[Path]:
        return self._paths

    def add(self, prediction: Prediction) -> None:
        self.path.write_text(make_page(prediction, self.title), encoding="utf-8")
        if "labels" in prediction.extra:
            path = self.path.with_name(f"{self.path.stem}.ply")
            write_ply(path, prediction)
            self._paths = [self.path, path]


def write_ply(path: Path, prediction: Prediction) -> None:
    """All points of the file in the colours of their classes, with `prediction`, `score` and, if known, `label`."""
    cloud, labels = prediction.frame.sample["whole"], prediction.extra["labels"]
    colors = np.array(class_colors(len(prediction.view.names or ())), np.uint8)[labels]
    columns = {axis: np.ascontiguousarray(cloud.coord[:, i], np.float32) for i, axis in enumerate("xyz")}
    columns |= {name: colors[:, i] for i, name in enumerate(("red", "green", "blue"))}
    columns |= {"prediction": labels, "score": prediction.extra["scores"]}
    if cloud.segment is not None:
        columns["label"] = cloud.segment.astype(np.int16)
    ply.write(path, columns, form="binary_little_endian")


def make_page(prediction: Prediction, title: str) -> str:
    """The HTML page of a cloud."""
    voxels: Voxels = prediction.frame.sample["voxels"]
    count, names = len(voxels.index), prediction.view.names or []
    shown = np.arange(count)
    if count > SHOWN:
        shown = np.sort(np.random.default_rng(0).permutation(count)[:SHOWN])
    coord = voxels.cloud.coord[shown]
    middle = (coord.min(0) + coord.max(0)) / 2
    arrays: dict[str, Array] = {"coord": (coord - middle).astype("<f4")}
    if voxels.cloud.color is not None:
        arrays["color"] = voxels.cloud.color[shown].astype(np.uint8)
    if "cells" in prediction.extra:
        arrays["prediction"] = prediction.extra["cells"][shown].astype("<i2")
        arrays["score"] = np.rint(prediction.extra["cell_scores"][shown] * 255).astype(np.uint8)
        if voxels.cloud.segment is not None:
            arrays["label"] = voxels.cloud.segment[shown].astype("<i2")
    about = {
        "title": title,
        "key": prediction.view.key,
        "answers": prediction.answers,
        "about": {**prediction.frame.about, **prediction.extra.get("metrics", {})},
        "names": names,
        "colors": [list(color) for color in class_colors(len(names))],
        "unsure": UNSURE,
        "cells": count,
        "middle": middle.tolist(),
        "levels": 0,
        "layers": [],
    }
    if isinstance(prediction.model, PointTransformerV3):
        _add_attention(prediction.model, prediction.frame.sample, shown, arrays, about)
    return _fill(about, arrays)


def _add_attention(
    model: PointTransformerV3, sample: Mapping[str, Any], shown: Array, arrays: dict[str, Array], about: dict[str, Any]
) -> None:
    """level<i>: the point of stage i that stands for each shown point; queries, keys and weights of each block."""
    device = next(model.parameters()).device
    count = len(sample["voxels"].index)
    levels = len(model.backbone.enc)
    groups = np.zeros((levels, count), np.int64)
    starts = np.zeros(levels, np.int64)  # numbers that earlier pieces took
    layers: dict[str, list[tuple[Array, Array, Array]]] = {}
    level_of: dict[str, int] = {}
    pieces = len(sample.get("pieces", [sample]))
    with watch_blocks(model) as blocks:
        for batch, index, own in _batches(sample, device):
            answer(model, batch)
            stages = list({seen.stage.level: seen.stage for seen in blocks}.values())
            local = [numbers.cpu().numpy() for numbers in ancestors(stages)]
            for level, numbers in enumerate(local):
                groups[level, index[:own]] = index[:own] if level == 0 else numbers[:own] + starts[level]
            queries = max(1, PAIRS // (TOP * len(blocks) * pieces))
            for seen in blocks:
                level = level_of.setdefault(seen.name, seen.stage.level)
                asked, keys, weights = (x.cpu().numpy() for x in strongest(seen, queries, TOP))
                mine = np.isin(asked, local[level][:own])
                numbers = index if level == 0 else starts[level] + np.arange(len(seen.x))
                layers.setdefault(seen.name, []).append((numbers[asked[mine]], numbers[keys[mine]], weights[mine]))
            starts += [len(stage.cells) for stage in stages]
    about["levels"] = levels
    for level in range(levels):
        arrays[f"level{level}"] = groups[level, shown].astype("<i4")
    for number, (name, parts) in enumerate(layers.items()):
        queries_, keys_, weights_ = (np.concatenate(part) for part in zip(*parts, strict=True))
        arrays[f"queries{number}"], arrays[f"keys{number}"] = queries_.astype("<i4"), keys_.astype("<i4")
        arrays[f"weights{number}"] = np.rint(weights_ * 65535).astype("<u2")
        about["layers"].append({"name": name, "level": level_of[name], "top": keys_.shape[1]})


def _batches(sample: Mapping[str, Any], device: torch.device) -> Iterator[tuple[dict[str, Any], Array, int]]:
    """What the network takes, the cells that it is about, and how many of them it is asked about."""
    if "pieces" in sample:
        pieces: Pieces = sample["pieces"]
        for piece in pieces:
            yield piece_batch(piece, sample["features"], device), piece.index, piece.count
        return
    batch = {name: sample[name].to(device) for name in ("feat", "coord", "grid_coord")}
    count = len(sample["voxels"].index)
    yield {**batch, "offset": torch.tensor([count], device=device)}, np.arange(count), count


def _fill(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """The page with its data. Nothing in names can end a script: `<` is written as its number."""
    page = files("parapos.predict").joinpath("cloud.html").read_text(encoding="utf-8")
    packed = {
        name: {"type": array.dtype.str[1:], "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}
        for name, array in arrays.items()
    }
    data = json.dumps({**about, "arrays": packed}, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return page.replace("/*DATA*/null", data)


register_album("cloud", CloudPage)
