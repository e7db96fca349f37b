"""Every registered encoding x kernel x dtype x p, within the error budget of the reference."""

from __future__ import annotations

import pytest
import torch

import parapos

from .budget import DTYPES, FUSED, assert_within_budget, make_case, ways

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
kernels = pytest.mark.parametrize("kernel", ways("pape"))
encodings = pytest.mark.parametrize(("name", "kernel"), [(n, k) for n in parapos.list_encodings() for k in ways(n)])


def dims(name: str) -> tuple[int, ...]:
    return (2,) if name == "lookhere" else (1, 2, 3, 4)


@dtypes
@pytest.mark.parametrize(
    ("name", "p", "kernel"), [(n, p, k) for n in parapos.list_encodings() for p in dims(n) for k in ways(n)]
)
@pytest.mark.parametrize("n", [1, 17, 130])
def test_every_encoding(name: str, p: int, n: int, dtype: torch.dtype, kernel: str) -> None:
    assert_within_budget(make_case(name, p=p, n=n, dtype=dtype), kernel)


@dtypes
@encodings
def test_1025_tokens(name: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(32, 32, cls=True)
    assert_within_budget(make_case(name, r=r, dtype=dtype, heads=1), kernel)


@dtypes
@pytest.mark.parametrize(
    ("name", "side", "kernel"),
    [
        *((name, side, k) for name, side in [("pape", 14), ("pape", 31), ("pape_ri", 20)] for k in ways(name)),
        *((name, side, k) for name, side in [("pape_ri", 48), ("pape", 64)] for k in FUSED),
    ],
)
def test_grids(name: str, side: int, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(side, side, cls=True)
    assert_within_budget(make_case(name, r=r, dtype=dtype, heads=1, dim=64, head_dim=64), kernel)


@kernels
@dtypes
def test_points(dtype: torch.dtype, kernel: str) -> None:
    r = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) * 40 - 900
    assert_within_budget(make_case("pape", p=3, r=r, dtype=dtype), kernel)


@dtypes
@encodings
@pytest.mark.parametrize("shift", [1e4, -3e3])
def test_shifted(name: str, shift: float, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(14, 14) + shift
    assert_within_budget(make_case(name, r=r, dtype=dtype), kernel)


@dtypes
@encodings
def test_masked(name: str, dtype: torch.dtype, kernel: str) -> None:
    mask = torch.ones(4, 49, dtype=torch.bool)
    mask[1, 30:] = False
    mask[2, ::3] = False
    mask[3] = False
    r = parapos.grid_positions(7, 7)
    assert_within_budget(make_case(name, r=r, batch=4, mask=mask, dtype=dtype), kernel)


@dtypes
@encodings
def test_unplaced(name: str, dtype: torch.dtype, kernel: str) -> None:
    r = parapos.grid_positions(14, 14, cls="unplaced")
    r[100] = torch.nan
    assert_within_budget(make_case(name, r=r, dtype=dtype), kernel)


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
