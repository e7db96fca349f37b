"""Images splatted on the map, against a loop over their points."""

import torch

from parapos.models.unitr.grid import BevGrid
from parapos.models.unitr.lss import Splat, frustum, unproject
from parapos.models.unitr.projection import project

from .scenes import SIZE, calibration

GRID = BevGrid.of((-9.6, -4.8, -5.0, 9.6, 4.8, 3.0), 0.6)  # not square
PATCHES = (3, 5)


def cameras():
    aug = torch.eye(4).repeat(3, 1, 1)
    aug[:, 0, 3], aug[1, :2, :2] = 4.0, torch.tensor([[-0.9, 0.1], [0.1, 0.9]])
    return calibration()[:3], aug


def test_what_is_unprojected_falls_on_its_pixel():
    matrices, aug = cameras()
    points = frustum(SIZE, PATCHES, torch.tensor([2.0, 7.5]))
    assert points[1, 2, 4].tolist() == [SIZE[1] - 1, SIZE[0] - 1, 7.5]
    for matrix, change in zip(matrices, aug, strict=True):
        seen = project(unproject(points, matrix, change).flatten(0, 2), matrix, change, SIZE)
        pixels = seen.uv * torch.tensor([SIZE[1], SIZE[0]])
        assert torch.allclose(pixels, points.flatten(0, 2)[:, :2], atol=0.05)
        assert torch.allclose(seen.depth, points.flatten(0, 2)[:, 2], atol=1e-4)


@torch.no_grad()
def test_the_map_is_that_of_a_loop_and_loses_nothing_in_range():
    torch.manual_seed(0)
    net = Splat(4, 2, GRID, (1.0, 9.0, 2.0))
    x, sample, (matrices, aug) = torch.randn(3, 4, *PATCHES), torch.tensor([0, 1, 1]), cameras()
    found = net(x, sample, matrices, aug, SIZE, 2)
    assert found.shape == (2, 2, 16, 32)
    said = net.depthnet(x)
    shares, context = said[:, :4].softmax(1), said[:, 4:]
    points = frustum(SIZE, PATCHES, net.bins(torch.device("cpu")))
    want, inside = torch.zeros_like(found), 0
    for i in range(3):
        at = unproject(points, matrices[i], aug[i])
        for z in range(4):
            for row in range(3):
                for col in range(5):
                    px, py, pz = at[z, row, col].tolist()
                    ix, iy = int((px + 9.6) // 0.6), int((py + 4.8) // 0.6)
                    if 0 <= ix < 32 and 0 <= iy < 16 and -10 <= pz < 10:
                        want[sample[i], :, iy, ix] += shares[i, z, row, col] * context[i, :, row, col]
                        inside += 1
    assert 60 < inside < 180  # some are out of range
    assert torch.allclose(found, want, atol=1e-5)
