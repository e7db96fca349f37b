"""Objects of points with one label each, as samples {"feat", "coord", "grid_coord", "label", "id"}."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .augment.points import PointAugment, vary
from .points import PACKED, Cloud, check_features, grid_sample, normalize, scaled, tensors
from .sampling import Key, sample_seed

Array = np.ndarray[Any, Any]
VOTING = (0.8, 1.2)  # range of the factors of each axis in views for voting


@dataclass(frozen=True, kw_only=True)
class ObjectAugment(PointAugment):
    """ModelNet40's variation: other sizes along each axis, a shift, and points in random order."""

    dropout: float = 0.0
    turn: float = 0.0
    tilt: float = 0.0
    scale: tuple[float, float] = (0.7, 1.5)
    anisotropic: bool = True
    shift: float = 0.2
    flip: float = 0.0
    jitter: float = 0.0
    elastic: float = 0.0
    shuffle: bool = True


class Objects:
    """Objects by their labels, each read by `load(index)`: coordinates and normals (n, 6), which are not written to.

    augment: how samples are varied, which makes them training samples. votes: how many views of an object a model is
    asked about, the first of which is the object itself; their probabilities are added. points and sampling: how many
    points an object has and how they were chosen, which a run keeps for files of its user.
    """

    packed = PACKED

    def __init__(
        self,
        names: Sequence[str],
        labels: Sequence[int],
        load: Callable[[int], Array],
        class_names: Sequence[str],
        *,
        grid_size: float,
        features: Sequence[str],
        augment: PointAugment | None,
        votes: int = 1,
        seed: int = 0,
        points: int | None = None,
        sampling: str = "random",
    ) -> None:
        if not grid_size > 0 or votes < 1:
            raise ValueError(f"expected a positive grid_size and votes, got {grid_size} and {votes}")
        self.names, self.labels, self.load = list(names), list(labels), load
        self.class_names, self.classes = tuple(class_names), len(class_names)
        self.grid_size, self.features = grid_size, check_features(tuple(features))
        self.augment, self.votes, self.seed = augment, votes, seed
        self.preprocessing = {"cloud": "object", "grid_size": grid_size, "features": list(self.features)}
        self.preprocessing |= {} if points is None else {"points": points, "sampling": sampling}

    def __len__(self) -> int:
        return len(self.labels)

    def as_judged(self) -> Objects:
        """The same objects, not varied."""
        self.augment = None
        return self

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        epoch = epoch if self.augment is not None else 0  # what is judged is always the same
        rng = np.random.default_rng(sample_seed(self.seed, epoch, index))
        points = self.load(index)
        cloud = Cloud(normalize(points[:, :3].astype(np.float64)), normal=points[:, 3:])
        if self.augment is not None:
            views = [vary(cloud, rng, self.augment)]
        else:
            views = [cloud, *(scaled(cloud, rng.uniform(*VOTING, 3)) for _ in range(self.votes - 1))]
        found = [self._voxels(view, rng) for view in views]
        sample: dict[str, Any] = {name: torch.cat([one[name] for one in found]) for name in PACKED}
        if self.votes > 1 and self.augment is None:
            sample["views"] = torch.tensor([len(one["coord"]) for one in found])
        return {**sample, "label": self.labels[index], "id": index}

    def _voxels(self, cloud: Cloud, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        index, cell, _ = grid_sample(cloud.coord, self.grid_size, rng)
        cloud = replace(cloud.select(index), cell=cell)
        if self.augment is not None and self.augment.shuffle:
            cloud = cloud.select(rng.permutation(len(cloud)))
        return tensors(cloud, self.features)
