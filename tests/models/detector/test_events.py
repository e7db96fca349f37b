"""Detectors of events: the newest token of a cell is seen, padding and samples without tokens are not."""

from __future__ import annotations

import pytest
import torch

from parapos.models import EventDetector, create_model
from parapos.models.detector import detection_loss, postprocess
from parapos.models.detector.events import newest_on_grid

from ...marks import full
from ..nets import NAMES
from .test_network import step_loss, stirred

ENCODINGS = [name if name in ("pape", "alibi") else full(name) for name in NAMES]


def small(encoding="pape", **options):
    torch.manual_seed(0)
    common = dict(dim=24, heads=2, depth=1, mlp_dim=32, head_dim=12, neck_dim=16, drop_path=0.0, buckets=2, patch=8)
    return stirred(EventDetector(encoding=encoding, sensor=(40, 56), **{**common, **options}))


def tokens(lengths, seed=0):
    """Inputs of so many tokens each, and of each sample alone. Padding holds what it may."""
    g = torch.Generator().manual_seed(seed)
    count, most = len(lengths), max(lengths)
    codes = torch.randint(0, 2 * 2 * 64, (count, most, 9), generator=g)
    x, y = (torch.randint(0, n, (count, most), generator=g) for n in (7, 5))
    t = torch.randint(0, 500_000, (count, most), generator=g).sort(1, descending=True).values
    together = [codes, x, y, t, torch.tensor(lengths)]
    alone = [[value[i : i + 1, :n] for value in together[:4]] + [torch.tensor([n])] for i, n in enumerate(lengths)]
    return together, alone


def test_the_last_token_of_a_cell_is_seen():
    values = torch.randn(2, 5, 3, requires_grad=True)
    x, y = torch.tensor([[1, 1, 0, 1, 1], [0] * 5]), torch.tensor([[0, 0, 1, 0, 0], [0] * 5])
    mask = torch.tensor([[True, True, True, True, False], [False] * 5])
    grid = newest_on_grid(values, x, y, mask, 2, 3)
    want = torch.zeros(2, 3, 2, 3)
    want[0, :, 0, 1], want[0, :, 1, 0] = values[0, 3].detach(), values[0, 2].detach()
    assert torch.equal(grid, want)
    grid.sum().backward()
    assert values.grad.sum(2).ne(0).tolist() == [[False, False, True, True, False], [False] * 5]
    with pytest.raises(ValueError, match="grid of 1 rows and 3 columns, got x up to 1, y up to 1"):
        newest_on_grid(values, x, y, mask, 1, 3)


def test_maps_of_gen1():
    net = create_model("event_det_nano").eval()
    codes = torch.randint(0, 5120, (1, 3, 256))
    place = torch.tensor([[0, 18, 5]]), torch.tensor([[0, 14, 7]])
    with torch.no_grad():
        raw = net(codes, *place, torch.tensor([[90_000, 50_000, 0]]))
    assert [tuple(x.shape) for x in raw.o2o] == [(1, 66, 30, 38), (1, 66, 15, 19), (1, 66, 7, 9)]
    assert sum(x[0, 0].numel() for x in raw.o2o) == 1488
    assert net.strides == (8, 16, 32)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_padded_batch_is_its_samples_alone(encoding):
    net = small(encoding).double().eval()
    together, alone = tokens([9, 0, 4, 1])
    with torch.no_grad():
        raw = net(*together)
        for i, inputs in enumerate(alone):
            one = net(*inputs)
            for a, b in zip((*raw.o2m, *raw.o2o), (*one.o2m, *one.o2o), strict=True):
                torch.testing.assert_close(a[i], b[0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(net.detect(*together)[i], postprocess(one)[0], rtol=1e-9, atol=1e-9)


def test_what_stands_in_padding_does_not_matter():
    net = small().eval()
    together, _ = tokens([6, 3])
    poisoned = [value.clone() for value in together]
    for value, bad in zip(poisoned[1:4], (99, -5, 7), strict=True):
        value[1, 3:] = bad
    poisoned[0][1, 3:] = 3
    with torch.no_grad():
        for a, b in zip(net(*together).o2o, net(*poisoned).o2o, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[5, 0], [0, 0]])
def test_samples_without_tokens_learn(lengths):
    net = small().train()
    together, _ = tokens([5, 2])
    if not any(lengths):
        together[:4] = [value[:, :0] for value in together[:4]]
    together[4] = torch.tensor(lengths)
    boxes = torch.tensor([[4.0, 4, 30, 30]]).expand(2, 1, 4)
    sums = detection_loss(net(*together), boxes, torch.zeros(2, 1, dtype=torch.long), torch.tensor([1, 1]))
    step_loss(sums).backward()
    for name, p in net.named_parameters():
        assert not p.requires_grad or p.grad.isfinite().all(), name
    with torch.no_grad():
        assert net.eval().detect(*together).isfinite().all()


def test_bad_sensors():
    for sensor in ((240,), (240, 0), (240.0, 304)):
        with pytest.raises(ValueError, match="sensor must be its height and width"):
            create_model("event_det_nano", sensor=sensor)
    net = EventDetector(dim=8, heads=1, depth=1, mlp_dim=8, sensor=(16, 64), neck_dim=8)
    with pytest.raises(ValueError, match="at least 2 x 2 patches, got 1 x 4"):
        net(torch.zeros(1, 1, 4).long(), *(torch.zeros(1, 1) for _ in range(3)))
