"""Attention compiled for this machine's CPU: native.cpp, built by its C++ compiler when it is first needed.

Scores are formed from D, exactly, in float32, and no more than a block of them is ever in memory. Without a compiler
other kernels serve the call.
B batch, H heads, n queries, N keys, h query/key size, w value size, p position dims, f numbers of a form.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..relative import Exponents, split
from ..tracing import is_plain, is_watched
from . import reference, sparse, tiles
from .kernels import Call, Kernel, refuse_batched_gradients, register_kernel
from .native_build import Missing, library
from .scores import empty_heads
from .terms import Relative, Table

MOST_DIMS, PARTS = 4, 3  # of positions; tensors of coefficients
LEAST = 4096  # keys, and queries times keys in its square: with fewer, finding out what to skip takes longer
# What lists cost, in units of the time of all tiles: each pair of tiles, and bounds of each query as much as so many
# keys of heads that are 64 wide; forming a score takes as long as products over EXTRA numbers.
PAIR_COST, QUERY_COST, EXTRA = 1.2, 1700.0, 40
GRAIN = 2**19  # multiplications that are worth a thread
FIELDS = (
    "q", "k", "v", "c0", "c1", "c2", "matrix", "bias", "mask", "at", "to", "at_low", "to_low", "out", "norm", "dout",
    "dq", "dk", "dv", "dc0", "dc1", "dc2", "query_tiles", "key_tiles", "needed",
)  # of `Attention` in native.cpp, before its numbers  # fmt: skip


@lru_cache(64)
def _matrix(terms: tuple[tuple[Exponents, float], ...]) -> Tensor:
    """What turns the coefficients of all terms, times a factor for each, into a form: (1, 1, f, numbers).

    A form is, for each coordinate u, g_u and M_uv for v <= u; then the factor of |D|, if there is one.
    """
    p = len(terms[0][0][0])
    first = [u * (u + 3) // 2 for u in range(p)]
    rows = [(e, factor) for exponents, factor in terms for e in exponents]
    out = torch.zeros(len(rows), p * (p + 3) // 2 + 1, dtype=torch.float32, device="cpu")
    for row, (e, factor) in enumerate(rows):
        axes = [u for u, power in enumerate(e) for _ in range(power)]
        if e[0] == -1:
            out[row, -1] = factor
        elif e[0] == -2:
            out[row, [first[u] + 1 + u for u in range(p)]] = factor
        elif len(axes) == 1:
            out[row, first[axes[0]]] = factor
        else:
            out[row, first[axes[1]] + 1 + axes[0]] = factor
    return out[None, None]


class Geometry(NamedTuple):
    """What the kernel takes besides numbers that learn. Lists are empty, or one per kind of tiles."""

    scale: float
    dims: int
    has_distance: bool
    matrix: Tensor | None
    positions: tuple[Tensor | None, ...]  # of queries and keys, and what float32 rounds away of both
    bias: Tensor | None
    mask: Tensor | None
    # Of one sample: query_tiles (1, 1, Q, s), key_tiles (1, 1, T, s), needed (1, H, Q, T).
    lists: tuple[Tensor, ...] = ()

    def of_sample(self, b: int) -> Geometry:
        """The same for one sample."""

        def cut(x: Tensor | None) -> Tensor | None:
            return x if x is None or len(x) == 1 else x[b : b + 1]

        positions = tuple(cut(x) for x in self.positions)
        return self._replace(positions=positions, bias=cut(self.bias), mask=cut(self.mask))


def _call(name: str, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, **more: Tensor | None) -> None:
    """Runs a function of native.cpp."""
    at, to, at_low, to_low = geometry.positions
    tensors: dict[str, Tensor | None] = dict(q=q, k=k, v=v, bias=geometry.bias, mask=geometry.mask, **more)
    tensors |= dict(at=at, to=to, at_low=at_low, to_low=to_low, matrix=geometry.matrix)
    lists = [1] * 4
    if geometry.lists:
        tensors |= dict(zip(("query_tiles", "key_tiles", "needed"), geometry.lists, strict=True))
        lists = [size for x in geometry.lists[:2] for size in x.shape[-2:]]
    numbers: list[int] = []
    for field in FIELDS:
        if (x := tensors.get(field)) is None:
            numbers += (0,) * 5
        else:
            numbers.append(x.data_ptr())
            numbers += [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    numbers += (*q.shape[:3], *k.shape[2:], v.shape[-1])
    numbers += (0 if (x := tensors.get(f"c{part}")) is None else x.shape[-1] for part in range(PARTS))
    numbers += (geometry.dims, geometry.has_distance, bool(geometry.lists))
    work = prod(q.shape[:3]) * k.shape[2] * (q.shape[-1] + v.shape[-1] + EXTRA)
    threads = max(1, min(torch.get_num_threads(), work // GRAIN))
    fields = array("q", (*numbers, *lists, threads, 0))
    found = library()
    assert not isinstance(found, Missing)
    if not getattr(found, name)(ctypes.c_void_p(fields.buffer_info()[0]), ctypes.c_float(geometry.scale)):
        raise torch.OutOfMemoryError("attention found no memory for the keys of one head; take fewer tokens or threads")


def _held(x: Tensor) -> Tensor:
    """x with its numbers in memory as they are."""
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def _rows(x: Tensor) -> Tensor:
    """The same, with the numbers of a row side by side."""
    x = _held(x)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _numbered(name: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    return {f"{name}{i}": x for i, x in enumerate(tensors)}


class _Attention(torch.autograd.Function):
    """Attention with up to PARTS tensors of coefficients (B or 1, H, n or 1, f)."""

    @staticmethod
    def forward(ctx, geometry, q, k, v, *coefficients):  # type: ignore[no-untyped-def]
        out, norm = empty_heads(q, v.shape[-1]), q.new_empty(*q.shape[:3], 2) if any(ctx.needs_input_grad) else None
        _call("parapos_forward", geometry, q, k, v, out=out, norm=norm, **_numbered("c", coefficients))
        ctx.geometry, ctx.count = geometry, len(coefficients)
        watched = (x for x in (geometry.bias, *geometry.positions) if x is not None and not x.is_inference())
        ctx.save_for_backward(q, k, v, out, norm, *coefficients, *watched)  # notices changes in place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        refuse_batched_gradients(dout)
        # Hooks may have changed how what was saved lies in memory.
        q, k, v, out, norm, *coefficients = (_rows(x.float()) for x in ctx.saved_tensors[: 5 + ctx.count])
        dq, dk, dv = (empty_heads(x) for x in (q, k, v))
        both = zip(coefficients, ctx.needs_input_grad[4:], strict=True)
        dc = [c.new_empty(*q.shape[:3], c.shape[-1]) if wanted else None for c, wanted in both]
        grads = dict(dq=dq, dk=dk, dv=dv, **_numbered("dc", dc), **_numbered("c", coefficients))
        _call("parapos_backward", ctx.geometry, q, k, v, out=out, norm=norm, dout=_rows(dout), **grads)
        dc = [None if x is None else x.sum_to_size(c.shape) for x, c in zip(dc, coefficients, strict=True)]
        return None, dq, dk, dv, *dc


def _geometry_of(call: Call) -> Relative | None:
    """The first of the terms that depend on positions, which all share them."""
    return next((term for term in call.terms if isinstance(term, Relative)), None)


def _positions(term: Relative | None) -> tuple[Tensor | None, ...]:
    """Positions (B or 1, 1, n or N, p) of queries and keys in float32, and what that rounds away, if anything."""
    if term is None:
        return (None,) * 4
    (at, at_low), (to, to_low) = split(term.r, term.key_positions)
    return tuple(None if x is None else _rows(x.detach())[:, None] for x in (at, to, at_low, to_low))


def _bias(call: Call) -> Tensor | None:
    """The sum of all tables, in float32."""
    total: Tensor | None = None
    for term in call.terms:
        if isinstance(term, Table):
            table = term.scores(torch.float32) if term.weight != 1 else term.bias.float()
            total = table if total is None else total + table
    return None if total is None else _held(total)


def _costs(call: Call) -> tuple[float, float]:
    width = call.q.shape[-1] + call.v.shape[-1] + EXTRA
    return PAIR_COST, QUERY_COST * (2 * 64 + EXTRA) / width


def is_worth_lists(call: Call) -> bool:
    """Whether skipping keys that have no weight is expected to save time."""
    terms = sparse.shared_terms(call) if call.tolerance > 0 and sparse.is_large(call, LEAST) else None
    if terms is None or (call.mask is not None and call.mask.shape[1] > 1):
        return False
    coefficients = [term.coefficients(torch.float32) for term in terms]
    return tiles.is_worth_it(replace(call, exact=True), terms, coefficients, _costs(call))


def _lists(call: Call) -> Iterator[tuple[Tensor, ...]]:
    """The tiles of queries and keys of each sample, and which each head needs, as the kernel reads them."""
    for heads in tiles.needed_tiles(replace(call, exact=True), call.needs_grad) or ():  # no columns are wanted
        index = (x[None, None].to(torch.int32).contiguous() for x in heads[0][:2])
        yield *index, torch.stack([x.needed for x in heads])[None].view(torch.uint8)


def _coefficients(terms: Sequence[Relative]) -> list[Tensor]:
    """Those of all terms, in at most PARTS tensors (B or 1, H, n or 1, f)."""
    parts = [part for term in terms for part in term.parts(torch.float32)]
    if len(parts) > PARTS:
        shape = torch.broadcast_shapes(*(x.shape[:3] for x in parts))
        parts = [torch.cat([x.expand(*shape, -1) for x in parts], -1)]
    return [_rows(x) for x in parts]


def attention(call: Call) -> Tensor:
    """As `reference.attention`, without the weights."""
    q, k, v = (_rows(x.float()) for x in (call.q, call.k, call.v))
    if not q.numel() or not k.shape[2] or not v.shape[-1]:
        return reference.attention(call)[0]
    term, relative = _geometry_of(call), [x for x in call.terms if isinstance(x, Relative)]
    matrix = _matrix(tuple((x.exponents, call.scale if x.scaled else 1.0) for x in relative)) if relative else None
    has_distance = any(e[0] == -1 for x in relative for e in x.exponents)
    dims = 1 if term is None else term.r.r.shape[-1]
    mask = None if call.mask is None else call.mask.view(torch.uint8)
    geometry = Geometry(call.scale, dims, has_distance, matrix, _positions(term), _bias(call), mask)
    if not is_worth_lists(call):
        return _Attention.apply(geometry, q, k, v, *_coefficients(relative)).to(call.q.dtype)
    parts, every = [], list(_lists(call))
    coefficients = _coefficients(relative)
    for b, lists in enumerate(every):
        tensors = (x if len(x) == 1 else x[b : b + 1] for x in (q, k, v, *coefficients))
        parts.append(_Attention.apply(geometry.of_sample(b)._replace(lists=lists), *tensors))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(call.q.dtype)


def _refuse(call: Call) -> str | None:
    if call.q.device.type != "cpu":
        return f"it is for the CPU, not for {call.q.device.type}"
    if torch.compiler.is_exporting() or is_watched(call.q):
        return "a graph holds PyTorch's operators"
    tensors = [
        call.k,
        call.v,
        *([] if call.mask is None else [call.mask]),
        *(x for term in call.terms for x in term.tensors().values()),
    ]
    if not all(map(is_plain, tensors)):
        return "it takes plain tensors, no subclasses of them"
    if call.q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    if max(call.q.shape[2], call.k.shape[2]) >= 2**31:
        return "it counts tokens in 32 bits"
    first = _geometry_of(call)
    for term in call.terms:
        name = type(term).__name__
        if isinstance(term, Relative):
            assert first is not None
            if not sparse.is_bounded(term) or not all(map(any, term.exponents)):
                return f"{name} is neither of degree one or two nor a distance"
            if term.r.r is not first.r.r or term.key_positions.r is not first.key_positions.r:
                return "terms have different positions"
            if not 1 <= term.r.r.shape[-1] <= MOST_DIMS:
                return f"positions have {term.r.r.shape[-1]} dimensions, and it serves 1 to {MOST_DIMS}"
        elif not isinstance(term, Table):
            return f"{name} is neither relative nor a table"
        elif call.needs_grad and term.needs_grad:
            return f"{name} requires a gradient"
    found = library()
    return str(found) if isinstance(found, Missing) else None


@torch.no_grad()
def _describe(call: Call) -> str:
    text = f"{call.names}, formed from D in a kernel compiled for this CPU"
    if not call.q.numel() or not call.k.numel() or not is_worth_lists(call):
        return text
    terms = sparse.shared_terms(call)
    assert terms is not None
    share = tiles.share(call, terms, [x.coefficients(torch.float32) for x in terms], call.needs_grad)
    gain = f"about {sparse.cost(call, share, _costs(call)):.2f} of the time of all tiles"
    return f"{text}, over the {share:.1%} of tiles that may have weight; expected: {gain}"


def _by_name(call: Call) -> str | None:
    return None if call.terms else "calls without terms are left to PyTorch's fused attention"


KERNEL = register_kernel(Kernel("native", 15, True, _refuse, _describe, attention, _by_name))
