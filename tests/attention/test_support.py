"""The support matrix, cell by cell: what it admits runs and is right, what it refuses is refused with its reason."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import isabstract

import pytest
import torch

import parapos
from parapos.attention import KERNELS, Call, Quadratic, Term
from parapos.positions import Positions
from tools import support

from .criterion import assert_within_budget

CPU = [cell for cell in support.cells() if cell.device == "cpu"]
CUDA = [cell for cell in support.cells() if cell.device == "cuda"]
REFUSED = {cell: why for cell in CPU + CUDA if (why := support.refusal(cell))}


def name(cell: support.Cell) -> str:
    return f"{cell.kernel}-{cell.term}-{cell.device}-{str(cell.dtype)[6:]}-{cell.direction}"


def run(cell: support.Cell) -> dict[str, torch.Tensor]:
    """Output and gradients, in float64."""
    call = support.probe(cell)
    with torch.set_grad_enabled(cell.direction == "backward"):
        exact = cell.dtype == torch.float32  # columns have a budget of their own there
        out = parapos.attend(call.q, call.k, call.v, call.terms, kernel=cell.kernel, exact=exact)
    found = {"out": out}
    if cell.direction == "backward":
        leaves = {"q": call.q, "k": call.k, "v": call.v}
        leaves |= {name: x for term in call.terms for name, x in term.tensors().items() if x.requires_grad}
        found |= dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    return {name: x.detach().double().cpu() for name, x in found.items()}


def check(cell: support.Cell) -> None:
    truth = run(replace(cell, kernel="reference", dtype=torch.float64, device="cpu"))
    reference, ours = (run(replace(cell, kernel=kernel)) for kernel in ("reference", cell.kernel))
    if cell.dtype == torch.float64:  # there the truth is no better
        for name, x in truth.items():
            assert (ours[name] - x).abs().max() <= 32 * torch.finfo(cell.dtype).eps * x.abs().max()
    else:
        assert_within_budget(ours, reference, truth, cell.dtype, 16)


def marked(cell: support.Cell) -> object:
    """Compiling takes seconds for each cell."""
    return pytest.param(cell, marks=pytest.mark.full) if cell.kernel == "flex" else cell


@pytest.mark.parametrize("cell", [marked(c) for c in CPU if c not in REFUSED], ids=name)
def test_admitted_here(cell: support.Cell) -> None:
    check(cell)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cell", [c for c in CUDA if c not in REFUSED], ids=name)
def test_admitted_on_a_gpu(cell: support.Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", REFUSED, ids=name)
def test_refused(cell: support.Cell) -> None:
    """With its reason, GPU or not; and strict mode with a kernel asked for by name never takes another one."""
    with support.pretended(cell):
        call = support.probe(cell)
        for strict in (False, True):
            with pytest.raises(parapos.KernelError, match=re.escape(REFUSED[cell])):
                parapos.attend(call.q, call.k, call.v, call.terms, kernel=cell.kernel, strict=strict)


def test_every_kernel_and_reason_is_in_the_table() -> None:
    text = support.table()
    assert all(f"| `{kernel}` | {term} |" in text for kernel in KERNELS for term in support.TERMS)
    assert all(why in text for why in REFUSED.values())
    assert {cell.kernel for cell in REFUSED} == {name for name, kernel in KERNELS.items() if kernel.is_fused}


def concrete(kind: type[Term]) -> set[type[Term]]:
    """The kinds of terms below this one that the package brings."""
    below = {found for sub in kind.__subclasses__() for found in concrete(sub)}
    return below | ({kind} if not isabstract(kind) and kind.__module__.startswith("parapos.") else set())


def test_every_kind_of_term_is_in_the_matrix() -> None:
    assert set(support.EXAMPLES) == concrete(Term)


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.is_fused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_positions_first_used_in_inference_mode_serve_training(kernel: str, dtype: torch.dtype) -> None:
    r = Positions.of(parapos.grid_positions(4, 5).to(dtype))
    q, g = torch.randn(1, 2, 20, 16, requires_grad=True), torch.randn(1, 2, 20, 2, requires_grad=True)
    terms = (Quadratic(None, g, r),)
    if why := KERNELS[kernel].reason_against(Call(q, q, q, terms, None, 0.25)):
        pytest.skip(why)
    with torch.inference_mode():
        first = parapos.attend(q, q, q, terms, kernel=kernel)
    again = parapos.attend(q, q, q, terms, kernel=kernel)
    again.sum().backward()
    assert torch.equal(first, again)
