"""The same convolution by spconv, a compiled library, where it is installed (`pip install spconv`, or spconv-cu126 and
the like for GPUs). Weights, results at shared cells and gradients are those of `SparseConv3d`.

It is asked for by name and never chosen by itself: a build that does not fit CUDA or PyTorch may end the process. Its
builds for the CPU have no backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .convolution import KernelMap, SparseConv3d


class SpConv3d(SparseConv3d):
    """As `SparseConv3d`. The library sums over neighbours; the centre and points that share a cell are ours."""

    def __init__(self, channels: int, out_channels: int, size: int, bias: bool = True) -> None:
        super().__init__(channels, out_channels, size, bias)
        try:
            import spconv.pytorch as library  # type: ignore[import-not-found]
        except ImportError as error:
            advice = "pip install spconv, or conv_backend='torch'"
            raise ImportError(f"conv_backend='spconv' needs the library: {error}; {advice}") from None
        layer = library.SubMConv3d(channels, out_channels, size, bias=False, indice_key=f"sites{size}")
        self._library: list[Any] = [library, layer]  # in a list: its weight is none of this module's

    def around(self, x: Tensor, weight: Tensor, neighbours: KernelMap) -> Tensor:
        library, layer = self._library
        on_cpu = x.device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise RuntimeError("spconv has no backward pass on the CPU; train with conv_backend='torch'")
        if on_cpu and math.prod(neighbours.sides) >= 2**31:
            told = f"a grid of {' x '.join(map(str, neighbours.sides))} cells"
            raise ValueError(f"{told} is too large for spconv on the CPU; take larger cells or conv_backend='torch'")
        middle = len(weight) // 2
        whole = torch.cat([weight[:middle], torch.zeros_like(weight[:1]), weight[middle:]])  # (k^3, C, C')
        whole = whole.permute(2, 0, 1).unflatten(1, [self.size] * 3).contiguous()  # (C', k, k, k, C)
        clouds = int(neighbours.cells[-1, 0]) + 1
        sites = library.SparseConvTensor(x, neighbours.cells.int(), neighbours.sides, clouds)
        sites.indice_dict = neighbours.cache  # layers of a stage search for neighbours once
        layer.train(self.training)
        found = torch.func.functional_call(layer, {"weight": whole}, (sites,))
        neighbours.cache.update(found.indice_dict)
        features: Tensor = found.features
        return features


BACKENDS: dict[str, type[SparseConv3d]] = {"torch": SparseConv3d, "spconv": SpConv3d}
