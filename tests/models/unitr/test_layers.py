"""Attention in sets against a loop over sets, and what encodings promise there."""

import pytest
import torch

from parapos.attention import attend
from parapos.blocks import Attention
from parapos.encodings import ENCODINGS
from parapos.models.unitr.layers import SetAttention, SetBlock, SetLayer
from parapos.models.unitr.partition import Partition, partition
from parapos.positions import Positions

NAMES = [name for name, cls in ENCODINGS.items() if cls.claims.unbounded]
names = pytest.mark.parametrize("name", NAMES)
OPTIONS = {"pape": {"parabolas": 3, "init": (0.3, 0.0, 1.0)}}


def tokens(count=150, seed=0):
    g = torch.Generator().manual_seed(seed)
    cells = torch.randperm(20 * 20, generator=g)[:count]
    cells = torch.stack([cells // 20, cells % 20], 1)
    return torch.randn(count, 16, generator=g), cells, torch.randint(2, (count,), generator=g)


def sets_of(cells, group, **options):
    return partition(cells, group, **{"side": 8, "shift": 4, "size": 10, "major": "y", **options})


def attention(name, **options):
    torch.manual_seed(1)
    return SetAttention(16, 2, name, 2, **{**OPTIONS.get(name, {}), **options})


def moved(part, change):
    """The same sets with other positions."""
    return Partition(part.tokens, part.mask, part.slot, Positions(change(part.positions.r), unplaced=False))


def naive(net, x, part):
    """Set by set, without padding, by the parent's attention."""
    out = torch.empty_like(x)
    for index, mask in zip(part.tokens, part.mask, strict=True):
        rows = index[mask]
        r = part.positions.r[:, rows]
        seen = net.encoding.add(x[None, rows], r)
        q, k, _ = Attention.project(net, seen)
        _, _, v = Attention.project(net, x[None, rows])
        q, k, terms = net.encoding(x[None, rows], q, k, r)
        found = attend(q, k, v, terms, None, net.encoding.scale, kernel="reference")
        out[rows] = net.proj(found.transpose(1, 2).flatten(2))[0]
    return out


@pytest.mark.parametrize(("name", "options"), [*((n, {}) for n in NAMES), ("polynomial", {"key_dependent": True})])
def test_sets_attend_as_a_loop_over_them_does(name, options):
    x, cells, group = tokens()
    net, part = attention(name, **options), sets_of(cells, group)
    if options:
        torch.nn.init.normal_(net.encoding.w_h, std=0.3)
    weight = torch.randn(x.shape)
    got, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, loop = net(got, part), naive(net, want, part)
    assert torch.allclose(found, loop, atol=2e-4)
    wanted = [got, *net.parameters()]
    first = torch.autograd.grad((found * weight).sum(), wanted)
    second = torch.autograd.grad((loop * weight).sum(), [want, *net.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, atol=2e-3 * max(1.0, float(b.abs().max())))


@names
def test_what_encodings_promise_holds_in_sets(name):
    x, cells, group = tokens()
    net, part = attention(name).double(), sets_of(cells, group)
    x = x.double()
    plain = net(x, moved(part, lambda r: r.double()))
    shift = torch.tensor([3.0, -7.0], dtype=torch.float64)
    shifted = net(x, moved(part, lambda r: r.double() + shift))
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    turned = net(x, moved(part, lambda r: r.double() @ turn))
    claims = ENCODINGS[name].claims
    assert torch.allclose(plain, shifted, atol=1e-8) == claims.translation
    assert torch.allclose(plain, turned, atol=1e-8) == claims.rotation


@names
def test_the_order_of_tokens_does_not_matter(name):
    x, cells, group = tokens()
    net, order = attention(name), torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    first = net(x, sets_of(cells, group))
    second = net(x[order], sets_of(cells[order], group[order]))
    assert torch.allclose(first[order], second, atol=2e-4)


def test_padding_does_not_matter():
    x, cells, group = tokens(30)
    net = attention("pape")
    small, large = (sets_of(cells, group, size=size) for size in (30, 64))  # one set to a window, either way
    assert torch.allclose(net(x, small), net(x, large), atol=2e-4)


def test_an_addition_reaches_queries_and_keys_alone():
    x, cells, group = tokens()
    net, part, added = attention("none"), sets_of(cells, group), torch.randn(150, 16)
    size = 2 * 16
    values = torch.nn.functional.linear(x, net.qkv.weight[size:], net.qkv.bias[size:])
    with torch.no_grad():
        net.qkv.weight[:size] = 0
        net.qkv.bias[:size] = 0
    flat = net(x, part, added)  # nobody asks for anything, so all look at all of their set
    for index, mask in zip(part.tokens, part.mask, strict=True):
        rows = index[mask]
        assert torch.allclose(flat[rows], net.proj(values[rows].mean(0)), atol=1e-5)


def test_pillars_and_patches_have_their_own_norms():
    x, cells, group = tokens()
    part = sets_of(cells, group)
    layer = SetLayer(16, 32, heads=2, encoding="none")
    before = layer(x, (60, 90), part)
    for module in layer.image.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.constant_(module.bias, 0.7)
            torch.nn.init.uniform_(module.weight)
    after = layer(x, (60, 90), part)
    assert torch.equal(before[:60], after[:60])
    assert not torch.allclose(before[60:], after[60:], atol=1e-2)


@torch.no_grad()
def test_a_layer_is_what_the_formula_says():
    x, cells, group = tokens()
    parts = [sets_of(cells, group, shift=shift) for shift in (0, 4)]
    block = SetBlock(16, 32, 0, depth=2, heads=2, encoding="rope")
    for parameter in block.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.2, 1.0)
    y = x
    for layer, part in zip(block.layers, parts, strict=True):
        u, rows = y + layer.attention(y, part), []
        for i in range(len(x)):
            branch = layer.lidar if i < 60 else layer.image
            one = branch.norm1(u[i])
            rows.append(branch.norm2(one + branch.mlp(one)))
        y = layer.norm(torch.stack(rows) + y)
    want = torch.stack([(block.lidar_norm if i < 60 else block.image_norm)(y[i] + x[i]) for i in range(len(x))])
    assert torch.allclose(block(x, (60, 90), parts, [None, None]), want, atol=1e-5)


def test_recomputing_changes_nothing():
    x, cells, group = tokens()
    parts = [sets_of(cells, group, shift=shift) for shift in (0, 4)]
    block = SetBlock(16, 32, 0, depth=2, heads=2, encoding="pape", parabolas=3)
    grads = []
    for recompute in (False, True):
        out = block(x.requires_grad_(), (60, 90), parts, [None, None], recompute)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *block.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_no_tokens_give_none():
    part = sets_of(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    block = SetBlock(16, 32, 0, depth=2, heads=2, encoding="pape", parabolas=3)
    assert block(torch.zeros(0, 16), (0, 0), [part, part], [None, None]).shape == (0, 16)
