"""Input that someone will bring: wild padding, huge positions, empty sets, transforms, steep slopes."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Quadratic, fused

from .budget import TRAINING, Case, assert_within_budget, full, make_case

kernels = pytest.mark.parametrize("kernel", ["reference", *TRAINING])
encodings = pytest.mark.parametrize("name", parapos.list_encodings())


def module(name: str, kernel: str = "auto") -> parapos.Attention:
    torch.manual_seed(0)
    options = {"directions": [("up-left", 0.5), ("right", 0.25)]} if name == "lookhere" else {}
    return parapos.Attention(24, 2, name, 2, kernel=kernel, **options)


@kernels
@encodings
@pytest.mark.parametrize("far", [1e15, torch.nan, full(1e10)])
def test_wild_padding_reaches_no_gradient(name: str, kernel: str, far: float) -> None:
    """Padded queries, keys, values, coefficients and positions: none of it is seen, forward or backward."""
    net = module(name, kernel)
    r = parapos.grid_positions(3, 4).expand(2, -1, -1).clone()
    mask = torch.arange(12) < torch.tensor([[12], [8]])
    x, project = torch.randn(2, 12, 24), net.project
    results = []
    for fill in (0.0, far):
        r[~mask] = 1.0 if fill == 0 else fill
        made = [torch.where(mask[:, None, :, None], t, fill) for t in project(x)]
        with patch.object(net, "project", lambda *_, made=made: made):
            valid = net(torch.where(mask[..., None], x, min(fill, 1e3)), r, mask)[mask]
        results.append([valid, *torch.autograd.grad(valid.square().sum(), [net.qkv.weight])])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(b).all()
        # NaN positions bring a column for the query's constant, hence other roundings; else not a bit may differ.
        ulps = 16 * torch.finfo(a.dtype).eps * a.abs().max().item() if math.isnan(far) else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=ulps)


@kernels
@encodings
def test_no_tokens_and_no_samples(name: str, kernel: str) -> None:
    net = module(name, kernel)
    assert net(torch.zeros(2, 0, 24), torch.zeros(0, 2)).shape == (2, 0, 24)
    assert net(torch.zeros(0, 5, 24), torch.rand(5, 2)).shape == (0, 5, 24)


def test_samples_do_not_see_each_others_positions() -> None:
    net = module("lookhere")
    grid = parapos.grid_positions(3, 3)
    x = torch.randn(2, 9, 24)
    near, far = torch.stack([grid, grid]), torch.stack([grid, grid + 4e7])
    assert torch.equal(net(x, near)[0], net(x, far)[0])
    rows = [net.encoding.bias(net.encoding.prepare(grid + shift)).isinf().sum() for shift in (0.0, 2.2e6)]
    assert rows[0] == rows[1]


def test_lookhere_class_token_beside_registers_and_padding() -> None:
    encoding = module("lookhere").encoding
    r = parapos.grid_positions(3, 3, cls=True)
    for more in (torch.full((1, 2), torch.nan), torch.zeros(2, 2)):
        bias = encoding.bias(encoding.prepare(torch.cat([r, more])))
        assert (bias[0, :, 0] == 0).all()


@pytest.mark.parametrize("w_b", [20.0, 100.0])
@pytest.mark.parametrize("w_p", [0.17, 1.0])
def test_steep_slopes_stay_in_budget(w_b: float, w_p: float) -> None:
    case = make_case("pape", r=parapos.grid_positions(14, 14))
    with torch.no_grad():
        case.encoding.w_p.mul_(w_p)
        case.encoding.w_b.mul_(w_b)
    assert_within_budget(case, "fused")


def test_indefinite_forms() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 81, 16, generator=g) for _ in range(3))
    form = torch.tensor([[-1.0, 5.0], [5.0, -1.0]]).expand(1, 1, 81, 2, 2)
    term = Quadratic(form, None, parapos.Positions.of(parapos.grid_positions(9, 9)))
    want = parapos.attend(q, k, v, [term], kernel="reference")
    torch.testing.assert_close(parapos.attend(q, k, v, [term], kernel="fused"), want, rtol=0, atol=5e-4)
    torch.testing.assert_close(parapos.attend(q, k, v, [term], kernel="fused", exact=True), want, rtol=1e-5, atol=1e-6)


def test_nothing_overflows_in_float16() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 81, 16, generator=g).half() for _ in range(3))
    term = Quadratic(-5e4 * torch.eye(2).expand(1, 1, 81, 2, 2), None, parapos.grid_positions(9, 9)[None])
    out = parapos.attend(q, k, v, [term], scale=1e-4)
    torch.testing.assert_close(
        out, parapos.attend(q, k, v, [term], scale=1e-4, kernel="reference"), rtol=1e-2, atol=1e-2
    )


def test_transforms_get_the_kernel_that_supports_them() -> None:
    net = module("pape")
    x, r = torch.randn(1, 9, 24), parapos.grid_positions(3, 3)
    _, tangent = torch.func.jvp(lambda t: net(t, r).sum(), (x,), (torch.ones_like(x),))
    (gradient,) = torch.autograd.grad(net(x.requires_grad_(), r).sum(), x)
    torch.testing.assert_close(tangent, gradient.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.func.grad(lambda t: net(t, r).sum())(x.detach()), gradient, rtol=1e-4, atol=1e-5)


def test_meta_device() -> None:
    with torch.device("meta"):
        net = parapos.ViT(dim=24, heads=2, depth=1, mlp_dim=8, patch=4, num_classes=3)
        assert net(torch.empty(1, 3, 8, 8)).shape == (1, 3)


def test_devices_must_agree() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"Distance\.r must be on cpu as q is, got meta"):
        parapos.attend(q, q, q, [parapos.Distance(torch.ones(2), torch.zeros(1, 4, 2, device="meta"))])


def test_huge_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1e\\+15"):
        module("pape")(torch.zeros(1, 2, 24), torch.tensor([[0.0, 0.0], [1e20, 0.0]]))


def _grid(side: int) -> torch.Tensor:
    return parapos.grid_positions(side, side)[None]


def test_parts_of_a_batch_share_buffers_and_nothing_else() -> None:
    """Fractional positions first, whole ones next: the second part needs fewer columns than the first."""
    torch.manual_seed(0)
    r = torch.cat([_grid(32) * 0.7, _grid(32)])
    q, k, v = torch.randn(3, 2, 16, 1024, 16).unbind()
    term = Quadratic(torch.full((2, 16, 1024), -0.05), None, r)
    ours, want = (parapos.attend(q, k, v, [term], kernel=kernel) for kernel in ("fused", "reference"))
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.25, 0.0, 1e-25])
@pytest.mark.parametrize("masked", [False, True])
def test_scales_that_do_not_hide(scale: float, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 513, 16).unbind()
    term = Quadratic(torch.full((1, 1, 513), -0.01), None, torch.arange(513.0)[None, :, None] * 0.1)
    mask = torch.rand(1, 513) < 0.7 if masked else None
    ours, want = (parapos.attend(q, k, v, [term], mask, scale, kernel) for kernel in ("fused", "reference"))
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_half_coefficients_are_widened_before_they_are_scaled() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 100, 32).unbind()
    root = torch.randn(1, 2, 100, 2, 2)
    term = Quadratic((-(root @ root.mT)).bfloat16(), (8 * torch.randn(1, 2, 100, 2)).bfloat16(), _grid(10))
    ours, want = (parapos.attend(q, k, v, [term], kernel=kernel) for kernel in ("fused", "reference"))
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def test_padding_does_not_change_the_method() -> None:
    """Padding far away leaves columns as exact as they were, and they are used."""
    r = _grid(24)
    r[:, -1] = 1e9
    q = torch.zeros(1, 1, 576, 8)
    mask = torch.ones(1, 576, dtype=torch.bool)
    mask[0, -1] = False
    with patch.object(fused, "forward_from_d", side_effect=AssertionError("formed scores from D")):
        for M in (-0.1 * torch.ones(1, 1, 576), -0.1 * torch.eye(2).expand(1, 1, 576, 2, 2)):
            parapos.attend(q, q, q, [Quadratic(M, None, r)], mask, kernel="fused")
            with pytest.raises(AssertionError, match="formed scores from D"):
                parapos.attend(q, q, q, [Quadratic(M, None, r)], kernel="fused", tolerance=0)


def test_one_token_of_one_head_trains() -> None:
    net = parapos.Attention(8, heads=1, encoding="pape", pos_dim=2)
    net(torch.randn(1, 1, 8), torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in net.encoding.parameters())


@kernels
def test_queries_without_width(kernel: str) -> None:
    """Only the term speaks."""
    r, v = parapos.grid_positions(3, 3)[None], torch.randn(1, 2, 9, 4)
    found = parapos.attend(torch.zeros(1, 2, 9, 0), torch.zeros(1, 2, 9, 0), v, [slopes(r)], scale=1.0, kernel=kernel)
    want = slopes(r).scores(torch.float32).softmax(-1) @ v
    torch.testing.assert_close(found, want.expand_as(v))


def slopes(r: Tensor) -> Distance:
    return Distance(torch.tensor([0.5, 1.0], requires_grad=True), r)


@kernels
@pytest.mark.parametrize("positions", [0, 1])
def test_no_samples(kernel: str, positions: int) -> None:
    """Parameters get gradients of zero, which processes that train together wait for."""
    q, r = torch.randn(0, 2, 9, 4), parapos.grid_positions(3, 3).expand(positions, -1, -1)
    form, term = torch.randn(0, 2, 9, 2, 2, requires_grad=True), slopes(r)
    out = parapos.attend(q, q, q, [Quadratic(form, None, r), term], kernel=kernel)
    assert isinstance(out, Tensor)
    assert out.shape == q.shape
    out.sum().backward()
    assert term.slopes.grad is not None
    assert not term.slopes.grad.any()
    assert form.grad is not None


def test_backward_where_autocast_is_on() -> None:
    """Forward outside, backward inside: nothing positional is cast."""
    side = 6
    n, generator = side * side, torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, 16, generator=generator) for _ in range(4))
    form = -torch.rand(1, 2, n, 2, 2, generator=generator)
    leaves = [x.requires_grad_() for x in (q, k, v, form @ form.transpose(-1, -2) * -0.1)]
    term = Quadratic(leaves[3], None, parapos.grid_positions(side, side)[None])
    out = parapos.attend(q, k, v, [term], kernel="fused")
    want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_float64_with_fractional_float32_positions() -> None:
    """Above 512 tokens too nothing is rounded to float32 on the way."""
    r = torch.rand(600, 2, generator=torch.Generator().manual_seed(0)) * 20 + 0.3
    case = make_case("pape", r=r, heads=1, head_dim=8)
    found, want = (case.run(kernel, torch.float64) for kernel in ("fused", "reference"))
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9 * x.abs().max().item())


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradient_of_the_form_far_from_the_origin(kernel: str, dtype: torch.dtype) -> None:
    """Positions a million spreads away give the dM of the same positions at the origin, to float32's digits."""
    g = torch.Generator().manual_seed(0)
    near = torch.randint(0, 2**10, (1, 80, 2), generator=g).double() / 2**10
    q, k, v, dout = (torch.randn(1, 2, 80, 16, generator=g).to(dtype) for _ in range(4))
    grads = []
    for shift in (0.0, 2.0**20):
        M = (-20 * torch.eye(2)).expand(1, 2, 80, 2, 2).to(dtype).clone().requires_grad_()
        slope = torch.zeros(1, 2, 80, 2, dtype=dtype, requires_grad=True)
        out = parapos.attend(q, k, v, [Quadratic(M, slope, near + shift)], kernel=kernel)
        grads.append(torch.autograd.grad(out, (M, slope), dout))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * a.abs().max().item())


def quiet(case: Case, factor: float) -> Case:
    case.tensors["q"] *= factor
    return case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize(("side", "factor"), [(8, 1e-3), (24, 1e-3), full(8, 0.0), full(24, 0.0), full(32, 1e-3)])
def test_queries_that_say_little(name: str, side: int, factor: float, dtype: torch.dtype) -> None:
    """Where q.k is next to nothing, the reference in half precision rounds little, and so must the columns."""
    case = make_case(name, r=parapos.grid_positions(side, side, cls=True), heads=2, head_dim=32, dim=32, dtype=dtype)
    assert_within_budget(quiet(case, factor), "fused")
