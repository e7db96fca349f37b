"""Attention in sets on as many tokens as a keyframe has."""

import pytest
import torch

from parapos.bench import measure
from parapos.models.unitr.layers import SetLayer
from parapos.models.unitr.partition import partition

TOKENS, LIMIT = 30_000, 4 * 2**30


def peak(encoding):
    """Peak bytes of a layer of full size, forward and backward. For a fresh process."""

    def make():
        torch.manual_seed(0)
        cells = torch.randperm(360 * 360)[:TOKENS]
        cells = torch.stack([cells // 360, cells % 360], 1)
        part = partition(cells, cells[:, 0] * 0, side=30, shift=15, size=90, major="x")
        layer = SetLayer(128, 256, heads=8, encoding=encoding)
        x = torch.randn(TOKENS, 128, requires_grad=True)
        return lambda: layer(x, (20_000, 10_000), part).sum().backward()

    return measure.peak_memory(make, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["none", "pape", "alibi", "rope", "polynomial"])
def test_thirty_thousand_tokens_fit_in_four_gigabytes(encoding):
    bytes_ = measure.apart(peak, encoding)
    assert bytes_ is not None
    assert 2**20 < bytes_ < LIMIT
