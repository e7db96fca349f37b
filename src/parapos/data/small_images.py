"""Small pictures that lie in memory as a whole, drawn at any size: what Fashion-MNIST and CIFAR-10 share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling import Key, sample_seed
from .transforms import Size, sides


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How a training picture is varied: a part of its own shape anywhere in it is cut out and enlarged, `area` being
    the range of its share of the picture; and it is mirrored left to right with probability `flip`."""

    area: tuple[float, float] = (1.0, 1.0)
    flip: float = 0.5

    def __post_init__(self) -> None:
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area must be two numbers above 0 and up to 1, the smaller first, got {self.area!r}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be from 0 to 1, got {self.flip!r}")


class SmallImages:
    """Samples {"image": float (3, height, width) in [0, 1], "label", "id"} of pictures uint8 (N, 1 or 3, H, W).

    size: height and width, or one number for both. augment: for "train", which is varied by the default without one.
    few: how many pictures of each split are taken, from the first on, 0 for all.
    """

    preprocessing: ClassVar = {"mean": 0.0, "scale": 1.0}

    def __init__(
        self,
        split: str,
        images: Tensor,
        labels: Sequence[int],
        *,
        size: Size,
        seed: int,
        augment: Augment | None,
        few: Mapping[str, int],
    ) -> None:
        if not 0 <= few[split] <= len(labels):
            raise ValueError(f"{split}_images must be from 0 to {len(labels)}, got {few[split]}")
        count = few[split] or len(labels)
        self.images, self.labels = images[:count].clone(), list(labels[:count])
        self.size, self.seed = sides(size), seed
        self.augment = (augment or Augment()) if split == "train" else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | Key]) -> list[dict[str, Any]]:
        """Many samples at once, which is faster; each is what it would be alone, to the bit."""
        if not keys:
            return []
        indices = []
        theta = torch.eye(2, 3).repeat(len(keys), 1, 1)
        for place, key in enumerate(keys):
            index, epoch = key if isinstance(key, Key) else (key, 0)
            index = range(len(self))[index]
            indices.append(index)
            if self.augment is not None:
                theta[place] = _crop(self.augment, sample_seed(self.seed, epoch, index))
        grid = F.affine_grid(theta, [len(keys), 1, *self.size], align_corners=False)
        pictures = self.images[indices].float() / 255
        drawn = F.grid_sample(pictures, grid, align_corners=False, padding_mode="border").expand(-1, 3, -1, -1)
        return [
            {"image": image, "label": self.labels[index], "id": index}
            for index, image in zip(indices, drawn.unbind(), strict=True)
        ]


def check_split(split: str, few: Mapping[str, int]) -> None:
    if split not in few:
        raise ValueError(f"split must be one of {', '.join(few)}, got {split!r}")


def _crop(augment: Augment, seed: int) -> Tensor:
    """(2, 3): from where in the picture, with sides from -1 to 1, each point of the result is taken."""
    share, x, y, mirror = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    low, high = augment.area
    side = math.sqrt(low + (high - low) * share)
    x, y = (1 - side) * (2 * x - 1), (1 - side) * (2 * y - 1)
    return torch.tensor([[-side if mirror < augment.flip else side, 0.0, x], [0.0, side, y]])
