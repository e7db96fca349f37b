"""UniTR's own position encoding: learned functions of window coordinates that queries and keys get added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ptv3.norm import BatchNorm
from .partition import Partition

SPACES = {"image": 2, "lidar": 2, "canvas": 3, "bev": 2}  # coordinates in each; the third is always 0


class Embedding(nn.Sequential):
    """Linear layer, norm, ReLU, linear layer, of coordinates (T, p)."""

    def __init__(self, axes: int, dim: int) -> None:
        super().__init__(nn.Linear(axes, dim), BatchNorm(dim), nn.ReLU(), nn.Linear(dim, dim))
        self.axes = axes

    def forward(self, r: Tensor) -> Tensor:
        """r: the first coordinates; others are 0."""
        return super().forward(nn.functional.pad(r, (0, self.axes - r.shape[-1])))


class LearnedPositions(nn.Module):
    """An embedding for each space, block and layer of a block in which tokens of that space are.

    Tokens keep the embedding of their own space in blocks that join the two, and get that of the joint space besides.
    """

    def __init__(self, dim: int, spaces: list[str], layers: int = 2) -> None:
        """spaces: the space in which each block forms its sets, "own" for each modality in its own."""
        super().__init__()
        self.spaces = spaces
        self.embeddings = nn.ModuleDict()
        for block, space in enumerate(spaces):
            for name in ("image", "lidar") if space == "own" else ("image", "lidar", space):
                for layer in range(layers):
                    self.embeddings[f"{name}{block}_{layer}"] = Embedding(SPACES[name], dim)

    def forward(self, block: int, layer: int, image: Partition, lidar: Partition, joint: Partition | None) -> Tensor:
        """(T, D). image, lidar: partitions of the layer's shift in their own spaces; joint: that of both together."""
        own = [self.embed(name, block, layer, part) for name, part in (("lidar", lidar), ("image", image))]
        added = torch.cat(own)
        return added if joint is None else added + self.embed(self.spaces[block], block, layer, joint)

    def embed(self, name: str, block: int, layer: int, partition: Partition) -> Tensor:
        return self.embeddings[f"{name}{block}_{layer}"](partition.positions.r[0])
