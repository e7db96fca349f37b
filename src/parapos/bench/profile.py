"""Where the time that an encoding adds to a model goes: by kind of operator, beside the floor that its FLOP set.

The model with the encoding and the one without take turns under PyTorch's profiler. A kind's own time is that of its
operators without those they call, so the kinds add up; all that attention calls counts as attention. The floor is the
counted GFLOP over those of the model without positions: what the encoding would cost if the rest of it were free and
every product as fast as the model's own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..text import table
from . import measure
from . import model as bench_model
from .model import BASE, MODES, Row, Setting

KINDS = {
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention", "parapos::", "_Attention"),
    "products outside it": ("addmm", "mm", "bmm", "baddbmm", "convolution", "linear", "matmul"),
    "optimizer": ("adamw",),
}
REST = "the rest: pointwise, copies, norms"


def kind(names: Sequence[str]) -> str:
    """The kind of an operator, by its name and the names of those that called it, outermost last."""
    attention, products, optimizer = KINDS
    if any(word in name for name in names for word in KINDS[attention]):
        return attention
    bare = names[0].removeprefix("aten::").lstrip("_")
    if any(bare in (word, f"mkldnn_{word}", f"{word}_backward") for word in KINDS[products]):
        return products
    return optimizer if any(word in names[0] for word in KINDS[optimizer]) else REST


def _names(event: Any) -> list[str]:
    """Of an operator and its callers, outermost last."""
    return [] if event is None else [event.name, *_names(event.cpu_parent)]


def _by_kind(step: Callable[[], object], device: str) -> defaultdict[str, float]:
    """Milliseconds of a step by kind of operator."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    took: defaultdict[str, float] = defaultdict(float)
    for event in seen.events():
        if event.device_type.name == "CPU":  # kernels count with the operators that started them
            took[kind(_names(event))] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
    return took


def run(row: Row, setting: Setting, rounds: int) -> dict[str, Any]:
    """Milliseconds per step by mode, row and kind, and the floors."""
    rows = [Row(BASE), row]
    out: dict[str, Any] = {**measure.machine(setting.device), "commit": measure.commit(), "row": str(row)}
    out |= {"setting": str(setting), "rounds": rounds, "modes": {}}
    count = {r: bench_model.count(r, setting.model, setting.size, setting.device) for r in rows}
    for mode in MODES:
        nets = {r: bench_model.build(r, setting.model) for r in rows}
        steps = {r: bench_model.step(net, mode, setting) for r, net in nets.items()}
        for step in steps.values():
            step()
        spent: dict[Row, list[defaultdict[str, float]]] = {r: [] for r in rows}
        for index in range(rounds):
            for r in measure.rotated(rows, index):
                spent[r].append(_by_kind(steps[r], setting.device))
            measure.progress(f"profile: {setting}, {mode}: round {index + 1} of {rounds}")
        base, ours = (count[r][mode] for r in rows)
        medians = {
            str(r): {name: statistics.median(step[name] for step in spent[r]) for name in spent[r][0]} for r in rows
        }
        out["modes"][mode] = {"ms": medians, "floor": ours / base}
        del nets, steps
    return out


def markdown(found: dict[str, Any]) -> str:
    """One table per mode: milliseconds by kind, and the difference as a share of the model without positions."""
    lines = [
        f"{found['setting']}, on {measure.where(found)}, commit {found['commit']}. "
        f"Medians of {found['rounds']} profiled steps of each in turn, which take longer than others."
    ]
    for mode, values in found["modes"].items():
        base, ours = values["ms"][BASE], values["ms"][found["row"]]
        whole = sum(base.values())
        rows = []
        for name in [*KINDS, REST]:
            a, b = base.get(name, 0.0), ours.get(name, 0.0)
            if a or b:
                rows.append([name, f"{a:.1f} ms", f"{b:.1f} ms", f"{(b - a) / whole:+.1%}"])
        total = sum(ours.values())
        rows.append(["all", f"{whole:.1f} ms", f"{total:.1f} ms", f"{total / whole - 1:+.1%}"])
        rows.append(["floor set by the GFLOP", "", "", f"{values['floor'] - 1:+.1%}"])
        lines += ["", f"{mode}:", "", table(["time in", BASE, found["row"], "of the whole"], rows)]
    return "\n".join(lines)
