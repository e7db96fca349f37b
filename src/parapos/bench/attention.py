"""Time and memory of attention with PaPE against attention without positions.

12 heads of 64, one sample, a square grid of patches with a class token. q, k, v are views of one fused projection, as a
transformer makes them. What a form needs of the tokens (M and g, or a and b) is given; all that turns it into scores is
measured. Positions are prepared before, as a model prepares them once for all layers.
Time: the cases take turns in every round, and what counts is the ratio to plain attention in the same round.
Memory: one call in a fresh process, the peak above what the process held before the inputs were made.
H heads, N tokens, h head size, p position dims, m parabolas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import text
from ..attention import Quadratic, attend
from ..encodings import published
from ..malloc import keep_memory
from ..positions import Positions, grid_positions
from . import measure

HEADS, HEAD_DIM, PARABOLAS, POS_DIM = 12, 64, 50, 2
SCALE = HEAD_DIM**-0.5
GRIDS = (14, 24, 32, 48, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("forward", "forward+backward")
PLAIN = "plain SDPA"
EVERYWHERE = "parapos, looking everywhere"
WIDER = "plain SDPA, heads of 72"  # the width that PaPE's columns take, and nothing else of it
ROUNDS = (3, 40)  # least and most per setting
SECONDS = 300.0
WARM_UP_GRID = 4


def _plain(q: Tensor, k: Tensor, v: Tensor, r: Positions) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _parapos(q: Tensor, k: Tensor, v: Tensor, r: Positions, M: Tensor, g: Tensor) -> Tensor:
    """As users get it: the kernel that `auto` takes."""
    out = attend(q, k, v, [Quadratic(M, g, r)], strict=True)
    assert isinstance(out, Tensor)
    return out


def _paper(q: Tensor, k: Tensor, v: Tensor, r: Positions, M: Tensor, g: Tensor) -> Tensor:
    return _widened(q, k, v, *published.paper_columns(M, g, r.r.to(q.dtype)))


def _released(q: Tensor, k: Tensor, v: Tensor, r: Positions, a: Tensor, b: Tensor, w_p: Tensor) -> Tensor:
    return _widened(q, k, v, *published.released(a, b, w_p, r.r.to(q.dtype)))


def _dense(q: Tensor, k: Tensor, v: Tensor, r: Positions, M: Tensor, g: Tensor) -> Tensor:
    bias = Quadratic(M, g, r).scores(q.dtype) * SCALE
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _widened(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Attention of heads widened by columns and zeros to a multiple of 8, values likewise."""
    width = -(-(HEAD_DIM + query.shape[-1]) // 8) * 8
    zeros = q.new_zeros(()).expand(*q.shape[:-1], width - HEAD_DIM - query.shape[-1])
    q = torch.cat([q, query, zeros], dim=-1)
    k = torch.cat([k, key.expand(*k.shape[:-1], -1), zeros], dim=-1)
    v = F.pad(v, (0, width - HEAD_DIM))
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE)[..., :HEAD_DIM]


CASES: dict[str, Callable[..., Tensor]] = {
    PLAIN: _plain,
    WIDER: _plain,
    "parapos": _parapos,
    EVERYWHERE: _parapos,
    "paper form": _paper,
    "released form": _released,
    "dense bias": _dense,
}


@dataclass(frozen=True)
class Setting:
    """What is measured once for every case."""

    grid: int
    dtype: str
    mode: str

    @property
    def tokens(self) -> int:
        return self.grid**2 + 1

    def __str__(self) -> str:
        return f"N = {self.tokens}, {self.dtype}, {self.mode}"


