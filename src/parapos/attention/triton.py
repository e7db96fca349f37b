"""The Triton kernel: fused attention on GPUs with score terms computed from D inside the tile, in float32.

No extra columns, no N x N tensor; exact at any resolution, because positions are subtracted before anything is
multiplied. float64 positions travel as two float32 each, taken about the middle of their sample. The device code is in
triton_kernels.py; here are its launch, the custom operators around it, and what it cannot serve.
B batch, H heads, n queries, N keys, h query/key size, w value size, p position dims.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..relative import split
from .kernels import Call, Kernel, refuse_second_derivative, register_kernel
from .lists import compressed, listed, share
from .terms import Distance, Quadratic, Relative, Table, Term

LARGEST_SIZE = 128  # of a head
LARGEST_P = 4
LIST = 64  # tokens of a block in lists of blocks; tiles of all passes have to divide it
CAPABILITY = (8, 0)  # the oldest GPU generation that the tiles below were compiled for
INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it


class Tiles(NamedTuple):
    """Queries and keys per tile, warps per program, stages of the load pipeline."""

    i: int
    j: int
    warps: int
    stages: int


# Per pass and head size up to 64 or 128; half precision, then float32. Chosen by compiling for sm_80, sm_89 and sm_90,
# not by timing: no spills at head size 64, at most 99 KiB of shared memory (benchmarks/triton.md). At p = 4 a table
# together with a mask of each query spills up to 16 bytes.
TILES = {
    ("forward", 64): (Tiles(128, 64, 8, 3), Tiles(16, 32, 8, 2)),
    ("forward", 128): (Tiles(128, 64, 8, 2), Tiles(16, 32, 8, 1)),
    ("backward_query", 64): (Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1)),
    ("backward_query", 128): (Tiles(32, 32, 4, 2), Tiles(16, 16, 8, 1)),
    ("backward_key", 64): (Tiles(16, 128, 8, 2), Tiles(32, 16, 8, 1)),
    ("backward_key", 128): (Tiles(32, 64, 8, 2), Tiles(16, 32, 8, 1)),
}


def tiles(name: str, call: Inputs) -> Tiles:
    """The tiles of a pass for a call; smaller ones where registers would not suffice."""
    size = 64 if max(call.q.shape[-1], call.v.shape[-1]) <= 64 else 128
    single = call.q.dtype == torch.float32
    found = TILES[name, size][single]
    p = 0 if call.r is None else call.r.shape[-1]
    mask = call.mask is not None and call.mask.shape[2] > 1  # one for each query
    table = mask or call.bias is not None
    if name == "forward":
        scalar = call.M is not None and call.M.ndim == 3
        halvings = int(p == LARGEST_P or table or scalar) + int(p == LARGEST_P and mask)
    elif name == "backward_query":
        halvings = int(p == LARGEST_P) + int(single and (p == LARGEST_P or (table and p == 3)))
    else:
        halvings = int(single and mask)
    if call.starts is not None:  # all passes visit the same pairs of blocks
        warps = 4 if single and name == "forward" else found.warps  # with 8, some would spill
        found = found._replace(i=min(found.i, LIST), j=min(found.j, LIST), warps=warps)
    for _ in range(halvings):
        found = found._replace(j=found.j // 2) if found.j > 16 else found._replace(i=max(16, found.i // 2))
    return found


@cache
def _interpreted() -> bool:
    """Whether kernels run in Python: Triton was imported with TRITON_INTERPRET=1."""
    from triton import JITFunction  # type: ignore[import-untyped]

    from .triton_kernels import forward

    return not isinstance(forward, JITFunction)


def refuse(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    q, v = call.q, call.v
    if not INSTALLED:
        return "Triton is not installed (pip install 'parapos[kernels]')"
    if torch.version.hip:
        return "it was made for NVIDIA GPUs only"
    if not q.is_cuda and not (q.device.type == "cpu" and INTERPRETED):
        return f"it runs on GPUs, q is on {q.device.type}"
    if q.is_cuda:
        gpu = torch.cuda.get_device_properties(q.device)
        if (gpu.major, gpu.minor) < CAPABILITY:
            need = ".".join(map(str, CAPABILITY))
            return f"it needs compute capability {need} or newer, this GPU has {gpu.major}.{gpu.minor}"
    if torch.compiler.is_exporting():
        return "an exported program holds standard operators alone"
    if q.dtype == torch.float64:
        return "it has no float64"
    for name, x in (("query", q), ("value", v)):
        if x.shape[-1] > LARGEST_SIZE:
            return f"it serves head sizes up to {LARGEST_SIZE}, the {name} size is {x.shape[-1]}"
    for term in call.terms:
        if type(term) not in _FIELDS:
            return f"it has no {type(term).__name__} term"
        if isinstance(term, Table) and call.needs_grad and term.bias.requires_grad:
            return "it has no gradient of Table.bias"
        if isinstance(term, Relative) and not 1 <= term.r.r.shape[-1] <= LARGEST_P:
            return f"it serves 1 to {LARGEST_P} position dimensions, got {term.r.r.shape[-1]}"
    if any(sum(isinstance(term, kind) for term in call.terms) > 1 for kind in (Table, Relative)):
        return f"it takes one Quadratic or Distance and one Table at most, got {call.names}"
    return None


class Inputs(NamedTuple):
    """One attention call as the operators take it.

    r: positions of queries in float32, with remainders in `low` where they were float64; key_r, key_low: those of keys.
    mask: (B or 1, H or 1, n or 1, N). entries: lists of the blocks of keys that each block of queries of a head visits,
    which begin at `starts`, or None for all; key_entries, key_starts: of the blocks of queries that visit one of keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    r: Tensor | None
    low: Tensor | None
    key_r: Tensor | None
    key_low: Tensor | None
    M: Tensor | None
    g: Tensor | None
    slopes: Tensor | None
    bias: Tensor | None
    weight: float
    unplaced: bool
    starts: Tensor | None = None
    entries: Tensor | None = None
    key_starts: Tensor | None = None
    key_entries: Tensor | None = None

    @classmethod
    def of(cls, call: Call, visits: Tensor | None = None) -> Inputs:
        """visits: which blocks of keys each block of queries visits, (B, H, blocks of queries, blocks of keys)."""
        fields: dict[str, Any] = dict.fromkeys(cls._fields) | {"weight": 1.0, "unplaced": False}
        if visits is not None:
            fields["starts"], fields["entries"] = compressed(visits)
            fields["key_starts"], fields["key_entries"] = compressed(visits.mT)
        fields |= {name: getattr(call, name) for name in ("q", "k", "v", "mask", "scale")}
        for term in call.terms:
            fields |= {name: getattr(term, name) for name in _FIELDS[type(term)]}
            if isinstance(term, Relative):
                keys = term.key_positions
                (r, low), (key_r, key_low) = split(term.r, keys)
                fields |= dict(r=r, low=low, key_r=key_r, key_low=key_low, unplaced=keys.unplaced is not False)
        return cls(**fields)


