"""UniTR as a whole: tokens of both sensors, backbone, map from above, head.

B samples, N points of all of them, V cameras, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...encodings import ENCODINGS
from ..base import at_least_one, check_scale
from .backbone import PLAN, Cameras, Scene, SetOptions, UniTRBackbone
from .batch import CLASSES, DrivingInputs
from .bev import STRIDE, BevNetwork, scatter
from .grid import BevFrame, BevGrid
from .head import HeadOutputs, QueryHead
from .lss import CameraMap
from .tokens import PatchEmbed, PillarEncoder


class UniTR(nn.Module):
    """What a batch looks like stands in `parapos.models.unitr.batch`.

    point_range, pillar: the grid from above, x, y, z of both corners and the side of a pillar in metres. patch: pixels
    of an image patch's side. dim, heads, mlp_dim: of the backbone. window, shift, set_size, lift_heights, lift_range:
    how sets are formed, as in `SetOptions`. bev_dims, bev_out: of the network on the map. head_dim is the size of a
    head in the backbone, dim / heads by default; query_dim, query_heads, query_mlp_dim, queries, query_radius, dropout,
    small_classes: of the head on the map.
    encoding: a name of the registry, or "learned" for the original's 23 embeddings. keep_lift_residual: the one of them
    that describes how well patches were lifted stays with another encoding. pos_scale multiplies positions.
    continuous_positions: pillars in the image plane have positions within a patch.
    init: of the backbone, "kaiming", which is PyTorch's, or "xavier" as in the original.
    camera_map: adds a map of images by learned depths (UniTR+LSS). Without it, as in the original, patches after the
    last layer are not used, and so that layer's branch for them and the norm behind it have no effect.
    recompute: saves memory in training, takes longer.
    Other keywords are those of `Attention`, and of its encoding.
    """

    inputs = tuple(DrivingInputs.__annotations__)

    def __init__(
        self,
        *,
        num_classes: int = len(CLASSES),
        point_range: Sequence[float] = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0),
        pillar: float | Sequence[float] = 0.3,
        patch: int = 8,
        dim: int = 128,
        heads: int = 8,
        mlp_dim: int = 256,
        window: int = 30,
        shift: int = 15,
        set_size: int = 90,
        lift_heights: int = 20,
        lift_range: Sequence[float] = (-10.0, 10.0),
        bev_dims: Sequence[int] = (128, 128, 256, 256),
        bev_out: int = 128,
        query_dim: int = 128,
        query_heads: int = 8,
        query_mlp_dim: int = 256,
        queries: int = 200,
        query_radius: int = 20,
        dropout: float = 0.1,
        small_classes: Sequence[int] | None = None,
        encoding: str = "pape",
        keep_lift_residual: bool = False,
        pos_scale: float = 1.0,
        continuous_positions: bool = False,
        init: str = "kaiming",
        camera_map: bool = False,
        recompute: bool = False,
        pos_dim: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        if pos_dim not in (None, 2):
            raise ValueError(f"pos_dim of UniTR is 2, got {pos_dim}")
        at_least_one(num_classes=num_classes, patch=patch, window=window, set_size=set_size, lift_heights=lift_heights)
        if not 0 <= shift < window:
            raise ValueError(f"shift must be from 0 to {window - 1}, less than a window, got {shift}")
        if init not in ("kaiming", "xavier"):
            raise ValueError(f"init must be 'kaiming' or 'xavier', got {init!r}")
        check_scale(pos_scale, 1)
        if encoding == "learned" and keep_lift_residual:
            raise ValueError("keep_lift_residual has no effect with encoding='learned', which has it; leave it out")
        if encoding in ENCODINGS and not ENCODINGS[encoding].claims.unbounded:
            raise ValueError(f"encoding {encoding!r} is made for grids of images, not for pillars beside them")
        if small_classes is None:
            small = ("pedestrian", "traffic_cone")
            small_classes = [i for i, name in enumerate(CLASSES) if name in small and num_classes == len(CLASSES)]
        self.grid, self.patch, self.num_classes = BevGrid.of(point_range, pillar), patch, num_classes
        self.point_range = tuple(float(x) for x in point_range)
        low, high = lift_range
        self.sets = SetOptions(
            window=window, shift=shift, set_size=set_size, heights=lift_heights, z_low=low, z_high=high,
            scale=pos_scale, continuous=continuous_positions,
        )  # fmt: skip
        self.pillars, self.patches = PillarEncoder(self.grid, dim), PatchEmbed(dim, patch)
        self.backbone = UniTRBackbone(
            dim, heads, mlp_dim, shift=shift, encoding=encoding, lift_residual=keep_lift_residual,
            recompute=recompute, **attention,
        )  # fmt: skip
        if init == "xavier":
            for parameter in (*self.patches.parameters(), *self.backbone.parameters()):
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
        self.camera_map = CameraMap(dim, len(PLAN), self.grid) if camera_map else None
        self.bev = BevNetwork(dim, bev_dims, bev_out)
        self.head = QueryHead(
            4 * bev_out, BevFrame.of(self.grid, STRIDE), num_classes=num_classes, dim=query_dim, heads=query_heads,
            mlp_dim=query_mlp_dim, queries=queries, radius=query_radius, dropout=dropout, small_classes=small_classes,
        )  # fmt: skip

    def forward(
        self,
        points: Tensor,
        offset: Tensor,
        images: Tensor,
        image_mask: Tensor,
        lidar2image: Tensor,
        image_aug: Tensor,
        lidar_aug: Tensor,
        position_scale: float = 1.0,
    ) -> HeadOutputs:
        """position_scale multiplies positions, as pos_scale does."""
        x, scene = self.tokenize(points, offset, images, image_mask, lidar2image, image_aug, lidar_aug, position_scale)
        return self.head(self.bev(self.map_of(self.backbone(x, scene), scene)))

    def tokenize(
        self,
        points: Tensor,
        offset: Tensor,
        images: Tensor,
        image_mask: Tensor,
        lidar2image: Tensor,
        image_aug: Tensor,
        lidar_aug: Tensor,
        position_scale: float = 1.0,
    ) -> tuple[Tensor, Scene]:
        """Tokens (T, D), pillars first, and where they are."""
        _check(points, offset, images, image_mask, lidar2image, image_aug, lidar_aug)
        check_scale(position_scale, 1)
        lengths = torch.diff(offset, prepend=offset.new_zeros(1))
        sample = torch.repeat_interleave(torch.arange(len(offset), device=offset.device), lengths)
        pillars = self.pillars(points, sample)
        cameras = Cameras.of(images, self.patch, image_mask, lidar2image, image_aug, lidar_aug)
        options = replace(self.sets, scale=self.sets.scale * position_scale)
        scene = Scene(self.grid, options, cameras, pillars.cells, pillars.sample)
        patches = self.patches(images[image_mask]).flatten(0, 1)
        return torch.cat([pillars.x.to(patches.dtype), patches]), scene

    def map_of(self, tokens: Sequence[Tensor], scene: Scene) -> Tensor:
        """(B, D, rows, columns) from the tokens after each block."""
        samples, count = len(scene.cameras.image_mask), len(scene.pillars)
        bev = scatter(tokens[-1][:count], scene.pillars, scene.sample, samples, self.grid.size)
        if self.camera_map is None:
            return bev
        c, (sample, view) = scene.cameras, scene.views()
        matrices = c.matrix[sample, view], c.image_aug[sample, view]
        return self.camera_map([x[count:] for x in tokens], c.patches, sample, *matrices, c.size, bev)


def _check(
    points: Tensor,
    offset: Tensor,
    images: Tensor,
    image_mask: Tensor,
    lidar2image: Tensor,
    image_aug: Tensor,
    lidar_aug: Tensor,
) -> None:
    """Shapes and values that would go wrong later without a word."""
    if points.ndim != 2 or points.shape[1] != 5:
        raise ValueError(f"points must be (N, 5): x, y, z, intensity, lag, got {tuple(points.shape)}")
    if offset.ndim != 1 or offset.is_floating_point() or not len(offset):
        raise ValueError(f"offset must be integers (B,), got {offset.dtype} {tuple(offset.shape)}")
    ends = offset.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] != len(points):
        raise ValueError(f"offset must rise to the {len(points)} points, got {ends}")
    samples, cameras = len(offset), images.shape[1] if images.ndim == 5 else -1
    if images.ndim != 5 or images.shape[0] != samples or images.shape[2] != 3:
        raise ValueError(f"images must be ({samples}, V, 3, H, W), got {tuple(images.shape)}")
    if image_mask.shape != (samples, cameras) or image_mask.dtype != torch.bool:
        got = f"{image_mask.dtype} {tuple(image_mask.shape)}"
        raise ValueError(f"image_mask must be boolean ({samples}, {cameras}), got {got}")
    of_cameras, of_samples = (samples, cameras, 4, 4), (samples, 4, 4)
    named = (("lidar2image", lidar2image, of_cameras), ("image_aug", image_aug, of_cameras))
    for name, matrix, want in (*named, ("lidar_aug", lidar_aug, of_samples)):
        if matrix.shape != want:
            raise ValueError(f"{name} must be {want}, got {tuple(matrix.shape)}")
        if not bool(matrix.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    if not bool(points.isfinite().all()):
        raise ValueError("points must be finite, got NaN or infinity; drop such points")
