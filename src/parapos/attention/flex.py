"""Attention by PyTorch's FlexAttention: score terms are evaluated from D inside a kernel that PyTorch compiles.

No extra columns and no N x N tensor, at the price of compiling, once for each kind of call: terms, dtype and shapes.
Eager FlexAttention would form all scores, so it is never used.
B batch, H heads, N tokens, h query/key size, w value size, p position dims.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..positions import centre, placed
from .basis import transformed
from .terms import Distance, Polynomial, Quadratic, Table, Term

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of b, h, i, j: sample, head, query, key
LEAST_CUDA_HEAD = 16
GRAPHS = 1024  # kinds of call that may be compiled; PyTorch's own limit of 8 is for shapes that should not vary


def refuse(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, needs_grad: bool) -> str | None:
    """Why FlexAttention cannot serve this call, or None."""
    if transformed():
        return "a function transform or forward-mode differentiation is active"
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention is compiled for CPU and CUDA, not for {q.device.type}"
    if q.dtype == torch.float64:
        return "FlexAttention has no float64"
    if q.device.type == "cuda" and min(q.shape[-1], v.shape[-1]) < LEAST_CUDA_HEAD:
        return f"FlexAttention on CUDA needs head sizes of {LEAST_CUDA_HEAD} at least"
    if torch.is_grad_enabled() and any(not isinstance(term, Table) and term.r.requires_grad for term in terms):
        return "the positions require a gradient"
    if q.device.type == "cpu":
        return "FlexAttention has no backward pass on the CPU" if needs_grad else _cpu_lacks()
    for term in terms:
        if needs_grad and any(x is not None and x.requires_grad for x in (getattr(term, n) for n in term.learned)):
            return "FlexAttention sums gradients of score terms by atomic additions, whose result varies"
    return None


@cache
def _cpu_lacks() -> str | None:
    """What compiling for this CPU needs and does not find."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in names if name):
        return "FlexAttention on the CPU needs a C++ compiler, and neither g++ nor clang++ was found"
    found = torch.backends.cpu.get_cpu_capability()
    if "AVX" not in found:
        return f"FlexAttention on the CPU needs AVX2 or AVX512, got {found}"
    return None


def _positions(r: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Positions as float32 high and low parts (B or 1, N, p), and 1.0 where there is one (B or 1, N), else 0.0.

    float32 positions are their own high part, so D is what subtracting them gives.
    """
    here = placed(r)
    if r.dtype == torch.float64:
        r, _ = centre(r, mask)
    r = torch.where(here[..., None], r, 0.0)
    high = r.float()
    return high, (r - high).float(), here.float()


def _difference(high: Tensor, low: Tensor, here: Tensor) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """D by coordinate, 0 where the query or the key has no position."""

    def of(b: Any, i: Tensor, j: Tensor) -> list[Tensor]:
        b = b if high.shape[0] > 1 else 0
        both = here[b, i] * here[b, j]
        return [((high[b, j, u] - high[b, i, u]) + (low[b, j, u] - low[b, i, u])) * both for u in range(high.shape[-1])]

    return of


def _quadratic(high: Tensor, low: Tensor, here: Tensor, M: Tensor | None, g: Tensor | None) -> Score:
    difference = _difference(high, low, here)

    def score(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = difference(b, i, j)
        total = torch.zeros_like(d[0])
        for u, x in enumerate(d):
            factor = torch.zeros_like(x) if g is None else g[b, h, i, u].float()
            if M is not None and M.ndim == 3:
                factor = factor + M[b, h, i].float() * x
            elif M is not None:
                for t, y in enumerate(d):
                    factor = factor + M[b, h, i, u, t].float() * y
            total = total + factor * x
        return total

    return score


def _polynomial(high: Tensor, low: Tensor, here: Tensor, c: Tensor, exponents: tuple[tuple[int, ...], ...]) -> Score:
    difference = _difference(high, low, here)

    def score(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = difference(b, i, j)
        total = torch.zeros_like(d[0])
        for n, powers in enumerate(exponents):
            part = c[b, h, i, n].float()
            for x, power in zip(d, powers, strict=True):
                for _ in range(power):
                    part = part * x
            total = total + part
        return total

    return score


def _distance(high: Tensor, low: Tensor, here: Tensor, slopes: Tensor) -> Score:
    difference = _difference(high, low, here)

    def score(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        squared = [x * x for x in difference(b, i, j)]
        return -slopes[h].float() * torch.sqrt(sum(squared[1:], squared[0]))

    return score


def _table(bias: Tensor, weight: Tensor) -> Score:
    def score(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        b, h = b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0
        return bias[b, h, i, j].float() * weight[0]

    return score


_SCORES: dict[str, Callable[..., Score]] = {
    "Quadratic": _quadratic,
    "Polynomial": _polynomial,
    "Distance": _distance,
    "Table": _table,
}
Part = tuple[str, bool, tuple[Any, ...]]  # of a term: its name, whether it is scaled, what its score is made from


def _part(term: Term, mask: Tensor | None) -> Part:
    name, scaled, values = _raw(term, mask)
    return name, scaled, tuple(x.contiguous() if isinstance(x, Tensor) else x for x in values)


def _raw(term: Term, mask: Tensor | None) -> Part:
    name = type(term).__name__
    if isinstance(term, Table):
        return name, term.scaled, (term.bias, term.bias.new_full((1,), term.weight, dtype=torch.float32))
    where = _positions(term.r, mask)
    if isinstance(term, Distance):
        return name, term.scaled, (*where, term.slopes)
    if isinstance(term, Polynomial):
        return name, term.scaled, (*where, term.c, term.exponents)
    assert isinstance(term, Quadratic)
    return name, term.scaled, (*where, term.M, term.g)


def _run(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: Tensor, parts: list[Part]) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    terms = [(scaled, _SCORES[name](*values)) for name, scaled, values in parts]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score.float()
        for scaled, term in terms:
            if scaled:
                score = score + term(b, h, i, j)
        score = score * scale[0]
        for scaled, term in terms:
            if not scaled:
                score = score + term(b, h, i, j)
        return score if seen is None else torch.where(seen[b, j], score, -torch.inf)

    out = flex_attention(q, k, v, score_mod=score_mod, scale=1.0)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch._dynamo import config

    # fullgraph: past the limit of graphs this raises, where it would else go on eagerly, with all scores in memory.
    # A graph per number of tokens: what inductor makes for any number does not compile on the CPU.
    compiled = torch.compile(_run, fullgraph=True, dynamic=False)

    def call(*args: Any) -> Tensor:
        with config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS):
            return compiled(*args)

    return call


def attention(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], mask: Tensor | None, scale: float) -> Tensor:
    """As `reference.attention`, without the weights, for calls that `refuse` does not refuse."""
    if not q.numel() or not v.numel():
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if mask is not None:  # padding may hold anything, NaN too
        k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    # Strides of their own are sizes of their own to the compiler, and its C++ does not build with ten of them.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    parts = [_part(term, mask) for term in terms]
    factor = torch.full((1,), scale, dtype=torch.float32, device=q.device)
    run = _run if torch.compiler.is_compiling() else _compiled()
    return run(q, k, v, mask, factor, parts)
