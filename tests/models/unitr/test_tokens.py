"""Pillars against a loop over points, and patches of images of any size."""

import torch

from parapos.models.unitr.grid import BevGrid
from parapos.models.unitr.tokens import PatchEmbed, PillarEncoder

GRID = BevGrid.of((-2.4, -4.8, -5.0, 2.4, 4.8, 3.0), 0.6)  # 8 x 16 pillars


def cloud(count=300):
    torch.manual_seed(3)
    points = torch.rand(count, 5) * torch.tensor([6.0, 12.0, 8.0, 255.0, 0.5]) - torch.tensor([3.0, 6.0, 5.0, 0.0, 0.0])
    points[:2, :3] = torch.tensor([[0.1, 0.1, 50.0], [0.7, 0.1, -30.0]])
    return points, torch.randint(3, (count,)).sort()[0]


def test_pillars_are_those_of_a_loop():
    points, sample = cloud()
    net = PillarEncoder(GRID, 16)
    for layer in net.pfn_layers:
        layer.norm.running_mean.uniform_(-1, 1)
        layer.norm.running_var.uniform_(0.5, 2)
    found = net.eval()(points, sample)
    members = {}
    for i, (b, p) in enumerate(zip(sample.tolist(), points, strict=True)):
        ix, iy = (int(torch.floor((p[axis] - low) / 0.6)) for axis, low in ((0, -2.4), (1, -4.8)))
        if 0 <= ix < 8 and 0 <= iy < 16:
            members.setdefault((b, ix, iy), []).append(i)
    assert torch.cat([found.sample[:, None], found.cells], 1).tolist() == [list(key) for key in sorted(members)]
    assert any(0 in rows for rows in members.values())  # 50 m above the ground, and still there
    for row, key in zip(found.x, sorted(members), strict=True):
        mine = points[members[key]]
        centre = torch.tensor([-2.4 + (key[1] + 0.5) * 0.6, -4.8 + (key[2] + 0.5) * 0.6, -1.0])
        x = torch.cat([mine, mine[:, :3] - mine[:, :3].mean(0), mine[:, :3] - centre], 1)
        first, second = net.pfn_layers
        x = first.norm(first.linear(x)).relu()
        x = torch.cat([x, x.amax(0).expand(len(x), -1)], 1)
        x = second.norm(second.linear(x)).relu().amax(0)
        assert torch.allclose(row, x, atol=1e-4)


def test_no_points_and_one_point_are_legal():
    net = PillarEncoder(GRID, 16).train()
    for points in (torch.zeros(0, 5), torch.full((4, 5), 100.0)):
        found = net(points, torch.zeros(len(points), dtype=torch.int64))
        assert found.x.shape == (0, 16)
        assert found.cells.shape == (0, 2)
    found = net(torch.zeros(1, 5), torch.tensor([2]))
    assert found.x.isfinite().all()
    assert found.cells.tolist() == [[4, 8]]
    assert found.sample.tolist() == [2]


def test_gradients_reach_all_weights():
    points, sample = cloud()
    net = PillarEncoder(GRID, 16)
    (net(points, sample).x * torch.randn(16)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


def test_patches_of_odd_sizes_are_padded_below_and_to_the_right():
    net = PatchEmbed(8, 4)
    images = torch.randn(2, 3, 10, 13)
    padded = torch.zeros(2, 3, 12, 16)
    padded[:, :, :10, :13] = images
    assert net(images).shape == (2, 12, 8)
    assert torch.equal(net(images), net(padded))
    alone = net(padded[:1, :, 4:8, 8:12])[0, 0]  # the patch of row 1, column 2
    assert torch.allclose(net(images)[0, 1 * 4 + 2], alone, atol=1e-6)
