"""Processes of one thread that train and test runs, and what their files tell meanwhile.

What a process prints goes to a log file. A killed parent takes its processes along, which first save what they have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..malloc import keep_memory
from ..training import fit, rows
from ..training.recipe import Recipe
from .sweep import Cell, Cells

NUMBERS = ("train_loss", "val_loss", "val_top1", "top1")
SAVE = 30.0  # seconds that training has to save when the parent is gone


def begin(log: str, parent: int) -> None:
    """In a new process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    keep_memory()
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # training saves, and the process may then wait for work for ever
        time.sleep(SAVE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(wanted: Recipe, folder: Path, cells: Iterable[Cell]) -> str | None:
    """Trains and tests a run. Gives what went wrong, in words, as not every exception survives the way back."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return "nobody waits for it"
    print(f"{wanted.model.encoding}: {folder}", file=sys.stderr)
    try:
        fit.train(wanted, folder)
        found = Cells(folder)
        for cell in cells:
            found.measure(cell, root=wanted.data.root)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def read(path: Path) -> list[dict[str, Any]]:
    """The metrics or the cells of a run, whose file may be being written; none if it is not there."""
    return rows.read(path, whole=("step", "epoch", "size"), numbers=NUMBERS, growing=True)
