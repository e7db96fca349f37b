"""Video Vision Transformer: tubelets of frames and pixels, and one attention over space and time. Any clip whose
frames and sides the tubelet divides.

B batch, C channels, T frames, K tubelets in time, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..positions import Positions, tubelet_positions
from .base import Classifier, at_least_one, check_scale, real


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each entry of x (B, K) so many times: (B, K times). ONNX keeps the batch of its export in repeat_interleave."""
    return x[..., None].expand(-1, -1, times).flatten(1)


class ViViT(Classifier):
    """tubelet: frames that a token spans; patch: pixels per side. Other keywords are those of `Classifier`."""

    inputs = ("video", "tubelets")
    embedding: nn.Conv3d

    def __init__(
        self,
        *,
        dim: int,
        tubelet: int = 2,
        patch: int = 16,
        channels: int = 3,
        num_classes: int = 101,
        **common: Any,
    ) -> None:
        at_least_one(tubelet=tubelet, patch=patch, channels=channels)
        size = (tubelet, patch, patch)
        embedding = nn.Conv3d(channels, dim, size, size)
        super().__init__(embedding, axes=3, patch=patch, dim=dim, num_classes=num_classes, **common)
        self.tubelet = tubelet

    def _encoded(
        self, videos: Tensor, lengths: Tensor | Sequence[int] | None, position_scale: float | Sequence[float]
    ) -> tuple[Tensor, Tensor | None]:
        """Encoded tokens and the mask (B, N without class token) of real ones."""
        if videos.ndim != 5 or videos.shape[1] != self.embedding.in_channels:
            raise ValueError(f"videos must be (B, {self.embedding.in_channels}, T, H, W), got {tuple(videos.shape)}")
        frames, height, width = videos.shape[2:]
        if frames % self.tubelet or not frames:
            raise ValueError(f"frames must be a multiple of the tubelet length {self.tubelet}, got {frames}")
        if height % self.patch or width % self.patch or not height or not width:
            raise ValueError(f"frame sides must be multiples of the patch size {self.patch}, got {height} x {width}")
        check_scale(position_scale, 3)
        steps = None if lengths is None else real(lengths, videos, frames // self.tubelet)  # (B, K)
        if steps is not None and self.encoder.encoding.compat is None:  # the release lets some padding speak
            hidden = ~_repeated(steps, self.tubelet)
            videos = videos.masked_fill(hidden[:, None, :, None, None], 0.0)  # it may hold anything, NaN too
        x = self.embedding(videos)  # (B, D, K, rows, cols)
        grid = x.shape[2:]
        r = tubelet_positions(*grid, cls=self.cls_token, scale=position_scale, device=x.device)
        mask = None if steps is None else _repeated(steps, grid[1] * grid[2])  # (B, N)
        positions = Positions(r[None], unplaced=self.cls_token == "unplaced")
        return self.encode(x.flatten(2).transpose(1, 2), positions, mask), mask

    def forward_features(
        self,
        videos: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        position_scale: float | Sequence[float] = 1.0,
    ) -> Tensor:
        """Encoded tokens (B, N, D), class token first if there is one; those of padding mean nothing."""
        return self._encoded(videos, lengths, position_scale)[0]

    def forward(
        self,
        videos: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        position_scale: float | Sequence[float] = 1.0,
    ) -> Tensor:
        """Logits (B, classes) of videos (B, C, T, H, W), of which the first lengths (B,) tubelets are real, or all.

        position_scale multiplies positions: one factor, or one each for t, y and x.
        """
        return self.classify(*self._encoded(videos, lengths, position_scale))
