"""What detectors of images and of events share: a map of encoded tokens, the pyramid and the head on it.

B batch, D width of the encoder, C classes, k detections.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..base import Backbone, at_least_one
from .boxes import RawDetections, postprocess
from .head import DualHead
from .neck import Neck, pyramid_masks


class Detector(Backbone):
    """neck: "lite" or "vitdet", neck_dim wide. reg_max: bins per side of a box, so a side is at most 2 (reg_max - 1)
    cells long. norm_eps and norm_momentum: of the BatchNorm of the head. Other arguments are those of `Backbone`; there
    is no class token.
    """

    def __init__(
        self,
        embedding: nn.Module,
        *,
        dim: int,
        patch: int,
        num_classes: int,
        neck: str = "lite",
        neck_dim: int = 256,
        reg_max: int = 16,
        norm_eps: float = 1e-5,
        norm_momentum: float = 0.1,
        **common: Any,
    ) -> None:
        at_least_one(num_classes=num_classes, neck_dim=neck_dim)
        if reg_max < 2:
            raise ValueError(f"reg_max must be at least 2, got {reg_max}")
        if patch % 2:
            raise ValueError(f"patch of a detector must be even, its finest map has two cells per patch; got {patch}")
        super().__init__(embedding, patch=patch, dim=dim, **common)
        self.num_classes, self.reg_max, self.strides = num_classes, reg_max, (patch // 2, patch, 2 * patch)
        self.neck = Neck(dim, neck_dim, neck)
        self.head = DualHead(num_classes, neck_dim, reg_max, self.strides, norm_eps, norm_momentum)

    def from_map(self, x: Tensor, mask: Tensor | None = None, deploy: bool = False) -> RawDetections:
        """What the neck and the head say of a map (B, D, rows, cols) and of its cells that mask (B, rows, cols) has."""
        if min(x.shape[2:]) < 2:
            raise ValueError(f"a detector needs a grid of at least 2 x 2 patches, got {x.shape[2]} x {x.shape[3]}")
        masks = None if mask is None else pyramid_masks(mask)
        return self.head(self.neck(x, masks), masks, deploy)

    def detect(self, *inputs: Any, max_det: int = 100, **options: Any) -> Tensor:
        """Detections (B, k, 6) as of `postprocess`, k <= max_det; arguments are those of forward."""
        return postprocess(self(*inputs, deploy=True, **options), max_det)


class Deployed(nn.Module):
    """A detector whose forward gives detections: for export, and for whoever calls a module."""

    def __init__(self, net: Detector, max_det: int = 100) -> None:
        super().__init__()
        self.net, self.max_det = net, max_det

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net.detect(*inputs, max_det=self.max_det)
