"""Time of attention with a trained run's own numbers, as ratios to plain attention on the same q, k and v.

A trained model has steeper forms than a new one, and attention picks its method by the numbers. The run's model looks
at one test sample at several times its size. What each layer hands to attention is kept, heads are repeated to 12 and
filled up with zeros to size 64, as in `bench.attention`, and all layers are timed in turn with plain attention.
Then the forward pass at three high resolutions, whatever the size of training: with heads of 64 and as they are, each
head alone for how its time grows, and the peak memory of one layer. Plain attention is not run at the largest.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import text
from ..attention import Term, attend
from ..blocks import Attention
from ..malloc import keep_memory
from ..tracing import hooked
from ..training import checkpoint, fit
from ..training.recipe import RecipeError
from . import measure
from .attention import HEAD_DIM, HEADS, MODES, PLAIN, exponent

FACTORS = (1, 2, 4, 8, 16)
ROUNDS = {16: (2, 60)}  # least and most; one round of the largest takes a minute
USUAL_ROUNDS = (5, 60)
OURS = "parapos"
SIDES = (64, 128, 256)  # tokens along each side of the image
SIDE_ROUNDS = {64: (5, 5), 128: (2, 2)}
WIDTHS = ("heads of 64", "own heads")
Layer = tuple[Tensor, Tensor, Tensor, list[Term], float]  # q, k, v, terms, scale


def _repeated(x: Tensor, dim: int = 1) -> Tensor:
    """12 heads from fewer."""
    return x.repeat_interleave(-(-HEADS // x.shape[dim]), dim).narrow(dim, 0, HEADS)


def _change(term: Term, change: Callable[[Tensor], Tensor]) -> tuple[Term, list[Tensor]]:
    """A term with its learned tensors changed, and these."""
    new = {name: change(x) for name, x in term.tensors().items() if name in term.learned}
    return replace(term, **new), list(new.values())  # type: ignore[type-var]


def layers(model: nn.Module, inputs: Sequence[Tensor], pad: bool = True) -> list[Layer]:
    """What each attention layer of a model hands to `attend` for these inputs, as 12 heads. pad: of size 64."""
    found: list[Layer] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        x, r, *_ = args
        q, k, v = module.project(x)
        q, k, terms = module.encoding(x, q, k, r)
        q, k, v = (_repeated(t) for t in (q, k, v))
        if pad:
            q, k, v = (F.pad(t, (0, max(0, HEAD_DIM - t.shape[-1]))) for t in (q, k, v))
        terms = [_change(term, lambda x: _repeated(x, 0 if x.ndim == 1 else 1))[0] for term in terms]
        found.append((q, k, v, terms, module.encoding.scale))

    with hooked(m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Attention)):
        model(*inputs)
    return found


def _attention(case: str, q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], scale: float) -> Tensor:
    if case == PLAIN:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    out = attend(q, k, v, terms, scale=scale, strict=True)
    assert isinstance(out, Tensor)
    return out


def _call(case: str, kept: Sequence[Layer], mode: str) -> Callable[[], object]:
    """Runs all layers, with their gradients if the mode says so."""

    def forward() -> None:
        with torch.no_grad():
            for layer in kept:
                _attention(case, *layer)

    def training() -> None:
        for q, k, v, terms, scale in kept:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if case == OURS:
                changed = [_change(term, lambda x: x.detach().requires_grad_()) for term in terms]
                terms = [term for term, _ in changed]
                leaves += [x for _, learned in changed for x in learned]
            out = _attention(case, leaves[0], leaves[1], leaves[2], terms, scale)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    return forward if mode == MODES[0] else training


def head_of(layer: Layer, h: int) -> Layer:
    """One head of a layer."""
    q, k, v, terms, scale = layer
    alone = [_change(term, lambda x: x.narrow(0 if x.ndim == 1 else 1, h, 1))[0] for term in terms]
    return q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], alone, scale


def _peak(case: str, path: Path) -> int:
    """Peak bytes of one layer, forward. For a fresh process."""

    def prepare() -> Callable[[], object]:
        return _call(case, [torch.load(path, weights_only=False)], MODES[0])

    prepare()()  # what PyTorch loads for a first call is not of it
    return measure.peak_memory(prepare, "cpu")


def _memory(layer: Layer) -> float | None:
    """The ratio of peaks of one layer, inputs included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.pt"
        torch.save(layer, path)
        ours, plain = (measure.apart(_peak, case, path) for case in (OURS, PLAIN))
    return ours / plain if ours and plain else None


def high_resolution(
    model: nn.Module, inputs: Callable[[int], Sequence[Tensor]], sides: Sequence[int] = SIDES
) -> list[dict[str, Any]]:
    """Forward at high resolutions. inputs: what the model takes, for so many tokens along a side."""
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for side, pad in ((side, pad) for side in sides for pad in (True, False)):
            kept = layers(model, inputs(side), pad)
            row: dict[str, Any] = {"tokens": kept[0][0].shape[2], "width": WIDTHS[not pad], "layers": len(kept)}
            calls = {case: _call(case, kept, MODES[0]) for case in (PLAIN, OURS)}
            if side in SIDE_ROUNDS:
                calls[OURS]()
                times = measure.in_turn(calls, partial(measure.timed, device="cpu"), 0.0, SIDE_ROUNDS[side])
                row |= {"plain": statistics.median(times[PLAIN]), **measure.spread(times[OURS], times[PLAIN])}
                row["memory"] = _memory(kept[0])
                row["seconds"] = statistics.median(times[OURS])
            else:
                row["seconds"] = measure.timed(calls[OURS], "cpu")
            if pad:  # repeats of one head are alike: every third is another one where four became twelve
                alone = [head_of(layer, h) for layer in kept for h in range(0, HEADS, 3)]
                row["heads"] = [measure.timed(_call(OURS, [head], MODES[0]), "cpu") for head in alone]
            measure.progress(f"{row['tokens']} tokens, {row['width']}: {row['seconds']:.2f} s")
            rows.append(row)
    return rows


