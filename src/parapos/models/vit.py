"""Vision Transformer: patches, class token, encoder, classifier. Any image size that the patch divides.

B batch, C channels, N tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import Encoder
from ..positions import ClassToken, Positions, grid_positions


class ViT(nn.Module):
    """pool: "cls" or "mean" (then there is no class token). cls_position: "origin", "unplaced", or None for what the
    encoding prefers. Other keywords go to the encoder: encoding and its options, head_dim, qk_dim, kernel, strict."""

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        depth: int,
        mlp_dim: int,
        num_classes: int = 1000,
        patch: int = 16,
        channels: int = 3,
        pool: str = "cls",
        cls_position: str | None = None,
        drop_path: float = 0.1,
        encoding: str = "pape",
        **attention: Any,
    ) -> None:
        super().__init__()
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool must be 'cls' or 'mean', got {pool!r}")
        if cls_position not in (None, "origin", "unplaced"):
            raise ValueError(f"cls_position must be None, 'origin' or 'unplaced', got {cls_position!r}")
        if cls_position is not None and pool == "mean":
            raise ValueError("cls_position has no effect with pool='mean', which has no class token")
        for name, value in (("num_classes", num_classes), ("patch", patch), ("channels", channels)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if attention.pop("pos_dim", 2) != 2:
            raise ValueError("pos_dim of an image model is 2")
        self.patch, self.pool = patch, pool
        self.embedding = nn.Conv2d(channels, dim, patch, patch)
        self.encoder = Encoder(dim, depth, mlp_dim, drop_path, heads=heads, encoding=encoding, pos_dim=2, **attention)
        self.classifier = nn.Linear(dim, num_classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.constant_(self.classifier.bias, -math.log(num_classes))
        self.cls: nn.Parameter | None = None
        self.cls_token: ClassToken = False
        if pool == "cls":
            self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            choice = {None: self.encoder.encoding.cls_token, "origin": True, "unplaced": "unplaced"}
            self.cls_token = choice[cls_position]

    def forward_features(self, images: Tensor, position_scale: float = 1.0) -> Tensor:
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
        x = x.flatten(2).transpose(1, 2)  # (B, N, D)
        if self.cls is not None:
            x = torch.cat([self.cls.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        r = grid_positions(rows, cols, cls=self.cls_token, scale=position_scale, device=x.device)
        return self.encoder(x, Positions(r[None], unplaced=self.cls_token == "unplaced"))

    def forward(self, images: Tensor, position_scale: float = 1.0) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W). position_scale multiplies positions: position interpolation."""
        x = self.forward_features(images, position_scale)
        return self.classifier(x[:, 0] if self.cls is not None else x.mean(1))
