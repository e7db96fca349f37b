"""The head: the strongest cells of a heatmap ask the map around them, and answer with a box each.

B samples, C classes, Q queries, R x L rows and columns of the map, D width, H heads, K keys of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import attend
from .grid import BevFrame

BRANCHES = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "iou": 1}  # and "heatmap", a number per class


class HeadOutputs(NamedTuple):
    """What the head says. `loss.head_loss` and `decode.decode` know what to do with it.

    Numbers of boxes: centre in cells, height and velocity in metres, logarithms of sides in metres, sine and cosine of
    the yaw, and a number from -1 to 1 that estimates the overlap with the true box.
    """

    dense_heatmap: Tensor  # (B, C, R, L) logits of the map
    query_labels: Tensor  # (B, Q) class by which a query was chosen
    query_heatmap_score: Tensor  # (B, C, Q) what was left of the heatmap at its cell
    center: Tensor  # (B, 2, Q) x, y
    height: Tensor  # (B, 1, Q)
    dim: Tensor  # (B, 3, Q)
    rot: Tensor  # (B, 2, Q)
    vel: Tensor  # (B, 2, Q)
    iou: Tensor  # (B, 1, Q)
    heatmap: Tensor  # (B, C, Q) logits of classes
    frame: BevFrame
    small_classes: tuple[int, ...]

    def float(self) -> HeadOutputs:
        """The same in float32."""
        changes: dict[str, Any] = {
            name: x.float() for name, x in self._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        return self._replace(**changes)


class CountedBatchNorm(nn.BatchNorm1d):
    """BatchNorm of rows that each stand for several equal ones."""

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """x (N, C), counts (N,): how many rows each stands for; by default one."""
        if counts is None or not self.training:
            return super().forward(x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        total = counts.sum()
        share = (counts.to(x.dtype) / total)[:, None]
        mean = (x * share).sum(0)
        variance = ((x - mean).square() * share).sum(0)
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (total / (total - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def _pointwise(layer: nn.Module, x: Tensor) -> Tensor:
    """A convolution of size 1, of rows (..., C)."""
    assert isinstance(layer, nn.Conv1d)
    return F.linear(x, layer.weight[..., 0], layer.bias)


class CellEmbedding(nn.Module):
    """Learned function of a place on the map, in cells."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(2, dim, 1), CountedBatchNorm(dim), nn.ReLU(), nn.Conv1d(dim, dim, 1)
        )

    def forward(self, r: Tensor, counts: Tensor | None = None) -> Tensor:
        """r (N, 2) -> (N, D); counts as of `CountedBatchNorm`."""
        first, norm, act, last = self.position_embedding_head
        r = r.to(next(first.parameters()).dtype)  # places are float32, also where the network is not
        return _pointwise(last, act(norm(_pointwise(first, r), counts)))


class PackedProjections(nn.Module):
    """The four linear maps of an attention, the first three in one tensor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = (
            nn.Parameter(torch.empty(3 * dim, dim)),
            nn.Parameter(torch.zeros(3 * dim)),
        )
        self.out_proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.out_proj.bias)

    def project(self, x: Tensor, first: int, last: int) -> Tensor:
        """Maps first..last-1 of query, key and value, side by side."""
        size = self.in_proj_weight.shape[1]
        rows = slice(first * size, last * size)
        return F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])


class Decoder(nn.Module):
    """One post-norm layer whose queries look at the map around them.

    A query is alone in its self-attention, as in the original, so that is a linear map. Keys and values are computed
    once for each cell of the map, and copied to the queries near it; norms count each as often as it is copied.
    """

    def __init__(self, dim: int, heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim of the head, {dim}, must be a multiple of its heads, {heads}")
        self.heads = heads
        self.self_attn, self.multihead_attn = PackedProjections(dim), PackedProjections(dim)
        self.linear1, self.linear2 = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.self_posembed, self.cross_posembed = CellEmbedding(dim), CellEmbedding(dim)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, r: Tensor, cells: Tensor, at: Tensor, near: Tensor) -> Tensor:
        """Queries x (B Q, D) at r (B Q, 2), cells (B R L, D) at (B R L, 2), near (B Q, K) rows of cells -> (B Q, D)."""
        place = self.self_posembed(r)
        value = self.self_attn.project(x + place, 2, 3)
        x = self.norm1(x + self.dropout(self.self_attn.out_proj(value)))
        counts = torch.bincount(near.flatten(), minlength=len(cells)) if self.training else None
        seen = cells + self.cross_posembed(at, counts)
        query = self.multihead_attn.project(x + place, 0, 1)[:, None]  # (B Q, 1, D)
        pair = F.embedding(near, self.multihead_attn.project(seen, 1, 3))  # (B Q, K, 2 D)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, *pair.chunk(2, dim=-1)))
        found = attend(q, k, v)  # (B Q, H, 1, h)
        assert isinstance(found, Tensor)
        x = self.norm2(x + self.dropout(self.multihead_attn.out_proj(found.flatten(1))))
        y = self.linear2(self.dropout(F.relu(self.linear1(x))))
        return self.norm3(x + self.dropout(y))


class ConvNorm(nn.Sequential):
    """Convolution of 3 x 3 cells, norm, ReLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim), nn.ReLU()


