"""The paper's efficiency table for the machine at hand: what each encoding costs a whole vision transformer.

Rows are encodings, PaPE once per number of parabolas m; the row `none` is the model without positions, and the measure
of all others. Per row: parameters; GFLOP of one image, counted on the model operator by operator and from the
arithmetic in `flops.py`; time and peak memory of inference and of a training step. PROTOCOL says how they are measured.
Rows that are timed in turn share the weights outside the encoding, so that all fit in memory; AdamW runs at rate 0, so
that every step is the same step.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..encodings import fold
from ..malloc import keep_memory
from ..models import MODELS as REGISTRY
from ..models import create_model
from ..models.unitr import UniTR
from ..models.vit import PatchBackbone
from . import measure
from .flops import MODEL, SIZE, gflops
from .steps import job_of

MODELS = [name for name, (cls, _) in REGISTRY.items() if issubclass(cls, PatchBackbone | UniTR)]
BASE = "none"
ENCODINGS = (BASE, "sincos", "alibi", "rope", "rope_mixed", "lookhere", "pape", "pape_ri")
PARABOLAS = (2, 4, 8, 16, 32, 50, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("inference", "training")
PARTS = ("gflop", "memory", "time")
SECONDS, LEAST_ROUNDS, ROUNDS = 600.0, 3, 30
PROCESSES = 3  # whose median is the memory
WARM_UP_SIZE = 64
PROTOCOL = {
    "time": "rows in turn, rotated by one each round; median and quartiles of the per-round ratios to 'none'",
    "memory": "median of three fresh processes, peak above what each held before the model was made, all included",
    "training": "forward, loss, backward and fused AdamW, drop path on, W_b folded; detectors with 8 boxes an image",
    "inference": "evaluation mode, no gradients, W_b folded beforehand (parapos.fold); detectors give boxes",
    "precision": "weights in float32; bf16 and fp16 by autocast, without loss scaling",
    "mode": "eager",
    "gflop": "2 per multiply-add; counted: operators of one image; analytic: the paper's form of the encoding",
    "increase": "PaPE with 50 parabolas over the cheapest of sincos, alibi, rope, rope_mixed, lookhere",
    "paper": "ratios to the sincos row, as the paper has no row without an encoding",
}


@dataclass(frozen=True)
class Row:
    encoding: str
    parabolas: int | None = None  # of PaPE
    form: str | None = None  # of PaPE, if it is not that of parabolas

    def __str__(self) -> str:
        form = "" if self.form is None else f" {self.form}"
        return f"{self.encoding}{form}" if self.parabolas is None else f"{self.encoding} m={self.parabolas}"


@dataclass(frozen=True)
class Setting:
    """What is measured once for every row and mode."""

    model: str
    size: int
    batch: int
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.model} at {self.size} px, batch {self.batch}, {self.dtype}"


def make_rows(encodings: Sequence[str], parabolas: Sequence[int], direct: bool = False) -> list[Row]:
    """`none` first, then the encodings in the order given; PaPE once per m, and in its direct form if asked for."""
    rows = [Row(BASE)]
    for name in encodings:
        rows += [Row(name, m) for m in parabolas] if name == "pape" else [Row(name)]
    rows += [Row("pape", form="direct")] if direct else []
    return list(dict.fromkeys(rows))


def build(row: Row, model: str, **size: Any) -> nn.Module:
    options = size if row.parabolas is None else {"parabolas": row.parabolas, **size}
    options |= {} if row.form is None else {"form": row.form}
    net = create_model(model, encoding=row.encoding, **options)
    if isinstance(head := getattr(net, "classifier", None), nn.Linear):
        nn.init.normal_(head.weight, std=0.02)  # zeros would make all other gradients zero
    return net


def share(net: nn.Module, trunk: nn.Module) -> None:
    """Replace all parameters of net that trunk has too by trunk's."""
    shared = dict(trunk.named_parameters())
    for name, _ in list(net.named_parameters()):
        if name in shared:
            module, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(module), leaf, shared[name])


