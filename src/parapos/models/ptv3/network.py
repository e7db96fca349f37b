"""Point Transformer V3: an encoder over coarser and coarser points, and a decoder back, or a classifier.

B clouds, N points of all of them, C features of a point, R curves, k classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...curves import CURVES, curve_depth
from ...encodings import ENCODINGS
from ..base import at_least_one, check_scale
from .geometry import MOST_DEPTH, Frame, Stage, cells_of, serialize
from .layers import DecoderStage, EncoderStage, Stem
from .norm import BatchNorm
from .rows import group_sum
from .spconv import BACKENDS

CHOICES = {
    "task": ("segmentation", "classification"),
    "cpe": ("none", "xcpe"),
    "unpool_conv_input": ("sum", "skip"),
    "pos_source": ("grid", "coord"),
    "pos_unit": ("stage_cell", "base_cell", "metre"),
    "conv_backend": tuple(BACKENDS),
}


class Backbone(nn.Module):
    """Features at the input points, or at the coarsest ones if there is no decoder."""

    def __init__(
        self,
        channels: int,
        enc: Sequence[tuple[int, int]],
        dec: Sequence[tuple[int, int]],
        *,
        head_dim: int,
        drop_path: float,
        patch: int,
        dec_patch: int,
        skip_only: bool,
        every_stage: bool,
        conv_backend: str,
        **options: Any,
    ) -> None:
        """enc, dec: width and number of blocks of each stage, the finest first."""
        super().__init__()
        self.every_stage = every_stage
        common = {"depth": sum(blocks for _, blocks in (*enc, *dec)), "conv_backend": conv_backend, **options}
        self.embedding = nn.ModuleDict({"stem": Stem(channels, enc[0][0], conv_backend)})
        rates = torch.linspace(0, drop_path, sum(blocks for _, blocks in enc), device="cpu").tolist()
        self.enc, self.dec, done = nn.ModuleDict(), nn.ModuleDict(), 0
        for s, (dim, blocks) in enumerate(enc):
            own = rates[done : done + blocks]
            before = enc[s - 1][0] if s else None
            self.enc[f"enc{s}"] = EncoderStage(before, dim, dim // head_dim, own, done, patch=patch, **common)
            done += blocks
        rates = torch.linspace(0, drop_path, sum(blocks for _, blocks in dec), device="cpu").tolist()
        before = enc[-1][0]
        for s, (dim, blocks) in reversed(list(enumerate(dec))):
            start = sum(blocks for _, blocks in dec[:s])
            own = rates[start : start + blocks][::-1]
            shape = (before, enc[s][0], dim, dim // head_dim, own, done)
            self.dec[f"dec{s}"] = DecoderStage(*shape, patch=dec_patch, skip_only=skip_only, **common)
            before, done = dim, done + blocks

    def forward(self, x: Tensor, stages: Sequence[Stage]) -> Tensor:
        """x (N, C) -> features of the first stage's points, or of the last one's."""
        x = self.embedding["stem"](x, stages[0])
        found = []
        for encoder, stage in zip(self.enc.values(), stages, strict=True):
            assert isinstance(encoder, EncoderStage)
            if encoder.down is not None:
                x = encoder.down(x, stage)
            if stage.level == 0 or self.every_stage:  # an encoding that is added to tokens acts here
                x = encoder.blocks[0].attn.encoding.add(x[None], stage.positions())[0]
            x = encoder.run(x, stage)
            found.append(x)
        for s, decoder in zip(reversed(range(len(self.dec))), self.dec.values(), strict=True):
            x = decoder(x, found[s], stages[s + 1], stages[s])
        return x


class PointTransformerV3(nn.Module):
    """What a batch of clouds looks like stands in `parapos.models.ptv3`.

    enc_dims, enc_depths: width and blocks of each encoder stage; points are pooled in between. dec_dims, dec_depths:
    the same of the decoder, which segmentation alone has; by default as in the original, at least as wide as the
    encoder's second stage, two blocks at most. head_dim: all stages have heads of this size. patch, dec_patch: points
    of a patch in encoder and decoder.
    cpe: "none", or "xcpe" for the original's convolution in each block. unpool_conv_input: what the first of a decoder
    stage sees, the "sum" or the "skip" branch alone, as the original does. conv_backend: "torch", or "spconv" where it
    is installed, which changes no result but its rounding.
    curves: those that blocks take in turns. shuffle: in training, their order is drawn for each stage of each pass.
    eval_seed: in evaluation the order is one that this seed draws, always the same; None takes them as they stand.
    depth: bits of a coordinate, fixed so that no cloud depends on the extent of another; None takes as few as a batch
    needs, as the original does.
    pos_source, pos_unit, pos_scale, grid_size: which positions attention sees, as in `Frame`.
    add_every_stage: an encoding that is added to features (sincos) acts at each encoder stage, not at the first alone.
    Other keywords are those of `Attention`, and of its encoding.
    """

    inputs = ("feat", "coord", "grid_coord", "offset")

    def __init__(
        self,
        *,
        num_classes: int = 20,
        in_channels: int = 6,
        task: str = "segmentation",
        enc_dims: Sequence[int] = (32, 64, 128, 256, 512),
        enc_depths: Sequence[int] = (2, 2, 2, 6, 2),
        dec_dims: Sequence[int] | None = None,
        dec_depths: Sequence[int] | None = None,
        head_dim: int = 16,
        patch: int = 1024,
        dec_patch: int | None = None,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.3,
        cpe: str = "none",
        unpool_conv_input: str | None = None,
        conv_backend: str = "torch",
        curves: Sequence[str] = CURVES,
        shuffle: bool = True,
        eval_seed: int | None = 0,
        depth: int | None = MOST_DEPTH,
        pos_source: str = "grid",
        pos_unit: str = "stage_cell",
        pos_scale: float = 1.0,
        grid_size: float = 0.02,
        add_every_stage: bool = False,
        encoding: str = "pape",
        pos_dim: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        chosen = {"task": task, "cpe": cpe, "unpool_conv_input": unpool_conv_input or "sum"}
        chosen |= {"pos_source": pos_source, "pos_unit": pos_unit, "conv_backend": conv_backend}
        for name, value in chosen.items():
            if value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}, got {value!r}")
        if unpool_conv_input is not None and (task != "segmentation" or cpe == "none"):
            raise ValueError("unpool_conv_input has no effect without a decoder and cpe='xcpe'; leave it out")
        if pos_dim not in (None, 3):
            raise ValueError(f"pos_dim of points is 3, got {pos_dim}")
        at_least_one(num_classes=num_classes, in_channels=in_channels, head_dim=head_dim, patch=patch)
        check_scale(pos_scale, 3)
        check_scale(grid_size, 1)
        enc = _stages("enc", enc_dims, enc_depths, head_dim)
        dec: list[tuple[int, int]] = []
        if task == "segmentation":
            dims = [max(dim, enc_dims[min(1, len(enc) - 1)]) for dim in enc_dims[:-1]] if dec_dims is None else dec_dims
            depths = [min(2, blocks) for blocks in enc_depths[:-1]] if dec_depths is None else dec_depths
            dec = _stages("dec", dims, depths, head_dim)
            if len(dec) != len(enc) - 1:
                raise ValueError(
                    f"the decoder must have {len(enc) - 1} stages, one less than the encoder, got {len(dec)}"
                )
        elif (dec_dims, dec_depths, dec_patch) != (None, None, None):
            raise ValueError("task='classification' has no decoder; leave dec_dims, dec_depths and dec_patch out")
        if not curves:
            raise ValueError(f"curves must name at least one of {', '.join(CURVES)}")
        if encoding in ENCODINGS and not ENCODINGS[encoding].claims.unbounded:
            raise ValueError(f"encoding {encoding!r} is made for grids of images, not for points in space")
        self.task, self.in_channels, self.patch, self.grid_size = task, in_channels, patch, grid_size
        self.curves = tuple(curves)
        self.shuffle, self.eval_seed, self.depth = shuffle, eval_seed, depth
        self.pos_source, self.pos_unit, self.pos_scale = pos_source, pos_unit, pos_scale
        self.centred = encoding not in ENCODINGS or ENCODINGS[encoding].claims.translation
        self.backbone = Backbone(
            in_channels, enc, dec, head_dim=head_dim, drop_path=drop_path, patch=patch,
            dec_patch=patch if dec_patch is None else dec_patch, skip_only=unpool_conv_input == "skip",
            every_stage=add_every_stage, conv_backend=conv_backend, has_cpe=cpe == "xcpe", mlp_ratio=mlp_ratio,
            encoding=encoding, **attention,
        )  # fmt: skip
        if task == "segmentation":
            self.seg_head = nn.Linear((dec or enc)[0][0], num_classes)
        else:
            self.cls_head = _classifier(enc[-1][0], num_classes)

    def draw_rows(self) -> list[list[int]]:
        """An order of the curves for each stage."""
        levels, count = len(self.backbone.enc), len(self.curves)
        if not (self.shuffle if self.training else self.eval_seed is not None):
            return [list(range(count))] * levels
        generator = None if self.training else torch.Generator().manual_seed(self.eval_seed or 0)
        return [torch.randperm(count, generator=generator, device="cpu").tolist() for _ in range(levels)]

    @torch.no_grad()
    def stages(
        self,
        coord: Tensor,
        grid_coord: Tensor | None,
        offset: Tensor,
        position_scale: float | Sequence[float] = 1.0,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> list[Stage]:
        """Geometry of a batch at each resolution. rows: an order of the curves for each; drawn by default."""
        lengths = _lengths(offset, len(coord))
        if coord.ndim != 2 or coord.shape[1] != 3 or not coord.is_floating_point():
            raise ValueError(f"coord must be floating (N, 3), got {coord.dtype} {tuple(coord.shape)}")
        if not bool(coord.isfinite().all()):
            raise ValueError("coord must be finite, got NaN or infinity; drop such points")
        cells = cells_of(coord, lengths, self.grid_size) if grid_coord is None else grid_coord
        if cells.shape != coord.shape or cells.is_floating_point():
            want = f"integers {tuple(coord.shape)}, as coord is"
            raise ValueError(f"grid_coord must be {want}, got {cells.dtype} {tuple(cells.shape)}")
        check_scale(position_scale, 3)
        factors = torch.as_tensor(position_scale, dtype=torch.float64) * self.pos_scale
        rows = self.draw_rows() if rows is None else rows
        frame = Frame(
            source=self.pos_source, unit=self.pos_unit, grid_size=self.grid_size, scale=factors.tolist(),
            centred=self.centred,
        )  # fmt: skip
        depth = curve_depth(cells) if self.depth is None else self.depth
        stages = [serialize(frame, coord.float(), cells, lengths, self.curves, rows[0], depth)]
        for order in rows[1:]:
            stages.append(stages[-1].pool(order))
        return stages

    def forward(
        self,
        feat: Tensor,
        coord: Tensor,
        grid_coord: Tensor | None,
        offset: Tensor,
        position_scale: float | Sequence[float] = 1.0,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Logits (N, k) of points, or (B, k) of clouds. grid_coord None: cells of grid_size are counted here.

        position_scale multiplies positions: one factor, or one per axis. rows: as in `stages`.
        """
        if feat.shape != (len(coord), self.in_channels):
            raise ValueError(f"feat must be ({len(coord)}, {self.in_channels}), got {tuple(feat.shape)}")
        stages = self.stages(coord, grid_coord, offset, position_scale, rows)
        x = self.backbone(feat, stages)
        if self.task == "classification":
            clouds = stages[-1].by_cloud()
            counts = torch.tensor(stages[-1].lengths, dtype=x.dtype, device=x.device)
            x = group_sum(x, clouds) / counts[:, None]
        logits: Tensor = self.seg_head(x) if self.task == "segmentation" else self.cls_head(x)
        return logits


