"""Submanifold convolution: a dense convolution, read where points are."""

import pytest
import torch
import torch.nn.functional as F

from parapos.models.ptv3 import convolution
from parapos.models.ptv3.convolution import SparseConv3d, kernel_map

from .clouds import clouds


def dense(conv, x, cells, cloud, side):
    """conv3d over the whole grid of each cloud, read at the cells."""
    grid = x.new_zeros(int(cloud.max()) + 1, x.shape[1], side, side, side)
    grid[cloud, :, cells[:, 0], cells[:, 1], cells[:, 2]] = x
    out = F.conv3d(grid, conv.weight.permute(0, 4, 1, 2, 3), conv.bias, padding=conv.size // 2)
    return out[cloud, :, cells[:, 0], cells[:, 1], cells[:, 2]]


def points(*lengths, side):
    x, _, cells, _ = clouds(*lengths, side=side, channels=4)
    return x.double(), cells, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("lengths", [(60, 40), (1,), (125, 3)])  # 125: the cube is full, so borders meet
def test_it_is_a_dense_convolution_at_the_sites(size, lengths, monkeypatch):
    monkeypatch.setattr(convolution, "CHUNK", 37)
    x, cells, cloud = points(*lengths, side=5)
    conv = SparseConv3d(4, 6, size).double()
    x.requires_grad_()
    weights = torch.randn(len(x), 6, dtype=torch.float64)
    found, want = conv(x, kernel_map(cells, cloud, size)), dense(conv, x, cells, cloud, 5)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    wanted = [x, conv.weight, conv.bias]
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), wanted),
        torch.autograd.grad((want * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_by_differences():
    x, cells, cloud = points(12, 5, side=3)
    conv, neighbours = SparseConv3d(4, 2, 3).double(), kernel_map(cells, cloud, 3)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: conv(x, neighbours), (x, conv.weight, conv.bias))


def test_points_that_share_a_cell():
    """Neighbours see the first of them, each sees itself, and results do not vary."""
    x, cells, cloud = points(30, side=4)
    twice = torch.cat([cells, cells[:10], cells[:3]])
    y = torch.cat([x, torch.randn(13, 4, dtype=torch.float64)]).requires_grad_()
    conv = SparseConv3d(4, 6, 3).double()
    neighbours = kernel_map(twice, cloud.new_zeros(43), 3)
    found = conv(y, neighbours)
    want = dense(conv, x, cells, cloud, 4)
    torch.testing.assert_close(found[:30], want)
    centre = conv.weight[:, 1, 1, 1]
    rows = torch.cat([torch.arange(10), torch.arange(3)])
    torch.testing.assert_close(found[30:], want[rows] + (y[30:] - x[rows]) @ centre.t())
    assert torch.autograd.gradcheck(lambda y: conv(y, neighbours), y)
    for _ in range(3):
        assert torch.equal(conv(y, kernel_map(twice, cloud.new_zeros(43), 3)), found)


def test_order_of_points_does_not_matter():
    x, cells, cloud = points(60, 40, side=6)
    conv, order = SparseConv3d(4, 6, 5, bias=False).double(), torch.randperm(100)
    alone = conv(x, kernel_map(cells, cloud, 5))
    torch.testing.assert_close(conv(x[order], kernel_map(cells[order], cloud[order], 5)), alone[order])


def test_drawn_as_pytorch_draws_convolutions():
    torch.manual_seed(0)
    conv, like = SparseConv3d(8, 64, 3), torch.nn.Conv3d(8, 64, 3)
    assert conv.weight.abs().max().item() == pytest.approx(like.weight.abs().max().item(), rel=1e-3)
    assert conv.weight.std().item() == pytest.approx(like.weight.std().item(), rel=0.02)
    assert conv.bias.abs().max() <= (8 * 27) ** -0.5


def test_half_precision_is_widened():
    x, cells, cloud = points(30, side=4)
    conv, neighbours = SparseConv3d(4, 6, 3), kernel_map(cells, cloud, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = conv(x.bfloat16(), neighbours)
    assert found.dtype == torch.float32
    assert torch.equal(found, conv(x.bfloat16().float(), neighbours))


def test_what_is_refused():
    _, cells, cloud = points(5, side=4)
    with pytest.raises(ValueError, match="odd"):
        kernel_map(cells, cloud, 2)
    with pytest.raises(ValueError, match="kernels of 5"):
        SparseConv3d(4, 6, 5)(torch.randn(5, 4), kernel_map(cells, cloud, 3))
    with pytest.raises(ValueError, match="64-bit keys"):
        kernel_map(torch.tensor([[2**30, 2**30, 2**30]]), torch.zeros(1, dtype=torch.long), 3)
