"""Attention compiled for this machine's CPU: native.cpp, built by its C++ compiler when it is first needed.

Scores are formed from D, exactly, in float32, and no more than a block of them is ever in memory. Without a compiler
other kernels serve the call.
B batch, H heads, n queries, N keys, h query/key size, w value size, p position dims, f numbers of a form.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..relative import Exponents, split
from ..tracing import is_plain, is_watched
from . import reference, sparse, tiles
from .kernels import Call, Kernel, refuse_batched_gradients, register_kernel
from .scores import empty_heads
from .terms import Relative, Table

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
MOST_DIMS = 4
LEAST = 4096  # keys, and queries times keys in its square: with fewer, finding out what to skip takes longer
# What lists cost, in units of the time of all tiles: each pair of tiles, and bounds of each query as much as so many
# keys of heads that are 64 wide; forming a score takes as long as products over EXTRA numbers.
PAIR_COST, QUERY_COST, EXTRA = 1.2, 1700.0, 40
GRAIN = 2**19  # multiplications that are worth a thread


FIELDS = (
    "q", "k", "v", "c", "matrix", "bias", "mask", "at", "to", "at_low", "to_low", "out", "norm", "dout", "dq", "dk",
    "dv", "dc", "query_tiles", "key_tiles", "needed",
)  # of `Attention` in native.cpp, before its numbers  # fmt: skip


LOCK = threading.Lock()


class Missing(RuntimeError):
    """Why there is no compiled kernel on this machine."""


def _folder() -> Path:
    """Where compiled kernels are kept. Whoever can write there decides what this process runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "parapos" / "native"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Missing(f"others may write to {folder}: make it your own (chmod 700), or let XDG_CACHE_HOME name another")
    return folder


