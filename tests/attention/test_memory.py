"""What `explain` says about memory, against what PyTorch's profiler sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Table, Term

from .budget import full

Make = Callable[..., Tensor]  # of a shape


def several(make: Make, b: int, h: int, r: Tensor) -> list[Term]:
    return [term for name in ("too steep for columns", "Distance", "Polynomial") for term in TERMS[name](make, b, h, r)]


TERMS: dict[str, Callable[[Make, int, int, Tensor], list[Term]]] = {
    "none": lambda make, b, h, r: [],
    "columns": lambda make, b, h, r: [
        Quadratic(-make(b, h, r.shape[1]).abs().detach(), 0.01 * make(b, h, r.shape[1], 2), r)
    ],
    "too steep for columns": lambda make, b, h, r: [Quadratic(None, 9.0 * make(b, h, r.shape[1], 2), r)],
    "Polynomial": lambda make, b, h, r: [Polynomial(make(b, h, r.shape[1], 5), r)],
    "Distance": lambda make, b, h, r: [Distance(make(h), r)],
    "Table": lambda make, b, h, r: [Table(make(1, h, r.shape[1], r.shape[1]).detach())],
    "several": several,
    "shared table": lambda make, b, h, r: [Table(make(1, 1, r.shape[1], r.shape[1]).detach())],
}


def peak(call: Callable[[], object]) -> int:
    """Most bytes that PyTorch held at one time during the call, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    del kept
    return top


def tell_and_take(
    kernel: str, shape: tuple[int, int, int], term: str, dtype: torch.dtype, masked: bool, training: bool, strided: bool
) -> None:
    b, h, side = shape
    n = side * side
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(training)

    if strided:  # as a projection makes them
        qkv = torch.randn(b, n, 3, h, 32, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)
        q, k, v = (x.requires_grad_(training) for x in qkv.unbind())
    else:
        q, k, v = (torch.randn(b, h, n, 32, generator=generator).to(dtype).requires_grad_(training) for _ in range(3))
    terms = TERMS[term](make, b, h, parapos.grid_positions(side, side)[None])
    mask = torch.arange(n) < torch.tensor([[n - n // 3], [n // 2]]).repeat(b // 2, 1) if masked else None
    leaves = [x for x in (q, k, v, *(getattr(t, a) for t in terms for a in t.learned)) if x is not None]
    leaves = [x for x in leaves if x.requires_grad]

    def call() -> object:
        out = parapos.attend(q, k, v, terms, mask, kernel=kernel)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if training else out

    plan = parapos.explain(q, k, v, terms, mask, kernel=kernel)
    assert (plan.training is None) == (not training)
    told, taken = plan.memory if plan.training is None else plan.training, peak(call)
    assert 0.9 * taken <= told <= 3 * taken + 2**21, f"told {told / 2**20:.1f} MiB, taken {taken / 2**20:.1f} MiB"


direction = pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
padding = pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])


@direction
@padding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kernel", "side", "term"),
    [
        *(("fused", 26, term) for term in TERMS),
        *(full(kernel, 14, term) for kernel in ("fused", "reference") for term in TERMS),
    ],
)
def test_told_and_taken(kernel: str, side: int, term: str, dtype: torch.dtype, masked: bool, training: bool) -> None:
    tell_and_take(kernel, (2, 4, side), term, dtype, masked, training, strided=False)


@direction
@padding
@pytest.mark.parametrize("shape", [(16, 1, 14), (64, 6, 7), (8, 12, 14)], ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_of_other_shapes(term: str, shape: tuple[int, int, int], masked: bool, training: bool) -> None:
    """As a model passes them."""
    tell_and_take("fused", shape, term, torch.float32, masked, training, strided=True)
