"""Queries and keys that are different sets: n != N, positions of their own, both kinds of mask, one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import parapos

from .budget import DTYPES, FORWARD, TRAINING, Case, assert_within_budget, full, make_case

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
kernels = pytest.mark.parametrize("kernel", TRAINING)
encodings = pytest.mark.parametrize("name", parapos.list_encodings())


def cross(name: str, kind: str, dtype: torch.dtype = torch.float32, p: int = 2, n: int = 11, keys: int = 30) -> Case:
    """Two samples of n queries among keys that reach further; some queries and some keys have no position."""
    g = torch.Generator().manual_seed(4)
    r, to = (torch.rand(2, count, p, generator=g) * 8 + 50 for count in (n, keys))
    to = to * 1.5 - 25
    if n > 1:
        r[0, 1] = torch.nan
    to[1, 3] = torch.nan
    mask: Tensor | None = None
    if kind == "padding":
        mask = torch.arange(keys) < torch.tensor([[keys], [keys - 7]])
    elif kind != "none":
        mask = torch.rand(2, 2 if kind == "mask" else 1, n, keys, generator=g) < 0.6
        mask[1, 0, 0] = False
    return make_case(name, p=p, r=r, keys=to, batch=2, mask=mask, dtype=dtype)


@kernels
@dtypes
@encodings
@pytest.mark.parametrize("kind", ["none", "padding", "mask", full("shared mask")])
def test_every_encoding(name: str, kind: str, dtype: torch.dtype, kernel: str) -> None:
    assert_within_budget(cross(name, kind, dtype), kernel)


@kernels
@encodings
@pytest.mark.parametrize("kind", ["padding", full("mask")])
def test_exact(name: str, kind: str, kernel: str) -> None:
    assert_within_budget(cross(name, kind), kernel, exact=True)


@kernels
@dtypes
@pytest.mark.parametrize("name", [n for n in parapos.list_encodings() if n != "lookhere"])
@pytest.mark.parametrize("p", [full(1), 3, full(4)])
def test_other_dimensions(name: str, p: int, dtype: torch.dtype, kernel: str) -> None:
    assert_within_budget(cross(name, "mask", dtype, p=p), kernel)


@kernels
@dtypes
@pytest.mark.parametrize("name", ["pape", full("pape_ri"), full("alibi"), full("lookhere"), full("polynomial")])
@pytest.mark.parametrize(("n", "keys"), [(1, 300), (300, 5), full(64, 1025)])
def test_few_and_many(name: str, n: int, keys: int, dtype: torch.dtype, kernel: str) -> None:
    assert_within_budget(cross(name, "padding", dtype, n=n, keys=max(keys, 5)), kernel)


@pytest.mark.parametrize("kernel", [full(k) for k in FORWARD if k not in TRAINING] or ["reference"])
@encodings
@pytest.mark.parametrize("kind", ["padding", "mask"])
def test_kernels_without_a_backward_pass(name: str, kind: str, kernel: str) -> None:
    case = cross(name, kind)
    with torch.no_grad():
        found, want = (case.attend(k, **case.tensors) for k in (kernel, "reference"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_the_same_set_twice_is_self_attention(name: str, kernel: str) -> None:
    """Keys that are given and equal to the queries change nothing, whatever the mask."""
    r = parapos.grid_positions(5, 6, cls=True)
    case = make_case(name, r=r, batch=2)
    for case.mask in (None, torch.rand(2, 2, 31, 31) < 0.7):
        case.keys = None
        alone = case.run(kernel, torch.float64)
        case.keys = r.clone()
        given = case.run(kernel, torch.float64)
        for key, x in alone.items():
            torch.testing.assert_close(given[key], x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_some_queries_of_a_set_get_what_they_get_among_all(name: str, kernel: str) -> None:
    case = make_case(name, r=parapos.grid_positions(5, 6, cls=True), batch=2)
    whole = case.run(kernel, torch.float64)["out"]
    some = torch.tensor([0, 7, 30, 7])
    part = Case(
        case.encoding,
        case.tensors | {"x": case.tensors["x"][:, some], "q": case.tensors["q"][:, :, some]},
        case.r[some],
        None,
        torch.float64,
        case.r,
    )
    if name == "lookhere":  # which token is the class token is seen from a whole set alone
        part.r, part.keys = (r.where(r > 0, torch.nan) for r in (part.r, case.r))
    torch.testing.assert_close(part.run(kernel, torch.float64)["out"], whole[:, :, some], rtol=1e-9, atol=1e-9)


def module(name: str, **options: object) -> parapos.Attention:
    if name == "lookhere":
        options["directions"] = [("up-left", 0.5), ("right", 0.25)]
    return parapos.Attention(24, 2, name, 2, **options)


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_a_key_cache(name: str, kernel: str) -> None:
    """Tokens that come one by one, each looking at those before it, get what causal attention over all gives them."""
    net = module(name, kernel=kernel).double()
    r = parapos.grid_positions(3, 4).double()
    x = net.encoding.add(torch.randn(2, 12, 24, dtype=torch.float64), r)
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    want = net(x, r, causal)
    for i in range(12):
        seen = slice(0, i + 1)
        found = net(x[:, i : i + 1], r[i : i + 1], context=x[:, seen], keys=r[seen])
        torch.testing.assert_close(found, want[:, i : i + 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["reference", *TRAINING])
@encodings
def test_attention_to_a_context(name: str, kernel: str) -> None:
    """The module's projections serve both sets: a context that is the tokens themselves is self-attention."""
    net = module(name, kernel=kernel).double()
    r = parapos.grid_positions(3, 4)
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    mask = torch.arange(12) < torch.tensor([[12], [8]])
    found, want = net(x, r, mask, context=x, keys=r), net(x, r, mask)
    torch.testing.assert_close(found[0], want[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1, :8], want[1, :8], rtol=1e-9, atol=1e-9)
    # What padding of the context holds is not seen.
    wild = torch.where(mask[..., None], x, 1e3)
    torch.testing.assert_close(net(x, r, mask, context=wild, keys=r), found, rtol=1e-9, atol=1e-9)
    out = net(x[:, :3], r[:3], mask, context=x, keys=r)
    assert out.shape == (2, 3, 24)
    out.square().sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


def test_what_cross_attention_needs_is_named() -> None:
    net, x, r = module("pape"), torch.randn(1, 4, 24), parapos.grid_positions(2, 2)
    for options in ({"context": x}, {"keys": r}):
        with pytest.raises(ValueError, match="needs both context, the tokens to look at, and keys, their positions"):
            net(x, r, **options)
    q, k = torch.randn(1, 2, 4, 12), torch.randn(1, 2, 5, 12)
    with pytest.raises(ValueError, match=r"same tokens, got \(1, 2, 4, 12\) and \(1, 2, 5, 12\); .*keys="):
        net.encoding(x, q, k, r)
    with pytest.raises(ValueError, match=r"keys must be \(1 or 1, 5, 2\) for these tokens, got \(1, 4, 2\)"):
        net.encoding(x, q, k, r, keys=r)
    with pytest.raises(ValueError, match=r"positions must be \(1 or 1, 4, 2\)"):
        net.encoding(x, q, k, torch.zeros(5, 2), keys=torch.zeros(5, 2))
