"""What a checkpoint of a run must hold, looked at before the run goes on from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from torch import Tensor

from . import checkpoint
from .checkpoint import CheckpointError
from .module import Progress, TrainingModule
from .optim import make_optimizer

NEEDED = ("params", "lr", "betas", "eps", "weight_decay")  # of a group of the optimizer; torch has others by release


def load(path: Path) -> tuple[dict[str, Any], Progress, int]:
    """A checkpoint of a run: all of it, how far the run was, and on how many samples it trains."""
    state = checkpoint.load(path)
    entry = state.get("parapos")
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}: not a checkpoint of a run, it has only {', '.join(map(str, state)) or 'nothing'}"
        )
    progress, samples = entry.get("progress"), entry.get("samples")
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(Progress).items()}
    if isinstance(progress, dict):
        progress = {"part_sums": {}, **progress}
        progress.pop("rows", None)  # of the metrics file, which older versions counted
    if not isinstance(progress, dict) or {key: type(value) for key, value in progress.items()} != kinds:
        message = ", ".join(f"{field.name} ({kinds[field.name].__name__})" for field in fields(Progress))
        raise CheckpointError(f"{path}: progress: expected {message}, got {str(progress)[:200]}")
    if type(samples) is not int or samples < 1 or min(progress["step"], progress["validated"]) < 0:
        raise CheckpointError(f"{path}: expected counts of steps and samples, got {progress}, {samples!r} samples")
    return state, Progress(**progress), samples


def check(state: dict[str, Any], path: Path, module: TrainingModule) -> None:
    """Whether the weights, their average and the optimizer's sums are those of a module."""
    try:
        checkpoint.compare(module.state_dict(), _dictionary(state, "state_dict"))
        if module.average is not None:
            checkpoint.compare(module.average.values, _dictionary(state["parapos"], "average"))
        if module.recipe.run.strategy != "fsdp":  # which names the sums by parameter
            _check_optimizer(state, module)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: not of this run: {error}") from None


def _dictionary(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key}: expected a dictionary, got {type(value).__name__}")
    return value


def _check_optimizer(state: dict[str, Any], module: TrainingModule) -> None:
    states = state.get("optimizer_states")
    if not isinstance(states, list) or len(states) != 1 or not isinstance(states[0], dict):
        raise ValueError(f"optimizer_states: expected a list of one dictionary, got {str(states)[:80]}")
    groups, sums = states[0].get("param_groups"), _dictionary(states[0], "state")
    fresh = make_optimizer(module.model, module.recipe.optim)
    wanted = [{**group, "params": len(group["params"])} for group in fresh.param_groups]
    if not isinstance(groups, list) or len(groups) != len(wanted):
        raise ValueError(f"param_groups: expected {len(wanted)}, got {str(groups)[:80]}")
    for group, like in zip(groups, wanted, strict=True):
        if not isinstance(group, dict) or not set(NEEDED) <= set(group) or len(group["params"]) != like["params"]:
            raise ValueError(f"param_groups: expected {', '.join(NEEDED)} of {like['params']} tensors")
    parameters = [p for group in fresh.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        moments = _dictionary(sums, number) if sums else {}
        for name in ("exp_avg", "exp_avg_sq") if sums else ():
            if not isinstance(moments.get(name), Tensor) or moments[name].shape != p.shape:
                raise ValueError(f"optimizer's {name} of tensor {number}: expected {tuple(p.shape)}")
