"""The kernel that is compiled for this CPU: its building, its sizes, its lists of tiles. The grids of test_budget and
others run it as they run every kernel.

B batch, H heads, n queries, N keys, h query/key size, w value size.
"""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import parapos
from parapos import Distance, Positions, Quadratic, Table, attend, explain
from parapos.attention import native, native_build
from parapos.attention.kernels import Call

needed = pytest.mark.skipif(isinstance(native.library(), native.Missing), reason=str(native.library()))


def inputs(n: int, count: int, h: int, w: int, p: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n + 7 * count)
    made = {
        "q": torch.randn(2, 3, n, h, generator=g),
        "k": torch.randn(2, 3, count, h, generator=g),
        "v": torch.randn(2, 3, count, w, generator=g),
        "M": torch.randn(2, 3, n, p, p, generator=g),
        "g": torch.randn(2, 3, n, p, generator=g),
        "slopes": torch.rand(3, generator=g),
    }
    made["M"] = -(made["M"] @ made["M"].mT)
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def run(x: dict[str, Tensor], kernel: str, mask: Tensor | None = None, table: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    p, n, count = x["g"].shape[-1], x["q"].shape[2], x["k"].shape[2]
    g = torch.Generator().manual_seed(3)
    at, to = (Positions.of(torch.rand(size, p, generator=g) * 3) for size in (n, count))
    terms: list[parapos.Term] = [Quadratic(x["M"], x["g"], at, to), Distance(x["slopes"], at, keys=to)]
    terms += [] if table is None else [Table(table.to(x["q"].dtype), 0.5)]
    out = attend(x["q"], x["k"], x["v"], terms, mask, 0.3, kernel)
    assert isinstance(out, Tensor)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), list(x.values()))]


def assert_same(
    x: dict[str, Tensor], mask: Tensor | None = None, table: Tensor | None = None, allowed: float = 2e-6
) -> None:
    expected = run(x, "reference", mask, table)
    single = {name: t.detach().float().requires_grad_() for name, t in x.items()}
    for name, want, got in zip(("out", *x), expected, run(single, "native", mask, table), strict=True):
        assert torch.linalg.vector_norm(got - want) <= allowed * torch.linalg.vector_norm(want) + 1e-6, name


@needed
@pytest.mark.parametrize(
    ("n", "count", "h", "w"),
    [(1, 1, 1, 1), (63, 99, 16, 16), (64, 100, 17, 3), (65, 101, 64, 64), (130, 203, 5, 40), (3, 300, 33, 2)],
)
def test_sizes_about_those_of_blocks(n: int, count: int, h: int, w: int) -> None:
    assert_same(inputs(n, count, h, w))


@needed
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_dimensions_of_positions(p: int) -> None:
    assert_same(inputs(40, 50, 8, 8, p))


@needed
@pytest.mark.parametrize("learned", ["all", "M", "slopes"])
def test_coefficients_of_many_terms(learned: str) -> None:
    """More tensors than the kernel takes, of which one learns or all do."""
    at, to = torch.rand(1, 20, 2, dtype=torch.float64), torch.rand(1, 30, 2, dtype=torch.float64)
    r, keys = Positions.of(at), Positions.of(to)
    found = []
    for kernel, dtype in (("reference", torch.float64), ("native", torch.float32)):
        x = {name: t.detach().to(dtype) for name, t in inputs(20, 30, 8, 8).items()}
        names = ["M", "g", "slopes", "q"] if learned == "all" else [learned]
        leaves = [x[name].requires_grad_() for name in names]
        terms = [
            Quadratic(x["M"], x["g"], r, keys),
            Distance(x["slopes"], r, keys=keys),
            Quadratic(None, 2 * x["g"], r, keys),
            Quadratic(-x["g"].square().sum(-1), None, r, keys),
        ]
        out = attend(x["q"], x["k"], x["v"], terms, kernel=kernel)
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@needed
@pytest.mark.parametrize("other", ["queries", "keys"])
def test_terms_with_other_positions_are_left_to_other_kernels(other: str) -> None:
    q, k, v, M, _ = small()
    at, to = (Positions.of(torch.rand(1, 7, 2)) for _ in range(2))
    terms = [Quadratic(M, None, at, to), Quadratic(M, None, *((to, to) if other == "queries" else (at, at)))]
    with pytest.raises(parapos.attention.KernelError, match="different positions"):
        attend(q, k, v, terms, kernel="native")
    torch.testing.assert_close(attend(q, k, v, terms), attend(q, k, v, terms, kernel="reference"))


