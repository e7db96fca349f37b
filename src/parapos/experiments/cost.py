"""What a table would cost: arithmetic on the models and the numbers of samples, before anything is run.

Floating-point operations of a sample: two per weight and token, and four per pair of tokens and channel of attention,
half of them for q.k and half for the values. Training counts three times that. Hours are those of one GPU that
sustains a given number of operations per second. That a stream of events has EVENT_TOKENS tokens is a guess.
A model that pools its tokens is counted stage by stage, each with POOLED of the tokens before it, which attend within
patches; of a sparse convolution, the share OCCUPIED of the weights meets a token. A model of cameras and LiDAR has
PILLARS pillars, a guess, which attend within sets; the network on its map is counted operation by operation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..blocks import Attention
from ..data import clips
from ..data.counts import published
from ..models import PointTransformerV3, UniTR, ViViT
from ..models.event_vit import EventBackbone
from ..models.unitr import CAMERAS
from ..text import table as as_text
from ..training.recipe import Recipe
from ..training.runs import FINISHED
from .grid import Grid
from .store import ReportError

TFLOPS = 150.0  # sustained: about half of the peak of a recent GPU in 16 bits
EVENT_TOKENS = 1000
POOLED, OCCUPIED = 0.25, 0.35  # on surfaces
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


def gflop(model: nn.Module, count: int) -> float:
    """Of so many tokens, forward. An estimate, no count of operators: PaPE's W_b, which is folded, counts in full."""
    if isinstance(model, UniTR):
        return _gflop_of_sets(model, count)
    stages, window, total = [(0, model)], count, 0.0  # how often tokens were pooled, and what works on them
    if isinstance(model, PointTransformerV3):
        backbone, window = model.backbone, model.patch
        parts = [*backbone.enc.items(), *backbone.dec.items()]
        stages = [(0, backbone.embedding), *((int(name[3:]), part) for name, part in parts)]
    for level, part in stages:
        here = count * POOLED**level
        named = [(name, p) for name, p in part.named_parameters() if p.ndim > 1 and not name.startswith("classifier")]
        weights = sum(p.numel() * (OCCUPIED if p.ndim == 5 and part is not model else 1) for _, p in named)
        layers = [module for module in part.modules() if isinstance(module, Attention)]
        pairs = sum(layer.heads * (layer.qk_dim + layer.head_dim) for layer in layers)
        total += here * (weights + min(here, window) * pairs)
    return 2 * total / 1e9


def _gflop_of_sets(model: UniTR, count: int) -> float:
    """Of so many pillars and patches, each of which has one of two MLPs, and of the map and its head."""
    layers = [module for module in model.backbone.modules() if isinstance(module, Attention)]
    shared = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim > 1)
    split = sum(p.numel() for p in model.backbone.parameters() if p.ndim > 1) - shared
    pairs = sum(layer.heads * (layer.qk_dim + layer.head_dim) for layer in layers)
    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.no_grad():
        model.eval().head(model.bev(torch.empty(1, model.pillars.dim, *model.grid.size)))
    return (2 * count * (shared + split / 2 + model.sets.set_size * pairs) + counter.get_total_flops()) / 1e9


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
