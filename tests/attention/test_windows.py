"""Ranges of keys that a block of queries can see: nothing outside has a weight, and there is an outside."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import parapos
from parapos.attention import features
from parapos.attention.windows import boxes, inverse, windows
from parapos.positions import centre


def form(p: int, n: int, g: torch.Generator, size: float) -> Tensor:
    """Negative definite (1, 2, n, p, p), of any condition up to 1e3."""
    root = torch.randn(1, 2, n, p, p, generator=g)
    return -size * (root @ root.transpose(-1, -2) + 1e-2 * torch.eye(p))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 10**6), st.floats(0.01, 100), st.floats(0, 20), st.booleans())
def test_no_weight_outside(p: int, seed: int, size: float, slope: float, isotropic: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    n = 90
    r = (torch.rand(1, n, p, generator=g) * 60).sort(1).values
    q, k, v = torch.randn(3, 1, 2, n, 8, generator=g).double().unbind()
    M = -size * torch.rand(1, 2, n, generator=g) if isotropic else form(p, n, g, size)
    term = parapos.Quadratic(M.double(), slope * torch.randn(1, 2, n, p, generator=g).double(), r, unplaced=False)
    blocks = [slice(0, 30), slice(30, 60), slice(60, 90)]
    found = windows(q.float(), k.float(), term, None, 0.35, blocks)
    assert found is not None
    _, weights = parapos.attend(q, k, v, [term], scale=0.35, return_weights=True)
    for head, ranges in enumerate(found):
        for rows, (start, end) in zip(blocks, ranges, strict=True):
            block = weights[0, head, rows]
            assert block[:, start:end].sum(-1).allclose(torch.ones(30).double())
            outside = torch.cat([block[:, :start], block[:, end:]], dim=-1)
            assert not outside.float().any()


def test_steep_parabolas_leave_most_keys_out() -> None:
    """A 48 x 48 grid and the forms PaPE starts with: the middle rows see half of the keys at most."""
    torch.manual_seed(0)
    r = parapos.grid_positions(48, 48)[None]
    n = r.shape[1]
    q, k = torch.randn(2, 1, 2, n, 64).unbind()
    M = -6 * torch.eye(2).expand(1, 2, n, 2, 2)
    term = parapos.Quadratic(M, torch.randn(1, 2, n, 2), r)
    blocks = [slice(x, x + 256) for x in range(0, n, 256)]
    found = windows(q, k, term, None, 0.125, blocks)
    assert found is not None
    assert all(end - start < n for head in found for start, end in head)
    assert all(head[4][1] - head[4][0] <= n * 3 // 4 and head[0][1] <= n // 2 for head in found)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_inverse(p: int) -> None:
    M = form(p, 50, torch.Generator().manual_seed(p), 3.0).double()
    inverted, negative = inverse(M.permute(3, 4, 0, 1, 2))
    torch.testing.assert_close(inverted.permute(2, 3, 4, 0, 1), torch.linalg.inv(M))
    assert negative.all()
    M[0, 0, 7] *= -1
    assert inverse(M.permute(3, 4, 0, 1, 2))[1].sum() == 99


def test_what_does_not_fall_is_seen_everywhere() -> None:
    r = parapos.grid_positions(10, 10)[None]
    q = torch.randn(1, 1, 100, 8)
    flat = -torch.eye(2).expand(1, 1, 100, 2, 2).clone()
    flat[0, 0, 40] = torch.tensor([[-1.0, 0.0], [0.0, 0.0]])
    term = parapos.Quadratic(flat, None, r)
    low, high = boxes(q, q, term, centre(r)[0], None, 1.0)
    assert low[:, 0, 0, 40].eq(-torch.inf).all()
    assert high[:, 0, 0, 40].eq(torch.inf).all()
    assert low[:, 0, 0, 41].isfinite().all()
    found = windows(q, q, term, None, 1.0, [slice(40, 41)])
    assert found == [[(0, 128)]]


@pytest.mark.parametrize("change", ["unplaced", "slope only", "negative scale"])
def test_no_ranges(change: str) -> None:
    r = parapos.grid_positions(6, 6, cls="unplaced" if change == "unplaced" else True)[None]
    q = torch.randn(1, 1, 37, 8)
    M = None if change == "slope only" else -torch.ones(1, 1, 37)
    term = parapos.Quadratic(M, torch.ones(1, 1, 37, 2), r)
    assert windows(q, q, term, None, -1.0 if change == "negative scale" else 1.0, [slice(0, 37)]) is None


def test_padding_is_never_seen() -> None:
    """Padded keys, which may hold anything, move no range. Padded queries have no term, so they see all real keys."""
    r = parapos.grid_positions(20, 20)[None]
    q, k = torch.randn(2, 1, 1, 400, 8).unbind()
    mask = torch.ones(1, 400, dtype=torch.bool)
    mask[:, 200:] = False
    term = parapos.Quadratic(-50.0 * mask[:, None], None, r)
    k[:, :, 200:] = torch.nan
    found = windows(q, k, term, mask, 1.0, [slice(0, 100), slice(100, 200), slice(200, 400)])
    assert found is not None
    assert found[0][0][1] < 192
    assert found[0][1][0] > 0
    assert found[0][1][1] == 224
    assert found[0][2] == (0, 224)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_skipped_keys_change_nothing(dtype: torch.dtype, masked: bool) -> None:
    """Output and gradients with ranges equal those without, to a few units in the last place."""
    g = torch.Generator().manual_seed(0)
    r = parapos.grid_positions(23, 23)[None]
    n = r.shape[1]
    tensors = [torch.randn(1, 2, n, 16, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    M = (-60 * torch.eye(2) - 5 * torch.rand(1, 2, n, 1, 1, generator=g)).requires_grad_()
    slope = (10 * torch.randn(1, 2, n, 2, generator=g)).requires_grad_()
    mask = torch.rand(1, n, generator=g) < 0.8 if masked else None
    found = []
    for queries in (10**6, 64):
        with patch.multiple(features, SMALL=0, QUERIES=queries):
            out = parapos.attend(*tensors, [parapos.Quadratic(M, slope, r)], mask, kernel="features")
        out = out if mask is None else out * mask[:, None, :, None]
        found.append([out, *torch.autograd.grad(out.sum(), [*tensors, M, slope])])
    eps = torch.finfo(dtype).eps
    for whole, ranged in zip(*found, strict=True):
        torch.testing.assert_close(ranged, whole, rtol=8 * eps, atol=8 * eps * whole.abs().max().item())