@needed
def test_masks_and_tables_of_every_shape() -> None:
    x = inputs(70, 110, 8, 12)
    for shape in ((2, 110), (1, 1, 70, 110), (2, 1, 70, 110), (1, 3, 70, 110), (2, 3, 70, 110)):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
        mask[..., :3] = False
        assert_same(x, mask)
    for shape in ((1, 1, 70, 110), (2, 3, 70, 110)):
        table = torch.randn(shape)
        table[..., 5:20, :] = -math.inf
        assert_same(x, None, table)


@needed
def test_rows_that_are_far_apart_in_memory_or_shared() -> None:
    x = inputs(50, 60, 8, 8)
    x["q"] = x["q"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    x["k"] = x["k"].detach().mT.contiguous().mT.requires_grad_()
    x["v"] = x["v"].detach()[:1].expand(2, -1, -1, -1).requires_grad_()
    assert_same(x)


@needed
def test_what_is_not_a_number_stays_so() -> None:
    x = {name: t.detach().float() for name, t in inputs(5, 7, 4, 4).items()}
    x["q"][0, 0, 2, 1] = math.nan
    x["q"][0, 1, 3] = 1e30
    x["k"][0, 1, 4] = 1e30
    with torch.no_grad():
        at, to = Positions.of(torch.rand(5, 2)), Positions.of(torch.rand(7, 2))
        out = attend(x["q"], x["k"], x["v"], [Quadratic(x["M"], None, at, to)], kernel="native")
        expected = attend(x["q"], x["k"], x["v"], [Quadratic(x["M"], None, at, to)], kernel="reference")
    assert isinstance(out, Tensor)
    assert isinstance(expected, Tensor)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[0, 0, 2].isnan().all()
    assert out[0, 1, 3].isnan().all()


@needed
def test_the_same_bits_whatever_the_threads() -> None:
    x = {name: t.detach().float().requires_grad_() for name, t in inputs(150, 170, 16, 16).items()}
    before, first = torch.get_num_threads(), run(x, "native")
    try:
        torch.set_num_threads(1)
        alone = run(x, "native")
        found: list[list[Tensor]] = []
        threads = [threading.Thread(target=lambda: found.append(run(x, "native"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    for other in (alone, *found):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def small() -> tuple[Tensor, Tensor, Tensor, Tensor, list[parapos.Term]]:
    """q, k, v, M and the terms of a small call."""
    g = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 1, 2, 7, 4, generator=g)
    M = -torch.rand(1, 2, 7, generator=g)
    return q, k, v, M, [Quadratic(M, None, torch.rand(1, 7, 2, generator=g))]


class Wrapped(Tensor):
    """A tensor that holds its numbers in another one, as those of several libraries do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)  # type: ignore[attr-defined]
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, function(*args, **kwargs))


@needed
@pytest.mark.parametrize("name", ["q", "k", "v", "M", "r", "table"])
def test_tensors_of_other_kinds_are_left_to_other_kernels(name: str) -> None:
    q, k, v, M, (term,) = small()
    parts = {"q": q, "k": k, "v": v, "M": M, "r": torch.rand(1, 7, 2), "table": torch.randn(1, 1, 7, 7)}

    def run(x: dict[str, Tensor]) -> Tensor:
        terms = [Quadratic(x["M"], None, x["r"]), Table(x["table"])]
        found = attend(x["q"], x["k"], x["v"], terms)
        assert isinstance(found, Tensor)
        return found.inner if isinstance(found, Wrapped) else found

    torch.testing.assert_close(run(parts | {name: Wrapped(parts[name])}), run(parts))
    given = parts | {name: nn.Parameter(parts[name])}
    assert explain(given["q"], given["k"], given["v"], [term]).kernel == "native"


@needed
def test_numbers_that_are_not_in_memory_as_they_are() -> None:
    q, k, v, _, terms = small()
    table = torch.randn(1, 1, 7, 7, dtype=torch.complex64).conj().imag
    zero = torch._efficientzerotensor(k.shape)
    assert table.is_neg()
    for x, more in ((k, [Table(table)]), (zero, [])):
        found, want = (attend(q, x, v, [*terms, *more], kernel=name) for name in ("native", "reference"))
        torch.testing.assert_close(found, want)
    q.requires_grad_()
    out = attend(q, k, v, terms, kernel="native")
    assert isinstance(out, Tensor)
    assert not torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))[0].any()


@needed
@pytest.mark.parametrize("hook", [lambda x: x.mT.contiguous().mT, Tensor.double, Tensor.bfloat16])
def test_hooks_may_bring_back_saved_tensors_otherwise(hook: Callable[[Tensor], Tensor]) -> None:
    q, k, v, _, terms = small()
    q.requires_grad_()
    found = []
    for unpack in (lambda x: x, hook):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = attend(q, k, v, terms, kernel="native")
        assert isinstance(out, Tensor)
        found += torch.autograd.grad(out.square().sum(), q)
    assert torch.linalg.vector_norm(found[0] - found[1]) <= 0.02 * torch.linalg.vector_norm(found[0])


@needed
def test_positions_made_for_inference_serve_training() -> None:
    q, k, v, M, _ = small()
    with torch.inference_mode():
        r = Positions.of(torch.rand(1, 7, 2))
    out = attend(q, k, v, [Quadratic(M.requires_grad_(), None, r)], kernel="native")
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert M.grad is not None


@needed
@pytest.mark.parametrize("count", [100, 101, 400])
def test_what_is_far_away_does_not_magnify_how_a_mean_was_rounded(count: int) -> None:
    """One key has all weight, so the gradient of the form is 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.full((1, 1, 8, 4), 50.0),
        torch.randn(1, 1, count, 4, generator=g) / 100,
        torch.rand(1, 1, count, 16),
    )
    k[0, 0, 0] = 1
    M = torch.zeros(1, 1, 8, 2, 2, requires_grad=True)
    at, to = torch.zeros(1, 8, 2), torch.rand(1, count, 2, generator=g) + 100
    out = attend(q, k, v, [Quadratic(M, None, at, to)], scale=1.0, kernel="native")
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad((out * torch.linspace(-1, 1, 128).view(out.shape)).sum(), M)
    assert grad.norm() < 1e-6


@needed
def test_a_mean_of_many_keys_does_not_drift() -> None:
    zero = torch.zeros(1, 1, 300_000, 1)
    v = zero + 0.1
    terms = [Quadratic(None, zero[:, :, :2], zero[0, :, :2], Positions.of(zero[0]))]
    out = attend(zero[:, :, :2].requires_grad_(), zero, v.requires_grad_(), terms, kernel="native", tolerance=0.0)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, torch.full_like(out, 0.1), rtol=1e-6, atol=0)
    many = zero.requires_grad_(False)
    key = torch.zeros(1, 1, 1, 1, requires_grad=True)  # gets a gradient from each of many queries
    terms = [Quadratic(None, many, many[0], Positions.of(torch.zeros(1, 1)[None]))]
    out = attend(many, key * 1, key + 0.1, terms, kernel="native")
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out.mul(0.1).sum(), key)
    torch.testing.assert_close(grad, torch.full_like(grad, 30_000.0), rtol=1e-4, atol=0)


@needed
def test_gradients_in_batches_are_refused() -> None:
    q, k, v, _, terms = small()
    for name in ("native", "fused"):
        with pytest.raises(RuntimeError, match="no batched gradients"):
            torch.autograd.functional.jacobian(
                lambda q, name=name: attend(q, k, v, terms, kernel=name), q, vectorize=True
            )


@needed
def test_a_graph_made_before_dispatch_holds_operators() -> None:
    q, k, v, _, terms = small()

    def run(q: Tensor) -> Tensor:
        out = attend(q, k, v, terms)
        assert isinstance(out, Tensor)
        return out

    graph = make_fx(run, pre_dispatch=True)(q)
    torch.testing.assert_close(graph(2 * q), run(2 * q), rtol=1e-4, atol=1e-5)


@needed
def test_calls_without_terms_compile_nothing() -> None:
    q, k, v, _, _ = small()
    with patch.object(native, "library", side_effect=AssertionError):
        attend(q, k, v)


def test_too_many_tokens_to_count() -> None:
    q, k, v, _, _ = small()
    k, v = (x[:, :, :1].expand(1, 2, 2**31, 4) for x in (k, v))
    with pytest.raises(parapos.attention.KernelError, match="32 bits"):
        attend(q, k, v, kernel="native")


@needed
def test_little_work_stays_on_one_thread() -> None:
    """To wait for another thread may take as long as a thousand small calls, where the machine is busy."""
    before, asked = torch.get_num_threads(), []

    def spy(kind: str, numbers: tuple[int, ...]) -> object:
        asked.append(numbers[-2])
        return native_array(kind, numbers)

    native_array = native.array
    try:
        torch.set_num_threads(2)
        with patch.object(native, "array", spy):
            for n in (5, 300):
                run({name: t.detach().float().requires_grad_() for name, t in inputs(n, n, 8, 8).items()}, "native")
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 1, 2, 2]


