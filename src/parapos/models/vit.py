"""Vision Transformer: patches, class token, encoder, classifier. Any image size that the patch divides.

B batch, C channels, N tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..positions import Positions, grid_positions
from .base import Backbone, Classifier, at_least_one


class PatchBackbone(Backbone):
    """patch: pixels per side. Other keywords are those of the class that it is mixed with."""

    embedding: nn.Conv2d

    def __init__(self, *, dim: int, patch: int = 16, channels: int = 3, **common: Any) -> None:
        at_least_one(patch=patch, channels=channels)
        super().__init__(nn.Conv2d(channels, dim, patch, patch), axes=2, patch=patch, dim=dim, **common)

    def forward_features(self, images: Tensor, position_scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """Encoded tokens (B, N, D), class token first if there is one."""
        if images.ndim != 4 or images.shape[1] != self.embedding.in_channels:
            raise ValueError(f"images must be (B, {self.embedding.in_channels}, H, W), got {tuple(images.shape)}")
        height, width = images.shape[2:]
        if height % self.patch or width % self.patch or not height or not width:
            raise ValueError(f"image sides must be multiples of the patch size {self.patch}, got {height} x {width}")
        if not 0 < position_scale < math.inf:
            raise ValueError(f"position_scale must be positive and finite, got {position_scale}")
        x = self.embedding(images)  # (B, D, rows, cols)
        rows, cols = x.shape[2:]
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (x.shape[0], rows, cols)):
            want = f"boolean ({x.shape[0]}, {rows}, {cols}), True for patches that are real"
            raise ValueError(f"mask must be {want}, got {mask.dtype} {tuple(mask.shape)}")
        r = grid_positions(rows, cols, cls=self.cls_token, scale=position_scale, device=x.device)
        positions = Positions(r[None], unplaced=self.cls_token == "unplaced")
        return self.encode(x.flatten(2).transpose(1, 2), positions, None if mask is None else mask.flatten(1))


class ViT(PatchBackbone, Classifier):
    """Keywords are those of `PatchBackbone` and `Classifier`."""

    inputs = ("image",)

    def __init__(self, *, num_classes: int = 1000, patch: int = 16, **common: Any) -> None:
        super().__init__(num_classes=num_classes, patch=patch, **common)

    def forward(self, images: Tensor, position_scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W). position_scale multiplies positions: position interpolation.

        mask (B, rows, cols) is True for real patches: images of different sizes, padded to one at the right and below.
        """
        tokens = self.forward_features(images, position_scale, mask)
        return self.classify(tokens, None if mask is None else mask.flatten(1))
