"""One mask rule everywhere: True is a real token; a query that sees no key gives zeros and zero gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import parapos

from .budget import Case, make_case, way


@pytest.fixture(autouse=True, params=["few tokens", "columns", "windows"])
def _every_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test in every way that the features kernel may take, whatever its number of tokens."""
    with way(request.param):
        yield


kernels = pytest.mark.parametrize("kernel", ["features", "reference"])
encodings = pytest.mark.parametrize("name", parapos.list_encodings())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])


def padded(name: str, dtype: torch.dtype = torch.float32) -> Case:
    mask = torch.ones(3, 30, dtype=torch.bool)
    mask[0, 20:] = False
    mask[1, :7] = False
    r = parapos.grid_positions(5, 6).expand(3, -1, -1).clone()
    return make_case(name, r=r, batch=3, mask=mask, dtype=dtype)


@kernels
@encodings
@DTYPES
@pytest.mark.parametrize("fill", [7.0, -1e4, torch.nan, torch.inf])
def test_padding_never_matters(name: str, kernel: str, dtype: torch.dtype, fill: float) -> None:
    """Whatever stands in padded keys and values, NaN included, valid outputs are equal to the last bit."""
    case = padded(name, dtype)
    before = case.run(kernel, dtype)
    case.tensors["k"][~case.mask[:, None, :].expand(-1, 2, -1)] = fill
    case.tensors["v"][~case.mask[:, None, :].expand(-1, 2, -1)] = fill
    after = case.run(kernel, dtype)
    assert torch.equal(before["out"], after["out"])
    for key in ("dq", "dk", "dv"):
        rows = case.mask[:, None, :, None].expand_as(before[key])
        assert torch.equal(before[key][rows], after[key][rows]), key


@kernels
@encodings
def test_padding_moves_nothing(name: str, kernel: str) -> None:
    """Positions of padding do not move the centre, so far-away padding costs no digits."""
    case = padded(name)
    before = case.run(kernel, torch.float32)["out"]
    case.r[~case.mask] += 1000.0
    assert torch.equal(before, case.run(kernel, torch.float32)["out"])


@kernels
@encodings
def test_alone_equals_padded(name: str, kernel: str) -> None:
    case = padded(name)
    together = case.run(kernel, torch.float64)["out"]
    for b in range(3):
        keep = case.mask[b]
        alone = Case(
            case.encoding,
            {key: t[b : b + 1, ..., keep, :] for key, t in case.tensors.items()},
            case.r[b][keep],
            None,
            torch.float64,
        ).run(kernel, torch.float64)["out"]
        torch.testing.assert_close(together[b][:, keep], alone[0], rtol=1e-9, atol=1e-11)


@kernels
@encodings
@DTYPES
def test_empty_samples(name: str, kernel: str, dtype: torch.dtype) -> None:
    case = padded(name, dtype)
    case.mask[2] = False
    q, k, v = (case.tensors[key].clone().requires_grad_() for key in "qkv")
    q_, k_, terms = case.encoding(case.tensors["x"], q, k, case.r)
    out = parapos.attend(q_, k_, v, terms, case.mask, case.encoding.scale, kernel)
    assert (out[2] == 0).all()
    assert (out[:2] != 0).any()
    out.float().square().sum().backward()
    out.float().sum()
    for t in (q, k, v):
        assert t.grad is not None
        assert torch.isfinite(t.grad).all()
        assert (t.grad[2] == 0).all()


@kernels
def test_row_hidden_by_a_table(kernel: str) -> None:
    """A row that its own bias hides from every key is empty too."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 3, :] = -torch.inf
    out = parapos.attend(q, q, q, [parapos.Table(bias)], kernel=kernel)
    assert (out[..., 3, :] == 0).all()
    (gradient,) = torch.autograd.grad(out[..., 3, :].sum(), q)
    assert (gradient == 0).all()


def test_released_alibi_ignores_padding() -> None:
    case = padded("alibi")
    official = parapos.create_encoding("alibi", dim=24, heads=2, head_dim=16, pos_dim=2, compat="official")
    q, k, v, x = (case.tensors[key] for key in "qkvx")
    masked, unmasked = (
        parapos.attend(*encoding(x, q, k, case.r)[:2], v, encoding(x, q, k, case.r)[2], case.mask)
        for encoding in (case.encoding, official)
    )
    plain = parapos.attend(q, k, v, case.encoding(x, q, k, case.r)[2], None)
    assert torch.equal(unmasked, plain)
    assert not torch.allclose(masked[0], unmasked[0])