@needed
def test_second_derivatives_are_refused_and_changes_noticed() -> None:
    x = {name: t.detach().float().requires_grad_() for name, t in inputs(5, 5, 4, 4).items()}
    out = attend(x["q"], x["k"], x["v"], [Quadratic(x["M"], None, torch.rand(1, 5, 2))], kernel="native")
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    out = attend(x["q"] * 1, (k := x["k"] * 1), x["v"], [Quadratic(x["M"], None, torch.rand(1, 5, 2))], kernel="native")
    k.data.zero_()
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[union-attr]


def far_looks(batch: int = 1) -> tuple[Call, Positions]:
    """48 x 48 tokens that look at their neighbourhood, and one without a position."""
    r = parapos.grid_positions(48, 48).float()
    r = torch.cat([r, torch.full((1, 2), math.nan)])
    at, n = Positions.of(r), len(r)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, n, 16, generator=g).requires_grad_() for _ in range(3))
    M = (-torch.eye(2) * (0.5 + torch.rand(batch, 2, n, 1, 1, generator=g))).requires_grad_()
    terms = (Quadratic(M, torch.randn(batch, 2, n, 2, generator=g).requires_grad_(), at),)
    return Call(q, k, v, terms, None, 0.25, tolerance=1e-7), at


@needed
@pytest.mark.parametrize("masked", [None, "padding", "each", "heads"])
def test_lists_of_tiles_lose_no_weight(masked: str | None) -> None:
    call, _ = far_looks(2)
    n = call.q.shape[2]
    mask = None
    if masked == "padding":
        mask = torch.rand(2, n, generator=torch.Generator().manual_seed(5)) > 0.3
    elif masked == "each":
        mask = torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(5)) > 0.3
    elif masked == "heads":  # other keys in each: no list serves both
        mask = torch.rand(1, 2, 1, n, generator=torch.Generator().manual_seed(5)).expand(1, 2, n, n) > 0.3
    leaves = [call.q, call.k, call.v, call.terms[0].M, call.terms[0].g]  # type: ignore[attr-defined]
    found = []
    with patch.object(native, "LEAST", 1024), patch.object(native, "QUERY_COST", 1.0):
        for tolerance in (None, 0.0):
            out = attend(call.q, call.k, call.v, call.terms, mask, 0.25, "native", tolerance=tolerance)
            assert isinstance(out, Tensor)
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
            found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for some, every in zip(*found, strict=True):
        assert torch.linalg.vector_norm(some - every) <= 1e-5 * torch.linalg.vector_norm(every)
    with torch.no_grad(), patch.object(native, "LEAST", 1024), patch.object(native, "QUERY_COST", 1.0):
        text = str(explain(call.q, call.k, call.v, call.terms, mask, 0.25, "native"))
    assert ("of tiles that may have weight" in text) == (masked != "heads")


