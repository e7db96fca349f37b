"""Calls with lists of tiles: few tokens, small tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from parapos.attention import Distance, Quadratic, Relative, flex, lists, reference, sparse, tiles, triton
from parapos.attention.kernels import Call
from parapos.positions import Positions

from .test_tiles import leaves_of

SIZE = 16  # of heads


@contextmanager
def small_lists(size: int = 32, worth: bool = True) -> Iterator[None]:
    """Lists for few tokens, in blocks of this size."""
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(sparse, LEAST=1, QUERY_COST=0.0, PAIR_COST=1.0))
        stack.enter_context(patch.object(triton, "LIST", size))
        stack.enter_context(patch.multiple(flex, TILE=size, BLOCKS={"cpu": size}))
        if worth:
            stack.enter_context(patch.object(tiles, "is_worth_it", return_value=True))
        yield


def strip(
    kind: str = "", n: int = 150, p: int = 1, heads: int = 1, samples: int = 1, push: float = 0.0, width: int = SIZE
) -> Call:
    """Tokens strewn over a strip, which look at some neighbours. push: and at that to the right of them."""
    gen = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=gen)

    def positions(count: int) -> Positions:
        r = torch.rand(samples, count, p, generator=gen).double() * torch.tensor([n / 3 ** (p - 1), 3.0, 3.0][:p])
        r[:, :: 41 if kind == "unplaced" else count] = torch.nan if kind == "unplaced" else 0.0
        return Positions.of(r.float() if kind == "float32" else r)

    count = 70 if kind == "cross" else n
    q, k, v = normal(heads, n, SIZE), normal(heads, count, SIZE), normal(heads, count, width)
    r, keys = positions(n), positions(count) if kind == "cross" else None
    root = torch.eye(p) + normal(heads, n, p, p) * 0.1
    g = normal(heads, n, p) + push * 9.0
    term: Relative = Quadratic(-4.5 * root @ root.mT, g, r, keys)
    if kind == "distance":
        term = Distance(torch.linspace(2.0, 4.0, heads), r)
    elif kind == "PaPE-RI":
        term = Quadratic(-4.0 - normal(heads, n).abs(), None, r)
    mask = None
    if kind == "padded":
        mask = (torch.arange(n) < n - 31)[None, None, None].expand(samples, 1, 1, n)
        term = term.hide(mask[:, 0, 0])
    elif kind == "masked":
        mask = torch.rand(samples, heads, n, n, generator=gen) < 0.8
        mask = mask | torch.eye(n, dtype=torch.bool)
    return Call(q, k, v, (term,), mask, SIZE**-0.5, tolerance=1e-7)


def in_type(call: Call, dtype: torch.dtype) -> Call:
    """The same call for all types, with the tolerance of this one."""
    q, k, v = (x.to(dtype).float() for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, tolerance=sparse.DEFAULTS[dtype])


def numbers(call: Call, dtype: torch.dtype, run: Callable[[Call], Tensor]) -> dict[str, Tensor]:
    """Output and gradients, in float64."""
    mine, leaves = leaves_of(call, dtype)
    out = run(mine)
    assert out.dtype == dtype
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach().double()} | {f"gradient {i}": x.double() for i, x in enumerate(grads)}


def by_reference(call: Call) -> Tensor:
    return reference.attention(call)[0]


def visits_of(call: Call, size: int) -> Tensor:
    """Which blocks a training step visits: (B, H, blocks of queries, blocks of keys)."""
    found = lists.listed(leaves_of(call, call.q.dtype)[0], size)
    assert found is not None
    return found.blocks(size, size)
