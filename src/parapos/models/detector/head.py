"""The head of a detector: two branches that see the same maps and learn from different assignments.

B batch, F width of the pyramid, C classes, R bins per side. The one-to-many branch teaches the network, the one-to-one
branch answers without duplicates; its gradient ends at the maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .boxes import RawDetections
from .neck import keep

_REFERENCE_SIDE = 640  # the side of an image for which the first class scores are set, whatever the input is


class ConvNorm(nn.Module):
    """Convolution without bias, BatchNorm over real cells, SiLU. What is off the image is and stays zero."""

    def __init__(self, channels: int, out: int, kernel: int, groups: int, eps: float, momentum: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=eps, momentum=momentum)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.conv(x)
        if mask is None or not self.training:
            return self.act(keep(self.norm(x), mask))
        real = x.permute(0, 2, 3, 1)[mask]  # (n, out): statistics are those of the images, not of their padding
        real = self.norm(real[..., None, None])[..., 0, 0]
        full = real.new_zeros(*mask.shape, real.shape[1]).index_put((mask,), real)
        return self.act(full.permute(0, 3, 1, 2))


class Stem(nn.Module):
    """Layers of one map, and the 1 x 1 convolution to its outputs."""

    def __init__(self, layers: Sequence[ConvNorm], channels: int, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.out = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


class Branch(nn.Module):
    """A stem for boxes and one for classes, per map."""

    def __init__(
        self, num_classes: int, dim: int, reg_max: int, strides: Sequence[int], eps: float, momentum: float
    ) -> None:
        super().__init__()
        small, wide = max(16, dim // 4, 4 * reg_max), max(dim, min(num_classes, 100))

        def layer(channels: int, out: int, kernel: int, groups: int = 1) -> ConvNorm:
            return ConvNorm(channels, out, kernel, groups, eps, momentum)

        box = [Stem([layer(dim, small, 3), layer(small, small, 3)], small, 4 * reg_max) for _ in strides]
        cls = []
        for _ in strides:
            layers = [layer(dim, dim, 3, dim), layer(dim, wide, 1), layer(wide, wide, 3, wide), layer(wide, wide, 1)]
            cls.append(Stem(layers, wide, num_classes))
        for stride, a, b in zip(strides, box, cls, strict=True):
            nn.init.constant_(a.out.bias, 1.0)  # type: ignore[arg-type]
            prior = math.log(5 / num_classes / (_REFERENCE_SIDE / stride) ** 2)
            nn.init.constant_(b.out.bias, prior)  # type: ignore[arg-type]
        self.box, self.cls = nn.ModuleList(box), nn.ModuleList(cls)

    def forward(self, maps: Sequence[Tensor], masks: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """(B, 4 R + C, h, w) of each map (B, F, h, w)."""
        return tuple(
            torch.cat([stem(x, None if masks is None else masks[level]) for stem in (box, cls)], dim=1)
            for level, (x, box, cls) in enumerate(zip(maps, self.box, self.cls, strict=True))
        )


class DualHead(nn.Module):
    """norm_eps and norm_momentum are those of BatchNorm. Both branches start with the same weights."""

    def __init__(
        self,
        num_classes: int,
        dim: int = 256,
        reg_max: int = 16,
        strides: Sequence[int] = (8, 16, 32),
        norm_eps: float = 1e-5,
        norm_momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.strides = tuple(strides)
        self.o2m = Branch(num_classes, dim, reg_max, strides, norm_eps, norm_momentum)
        self.o2o = Branch(num_classes, dim, reg_max, strides, norm_eps, norm_momentum)
        self.o2o.load_state_dict(self.o2m.state_dict())  # unlike deepcopy, also for tensors without memory
        self.bins = nn.Parameter(torch.arange(float(reg_max)), requires_grad=False)

    def forward(
        self, maps: Sequence[Tensor], masks: Sequence[Tensor] | None = None, deploy: bool = False
    ) -> RawDetections:
        """maps (B, F, h, w) and their masks (B, h, w), one per stride. deploy: without the one-to-many branch."""
        o2m = () if deploy else self.o2m(maps, masks)
        o2o = self.o2o([x.detach() for x in maps], masks)
        mask = None if masks is None else torch.cat([level.flatten(1) for level in masks], dim=1)
        return RawDetections(o2m, o2o, self.strides, self.bins, mask)
