"""Scenes of labelled points as samples: varied and cut for training, or whole for one of three evaluations.

A training sample is one point per cell: {"feat", "coord", "grid_coord", "segment", "id"}. All n points are judged:

    "quick"         one point per cell; every point gets the answer of its cell: "inverse" (n,) and "labels" (n,)
    "precise"       every point is asked, in as many passes as the fullest cell has points: "cloud" and "labels"
    "precise_tta"   the same for 13 views of the scene, turned, scaled and flipped
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import FormatError
from .augment.points import PointAugment, vary
from .points import (
    IGNORED,
    PACKED,
    Cloud,
    center_shift,
    check_features,
    flipped,
    fragments,
    grid_sample,
    scaled,
    sphere_crop,
    tensors,
    turned,
)
from .sampling import Key, sample_seed

EVALUATIONS = ("quick", "precise", "precise_tta")
SCALES, TURNS = (1.0, 0.95, 1.05), (0.0, 0.5, 1.0, 1.5)  # of the views; turns in pi


class Scenes:
    """Scenes by their names, each read by `load(index)`, whose arrays are not written to.

    augment: how samples are varied, which makes them training samples; None judges them by `evaluation`. point_max:
    most points of a training sample; others are cut off around a random one. submission: the number that each class has
    in files for a benchmark.
    """

    packed = (*PACKED, "segment")
    listed = ("inverse", "labels", "cloud.coord", "cloud.color", "cloud.normal")

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[int], Cloud],
        class_names: Sequence[str],
        *,
        grid_size: float,
        point_max: int,
        features: Sequence[str],
        augment: PointAugment | None,
        evaluation: str = "quick",
        seed: int = 0,
        submission: Sequence[int] | None = None,
    ) -> None:
        if evaluation not in EVALUATIONS:
            raise ValueError(f"evaluation must be one of {', '.join(EVALUATIONS)}, got {evaluation!r}")
        if not grid_size > 0 or point_max < 1:
            raise ValueError(f"expected a positive grid_size and point_max, got {grid_size} and {point_max}")
        self.names, self.load, self.class_names = list(names), load, tuple(class_names)
        self.classes, self.submission = len(self.class_names), submission
        self.grid_size, self.point_max, self.features = grid_size, point_max, check_features(tuple(features))
        self.augment, self.evaluation, self.seed = augment, evaluation, seed
        self.preprocessing = {"cloud": "scene", "grid_size": grid_size, "features": list(self.features)}

    def __len__(self) -> int:
        return len(self.names)

    def as_judged(self) -> Scenes:
        """The same scenes, not varied."""
        self.augment = None
        return self

    def cloud(self, index: int) -> Cloud:
        """A scene with x and y about 0 and the lowest point at z = 0, colours from 0 to 255."""
        cloud = self.load(index)
        if not len(cloud):
            raise FormatError(f"{self.names[index]}: no points, expected a scene")
        labels = cloud.segment
        if labels is not None and (labels.min() < IGNORED or labels.max() >= self.classes):
            told = f"labels from {labels.min()} to {labels.max()}, expected -1 to {self.classes - 1}"
            raise FormatError(f"{self.names[index]}: {told}")
        return replace(cloud, coord=center_shift(cloud.coord.astype(np.float64)))

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        epoch = epoch if self.augment is not None else 0  # what is judged is always the same
        rng = np.random.default_rng(sample_seed(self.seed, epoch, index))
        try:
            return {**self._sample(self.cloud(index), rng), "id": index}
        except FormatError as error:
            told = str(error)
            raise FormatError(told if self.names[index] in told else f"{self.names[index]}: {told}") from None

    def _sample(self, cloud: Cloud, rng: np.random.Generator) -> dict[str, Any]:
        labels = np.full(len(cloud), IGNORED) if cloud.segment is None else cloud.segment.astype(np.int64)
        if self.augment is not None:
            cloud = vary(replace(cloud, segment=labels), rng, self.augment)
            index, cell, _ = grid_sample(cloud.coord, self.grid_size, rng)
            cloud = replace(cloud.select(index), cell=cell)
            cloud = cloud.select(sphere_crop(cloud.coord, self.point_max, rng))
            cloud = cloud.select(rng.permutation(len(cloud))) if self.augment.shuffle else cloud
            assert cloud.segment is not None
            return {**self._tensors(cloud), "segment": torch.from_numpy(cloud.segment)}
        if self.evaluation == "quick":
            index, cell, inverse = grid_sample(cloud.coord, self.grid_size, rng)
            sample = self._tensors(replace(cloud.select(index), cell=cell))
            return {**sample, "inverse": torch.from_numpy(inverse), "labels": torch.from_numpy(labels)}
        arrays = {"coord": cloud.coord, "color": cloud.color, "normal": cloud.normal}
        held = {key: torch.from_numpy(np.array(value)) for key, value in arrays.items() if value is not None}
        return {"cloud": held, "labels": torch.from_numpy(labels)}

    def _tensors(self, cloud: Cloud) -> dict[str, Tensor]:
        return tensors(replace(cloud, coord=center_shift(cloud.coord, z=False)), self.features)

    def views(self, cloud: Cloud) -> Iterator[Cloud]:
        """The cloud, and what else is asked of it with "precise_tta"."""
        if self.evaluation != "precise_tta":
            yield cloud
            return
        for scale in SCALES:
            for turn in TURNS:
                yield scaled(turned(cloud, 2, np.pi * turn), scale)
        yield flipped(cloud, (0, 1))

    def pieces(self, cloud: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """What a model is asked about a precise sample's `cloud`, each a batch of its own, with the points (m,) that it
        is about. One piece at a time is in memory."""
        device = cloud["coord"].device
        whole = Cloud(**{key: value.cpu().numpy() for key, value in cloud.items()})
        for view in self.views(whole):
            for index, cell in fragments(view.coord, self.grid_size):
                piece = self._tensors(replace(view.select(index), cell=cell))
                piece["offset"] = torch.tensor([len(index)])
                yield {key: value.to(device) for key, value in piece.items()}, torch.from_numpy(index).to(device)
