"""Attention by PyTorch's FlexAttention: score terms are evaluated from D inside a kernel that PyTorch compiles.

No extra columns and no N x N tensor, at the price of compiling, once for each kind of call: terms, dtype and shapes.
Eager FlexAttention would form all scores, so it is never used. Lists of tiles are a BlockMask.
B batch, H heads, n queries, N keys, h query/key size, w value size, p position dims.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..positions import placed
from ..relative import Exponents, function, split
from .kernels import Call, Kernel, register_kernel
from .lists import Lists, listed, share
from .terms import Relative, Table, Term
from .tiling import TILE

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of b, h, i, j: sample, head, query, key
LEAST_CUDA_HEAD = 16
BLOCKS = {"cpu": TILE, "cuda": 128}  # tokens of a block in a BlockMask, which FlexAttention's own tiles have to divide
GRAPHS = 1024  # kinds of call that may be compiled; PyTorch's own limit of 8 is for shapes that should not vary


def refuse(call: Call) -> str | None:
    """Why FlexAttention cannot serve this call, or None."""
    q, v = call.q, call.v
    if torch.compiler.is_exporting():
        return "an exported program holds standard operators alone"
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention is compiled for CPU and CUDA, not for {q.device.type}"
    if q.dtype == torch.float64:
        return "FlexAttention has no float64"
    if q.device.type == "cuda" and min(q.shape[-1], v.shape[-1]) < LEAST_CUDA_HEAD:
        return f"FlexAttention on CUDA needs head sizes of {LEAST_CUDA_HEAD} at least"
    for term in call.terms:
        if not isinstance(term, Relative | Table):
            return f"{type(term).__name__} is neither relative nor a table"
    if q.device.type == "cpu":
        return "FlexAttention has no backward pass on the CPU" if call.needs_grad else _cpu_lacks()
    if call.needs_grad and any(term.needs_grad for term in call.terms):
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


class Place(NamedTuple):
    """Positions (B or 1, N, p) as `split` gives them, 0 where there is none; here (B or 1, N) is 1.0 or 0.0."""

    high: Tensor
    low: Tensor | None
    here: Tensor

    @classmethod
    def of(cls, high: Tensor, low: Tensor | None) -> Place:
        here = placed(high).float().contiguous()
        return cls(high.nan_to_num(nan=0.0).contiguous(), None if low is None else low.contiguous(), here)


def _relative(queries: Place, keys: Place, c: Tensor, exponents: Exponents) -> Score:
    """The score of a relative term: coefficients (B or 1, H, n or 1, f) times functions of D."""

    def score(b: Any, h: Tensor, i: Any, j: Tensor) -> Tensor:
        at, to = (b if x.high.shape[0] > 1 else 0 for x in (queries, keys))
        d = [keys.high[to, j, u] - queries.high[at, i, u] for u in range(queries.high.shape[-1])]
        if keys.low is not None and queries.low is not None:
            d = [x + (keys.low[to, j, u] - queries.low[at, i, u]) for u, x in enumerate(d)]
        both = queries.here[at, i] * keys.here[to, j]
        d = [x * both for x in d]
        b, i = b if c.shape[0] > 1 else 0, i if c.shape[2] > 1 else 0
        total = c[b, h, i, 0] * function(d, exponents[0])
        for n, e in enumerate(exponents[1:], 1):
            total = total + c[b, h, i, n] * function(d, e)
        return total

    return score


def _table(bias: Tensor, weight: Tensor) -> Score:
    def score(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        b, h = b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0
        return bias[b, h, i, j].float() * weight[0]

    return score


Part = tuple[bool, tuple[Any, ...]]  # of a term: whether it is scaled, and what its score is made from


def _part(term: Term) -> Part:
    if isinstance(term, Relative):
        queries, keys = (Place.of(*parts) for parts in split(term.r, term.key_positions))
        return term.scaled, (queries, keys, term.coefficients(torch.float32).contiguous(), term.exponents)
    assert isinstance(term, Table)
    weight = term.bias.new_full((1,), term.weight, dtype=torch.float32)
    return term.scaled, (term.bias.contiguous(), weight)


def _run(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: Tensor, parts: list[Part], blocks: Any
) -> Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import flex_attention

    terms = [(scaled, (_table if len(values) == 2 else _relative)(*values)) for scaled, values in parts]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score.float()
        for scaled, term in terms:
            if scaled:
                score = score + term(b, h, i, j)
        score = score * scale[0]
        for scaled, term in terms:
            if not scaled:
                score = score + term(b, h, i, j)
        if mask is None:
            return score
        at = [x if size > 1 else 0 for x, size in zip((b, h, i), mask.shape, strict=False)]
        return torch.where(mask[*at, j], score, -torch.inf)

    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, scale=1.0)
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


def _block_mask(lists: Lists) -> Any:
    """The blocks that queries visit, as a BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask

    size, lengths = BLOCKS[lists.call.q.device.type], (lists.call.q.shape[2], lists.call.k.shape[2])
    visits = lists.blocks(size, size)
    first = (~visits).int().argsort(dim=-1, stable=True).int()  # those that are visited
    return BlockMask.from_kv_blocks(visits.sum(-1, dtype=torch.int32), first, BLOCK_SIZE=size, seq_lengths=lengths)


def attention(call: Call) -> Tensor:
    """As `reference.attention`, without the weights, for calls that `refuse` does not refuse."""
    if not call.q.numel() or not call.v.numel():
        return call.q.new_zeros((*call.q.shape[:-1], call.v.shape[-1]))
    if (lists := listed(call, TILE)) is None:
        return _attention(call, None)
    return lists.queries.undo(_attention(lists.call, _block_mask(lists)))


def _attention(call: Call, blocks: Any) -> Tensor:
    # Strides of their own are sizes of their own to the compiler, and its C++ does not build with ten of them.
    q, k, v = call.q.contiguous(), call.k.contiguous(), call.v.contiguous()
    parts = [_part(term) for term in call.terms]
    factor = torch.full((1,), call.scale, dtype=torch.float32, device=q.device)
    run = _run if torch.compiler.is_compiling() else _compiled()
    return run(q, k, v, None if call.mask is None else call.mask.contiguous(), factor, parts, blocks)


def _describe(call: Call) -> str:
    where = share(call, TILE, BLOCKS[call.q.device.type])
    return f"PyTorch FlexAttention, {call.names} computed inside it{where}; compiled when first called"


register_kernel(
    Kernel(
        "flex",
        30,
        True,
        refuse,
        _describe,
        attention,
        by_name=lambda call: "it compiles for each kind of call; ask for it by name",
    )
)
