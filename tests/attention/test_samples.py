"""Samples are judged one by one: what columns would lose in one of them is formed from D there alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parapos import Positions, Quadratic, attend, explain
from parapos.attention import fused, scores
from parapos.attention.kernels import Call

from .budget import fed

LEARNED = ("q", "k", "v", "M", "g")


def windows(
    steep: dict[int, float], *, b: int = 5, n: int = 40, shared: bool = False
) -> tuple[dict[str, Tensor], Positions]:
    """Windows of 2 heads of 16 at three-dimensional positions; the forms of some samples are many times as steep."""
    g = torch.Generator().manual_seed(0)
    root = torch.randn(b, 2, n, 3, 3, generator=g)
    tensors = {name: torch.randn(b, 2, n, 16, generator=g) for name in "qkv"}
    tensors |= {"M": -0.1 * root @ root.mT, "g": torch.randn(b, 2, n, 3, generator=g)}
    for sample, factor in steep.items():
        tensors["M"][sample] *= factor
    return tensors, Positions.of(5 * torch.rand(1 if shared else b, n, 3, generator=g))


def run(
    tensors: dict[str, Tensor], r: Positions, kernel: str, mask: Tensor | None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    out = attend(*(leaves[x] for x in "qkv"), [Quadratic(leaves["M"], leaves["g"], r)], mask, 0.3, kernel)
    assert isinstance(out, Tensor)
    weight = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad((out * weight).sum(), [leaves[name] for name in LEARNED])
    return {"out": out.detach(), **dict(zip(LEARNED, grads, strict=True))}


@pytest.mark.parametrize("masked", [None, "padding", "each", "one"])
@pytest.mark.parametrize("shared", [False, True], ids=["own positions", "shared positions"])
def test_a_steep_sample_leaves_the_others_alone(masked: str | None, shared: bool) -> None:
    tensors, r = windows({1: 1e4, 3: 1e5}, shared=shared)
    b, _, n, _ = tensors["q"].shape
    sizes = {"padding": (b, n), "each": (b, 2, n, n), "one": (1, 1, n, n)}
    mask = None if masked is None else torch.rand(sizes[masked], generator=torch.Generator().manual_seed(2)) < 0.8
    with fed() as calls:
        found = run(tensors, r, "fused", mask)
    assert sum(len(q) for q, _ in calls if q.shape[-1] > 16) == 2 * b, "columns of all samples, forward and backward"
    want = run(tensors, r, "reference", mask, torch.float64)
    for name, x in found.items():
        for sample in range(b):
            error = (x[sample] - want[name][sample]).norm() / want[name].norm()
            assert error <= 5e-4, (name, sample)


def test_the_others_get_what_they_get_alone() -> None:
    tensors, r = windows({1: 1e4})
    found = run(tensors, r, "fused", None)
    rest = torch.tensor([0, 2, 3, 4])
    alone = run({name: x[rest] for name, x in tensors.items()}, Positions.of(r.r[rest]), "fused", None)
    for name, x in found.items():
        torch.testing.assert_close(x[rest], alone[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_judged_one_by_one() -> None:
    """One-hot weights far from the middle: the forward pass keeps its columns, the gradients of one sample do not."""
    tensors, r = windows({}, b=3)
    r.r[1] *= 1e3
    tensors["q"][1] *= 30
    tensors["k"][1] *= 30
    tensors["M"][1] *= 1e-9
    tensors["g"][1] *= 1e-4
    with patch.object(scores, "blocks_from_d", wraps=scores.blocks_from_d) as spy:
        found = run(tensors, r, "fused", None)
    assert [len(call.args[0]) for call in spy.call_args_list] == [1]
    with patch.object(fused, "separable", return_value=None):
        want = run(tensors, r, "fused", None)
    for name in LEARNED:
        torch.testing.assert_close(found[name][1], want[name][1], rtol=1e-6, atol=1e-6 * want[name].abs().max())
        assert (found[name] - want[name]).norm() <= 5e-4 * want[name].norm()


@pytest.mark.usefixtures("no_compiler")
def test_explain_counts_the_samples() -> None:
    tensors, r = windows({1: 1e4, 3: 1e5})
    text = str(explain(*(tensors[x] for x in "qkv"), [Quadratic(tensors["M"], tensors["g"], r)], scale=0.3))
    assert "formed from D for 2 of 5 samples" in text


def test_coefficients_that_all_samples_share() -> None:
    """Their gradient is the sum over samples, whichever way each sample went."""
    tensors, _ = windows({}, b=3)
    near = torch.rand(1, 40, 3, generator=torch.Generator().manual_seed(3))
    r = Positions.of(torch.cat([near, 1e4 * near, near + 1]))
    q, k, v = (tensors[x] for x in "qkv")
    for wanted in ([True], [False]):
        grads = {}
        for dtype in (torch.float32, torch.float64):
            call = Call(q, k, v, (Quadratic(-1e-3 * torch.eye(3).expand(3, 2, 40, 3, 3), None, r),), None, 0.3)
            term = fused.separable(call)
            assert term is not None
            made = list(fused.columns(term))
            s = fused.Scores.of([term], 0.3, dtype, keep=False)
            s = s._replace(coefficients=[s.coefficients[0][:1]])
            args = (q, k, v, None, 0.3, *s)
            if dtype == torch.float64:
                args, made = (*(x.double() for x in (q, k, v)), *args[3:]), []
            out = fused._forward(*args, made)
            grads[dtype] = fused._backward(torch.ones_like(out), wanted, *args, made)
            assert made == [] or fused._fitting(q, s.coefficients, made, 0.3).tolist() == [True, False, True]
        for x, want in zip(grads[torch.float32], grads[torch.float64], strict=True):
            assert x.shape == want.shape
            assert (x - want).norm() <= 5e-4 * want.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_few_scores_are_what_many_are(masked: bool) -> None:
    """All at once, and part by part."""
    tensors, r = windows({})
    mask = torch.rand(5, 40, generator=torch.Generator().manual_seed(2)) < 0.8 if masked else None
    few = run(tensors, r, "fused", mask)
    with patch.multiple(scores, PRODUCT_BYTES=1, ROWS=7):
        many = run(tensors, r, "fused", mask)
    for name, x in few.items():
        torch.testing.assert_close(x, many[name], rtol=1e-4, atol=1e-5)


def test_few_scores_of_one_hot_weights() -> None:
    """Where the gradients of columns lose too much, D gives them here too."""
    tensors, r = windows({}, b=1)
    for name, factor in {"q": 100, "k": 100, "M": 1e-9, "g": 1e-4}.items():
        tensors[name] *= factor
    r.r.mul_(1e3)
    with patch.object(scores, "blocks_from_d", wraps=scores.blocks_from_d) as spy:
        found = run(tensors, r, "fused", None)
    assert spy.call_count == 1
    with patch.object(fused, "separable", return_value=None):
        want = run(tensors, r, "fused", None)
    for name in LEARNED:
        torch.testing.assert_close(found[name], want[name], rtol=1e-6, atol=1e-6 * want[name].abs().max())


def test_second_derivatives_of_few_scores_are_refused() -> None:
    tensors, r = windows({})
    q = tensors["q"].requires_grad_()
    out = attend(q, tensors["k"], tensors["v"], [Quadratic(tensors["M"], tensors["g"], r)], scale=0.3, kernel="fused")
    assert isinstance(out, Tensor)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def test_gradients_of_few_scores_inside_of_autocast() -> None:
    """Positional arithmetic stays in float32 if the backward pass runs under autocast."""
    tensors, r = windows({})
    want = run(tensors, r, "fused", None)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(tensors, r, "fused", None)
    for name, x in found.items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hides", [False, True])
def test_no_weight_is_so_small_that_its_products_are_subnormal(hides: bool) -> None:
    made = -torch.linspace(0.0, 200.0, 2001).expand(3, -1).clone()
    made[1] *= 1e4
    if hides:
        made[2, 1::2] = -torch.inf
    weights = scores.softmax_(made.clone(), hides)
    assert not ((weights > 0) & (weights < 1e-25)).any()
    expected = torch.softmax(made.double(), -1)
    assert (weights - expected).abs().amax() < 1e-6
    assert not weights[2, 1::2].any() or not hides