@needed
def test_forward_and_backward_visit_the_tiles_that_are_needed_and_no_others() -> None:
    """Keys of other tiles hold NaN, which would show; their gradients are 0."""
    call, _ = far_looks()
    (lists,) = native._lists(call)
    query_tiles, key_tiles, visited = lists
    visited = visited.clone().zero_()
    visited[..., 0] = 1
    near = key_tiles[0, 0, 0]
    hidden = torch.ones(call.k.shape[2], dtype=torch.bool)
    hidden[near[near >= 0].long()] = False
    k, v = (x.detach().masked_fill(hidden[:, None], math.nan).requires_grad_() for x in (call.k, call.v))
    with (
        patch.object(native, "is_worth_lists", lambda call: True),
        patch.object(native, "_lists", lambda call: iter([(query_tiles, key_tiles, visited)])),
    ):
        out = native.attention(Call(call.q, k, v, call.terms, None, 0.25, tolerance=1e-7))
        out.sum().backward()
    assert out.isfinite().all()
    for x in (k, v):
        assert x.grad is not None
        assert not x.grad[:, :, hidden].any()
        assert x.grad[:, :, ~hidden].any()


@needed
@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_every_instruction_set(level: str, fresh: Path) -> None:
    """Vectors of 4, 8 and 16 numbers compute the same, but for how sums round."""
    flags = {"x86-64": "sse2", "x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
    if flags[level] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {level}")
    with patch.object(native_build, "FLAGS", tuple(x.replace("=native", f"={level}") for x in native_build.FLAGS)):
        built = native_build.build()
    with patch.object(native, "library", return_value=built):
        for sizes in ((1, 1, 1, 1), (65, 101, 17, 40), (130, 203, 16, 3)):
            assert_same(inputs(*sizes), allowed=5e-6)
        x = inputs(70, 110, 8, 12)
        mask = torch.rand(2, 3, 70, 110, generator=torch.Generator().manual_seed(1)) > 0.9
        assert_same(x, mask, allowed=5e-6)
        test_what_is_not_a_number_stays_so()
        test_lists_of_tiles_lose_no_weight("each")


def test_without_it_others_serve_and_explain_says_why() -> None:
    q, r = torch.randn(1, 2, 5, 4), Positions.of(torch.rand(5, 2))
    terms = [Quadratic(-torch.rand(1, 2, 5), None, r)]
    with patch.object(native, "library", lambda: native.Missing("it needs a C++ compiler")):
        assert "native: it needs a C++ compiler" in str(explain(q, q, q, terms))
        out = attend(q, q, q, terms)
    torch.testing.assert_close(out, attend(q, q, q, terms, kernel="reference"))


@needed
@pytest.mark.parametrize("value", [1e3, 1e5, 1e9])
def test_gradients_of_large_scores_that_many_keys_share(value: float) -> None:
    grads = []
    for kernel, dtype in (("native", torch.float32), ("reference", torch.float64)):
        q, k = torch.ones(1, 1, 4, 4, dtype=dtype), torch.full((1, 1, 50, 4), value / 4, dtype=dtype)
        v = torch.linspace(-1, 1, 150, dtype=dtype).view(1, 1, 50, 3).requires_grad_()
        terms = [Distance(torch.ones(1), torch.zeros(1, 4, 2), keys=torch.zeros(1, 50, 2))]
        out = attend(q, k, v, terms, scale=1.0, kernel=kernel)
        grads += torch.autograd.grad(out.sum(), v)  # type: ignore[union-attr]
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-5, atol=0)


