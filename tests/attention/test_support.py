"""The support matrix, cell by cell: what it admits runs and is right, what it refuses is refused with its reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import parapos
from parapos.attention import KERNELS
from tools import support

CPU = [cell for cell in support.cells() if cell.device == "cpu"]
CUDA = [cell for cell in support.cells() if cell.device == "cuda"]
REFUSED = {cell: why for cell in CPU + CUDA if (why := support.refusal(cell))}


def name(cell: support.Cell) -> str:
    return f"{cell.kernel}-{cell.term}-{cell.device}-{str(cell.dtype)[6:]}-{cell.direction}"


def run(cell: support.Cell) -> list[torch.Tensor]:
    """Output and gradients, in float64."""
    call = support.probe(cell)
    with torch.set_grad_enabled(cell.direction == "backward"):
        out = parapos.attend(call.q, call.k, call.v, call.terms, kernel=cell.kernel)
    found = [out]
    if cell.direction == "backward":
        learned = [getattr(term, n) for term in call.terms for n in term.learned]
        leaves = [x for x in (call.q, call.k, call.v, *learned) if x is not None and x.requires_grad]
        found += torch.autograd.grad(out.sum(), leaves)
    return [x.detach().double().cpu() for x in found]


def check(cell: support.Cell) -> None:
    truth = run(replace(cell, kernel="reference", dtype=torch.float64, device="cpu"))
    reference, ours = (run(replace(cell, kernel=kernel)) for kernel in ("reference", cell.kernel))
    ulp = torch.finfo(cell.dtype).eps * (32 if cell.dtype == torch.float64 else 1)  # there the truth is no better
    for index, (t, theirs, mine) in enumerate(zip(truth, reference, ours, strict=True)):
        factor = 3 if index else 2  # the budget of budget.py: gradients, output
        theirs, mine = (theirs - t).abs(), (mine - t).abs()
        assert mine.square().mean().sqrt() <= factor * theirs.square().mean().sqrt() + ulp * t.abs().max()
        assert mine.max() <= 2 * factor * theirs.max() + ulp * t.abs().max()


@pytest.mark.parametrize("cell", [c for c in CPU if c not in REFUSED], ids=name)
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
    assert {cell.kernel for cell in REFUSED} == {"features", "triton", "flex"}