def exponents(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How time grows with the number of tokens: for all layers, by width, and for the head of the steepest growth."""
    out = {}
    for width in WIDTHS:
        own = [row for row in rows if row["width"] == width]
        out[width] = exponent([row["tokens"] for row in own], [row["seconds"] for row in own])
        if "heads" in own[0]:
            heads = zip(*(row["heads"] for row in own), strict=True)
            out["steepest head"] = max(exponent([row["tokens"] for row in own], times) for times in heads)
    return out


def run(folder: Path, *, seconds: float = 120.0, quick: bool = False) -> dict[str, Any]:
    """Ratios for a run at several times the size of its data, each measured for about an equal share of `seconds`.

    quick: the size of training alone and two rounds, a smoke test.
    """
    recipe = fit.load_run(folder)
    if not recipe.data.size:
        raise RecipeError(f"{folder}: dataset {recipe.data.name} has no size that could grow; take a run on images")
    model, _ = checkpoint.load_weights(folder / "weights.safetensors")
    factors = FACTORS[:1] if quick else FACTORS
    rows, kept_memory = [], keep_memory()  # as in `bench.attention`
    for (factor, mode), share in measure.shares([(f, m) for f in factors for m in MODES], seconds):
        size = recipe.data.size
        size = (size[0] * factor, size[1] * factor) if isinstance(size, tuple) else size * factor
        sample = recipe.dataset("test", size=size)[0]
        inputs = [torch.as_tensor(sample[name])[None] for name in model.inputs]  # type: ignore[union-attr]
        kept = layers(model, inputs)
        calls = {case: _call(case, kept, mode) for case in (PLAIN, OURS)}
        bounds = (2, 2) if quick else ROUNDS.get(factor, USUAL_ROUNDS)
        for call in calls.values() if factor < FACTORS[-1] else ():  # the largest is too slow to be run for nothing
            call()
        times = measure.in_turn(calls, partial(measure.timed, device="cpu"), share, bounds)
        tokens = kept[0][0].shape[2]
        measure.progress(f"{factor}x, {tokens} tokens, {mode}: {len(times[OURS])} rounds")
        what = {"factor": factor, "tokens": tokens, "mode": mode, "layers": len(kept)}
        ratios = measure.spread(times[OURS], times[PLAIN])
        rows.append({**what, "seconds": statistics.median(times[PLAIN]), **ratios})
    about = {"run": folder.name, "encoding": recipe.model.encoding, "commit": measure.commit()}
    out = {**measure.machine("cpu", quick=quick), **about, "kept_memory": kept_memory, "rows": rows}
    if quick or not isinstance(recipe.data.size, int):
        return out
    patch = recipe.data.size / rows[0]["tokens"] ** 0.5

    def inputs_of(side: int) -> list[Tensor]:
        sample = recipe.dataset("test", size=round(side * patch))[0]
        return [torch.as_tensor(sample[name])[None] for name in model.inputs]  # type: ignore[union-attr]

    high = high_resolution(model, inputs_of)
    return {**out, "high": high, "exponents": exponents(high)}


def markdown(results: dict[str, Any]) -> str:
    """The ratios as a table, with the quartiles of the rounds."""
    what = f"All layers of a trained {results['encoding']} model, as {HEADS} heads of {HEAD_DIM}"
    cells = [
        [f"{x['factor']}x", str(x["tokens"]), x["mode"], f"{x['seconds'] * 1000:.1f} ms", measure.show_ratio(x)]
        for x in results["rows"]
    ]
    table = text.table(["size", "tokens", "mode", PLAIN, OURS], cells, left=0)
    freed = "kept" if results["kept_memory"] else "given back"
    parts = [*measure.warning(results), f"{what}, on {measure.where(results)}. Freed memory is {freed}.", table]
    if "high" in results:
        rows = [[str(x["tokens"]), x["width"], *_high_cells(x)] for x in results["high"]]
        parts += ["Forward at high resolutions; memory is the ratio of peaks of one layer, inputs included:"]
        parts += [text.table(["tokens", "width", PLAIN, OURS, "ratio", "memory"], rows, left=0)]
        grown = "; ".join(f"{name} {value:.2f}" for name, value in results["exponents"].items())
        parts += [f"Exponent of parapos' time over the number of tokens: {grown}."]
    return "\n\n".join(parts)


def _high_cells(row: dict[str, Any]) -> list[str]:
    ours = f"{row['seconds']:.2f} s"
    if "ratio" not in row:
        return ["not measured", ours, "not measured", "not measured"]
    memory = "not measured" if row["memory"] is None else f"{row['memory']:.2f}x"
    return [f"{row['plain']:.2f} s", ours, measure.show_ratio(row), memory]
