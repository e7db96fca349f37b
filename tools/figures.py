"""The figures that README and docs quote, made from committed results. `python -m tools.blocks` puts them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parapos.bench import sparse
from parapos.encodings import ENCODINGS
from parapos.encodings.looks import label
from parapos.experiments import demo, demo_report, render
from parapos.recipes import paper
from parapos.text import table

ROOT = Path(__file__).parent.parent
TOKENS = (197, 577, 1025, 4097)


def _json(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def extrapolation() -> str:
    """The demo's table over all seeds, each encoding at its better setting."""
    return demo_report.better_table(demo.committed())


def summary() -> str:
    """The demo's models over all seeds, at some sizes."""
    return demo_report.summary(demo.committed())


def story() -> str:
    """What the demo's seeds say, in words."""
    return demo_report.story(demo.committed())


def seeds() -> str:
    """All of the table `demo`."""
    committed = demo.committed()
    return render.markdown(committed.grid, committed.results)


def published() -> str:
    """The paper's extrapolation table at some sizes."""
    section = paper()["extrapolation"]
    sizes = ["224", "384", "512", "768", "1024"]
    places = [section["columns"].index(size) for size in sizes]
    rows = [
        [label(name), *(f"{section['rows'][name][place]:.1f}" for place in places)]
        for name in ("pape", "lookhere", "alibi", "rope", "rope_mixed", "sincos")
    ]
    return table(["top-1, %", *(f"{size} px" for size in sizes)], rows)


def cost() -> str:
    """Attention with PaPE, as a ratio to attention without positions."""
    rows = []
    names = {
        "parapos": ("attention", "parapos"),
        "parapos, no compiler": ("attention_fused", "parapos"),
        "the paper's columns": ("attention", "paper form"),
        "the authors' code": ("attention", "released form"),
    }
    for dtype, mode in (("fp32", "forward"), ("fp32", "forward+backward"), ("bf16", "forward")):
        for name, (file, case) in names.items():
            found = {
                cell["tokens"]: cell["ratio"]
                for cell in _json(file)["time"]
                if (cell["case"], cell["dtype"], cell["mode"]) == (case, dtype, mode)
            }
            rows.append([f"{name}, {dtype}, {mode}", *(f"{found[n]:.2f}x" for n in TOKENS)])
    return table(["time / plain attention", *(f"{n} tokens" for n in TOKENS)], rows)


def model_cost() -> str:
    """A whole ViT-B with PaPE, as ratios to one without an encoding."""
    results = _json("model")
    size = results["sizes"][0]
    rows = []
    for name in ("pape m=2", "pape m=16", "pape m=50", "pape direct", "rope"):
        (about,) = (row for row in results["rows"] if row["row"] == name)
        cells = [f"{about['parameters'] / 1e6:.1f} M"]
        for what in ("time", "memory"):
            for mode in ("inference", "training"):
                (ratio,) = (c["ratio"] for c in results[what] if (c["row"], c["mode"], c["size"]) == (name, mode, size))
                cells.append(f"{ratio:.2f}x")
        rows.append([name, *cells])
    head = ["", "parameters", "inference time", "training time", "inference memory", "training memory"]
    return table([f"ViT-B, {size} px", *head[1:]], rows)


def larger_models() -> str:
    """Whole trained models with PaPE far above their size, as ratios to the same model without an encoding."""
    numbers, rows = sparse.Numbers.read(ROOT / "docs" / "results" / "sparse" / "numbers.csv"), []
    for data in sparse.RECIPES:
        found = [numbers.values.get((data, "pape", factor), {}) for factor in sparse.TIMED]
        cells = [f"{x['model ratio']:.2f}x" if "model ratio" in x else "not measured" for x in found]
        rows.append([data, *cells])
    return table(["inference time", *(f"{factor}x the trained side" for factor in sparse.TIMED)], rows)


def precision() -> str:
    """How far attention weights are from float64 on a 64 x 64 grid in bfloat16."""
    text = (ROOT / "benchmarks" / "precision-bf16.txt").read_text()
    wanted = {"q.k alone": "no positions at all", "parapos": "parapos", "paper": "the paper's columns"}
    wanted["released"] = "the authors' code"
    rows = []
    for form, name in wanted.items():
        (line,) = (line for line in text.splitlines() if re.match(rf"\| {re.escape(form)} +\| init", line))
        rows.append([name, line.split("|")[5].strip()])
    return table(["bfloat16, 64 x 64 patches", "error of the attention weights (total variation)"], rows)


def encodings() -> str:
    """The encodings and what each is."""
    rows = []
    for name, cls in ENCODINGS.items():
        claims = cls.claims
        words = [
            ("relative" if claims.translation else "absolute"),
            *(["fades with distance"] if claims.decay else []),
            *(["knows direction"] if claims.direction else []),
            *(["depends on the token"] if claims.context else []),
        ]
        rows.append([f"`{name}`", label(name), ", ".join(words)])
    return table(["name", "", "what it does"], rows, left=3)


MADE: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        extrapolation,
        summary,
        story,
        seeds,
        published,
        cost,
        model_cost,
        larger_models,
        precision,
        encodings,
    )
}
