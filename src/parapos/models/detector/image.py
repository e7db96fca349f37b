"""Detector of images over the encoder of a ViT. Any image size; images of several sizes in one padded batch.

B batch, C channels, D width. Cells beyond an image have no influence on it, in training neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..vit import PatchBackbone
from .base import Detector
from .boxes import RawDetections

MASK_PATCH = 16  # of masks of padded batches, where nothing else is said


class DetectorViT(PatchBackbone, Detector):
    """pad: whether sides that 2 x patch does not divide are padded; otherwise what is left over has no coarse cell.

    Other keywords are those of `PatchBackbone` and `Detector`.
    """

    inputs = ("image", "mask")

    def __init__(self, *, num_classes: int = 80, patch: int = 16, pad: bool = True, **common: Any) -> None:
        super().__init__(num_classes=num_classes, patch=patch, **common)
        self.pad = pad

    def forward(
        self, images: Tensor, mask: Tensor | None = None, position_scale: float = 1.0, deploy: bool = False
    ) -> RawDetections:
        """What both branches say of images (B, C, H, W) in [0, 1]; `postprocess` makes detections of it.

        mask (B, ceil(H / patch), ceil(W / patch)) is True for patches with pixels of the image, None if all have some:
        images of different sizes, padded with zeros at the right and below. position_scale multiplies positions.
        deploy: without the one-to-many branch.
        """
        if self.pad and images.ndim == 4:
            images, mask = self._padded(images, mask)
        tokens = self.forward_features(images, position_scale, mask)  # (B, rows cols, D)
        rows, cols = (side // self.patch for side in images.shape[2:])
        return self.from_map(tokens.transpose(1, 2).unflatten(2, (rows, cols)), mask, deploy)

    def _padded(self, images: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        height, width = images.shape[2:]
        below, right = (-side % (2 * self.patch) for side in (height, width))
        if not below and not right:
            return images, mask
        rows, cols = (-(-side // self.patch) for side in (height, width))
        if mask is None:
            mask = images.new_ones((len(images), rows, cols), dtype=torch.bool)
        elif mask.shape != (len(images), rows, cols):
            raise ValueError(f"mask must be boolean ({len(images)}, {rows}, {cols}), got {tuple(mask.shape)}")
        images = F.pad(images, (0, right, 0, below))
        shape = [side // self.patch for side in images.shape[2:]]
        return images, F.pad(mask, (0, shape[1] - cols, 0, shape[0] - rows))


def pad_images(images: Sequence[Tensor], patch: int = MASK_PATCH) -> tuple[Tensor, Tensor | None]:
    """A batch (B, C, H, W) of images (C, h, w), padded with zeros at the right and below to the largest sides, and the
    mask that a `DetectorViT` takes; None if all have one size."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    rows, cols = (-(-side // patch) for side in (height, width))
    mask = torch.zeros(len(images), rows, cols, dtype=torch.bool, device=batch.device)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : -(-image.shape[1] // patch), : -(-image.shape[2] // patch)] = True
    return batch, None if len({image.shape for image in images}) == 1 else mask
