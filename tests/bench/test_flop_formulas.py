"""PyTorch's FLOP counter sees the attention operator."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import parapos
import parapos.bench.flop_formulas  # registers the formulas


def count(encoding: str, heads: int = 2, n: int = 20, **options: object) -> tuple[int, int]:
    """Forward and backward of one attention call of heads of 8, beyond the encoding's own projections."""
    e = parapos.create_encoding(encoding, dim=16, heads=heads, head_dim=8, pos_dim=2, **options)
    r = torch.rand(n, 2) if encoding != "lookhere" else parapos.grid_positions(4, 5)
    q, k, v = (torch.randn(1, heads, n, 8, requires_grad=True) for _ in range(3))
    q_, k_, terms = e(torch.randn(1, n, 16), q, k, r)
    with FlopCounterMode(display=False) as forward:
        out = parapos.attend(q_, k_, v, terms, kernel="fused")
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), [q, k, v])
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("encoding", "basis"), [("pape", 6), ("pape_ri", 1), ("alibi", 1), ("polynomial", 4)])
def test_products_and_terms(encoding: str, basis: int) -> None:
    scores = 2 * 2 * 20 * 20
    forward, backward = count(encoding)
    assert forward == scores * (8 + 8 + basis)
    assert backward >= scores * (5 * 8 + 2 * basis)
    assert count("none")[0] == scores * 16


def test_no_operator_is_counted_as_nothing() -> None:
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name.partition(".")[0] for room, _, name in names if room == "parapos"}
    assert ours >= {"attention", "attention_backward", "triton_attention", "triton_attention_backward"}
    assert {name for name in ours if getattr(torch.ops.parapos, name) not in flop_registry} == set()


def test_a_model_with_pape_costs_little_more() -> None:
    """One of 224 pixels; the paper counts 37.6 and 119.7 for m = 50."""
    with torch.device("meta"):
        net = parapos.create_model("vit_base_patch16", encoding="pape", num_classes=1000)
        images = torch.randn(1, 3, 224, 224)
    with FlopCounterMode(display=False) as inference:
        out = net(images)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert inference.get_total_flops() <= 37.5e9
    assert inference.get_total_flops() + backward.get_total_flops() <= 113.6e9


def test_a_depthwise_convolution_costs_twice_in_its_backward() -> None:
    conv, x = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), torch.randn(2, 8, 5, 7, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = conv(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * 2 * 8 * 5 * 7 * 9
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    plain = torch.nn.Conv2d(8, 4, 3, bias=False)
    with FlopCounterMode(display=False) as both:
        plain(x).sum().backward()
    assert both.get_total_flops() == 3 * 2 * 2 * 8 * 4 * 3 * 5 * 9