class QueryHead(nn.Module):
    """(B, channels, R, L) -> HeadOutputs.

    queries: most boxes of a sample. radius: a query sees this many cells in each direction. small_classes: those whose
    objects may fill neighbouring cells, so that every cell of theirs can be a query. Neighbours of the border are the
    border's cells again.
    """

    def __init__(
        self,
        channels: int,
        frame: BevFrame,
        *,
        num_classes: int = 10,
        dim: int = 128,
        heads: int = 8,
        mlp_dim: int = 256,
        queries: int = 200,
        radius: int = 20,
        dropout: float = 0.1,
        small_classes: Sequence[int] = (8, 9),
    ) -> None:
        super().__init__()
        if any(not 0 <= label < num_classes for label in small_classes):
            raise ValueError(f"small_classes must be in 0..{num_classes - 1}, got {list(small_classes)}")
        if not 1 <= queries <= num_classes * frame.rows * frame.cols:
            raise ValueError(f"queries must be from 1 to the cells of all heatmaps, got {queries}")
        self.frame, self.queries, self.radius, self.num_classes = frame, queries, radius, num_classes
        self.small_classes = tuple(small_classes)
        self.shared_conv = nn.Conv2d(channels, dim, 3, padding=1)
        self.heatmap_head = nn.Sequential(ConvNorm(dim), nn.Conv2d(dim, num_classes, 3, padding=1))
        self.class_encoding = nn.Conv1d(num_classes, dim, 1)
        self.decoder = Decoder(dim, heads, mlp_dim, dropout)
        self.prediction_head = nn.ModuleDict()
        for name, out in {**BRANCHES, "heatmap": num_classes}.items():
            hidden = nn.Sequential(nn.Conv1d(dim, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
            self.prediction_head[name] = nn.Sequential(hidden, nn.Conv1d(64, out, 1))

    @torch.no_grad()
    def peaks(self, logits: Tensor) -> Tensor:
        """(B, C, R, L): probabilities of cells that are the largest of their 3 x 3 neighbours, which the border has not
        all of, and of all cells of small classes; else 0."""
        heat = logits.sigmoid()
        largest = torch.zeros_like(heat)
        largest[:, :, 1:-1, 1:-1] = F.max_pool2d(heat, 3, 1)
        small = list(self.small_classes)
        largest[:, small] = heat[:, small]
        return heat * (heat == largest)

    def forward(self, x: Tensor) -> HeadOutputs:
        x = self.shared_conv(x)
        samples, dim, rows, cols = x.shape
        logits = self.heatmap_head(x)
        heat = self.peaks(logits.float()).flatten(2)  # (B, C, R L)
        best = heat.flatten(1).topk(self.queries)[1]
        label, cell = torch.div(best, rows * cols, rounding_mode="floor"), best % (rows * cols)  # (B, Q)
        row, col = torch.div(cell, cols, rounding_mode="floor"), cell % cols

        reach = torch.arange(-self.radius, self.radius + 1, device=x.device)
        around = [(axis[..., None] + reach).clamp(0, n - 1) for axis, n in ((row, rows), (col, cols))]  # (B, Q, side)
        near = (around[0][..., :, None] * cols + around[1][..., None, :]).flatten(2)  # (B, Q, K)
        near = near + torch.arange(samples, device=x.device)[:, None, None] * (rows * cols)

        cells = x.flatten(2).transpose(1, 2)  # (B, R L, D)
        one_hot = F.one_hot(label, self.num_classes).to(x.dtype)
        query = cells.gather(1, cell[..., None].expand(-1, -1, dim))
        query = query + _pointwise(self.class_encoding, one_hot)
        place = torch.stack([col, row], dim=-1).float() + 0.5  # (B, Q, 2) x, y
        grid = torch.cartesian_prod(*(torch.arange(n, device=x.device) for n in (rows, cols))).flip(-1).float() + 0.5
        query = self.decoder(
            query.flatten(0, 1), place.flatten(0, 1), cells.flatten(0, 1), grid.repeat(samples, 1), near.flatten(0, 1)
        )
        query = query.unflatten(0, (samples, -1)).transpose(1, 2)  # (B, D, Q)
        said = {name: branch(query).float() for name, branch in self.prediction_head.items()}
        said["center"] = said["center"] + place.transpose(1, 2)
        score = heat.gather(2, cell[:, None].expand(-1, self.num_classes, -1))
        return HeadOutputs(
            logits.float(), label, score, **said, frame=self.frame, small_classes=self.small_classes
        )  # fmt: skip
