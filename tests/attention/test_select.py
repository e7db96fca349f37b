"""Which kernel runs, what `explain` says of it, and what bad input gets."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import parapos
from parapos.attention import KERNELS, Kernel, kernels, reference, register_kernel
from parapos.attention import scores as score_blocks

from .budget import TRAINING, full, make_case

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def call(dtype: torch.dtype = torch.float32, n: int = 50):
    case = make_case("pape", n=n, dtype=dtype)
    q, k, terms = case.encoding(case.tensors["x"], case.tensors["q"], case.tensors["k"], case.r)
    return q, k, case.tensors["v"], terms


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
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
        parapos.attend(q, k, v, terms, kernel="fused", return_weights=True)


def test_strict_never_falls_back() -> None:
    q, k, v, terms = call()
    parapos.attend(q, k, v, terms, strict=True)
    with pytest.raises(parapos.KernelError, match="strict mode"):
        parapos.attend(q, k, v, terms, strict=True, return_weights=True)
    with pytest.raises(parapos.KernelError, match="'reference' is not one"):
        parapos.attend(q, k, v, terms, strict=True, kernel="reference")
    learned = parapos.Quadratic(terms[0].M, terms[0].g, terms[0].r.r.clone().requires_grad_())
    with pytest.raises(parapos.KernelError, match="positions require a gradient"):
        parapos.attend(q, k, v, [learned], strict=True)
    out = parapos.attend(q, k, v, [learned])
    (gradient,) = torch.autograd.grad(out.sum(), learned.r.r)
    assert gradient.abs().max() > 0


def test_explain_takes_the_arguments_of_attend() -> None:
    q, k, v, terms = call()
    assert parapos.explain(q, k, v, terms, None, 0.1, "fused", strict=True).kernel == "fused"


@pytest.mark.usefixtures("no_compiler")
def test_explain_knows_what_numbers_do_to_columns() -> None:
    n = 600
    q, r = torch.zeros(1, 1, n, 8), parapos.grid_positions(20, 30)[None]
    for factor, told in ((0.01, "extra query/key columns"), (1e6, "as columns these numbers would lose digits")):
        term = parapos.Quadratic(-factor * torch.rand(1, 1, n), factor * torch.randn(1, 1, n, 2), r)
        plan = parapos.explain(q, q, q, [term])
        assert told in plan.method
    exact = parapos.explain(q, q, q, [parapos.Quadratic(torch.zeros(1, 1, n), None, r)], exact=True)
    assert "formed from D in blocks of queries" in exact.method
    assert "lose digits" not in exact.method


def test_explain_without_numbers() -> None:
    q, r = torch.zeros(1, 2, 600, 8, device="meta"), torch.zeros(1, 600, 2, device="meta")
    plan = parapos.explain(q, q, q, [parapos.Quadratic(torch.zeros(1, 2, 600, device="meta"), None, r)])
    assert "or formed from D in blocks of queries if the numbers would lose digits" in plan.method


def test_positions_that_want_a_gradient_are_served_where_none_is_taken() -> None:
    q, k, v, (term,) = call()
    wanting = replace(term, r=term.r.r.clone().requires_grad_())
    with pytest.raises(parapos.KernelError, match="the positions require a gradient"):
        parapos.attend(q, k, v, [wanting], strict=True)
    with torch.no_grad():
        parapos.attend(q, k, v, [wanting], strict=True)


def test_second_derivatives_are_refused_in_words() -> None:
    q, k, v, terms = call()
    q.requires_grad_()
    out = parapos.attend(q, k, v, terms, kernel="fused")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use kernel='reference'"):
        first.sum().backward()


@pytest.mark.usefixtures("no_compiler")
def test_explain_is_what_runs() -> None:
    q, k, v, terms = call()
    plan = parapos.explain(q, k, v, terms)
    assert plan.kernel == "fused"
    assert "reference: it comes later in the order of preference" in str(plan)
    assert "Quadratic as 6 extra query/key columns in batched products of width 22" in str(plan)
    assert "50 tokens" in plan.call
    assert "3 queries and 50 keys" in parapos.explain(q[:, :, :3], k, v).call
    plan = parapos.explain(q, k, v, terms, return_weights=True)
    assert plan.kernel == "reference"
    assert "never forms the attention weights" in str(plan)
    assert "asked for by name" in str(parapos.explain(q, k, v, terms, kernel="reference"))
    assert "no score terms" in str(parapos.explain(q, k, v))
    table = parapos.Table(torch.zeros(1, 1, 50, 50))
    assert "blocks of queries" in str(parapos.explain(q, k, v, [table]))


def test_fused_really() -> None:
    """PyTorch's fused kernel is taken for every width: the math fallback is forbidden here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = torch.ones(1, 50, dtype=torch.bool)
    for dtype in DTYPES[:3]:
        q, k, v, terms = call(dtype)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for exact in (False, True):
                parapos.attend(q, k, v, terms, exact=exact, kernel="fused")
                parapos.attend(q, k, v, terms, mask, exact=exact, kernel="fused")
                each = mask[:, None, None].expand(1, 1, 50, 50)
                parapos.attend(q, k, v, terms, each, exact=exact, kernel="fused")
            parapos.attend(q, k, v[..., :8], (), mask)
            parapos.attend(q[..., :8], k[..., :8], v)
            strided = [x.mT.contiguous().mT for x in (q, k, v)]
            parapos.attend(*strided, terms, kernel="fused")
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
    bad("got (1, 2, 50, 16), (1, 2, 49, 16), (1, 2, 50, 16)", k=q[:, :, :49])
    bad("must agree in B, H, N and h", k=q[..., :8])
    bad("unknown kernel 'fast', expected one of auto, triton, native, fused, flex, reference", kernel="fast")
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
    bad(
        "Distance.keys must hold the positions of the 50 keys: there are 49 queries",
        q=q[:, :, 1:],
        terms=[parapos.Distance(torch.zeros(2), r[:, 1:])],
    )
    bad("Distance.keys must be (1 or 1, 50, p)", terms=[parapos.Distance(torch.zeros(2), r, keys=r[:, 1:])])
    bad("Distance.keys must be of 2 dimensions", terms=[parapos.Distance(torch.zeros(2), r, keys=r[..., :1])])
    bad("Polynomial.c must be (1, 2, 50, K)", terms=[parapos.Polynomial(torch.zeros(1, 3, 50, 2), r)])