# What the kernel takes of each term that it has, besides positions.
_FIELDS: dict[type[Term], tuple[str, ...]] = {
    Quadratic: ("M", "g"),
    Distance: ("slopes",),
    Table: ("bias", "weight"),
}


# The passes, as a list of launches: a name in triton_kernels, its arguments, and how many programs run.

Launch = Callable[[str, dict[str, Any], int], None]


def _launch(name: str, args: dict[str, Any], programs: int) -> None:
    from . import triton_kernels

    with torch.cuda.device_of(args["q"]):
        getattr(triton_kernels, name)[(programs,)](**args)


def _rows(x: Tensor) -> Tensor:
    """x with its rows in one piece; anything else about its layout is served as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _served(call: Inputs) -> Inputs:
    """The call in layouts that the passes read: small things in one piece, the others by rows."""
    small = {name: getattr(call, name) for name in ("r", "low", "key_r", "key_low", "slopes")}
    small = {name: x.contiguous() for name, x in small.items() if x is not None}
    return call._replace(q=_rows(call.q), k=_rows(call.k), v=_rows(call.v), **small)


def _strides(x: Tensor | None) -> tuple[int, ...] | None:
    """Strides, 0 where one entry serves all."""
    return None if x is None else tuple(0 if size == 1 else n for size, n in zip(x.shape, x.stride(), strict=True))


def _empty(like: Tensor, size: int) -> Tensor:
    """(B, H, n, size), laid out as (B, n, H, size): joining the heads costs nothing."""
    b, h, n, _ = like.shape
    return like.new_empty((b, n, h, size)).transpose(1, 2)


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _arguments(name: str, call: Inputs) -> dict[str, Any]:
    """What every pass is launched with. None switches a part of the kernel off when it is compiled."""
    q, k, v, r, M = call.q, call.k, call.v, call.r, call.M
    shape = tiles(name, call)
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "M", "g", "bias")}
    mask = None if call.mask is None else call.mask.view(torch.uint8)
    shared = mask is None or mask.shape[2] == 1  # by all queries
    tensors |= dict(padding=mask, mask=None) if shared else dict(padding=None, mask=mask)
    by_key = name == "backward_key"
    return dict(
        **tensors,
        **{f"{name}_at": _strides(x) for name, x in tensors.items()},
        **{name: getattr(call, name) for name in ("r", "low", "key_r", "key_low", "slopes")},
        **{f"{name}_at": (_strides(getattr(call, name)) or (0,))[0] for name in ("r", "key_r")},
        starts=call.key_starts if by_key else call.starts,
        entries=call.key_entries if by_key else call.entries,
        heads=q.shape[1],
        n=q.shape[2],
        N=k.shape[2],
        scale2=call.scale * math.log2(math.e),
        weight2=call.weight * math.log2(math.e),
        P=0 if r is None else r.shape[-1],
        FULL=M is not None and M.ndim == 5,
        UNPLACED=call.unplaced,
        BY_HAND=_interpreted(),
        SIZE=q.shape[-1],
        VALUE_SIZE=v.shape[-1],
        WIDTH=_power(q.shape[-1]),
        VALUE_WIDTH=_power(v.shape[-1]),
        BLOCK_I=shape.i,
        BLOCK_J=shape.j,
        LIST=LIST,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )


def _outputs(q: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    rest = _empty(q, v.shape[-1]) if keep and q.dtype != torch.float32 else q.new_empty(0)
    return _empty(q, v.shape[-1]), rest, q.new_empty((*q.shape[:3], 2) if keep else 0, dtype=torch.float32)


def forward(call: Inputs, keep: bool, launch: Launch = _launch) -> tuple[Tensor, Tensor, Tensor]:
    """The output. Kept for the backward, else empty: what rounding took from it, and each query's largest
    score and the inverse of its sum of exponentials above that; their log-sum-exp would round both away."""
    call = _served(call)
    out, rest, norm = _outputs(call.q, call.v, keep)
    b, h, n, _ = out.shape
    if b * h * n:
        args = _arguments("forward", call)
        own = dict(out=out, out_at=_strides(out), rest=rest if rest.numel() else None, norm=norm if keep else None)
        launch("forward", args | own, -(-n // args["BLOCK_I"]) * b * h)
    return out, rest, norm


def _gradients(call: Inputs, wanted: Sequence[bool]) -> list[Tensor]:
    """Room for the gradients of q, k, v, and of those of M, g and slopes that are wanted; empty for the others."""
    room = [_empty(x, x.shape[-1]) for x in (call.q, call.k, call.v)]
    for x, want in zip((call.M, call.g, call.slopes), wanted, strict=True):
        room.append(call.q.new_empty(0) if x is None or not want else x.new_empty(x.shape))
    return room


def backward(
    call: Inputs, dout: Tensor, kept: tuple[Tensor, Tensor, Tensor], wanted: Sequence[bool], launch: Launch = _launch
) -> list[Tensor]:
    """Gradients as `_gradients` lists them, from what `forward` returned."""
    call = _served(call)
    out, rest, norm = kept
    dout, out, norm = _rows(dout), _rows(out), norm.contiguous()
    if rest.numel() and rest.stride() != out.stride():
        rest = torch.empty_like(out).copy_(rest)
    found = _gradients(call, wanted)
    (b, h, n, _), keys = out.shape, call.k.shape[2]
    if not b * h * n * keys:
        return [x.zero_() for x in found]
    dq, dk, dv = found[:3]
    dM, dg, dslopes = (x if want else None for x, want in zip(found[3:], wanted, strict=True))
    more = dict(dout=dout, dout_at=_strides(dout), norm=norm, delta=norm.new_empty((b, h, n)), scale=call.scale)

    args = _arguments("backward_query", call)
    blocks = -(-n // args["BLOCK_I"])
    shares = None if dslopes is None else norm.new_empty((b, h, blocks))
    own = dict(out=out, out_at=_strides(out), rest=rest if rest.numel() else None)
    own |= dict(dq=dq, dq_at=_strides(dq), dM=dM, dg=dg, dslopes=shares)
    launch("backward_query", args | more | own, blocks * b * h)
    if shares is not None and dslopes is not None:
        dslopes.copy_(shares.sum((0, 2)))

    args = _arguments("backward_key", call)
    own = dict(dk=dk, dk_at=_strides(dk), dv=dv, dv_at=_strides(dv))
    launch("backward_key", args | more | own, -(-keys // args["BLOCK_J"]) * b * h)
    return found


# The passes are custom operators, so attention compiles and exports as one node.


@torch.library.custom_op("parapos::triton_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, r: Tensor | None, low: Tensor | None,
    key_r: Tensor | None, key_low: Tensor | None, M: Tensor | None, g: Tensor | None, slopes: Tensor | None,
    bias: Tensor | None, weight: float, unplaced: bool, starts: Tensor | None, entries: Tensor | None,
    key_starts: Tensor | None, key_entries: Tensor | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lists = (starts, entries, key_starts, key_entries)
    call = Inputs(q, k, v, mask, scale, r, low, key_r, key_low, M, g, slopes, bias, weight, unplaced, *lists)
    return forward(call, keep)


@_attention.register_fake
def _(*inputs):  # type: ignore[no-untyped-def]
    return _outputs(inputs[0], inputs[2], inputs[-1])


@torch.library.custom_op("parapos::triton_attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, r: Tensor | None, low: Tensor | None,
    key_r: Tensor | None, key_low: Tensor | None, M: Tensor | None, g: Tensor | None, slopes: Tensor | None,
    bias: Tensor | None, weight: float, unplaced: bool, starts: Tensor | None, entries: Tensor | None,
    key_starts: Tensor | None, key_entries: Tensor | None, dout: Tensor, out: Tensor, rest: Tensor, norm: Tensor,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    lists = (starts, entries, key_starts, key_entries)
    call = Inputs(q, k, v, mask, scale, r, low, key_r, key_low, M, g, slopes, bias, weight, unplaced, *lists)
    return backward(call, dout, (out, rest, norm), wanted)


@_attention_backward.register_fake
def _(*inputs):  # type: ignore[no-untyped-def]
    return _gradients(Inputs(*inputs[: len(Inputs._fields)]), inputs[-1])


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    call = Inputs(*inputs[:-1])
    ctx.numbers = {name: x for name, x in call._asdict().items() if not isinstance(x, Tensor)}
    ctx.names = [name for name in Inputs._fields if name not in ctx.numbers]
    ctx.save_for_backward(*output, *(getattr(call, name) for name in ctx.names))


def _backward(ctx, dout, *_):  # type: ignore[no-untyped-def]
    out, rest, norm, *tensors = ctx.saved_tensors
    call = Inputs(**ctx.numbers, **dict(zip(ctx.names, tensors, strict=True)))
    needed = dict(zip(Inputs._fields, ctx.needs_input_grad, strict=False))
    wanted = [needed["M"], needed["g"], needed["slopes"]]
    dq, dk, dv, *more = _attention_backward(*call, dout, out, rest, norm, wanted)
    dM, dg, dslopes = (x if want else None for x, want in zip(more, wanted, strict=True))
    found = dict(q=dq, k=dk, v=dv, M=dM, g=dg, slopes=dslopes)
    return *(found.get(name) for name in Inputs._fields), None


_attention.register_autograd(_backward, setup_context=_setup)
_attention_backward.register_autograd(refuse_second_derivative)


def attention(call: Call) -> Tensor:
    """As `reference.attention`, without the weights. For calls that `refuse` has nothing against."""
    if (lists := listed(call, LIST)) is None:
        out: Tensor = _attention(*Inputs.of(call), keep=call.needs_grad)[0]
        return out
    inputs = Inputs.of(lists.call, lists.blocks(LIST, LIST))
    return lists.queries.undo(_attention(*inputs, keep=call.needs_grad)[0])


def _describe(call: Call) -> str:
    return f"one fused Triton kernel, {call.names} computed inside it{share(call, LIST, LIST)}"


register_kernel(
    Kernel(
        "triton",
        10,
        True,
        refuse,
        _describe,
        attention,
        by_name=lambda call: None if call.q.is_cuda else "it would run in Triton's interpreter; ask for it by name",
    )
)
