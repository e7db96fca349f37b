"""File sizes and latency of exported models, as ratios to PyTorch in one interleaved run: python -m tools.export_bench.

Everything runs in one thread, and the processor's time is counted, so that other work on the machine adds little to it.
Writes benchmarks/export.json and the table benchmarks/export.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parapos
from parapos.bench.measure import machine
from parapos.interop import export

RESULTS = Path(__file__).parent.parent / "benchmarks" / "export.json"
MODEL, ENCODINGS, SIZES = "vit_official_tiny_patch16", ("pape", "none"), (224, 448)
TRACED = 14  # patches per side at export


WAYS = {"ONNX": ("onnx", "float32"), "ONNX int8": ("onnx", "int8"), "pt2": ("pt2", "float32")}


def make_net(encoding: str) -> Any:
    torch.manual_seed(0)
    net: Any = parapos.create_model(MODEL, encoding=encoding, num_classes=1000).eval()
    nn.init.normal_(net.classifier.weight, std=0.02)
    return net


def prepare(folder: Path) -> None:
    """Exports what is measured. Files that are there are kept."""
    for encoding in ENCODINGS:
        for name, (kind, precision) in WAYS.items():
            path = folder / f"{encoding}-{precision}.{kind}"
            about = folder / f"{encoding}-{name}.json"
            if not about.exists():
                options: dict[str, Any] = dict(rows=TRACED, cols=TRACED + 1, precision=precision)
                report = export.export_model(make_net(encoding), path, kind, **options)
                about.write_text(json.dumps({"bytes": report.bytes, "error": max(report.errors.values())}))


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """Median milliseconds of the processor per image, and ratios to PyTorch, one image at a time."""
    rows: list[dict[str, Any]] = []
    for encoding in ENCODINGS:
        net = make_net(encoding)
        subject = export.describe(net)
        weights = sum(p.numel() * p.element_size() for p in net.parameters())
        ways: dict[str, Callable[[Any], Any]] = {"PyTorch": partial(_call, net)}
        about: dict[str, Any] = {"PyTorch": {"bytes": weights, "error": 0.0}}
        for name, (kind, precision) in WAYS.items():
            ways[name] = export.runner(subject, folder / f"{encoding}-{precision}.{kind}")
            about[name] = json.loads((folder / f"{encoding}-{name}.json").read_text())
        for size in SIZES:
            times = _interleaved(ways, (torch.rand(1, 3, size, size),), rounds)
            for name in ways:
                ratios = [a / b for a, b in zip(times[name], times["PyTorch"], strict=True)]
                figures = {"ms": 1000 * statistics.median(times[name]), "ratio": statistics.median(ratios)}
                rows.append({"encoding": encoding, "size": size, "way": name, **about[name], **figures})
    return {"machine": machine("cpu"), "model": MODEL, "rounds": rounds, "rows": rows}


def _call(net: nn.Module, inputs: Any) -> Any:
    return net(*inputs)


@torch.no_grad()
def _interleaved(ways: dict[str, Callable[[Any], Any]], inputs: Any, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):  # two to warm up
        for name, call in ways.items():
            start = time.process_time()
            call(inputs)
            if number >= 2:
                times[name].append(time.process_time() - start)
    return times


def markdown(results: dict[str, Any]) -> str:
    sizes = sorted({row["size"] for row in results["rows"]})
    lines = [
        "| encoding | as | MB | largest difference | " + " | ".join(f"time at {size} px" for size in sizes) + " |",
        "|---|---|---|---|" + "---|" * len(sizes),
    ]
    for encoding in dict.fromkeys(row["encoding"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["encoding"] == encoding]
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = {row["size"]: row for row in rows if row["way"] == way}
            first = mine[sizes[0]]
            cells = [f"{mine[size]['ratio']:.2f}" for size in sizes]
            error = "" if way == "PyTorch" else f"{first['error']:.0e}"
            lines.append(f"| {encoding} | {way} | {first['bytes'] / 1e6:.1f} | {error} | {' | '.join(cells)} |")
    note = (
        f"{results['model']}, one image at a time in one thread, {results['rounds']} interleaved rounds; "
        "times are ratios of processor time to PyTorch."
    )
    return "\n".join([*lines, "", note]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="keeps the exported files, and takes those that are there")
    parser.add_argument("--prepare", action="store_true", help="export alone, measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        if args.prepare:
            return
        results = run(folder, args.rounds)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
