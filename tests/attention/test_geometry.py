"""What positions alone decide is made once and shared; gathered geometry serves windows; transforms are told apart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos import Positions
from parapos.attention import Distance, Polynomial, Quadratic, Relative, Term, columns
from parapos.attention import scores as score_blocks
from parapos.blocks import Encoder
from parapos.encodings.bias import LookHere
from parapos.encodings.rotary import RoPE

from .budget import TRAINING

encodings = pytest.mark.parametrize("name", parapos.list_encodings())
N = 12


@pytest.fixture
def made() -> Iterator[dict[str, int]]:
    """How often each piece of geometry was made."""
    counts: dict[str, int] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **options)

        return wrapper

    places = [
        (columns, "centre"),
        (columns, "make_columns"),
        (Relative, "basis"),
        (LookHere, "_bias"),
        (Positions, "of"),
    ]
    with ExitStack() as stack:
        for owner, name in places[:4]:
            stack.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        once = Positions.once

        def spy(self: Positions, key: Any, make: Callable[[], Any]) -> Any:
            return once(self, key, counted("rope", make) if key[0] == "rope" else make)

        stack.enter_context(patch.object(Positions, "once", spy))
        yield counts


def stack_of_four(name: str, **options: object) -> Encoder:
    if name == "lookhere":
        options["directions"] = [("up-left", 0.5), ("right", 0.25)]
    return Encoder(24, 4, 32, heads=2, encoding=name, pos_dim=2, **options)


WANTED = {
    "pape": {"centre": 1, "make_columns": 1},
    "pape_ri": {"centre": 1, "make_columns": 1},
    "polynomial": {"centre": 1, "make_columns": 1},
    "alibi": {"basis": 1},
    "lookhere": {"_bias": 1},
    "rope": {"rope": 1},
}


@pytest.mark.usefixtures("no_compiler")
@encodings
@pytest.mark.parametrize("padded", [False, True])
def test_once_for_four_layers(name: str, padded: bool, made: dict[str, int]) -> None:
    """Forward and backward. Prepared positions keep it for the next pass; other positions begin anew."""
    net, r = stack_of_four(name), parapos.grid_positions(3, 4)
    x, mask = torch.randn(2, N, 24), torch.arange(N) < torch.tensor([[N], [8]]) if padded else None
    wanted = WANTED.get(name, {})
    if padded and name == "alibi":  # samples have positions of their own now, and functions of D are made in blocks
        wanted = {}
    positions = net.encoding.prepare(r)
    for _ in range(2):
        net(x, positions, mask).sum().backward()
        assert made == wanted
    net(x, r, mask)
    assert made == {key: 2 * count for key, count in wanted.items()}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("encoding", ["pape", "alibi"])
def test_cross_attention_shares_geometry_too(encoding: str, made: dict[str, int]) -> None:
    nets = [parapos.Attention(24, 2, encoding, 2) for _ in range(3)]
    x, context = torch.randn(2, 5, 24), torch.randn(2, N, 24)
    r, keys = Positions.of(torch.rand(5, 2)), Positions.of(torch.rand(N, 2))
    for net in nets:
        x = net(x, r, context=context, keys=keys)
    x.sum().backward()
    assert made == WANTED[encoding]
    nets[0](x, r, context=context, keys=Positions.of(torch.rand(N, 2)))  # other keys
    assert made == {key: 2 * count for key, count in WANTED[encoding].items()}


def forms(*shape: int) -> Tensor:
    return -torch.rand(2, 2, N, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("exact", [False, True], ids=["columns", "from D"])
def test_geometry_is_never_taken_for_that_of_another_kind(exact: bool) -> None:
    """Terms of several kinds, dtypes and head sizes on one set of positions, and the first again."""
    r = Positions.of(parapos.grid_positions(3, 4))
    kinds: list[Callable[[Positions], Term]] = [
        lambda r: Quadratic(forms(2, 2), forms(2), r),
        lambda r: Quadratic(forms(2, 2), None, r),
        lambda r: Quadratic(forms(), forms(2), r),
        lambda r: Quadratic(None, forms(2), r),
        lambda r: Distance(torch.tensor([0.5, 2.0]), r),
        lambda r: Polynomial(forms(2), r, ((1, 0), (0, 2))),
        lambda r: Polynomial(forms(2), r, ((1, 0), (0, 3))),
        lambda r: Quadratic(forms(2, 2), forms(2), r, Positions.of(parapos.grid_positions(4, 3))),
        lambda r: Quadratic(forms(2, 2), forms(2), r, Positions.of(parapos.grid_positions(6, 2))),
        lambda r: Quadratic(forms(2, 2), forms(2), r),
    ]
    for dtype, size in ((torch.float32, 8), (torch.float64, 8), (torch.float32, 20), (torch.bfloat16, 8)):
        q = torch.randn(2, 2, N, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        for kind in kinds:
            found = parapos.attend(q, q, q, [kind(r)], kernel="fused", exact=exact)
            want = parapos.attend(q, q, q, [kind(r)], kernel="reference")
            far = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(found, want, rtol=far, atol=far)


def test_large_functions_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold N x N numbers as long as the positions live."""
    r, q = Positions.of(parapos.grid_positions(3, 4)), torch.randn(1, 2, N, 8)
    monkeypatch.setattr(score_blocks, "BLOCK_BYTES", 100)
    parapos.attend(q, q, q, [Distance(torch.rand(2), r)], kernel="fused")
    assert "basis" not in r._made
    monkeypatch.undo()
    parapos.attend(q, q, q, [Distance(torch.rand(2), r)], kernel="fused")
    assert "basis" in r._made


