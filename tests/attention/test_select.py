"""Which kernel runs, what `explain` says of it, and what bad input gets."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

import parapos

from .budget import WAYS, make_case, way

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def call(dtype: torch.dtype = torch.float32, n: int = 50):
    case = make_case("pape", n=n, dtype=dtype)
    q, k, terms = case.encoding(case.tensors["x"], case.tensors["q"], case.tensors["k"], case.r)
    return q, k, case.tensors["v"], terms


@pytest.mark.parametrize("kernel", ["features", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_out_is_dtype_in(kernel: str, dtype: torch.dtype) -> None:
    q, k, v, terms = call(dtype)
    assert terms[0].M.dtype == torch.promote_types(dtype, torch.float32)
    assert parapos.attend(q, k, v, terms, kernel=kernel).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parapos.attend(q, k, v, terms, kernel=kernel).dtype == dtype


def test_weights_come_from_the_reference() -> None:
    q, k, v, terms = call()
    out, weights = parapos.attend(q, k, v, terms, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 50))
    torch.testing.assert_close(weights @ v, out)
    with pytest.raises(parapos.KernelError, match="never forms the attention weights"):
        parapos.attend(q, k, v, terms, kernel="features", return_weights=True)


def test_strict_never_falls_back() -> None:
    q, k, v, terms = call()
    parapos.attend(q, k, v, terms, strict=True)
    with pytest.raises(parapos.KernelError, match="strict mode"):
        parapos.attend(q, k, v, terms, strict=True, return_weights=True)
    with pytest.raises(parapos.KernelError, match="'reference' is not one"):
        parapos.attend(q, k, v, terms, strict=True, kernel="reference")
    learned = parapos.Quadratic(terms[0].M, terms[0].g, terms[0].r.clone().requires_grad_())
    with pytest.raises(parapos.KernelError, match="positions require a gradient"):
        parapos.attend(q, k, v, [learned], strict=True)
    out = parapos.attend(q, k, v, [learned])
    (gradient,) = torch.autograd.grad(out.sum(), learned.r)
    assert gradient.abs().max() > 0


def test_explain_takes_the_arguments_of_attend() -> None:
    q, k, v, terms = call()
    assert parapos.explain(q, k, v, terms, None, 0.1, "features", strict=True).kernel == "features"


def test_explain_knows_what_numbers_do_to_columns() -> None:
    n = 600
    q, r = torch.zeros(1, 1, n, 8), parapos.grid_positions(20, 30)[None]
    for factor, told in ((0.01, "extra query/key columns"), (1e6, "as columns these numbers would lose digits")):
        term = parapos.Quadratic(-factor * torch.rand(1, 1, n), factor * torch.randn(1, 1, n, 2), r)
        plan = parapos.explain(q, q, q, [term])
        assert told in plan.method
        assert "skipped" not in plan.method


def test_explain_without_numbers() -> None:
    q, r = torch.zeros(1, 2, 600, 8, device="meta"), torch.zeros(1, 600, 2, device="meta")
    plan = parapos.explain(q, q, q, [parapos.Quadratic(torch.zeros(1, 2, 600, device="meta"), None, r)])
    assert "in blocks of queries instead if the numbers would lose digits" in plan.method


def test_positions_that_want_a_gradient_are_served_where_none_is_taken() -> None:
    q, k, v, (term,) = call()
    wanting = replace(term, r=term.r.clone().requires_grad_())
    with pytest.raises(parapos.KernelError, match="the positions require a gradient"):
        parapos.attend(q, k, v, [wanting], strict=True)
    with torch.no_grad():
        parapos.attend(q, k, v, [wanting], strict=True)


def test_second_derivatives_are_refused_in_words() -> None:
    q, k, v, terms = call()
    q.requires_grad_()
    out = parapos.attend(q, k, v, terms, kernel="features")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; ask for kernel='reference'"):
        first.sum().backward()


def test_explain_is_what_runs() -> None:
    q, k, v, terms = call()
    plan = parapos.explain(q, k, v, terms)
    assert plan.kernel == "features"
    assert "reference: it comes later in the order of preference" in str(plan)
    assert "Quadratic formed in blocks of queries" in str(plan)
    with way("columns"):
        plan = parapos.explain(q, k, v, terms)
    assert "at most 17 extra query/key columns" in str(plan)
    assert "width 48" in str(plan)
    q, k, v, terms = call(n=80)
    with way("windows"):
        assert "keys are skipped where the parabolas leave them no weight" in str(parapos.explain(q, k, v, terms))
    q, k, v, terms = call()
    plan = parapos.explain(q, k, v, terms, return_weights=True)
    assert plan.kernel == "reference"
    assert "never forms the attention weights" in str(plan)
    assert "asked for by name" in str(parapos.explain(q, k, v, terms, kernel="reference"))
    assert "no score terms" in str(parapos.explain(q, k, v))
    table = parapos.Table(torch.zeros(1, 1, 50, 50))
    assert "blocks of queries" in str(parapos.explain(q, k, v, [table]))
    dense = parapos.explain(q, k, v, terms, kernel="reference").memory
    assert parapos.explain(*(torch.zeros(1, 8, 4096, 64),) * 3).memory < dense * 1000


def test_fused_really() -> None:
    """PyTorch's fused kernel is taken for every width: the math fallback is forbidden here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = torch.ones(1, 50, dtype=torch.bool)
    for dtype, kernel in product(DTYPES[:3], ["features", *WAYS]):
        q, k, v, terms = call(dtype)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), way(kernel):
            parapos.attend(q, k, v, terms)
            parapos.attend(q, k, v, terms, mask)
            parapos.attend(q, k, v[..., :8], (), mask)
            parapos.attend(q[..., :8], k[..., :8], v)
            strided = [x.mT.contiguous().mT for x in (q, k, v)]
            parapos.attend(*strided, terms)
            parapos.attend(*strided)