@needed
def test_one_key_of_weight_has_no_gradient_of_its_form() -> None:
    r, M = torch.rand(1, 64, 2), torch.randn(1, 1, 64, 2, 2).requires_grad_()
    k = torch.randn(1, 1, 1, 32)
    out = attend(torch.randn(1, 1, 64, 32), k, k, [Quadratic(M, None, r, r[:, :1] + 100)], kernel="native")
    (grad,) = torch.autograd.grad(out.square().sum(), M)  # type: ignore[union-attr]
    assert not grad.any()


@needed
def test_tables_and_positions_that_change_between_the_passes_are_noticed() -> None:
    q, r, table = torch.randn(1, 2, 7, 4, requires_grad=True), torch.rand(1, 7, 2), torch.randn(1, 1, 7, 7)
    for changed, term in ((table, Table(table)), (r, Quadratic(None, torch.randn(1, 2, 7, 2), r))):
        out = attend(q, q, q, [term], kernel="native")
        changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()  # type: ignore[union-attr]


@needed
def test_autocast_in_the_backward_pass_rounds_nothing() -> None:
    q, r, M = torch.randn(1, 2, 7, 4), torch.rand(1, 7, 2), torch.randn(1, 2, 7, 2, 2).requires_grad_()
    grads = []
    for enabled in (False, True):
        out = attend(q, q, q, [Quadratic(M, None, r)], kernel="native")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grads += torch.autograd.grad(out.sum(), M)  # type: ignore[union-attr]
    assert torch.equal(*grads)


