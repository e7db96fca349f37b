"""Point clouds: what sparse convolution, serialization and attention in patches cost, and how a network's cost grows.

Everything is a ratio of calls that take turns in one run, in time of the processor. Points lie on the surfaces of a
generated room: floor, walls and a table, in cells of 2 cm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import text
from ..blocks import Attention
from ..curves import CURVES, curve_order
from ..models import create_model
from ..models.ptv3 import PointTransformerV3
from ..models.ptv3.convolution import SparseConv3d, kernel_map
from . import measure

SECONDS = 150.0
ROUNDS = (3, 50)
LIMITS = {"z": 1.5, "z-trans": 1.5, "hilbert": 4.0, "hilbert-trans": 4.0, "forward": 1.25, "with backward": 1.35}
GROWTH = 1.1  # most that an exponent of points may be
NETWORK, QUICK = "ptv3_scannet", "ptv3_nano"
PARTS = ("ratios", "time", "memory")
EXPONENTS = {"time": "time_exponent", "memory": "memory_exponent"}
STEPS = 100_000  # most points of a training step

Calls = dict[str, Callable[[], object]]


def room(points: int, seed: int = 0) -> Tensor:
    """Cells (points, 3) of surfaces, all different, in random order. Larger rooms have more points."""
    rng = np.random.default_rng(seed)
    side = math.ceil(math.sqrt(points / 4))
    a, b = rng.integers(0, side, (2, 4 * points))
    surface, zero = rng.integers(0, 4, len(a)), np.zeros_like(a)
    height = np.where(surface == 3, side // 4, 0)
    cells = np.choose(
        surface[:, None], [np.stack(x, 1) for x in ((a, b, zero), (a, zero, b), (zero, a, b), (a, b, height))]
    )
    cells = cells + (rng.random(cells.shape) < 0.2)
    keys = np.unique((cells[:, 0] * (side + 1) + cells[:, 1]) * (side + 1) + cells[:, 2])
    keys = rng.permutation(keys)[:points]
    return torch.from_numpy(np.stack([keys // (side + 1) ** 2, keys // (side + 1) % (side + 1), keys % (side + 1)], 1))


def batch(points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """feat, coord, grid_coord, offset of one room."""
    cells = room(points)
    feat = torch.randn(points, 6, generator=torch.Generator().manual_seed(0))
    return feat, cells * 0.02, cells, torch.tensor([points])


def serialization(points: int) -> Calls:
    """Orders along each curve, and the order by columns that NumPy gives."""
    cells = room(points)
    columns = cells.numpy().T[::-1]
    calls: Calls = {"lexsort": lambda: np.lexsort(columns)}
    return calls | {curve: partial(curve_order, cells, curve) for curve in CURVES}


@torch.no_grad()
def convolution(points: int, channels: int, size: int) -> Calls:
    """A sparse convolution, with and without the search for neighbours, and a dense one that is read at the sites."""
    cells = room(points)
    clouds = torch.zeros(len(cells), dtype=torch.long)
    conv, x = SparseConv3d(channels, 32, size, bias=False), torch.randn(len(cells), channels)
    neighbours = kernel_map(cells, clouds, size)
    sides = [int(side) + 1 for side in cells.amax(0)]
    weight = conv.weight.permute(0, 4, 1, 2, 3).contiguous()

    @torch.no_grad()
    def dense() -> Tensor:
        grid = x.new_zeros(1, channels, *sides)
        grid[0, :, cells[:, 0], cells[:, 1], cells[:, 2]] = x.t()
        return F.conv3d(grid, weight, padding=size // 2)[0, :, cells[:, 0], cells[:, 1], cells[:, 2]].t()

    @torch.no_grad()
    def sparse(search: bool) -> Tensor:
        result: Tensor = conv(x, kernel_map(cells, clouds, size) if search else neighbours)
        return result

    calls: Calls = {"dense": dense, "sparse": partial(sparse, False), "sparse with search": partial(sparse, True)}
    torch.testing.assert_close(sparse(False), dense(), rtol=1e-3, atol=1e-4)
    return calls | _spconv(x, cells, sides, conv)


def _spconv(x: Tensor, cells: Tensor, sides: Sequence[int], conv: SparseConv3d) -> Calls:
    """spconv's convolution on the CPU with its search, where it is installed."""
    if find_spec("spconv") is None:
        return {}
    import spconv.pytorch as spconv  # type: ignore[import-not-found]

    layer = spconv.SubMConv3d(x.shape[1], len(conv.weight), conv.size, bias=False)
    with torch.no_grad():
        layer.weight.copy_(conv.weight)
    indices = torch.cat([torch.zeros(len(cells), 1, dtype=torch.long), cells], 1).int()

    @torch.no_grad()
    def call() -> Any:
        return layer(spconv.SparseConvTensor(x, indices, list(sides), 1)).features

    return {"spconv": call}


def attention(points: int, network: str, encoding: str, backward: bool) -> Calls:
    """Attention in all patches of the finest stage, with an encoding and without; geometry is made before."""
    net = create_model(network, encoding=encoding)
    assert isinstance(net, PointTransformerV3)
    _, coord, cells, offset = batch(points)
    tables = net.eval().stages(coord, cells, offset)[0].windows(0, net.patch).tables
    parts = [(torch.randn(*table.shape, 32), table.positions, table.mask) for table in tables]

    def call(module: Attention) -> None:
        for x, positions, mask in parts:
            with torch.set_grad_enabled(backward):
                out = module(x, positions, mask)
            if backward:
                out.sum().backward()

    return {name: partial(call, Attention(32, 2, name, 3)) for name in ("none", encoding)}


