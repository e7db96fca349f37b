"""What a table would cost: arithmetic on the models and the numbers of samples, before anything is run.

Floating-point operations of a sample are those of models/arithmetic.py; training counts three times that. Hours are
those of one GPU that sustains a given number of operations per second. That a stream of events has EVENT_TOKENS tokens
and a moment of driving PILLARS pillars is a guess.
"""

from __future__ import annotations

import torch
from torch import nn

from ..data import clips
from ..data.counts import published
from ..models import PointTransformerV3, UniTR, ViViT
from ..models.arithmetic import gflop
from ..models.event_vit import EventBackbone
from ..models.unitr import CAMERAS
from ..text import table as as_text
from ..training.recipe import Recipe
from ..training.runs import FINISHED
from .grid import Grid
from .store import ReportError

TFLOPS = 150.0  # sustained: about half of the peak of a recent GPU in 16 bits
EVENT_TOKENS = 1000
PILLARS = 20_000  # of ten sweeps


def samples(wanted: Recipe, split: str, data: str = "") -> int:
    """Samples of a split: the published number for full data sets, which need not be there, else counted."""
    known = published(data or wanted.data.name, split, wanted.data.options)
    if known is not None and wanted.data.options.get("complete", True):
        return known
    return len(wanted.dataset(split, data or None))


def tokens(model: nn.Module, wanted: Recipe, size: int = 0) -> int:
    """Of one sample at a size, or as the recipe has it."""
    extra = int(getattr(model, "cls", None) is not None)
    if isinstance(model, EventBackbone):
        return EVENT_TOKENS + extra
    options = wanted.data.options
    if isinstance(model, PointTransformerV3):
        return int(options.get("point_max") or options.get("points") or EVENT_TOKENS)
    if isinstance(model, UniTR):
        height, width = wanted.data.sides
        return PILLARS + len(CAMERAS) * (height // model.patch) * (width // model.patch)
    if isinstance(model, ViViT):
        return clips.TUBELETS * (options["height"] // model.patch) * (options["width"] // model.patch) + extra
    height, width = (size, size) if size else wanted.data.sides
    patch = getattr(model, "patch", 0)
    if not patch or not height:
        message = "expected a model with a `patch` size on data with a size, so that its tokens can be counted"
        raise ReportError(f"{message}, got {type(model).__name__}; the table can be made without --dry-run")
    return (height // patch) * (width // patch) + extra


def estimate(grid: Grid, tflops: float = TFLOPS) -> str:
    """What is there and what is left to do, run by run, in hours of one GPU."""
    lines, total, commands = [], 0.0, []
    for job in grid.jobs:
        run, state = job.run, job.run.state()
        with torch.device("meta"):
            model = run.wanted.model.build(run.wanted.task_class.outputs(None))
        each = gflop(model, tokens(model, run.wanted))
        left = 0.0 if state == FINISHED else 1.0
        if state.startswith("step "):
            step, steps = (int(word) for word in state.split()[1::2])
            left = 1 - step / steps
        if left:
            commands.append(f"  {run.command}")
        trained_on = samples(run.wanted, "train") * run.wanted.optim.epochs
        missing, evaluations = job.missing(), len(job.evaluations)
        work = [gflop(model, tokens(model, run.wanted, e.size)) * samples(run.wanted, e.split, e.data) for e in missing]
        hours = [gflops / (tflops * 1e3) / 3600 for gflops in (3 * each * trained_on * left, sum(work))]
        total += sum(hours)
        shown = [f"{trained_on / 1e6:.1f}M", f"{3 * each:.1f}", f"{hours[0]:.1f}"]
        shown += [f"{evaluations - len(missing)} of {evaluations}", f"{hours[1]:.1f}"]
        lines.append([str(run.folder), state, *shown])
    header = ["run", "state", "samples", "GFLOP each", "GPU hours to train", "cells", "GPU hours to test"]
    how = f"at {tflops:g} TFLOP/s sustained, reading the data not counted; arithmetic, not a measurement"
    message = [f"{as_text(header, lines, left=2)}\n\nLeft: {total:.1f} GPU hours {how}."]
    return "\n".join([*message, *(["\nRuns may be trained one by one, anywhere:", *commands] if commands else [])])


def estimate_study(grid: Grid) -> str:
    """What is there, what is left, and how long that may take on one core."""
    todo = [job for job in grid.jobs if not job.is_done()]
    lines = [[str(job.run.folder), job.run.state(), "-" if job in todo else "all"] for job in grid.jobs]
    hours, minutes = len(todo) * grid.table.minutes / 60, grid.table.minutes
    how = f"at {minutes:g} minutes of one core for a run, as measured once; less with more --jobs"
    message = as_text(["run", "state", "cells"], lines, left=3)
    return f"{message}\n\nLeft: {len(todo)} runs, about {hours:.1f} hours {how}."