def prepare(case: str, setting: Setting, device: str) -> Callable[[], object]:
    """Make the inputs of a case and return its call, which gives the output or all gradients."""
    dtype, n = DTYPES[setting.dtype], setting.tokens
    size = HEAD_DIM + (8 if case == WIDER else 0)
    q, k, v = torch.randn(1, n, 3, HEADS, size, dtype=dtype, device=device).permute(2, 0, 3, 1, 4).unbind()
    r = Positions.of(grid_positions(setting.grid, setting.grid, cls=True, device=device))
    learned: list[Tensor] = []
    fixed: list[Tensor] = []
    if case == "released form":
        shape = (1, HEADS, n, PARABOLAS)
        a, b = (torch.randn(shape, dtype=dtype, device=device).mul_(3**-0.5) for _ in range(2))
        learned = [F.softplus(a), b]
        fixed = [torch.empty(HEADS, PARABOLAS, POS_DIM, dtype=dtype, device=device).uniform_(-(2**-0.5), 2**-0.5)]
    elif case not in (PLAIN, WIDER):
        # About the law that PaPE's M and g have at the start. PaPE gives them in float32, whatever q is.
        kind: dict[str, Any] = {"dtype": torch.float32 if case.startswith("parapos") else dtype, "device": device}
        noise = torch.randn(1, HEADS, n, POS_DIM, POS_DIM, **kind)
        M = 0.45 * (noise + noise.mT) - 6.1 * torch.eye(POS_DIM, **kind)
        g = 1.7 * torch.randn(1, HEADS, n, POS_DIM, **kind)
        # Forms that fall by about one over the whole grid leave every key some weight.
        learned = [M / setting.grid**2, g / setting.grid] if case == EVERYWHERE else [M, g]
    if setting.mode == "forward":
        return lambda: CASES[case](q, k, v, r, *learned, *fixed)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *learned)]
    dout = torch.randn(q.shape, dtype=dtype, device=device)
    return lambda: torch.autograd.grad(CASES[case](*leaves[:3], r, *leaves[3:], *fixed), leaves, dout)


def measure_time(
    cases: Sequence[str], setting: Setting, device: str, seconds: float, rounds: tuple[int, int]
) -> dict[str, list[float]]:
    """Seconds per case and round, the cases in turn; rounds go on for `seconds`, within the bounds of `rounds`."""
    with torch.set_grad_enabled(setting.mode != "forward"):
        # A CPU may take a minute for one call of full size; that is too much to throw away.
        warm = setting if device == "cuda" else replace(setting, grid=WARM_UP_GRID)
        for case in cases:
            prepare(case, warm, device)()
        calls = {case: prepare(case, setting, device) for case in cases}
        return measure.in_turn(calls, partial(measure.timed, device=device), seconds, rounds)


def measure_memory(case: str, setting: Setting, device: str) -> int:
    """Peak bytes of inputs, workspace and results of one call. For a fresh process."""
    with torch.set_grad_enabled(setting.mode != "forward"):
        prepare(case, setting, device)()  # what a first call loads, of code too, is not of it
        return measure.peak_memory(lambda: prepare(case, setting, device), device)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of log(value) over log(size)."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values]).slope


def run(*, device: str = "cpu", seconds: float = SECONDS, quick: bool = False) -> dict[str, Any]:
    """Measure everything: the memory of one call each, then timings for about `seconds`, at least two rounds.

    quick: the smallest grid and two rounds, a smoke test. Progress goes to stderr. Returns what is stored.
    """
    grids, rounds = (GRIDS[:1], (2, 2)) if quick else (GRIDS, ROUNDS)
    settings = [Setting(grid, dtype, mode) for grid in grids for dtype in DTYPES for mode in MODES]
    memory, timing = [], []
    survivors: dict[Setting, list[str]] = {}  # settings that plain attention survived too
    for setting in settings:
        measure.progress(f"memory: {setting}")
        peaks = {case: measure.apart(measure_memory, case, setting, device) for case in CASES}
        plain = peaks[PLAIN]
        for case, peak in peaks.items():
            ratio = peak / plain if peak and plain else None
            memory.append({"case": case, **asdict(setting), "tokens": setting.tokens, "bytes": peak, "ratio": ratio})
        if plain is not None:
            survivors[setting] = [case for case in CASES if peaks[case] is not None]
    kept = keep_memory()  # as `parapos train` and `parapos bench model` do
    for setting, share in measure.shares(list(survivors), seconds):
        times = measure_time(survivors[setting], setting, device, share, rounds)
        measure.progress(f"time: {setting}: {len(times[PLAIN])} rounds")
        for case, values in times.items():
            what = {"case": case, **asdict(setting), "tokens": setting.tokens, "seconds": statistics.median(values)}
            timing.append({**what, **measure.spread(values, times[PLAIN])})
    return {
        **measure.machine(device, quick=quick),
        "commit": measure.commit(),
        "kept_memory": kept,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "time": timing,
        "memory": memory,
        "exponents": _exponents(memory),
    }