def adamw(net: nn.Module, state: defaultdict[Any, Any] | None = None) -> torch.optim.AdamW:
    """With `state`, moments are shared too: rows that share weights need one copy."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.05, fused=True)
    if state is not None:
        optimizer.state = state
    return optimizer


def prepare(net: nn.Module, optimizer: torch.optim.AdamW | None, setting: Setting) -> Callable[[], object]:
    """One step as a call, on inputs made here: a training step, or inference if there is no optimizer."""
    job = job_of(type(net))
    inputs = job.inputs(net, setting.batch, setting.size, setting.device)
    targets = job.targets(net, setting.batch, setting.size, setting.device)
    half = torch.autocast(setting.device, DTYPES[setting.dtype], enabled=setting.dtype != "fp32")

    def infer() -> object:
        with torch.no_grad(), half:
            return job.infer(net, *inputs)

    def train() -> None:
        assert optimizer is not None
        with half:
            loss = job.loss(net, targets, *inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    net.train(optimizer is not None)
    return infer if optimizer is None else train


def step(net: nn.Module, mode: str, setting: Setting) -> Callable[[], object]:
    """One step of a mode as a call, on the setting's device; inference with PaPE's W_b folded."""
    net = (net if mode == "training" else fold(net)).to(setting.device)
    return prepare(net, adamw(net) if mode == "training" else None, setting)


def _tiny(row: Row, model: str) -> nn.Module:
    """The same operators on next to no numbers, to warm up with."""
    kind, size = REGISTRY[model]
    return build(row, model, **{"dim": 16 * size.get("heads", 8), **job_of(kind).tiny})


def measure_memory(row: Row, mode: str, setting: Setting) -> int:
    """Peak bytes of the model and a step; of two in training, as the first makes the moments. For a fresh process."""

    def make() -> Callable[[], object]:
        call = step(build(row, setting.model), mode, setting)
        return (lambda: [call(), call()]) if mode == "training" else call

    step(_tiny(row, setting.model), mode, replace(setting, size=WARM_UP_SIZE, batch=1))()
    return measure.peak_memory(make, setting.device)


def parameters(row: Row, model: str) -> dict[str, int]:
    """All parameters, and those of the encodings."""
    with torch.device("meta"):
        net = build(row, model)
    encodings = [module for name, module in net.named_modules() if name.endswith(".attention.encoding")]
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "positional": sum(p.numel() for module in encodings for p in module.parameters()),
    }


def count(row: Row, model: str, size: int, device: str) -> dict[str, float]:
    """GFLOP of one sample by mode, operator by operator. Tensors are fake if shapes do not depend on numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, as are the formulas
    from torch.utils.flop_counter import FlopCounterMode

    from . import flop_formulas as _  # noqa: F401  registers the formulas of our operators

    gflop = {}
    job = job_of(REGISTRY[model][0])
    with FakeTensorMode() if job.can_be_fake else nullcontext(), torch.device(device):
        net = build(row, model)
        inputs = job.inputs(net, 1, size, device)
        for mode in MODES:
            net.train(mode == "training")
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(mode == "training"):
                out = job.product(net, mode == "training", *inputs)
                if mode == "training":
                    out.backward()
            gflop[mode] = counter.get_total_flops() / 1e9
    return gflop


def analytic(row: Row, model: str, size: int) -> dict[str, float] | None:
    """GFLOP by mode as `flops.py` has them: for the paper's model and size alone."""
    if (model, size) != (MODEL, SIZE) or row.form is not None:
        return None
    parabolas = {} if row.parabolas is None else {"parabolas": row.parabolas}
    return {mode: gflops(row.encoding, training=mode == "training", **parabolas) for mode in MODES}


def measure_time(
    nets: dict[Row, nn.Module], state: defaultdict[Any, Any], setting: Setting, seconds: float, rounds: int
) -> dict[tuple[str, Row], list[float]]:
    """Seconds per mode, row and round. Rounds go on for `seconds`; LEAST_ROUNDS at least, `rounds` at most."""
    device = setting.device
    # Inference has PaPE's W_b folded, in copies that share all other parameters.
    served = {row: fold(copy.deepcopy(net, {id(p): p for p in net.parameters()})) for row, net in nets.items()}
    steps = {("inference", row): prepare(net, None, setting) for row, net in served.items()}
    steps |= {("training", row): prepare(net, adamw(net, state), setting) for row, net in nets.items()}
    for row in nets:  # warm up
        tiny = _tiny(row, setting.model).to(device)
        for optimizer in (None, adamw(tiny)):
            prepare(tiny, optimizer, replace(setting, size=WARM_UP_SIZE, batch=1))()
        # Full size: on a CPU one step, so that the memory is there; on a GPU ten of each, for clocks and tuning.
        for _ in range(10 if device == "cuda" else 1 if row.encoding == BASE else 0):
            for mode in MODES:
                steps[mode, row]()

    times: dict[tuple[str, Row], list[float]] = {key: [] for key in steps}
    for turn in measure.rounds(seconds, (min(rounds, LEAST_ROUNDS), rounds)):
        for mode in MODES:
            for row in measure.rotated(nets, turn):
                times[mode, row].append(measure.timed(steps[mode, row], device))
        measure.progress(f"time: {setting}: round {turn + 1} of at most {rounds}, or until {seconds:.0f} s are over")
    return times


