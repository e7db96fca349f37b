"""What the Triton kernels become on GPUs: compiled anew here, and the committed report."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import triton_build

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_binaries_do_not_spill() -> None:
    """On every target, at head size 64: a pass each, and the forward pass of PaPE on all."""
    few = [triton_build.Build(target, "forward", "bf16", 64, "PaPE p=2") for target in triton_build.TARGETS]
    few += [triton_build.Build(80, name, "fp16", 64, "PaPE p=2") for name in ("backward_query", "backward_key")]
    few += [triton_build.Build(89, "backward_query", "fp16", 64, "PaPE p=4")]
    few += [triton_build.Build(89, name, "fp16", 64, "PaPE p=2 + lists") for name in triton_build.PASSES]
    for result in triton_build.run(few):
        assert result.spilled == 0, result
        assert result.shared <= triton_build.SHARED_MEMORY, result
        assert 0 < result.registers <= 255, result


def test_committed_report() -> None:
    """It is about the tiles in use and all that it should compile, and keeps the promises."""
    path = Path(__file__).parents[2] / "benchmarks" / "triton.json"
    results = json.loads(path.read_text())["results"]
    assert [triton_build.Build(**entry["build"]) for entry in results] == triton_build.builds()
    for entry in results:
        build = triton_build.Build(**entry["build"])
        args = triton_build.launches(triton_build.DTYPES[build.dtype], build.size, build.term)
        used = args[build.name]
        assert entry["tiles"] == [used[key] for key in ("BLOCK_I", "BLOCK_J", "num_warps", "num_stages")], build
        assert entry["shared"] <= triton_build.SHARED_MEMORY, build
        assert entry["spilled"] == 0 or build.size == 128, build
