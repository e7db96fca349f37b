"""Submanifold sparse convolution in plain PyTorch: outputs at the cells of the points, and nowhere else.

    out_i = bias + W_0 x_i + sum over d != 0 of W_d x_j,   j a point of the same cloud in cell_i + d

N points, M sites (occupied cells), k kernel side, C channels. Equal to a dense convolution with padding k // 2 that is
read at the sites. Where several points share a cell, neighbours see the first of them, and each sees itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ...tracing import no_autocast
from .rows import SUM, Groups, pick, spread

CHUNK = 4096  # sites whose neighbours are gathered at one time


class Pairs(NamedTuple):
    """The neighbours of CHUNK sites, offset after offset."""

    source: Tensor  # (pairs,) the neighbours
    target: Tensor  # (pairs,) the sites that they are neighbours of
    counts: list[int]  # pairs of each offset
    by_target: Tensor  # (pairs,) the pairs of each site of the chunk, site after site
    starts: Tensor  # (sites,) where those of each begin


@dataclass(eq=False)
class KernelMap:
    """The sites of a batch, in row-major order, and who is whose neighbour in a kernel of size k without its centre."""

    sites: Groups  # points by site
    size: int  # k
    key: Tensor  # (M,) a number for the place of each site, rising
    sides: list[int]  # of the grid of places, with room for a kernel around it
    cells: Tensor  # (M, 4) cloud and cell of each site
    cache: dict[str, Any] = field(default_factory=dict)  # what a library makes of it

    @cached_property
    @torch.no_grad()
    def chunks(self) -> list[Pairs]:
        """All pairs of neighbours; searched for when they are asked for."""
        return _pairs(_neighbours(self.key, self.sides, self.size), len(self.key))


@torch.no_grad()
def kernel_map(cells: Tensor, clouds: Tensor, size: int) -> KernelMap:
    """cells (N, 3) from 0, clouds (N,): the cloud of each point. Made once for all layers of a resolution."""
    if size < 1 or size % 2 == 0:
        raise ValueError(f"kernel size must be odd, got {size}")
    reach = size // 2
    sides = [side + 1 + 2 * reach for side in cells.amax(0).tolist()]  # an offset never leads into another row
    if (int(clouds.max()) + 1) * sides[0] * sides[1] * sides[2] >= 2**63:
        raise ValueError(f"cells reach to {cells.amax(0).tolist()}, too far for 64-bit keys; take larger cells")
    key = ((clouds * sides[0] + cells[:, 0] + reach) * sides[1] + cells[:, 1] + reach) * sides[2] + cells[:, 2] + reach
    key, members = torch.sort(key, stable=True)
    sites = Groups.of_sorted(key, members)
    first = sites.first
    places = torch.cat([clouds[first, None], cells[first]], dim=1)
    return KernelMap(sites, size, key[sites.offsets], sides, places)


def _neighbours(key: Tensor, sides: list[int], size: int) -> Tensor:
    """(k^3 - 1, M) int32: the site at each offset of each site, M where there is none."""
    reach, none = size // 2, len(key)
    table = torch.empty(size**3, none, dtype=torch.int32, device=key.device)
    ends = torch.cat([key, key.new_full((1,), -1)])  # what the search may find behind the last key
    for row in range(size**2):
        dx, dy = row // size - reach, row % size - reach
        wanted = key + ((dx * sides[1] + dy) * sides[2] - reach)
        place = torch.searchsorted(key, wanted, out_int32=True)
        for dz in range(size):  # keys of a row follow each other, so one search serves them all
            hit = ends.index_select(0, place) == wanted
            table[row * size + dz] = torch.where(hit, place, none)
            place += hit
            wanted += 1
    middle = size**3 // 2
    return torch.cat([table[:middle], table[middle + 1 :]])


def _pairs(table: Tensor, none: int) -> list[Pairs]:
    chunks = []
    for start in range(0, none, CHUNK):
        part = table[:, start : start + CHUNK]
        hit = part < none
        site = hit.nonzero()[:, 1]
        of_site = hit.sum(0)
        by_target = torch.sort(site, stable=True)[1]
        chunks.append(Pairs(part[hit], site + start, hit.sum(1).tolist(), by_target, of_site.cumsum(0) - of_site))
    return chunks


def _convolve(x: Tensor, weight: Tensor, chunks: list[Pairs]) -> Tensor:
    """Sums over offsets: x (M, C) with weight (k^3 - 1, C, C') -> (M, C')."""
    out = x.new_empty(len(x), weight.shape[2])
    done = 0
    for chunk in chunks:
        found, products, start = x.index_select(0, chunk.source), x.new_empty(len(chunk.source), weight.shape[2]), 0
        for matrix, count in zip(weight, chunk.counts, strict=True):
            if count:
                torch.mm(found[start : start + count], matrix, out=products[start : start + count])
            start += count
        end = done + len(chunk.starts)
        out[done:end] = torch.embedding_bag(products, chunk.by_target, chunk.starts, False, SUM)[0]
        done = end
    return out


def _weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, chunks: list[Pairs]) -> Tensor:
    total = torch.zeros_like(weight)
    for chunk in chunks:
        found, wanted, start = x.index_select(0, chunk.source), grad.index_select(0, chunk.target), 0
        for matrix, count in zip(total, chunk.counts, strict=True):
            if count:
                matrix.addmm_(found[start : start + count].t(), wanted[start : start + count])
            start += count
    return total


class _Convolution(Function):
    """Convolution over sites without the centre. Neighbours are mutual: the gradient is a convolution with the mirrored
    kernel, so nothing is scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: list[Pairs]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        return _convolve(x, weight, chunks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, (needs_x, needs_weight) = grad.contiguous(), ctx.needs_input_grad[:2]
        with no_autocast(grad.device):
            return (
                _convolve(grad, weight.flip(0).transpose(1, 2), ctx.chunks) if needs_x else None,
                _weight_gradient(x, grad, weight, ctx.chunks) if needs_weight else None,
                None,
            )


class SparseConv3d(nn.Module):
    """Submanifold convolution. weight (out, k, k, k, in), spatial axes in the order of the coordinates, as spconv has
    it; drawn as PyTorch draws convolutions. In float32 at least, also under autocast."""

    def __init__(self, channels: int, out_channels: int, size: int, bias: bool = True) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(out_channels, size, size, size, channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        bound = (channels * size**3) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, neighbours: KernelMap) -> Tensor:
        """x (N, C) -> (N, C')."""
        if neighbours.size != self.size:
            raise ValueError(f"expected a map for kernels of {self.size}, got one of {neighbours.size}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        with no_autocast(x.device):
            weight = self.weight.to(dtype).flatten(1, 3).permute(1, 2, 0)  # (k^3, C, C')
            x, middle = x.to(dtype), len(weight) // 2
            out = F.linear(x, weight[middle].t(), None if self.bias is None else self.bias.to(dtype))
            others = torch.cat([weight[:middle], weight[middle + 1 :]])
            sums = self.around(pick(x, neighbours.sites.first), others, neighbours)
            return out + spread(sums, neighbours.sites)

    def around(self, x: Tensor, weight: Tensor, neighbours: KernelMap) -> Tensor:
        """Sums over the neighbours of sites: x (M, C) with weight (k^3 - 1, C, C') -> (M, C')."""
        return _Convolution.apply(x, weight, neighbours.chunks)

    def extra_repr(self) -> str:
        out, size, _, _, channels = self.weight.shape
        return f"{channels}, {out}, size={size}, bias={self.bias is not None}"