def run(
    *,
    model: str = "vit_base_patch16",
    encodings: Sequence[str] = ENCODINGS,
    parabolas: Sequence[int] = PARABOLAS,
    sizes: Sequence[int] | None = None,
    batch: int = 1,
    dtype: str = "fp32",
    device: str = "cpu",
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    direct: bool = False,
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """Count and measure everything, or some parts; timings take about `seconds` for all sizes together. Progress goes
    to stderr.

    sizes: pixels of an image's side; None for the usual one of the model."""
    sizes = [job_of(REGISTRY[model][0]).size] if sizes is None else sizes
    rows, missing, held = [], {}, {}
    for row in make_rows(encodings, parabolas, direct):
        try:
            held[row] = parameters(row, model)
            rows.append(row)
        except ValueError as error:  # lookhere knows two numbers of heads
            missing[str(row)] = str(error)
            measure.progress(f"no row {row}: {error}")
    settings = [Setting(model, size, batch, dtype, device) for size in sizes]
    results: dict[str, Any] = {
        **measure.machine(device),
        "commit": measure.commit(),
        "protocol": PROTOCOL,
        "model": model,
        "sizes": list(sizes),
        "batch": batch,
        "dtype": dtype,
        "rows": [],
        "missing": missing,
    }
    for size in sizes:
        for row in rows:
            what = {"row": str(row), **vars(row), "size": size, **held[row]}
            gflop = count(row, model, size, device) if "gflop" in parts else dict.fromkeys(MODES)
            results["rows"].append({**what, "gflop": gflop, "analytic": analytic(row, model, size)})
        measure.progress(f"counted: {len(rows)} rows at {size} px")
    results["memory"] = _all_memory(rows, settings) if "memory" in parts else []
    results["kept_memory"] = keep_memory()
    has_time = "time" in parts
    results["time"] = _all_time(rows, settings, results["memory"], seconds, rounds) if has_time else []
    return results


def _all_memory(rows: Sequence[Row], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Medians of PROCESSES processes each; None where one did not survive."""
    out: list[dict[str, Any]] = []
    for setting, mode in itertools.product(settings, MODES):
        base = None
        for row in rows:
            measure.progress(f"memory: {setting}, {mode}, {row}: {len(out) + 1} of {len(rows) * len(settings) * 2}")
            peaks = [measure.apart(measure_memory, row, mode, setting) for _ in range(PROCESSES)]
            survived = [peak for peak in peaks if peak is not None]
            peak = statistics.median_low(survived) if len(survived) == PROCESSES else None
            base = peak if row.encoding == BASE else base
            ratio = peak / base if peak and base else None
            out.append({"row": str(row), "size": setting.size, "mode": mode, "bytes": peak, "ratio": ratio})
    return out


def _all_time(
    rows: Sequence[Row], settings: Sequence[Setting], memory: Sequence[dict[str, Any]], seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """Rows whose process did not survive the memory measurement are left out."""
    nets, state = dict[Row, nn.Module](), defaultdict[Any, Any](dict)
    for row in rows:
        nets[row] = build(row, settings[0].model).to(settings[0].device)
        share(nets[row], nets[rows[0]])  # one by one, so that there is never more than one trunk too many
    out: list[dict[str, Any]] = []
    for setting, left in measure.shares(settings, seconds):
        lost = {x["row"] for x in memory if x["size"] == setting.size and x["bytes"] is None}
        alive = {row: net for row, net in nets.items() if str(row) not in lost}
        if rows[0] not in alive:
            continue
        times = measure_time(alive, state, setting, left, rounds)
        for (mode, row), values in times.items():
            what = {"row": str(row), "size": setting.size, "mode": mode, "seconds": statistics.median(values)}
            out.append({**what, **measure.spread(values, times[mode, rows[0]])})
    return out
