"""From LiDAR to the image plane and back: which patch a pillar falls on, and which pillar a patch is lifted to.

B samples, V cameras, P pillars, M points. Pixels are (column, row); cells of images are (row, col), cells of the
bird's-eye grid are (ix, iy). No gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .grid import BevGrid

NEAREST_DEPTH = 1e-5
CANDIDATES = 8  # neighbours that the tree is asked for, of which the lowest of the nearest counts
CHUNK = 2**24  # distances at one time


class Projected(NamedTuple):
    """Points as a camera sees them."""

    uv: Tensor  # (..., 2) column and row as shares of the image's width and height
    depth: Tensor  # (...) metres along the camera's axis
    hit: Tensor  # (...) whether the point is in front of the camera and on the image


def combine(lidar2image: Tensor, lidar_aug: Tensor) -> Tensor:
    """(B, V, 4, 4): augmented LiDAR frame -> pixels of the raw image, times depth."""
    return (lidar2image.double() @ torch.linalg.inv(lidar_aug.double())[:, None]).float()


def project(points: Tensor, matrix: Tensor, image_aug: Tensor, size: tuple[int, int]) -> Projected:
    """points (..., M, 3) of the LiDAR frame, matrix and image_aug (..., 4, 4), size (H, W) of the image."""
    h = points @ matrix[..., :3, :3].mT + matrix[..., None, :3, 3]
    return to_pixels(h, image_aug, size)


def to_pixels(h: Tensor, image_aug: Tensor, size: tuple[int, int]) -> Projected:
    """As `project`, of homogeneous pixels h (..., M, 3)."""
    depth = h[..., 2]
    raw = h[..., :2] / depth.clamp(min=NEAREST_DEPTH)[..., None]
    image_aug = image_aug.to(raw.dtype)
    pixel = raw @ image_aug[..., :2, :2].mT + image_aug[..., None, :2, 3]
    uv = (pixel / pixel.new_tensor([size[1], size[0]])).nan_to_num(nan=-1.0, posinf=2.0, neginf=-1.0)
    hit = (depth > NEAREST_DEPTH) & ((uv > 0) & (uv < 1)).all(-1)
    return Projected(uv, depth, hit)


class Canvas(NamedTuple):
    """Pillars on a plane three images wide and high, with the image in its middle."""

    view: Tensor  # (P,) the first camera that sees a pillar, or the first of all
    cells: Tensor  # (P, 2) row and column
    at: Tensor  # (P, 2) the same with fractions


def lidar_to_canvas(
    centres: Tensor, sample: Tensor, matrix: Tensor, image_aug: Tensor, size: tuple[int, int], patches: tuple[int, int]
) -> Canvas:
    """centres (P, 3) of pillars of samples (P,); matrix and image_aug (B, V, 4, 4); patches: rows and columns of an
    image of size (H, W). Without any camera, all pillars share a cell."""
    cameras = matrix.shape[1]
    uv = centres.new_zeros(len(centres), 2)
    view = torch.zeros_like(sample)
    for camera in reversed(range(cameras)):  # the first that sees a pillar has the last word
        seen = _by_sample(centres, sample, matrix[:, camera], image_aug[:, camera], size)
        chosen = seen.hit if camera else seen.hit | (view == 0)
        uv, view = torch.where(chosen[:, None], seen.uv, uv), torch.where(chosen, camera, view)
    at = (uv.clamp(-1, 2) + 1).flip(-1) * uv.new_tensor(patches)
    return Canvas(view, at.floor().long(), at)


def _by_sample(centres: Tensor, sample: Tensor, matrix: Tensor, image_aug: Tensor, size: tuple[int, int]) -> Projected:
    """Points (P, 3), each with the matrices (B, 4, 4) of its sample."""
    parts = [
        project(part, matrix[b], image_aug[b], size)
        for b, part in enumerate(centres.split(torch.bincount(sample, minlength=len(matrix)).tolist()))
    ]
    return Projected(*(torch.cat(x) for x in zip(*parts, strict=True)))


class Lifted(NamedTuple):
    """Patches of an image on the bird's-eye grid."""

    cells: Tensor  # (patches, 2) ix, iy
    residual: Tensor  # (patches, 2) how far the nearest grid point is from the patch's middle: columns, rows


