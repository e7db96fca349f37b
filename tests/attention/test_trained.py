"""Forms as training leaves them: flat, steep, of low rank, aligned. The budget holds, and the estimate is no luxury."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos import Positions, Quadratic
from parapos.attention import columns, fused

from .budget import DTYPES, Case, assert_within_budget, fed, full, make_case

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


# The largest error of a logit that columns may bring, as columns.py states it. Rounding falls as it likes, so a single
# logit of many may be off by twice as much.
LOGIT = 5e-4
SCALE = 2.0


def at_the_limit(term: Quadratic, q: Tensor, scale: float) -> Quadratic:
    """The term with the steepest multiple of its form that columns are used for, to a fifth."""
    assert term.M is not None
    made, M = fused.columns(term), term.M
    while fused.fits(replace(term, M=1.2 * M).coefficients(torch.float32), made.bound, scale):
        M = 1.2 * M
    assert fused.fits(replace(term, M=M).coefficients(torch.float32), made.bound, scale)
    return replace(term, M=M)


def check_logits(dtype: torch.dtype, p: int) -> None:
    """The steepest form whose scores are columns has logits that are as exact as promised."""
    g = torch.Generator().manual_seed(p)
    r = Positions.of(20 * torch.rand(1, 300, p, generator=g))
    root, q = torch.randn(1, 2, 300, p, p, generator=g), torch.zeros(1, 2, 300, 16, dtype=dtype)
    term = at_the_limit(Quadratic(-1e-4 * root @ root.mT, None, r), q, SCALE)
    with fed() as calls:
        parapos.attend(q, q, q, [term], scale=SCALE, kernel="fused")
    ((query, key),) = calls
    assert query.shape[-1] > 16
    error = (query.double() @ key.double().mT - term.scores(torch.float64)) * SCALE
    error = error - error.mean(-1, keepdim=True)  # what all keys share, softmax takes away
    assert error.abs().max() <= 2 * LOGIT, f"{error.abs().max() / LOGIT:.2f} of what is allowed"


def check_single() -> None:
    """The steepest form whose scores are columns in float32 keeps weights and gradients in the budget."""
    case = trained("low rank", 2, 600, torch.float32)
    heads, x = case.tensors["q"], case.tensors["x"]

    def accepted(factor: float) -> bool:
        with torch.no_grad():
            case.encoding.w_p.mul_(factor)
            (term,) = case.encoding(x, heads, heads, case.r)[2]
            made = fused.columns(term)
            return fused.fits(term.coefficients(torch.float32), made.bound, case.encoding.scale)

    while accepted(1.1):
        pass
    assert accepted(1 / 1.1)
    assert_within_budget(case, "fused")


@pytest.mark.parametrize(("dtype", "p"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float16, 2)])
def test_the_allowance_of_logits(dtype: torch.dtype, p: int) -> None:
    """It holds in every type, and neither ten times the allowance nor a tenth of the rounding would."""
    check_logits(dtype, p)
    for name, factor in (("ALLOWED", 10), ("ROUNDING", 0.1)):
        changed = patch.object(columns, name, factor * getattr(columns, name))
        with changed, pytest.raises(AssertionError, match="allowed"):
            check_logits(dtype, p)


def test_the_allowance_of_float32() -> None:
    check_single()
    for name, factor in (("ALLOWED", 10), ("ROUNDING", 0.1)):
        changed = patch.object(columns, name, factor * getattr(columns, name))
        with changed, pytest.raises(AssertionError, match="error over allowance"):
            check_single()


def sloped(n: int, count: int, seed: int) -> dict[str, float]:
    """Errors of gradients, relative to float64, of forms in one dimension that look far away from each query.

    count: keys at the end without a position.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, 1, 4, n, 8, generator=g).unbind()
    M, slope = -4 * torch.rand(1, 4, n, 1, 1, generator=g), 100 * torch.randn(1, 4, n, 1, generator=g)
    r = torch.arange(1, n + 1).float()[:, None]
    r[n - count :] = torch.nan
    found = []
    for dtype, kernel in ((torch.float64, "reference"), (torch.float32, "fused")):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, M, slope)]
        out = parapos.attend(*leaves[:3], [Quadratic(*leaves[3:], Positions.of(r))], None, 0.3, kernel)
        assert isinstance(out, Tensor)
        found.append(torch.autograd.grad(out, leaves, dout.to(dtype)))
    return {
        name: float((x - y).norm() / y.norm()) for name, y, x in zip(("q", "k", "v", "M", "g"), *found, strict=True)
    }


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("seed", [0, 4])
def test_gradients_of_forms_that_look_far_away(seed: int, count: int) -> None:
    """What rounding leaves of the sum of a row of gradients must not count as much as its keys are far."""
    with fed() as calls:
        errors = sloped(110, count, seed)
    assert calls[0][0].shape[-1] > 8, "columns"
    assert max(errors.values()) <= 5e-4, errors


def test_float16_never_overflows() -> None:
    """Products of columns stay in its range, however large scale and form are allowed to be by rounding alone."""
    g = torch.Generator().manual_seed(0)
    r = Positions.of(20 * torch.rand(1, 50, 2, generator=g))
    q, k, v = torch.randn(3, 1, 1, 50, 16, generator=g).half().unbind()
    for steep in (1e2, 1e3, 1e4, 1e5):
        term = Quadratic(-steep * torch.eye(2).expand(1, 1, 50, 2, 2), None, r)
        found, want = (parapos.attend(q, k, v, [term], scale=1e-4, kernel=kernel) for kernel in ("fused", "reference"))
        torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)