def _stages(name: str, dims: Sequence[int], depths: Sequence[int], head_dim: int) -> list[tuple[int, int]]:
    """Width and blocks of each stage."""
    if len(dims) != len(depths) or not (dims or name == "dec"):
        raise ValueError(f"{name}_dims and {name}_depths must name the same stages, got {dims} and {depths}")
    for dim in dims:
        if dim < 1 or dim % head_dim:
            raise ValueError(f"{name}_dims must be multiples of head_dim {head_dim}, got {dim}")
    at_least_one(**{f"{name}_depths[{i}]": blocks for i, blocks in enumerate(depths)})
    return list(zip(dims, depths, strict=True))


def _classifier(dim: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, out in ((dim, 256), (256, 128)):
        layers += [nn.Linear(width, out), BatchNorm(out), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def _lengths(offset: Tensor, points: int) -> list[int]:
    """How many points each cloud has."""
    if offset.ndim != 1 or offset.is_floating_point():
        raise ValueError(f"offset must be integers (B,), got {offset.dtype} {tuple(offset.shape)}")
    ends = [0, *offset.tolist()]
    lengths = [end - begin for begin, end in pairwise(ends)]
    if not lengths or min(lengths) < 1 or ends[-1] != points:
        raise ValueError(f"offset must rise to the number of points {points}, clouds have at least one, got {ends[1:]}")
    return lengths
