"""What sparse attention does in trained models, at 1x to 16x the side that they were trained at.

The models are those of desk recipes with three encodings, which are trained first where they are missing. Five things
are measured, by data set, encoding and factor, and kept as rows of numbers.csv; what is there is not measured again:

    shares       share of pairs of tiles that each layer needs, by tolerance
    predictions  the same samples with and without skipping
    times        all layers against plain attention on the same q, k and v
    models       whole models against an untrained one without an encoding, whose time does not depend on its weights
    memory       peak of the last layer, in a fresh process, against plain attention
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.tiles import DEFAULT, calls, inputs, larger, needed
from ..attention import attend, native, tiles
from ..attention.kernels import Call
from ..attention.sparse import spread
from ..blocks import Attention
from ..experiments import tables
from ..experiments.tables_spec import Column, Row, Table
from ..tracing import hooked
from ..training import checkpoint, fit, recipe, rows
from . import measure

RECIPES = {"digits": "desk_digits", "fashion_mnist": "desk_fashion", "clips": "desk_video", "gestures": "desk_events"}
ENCODINGS = ("pape", "pape_ri", "alibi")
FACTORS = (1, 2, 4, 8, 16)
PARTS = ("shares", "predictions", "times", "models", "memory")
SAMPLES, LOOKED_AT = 64, 2  # samples for predictions, and for shares
TOLERANCES = (DEFAULT, 1e-5, 1e-3)
CLOSE = 1e-3  # logits nearer than this may change places
TIMED, MEMORY = (4, 8, 16), (8, 16)  # factors
ROUNDS, SECONDS = (2, 20), 4.0  # of the timings of one model and factor
COLUMNS = ("data", "encoding", "factor", "tokens", "quantity", "value")
Key = tuple[str, str, int]  # data, encoding, factor
PLAIN, DENSE, OURS = "plain", "dense", "sparse"


@dataclass
class Numbers:
    """What was measured: values by data, encoding and factor, and quantity."""

    path: Path
    values: dict[Key, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Numbers:
        numbers = cls(path)
        for row in rows.read(path, COLUMNS, numbers=["value"], whole=["factor", "tokens"]):
            about = numbers.values.setdefault((row["data"], row["encoding"], row["factor"]), {})
            about["tokens"], about[row["quantity"]] = row["tokens"], row["value"]
        return numbers

    def has(self, key: Key, quantity: str) -> bool:
        return quantity in self.values.get(key, {})

    def add(self, key: Key, tokens: int, values: Mapping[str, float]) -> None:
        """Keeps values, on disk too."""
        self.values.setdefault(key, {}).update(values, tokens=tokens)
        measure.progress(f"{', '.join(map(str, key))}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
        lines = [
            (*key, round(about["tokens"]), quantity, f"{value:.6g}")
            for key, about in self.values.items()
            for quantity, value in about.items()
            if quantity != "tokens"
        ]
        rows.write(self.path, COLUMNS, lines)


@dataclass(frozen=True)
class Subject:
    """A trained model. place: the folder of its run."""

    data: str
    encoding: str
    place: Path

    @property
    def recipe(self) -> recipe.Recipe:
        return fit.load_run(self.place)

    def model(self) -> nn.Module:
        return checkpoint.load_weights(self.place / "weights.safetensors")[0].eval()

    def dataset(self, factor: int) -> Any:
        """The test data at so many times the trained side."""
        return self.recipe.dataset("test", **larger(self.recipe, factor))


def share(call: Call, tolerance: float) -> float:
    """The share of pairs of tiles that a call needs."""
    heads = needed(replace(call, tolerance=tolerance))
    return statistics.fmean(float(head.needed.float().mean()) for head in heads)


@torch.no_grad()
def shares(subject: Subject, factor: int) -> tuple[int, dict[str, float]]:
    """Of each layer, mean over samples and heads."""
    model, data = subject.model(), subject.dataset(factor)
    found: dict[str, list[float]] = {}
    tokens = []
    for index in spread(len(data), LOOKED_AT):
        layers = calls(model, inputs(model, data[index]))
        tokens.append(layers[0].q.shape[2])
        for tolerance in TOLERANCES:
            for layer, call in enumerate(layers, 1):
                found.setdefault(f"share {layer} at {tolerance:g}", []).append(share(call, tolerance))
    return round(statistics.fmean(tokens)), {name: statistics.fmean(values) for name, values in found.items()}


def _set_tolerance(model: nn.Module, tolerance: float | None) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Attention):
            module.tolerance = tolerance
    return model


def _skips(call: Call) -> bool:
    """Whether the kernel that serves a call skips tiles of keys."""
    if native.KERNEL.reason_against(call) is None:
        return native.is_worth_lists(call)
    return tiles.chosen(call) is not None


@torch.no_grad()
def answers(model: nn.Module, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool, int]:
    """Logits with every tile and with skipping, whether a layer skips at all, and the number of tokens.

    A sample of which no layer skips anything is run once, for both ways are the same code then.
    """
    found: list[Tensor] = []
    with hooked([model.register_forward_hook(lambda module, args, out: found.append(out[0]))]):
        layers = calls(_set_tolerance(model, None), given)
    sparse, skips = found[0], any(_skips(call) for call in layers)
    dense = _set_tolerance(model, 0.0)(*given)[0] if skips else sparse
    return dense, sparse, skips, layers[0].q.shape[2]


def predictions(subject: Subject, factor: int, samples: int) -> tuple[int, dict[str, float]]:
    """Of the same samples with and without skipping. changed: those whose two largest logits were more than CLOSE
    apart and whose prediction is another one."""
    model, data = subject.model(), subject.dataset(factor)
    indices = spread(len(data), samples)  # evenly: test sets are sorted by class
    counts = dict.fromkeys(("right", "right dense", "close", "changed", "skipping"), 0)
    apart, tokens = 0.0, 0
    for index in indices:
        sample = data[index]
        dense, sparse, skips, tokens = answers(model, inputs(model, sample))
        best, second = dense.topk(2).values.tolist()
        is_close = best - second <= CLOSE
        counts["skipping"] += skips
        counts["close"] += is_close
        counts["changed"] += not is_close and int(dense.argmax()) != int(sparse.argmax())
        counts["right"] += int(sparse.argmax()) == sample["label"]
        counts["right dense"] += int(dense.argmax()) == sample["label"]
        apart = max(apart, float((dense - sparse).abs().max()))
    return tokens, {"samples": len(indices), **counts, "logits apart": apart}


def _attention(case: str, layers: Sequence[Call]) -> None:
    for call in layers:
        if case == PLAIN:
            F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
        else:
            tolerance = 0.0 if case == DENSE else None
            attend(call.q, call.k, call.v, call.terms, scale=call.scale, strict=True, tolerance=tolerance)


@torch.no_grad()
def times(subject: Subject, factor: int, seconds: float) -> tuple[int, dict[str, float]]:
    """Of all layers: plain attention, ours without skipping, and ours."""
    model, data = subject.model(), subject.dataset(factor)
    layers = calls(model, inputs(model, data[len(data) // 2]))
    work = {case: partial(_attention, case, layers) for case in (PLAIN, DENSE, OURS)}
    if factor < FACTORS[-1]:
        for call in work.values():
            call()
    taken = measure.in_turn(work, partial(measure.timed, device="cpu"), seconds, ROUNDS)
    values = {"plain seconds": statistics.median(taken[PLAIN]), "sparse seconds": statistics.median(taken[OURS])}
    for case, name in ((OURS, "ratio"), (DENSE, "dense ratio")):
        ratios = measure.spread(taken[case], taken[PLAIN])
        values |= {name: ratios["ratio"], "rounds": ratios["rounds"]}
    return layers[0].q.shape[2], values


@torch.no_grad()
def model_times(subject: Subject, factor: int, seconds: float) -> tuple[int, dict[str, float]]:
    """Of the whole model on one sample, as a ratio to the same model without an encoding."""
    data = subject.dataset(factor)
    without = replace(subject.recipe.model, encoding="none", init="").build({"num_classes": data.classes}).eval()
    model, sample = subject.model(), data[len(data) // 2]
    given = inputs(model, sample)
    tokens = calls(model, given)[0].q.shape[2]
    work = {name: partial(m, *given) for name, m in ((PLAIN, without), (OURS, model))}
    if factor < FACTORS[-1]:
        for call in work.values():
            call()
    taken = measure.in_turn(work, partial(measure.timed, device="cpu"), seconds, ROUNDS)
    return tokens, {"model ratio": measure.spread(taken[OURS], taken[PLAIN])["ratio"]}


@torch.no_grad()
def _peak(place: Path, factor: int, case: str) -> float:
    def prepare() -> Callable[[], object]:
        subject = Subject("", "", place)
        model, data = subject.model(), subject.dataset(factor)
        return partial(_attention, case, calls(model, inputs(model, data[len(data) // 2]))[-1:])

    return measure.peak_memory(prepare, "cpu")


def memory(subject: Subject, factor: int) -> dict[str, float] | None:
    """Peaks of the last layer with its inputs, in bytes."""
    peaks = {case: measure.apart(_peak, subject.place, factor, case) for case in (PLAIN, OURS)}
    plain, ours = peaks[PLAIN], peaks[OURS]
    if plain is None or ours is None:
        return None
    return {"plain bytes": plain, "sparse bytes": ours}


def subjects(
    root: Path, data_root: str, jobs: int, blocks: Sequence[str], tell: Callable[[str], object]
) -> list[Subject]:
    """The models on some data sets, trained where they are missing. data_root: for those that have a root."""
    table = Table(
        name="sparse",
        title="Small models for the study of sparse attention",
        seeds=(0,),
        blocks={name: RECIPES[name] for name in blocks},
        rows={name: Row(changes={"model.encoding": name}) for name in ENCODINGS},
        columns={"1x": Column()},
    )
    has_root = any(recipe.load(source).data.root for source in table.blocks.values())
    grid = tables.resolve(table, root, {"data.root": data_root} if data_root and has_root else {})
    tables.make(grid, jobs, root / "tables" / "sparse.log", tell)
    return [Subject(block, row, repeats[0].run.folder) for (block, row, _), repeats in grid.places.items()]


def _each(
    found: Sequence[Subject],
    factors: Sequence[int],
    numbers: Numbers,
    quantity: str,
    look: Callable[[Subject, int], tuple[int, dict[str, float]]],
) -> None:
    """What `look` gives, unless the quantity is there; small factors first."""
    for factor in factors:
        for subject in found:
            key = (subject.data, subject.encoding, factor)
            if not numbers.has(key, quantity):
                numbers.add(key, *look(subject, factor))


def _memory(found: Sequence[Subject], factors: Sequence[int], numbers: Numbers) -> None:
    for factor in factors:
        for subject in found:
            key = (subject.data, subject.encoding, factor)
            if not numbers.has(key, "plain bytes") and (peaks := memory(subject, factor)) is not None:
                numbers.add(key, round(numbers.values.get(key, {}).get("tokens", 0)), peaks)


def run(
    found: Sequence[Subject],
    numbers: Numbers,
    *,
    parts: Sequence[str] = PARTS,
    factors: Sequence[int] = FACTORS,
    samples: int = SAMPLES,
    seconds: float = SECONDS,
) -> None:
    """Measures what is missing."""
    timed = [factor for factor in factors if factor in TIMED]
    todo: dict[str, Callable[[], None]] = {
        "shares": lambda: _each(found, factors, numbers, f"share 1 at {DEFAULT:g}", shares),
        "predictions": lambda: _each(found, factors, numbers, "samples", partial(predictions, samples=samples)),
        "times": lambda: _each(found, timed, numbers, "ratio", partial(times, seconds=seconds)),
        "models": lambda: _each(found, timed, numbers, "model ratio", partial(model_times, seconds=seconds)),
        "memory": lambda: _memory(found, [f for f in factors if f in MEMORY], numbers),
    }
    for part in parts:
        todo[part]()