def forward(points: int, network: str, encoding: str) -> Callable[[], object]:
    """A pass of the network."""
    net, inputs = create_model(network, encoding=encoding).eval(), batch(points)
    return torch.no_grad()(lambda: net(*inputs))


def step(points: int, network: str, encoding: str) -> Callable[[], object]:
    """A pass forward and backward."""
    net, inputs = create_model(network, encoding=encoding).train(), batch(points)
    return lambda: net(*inputs).square().mean().backward()


def _peak(make: Callable[[int, str, str], Callable[[], object]], *case: Any) -> int:
    return measure.peak_memory(lambda: make(*case), "cpu")


def growth(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The exponent e of values ~ sizes^e, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def run(
    *, encoding: str = "pape", seconds: float = SECONDS, parts: Sequence[str] = PARTS, quick: bool = False
) -> dict[str, Any]:
    """Some of PARTS. seconds: for timings, of each part. quick: few points and three rounds."""
    network = QUICK if quick else NETWORK
    sizes = [500, 1_000] if quick else [10_000, 40_000, 100_000, 400_000]
    found: dict[str, Any] = {"network": network, "encoding": encoding, "sizes": sizes}
    if "ratios" in parts:
        found["ratios"] = _ratios(network, encoding, seconds, quick)
    if "time" in parts:
        calls = {str(points): forward(points, network, encoding) for points in sizes}
        calls[str(sizes[0])]()  # warm
        times = measure.in_turn(calls, measure.processor_time, seconds, (1, ROUNDS[1]))
        taken = [min(times[str(points)]) for points in sizes]
        found["relative_time"], found["rounds"] = [value / taken[0] for value in taken], len(times[str(sizes[0])])
        found["time_exponent"] = growth(sizes, taken)
    if "memory" in parts:
        passes = [measure.apart(_peak, forward, points, network, encoding) for points in sizes]
        few = [points for points in sizes if points <= STEPS]
        steps = [measure.apart(_peak, step, points, network, encoding) for points in few]
        found["peak_bytes"] = {"forward": passes, "training step": [*steps, *[None] * (len(sizes) - len(few))]}
        if None not in passes:
            found["memory_exponent"] = growth(sizes, [float(peak or 0) for peak in passes])
    return {**measure.machine("cpu", quick=quick), **found}


def _ratios(network: str, encoding: str, seconds: float, quick: bool) -> list[dict[str, Any]]:
    bounds = (3, 3) if quick else ROUNDS
    many, some = (20_000, 1_000) if quick else (1_000_000, 50_000)
    cases: list[tuple[str, str, str, Callable[[], Calls]]] = [  # what, its base, its size, how
        ("serialization", "lexsort", f"{many} points", partial(serialization, many)),
        ("convolution 5, 6 to 32", "dense", f"{some} points", partial(convolution, some, 6, 5)),
        ("convolution 3, 32 to 32", "dense", f"{some} points", partial(convolution, some, 32, 3)),
        ("attention forward", "none", f"{some} points", partial(attention, some, network, encoding, False)),
        ("attention with backward", "none", f"{some} points", partial(attention, some, network, encoding, True)),
    ]
    rows = []
    for (what, base, size, make), share in measure.shares(cases, seconds):
        calls = make()
        for call in calls.values():
            call()
        times = measure.in_turn(calls, measure.processor_time, share, bounds)
        measure.progress(f"{what}: {len(times[base])} rounds")
        for case in calls.keys() - {base}:
            limit = LIMITS.get(case, LIMITS.get(what.removeprefix("attention ")))
            rows.append({"what": what, "size": size, "case": case, "base": base, "limit": limit})
            rows[-1] |= measure.spread(times[case], times[base])
    return sorted(rows, key=lambda row: (row["what"], row["case"]))


def markdown(results: dict[str, Any]) -> str:
    """The results as text."""
    clock = " Cases take turns, in time of the processor." if {"ratios", "relative_time"} & set(results) else ""
    told = [*measure.warning(results), f"Point clouds on {measure.where(results)}. Generated rooms.{clock}"]
    if "ratios" in results:
        header = ["what", "size", "case", "against", "ratio (quartiles; rounds)", "at most"]
        rows = [
            [x["what"], x["size"], x["case"], x["base"], measure.show_ratio(x), f"{x['limit']}x" if x["limit"] else "-"]
            for x in results["ratios"]
        ]
        told.append(text.table(header, rows, left=4))
    columns: dict[str, list[str]] = {"points": [str(points) for points in results["sizes"]]}
    grown = [f"{name} grows as points^{results[key]:.2f}" for name, key in EXPONENTS.items() if key in results]
    if "relative_time" in results:
        columns[f"time (best of {results['rounds']})"] = [f"{taken:.2f}x" for taken in results["relative_time"]]
    for name, peaks in results.get("peak_bytes", {}).items():
        columns[f"{name}, peak GiB"] = ["-" if peak is None else f"{peak / 2**30:.2f}" for peak in peaks]
    if len(columns) > 1:
        named = f"{results['network']} with {results['encoding']}"
        told.append(f"A forward pass of {named}: {', '.join(grown)} (at most {GROWTH}).")
        told.append(text.table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)]))
    return "\n\n".join(told)
