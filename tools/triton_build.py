"""What the Triton kernels become on NVIDIA GPUs: registers, spills and shared memory, compiled here without a GPU.

Every pass is compiled ahead of time from the very arguments that a launch would bring, taken from tensors without data:
q, k, v as views of one fused projection, 4097 tokens, a mask of keys or of keys for each query, and tokens without a
position where the term knows them. Registers and spills are read from the binary by the tool that Triton brings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from parapos import text
from parapos.attention import Call, Distance, Quadratic, Table, Term, triton
from parapos.positions import Positions

TARGETS = (80, 89, 90)
PASSES = ("forward", "backward_query", "backward_key")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = (64, 128)
MASK = " + mask"  # for each query; without it, keys are padded
LISTS = " + lists"  # of the blocks that have weight
TERMS = (
    *("PaPE p=2", "PaPE p=3", "PaPE p=4", "PaPE-RI p=2", "nD-ALiBi p=2", "table"),
    *("PaPE p=2 + table", "PaPE p=3 + table", "PaPE p=4 + table", "PaPE p=2 + mask", "PaPE p=4 + mask"),
    *(f"{name}{LISTS}" for name in ("PaPE p=2", "PaPE p=3", "PaPE p=4", "PaPE-RI p=2", "nD-ALiBi p=2")),
    *(f"{name}{MASK}{LISTS}" for name in ("PaPE p=2", "PaPE p=4")),
)
SHARED_MEMORY = 99 * 2**10  # bytes per block on sm_89, the smallest of the targets
BATCH, HEADS, TOKENS = 2, 12, 4097


@dataclass(frozen=True)
class Build:
    """One pass, compiled for one GPU generation."""

    target: int
    name: str
    dtype: str
    size: int
    term: str


@dataclass(frozen=True)
class Result:
    """What a thread and a block of threads take. spilled: bytes of stack per thread, 0 if all fits in registers."""

    build: Build
    tiles: triton.Tiles
    registers: int
    spilled: int
    shared: int


def term(name: str, device: str = "meta") -> list[Term]:
    """Score terms by their name in TERMS."""
    name = name.removesuffix(LISTS).removesuffix(MASK)
    if " + " in name:
        return [one for part in name.split(" + ") for one in term(part, device)]
    b, h, n = BATCH, HEADS, TOKENS
    if name == "table":
        return [Table(torch.empty(1, h, n, n, device=device))]
    p = int(name[-1])
    r = Positions(torch.empty(1, n, p, device=device))
    if name.startswith("nD-ALiBi"):
        return [Distance(torch.empty(h, device=device), r)]
    if name.startswith("PaPE-RI"):
        return [Quadratic(torch.empty(b, h, n, device=device), None, r)]
    return [Quadratic(torch.empty(b, h, n, p, p, device=device), torch.empty(b, h, n, p, device=device), r)]


def launches(dtype: torch.dtype, size: int, name: str) -> dict[str, dict[str, Any]]:
    """The arguments of every pass of a training step with the terms of this name."""
    q, k, v = torch.empty(BATCH, TOKENS, 3, HEADS, size, dtype=dtype, device="meta").permute(2, 0, 3, 1, 4)
    shape = (1, 1, TOKENS, TOKENS) if name.removesuffix(LISTS).endswith(MASK) else (BATCH, 1, 1, TOKENS)
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    call = triton.Inputs.of(Call(q, k, v, tuple(term(name)), mask, size**-0.5))
    if name.endswith(LISTS):
        rows = BATCH * HEADS * -(-TOKENS // triton.LIST)
        starts = torch.empty(rows + 1, dtype=torch.int64, device="meta")
        entries = torch.empty(8 * rows, dtype=torch.int32, device="meta")
        call = call._replace(starts=starts, entries=entries, key_starts=starts, key_entries=entries)
    found: dict[str, dict[str, Any]] = {}

    def record(name: str, args: dict[str, Any], programs: int) -> None:
        found[name] = args

    kept = triton.forward(call, True, record)
    triton.backward(call, torch.empty_like(kept[0]), kept, [call.M is not None, call.g is not None, False], record)
    return found


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    from triton import knobs  # type: ignore[import-untyped]

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage but {told!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


@dataclass(frozen=True)
class _Driver:
    """As much of a GPU as Triton asks about before it launches; each generation is a device of its own."""

    target: int

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

        return GPUTarget("cuda", self.target, 32)


def compiled(name: str, args: dict[str, Any], target: int) -> Any:
    """What Triton would launch with these arguments. After this, the process cannot launch anything."""
    from triton.runtime import driver  # type: ignore[import-untyped]

    from parapos.attention import triton_kernels

    driver.set_active(_Driver(target))
    return getattr(triton_kernels, name).warmup(**args, grid=(1,))


def build(what: Build) -> Result:
    """Compile one pass."""
    args = launches(DTYPES[what.dtype], what.size, what.term)[what.name]
    binary = compiled(what.name, args, what.target)
    registers, spilled = _usage(binary.asm["cubin"])
    tiles = triton.Tiles(args["BLOCK_I"], args["BLOCK_J"], args["num_warps"], args["num_stages"])
    return Result(what, tiles, registers, spilled, binary.metadata.shared)


def builds() -> list[Build]:
    """All that the report compiles: every term at head size 64, where nothing may spill; bfloat16 and 128 for one."""
    order = [*product(("fp16", "fp32"), SIZES[:1], TERMS), *product(("bf16",), SIZES[:1], TERMS[:1])]
    order += product(DTYPES, SIZES[1:], (TERMS[0], f"{TERMS[0]}{LISTS}"))
    return [
        Build(target, name, dtype, size, term) for dtype, size, term in order for name in PASSES for target in TARGETS
    ]


def run(which: Iterable[Build] | None = None, processes: int = 2) -> list[Result]:
    """Compile in processes of their own."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(build, builds() if which is None else which))


