"""Handwritten digits that come with scikit-learn: 1797 grey images of 8 x 8, drawn at any size. No download.

Small enough to train on in seconds, and a real test of resolution: the same stroke at 32 and at 128 pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling import Key, sample_seed
from .transforms import Size, sides

SPLITS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}  # tenths


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How a training digit is varied: turned by up to `turn` degrees, shifted by up to `shift` of its side in x and y,
    and scaled by a factor from 1 - `zoom` to 1 + `zoom`, each drawn evenly. Then a square anywhere in the picture is
    cut out and enlarged; `area` is the range of its share of the picture."""

    turn: float = 10.0
    shift: float = 0.06
    zoom: float = 0.1
    area: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name, most in (("turn", 180), ("shift", 1), ("zoom", 0.9)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 0 to {most}, got {getattr(self, name)!r}")
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area must be two numbers above 0 and up to 1, the smaller first, got {self.area!r}")


class Digits:
    """A split of the digits as float images (3, height, width) in [0, 1], with all three channels alike.

    Of every ten samples of a class, in the order of the whole set, seven are in "train", one in "val", two in "test".
    """

    classes = 10
    class_names = tuple("0123456789")
    preprocessing: ClassVar = {"mean": 0.0, "scale": 1.0}

    def __init__(self, split: str, *, size: Size = 32, seed: int = 0, augment: Augment | None = None) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        data = load_digits()
        seen, rows = [0] * self.classes, []
        for row, label in enumerate(data.target.tolist()):
            if seen[label] % 10 in SPLITS[split]:
                rows.append(row)
            seen[label] += 1
        self.images = torch.tensor(data.images[rows], dtype=torch.float32) / 16  # (N, 8, 8)
        self.labels: list[int] = data.target[rows].tolist()
        self.size, self.seed = sides(size), seed
        self.augment = (augment or Augment()) if split == "train" else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        theta = torch.eye(2, 3)
        if self.augment is not None:
            draws = torch.rand(7, generator=torch.Generator().manual_seed(sample_seed(self.seed, epoch, index)))
            theta = _affine(self.augment, (2 * draws - 1).tolist())
        grid = F.affine_grid(theta[None], [1, 1, *self.size], align_corners=False)
        image = F.grid_sample(self.images[index][None, None], grid, align_corners=False, padding_mode="border")
        return {"image": image[0].expand(3, -1, -1), "label": self.labels[index], "id": index}


def _affine(augment: Augment, draws: list[float]) -> Tensor:
    """(2, 3): from where in the picture, with sides from -1 to 1, each point of the result is taken."""
    turn, zoom, right, down, share, x, y = draws
    angle, factor = math.radians(augment.turn * turn), 1 / (1 + augment.zoom * zoom)
    cos, sin = factor * math.cos(angle), factor * math.sin(angle)
    low, high = augment.area
    side = math.sqrt(low + (high - low) * (1 + share) / 2)
    x, y = (1 - side) * x, (1 - side) * y
    return torch.tensor(
        [
            [side * cos, side * -sin, cos * x - sin * y - 2 * augment.shift * right],
            [side * sin, side * cos, sin * x + cos * y - 2 * augment.shift * down],
        ]
    )
