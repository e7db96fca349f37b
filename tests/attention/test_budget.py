"""Every registered encoding x kernel x dtype x p, with masks and without, within the error budget of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import parapos

from .budget import DTYPES, TRAINING, assert_within_budget, full, make_case

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
kernels = pytest.mark.parametrize("kernel", TRAINING)
encodings = pytest.mark.parametrize("name", parapos.list_encodings())


def dims(name: str) -> tuple[int, ...]:
    return (2,) if name == "lookhere" else (1, 2, 3, 4)


@kernels
@dtypes
@pytest.mark.parametrize(
    ("name", "p", "n"),
    [
        (name, p, n) if (p, n) in ((2, 17), (3, 130)) else full(name, p, n)
        for name in parapos.list_encodings()
        for p in dims(name)
        for n in (1, 17, 130)
    ],
)
def test_every_encoding(name: str, p: int, n: int, dtype: torch.dtype, kernel: str) -> None:
    assert_within_budget(make_case(name, p=p, n=n, dtype=dtype), kernel)


@kernels
@encodings
def test_exact_calls_keep_the_strict_budget(name: str, kernel: str) -> None:
    assert_within_budget(make_case(name, r=parapos.grid_positions(12, 12, cls=True)), kernel, exact=True)


@kernels
@dtypes
@pytest.mark.parametrize("name", [n if n == "pape" else full(n) for n in parapos.list_encodings()])
def test_1025_tokens(name: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(32, 32, cls=True)
    assert_within_budget(make_case(name, r=r, dtype=dtype, heads=1), kernel)


@kernels
@dtypes
@pytest.mark.parametrize(
    ("name", "side"), [("pape", 14), full("pape", 31), ("pape_ri", 20), full("pape_ri", 48), full("pape", 64)]
)
def test_grids(name: str, side: int, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(side, side, cls=True)
    assert_within_budget(make_case(name, r=r, dtype=dtype, heads=1, dim=64, head_dim=64), kernel)


@kernels
@dtypes
def test_points(dtype: torch.dtype, kernel: str) -> None:
    r = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) * 40 - 900
    assert_within_budget(make_case("pape", p=3, r=r, dtype=dtype), kernel)


@kernels
@dtypes
@encodings
@pytest.mark.parametrize("shift", [1e4, full(-3e3)])
def test_shifted(name: str, shift: float, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(9, 9) + shift
    assert_within_budget(make_case(name, r=r, dtype=dtype), kernel)


def padding(batch: int, keys: int) -> Tensor:
    mask = torch.ones(batch, keys, dtype=torch.bool)
    mask[1, keys * 3 // 5 :] = False
    mask[2, ::3] = False
    mask[3] = False
    return mask


def causal(batch: int, queries: int, keys: int) -> Tensor:
    """(B, 2, n, N): one head looks back, one ahead, some rows are empty."""
    order = torch.arange(keys) <= torch.arange(queries)[:, None]
    mask = torch.stack([order, ~order]).expand(batch, -1, -1, -1).clone()
    mask[0, 0, 3] = False
    return mask


@kernels
@dtypes
@encodings
@pytest.mark.parametrize("kind", ["padding", "mask", "shared mask"])
def test_masked(name: str, kind: str, dtype: torch.dtype, kernel: str) -> None:
    mask = {"padding": padding(4, 49), "mask": causal(4, 49, 49), "shared mask": causal(1, 49, 49)[:, :1]}[kind]
    r = parapos.grid_positions(7, 7)
    assert_within_budget(make_case(name, r=r, batch=4, mask=mask, dtype=dtype), kernel)


@kernels
@dtypes
@encodings
def test_unplaced(name: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(9, 9, cls="unplaced")
    r[50] = torch.nan
    assert_within_budget(make_case(name, r=r, dtype=dtype), kernel)


@kernels
@dtypes
@encodings
def test_positions_per_sample(name: str, dtype: torch.dtype, kernel: str) -> None:
    r = torch.stack([parapos.grid_positions(5, 7), parapos.grid_positions(7, 5) * 3 + 100])
    assert_within_budget(make_case(name, r=r, batch=2, dtype=dtype), kernel)


@kernels
@dtypes
@pytest.mark.parametrize("off", ["distance", "direction", "context", "activation", "projection"])
def test_ablations(off: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(9, 9)
    assert_within_budget(make_case("pape", r=r, dtype=dtype, **{off: False}), kernel)


@kernels
@dtypes
@pytest.mark.parametrize("degree", [1, 3, 4])
@pytest.mark.parametrize("kind", ["univariate", "multivariate"])
def test_polynomials(degree: int, kind: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(4, 4)
    assert_within_budget(make_case("polynomial", r=r, dtype=dtype, degree=degree, kind=kind), kernel)