def test_compiled_positions_that_change_from_layer_to_layer() -> None:
    """What was made from the first positions is not used for the second, wherever a compiler puts them."""
    q = torch.randn(2, 2, N, 8, generator=torch.Generator().manual_seed(0))

    def layers(start: Tensor) -> Tensor:
        r = start * 2 + 1
        out = parapos.attend(q, q, q, [Quadratic(forms(), None, r)])
        assert isinstance(out, Tensor)
        r = r * 3 + out.mean()
        out = parapos.attend(q, q, q, [Quadratic(forms(), None, r)])
        assert isinstance(out, Tensor)
        return out

    start = parapos.grid_positions(3, 4)[None]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layers, backend="aot_eager")(start), layers(start))


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_windows_are_samples(name: str, kernel: str) -> None:
    """Tokens and geometry gathered into windows, padded where a window is not full, give what attention over the whole
    set gives when a mask lets each token look into its own window alone."""
    net = stack_of_four(name, kernel=kernel).layers[0].attention.double()
    r = parapos.grid_positions(5, 6)
    x = net.encoding.add(torch.randn(2, 30, 24, dtype=torch.float64), r)
    window = ((r[:, 0] - 1) // 4 + 2 * ((r[:, 1] - 1) // 3)).long()  # 4 x 3 tokens, fewer at the edges
    inside = window[:, None] == window[None, :]
    want = net(x, r, inside[None, None])
    index = torch.full((4, 12), -1)
    for w in range(4):
        members = (window == w).nonzero().flatten()
        index[w, : len(members)] = members
    assert (index < 0).any()
    real = (index >= 0).repeat(2, 1)
    tokens = x[:, index.clamp(min=0)].flatten(0, 1)  # (B W, K, D)
    found = net(tokens, Positions.of(r).gather(index.expand(2, 4, 12)), real)
    back = torch.zeros_like(x)
    for b in range(2):
        back[b, index[index >= 0]] = found.unflatten(0, (2, 4))[b][index >= 0]
    torch.testing.assert_close(back, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_reordered_tokens(name: str, kernel: str) -> None:
    """As serialized patches do: gather, attend, undo."""
    net = stack_of_four(name, kernel=kernel).layers[0].attention.double()
    r = parapos.grid_positions(5, 6)
    x = net.encoding.add(torch.randn(2, 30, 24, dtype=torch.float64), r)
    order = torch.stack([torch.randperm(30) for _ in range(2)])
    mixed = x.gather(1, order[..., None].expand_as(x))
    found = net(mixed, Positions.of(r).gather(order))
    undone = torch.empty_like(x).scatter(1, order[..., None].expand_as(x), found)
    torch.testing.assert_close(undone, net(x, r), rtol=1e-9, atol=1e-9)


@encodings
def test_joined_sets(name: str) -> None:
    """Tokens of two sensors in one attention: positions joined are positions given at once."""
    net = stack_of_four(name)
    a, b = parapos.grid_positions(3, 3), parapos.grid_positions(2, 4, cls="unplaced") * 0.5
    x = torch.randn(2, 18, 24)
    found = net(x, Positions.cat([Positions.of(a), Positions.of(b)]))
    torch.testing.assert_close(found, net(x, torch.cat([a, b])), rtol=1e-5, atol=1e-5)


@encodings
def test_vmap_over_positions(name: str) -> None:
    """Served by the reference, the one kernel that is plain operations; the others say why not."""
    net = stack_of_four(name).layers[0].attention
    x, rs = torch.randn(2, N, 24), torch.rand(3, N, 2) * 5 + 1
    found = torch.func.vmap(lambda r: net(x, r))(rs)
    want = torch.stack([net(x, r) for r in rs])
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    net.kernel = "fused"
    with pytest.raises(parapos.KernelError, match="a function transform or forward-mode differentiation is active"):
        torch.func.vmap(lambda r: net(x, r))(rs)


def test_rotary_tables_of_other_sizes_are_not_mixed_up() -> None:
    """Two encodings on one set of positions."""
    r = Positions.of(parapos.grid_positions(3, 4))
    x = torch.randn(1, N, 24)
    for size, base in ((8, 100.0), (12, 100.0), (12, 10.0), (8, 100.0)):
        q = torch.randn(1, 2, N, size)
        rope = RoPE(dim=24, heads=2, head_dim=size, pos_dim=2, base=base)
        assert torch.equal(rope(x, q, q, r)[0], rope(x, q, q, r.r)[0])


@encodings
@pytest.mark.parametrize("exact", [False, True])
def test_geometry_dies_with_its_positions(name: str, exact: bool) -> None:
    """At once, not when the garbage collector runs: a table of all pairs may hold a gigabyte."""
    net, r = stack_of_four(name, exact=exact), Positions.of(parapos.grid_positions(3, 4))
    with torch.no_grad():
        net(torch.randn(2, N, 24), r)
    gone = weakref.ref(r)
    gc.disable()
    try:
        del r
        assert gone() is None
    finally:
        gc.enable()
