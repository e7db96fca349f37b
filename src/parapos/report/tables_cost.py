"""What a table would cost: arithmetic on the models and the numbers of images, before anything is run.

Floating-point operations of an image: two per weight and token, and four per pair of tokens and channel of attention,
half of them for q.k and half for the values. Training counts three times that. Hours are those of one GPU that
sustains a given number of operations per second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..blocks import Attention
from ..data.imagenet import TEST, TRAIN, V2, R
from ..training.recipe import Recipe
from .sweep import ReportError
from .tables import FINISHED, UNBEGUN, Run
from .text import table as as_text

TFLOPS = 150.0  # sustained: about half of the peak of a recent GPU in 16 bits
COUNTS = {
    ("imagenet", "train"): TRAIN - TRAIN // 100,
    ("imagenet", "test"): TEST,
    ("imagenet_v2", "test"): V2,
    ("imagenet_r", "test"): R,
}
CLASSES = 1000


def images(wanted: Recipe, split: str, data: str = "") -> int:
    """Images of a split: the published number for the full datasets, which need not be there, else counted."""
    known = COUNTS.get((data or wanted.data.name, split))
    if known is not None and wanted.data.options.get("complete", True):
        return known
    return len(wanted.dataset(split, data or None))


def gflop(model: nn.Module, size: int) -> float:
    """Of one image, forward. An estimate, not a count of operators: PaPE's W_b, which is folded, counts in full."""
    patch = getattr(model, "patch", None)
    if patch is None:
        raise ReportError(f"expected a model of patches, got {type(model).__name__}")
    tokens = (size // patch) ** 2 + (getattr(model, "cls", None) is not None)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("classifier"))
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    pairs = sum(layer.heads * (layer.qk_dim + layer.head_dim) for layer in layers)
    return 2 * (tokens * weights + tokens**2 * pairs) / 1e9


def estimate(runs: Sequence[Run], found: set[tuple[str, str]], tflops: float = TFLOPS) -> str:
    """What is there and what is left to do, run by run."""
    lines, total = [], 0.0
    for run in runs:
        with torch.device("meta"):
            model = run.wanted.model.build(CLASSES)
        state = run.state()
        each = gflop(model, run.wanted.data.size)
        left = 0.0 if state == FINISHED else 1.0
        if state not in (FINISHED, UNBEGUN):
            step, steps = (int(word) for word in state.split()[1::2])
            left = 1 - step / steps
        seen = images(run.wanted, "train") * run.wanted.optim.epochs
        missing = [cell for place, cell in run.cells.items() if place not in found]
        training = 3 * each * seen * left
        testing = sum(gflop(model, cell.size) * images(run.wanted, cell.split, cell.data) for cell in missing)
        hours = [work / (tflops * 1e3) / 3600 for work in (training, testing)]
        total += sum(hours)
        cells = f"{len(run.cells) - len(missing)} of {len(run.cells)}"
        shown = [f"{seen / 1e6:.1f}M", f"{3 * each:.1f}", f"{hours[0]:.1f}", cells, f"{hours[1]:.1f}"]
        lines.append([str(run.folder), state, *shown])
    header = ["run", "state", "images", "GFLOP each", "GPU hours to train", "cells", "GPU hours to test"]
    how = f"at {tflops:g} TFLOP/s sustained, reading the images not counted; arithmetic, not a measurement"
    commands = "\n".join(f"  {run.command}" for run in runs if run.state() != FINISHED)
    told = f"{as_text(header, lines, left=2)}\n\nLeft: {total:.1f} GPU hours {how}."
    return f"{told}\n\nRuns may be trained one by one, anywhere:\n{commands}" if commands else told
