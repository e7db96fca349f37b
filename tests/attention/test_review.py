"""What a review broke: gradients of far positions, caches that went stale, broken promises to the compiler."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos import Polynomial, Positions, Quadratic, Table, attend
from parapos.attention import Relative, fused
from parapos.attention import scores as score_blocks
from parapos.attention.scores import Scores


def inputs(n: int = 24, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 3, n, 8, dtype=dtype).requires_grad_() for _ in range(3)]


def form(n: int = 24) -> Tensor:
    return (-torch.rand(2, 3, n, 2, 2)).requires_grad_()


def output(*args: object, **options: object) -> Tensor:
    out = attend(*args, **options)
    assert isinstance(out, Tensor)
    return out


def test_the_backward_operator_is_sound() -> None:
    """Strides and types of its results are those that it promises."""
    q, k, v = (x.detach() for x in inputs())
    term = Quadratic(form().detach(), None, Positions.of(parapos.grid_positions(4, 6)))
    made = list(fused.columns(term))
    scores = Scores.of([term, Table(torch.randn(1, 3, 24, 24).mT.bfloat16())], 0.3, torch.float32, keep=False)
    for columns in ([], made):
        some = scores if not columns else Scores.of([term], 0.3, torch.float32, keep=False)
        out = fused._forward(q, k, v, None, 0.3, *some, columns)
        wanted = [True] * (len(some.coefficients) + len(some.tables))
        args = (torch.randn_like(out), wanted, q, k, v, None, 0.3, *some, columns)
        torch.library.opcheck(fused._backward_op, args, test_utils=("test_schema", "test_faketensor"))


def test_training_through_the_default_compiler() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()
    M, P = form(), Positions.of(parapos.grid_positions(4, 6))

    def run(M: Tensor) -> Tensor:
        return output(q, k, v, [Quadratic(M * 2, None, P)])

    (found,) = torch.autograd.grad(torch.compile(run, fullgraph=True)(M).sum(), M)
    (want,) = torch.autograd.grad(run(M).sum(), M)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("far", "steep"), [(1e3, 1e-2), (1e4, 1e-4)])
def test_one_far_token_leaves_gradients_of_forms_right(far: float, steep: float) -> None:
    torch.manual_seed(1)
    r = torch.rand(1, 64, 2) * 4
    r[0, 0] = far
    tensors, dout = [torch.randn(1, 2, 64, 8) for _ in range(3)], torch.randn(1, 2, 64, 8)

    def gradient(kernel: str, dtype: torch.dtype) -> Tensor:
        M = (-steep * torch.eye(2, dtype=dtype).expand(1, 2, 64, 2, 2)).clone().requires_grad_()
        term = Quadratic(M, None, Positions.of(r.to(dtype)))
        out = output(*(x.to(dtype) for x in tensors), [term], kernel=kernel)
        return torch.autograd.grad(out, M, dout.to(dtype))[0]

    found, want = gradient("fused", torch.float32), gradient("reference", torch.float64)
    assert (found - want).norm() <= 5e-4 * want.norm()


def test_one_key_gives_forms_no_gradient() -> None:
    q, k, v = inputs(1)
    M = form(1)
    out = output(q, k, v, [Quadratic(M, None, torch.tensor([[7.0, 9.0]]))])
    assert (torch.autograd.grad(out.sum(), M)[0] == 0).all()


def test_constant_powers_are_refused() -> None:
    with pytest.raises(ValueError, match="not all zero"):
        Polynomial(torch.zeros(1, 1, 4, 2), torch.zeros(1, 4, 2), ((0, 0), (1, 0)))


def test_training_after_inference_with_the_same_positions_and_mask() -> None:
    q, k, v = inputs()
    M, P, mask = form(), Positions.of(parapos.grid_positions(4, 6)), torch.ones(2, 24, dtype=torch.bool)
    with torch.inference_mode():
        attend(q, k, v, [Quadratic(M, None, P)], mask)
    output(q, k, v, [Quadratic(M, None, P)], mask).sum().backward()
    assert M.grad is not None


@pytest.mark.parametrize("name", ["rope", "lookhere"])
def test_gradients_of_positions_are_not_kept_from_an_earlier_call(name: str) -> None:
    options = {"directions": [("up", 0.5), ("all", 0.25), ("left", 0.5)]} if name == "lookhere" else {}
    encoding = parapos.create_encoding(name, dim=24, heads=3, head_dim=8, pos_dim=2, **options)
    r = (parapos.grid_positions(4, 6) * 0.5).requires_grad_()
    P, x = Positions.of(r), torch.randn(2, 24, 24)
    q, k, v = (t.detach() for t in inputs())
    with torch.no_grad():
        encoding(x, q, k, P)
    for _ in range(2):
        a, b, terms = encoding(x, q, k, P)
        (gradient,) = torch.autograd.grad(output(a, b, v, terms).square().sum(), r)
        assert gradient.abs().max() > 0


@pytest.mark.usefixtures("no_compiler")
def test_positions_keep_one_of_a_kind() -> None:
    q, k, v = inputs()
    few, many = Positions.of(torch.randn(4, 2)), Positions.of(torch.randn(24, 2))
    for _ in range(5):
        term = Quadratic(form()[:, :, :4], None, few, many)
        attend(q[:, :, :4], k, v, [term], torch.rand(2, 24) > 0.3)
    assert len(few._made) == 1
    assert len(pickle.dumps(few)) < 2000


@dataclass(frozen=True, eq=False)
class Bowl(Relative):
    """The same form in all samples and queries of a head."""

    s: Tensor
    r: Positions
    keys: Positions | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("s",)

    @property
    def exponents(self) -> tuple[tuple[int, ...], ...]:
        return ((2, 0), (0, 2))

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return -self.s.to(dtype)[None, :, None, :]


@pytest.mark.parametrize("masked", [False, True])
def test_coefficients_that_samples_and_queries_share(masked: bool) -> None:
    q, k, v = inputs()
    s, P = torch.rand(3, 2, requires_grad=True), Positions.of(parapos.grid_positions(4, 6))
    mask = torch.rand(2, 24) > 0.3 if masked else None
    with patch.multiple(score_blocks, PRODUCT_BYTES=64, ROWS=1):
        found, want = (output(q, k, v, [Bowl(s, P)], mask, kernel=kernel) for kernel in ("fused", "reference"))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        grads = [torch.autograd.grad(out.square().sum(), s)[0] for out in (found, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_no_keys_and_no_terms() -> None:
    q, k, v = inputs()
    out = output(q, k[:, :, :0], v[:, :, :0], mask=torch.ones(2, 0, dtype=torch.bool))
    assert (out == 0).all()


@pytest.mark.parametrize("mask", [torch.ones(20, 20, dtype=torch.bool), torch.ones(2, 20)], ids=["causal", "float"])
def test_masks_are_checked_before_they_are_used(mask: Tensor) -> None:
    net = parapos.Attention(24, heads=3)
    with pytest.raises(ValueError, match="mask must be boolean"):
        net(torch.randn(2, 20, 24), parapos.grid_positions(4, 5), mask)


@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_other_tokens_at_the_same_positions(kernel: str) -> None:
    """Padding among the keys says nothing of the queries, even where both stand at the same positions."""
    (q, k, v), M, mask = inputs(), form(), torch.rand(2, 24) > 0.5
    P = Positions.of(parapos.grid_positions(4, 6))
    same, copied = (
        output(q, k, v, [Quadratic(M, None, P, keys)], mask, kernel=kernel) for keys in (P, Positions.of(P.r.clone()))
    )
    assert torch.equal(same, copied)


@pytest.mark.parametrize("exact", [False, True])
def test_positions_never_hold_themselves(exact: bool) -> None:
    P = Positions.of(parapos.grid_positions(4, 6))
    output(*inputs(), [Quadratic(form(), None, P, P)], exact=exact)
    gone = weakref.ref(P)
    gc.disable()
    try:
        del P
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_powers_in_a_list(kernel: str) -> None:
    c, r = torch.randn(2, 3, 24, 2), parapos.grid_positions(4, 6)
    q, k, v = inputs()
    found, want = (
        output(q, k, v, [Polynomial(c, r, powers)], kernel=kernel) for powers in ([[1, 0], [0, 2]], ((1, 0), (0, 2)))
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_axes_of_very_different_units(dtype: torch.dtype) -> None:
    """Small positions and the large coefficients that belong to them: neither overflows, neither vanishes."""
    r = torch.rand(1, 24, 2, dtype=torch.float64) * torch.tensor([64.0, 1e-3])
    M = torch.diag(torch.tensor([-(2.0**-10), -(2.0**20)])).expand(2, 3, 24, 2, 2)
    q, k, v = (x.detach().to(dtype) for x in inputs())
    found = output(q, k, v, [Quadratic(M, None, r)])
    want = output(q.double(), k.double(), v.double(), [Quadratic(M.double(), None, r)], kernel="reference")
    torch.testing.assert_close(found.double(), want, rtol=0.0, atol=2 * torch.finfo(dtype).eps)


def test_one_query_of_many_keys_is_parted_too() -> None:
    """Few scores may belong to many keys, whose widened heads would take all the memory at once."""
    q, k = torch.empty(1, 12, 1, 64, device="meta"), torch.empty(1, 12, 80_000, 64, device="meta")
    with patch.object(torch, "get_num_threads", lambda: 1):
        assert len(list(score_blocks.blocks_of_columns(q, k, None))) == 12


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [200, 577, 1025, 2305, 9000])
def test_parts_give_every_thread_as_many_heads(tokens: int, threads: int) -> None:
    """Threads are given whole heads: three heads on two threads take as long as four."""
    q = torch.empty(2, 12, tokens, 64, device="meta")
    with patch.multiple(torch, get_num_threads=lambda: threads):
        cells = [block[:2] for block in score_blocks.blocks_of_columns(q, q, None) if block[2].start == 0]
    counts = [len(range(12)[heads]) for _, heads in cells]
    assert sum(counts) == 12 * len({samples.start for samples, _ in cells})
    assert all(count % threads == 0 for count in counts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exact", [False, True])
def test_a_trace_computes_with_what_it_is_given(exact: bool) -> None:
    q, k, v = (x.detach() for x in inputs())
    term = Quadratic(form().detach(), None, Positions.of(parapos.grid_positions(4, 6)))
    traced = torch.jit.trace(lambda q: output(q, k, v, [term], exact=exact), q, check_trace=False)
    torch.testing.assert_close(traced(2 * q), output(2 * q, k, v, [term], exact=exact))


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("shape", [(128, 131072), (512, 65536), (4097, 4097), (16384, 16384), (36, 36), (1, 10**7)])
def test_blocks_of_products_are_bounded(shape: tuple[int, int], threads: int) -> None:
    """Every score is in one block, and a block has at most 10 MiB for each thread, or one query."""
    q, k = (torch.empty(3, 12, n, 16, device="meta") for n in shape)
    with patch.multiple(torch, get_num_threads=lambda: threads):
        blocks = [block[:3] for block in score_blocks.blocks_of_columns(q, k, None)]
    cells = [[len(range(size)[part]) for size, part in zip((3, 12, shape[0]), block, strict=True)] for block in blocks]
    assert sum(a * b * c for a, b, c in cells) == 36 * shape[0]
    most = threads * score_blocks.MOST_BYTES // (4 * shape[1])
    assert all(a * b * c <= max(1, most) for a, b, c in cells)


def test_a_trace_of_a_module_in_training_has_gradients() -> None:
    torch.manual_seed(0)
    net, x, r = parapos.Attention(16, heads=2, encoding="pape", pos_dim=2), torch.randn(1, 9, 16), torch.rand(9, 2)
    traced = torch.jit.trace(net, (x, r), check_trace=False)
    found = [torch.autograd.grad(f(x, r).square().sum(), [*net.parameters()]) for f in (traced, net)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compiled_training_with_one_tensor_for_keys_and_values() -> None:
    torch._dynamo.reset()
    q, k, _ = inputs()
    M, P = form(), Positions.of(parapos.grid_positions(4, 6))

    def run(q: Tensor, k: Tensor) -> Tensor:
        return output(q, k, k, [Quadratic(M, None, P)])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(q, k).square().sum(), (q, k)) for f in (compiled, run)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compiled_second_derivatives_are_right() -> None:
    """Or refused; never silently zero."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs())
    term = Quadratic(form().detach(), None, Positions.of(parapos.grid_positions(4, 6)))

    def first(q: Tensor) -> Tensor:
        grad: Tensor = torch.func.grad(lambda q: output(q, k, v, [term]).square().sum())(q)
        return grad.square().sum()

    second = torch.func.grad(first)
    torch.testing.assert_close(torch.compile(second, backend="aot_eager")(q), second(q), rtol=1e-4, atol=1e-5)
