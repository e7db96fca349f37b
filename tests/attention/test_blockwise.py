"""Basis functions are made once for all layers that share positions, and anew when anything about them changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Term, blockwise

N = 12


@pytest.fixture
def made() -> Iterator[list[str]]:
    """The kinds of terms whose basis functions were made, in order."""
    found: list[str] = []

    def counted(kind: type) -> Callable[[Term, torch.dtype], Tensor]:
        basis = kind.basis  # type: ignore[attr-defined]

        def wrapper(term: Term, dtype: torch.dtype) -> Tensor:
            found.append(kind.__name__)
            made: Tensor = basis(term, dtype)
            return made

        return wrapper

    with ExitStack() as stack:
        stack.enter_context(patch.object(blockwise, "_last", None))
        for kind in (Quadratic, Polynomial, Distance):
            stack.enter_context(patch.object(kind, "basis", counted(kind)))
        yield found


def attend(term: Term, dtype: torch.dtype = torch.float32) -> Tensor:
    q = torch.randn(2, 2, N, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = parapos.attend(q, q, q, [term], kernel="features")
    dense = parapos.attend(q, q, q, [term], kernel="reference")
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, dense)
    return out


def forms(*shape: int) -> Tensor:
    return -torch.rand(2, 2, N, *shape, generator=torch.Generator().manual_seed(1))


def test_once_for_all_layers(made: list[str]) -> None:
    model = parapos.create_model("vit_nano_patch4", encoding="pape", num_classes=3)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert made == ["Quadratic"]


@pytest.mark.parametrize(
    "others",
    [
        lambda r: Quadratic(forms(2, 2), None, r),
        lambda r: Quadratic(forms(), forms(2), r),
        lambda r: Quadratic(None, forms(2), r),
        lambda r: Distance(torch.rand(2), r),
        lambda r: Polynomial(forms(2), r, ((1, 0), (0, 2))),
        lambda r: Polynomial(forms(2), r, ((1, 0), (0, 3))),
    ],
    ids=["M", "alpha, g", "g", "Distance", "Polynomial", "other exponents"],
)
def test_of_the_right_kind(others: Callable[[Tensor], Term]) -> None:
    r = parapos.grid_positions(3, 4)[None]
    for term in (Quadratic(forms(2, 2), forms(2), r), others(r), Quadratic(forms(2, 2), forms(2), r)):
        attend(term)


@pytest.mark.parametrize("seen", [True, False], ids=["by autograd", "unseen"])
def test_anew_when_positions_are_written_to(seen: bool) -> None:
    """Compilers and NumPy write to tensors without raising their version."""
    r = parapos.grid_positions(3, 4)[None]
    before = attend(Quadratic(forms(2, 2), None, r))
    (r if seen else r.data)[:, 3] += 7.0
    after = attend(Quadratic(forms(2, 2), None, r))
    assert not torch.equal(before, after)


def test_rows_of_their_own_are_refused() -> None:
    r = parapos.grid_positions(3, 4)[None]
    with pytest.raises(ValueError, match=r"Quadratic\.at must be None"):
        attend(Quadratic(forms(2, 2), None, r, at=r + 1))


def test_compiled_positions_that_change_from_layer_to_layer() -> None:
    """Inductor reuses the memory of the first positions for the second."""
    q = torch.randn(2, 2, N, 8, generator=torch.Generator().manual_seed(0))
    start = parapos.grid_positions(3, 4)[None]

    def layers(start: Tensor) -> Tensor:
        r = start * 2 + 1
        out = parapos.attend(q, q, q, [Quadratic(forms(2, 2), None, r)])
        assert isinstance(out, Tensor)
        r = r * 3 + out.mean()
        out = parapos.attend(q, q, q, [Quadratic(forms(2, 2), None, r)])
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layers)(start), layers(start))


def test_of_the_right_type() -> None:
    r = torch.rand(1, N, 2).double()
    for dtype in (torch.float32, torch.float64, torch.float32):
        attend(Quadratic(forms(2, 2), None, r), dtype)


def test_positions_made_for_inference() -> None:
    with torch.inference_mode():
        r = parapos.grid_positions(3, 4)[None]
        attend(Quadratic(forms(2, 2), None, r))
        r[:, 3] += 7.0
        attend(Quadratic(forms(2, 2), None, r))


def test_large_ones_are_not_kept() -> None:
    r = parapos.grid_positions(3, 4)[None]
    with patch.object(blockwise, "_last", None):
        with patch.object(blockwise, "BLOCK_BYTES", 1000):
            attend(Quadratic(forms(2, 2), None, r))
        assert blockwise._last is None
        attend(Quadratic(forms(2, 2), None, r))
        assert blockwise._last is not None
