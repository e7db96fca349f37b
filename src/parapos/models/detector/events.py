"""Detector of events: the newest token of each patch, encoded among all others, stands on the grid of the sensor.

B batch, L tokens of the longest sample, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..event_vit import EventBackbone
from .base import Detector
from .boxes import RawDetections


def newest_on_grid(tokens: Tensor, x: Tensor, y: Tensor, mask: Tensor, rows: int, cols: int) -> Tensor:
    """(B, D, rows, cols): the last of the tokens (B, L, D) at column x and row y (B, L), zeros where there is none.

    Tokens are in the order of time; those that mask (B, L) does not have are left out. Only tokens that are seen get a
    gradient.
    """
    x, y = (value.long().masked_fill(~mask, 0) for value in (x, y))
    if not torch.compiler.is_compiling() and ((x < 0) | (y < 0) | (x >= cols) | (y >= rows)).any():
        told = f"x up to {int(x.max())}, y up to {int(y.max())}"
        raise ValueError(f"patches must lie on the grid of {rows} rows and {cols} columns, got {told}")
    order = torch.arange(tokens.shape[1], device=tokens.device).expand(mask.shape)
    last = order.new_full((len(tokens), rows * cols), -1)
    last = last.scatter_reduce(1, y * cols + x, torch.where(mask, order, -1), "amax")  # (B, cells)
    grid = tokens.gather(1, last.clamp(min=0)[..., None].expand(-1, -1, tokens.shape[2]))
    grid = torch.where(last[..., None] >= 0, grid, 0.0)
    return grid.transpose(1, 2).unflatten(2, (rows, cols))


class EventDetector(EventBackbone, Detector):
    """sensor: its height and width in pixels. Other keywords are those of `EventBackbone` and `Detector`."""

    def __init__(
        self,
        *,
        num_classes: int = 2,
        patch: int = 16,
        time_scale: float = 100_000.0,
        sensor: Sequence[int] = (240, 304),
        **common: Any,
    ) -> None:
        super().__init__(num_classes=num_classes, patch=patch, time_scale=time_scale, **common)
        if len(sensor) != 2 or any(type(side) is not int or side < 1 for side in sensor):
            raise ValueError(f"sensor must be its height and width in pixels, got {sensor}")
        self.sensor = tuple(sensor)
        self.grid = (-(-sensor[0] // patch), -(-sensor[1] // patch))  # rows, columns

    def forward(
        self,
        codes: Tensor,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        position_scale: float | Sequence[float] = 1.0,
        deploy: bool = False,
    ) -> RawDetections:
        """What both branches say of tokens, as of `EventViT`, in the order of time; t is their age, 0 at the moment
        that is asked for. deploy: without the one-to-many branch."""
        if not codes.shape[1]:  # attention needs a token, if only one that is padding
            codes = codes.new_zeros((len(codes), 1, max(1, codes.shape[2])))
            x, y, t = (value.new_zeros((len(codes), 1)) for value in (x, y, t))
            lengths = torch.zeros(len(codes), dtype=torch.long, device=codes.device)
        tokens, mask = self._encoded(codes, x, y, t, lengths, position_scale)
        return self.from_map(newest_on_grid(tokens, x, y, mask, *self.grid), deploy=deploy)
