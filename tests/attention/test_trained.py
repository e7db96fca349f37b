"""Forms as training leaves them: flat, steep, of low rank, aligned. The budget holds, and the estimate is no luxury."""

from __future__ import annotations

import pytest
import torch

import parapos

from .budget import DTYPES, Case, assert_within_budget, full, make_case

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
FORMS: dict[str, dict[str, object]] = {
    "flat": {"w_a": 0.1, "w_p": 0.1},
    "gentle": {"w_p": 0.3},
    "initial": {},
    "certain": {"w_a": 30.0},
    "steep": {"w_p": 3.0},
    "cliff": {"w_p": 30.0},
    "both": {"w_a": 30.0, "w_p": 30.0},
    "sloped": {"w_b": 30.0},
    "low rank": {"parabolas": 1},
    "low rank, steep": {"parabolas": 1, "w_p": 10.0},
    "aligned": {"aligned": True},
    "aligned, steep": {"aligned": True, "w_p": 3.0},
}
USUAL = {("initial", 2, 600), ("steep", 2, 64), ("low rank", 3, 64), ("aligned", 2, 600), ("both", 3, 64)}


def trained(form: str, p: int, n: int, dtype: torch.dtype, **options: object) -> Case:
    """Heads of 32 over a grid of n tokens, with weights scaled as `form` says before they are rounded to dtype."""
    change = dict(FORMS[form])
    if "parabolas" in change:
        options["parabolas"] = change.pop("parabolas")  # fewer than p, so that M is singular
    sides = {(2, 64): (8, 8), (2, 600): (20, 30), (3, 64): (4, 4, 4), (3, 600): (6, 10, 10)}[p, n]
    r = parapos.grid_positions(*sides) if p == 2 else parapos.tubelet_positions(*sides)
    case = make_case("pape", p=p, r=r, heads=2, head_dim=32, dim=32, **options)
    with torch.no_grad():
        if change.pop("aligned", False):  # all parabolas look the same way
            case.encoding.w_p.copy_(case.encoding.w_p[:, :1] * case.encoding.w_p[..., :1])
        for name, factor in change.items():
            getattr(case.encoding, name).mul_(factor)
    case.encoding.to(dtype)
    case.tensors = {name: t.to(dtype) for name, t in case.tensors.items()}
    case.dtype = dtype
    return case


@dtypes
@pytest.mark.parametrize(
    ("form", "p", "n"),
    [(f, p, n) if (f, p, n) in USUAL else full(f, p, n) for f in FORMS for p in (2, 3) for n in (64, 600)],
)
def test_trained_forms(form: str, p: int, n: int, dtype: torch.dtype) -> None:
    assert_within_budget(trained(form, p, n, dtype), "fused")
