"""UniTR's backbone: pillars and patches in common sets, in the image plane and from above.

B samples, V cameras, I images that there are, P pillars, T tokens (pillars, then patches), D width.
A batch's geometry is known before any feature: `Scene` holds it, and makes partitions of its spaces once. In images x
is the row and y the column, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .grid import BevGrid
from .layers import SetBlock, Shares
from .learned import Embedding, LearnedPositions
from .partition import Partition, join, partition
from .projection import combine, image_to_bev, lidar_to_canvas
from .tokens import zero_of

# The space of each block's sets, and the axis that they are sorted by first.
PLAN = (("own", "y"), ("canvas", "x"), ("canvas", "y"), ("bev", "x"))


class Cameras(NamedTuple):
    """Geometry of the cameras of a batch."""

    size: tuple[int, int]  # H, W of all images
    patches: tuple[int, int]  # rows and columns of patches
    image_mask: Tensor  # (B, V) where there is an image
    matrix: Tensor  # (B, V, 4, 4) augmented LiDAR frame -> raw pixels, times depth
    image_aug: Tensor  # (B, V, 4, 4)

    @classmethod
    def of(
        cls, images: Tensor, patch: int, image_mask: Tensor, lidar2image: Tensor, image_aug: Tensor, lidar_aug: Tensor
    ) -> Cameras:
        height, width = images.shape[-2:]
        patches = (-(-height // patch), -(-width // patch))
        return cls((height, width), patches, image_mask, combine(lidar2image, lidar_aug), image_aug.float())


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """How sets are formed. window: cells of a window's side. shift: what every other layer moves windows by. set_size:
    slots of a set. heights: how many heights patches are lifted to, from z_low to z_high metres. scale: multiplies
    positions. continuous: pillars in the image plane have positions within a patch."""

    window: int = 30
    shift: int = 15
    set_size: int = 90
    heights: int = 20
    z_low: float = -10.0
    z_high: float = 10.0
    scale: float = 1.0
    continuous: bool = False


@dataclass(eq=False)
class Scene:
    """Where all tokens of a batch are."""

    grid: BevGrid
    options: SetOptions
    cameras: Cameras
    pillars: Tensor  # (P, 2) cells
    sample: Tensor  # (P,)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def shares(self) -> Shares:
        rows, cols = self.cameras.patches
        return len(self.pillars), int(self.cameras.image_mask.sum()) * rows * cols

    @torch.no_grad()
    def once(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def views(self) -> tuple[Tensor, Tensor]:
        """Sample and camera (I,) of each image."""
        sample, view = self.once("views", lambda: self.cameras.image_mask.nonzero().unbind(1))
        return sample, view

    def patch_cells(self) -> Tensor:
        """(patches of an image, 2): row and column."""
        ranges = [torch.arange(n, device=self.pillars.device) for n in self.cameras.patches]
        return self.once("patches", lambda: torch.cartesian_prod(*ranges).reshape(-1, 2))

    def canvas(self) -> Any:
        centres = nn.functional.pad(self.grid.centres(self.pillars), (0, 1), value=self.grid.middle)
        c = self.cameras
        return self.once(
            "canvas", lambda: lidar_to_canvas(centres, self.sample, c.matrix, c.image_aug, c.size, c.patches)
        )

    def lifted(self) -> tuple[Tensor, Tensor]:
        """Cells (patches, 2) of all patches from above, and the residuals of lifting them."""
        return self.once("lifted", self._lift)

    def _lift(self) -> tuple[Tensor, Tensor]:
        c, o = self.cameras, self.options
        heights = torch.linspace(o.z_low, o.z_high, o.heights, device=self.pillars.device, dtype=torch.float32)
        found = [
            image_to_bev(c.matrix[b, v], c.image_aug[b, v], c.size, c.patches, self.grid, heights)
            for b, v in zip(*(x.tolist() for x in self.views()), strict=True)
        ]
        if not found:
            return self.pillars.new_zeros(0, 2), c.matrix.new_zeros(0, 2)
        return torch.cat([x.cells for x in found]), torch.cat([x.residual for x in found])

    def partition(self, space: str, shift: int, major: str) -> Partition:
        """Sets of a space: "lidar", "image", "own" (both of these), "canvas" or "bev"."""
        return self.once((space, shift, major), lambda: self._partition(space, shift, major))

    def _partition(self, space: str, shift: int, major: str) -> Partition:
        if space == "own":
            return join(self.partition("lidar", shift, major), self.partition("image", shift, major))
        cells, group, fraction = getattr(self, f"_{space}")()
        o = self.options
        return partition(
            cells, group, side=o.window, shift=shift, size=o.set_size, major=major, scale=o.scale, fraction=fraction
        )

    def _lidar(self) -> tuple[Tensor, Tensor, None]:
        return self.pillars, self.sample, None

    def _image(self) -> tuple[Tensor, Tensor, None]:
        cells, images = self.patch_cells(), len(self.views()[0])
        return cells.repeat(images, 1), self._of_patches(torch.arange(images, device=cells.device)), None

    def _canvas(self) -> tuple[Tensor, Tensor, Tensor | None]:
        found, (sample, view), (rows, cols) = self.canvas(), self.views(), self.cameras.patches
        count = self.cameras.image_mask.shape[1] or 1
        cells = self.patch_cells() + self.pillars.new_tensor([rows, cols])
        groups = [self.sample * count + found.view, self._of_patches(sample * count + view)]
        fraction = None
        if self.options.continuous:
            of_pillars = found.at - found.cells - 0.5  # a patch is where its middle is
            fraction = nn.functional.pad(of_pillars, (0, 0, 0, self.shares[1]))
        return torch.cat([found.cells, cells.repeat(len(sample), 1)]), torch.cat(groups), fraction

    def _bev(self) -> tuple[Tensor, Tensor, None]:
        cells = torch.cat([self.pillars, self.lifted()[0]])
        return cells, torch.cat([self.sample, self._of_patches(self.views()[0])]), None

    def _of_patches(self, of_images: Tensor) -> Tensor:
        """A number of each image (I,) for each of its patches."""
        rows, cols = self.cameras.patches
        return of_images.repeat_interleave(rows * cols)


class UniTRBackbone(nn.Module):
    """Four blocks of two layers. encoding: a name of the registry, which acts on positions of the space of a block's
    sets, or "learned", the original's. lift_residual: queries and keys of patches in the last block see how far off
    their lifting is, which the original has and other encodings may keep. Other keywords are those of `Attention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        *,
        shift: int,
        encoding: str = "pape",
        lift_residual: bool = False,
        recompute: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.shifts, self.recompute = (0, shift), recompute
        is_learned = encoding == "learned"
        attention = {"heads": heads, "encoding": "none" if is_learned else encoding, **attention}
        layers = len(self.shifts)
        self.blocks = nn.ModuleList(
            SetBlock(dim, mlp_dim, layers * i, layers, depth=layers * len(PLAN), **attention) for i in range(len(PLAN))
        )
        self.learned = LearnedPositions(dim, [space for space, _ in PLAN], layers) if is_learned else None
        self.lift_residual = Embedding(2, dim) if is_learned or lift_residual else None

    def forward(self, x: Tensor, scene: Scene) -> list[Tensor]:
        """Tokens (T, D) after each block."""
        found = []
        for i, (block, (space, major)) in enumerate(zip(self.blocks, PLAN, strict=True)):
            partitions = [scene.partition(space, shift, major) for shift in self.shifts]
            x = block(x, scene.shares, partitions, self._added(scene, i, space), self.recompute)
            found.append(x)
        if not len(x):
            found = [x + zero_of(self) for x in found]
        return found

    def _added(self, scene: Scene, block: int, space: str) -> Sequence[Tensor | None]:
        """What queries and keys of each layer of a block get besides, (T, D) or nothing."""
        added: list[Tensor | None] = [None] * len(self.shifts)
        if self.learned is not None:
            for layer, shift in enumerate(self.shifts):
                own = [scene.partition(name, shift, "y") for name in ("image", "lidar")]
                joint = None if space == "own" else scene.partition(space, shift, PLAN[block][1])
                added[layer] = self.learned(block, layer, own[0], own[1], joint)
        if self.lift_residual is not None and space == "bev":
            more = nn.functional.pad(self.lift_residual(scene.lifted()[1]), (0, 0, scene.shares[0], 0))
            added = [more if x is None else x + more for x in added]
        return added