def image_to_bev(
    matrix: Tensor, image_aug: Tensor, size: tuple[int, int], patches: tuple[int, int], grid: BevGrid, heights: Tensor
) -> Lifted:
    """Where one camera's patches are lifted to: the pillar of the grid point, of all pillars at all `heights` (Z,) in
    metres, that falls nearest to the middle of the patch. A view that sees no grid point is put on the grid's middle.

    Distances are taken with both sides of the image scaled to one; of equal ones the first point counts, ordered by ix,
    iy, height. No depth is measured or estimated.
    """
    rows, cols = patches
    nx, ny = grid.size
    row, col = torch.meshgrid(*(torch.arange(n, device=matrix.device) for n in patches), indexing="ij")
    middles = torch.stack([(col.flatten() + 0.5) / cols, (row.flatten() + 0.5) / rows], dim=-1)  # (patches, 2)
    cell = torch.cartesian_prod(*(torch.arange(n, device=matrix.device) for n in (nx, ny)))
    ground = grid.centres(cell) @ matrix[:3, :2].mT + matrix[:3, 3]  # (nx ny, 3)
    h = ground[:, None] + heights[:, None] * matrix[:3, 2]  # (nx ny, Z, 3)
    seen = to_pixels(h.flatten(0, 1), image_aug, size)
    hits = seen.hit.nonzero()[:, 0]
    if not len(hits):
        return Lifted(middles.new_tensor([nx // 2, ny // 2]).long().expand(rows * cols, 2), torch.zeros_like(middles))
    uv = seen.uv[hits]
    found = nearest(middles, uv)
    pillar = torch.div(hits[found], len(heights), rounding_mode="floor")
    cells = torch.stack([torch.div(pillar, ny, rounding_mode="floor"), pillar % ny], dim=-1)
    return Lifted(cells, (middles - uv[found]).abs() * middles.new_tensor([cols, rows]))


def nearest(query: Tensor, reference: Tensor) -> Tensor:
    """(Q,): the row of reference (M, 2) that is nearest to each query (Q, 2), the lowest of equals, by float32 squared
    distances. On a CPU a tree from SciPy finds it."""
    return _by_tree(query, reference) if query.device.type == "cpu" else _by_distance(query, reference)


def _by_distance(query: Tensor, reference: Tensor) -> Tensor:
    parts = []
    for part in query.split(max(1, CHUNK // len(reference))):
        d = part[:, None] - reference
        parts.append((d * d).sum(-1).min(1)[1] if len(reference) < 2 else _first_smallest((d * d).sum(-1)))
    return torch.cat(parts)


def _first_smallest(distances: Tensor) -> Tensor:
    """(Q,): the first column with the smallest number of each row. min itself promises no order."""
    columns = torch.arange(distances.shape[1], device=distances.device)
    smallest = distances == distances.amin(1, keepdim=True)
    return torch.where(smallest, columns, distances.shape[1]).amin(1)


def _by_tree(query: Tensor, reference: Tensor) -> Tensor:
    from scipy.spatial import cKDTree

    count = min(CANDIDATES, len(reference))
    tree = cKDTree(reference.numpy(), compact_nodes=False, balanced_tree=False)
    found = tree.query(query.numpy(), k=list(range(1, count + 1)))
    rows = torch.from_numpy(found[1]).long().sort(-1)[0]  # (Q, candidates), the lowest first
    d = query[:, None] - reference[rows]
    d = (d * d).sum(-1)
    best = rows.gather(1, _first_smallest(d)[:, None])[:, 0]
    # Where even the farthest candidate is as near as rounding can tell, one that the tree left out may be the answer.
    far, near = torch.from_numpy(found[0][:, -1]), torch.from_numpy(found[0][:, 0])
    unsure = (far <= near * (1 + 1e-5) + 1e-12) if len(reference) > count else torch.zeros_like(far, dtype=torch.bool)
    if bool(unsure.any()):
        best[unsure] = _by_distance(query[unsure], reference)
    return best
