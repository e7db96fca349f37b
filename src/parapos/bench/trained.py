"""Time of attention with a trained run's own numbers, as ratios to plain attention on the same q, k and v.

A trained model has steeper forms than a new one, and attention picks its method by the numbers. The run's model looks
at one test sample at several times its size. What each layer hands to attention is kept, heads are repeated to 12 and
filled up with zeros to size 64, as in `bench.attention`, and all layers are timed in turn with plain attention.
"""

from __future__ import annotations

import statistics
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
from ..training import checkpoint, fit
from ..training.recipe import RecipeError
from . import measure
from .attention import HEAD_DIM, HEADS, MODES, PLAIN

FACTORS = (1, 2, 4, 8, 16)
ROUNDS = {16: (2, 60)}  # least and most; one round of the largest takes a minute
USUAL_ROUNDS = (5, 60)
OURS = "parapos"
Layer = tuple[Tensor, Tensor, Tensor, list[Term], float]  # q, k, v, terms, scale


def _repeated(x: Tensor, dim: int = 1) -> Tensor:
    """12 heads from fewer."""
    return x.repeat_interleave(-(-HEADS // x.shape[dim]), dim).narrow(dim, 0, HEADS)


def _change(term: Term, change: Callable[[Tensor], Tensor]) -> tuple[Term, list[Tensor]]:
    """A term with its learned tensors changed, and these."""
    new = {name: change(x) for name, x in term.tensors().items() if name in term.learned}
    return replace(term, **new), list(new.values())  # type: ignore[type-var]


def layers(model: nn.Module, inputs: Sequence[Tensor]) -> list[Layer]:
    """What each attention layer of a model hands to `attend` for these inputs."""
    found: list[Layer] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        x, r, *_ = args
        q, k, v = module.project(x)
        q, k, terms = module.encoding(x, q, k, r)
        q, k, v = (F.pad(_repeated(t), (0, max(0, HEAD_DIM - t.shape[-1]))) for t in (q, k, v))
        terms = [_change(term, lambda x: _repeated(x, 0 if x.ndim == 1 else 1))[0] for term in terms]
        found.append((q, k, v, terms, module.encoding.scale))

    hooks = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Attention)]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
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


def run(folder: Path, *, seconds: float = 120.0, quick: bool = False) -> dict[str, Any]:
    """Ratios for a run at several times the size of its data, each measured for about an equal share of `seconds`.

    quick: the size of training alone and two rounds, a smoke test.
    """
    recipe = fit.load_run(folder)
    if not recipe.data.size:
        raise RecipeError(f"{folder}: dataset {recipe.data.name} has no size that could grow; take a run on images")
    model, _ = checkpoint.load_weights(folder / "weights.safetensors")
    factors = FACTORS[:1] if quick else FACTORS
    rows = []
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
    about = {"run": folder.name, "encoding": recipe.model.encoding}
    return {**measure.machine("cpu", quick=quick), **about, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    """The ratios as a table, with the quartiles of the rounds."""
    what = f"All layers of a trained {results['encoding']} model, as {HEADS} heads of {HEAD_DIM}"
    cells = [
        [f"{x['factor']}x", str(x["tokens"]), x["mode"], f"{x['seconds'] * 1000:.1f} ms", measure.show_ratio(x)]
        for x in results["rows"]
    ]
    table = text.table(["size", "tokens", "mode", PLAIN, OURS], cells, left=0)
    return "\n\n".join([*measure.warning(results), f"{what}, on {measure.where(results)}.", table])
