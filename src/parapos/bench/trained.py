"""Time of attention with a trained run's own numbers, as ratios to plain attention on the same q, k and v.

A trained model has steeper forms than a new one, and attention picks its method by the numbers. The run's model looks at
one test sample at several times its size. What each layer hands to attention is kept, heads are repeated to 12 and filled
up with zeros to size 64, as in `bench.attention`, and all layers together are timed in turn with plain attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import text
from ..attention import Term, attend
from ..blocks import Attention
from ..training import checkpoint, fit
from . import measure
from .attention import HEAD_DIM, HEADS, MODES

FACTORS = (1, 2, 4, 8)
ROUNDS = (5, 60)
Layer = tuple[Tensor, Tensor, Tensor, list[Term], float]  # q, k, v, terms, scale


def _repeated(x: Tensor, dim: int = 1) -> Tensor:
    """12 heads from fewer."""
    return x.repeat_interleave(-(-HEADS // x.shape[dim]), dim).narrow(dim, 0, HEADS)


def _twelve(term: Term) -> Term:
    changes = {}
    for name in term.learned:
        x = getattr(term, name)
        if x is not None:
            changes[name] = _repeated(x, 0 if x.ndim == 1 else 1)
    return replace(term, **changes)  # type: ignore[type-var]


def layers(model: nn.Module, inputs: Sequence[Tensor]) -> list[Layer]:
    """What each attention layer of a model hands to `attend` for these inputs."""
    found: list[Layer] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        x, r, *_ = args
        q, k, v = module.project(x)
        q, k, terms = module.encoding(x, q, k, r)
        q, k, v = (F.pad(_repeated(t), (0, max(0, HEAD_DIM - t.shape[-1]))) for t in (q, k, v))
        found.append((q, k, v, [_twelve(term) for term in terms], module.encoding.scale))

    hooks = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Attention)]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _plain(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _parapos(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], scale: float) -> Tensor:
    out = attend(q, k, v, terms, scale=scale, strict=True)
    assert isinstance(out, Tensor)
    return out


CASES: dict[str, Callable[..., Tensor]] = {"plain SDPA": _plain, "parapos": _parapos}


def _call(case: str, kept: Sequence[Layer], mode: str) -> Callable[[], object]:
    """Runs all layers, with their gradients if the mode says so."""

    def forward() -> None:
        with torch.no_grad():
            for layer in kept:
                CASES[case](*layer)

    def training() -> None:
        for q, k, v, terms, scale in kept:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if case == "parapos":
                tensors = [
                    {n: x.detach().requires_grad_() for n, x in t.tensors().items() if n in t.learned} for t in terms
                ]
                terms = [replace(t, **found) for t, found in zip(terms, tensors, strict=True)]  # type: ignore[type-var]
                leaves += [x for found in tensors for x in found.values()]
            out = CASES[case](*leaves[:3], terms, scale)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    return forward if mode == MODES[0] else training


def run(folder: Path, *, factors: Sequence[int] = FACTORS, seconds: float = 120.0) -> dict[str, Any]:
    """Ratios for a run at several times the size of its data, each measured for about an equal share of `seconds`."""
    recipe = fit.load_run(folder)
    model, _ = checkpoint.load_weights(folder / "weights.safetensors")
    rows = []
    settings = [(factor, mode) for factor in factors for mode in MODES]
    start = time.perf_counter()
    for index, (factor, mode) in enumerate(settings):
        size = recipe.data.size
        size = [side * factor for side in size] if isinstance(size, list | tuple) else size * factor
        sample = recipe.dataset("test", size=size)[0]
        inputs = [torch.as_tensor(sample[name])[None] for name in model.inputs]  # type: ignore[union-attr]
        kept = layers(model, inputs)
        calls = {case: _call(case, kept, mode) for case in CASES}
        times: dict[str, list[float]] = {case: [] for case in CASES}
        for call in calls.values():
            call()
        share = (seconds - (time.perf_counter() - start)) / (len(settings) - index)
        begin = time.perf_counter()
        for done in range(ROUNDS[1]):
            if done >= ROUNDS[0] and time.perf_counter() - begin > share:
                break
            for case in list(calls)[:: 1 if done % 2 else -1]:
                times[case].append(measure.timed(calls[case], "cpu"))
        tokens = kept[0][0].shape[2]
        measure.progress(f"{factor}x, {tokens} tokens, {mode}: {len(times['parapos'])} rounds")
        plain, ours = times["plain SDPA"], times["parapos"]
        rows.append(
            {"factor": factor, "tokens": tokens, "mode": mode, "layers": len(kept), "seconds": statistics.median(plain)}
            | measure.spread(ours, plain)
        )
    return {**measure.machine("cpu"), "run": folder.name, "encoding": recipe.model.encoding, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    """The ratios as a table, with the quartiles of the rounds."""
    where = f"{results['machine']}, threads: {results['threads']}, torch {results['torch']}"
    cells = [
        [
            f"{row['factor']}x",
            str(row["tokens"]),
            row["mode"],
            f"{row['seconds'] * 1000:.1f} ms",
            f"{row['ratio']:.2f}x ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}; {row['rounds']})",
        ]
        for row in results["rows"]
    ]
    head = f"All layers of a trained {results['encoding']} model, as {HEADS} heads of {HEAD_DIM}, on {where}."
    return f"{head}\n\n" + text.table(["size", "tokens", "mode", "plain SDPA", "parapos"], cells, left=0)