@pytest.mark.parametrize(
    ("n", "keys", "size"),
    [
        *((n, keys, size) for n, keys in ((1, None), (2, None), (33, None), (1, 40), (7, 90)) for size in (1, 20_000)),
        *((n, keys, 10**9) for n, keys in ((33, None), (40, 1), (7, 300))),
        full(577, None, 20_000),
        full(577, None, 10**9),
    ],
)
@pytest.mark.parametrize("exact", [False, True], ids=["columns", "from D"])
def test_any_number_of_tokens_in_any_parts(
    n: int, keys: int | None, size: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of a sample at a time, a few, or all; blocks of one query, a few or all: the same output and gradients."""
    for name, value in {"BLOCK_BYTES": size, "PRODUCT_BYTES": size, "ROWS": 1}.items():
        monkeypatch.setattr(score_blocks, name, value)
    g = torch.Generator().manual_seed(3)
    to = None if keys is None else torch.rand(2, keys, 2, generator=g) * 5
    case = make_case("pape", r=torch.rand(2, n, 2, generator=g) * 5, keys=to, batch=2, heads=3)
    mask = torch.rand(2, 3, n, n if keys is None else keys, generator=g) < 0.7
    for case.mask in (None, mask, mask[:, :1], mask[:1]):
        ours, want = case.run("fused", torch.float32, exact), case.run("reference", torch.float32)
        largest = max(x.abs().max().item() for x in want.values())
        for name, x in want.items():
            allowed = (3e-5 if exact else 1e-3) * x.abs().max().item() + 1e-6 * largest
            torch.testing.assert_close(ours[name], x, rtol=0, atol=allowed, msg=name)


def test_huge_forms_are_formed_from_differences() -> None:
    """Where columns would lose the score, scores come from D: positions a million apart, in every dtype."""
    for dtype in DTYPES:
        q, k, v, terms = call(dtype)
        far = parapos.Quadratic(terms[0].M, terms[0].g, terms[0].r.r * 1e6)
        ours, want = (parapos.attend(q, k, v, [far], kernel=name) for name in ("fused", "reference"))
        torch.testing.assert_close(ours, want, rtol=1e-2, atol=2e-2)
        assert torch.isfinite(ours).all()


def test_names_of_kernels() -> None:
    """In the order of preference; `features`, the old name of the fused kernel, still works."""
    assert [*KERNELS] == sorted(KERNELS, key=lambda name: KERNELS[name].rank)
    q, k, v, terms = call()
    want = parapos.attend(q, k, v, terms, kernel="fused")
    assert torch.equal(parapos.attend(q, k, v, terms, kernel="features"), want)
    assert parapos.explain(q, k, v, terms, kernel="features").kernel == "fused"
    parapos.Attention(16, heads=2, kernel="features")
    with pytest.raises(ValueError, match="unknown kernel 'fast', expected one of auto, triton"):
        parapos.Attention(16, heads=2, kernel="fast")


def test_a_kernel_that_a_user_registers() -> None:
    """It is offered by attend, explain and Attention in its rank, and gone when it is removed."""
    before, calls = dict(KERNELS), []

    def run(call: kernels.Call) -> torch.Tensor:
        calls.append(call)
        return reference.attention(call)[0]

    def refuse(call: kernels.Call) -> str | None:
        return "more than 50 tokens" if call.q.shape[2] > 50 else None

    plain = Kernel("plain", 5, True, refuse, lambda call: "in plain words", run)
    q, k, v, terms = call()
    try:
        assert register_kernel(plain) is plain
        assert next(iter(KERNELS)) == "plain"
        want = parapos.attend(q, k, v, terms, kernel="reference")
        assert torch.equal(parapos.attend(q, k, v, terms, strict=True), want)
        assert torch.equal(parapos.attend(q, k, v, terms, kernel="plain"), want)
        plan = parapos.explain(q, k, v, terms)
        assert (plan.kernel, plan.method) == ("plain", "in plain words")
        assert "plain" not in plan.passed_over
        longer = torch.zeros(1, 1, 51, 8)
        assert parapos.explain(longer, longer, longer).passed_over["plain"] == "more than 50 tokens"
        with pytest.raises(parapos.KernelError, match="kernel 'plain' cannot serve this call: more than 50 tokens"):
            parapos.attend(longer, longer, longer, kernel="plain")
        calls.clear()
        net = parapos.Attention(16, heads=2, kernel="plain")
        net(torch.randn(1, 4, 16), parapos.grid_positions(2, 2))
        assert len(calls) == 1
        late = replace(plain, by_name=lambda call: "only on request")
        register_kernel(late)  # the same name: it replaces the first
        assert parapos.explain(q, k, v, terms).passed_over["plain"] == "only on request"
    finally:
        KERNELS.clear()
        KERNELS.update(before)
    with pytest.raises(ValueError, match="unknown kernel 'plain'"):
        parapos.attend(q, k, v, terms, kernel="plain")
    with pytest.raises(ValueError, match="unknown kernel 'plain'"):
        parapos.Attention(16, heads=2, kernel="plain")
