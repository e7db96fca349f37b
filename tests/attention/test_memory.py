"""Memory of the fused kernel, as PyTorch's profiler sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Table, Term

Make = Callable[..., Tensor]  # of a shape


def several(make: Make, b: int, h: int, r: Tensor) -> list[Term]:
    return [term for name in ("too steep for columns", "Distance", "Polynomial") for term in TERMS[name](make, b, h, r)]


TERMS: dict[str, Callable[[Make, int, int, Tensor], list[Term]]] = {
    "none": lambda make, b, h, r: [],
    "columns": lambda make, b, h, r: [
        Quadratic(-0.01 * make(b, h, r.shape[1]).abs().detach(), 0.01 * make(b, h, r.shape[1], 2), r)
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


def tensors_of(term: str, side: int, dtype: torch.dtype, training: bool) -> tuple[list[Tensor], list[Term]]:
    """q, k, v and terms of two samples with four heads."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(training)

    qkv = torch.randn(2, side * side, 3, 4, 32, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)
    terms = TERMS[term](make, 2, 4, parapos.grid_positions(side, side)[None])
    return [x.requires_grad_(training) for x in qkv.unbind()], terms


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_fused_attention_never_holds_all_scores(term: str, dtype: torch.dtype, masked: bool, training: bool) -> None:
    """Most of what it takes is a handful of blocks; with columns it is no more than a few times the inputs."""
    side = 48
    (q, k, v), terms = tensors_of(term, side, dtype, training)
    mask = torch.arange(side**2) < torch.tensor([[side * 40], [side * 24]]) if masked else None
    leaves = [x for x in (q, k, v, *(x for t in terms for x in t.tensors().values())) if x.requires_grad]

    def call() -> object:
        out = parapos.attend(q, k, v, terms, mask, kernel="fused")
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if training else out

    taken, inputs, scores = peak(call), 3 * q.numel() * 4, 2 * 4 * side**4 * 4
    assert taken < scores / 2, f"{taken / 2**20:.0f} MiB of {scores / 2**20:.0f} MiB"
    if term in ("none", "columns") and not (training and dtype == torch.bfloat16):
        assert taken < (6 if training else 4) * inputs, f"{taken / 2**20:.1f}, {inputs / 2**20:.1f} MiB"


def test_tiles_hold_copies_of_few_heads_at_one_time() -> None:
    """What skipping takes beside the output does not grow with the number of heads, and is a third of plain at most."""
    generator, n, r = torch.Generator().manual_seed(0), 64 * 64, parapos.grid_positions(64, 64)[None]
    taken = []
    with torch.no_grad():
        for heads in (2, 12):
            q, k, v = torch.randn(3, 1, heads, n, 64, generator=generator).unbind()
            term = Quadratic(-6 * torch.ones(1, heads, n), None, r)
            assert "of tiles that may have weight" in str(parapos.explain(q, k, v, terms=[term]))
            taken.append(peak(lambda q=q, k=k, v=v, term=term: parapos.attend(q, k, v, [term])) - v.numel() * 4)
        plain = 3 * q.numel() * 4 + peak(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert taken[1] < 1.2 * taken[0], f"{taken[0] / 2**20:.1f} and {taken[1] / 2**20:.1f} MiB"
    assert 4 * v.numel() * 4 + taken[1] < 1.3 * plain, f"{taken[1] / 2**20:.1f} beside {plain / 2**20:.1f} MiB"


def test_training_loads_no_compiler() -> None:
    """PyTorch's way to differentiate an operator imports its compiler at the first step: 120 MB and seconds."""
    lines = (
        "import sys, torch, parapos",
        "attention = parapos.Attention(32, heads=2, encoding='pape', pos_dim=2)",
        "for side in (2, 40):",  # few scores, and many
        "    x = torch.randn(1, side**2, 32, requires_grad=True)",
        "    attention(x, parapos.grid_positions(side, side)).sum().backward()",
        "sys.exit('torch._dynamo' in sys.modules)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