def bad(message: str, *, error: type[Exception] = ValueError, **changes: object) -> None:
    q, k, v, terms = call()
    arguments = {"q": q, "k": k, "v": v, "terms": terms} | changes
    with pytest.raises(error, match=re.escape(message)):
        parapos.attend(**arguments)


def test_bad_input() -> None:
    q = torch.zeros(1, 2, 50, 16)
    bad("q must be float16, bfloat16, float32 or float64, got torch.int64", error=TypeError, q=q.long())
    bad("one dtype", error=TypeError, k=q.double())
    bad("q must be (batch, heads, tokens, size), got (2, 50, 16)", q=q[0])
    bad("got (1, 2, 50, 16), (1, 2, 49, 16)", k=q[:, :, :49])
    bad("mask must be a boolean tensor (1, 50)", mask=torch.ones(1, 49, dtype=torch.bool))
    bad("got torch.float32 (1, 50)", mask=torch.ones(1, 50))
    bad("unknown kernel 'fast', expected one of auto, triton, features, flex, reference", kernel="fast")
    bad(
        "Table.bias must be (1 or 1, 2 or 1, 50, 50), got (1, 2, 49, 50)",
        terms=[parapos.Table(torch.zeros(1, 2, 49, 50))],
    )
    r = torch.zeros(1, 50, 2)
    bad(
        "Quadratic.g must be (1, 2, 50, 2), got (1, 2, 50, 3)",
        terms=[parapos.Quadratic(None, torch.zeros(1, 2, 50, 3), r)],
    )
    bad("Distance.slopes must be (2,), got (3,)", terms=[parapos.Distance(torch.zeros(3), r)])
    bad("Distance.r must be (1 or 1, 50, p), got (1, 49, 2)", terms=[parapos.Distance(torch.zeros(2), r[:, 1:])])
    bad("Distance.r must be float32", error=TypeError, terms=[parapos.Distance(torch.zeros(2), r.half())])
    bad("Polynomial.c must be (1, 2, 50, K)", terms=[parapos.Polynomial(torch.zeros(1, 3, 50, 2), r)])


@pytest.mark.parametrize("n", [1, 2, 3, 33, 197, 509, 513, 515, 577])
@pytest.mark.parametrize("chunk", [1, 10**9])
@pytest.mark.parametrize("kernel", ["features", *WAYS])
def test_any_number_of_tokens_in_any_chunks(n: int, chunk: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thin last blocks are filled up, few heads or samples go at a time, and nothing of it shows."""
    from parapos.attention import blockwise, features

    monkeypatch.setattr(features, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", chunk)
    case = make_case("pape", n=n, batch=2)
    q, k, terms = case.encoding(case.tensors["x"], case.tensors["q"], case.tensors["k"], case.r)
    v = case.tensors["v"]
    with way(kernel) as name:
        ours, reference = (parapos.attend(q, k, v, terms, kernel=x) for x in (name, "reference"))
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_huge_forms_take_the_exact_way() -> None:
    """Where columns would lose the score, dense blocks keep it: positions a million apart, in every dtype."""
    for dtype, kernel in product(DTYPES, ["features", *WAYS]):
        q, k, v, terms = call(dtype)
        far = parapos.Quadratic(terms[0].M, terms[0].g, terms[0].r * 1e6)
        with way(kernel) as name:
            ours, reference = (parapos.attend(q, k, v, [far], kernel=x) for x in (name, "reference"))
        torch.testing.assert_close(ours, reference, rtol=1e-2, atol=2e-2)
        assert torch.isfinite(ours).all()
