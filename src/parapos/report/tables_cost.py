"""What a table would cost: arithmetic on the models and the numbers of samples, before anything is run.

Floating-point operations of a sample: two per weight and token, and four per pair of tokens and channel of attention,
half of them for q.k and half for the values. Training counts three times that. Hours are those of one GPU that
sustains a given number of operations per second. A gesture is taken to have EVENT_TOKENS tokens, which is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..blocks import Attention
from ..data import clips, dvsgesture
from ..data.imagenet import TEST, TRAIN, V2, R
from ..data.readers import ucf101_lists
from ..models import EventViT, ViT, ViViT
from ..training.recipe import Recipe
from .sweep import ReportError
from .tables import FINISHED, Run, kept_of
from .text import table as as_text

TFLOPS = 150.0  # sustained: about half of the peak of a recent GPU in 16 bits
COUNTS = {
    ("imagenet", "train"): TRAIN - TRAIN // 100,
    ("imagenet", "test"): TEST,
    ("imagenet_v2", "test"): V2,
    ("imagenet_r", "test"): R,
    ("dvsgesture", "train"): 1020,  # 85 trials of 12 gestures
    ("dvsgesture", "test"): dvsgesture.TEST,
}
EVENT_TOKENS = 1000
CLASSES = 1000


def images(wanted: Recipe, split: str, data: str = "") -> int:
    """Samples of a split: the published number for the full datasets, which need not be there, else counted."""
    known = COUNTS.get((data or wanted.data.name, split))
    if (data or wanted.data.name) == "ucf101":
        known = ucf101_lists.COUNTS[wanted.data.options.get("fold", 1)][ucf101_lists.SPLITS.index(split)]
    if known is not None and wanted.data.options.get("complete", True):
        return known
    return len(wanted.dataset(split, data or None))


def tokens(model: nn.Module, wanted: Recipe, size: int = 0) -> int:
    """Of one sample at a size, or as the recipe has it."""
    extra = int(getattr(model, "cls", None) is not None)
    if isinstance(model, EventViT):
        return EVENT_TOKENS + extra
    if isinstance(model, ViViT):
        options = wanted.data.options
        return clips.TUBELETS * (options["height"] // model.patch) * (options["width"] // model.patch) + extra
    if isinstance(model, ViT):
        return ((size or wanted.data.size) // model.patch) ** 2 + extra
    raise ReportError(f"expected a model whose tokens can be counted, got {type(model).__name__}")


def gflop(model: nn.Module, count: int) -> float:
    """Of so many tokens, forward. An estimate, no count of operators: PaPE's W_b, which is folded, counts in full."""
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("classifier"))
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    pairs = sum(layer.heads * (layer.qk_dim + layer.head_dim) for layer in layers)
    return 2 * (count * weights + count**2 * pairs) / 1e9


def estimate(runs: Sequence[Run], tflops: float = TFLOPS) -> str:
    """What is there and what is left to do, run by run."""
    lines, total = [], 0.0
    for run in runs:
        with torch.device("meta"):
            model = run.wanted.model.build({"num_classes": CLASSES})
        state = run.state()
        each = gflop(model, tokens(model, run.wanted))
        found = kept_of(run)
        left = 0.0 if state == FINISHED else 1.0
        if state.startswith("step "):
            step, steps = (int(word) for word in state.split()[1::2])
            left = 1 - step / steps
        seen = images(run.wanted, "train") * run.wanted.optim.epochs
        missing = [cell for place, cell in run.cells.items() if place not in found]
        training = 3 * each * seen * left
        testing = sum(
            gflop(model, tokens(model, run.wanted, cell.size)) * images(run.wanted, cell.split, cell.data)
            for cell in missing
        )
        hours = [work / (tflops * 1e3) / 3600 for work in (training, testing)]
        total += sum(hours)
        cells = f"{len(run.cells) - len(missing)} of {len(run.cells)}"
        shown = [f"{seen / 1e6:.1f}M", f"{3 * each:.1f}", f"{hours[0]:.1f}", cells, f"{hours[1]:.1f}"]
        lines.append([str(run.folder), state, *shown])
    header = ["run", "state", "samples", "GFLOP each", "GPU hours to train", "cells", "GPU hours to test"]
    how = f"at {tflops:g} TFLOP/s sustained, reading the data not counted; arithmetic, not a measurement"
    commands = "\n".join(f"  {run.command}" for run in runs if run.state() != FINISHED)
    told = f"{as_text(header, lines, left=2)}\n\nLeft: {total:.1f} GPU hours {how}."
    return f"{told}\n\nRuns may be trained one by one, anywhere:\n{commands}" if commands else told
