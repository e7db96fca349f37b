"""Terms: their definition, their hand-written gradients, and their columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parapos.attention import Distance, Polynomial, Quadratic, Table, Term, attend, blockwise
from parapos.attention.columns import columns
from parapos.attention.features import widths

from .budget import WAYS, way


def terms(p: int, n: int = 6, batch: int = 2, shared: bool = False) -> list[Term]:
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    r = torch.randn(1 if shared else batch, n, p, generator=g, dtype=torch.float64) * 3
    r[0, 2] = torch.nan
    root = rand(batch, 2, n, p, p)
    return [
        Quadratic(-(root @ root.transpose(-1, -2)).detach().requires_grad_(), rand(batch, 2, n, p), r),
        Quadratic(rand(batch, 2, n, p, p), None, r),
        Quadratic(None, rand(batch, 2, n, p), r),
        Quadratic(rand(batch, 2, n), rand(batch, 2, n, p), r),
        Polynomial(rand(batch, 2, n, p), r),
        Distance(rand(2), r),
        Table(rand(1, 2, n, n), weight=1.5),
        Table(rand(batch, 1, n, n)),
    ]


def learned(term: Term) -> list[torch.Tensor]:
    return [x for name in term.learned if (x := getattr(term, name)) is not None]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("which", range(8))
def test_gradients_by_hand_equal_autograd(p: int, shared: bool, which: int) -> None:
    term = terms(p, shared=shared)[which]
    scores = term.scores(torch.float64).expand(2, 2, 6, 6)
    ds = torch.randn(scores.shape, dtype=torch.float64)
    expected = torch.autograd.grad(scores, learned(term), ds)
    found = term.gradients(ds)
    for name, want in zip([n for n in term.learned if getattr(term, n) is not None], expected, strict=True):
        torch.testing.assert_close(found[name], want)


@pytest.mark.parametrize("which", range(8))
def test_taking_rows_commutes_with_scores(which: int) -> None:
    term = terms(2)[which]
    whole = term.scores(torch.float64).expand(2, 2, 6, 6)
    part = term.take(slice(1, 2), slice(2, 5)).scores(torch.float64)
    torch.testing.assert_close(part.expand(1, 2, 3, 6), whole[1:2, :, 2:5])


@pytest.mark.parametrize("kernel", ["reference", "features", *WAYS])
@pytest.mark.parametrize("which", range(8))
def test_gradcheck(kernel: str, which: int) -> None:
    term = terms(2, n=4)[which]
    q, k, v = (torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True] * 4, [True, True, False, True]])

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        names = [n for n in term.learned if getattr(term, n) is not None]
        made = replace(term, **dict(zip(names, tensors, strict=True)))
        out = attend(q, k, v, [made], mask, kernel=name)
        assert isinstance(out, torch.Tensor)
        return out

    with way(kernel) as name:
        assert torch.autograd.gradcheck(run, (q, k, v, *learned(term)))


def test_blocks_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for size in (1, 300, 10**9):
        monkeypatch.setattr(blockwise, "BLOCK_BYTES", size)
        out = attend(q, k, v, terms(2), kernel="features")
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_distance_is_blind_to_nothing_but_missing_positions() -> None:
    r = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [torch.nan, torch.nan]]])
    scores = Distance(torch.tensor([2.0]), r).scores(torch.float32)[0, 0]
    assert scores.tolist() == [[0, -10, 0], [-10, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("p", "full", "isotropic"), [(1, 2, 2), (2, 5, 3), (3, 9, 4), (4, 14, 5)])
@pytest.mark.parametrize("unplaced", [False, True])
def test_column_counts(p: int, full: int, isotropic: int, unplaced: bool) -> None:
    """Minimal features in float64; three products of them, and a constant where it is needed, when split."""
    r = torch.rand(1, 7, p)
    form, slope = -torch.eye(p).expand(1, 2, 7, p, p), torch.ones(1, 2, 7, p)
    for term, count in (
        (Quadratic(form, slope, r, unplaced=unplaced), full),
        (Quadratic(-torch.ones(1, 2, 7), None, r, unplaced=unplaced), isotropic),
    ):
        for dtype, want in (
            (torch.float64, count + unplaced),
            (torch.float32, 3 * count + 1 + 2 * unplaced),
            (torch.float16, 3 * count + 2 * unplaced),
            (torch.bfloat16, 3 * count + 2 * unplaced),
        ):
            query, key, _ = columns(term, None, dtype)
            q = torch.zeros(1, 2, 7, 8, dtype=dtype)
            assert query.shape == (1, 2, 7, want)
            assert key.shape == (1, 7, want)
            assert query.dtype == key.dtype == dtype
            hiding = dtype == torch.float32  # it may need one to hide padding
            assert widths(q, q, term)[0] == want + hiding
            assert widths(q, q, term)[1] % 8 == 0


@pytest.mark.parametrize(("p", "count"), [(1, 2), (2, 5), (3, 9)])
def test_whole_positions_need_fewer_columns(p: int, count: int) -> None:
    """phi_lo is 0 for them."""
    r = torch.randint(1, 30, (1, 40, p)).float() + 1000
    term = Quadratic(-torch.eye(p).expand(1, 2, 40, p, p), torch.ones(1, 2, 40, p), r, unplaced=False)
    assert columns(term, None, torch.float32)[0].shape[-1] == 2 * count + 1
    shifted = Quadratic(term.M, term.g, torch.rand_like(r), unplaced=False)
    assert columns(shifted, None, torch.float32)[0].shape[-1] == 3 * count + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_columns_are_the_scores(dtype: torch.dtype, shift: float) -> None:
    """Up to a number per query, and with unplaced keys up to nothing at all."""
    r = torch.randint(0, 9, (1, 20, 2)).double() + shift
    r[0, 5] = torch.nan
    form = -torch.eye(2).double().expand(1, 1, 20, 2, 2) * 2
    term = Quadratic(form, torch.randn(1, 1, 20, 2).double(), r)
    query, key, _ = columns(term, None, dtype)
    error = query.double() @ key[:, None].double().transpose(-1, -2) - term.scores(torch.float64)
    assert (
        error.abs().max() < {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 0.1}[dtype]
    )


def test_bad_terms() -> None:
    r = torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match="M, g or both"):
        Quadratic(None, None, r)
    with pytest.raises(ValueError, match="exponents"):
        Polynomial(torch.zeros(1, 1, 4, 4), r)
