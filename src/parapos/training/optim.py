"""The optimizer, its learning rate as a function of the step, and the running average of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .schema import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate of step 1, ..., steps: linear over the warm-up, then half a cosine down to `final_lr`."""
    if not 1 <= step <= steps:
        raise ValueError(f"step must be in 1..{steps}, got {step}")
    warmup = warmup_steps(optim, steps)
    if step <= warmup:
        return optim.lr * step / warmup
    share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    return optim.final_lr + (optim.lr - optim.final_lr) * share


def warmup_steps(optim: Optim, steps: int) -> int:
    """Steps over which the rate rises: the share `warmup` of all, rounded, and never all of them."""
    return min(round(optim.warmup * steps), steps - 1)


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW over all parameters that learn. decay="matrices" spares vectors, tokens and rotary frequencies."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if optim.decay == "all" or _is_matrix(model, name, p)]
    chosen = {id(p) for p in decayed}
    spared = [p for _, p in named if id(p) not in chosen]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": optim.weight_decay}]
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def _is_matrix(model: nn.Module, name: str, p: Tensor) -> bool:
    from ..encodings.rotary import RoPEMixed

    owner = model.get_submodule(name.rpartition(".")[0])
    return p.squeeze().ndim > 1 and not isinstance(owner, RoPEMixed)


class Average:
    """A running average of a model's parameters: average = d average + (1 - d) weights, after each step t = 1, 2, ...

    d is the smaller of `decay` and (1 + t) / (10 + t), so the start is soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.swapped = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        d = min(self.decay, (1 + step) / (10 + step))
        weights = dict(self.model.named_parameters())
        self.values = {name: v.to(weights[name]).lerp(weights[name], 1 - d) for name, v in self.values.items()}

    @torch.no_grad()
    def swap(self, use: bool) -> None:
        """Puts the average into the model, or the weights back."""
        if use == self.swapped:
            return
        for name, p in self.model.named_parameters():
            held = p.detach().clone()
            p.copy_(self.values[name])
            self.values[name] = held
        self.swapped = use
