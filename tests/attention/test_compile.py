"""torch.compile and torch.export: one graph for all resolutions, the same numbers, no graph break."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import parapos
from parapos.attention import Call, Distance, Quadratic, Table, fused
from parapos.attention import scores as score_blocks

from .budget import full

SIDES = (4, 5, 6, 8, 10)


def options(name: str) -> dict[str, object]:
    return {"directions": [("up", 0.5), ("all", 0.25)]} if name == "lookhere" else {}


@pytest.mark.parametrize("name", [n if n in ("pape_ri", "alibi") else full(n) for n in parapos.list_encodings()])
def test_one_graph_for_five_resolutions(name: str) -> None:
    torch._dynamo.reset()
    net = parapos.ViT(
        dim=16, heads=2, depth=2, mlp_dim=16, num_classes=3, patch=2, encoding=name, drop_path=0.0, **options(name)
    )
    torch.nn.init.normal_(net.classifier.weight)
    counter = CompileCounter()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    for side in SIDES:
        images = torch.randn(2, 3, 2 * side, 2 * side)
        logits = compiled(images)
        torch.testing.assert_close(logits, net(images))
        logits.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["pape", full("alibi")])
def test_one_graph_for_attention_with_mask_and_missing_positions(name: str) -> None:
    torch._dynamo.reset()
    net = parapos.Attention(16, heads=2, encoding=name, pos_dim=2)
    counter = CompileCounter()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    for side in SIDES:
        r = parapos.grid_positions(side, side, cls="unplaced")
        x, mask = torch.randn(2, len(r), 16), torch.rand(2, len(r)) > 0.3
        torch.testing.assert_close(compiled(x, r, mask), net(x, r, mask))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["pape", full("pape_ri"), "alibi", "lookhere", full("polynomial")])
def test_the_graph_holds_the_fused_operator(name: str) -> None:
    """Compiled code takes the same kernel as eager code: one node, and no softmax of N x N scores beside it."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    net = parapos.Attention(16, heads=2, encoding=name, pos_dim=2, **options(name))
    r = parapos.grid_positions(5, 5)
    torch.compile(net, fullgraph=True, backend=keep)(torch.randn(2, 25, 16), r)
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum(target.startswith("parapos.attention") for target in called) == 1, called
    assert not any("softmax" in target for target in called)


@pytest.mark.full
def test_through_the_default_backend() -> None:
    """Forward and backward through ahead-of-time autograd, decomposed as the default backend does.

    Without decomposition PyTorch misreports the strides of softplus's gradient.
    """
    torch._dynamo.reset()
    net = parapos.Attention(16, heads=2, encoding="pape", pos_dim=2)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    for side in SIDES[:3]:
        r = parapos.grid_positions(side, side)
        x = torch.randn(2, len(r), 16)
        found, wanted = (torch.autograd.grad(f(x, r).square().sum(), list(net.parameters())) for f in (compiled, net))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_export() -> None:
    net = parapos.ViT(dim=16, heads=2, depth=1, mlp_dim=16, num_classes=3, patch=2, parabolas=4).eval()
    batch = torch.export.Dim("batch", min=2)
    images = torch.randn(3, 3, 8, 8)
    program = torch.export.export(net, (images,), dynamic_shapes=({0: batch},))
    other = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(program.module()(other), net(other))


@pytest.mark.parametrize("size", [1, 2**20], ids=["many parts", "one part"])
def test_custom_operators_are_sound(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own checks: schema, fake tensors, autograd registration, ahead-of-time dispatch."""
    monkeypatch.setattr(score_blocks, "PRODUCT_BYTES", size)
    monkeypatch.setattr(score_blocks, "BLOCK_BYTES", size)
    q, k = torch.randn(2, 2, 9, 4, requires_grad=True), torch.randn(2, 2, 7, 4, requires_grad=True)
    v = torch.randn(2, 2, 7, 6)
    r, keys = parapos.grid_positions(3, 3)[None], parapos.grid_positions(1, 7)[None]
    form, slope = (x.requires_grad_() for x in (-torch.rand(2, 2, 9, 2, 2), torch.randn(2, 2, 9, 2)))
    mask = torch.rand(2, 1, 9, 7) < 0.8
    quadratic, slopes = Quadratic(form, slope, r, keys), torch.rand(2, requires_grad=True)
    table = Table(torch.randn(1, 2, 9, 7, requires_grad=True), weight=0.5)
    for terms in ([quadratic], [quadratic, Distance(slopes, r, keys=keys), table], [table]):
        for given in (None, mask):
            call = Call(q, k, v, tuple(terms), given, 0.5)
            term = fused.separable(call)
            made = [] if term is None else list(fused.columns(term))
            assert len(made) == (3 if terms == [quadratic] else 0)
            s = score_blocks.Scores.of(terms, 0.5, torch.float32, keep=False)
            s = s._replace(coefficients=[c.detach().requires_grad_() for c in s.coefficients])
            torch.library.opcheck(fused._forward_op, (q, k, v, given, 0.5, *s, made))


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_exported_without_autocast_and_run_with_it(kernel: str) -> None:
    """The program keeps positional arithmetic from being cast, as the module does."""

    class Net(torch.nn.Module):
        def forward(self, q: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
            out = parapos.attend(q, q, q, [Quadratic(form, None, parapos.grid_positions(4, 4)[None])], kernel=kernel)
            assert isinstance(out, torch.Tensor)
            return out

    q, form = torch.randn(1, 2, 16, 8), -torch.rand(1, 2, 16)
    program = torch.export.export(Net(), (q, form)).module()
    with torch.autocast("cpu", torch.bfloat16):
        found = program(q, form)
    torch.testing.assert_close(found, Net()(q, form))
