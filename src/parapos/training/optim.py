"""The optimizer, its learning rate as a function of the step, and the running average of the weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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


def make_schedule(optim: Optim, steps: int) -> Callable[[int], dict[str, Any]]:
    """What the groups of the optimizer get at step 1, ..., steps: a function of the step alone, so nothing is stored.

    The rate is to be multiplied by each group's `factor`. "onecycle" is torch's OneCycleLR, with its cycle of the first
    beta from 0.95 down to 0.85 and back if that is wanted.
    """
    if optim.schedule == "cosine":
        return lambda step: {"lr": learning_rate(optim, step, steps)}
    stand_in = torch.optim.AdamW([torch.zeros(1)], betas=optim.betas)
    rise = optim.warmup
    if rise * steps == 1:  # torch divides by rise * steps - 1
        rise = math.nextafter(rise, 1)
    start = optim.start_lr or optim.lr / 25
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        stand_in,
        optim.lr,
        total_steps=steps,
        pct_start=rise,
        div_factor=optim.lr / start,
        final_div_factor=start / optim.final_lr if optim.final_lr else 1e4,
        cycle_momentum=optim.cycle_beta,
    )

    def at(step: int) -> dict[str, Any]:
        if not 1 <= step <= steps:
            raise ValueError(f"step must be in 1..{steps}, got {step}")
        cycle.last_epoch = step - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is meant to be asked by its own step()
            (rate,) = cycle.get_lr()
        return {"lr": rate, "betas": stand_in.param_groups[0]["betas"]}

    return at


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW over all parameters that learn. decay="matrices" spares vectors, tokens and rotary frequencies. Each group
    has the `factor` of its rate, 1 or what `optim.rates` says."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}  # by whether they are spared, and the factor
    fits = dict.fromkeys(optim.rates, 0)
    for name, p in model.named_parameters():
        if p.requires_grad:
            spared = optim.decay != "all" and not _is_matrix(model, name, p)
            part = next((part for part in optim.rates if part in name), None)
            fits |= {} if part is None else {part: 1}
            groups.setdefault((spared, 1.0 if part is None else float(optim.rates[part])), []).append(p)
    for part, found in fits.items():
        if not found:
            raise ValueError(f"optim.rates.{part}: no parameter of the model has {part!r} in its name")
    made: list[dict[str, Any]] = [
        {"params": groups[key], "weight_decay": 0.0 if key[0] else optim.weight_decay, "factor": key[1]}
        for key in sorted(groups, key=lambda key: (key[0], -key[1]))
    ]
    return torch.optim.AdamW(made, lr=optim.lr, betas=optim.betas, eps=optim.eps)


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
        self.values = {name: self.values[name].to(p) for name, p in weights.items()}  # a checkpoint may be elsewhere
        torch._foreach_lerp_(list(self.values.values()), list(weights.values()), 1 - d)

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