@needed
def test_what_other_code_sets_changes_nothing(tmp_path: Path) -> None:
    q, r = torch.randn(1, 2, 7, 4), torch.rand(1, 7, 2)
    terms = [Quadratic(torch.randn(1, 2, 7, 2, 2), None, r)]
    before = attend(q, q, q, terms, kernel="native")
    torch.set_default_dtype(torch.float64)
    try:
        native._matrix.cache_clear()
        assert torch.equal(before, attend(q, q, q, terms, kernel="native"))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(attend(torch._neg_view(q), q, q, terms), attend(-q, q, q, terms))  # type: ignore[arg-type]
    lines = "7f00-7f01 r--p 0 00:00 0  /x/compressed.npy\n7f00-7f01 r-xp 0 00:00 0  /x/libgomp-a34b.so.1.0.0\n"
    with patch.object(native_build.Path, "read_text", return_value=lines):
        assert native_build._threads_library() == ["/x/libgomp-a34b.so.1.0.0"]


@needed
def test_what_it_refuses() -> None:
    q = torch.randn(1, 2, 7, 4)
    cubic = parapos.Polynomial(torch.randn(1, 2, 7, 1), torch.rand(1, 7, 2), powers=((2, 1),))
    for term, why in (
        (Distance(torch.ones(2), torch.rand(1, 7, 0)), "0 dimensions"),
        (Distance(torch.ones(2), torch.rand(1, 7, 5)), "5 dimensions"),
        (cubic, "neither of degree one or two"),
    ):
        with pytest.raises(RuntimeError, match=why):
            attend(q, q, q, [term], kernel="native")
    with pytest.raises(RuntimeError, match="it computes in float32"):
        attend(*[q.double()] * 3, [Distance(torch.ones(2), torch.rand(1, 7, 2))], kernel="native")


@needed
def test_too_little_memory_is_an_error_of_python() -> None:
    code = """
import resource, torch
from parapos import Distance, attend
torch.set_num_threads(1)
q, (k, v) = torch.randn(1, 1, 100, 8, requires_grad=True), torch.randn(2, 1, 1, 400_000, 8)
term = Distance(torch.ones(1), torch.randn(1, 100, 2), keys=torch.randn(1, 400_000, 2))
out = attend(q, k, v, [term], kernel="native", tolerance=0)
size = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 60 * 2**20,) * 2)
try:
    out.sum().backward()
except RuntimeError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "refused: " in done.stdout, done.stderr


@needed
def test_float64_positions_keep_what_float32_rounds_away() -> None:
    g = torch.Generator().manual_seed(0)
    r = torch.rand(1, 40, 2, generator=g, dtype=torch.float64) * 1000 + 1e-5 * torch.rand(1, 40, 2, generator=g)
    slope = torch.full((1, 1, 40, 2), 1e6)  # which sees differences of a millionth
    far = r - r.round(decimals=3)  # neighbours less than a thousandth apart, a thousand from the middle
    at = Positions.of(far + torch.tensor([1000.0, -1000.0]) * (torch.arange(40) % 2).view(1, 40, 1))
    q = torch.zeros(1, 1, 40, 4)
    terms = [Quadratic(torch.full((1, 1, 40), -1e6), slope * 1e-3, at)]
    v = torch.randn(1, 1, 40, 3, generator=g)
    out = attend(q, q, v, terms, scale=1.0, kernel="native")
    exact = [Quadratic(torch.full((1, 1, 40), -1e6).double(), slope.double() * 1e-3, at)]
    expected = attend(q.double(), q.double(), v.double(), exact, scale=1.0, kernel="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)  # type: ignore[union-attr]
