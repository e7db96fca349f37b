"""From LiDAR to images and back, by loops, by hand, and where nothing is seen."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos.models.unitr import projection
from parapos.models.unitr.grid import BevGrid
from parapos.models.unitr.projection import combine, image_to_bev, lidar_to_canvas, nearest, project

from .scenes import SIZE, calibration

PATCHES = (8, 22)
GRID = BevGrid.of((-21.6, -14.4, -5.0, 21.6, 14.4, 3.0), 0.6)
IDENTITY = torch.eye(4).repeat(6, 1, 1)
HEIGHTS = torch.linspace(-10, 10, 5)


def test_a_point_is_where_the_formula_says():
    matrix, aug = calibration()[0], torch.eye(4)
    aug[:2, :2], aug[:2, 3] = torch.tensor([[0.5, 0.1], [-0.2, 0.6]]), torch.tensor([3.0, -4.0])
    points = torch.tensor([[0.3, 9.0, -1.0], [0.3, -9.0, -1.0]])
    found = project(points, matrix, aug, SIZE)
    x, y, z, _ = (matrix @ torch.tensor([0.3, 9.0, -1.0, 1.0])).tolist()
    u, v = 0.5 * x / z + 0.1 * y / z + 3, -0.2 * x / z + 0.6 * y / z - 4
    assert found.uv[0].tolist() == pytest.approx([u / SIZE[1], v / SIZE[0]], abs=1e-5)
    assert float(found.depth[0]) == pytest.approx(z, abs=1e-5)
    assert found.hit.tolist() == [True, False]  # the second is behind


def test_augmented_points_fall_where_the_originals_do():
    torch.manual_seed(1)
    angle, scale = 0.6, 1.07
    aug = torch.eye(4)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    aug[:2, :2] = scale * turn @ torch.diag(torch.tensor([1.0, -1.0]))
    aug[2, 2], aug[:3, 3] = scale, torch.randn(3)
    points = torch.rand(50, 3) * torch.tensor([8.0, 30.0, 2.0]) + torch.tensor([-4.0, 4.0, -1.0])
    moved = points @ aug[:3, :3].mT + aug[:3, 3]
    matrix = calibration()[None, :1]
    plain = project(points, matrix[0, 0], torch.eye(4), SIZE)
    again = project(moved, combine(matrix, aug[None])[0, 0], torch.eye(4), SIZE)
    assert plain.hit.any()
    pixels = torch.tensor([SIZE[1], SIZE[0]])
    assert float(((plain.uv - again.uv) * pixels).abs().max()) < 1e-3


def test_the_first_camera_that_sees_a_pillar_gets_it():
    matrix = calibration()[[0, 0, 3]][None]  # the first two see the same
    centres = torch.tensor([[0.0, 10.0, -1.0], [0.0, -10.0, -1.0], [30.0, 0.0, -1.0]])
    found = lidar_to_canvas(centres, torch.zeros(3, dtype=torch.int64), matrix, IDENTITY[None, :3], SIZE, PATCHES)
    assert found.view.tolist() == [0, 2, 0]  # seen by 0 and 1, seen by 2, seen by none
    assert (found.cells[:2] // torch.tensor(PATCHES) == 1).all()  # on the middle tile
    alone = project(centres[2:], matrix[0, 0], IDENTITY[0], SIZE).uv[0].clamp(-1, 2) + 1
    assert found.cells[2].tolist() == [int(alone[1] * 8), int(alone[0] * 22)]


def test_far_off_pillars_stay_on_the_canvas():
    centres = torch.tensor([[1e4, 0.1, -1.0], [-1e4, 0.1, -1.0], [0.0, 0.0, 0.0]])
    sample = torch.zeros(3, dtype=torch.int64)
    found = lidar_to_canvas(centres, sample, calibration()[None, :1], IDENTITY[None, :1], SIZE, PATCHES)
    assert ((found.cells >= 0) & (found.cells <= 3 * torch.tensor(PATCHES))).all()
    none = lidar_to_canvas(centres, sample, IDENTITY[None, :0], IDENTITY[None, :0], SIZE, PATCHES)
    assert none.view.tolist() == [0, 0, 0]
    assert (none.cells == none.cells[0]).all()


def test_each_pillar_is_seen_by_the_cameras_of_its_sample():
    matrices = torch.stack([calibration(), calibration().roll(2, 0)])
    centres = torch.rand(40, 3) * 40 - 20
    sample = (torch.arange(40) >= 15).long()
    both = lidar_to_canvas(centres, sample, matrices, IDENTITY.expand(2, -1, -1, -1), SIZE, PATCHES)
    for b in range(2):
        one = sample == b
        alone = lidar_to_canvas(centres[one], sample[one] * 0, matrices[[b]], IDENTITY[None], SIZE, PATCHES)
        assert torch.equal(both.view[one], alone.view)
        assert torch.equal(both.cells[one], alone.cells)


def brute(query, reference):
    """Squared distances in float32, the first of the smallest."""
    d = (query[:, None] - reference).square().sum(-1).numpy()
    return torch.from_numpy(d.argmin(1))  # NumPy's is the first


@given(st.integers(0, 2**31), st.integers(1, 400), st.booleans())
def test_the_tree_finds_what_distances_say(seed, count, ties):
    g = torch.Generator().manual_seed(seed)
    query, reference = torch.rand(30, 2, generator=g), torch.rand(count, 2, generator=g)
    if ties:
        query, reference = (query * 4).round() / 4 + 0.125, (reference * 4).round() / 4
    want = brute(query, reference)
    assert torch.equal(nearest(query, reference), want)
    assert torch.equal(projection._by_distance(query, reference), want)


def test_patches_are_lifted_to_the_nearest_grid_point():
    matrix, aug = calibration()[1], torch.eye(4)
    found = image_to_bev(matrix, aug, SIZE, PATCHES, GRID, HEIGHTS)
    nx, ny = GRID.size
    best = {}
    for ix in range(nx):
        cells = torch.stack([torch.full((ny,), ix), torch.arange(ny)], 1)
        ground = GRID.centres(cells)
        points = torch.cat([ground[:, None].expand(-1, 5, -1), HEIGHTS[None, :, None].expand(ny, -1, 1)], -1)
        seen = project(points.flatten(0, 1), matrix, aug, SIZE)
        for row, col in ((0, 0), (4, 9), (7, 21)):
            middle = torch.tensor([(col + 0.5) / 22, (row + 0.5) / 8])
            d = torch.where(seen.hit, (seen.uv - middle).square().sum(-1), torch.inf)
            least, at = d.min(0)
            if float(least) < best.get((row, col), (math.inf,))[0]:
                offset = ((seen.uv[at] - middle).abs() * torch.tensor([22.0, 8.0])).tolist()
                best[row, col] = float(least), [ix, int(at) // 5], offset
    for (row, col), (_, cell, offset) in best.items():
        assert found.cells[row * 22 + col].tolist() == cell
        assert found.residual[row * 22 + col].tolist() == pytest.approx(offset, abs=1e-3)


def test_a_view_that_sees_nothing_is_put_in_the_middle():
    behind = torch.zeros(4, 4)
    behind[2, 3] = -1.0
    for matrix in (torch.zeros(4, 4), behind):
        found = image_to_bev(matrix, torch.eye(4), SIZE, PATCHES, GRID, HEIGHTS)
        assert (found.cells == torch.tensor([36, 24])).all()
        assert (found.residual == 0).all()
