"""Floating-point operations of a model, by arithmetic on its weights: nothing is run, and no weight needs memory.

Two per weight and token, and four per pair of tokens and channel of attention, half of them for q.k and half for the
values. A model that pools its tokens is counted stage by stage, each with POOLED of the tokens before it, which attend
within patches; of a sparse convolution, the share OCCUPIED of the weights meets a token. In a model of cameras and
LiDAR, tokens attend within sets; the network on its map is counted operation by operation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..blocks import Attention
from .ptv3 import PointTransformerV3
from .unitr import UniTR

POOLED, OCCUPIED = 0.25, 0.35  # on surfaces


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