def _select(entries: Sequence[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """The entries of a case, dtype and mode."""
    return [x for x in entries if (x["case"], x["dtype"], x["mode"]) == key]


def _exponents(memory: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How memory grows with N: over all sizes, and over the two largest."""
    out = []
    for case, dtype, mode in ((c, d, m) for m in MODES for d in DTYPES for c in CASES):
        entries = [x for x in _select(memory, case, dtype, mode) if x["bytes"] is not None]
        sizes, values = [x["tokens"] for x in entries], [x["bytes"] for x in entries]
        fits = {
            name: exponent(sizes[-count:], values[-count:]) if len(sizes) >= count else None
            for name, count in (("all", len(GRIDS)), ("largest_two", 2))
        }
        out.append({"case": case, "dtype": dtype, "mode": mode, **fits})
    return out


def markdown(results: dict[str, Any]) -> str:
    """The results as text: one table per mode, ratios to plain attention with the quartiles of the rounds."""
    sizes = sorted({x["tokens"] for x in results["memory"]})
    parts = [
        *measure.warning(results),
        f"Attention of {HEADS} heads of {HEAD_DIM} on {measure.where(results)}.",
        f"Time: median ratio to {PLAIN} (quartiles; rounds). Memory: ratio of the peaks of one call, inputs included.",
        f"Freed memory is {'kept' if results['kept_memory'] else 'given back'}. Commit {results['commit']}.",
    ]
    header = ["case", "dtype", *(f"time, N = {n}" for n in sizes), *(f"memory, N = {n}" for n in sizes)]
    header += ["memory ~ N^", "N^, largest two"]
    for mode in MODES:
        rows = []
        for fit in (x for x in results["exponents"] if x["mode"] == mode):
            cells = [fit["case"], fit["dtype"]]
            for kind in ("time", "memory"):
                entries = {x["tokens"]: x for x in _select(results[kind], *cells[:2], mode)}
                cells += [_cell(entries.get(n)) for n in sizes]
            cells += ["not measured" if fit[x] is None else f"{fit[x]:.2f}" for x in ("all", "largest_two")]
            rows.append(cells)
        parts += [f"{mode}:", text.table(header, rows, left=2)]
    return "\n\n".join(parts)


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["ratio"] is None:
        return "not measured"
    if "bytes" in entry:
        return f"{entry['bytes'] / 2**20:.1f} MiB" if entry["case"] == PLAIN else f"{entry['ratio']:.2f}x"
    return f"{entry['seconds'] * 1000:.1f} ms" if entry["case"] == PLAIN else measure.show_ratio(entry)


def plot(results: dict[str, Any], path: Path) -> None:
    """Ratios of time and memory over N, a row of panels per mode."""

    def panel(kind: str, mode: str) -> measure.Panel:
        entries = {f"{c}, {d}": _select(results[kind], c, d, mode) for c in CASES for d in DTYPES}
        points = {name: [(x["tokens"], x["ratio"]) for x in xs if x["ratio"]] for name, xs in entries.items()}
        return measure.Panel(f"{mode}: {kind} over tokens", f"ratio to {PLAIN}", points)

    title = ". ".join([*measure.warning(results), measure.where(results)])
    measure.draw(path, [[panel(kind, mode) for kind in ("time", "memory")] for mode in MODES], title)
