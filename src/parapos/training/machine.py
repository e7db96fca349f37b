"""The machine that a run is on: the Trainer for its devices, its signals and warnings, and its errors in one line."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy

from ..blocks import Block
from . import checkpoint
from .loading import WorkerLost
from .recipe import RecipeError
from .schema import Run


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return getattr(rank_zero_only, "rank", 0) == 0


def as_possible(run: Run) -> Run:
    """For evaluation where there is no GPU: on the CPU, in float32 instead of float16, and saying so."""
    if torch.cuda.is_available() or not (
        run.precision == "16-mixed" or run.accelerator == "gpu" or run.strategy == "fsdp"
    ):
        return run
    precision = "32-true" if run.precision == "16-mixed" else run.precision
    if is_first():
        print(f"no GPU here: evaluating on the CPU in {precision}", file=sys.stderr)
    return dataclasses.replace(run, accelerator="cpu", devices=1, nodes=1, strategy="auto", precision=precision)


def make_trainer(run: Run, **options: Any) -> Trainer:
    cuda = run.accelerator != "cpu" and torch.cuda.is_available()
    for key, value, needs in (("precision", run.precision, "16-mixed"), ("strategy", run.strategy, "fsdp")):
        if value == needs and not cuda:
            raise RecipeError(f"run.{key}: {value} needs a GPU, but no GPU is available")
    if run.accelerator == "gpu" and not cuda:
        raise RecipeError("run.accelerator: gpu, but no GPU is available")
    devices, nodes = _places(run, cuda)
    return Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=_strategy(run, devices * nodes),
        precision=run.precision,  # type: ignore[arg-type]
        plugins=[checkpoint.SafeIO(), *([SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else [])],
        deterministic=run.deterministic or not cuda,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        max_epochs=1,
        num_sanity_val_steps=0,
        **options,
    )


def _places(run: Run, cuda: bool) -> tuple[int, int]:
    """Devices per node and nodes; what started this process has the last word."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    return run.devices or (torch.cuda.device_count() if cuda else 1), run.nodes


def _strategy(run: Run, world: int) -> Strategy | str:
    if run.strategy == "fsdp":
        return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")
    if run.strategy == "ddp" or world > 1:
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return "auto"


@contextmanager
def own_signals() -> Iterator[None]:
    """Afterwards signals do what they did before. Lightning's handlers outlive its loop, and would swallow SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet(run: Run) -> Iterator[None]:
    """Silences what Lightning says about choices that are made here, and undoes what it sets for the whole process."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    threads = torch.get_num_threads()
    torch.set_num_threads(run.threads or threads)
    settings: Any = torch.utils.deterministic
    held = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*(does not have many workers|sync_dist|isinstance.treespec).*")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        torch.use_deterministic_algorithms(held[0])
        settings.fill_uninitialized_memory = held[1]
        torch.set_num_threads(threads)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors of the machine that torch tells in many lines, as an OSError with one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "tried to allocate" in text.lower():
            need = re.search(r"allocate ([\d.]+ ?\w+)", text)
            reason = f"could not allocate {need[1]}" if need else "out of memory"
            raise OSError(f"{reason}; a smaller optim.part, data.eval_batch, data.size or model needs less") from None
        if text.startswith("DataLoader worker (pid"):
            raise WorkerLost from None
        raise
