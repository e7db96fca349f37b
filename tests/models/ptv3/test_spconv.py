"""spconv computes the same convolutions, where it is installed."""

from importlib.util import find_spec

import pytest
import torch

from parapos.models.ptv3.convolution import SparseConv3d, kernel_map

from .clouds import clouds, tiny

installed = pytest.mark.skipif(find_spec("spconv") is None, reason="spconv is not installed")


@installed
@pytest.mark.parametrize("size", [3, 5])
@torch.no_grad()
def test_it_is_equal(size):
    from parapos.models.ptv3.spconv import SpConv3d

    x, _, cells, offset = clouds(300, 200, side=9, channels=8)
    cells = torch.cat([cells, cells[:40]])  # some points share a cell
    x = torch.cat([x, torch.randn(40, 8)])
    cloud = torch.repeat_interleave(torch.arange(3), torch.tensor([300, 200, 40]))
    cloud[500:] = 0
    ours, theirs = SparseConv3d(8, 16, size), SpConv3d(8, 16, size)
    theirs.load_state_dict(ours.state_dict())
    neighbours = kernel_map(cells, cloud, size)
    want = ours(x, neighbours)
    for _ in range(2):  # the second time from what the library kept
        torch.testing.assert_close(theirs(x, neighbours), want, rtol=1e-4, atol=1e-4)
    assert neighbours.cache
    assert offset.tolist() == [300, 500]


@installed
@torch.no_grad()
def test_networks_are_equal():
    batch = clouds(200, 90)
    ours, theirs = (tiny(cpe="xcpe", conv_backend=backend).eval() for backend in ("torch", "spconv"))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(*batch), ours(*batch), rtol=1e-4, atol=1e-4)


@installed
def test_training_on_the_cpu_is_refused():
    model = tiny(conv_backend="spconv")
    with pytest.raises(RuntimeError, match="no backward pass on the CPU; train with conv_backend='torch'"):
        model(*clouds(50))
    feat, coord, cells, offset = clouds(5)
    far = cells + torch.tensor([[40_000]] + [[0]] * 4)
    with torch.no_grad(), pytest.raises(ValueError, match="too large for spconv on the CPU"):
        model.eval()(feat, coord, far, offset)


def test_without_the_library_it_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "spconv.pytorch", None)
    monkeypatch.setitem(__import__("sys").modules, "spconv", None)
    with pytest.raises(ImportError, match=r"conv_backend='spconv' needs the library.*pip install spconv"):
        tiny(conv_backend="spconv")
    with pytest.raises(ValueError, match="conv_backend must be one of torch, spconv, got 'cuda'"):
        tiny(conv_backend="cuda")


def test_neighbours_are_searched_for_when_they_are_needed():
    _, _, cells, _ = clouds(30)
    neighbours = kernel_map(cells, torch.zeros(30, dtype=torch.long), 3)
    assert "chunks" not in vars(neighbours)
    assert len(neighbours.chunks) == 1
    assert neighbours.chunks is neighbours.chunks
    assert torch.equal(neighbours.cells[:, 1:][neighbours.sites.group], cells)