def markdown(results: Sequence[Result]) -> str:
    """One line per pass, dtype, head size and term; per target registers, spilled bytes, KiB of shared memory."""
    targets = sorted({result.build.target for result in results})
    found: dict[tuple[str, ...], dict[int, Result]] = {}
    for result in results:
        key: tuple[str, ...] = (result.build.name, result.build.dtype, str(result.build.size), result.build.term)
        found.setdefault(key, {})[result.build.target] = result
    rows = []
    for key, by_target in found.items():
        tiles = next(iter(by_target.values())).tiles
        cells = [f"{x.registers} / {x.spilled} / {x.shared / 1024:.0f}" for x in (by_target[t] for t in targets)]
        rows.append([*key, " x ".join(map(str, tiles[:2])), f"{tiles[2]}, {tiles[3]}", *cells])
    header = ["pass", "dtype", "head size", "term", "tile", "warps, stages", *(f"sm_{t}" for t in targets)]
    spills = sum(result.spilled > 0 for result in results)
    most = max(result.shared for result in results) / 1024
    return "\n".join(
        [
            f"The passes of the Triton kernel, compiled by Triton {version('triton')} without a GPU; nothing was run.",
            "Tile: queries x keys. Per target: registers per thread / spilled bytes per thread / KiB of shared memory.",
            "",
            f"{len(results)} builds, {spills} with spills, at most {most:.0f} KiB of shared memory.",
            "",
            text.table(header, rows, left=6),
            "",
        ]
    )


def write(results: Sequence[Result], out: Path) -> list[Path]:
    """Writes OUT.json and OUT.md."""
    paths = [out.with_suffix(".json"), out.with_suffix(".md")]
    data = {"triton": version("triton"), "results": [asdict(result) for result in results]}
    out.parent.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps(data, indent=1) + "\n")
    paths[1].write_text(markdown(results))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.triton_build", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("triton"), metavar="PATH", help="writes PATH.json and PATH.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    for path in write(run(processes=args.processes), args.out):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