def _threads_library() -> list[str]:
    """The OpenMP library that PyTorch has loaded: its threads serve the kernel too."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(path for path in paths if re.fullmatch(r".*/lib(g|i)?omp\d*([-.][^/]*)?\.so[.\d]*", path))


def _compiler() -> list[str]:
    """The command of the C++ compiler."""
    command = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("g++", "c++")), "g++")]
    if shutil.which(command[0]) is None:
        raise Missing(f"it needs a C++ compiler, and no {command[0]} was found")
    return command


def _compile(compiler: list[str], target: Path) -> None:
    if sys.stderr.isatty():
        print("parapos: compiling attention for this CPU, once; it takes a few seconds", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects, library = Path(folder) / "native.o", Path(folder) / target.name
        # Linked without OpenMP, so that its functions are those of the library that PyTorch has loaded.
        for command in ([*FLAGS, "-c", str(SOURCE), "-o", str(objects)], ["-shared", str(objects), "-o", str(library)]):
            done = subprocess.run([*compiler, *command], capture_output=True, errors="replace", timeout=120)
            if done.returncode:
                said = done.stderr.strip()[-300:] or f"exit code {done.returncode}"
                raise Missing(f"{shlex.join(compiler)} could not compile it: {said}")
        digest = Path(folder) / "digest"
        digest.write_text(_digest(library))
        os.replace(library, target)
        os.replace(digest, target.with_suffix(".sha256"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(target: Path) -> bool:
    """Whether a compiled kernel is there as it was written: to load one that is cut off would end the process."""
    digest = target.with_suffix(".sha256")
    return target.exists() and digest.exists() and digest.read_bytes() == _digest(target).encode()


def build() -> ctypes.CDLL:
    """The compiled kernel, from the cache where it is there. Raises Missing."""
    if sys.platform != "linux":
        raise Missing(f"it is compiled on Linux only, not on {sys.platform}")
    if os.environ.get("PARAPOS_NATIVE") == "0":
        raise Missing("PARAPOS_NATIVE=0 turns it off")
    try:
        compiler = _compiler()
        version = subprocess.run([*compiler, "--version"], capture_output=True, errors="replace", timeout=20).stdout
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next((x for x in lines if x.startswith(("flags", "Features"))), "")
        key = hashlib.sha256("\n".join([version, cpu, platform.machine(), *FLAGS]).encode() + SOURCE.read_bytes())
        target = _folder() / f"native-{key.hexdigest()[:24]}.so"
        if not (libraries := _threads_library()):
            raise Missing("PyTorch has loaded no OpenMP library here")
        for path in libraries:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        if not _is_whole(target):
            _compile(compiler, target)
        return ctypes.CDLL(str(target))
    except Missing:
        raise
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise Missing(f"it could not be built: {error}") from error


@cache
def _built() -> ctypes.CDLL | Missing:
    try:
        return build()
    except Missing as error:
        return error


def library() -> ctypes.CDLL | Missing:
    """The compiled kernel, or why there is none; built once, by one of the threads that ask for it."""
    with LOCK:
        return _built()


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
    needs_grad: bool
    matrix: Tensor | None
    positions: tuple[Tensor | None, ...]  # of queries and keys, and what float32 rounds away of both
    bias: Tensor | None
    mask: Tensor | None
    lists: tuple[
        Tensor, ...
    ] = ()  # of one sample: query_tiles (1, 1, Q, s), key_tiles (1, 1, T, s), needed (1, H, Q, T)

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
    numbers += (*q.shape[:3], *k.shape[2:], v.shape[-1], 0 if geometry.matrix is None else geometry.matrix.shape[2])
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


class _Attention(torch.autograd.Function):
    """Attention with coefficients c (B or 1, H, n or 1, f), or None."""

    @staticmethod
    def forward(ctx, geometry, q, k, v, c):  # type: ignore[no-untyped-def]
        out, norm = empty_heads(q, v.shape[-1]), q.new_empty(*q.shape[:3], 2) if geometry.needs_grad else None
        _call("parapos_forward", geometry, q, k, v, c=c, out=out, norm=norm)
        ctx.geometry, ctx.has_c = geometry, c is not None
        watched = (x for x in (geometry.bias, *geometry.positions) if x is not None and not x.is_inference())
        ctx.save_for_backward(q, k, v, out, norm, *([] if c is None else [c]), *watched)  # notices changes in place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        refuse_batched_gradients(dout)
        # Hooks may have changed how what was saved lies in memory.
        q, k, v, out, norm, *given = (_rows(x.float()) for x in ctx.saved_tensors[: 5 + ctx.has_c])
        dq, dk, dv = (empty_heads(x) for x in (q, k, v))
        c, dc = given[0] if given else None, None
        if c is not None and ctx.needs_input_grad[4]:
            dc = c.new_empty(*q.shape[:3], c.shape[-1])
        grads = dict(dq=dq, dk=dk, dv=dv, dc=dc)
        _call("parapos_backward", ctx.geometry, q, k, v, c=c, out=out, norm=norm, dout=_rows(dout), **grads)
        return None, dq, dk, dv, None if dc is None or c is None else dc.sum_to_size(c.shape)


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
    return tiles.is_worth_it(call, terms, coefficients, _costs(call))


def _lists(call: Call) -> Iterator[tuple[Tensor, ...]]:
    """The tiles of queries and keys of each sample, and which each head needs, as the kernel reads them."""
    for heads in tiles.needed_tiles(call, call.needs_grad) or ():
        index = (x[None, None].to(torch.int32).contiguous() for x in heads[0][:2])
        yield *index, torch.stack([x.needed for x in heads])[None].view(torch.uint8)


def _coefficients(terms: Sequence[Relative]) -> Tensor | None:
    """Those of all terms side by side: (B or 1, H, n or 1, f)."""
    parts = [x.coefficients(torch.float32) for x in terms]
    if len(parts) > 1:
        shape = torch.broadcast_shapes(*(x.shape[:3] for x in parts))
        parts = [torch.cat([x.expand(*shape, -1) for x in parts], -1)]
    return _rows(parts[0]) if parts else None


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
    geometry = Geometry(call.scale, dims, has_distance, call.needs_grad, matrix, _positions(term), _bias(call), mask)
    if not is_worth_lists(call):
        return _Attention.apply(geometry, q, k, v, _coefficients(relative)).to(call.q.dtype)
    parts, every = [], list(_lists(call))
    c = _coefficients(relative)
    for b, lists in enumerate(every):
        tensors = (x if x is None or len(x) == 1 else x[b : b + 1] for x in (q, k, v, c))
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
