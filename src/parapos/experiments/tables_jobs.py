"""Many runs in a few processes of one thread each, which for small models is faster than many threads in one.

Progress is read from the files that every run writes. After a stop the same command goes on with the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..training import rows
from . import workers
from .sweep import ReportError
from .tables import Run

POLL, SAY = 0.5, 20.0  # seconds
TRAINING = 0.6  # share of training in the time of a run, to tell how far it is


def run_all(
    runs: Sequence[Run], jobs: int, log: Path, tell: Callable[[str], object], done: Callable[[Run], object]
) -> None:
    """Trains and evaluates runs, `jobs` at a time. done: hears of every run that is finished, in the parent."""
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=workers.begin, initargs=(str(log), os.getpid())) as pool:
        try:
            _follow(
                {pool.submit(workers.work, run.wanted, run.folder, list(run.cells.values())): run for run in runs},
                log,
                tell,
                done,
            )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _share(run: Run) -> float:
    """How much of a run is done, from 0 to 1."""
    path = run.folder / "metrics.csv"
    told = rows.read(path, whole=["epoch"], needed=["epoch"], numbers=["val_top1"], growing=True)
    epochs = [row["epoch"] for row in told if "val_top1" in row]
    tested = len(workers.read(run.folder / "cells.csv"))
    trained = max(epochs, default=0) / run.wanted.optim.epochs
    return TRAINING * trained + (1 - TRAINING) * min(1.0, tested / max(1, len(set(run.cells.values()))))


def _follow(
    futures: dict[Future[Any], Run], log: Path, tell: Callable[[str], object], done: Callable[[Run], object]
) -> None:
    """Says how far they are and how long it may take, until all are done or one fails."""
    shares = {future: _share(run) for future, run in futures.items()}
    begun, began, told = sum(shares.values()), time.monotonic(), 0.0
    open_ones = dict(futures)
    while open_ones:
        time.sleep(POLL)
        ended = [future for future in open_ones if future.done()]
        for future in ended:
            run = open_ones.pop(future)
            if (wrong := future.result()) is not None:
                raise ReportError(f"{run.folder}: {wrong} (what it said is in {log})")
            shares[future] = 1.0
            done(run)
        now = time.monotonic()
        if not ended and now - told < SAY:
            continue
        told = now
        shares.update({future: _share(run) for future, run in open_ones.items() if future.running()})
        so_far = sum(shares.values())
        left = (now - began) / (so_far - begun) * (len(futures) - so_far) if so_far > begun else None
        time_left = "?" if left is None else str(timedelta(seconds=round(left)))
        done_now = len(futures) - len(open_ones)
        tell(f"{done_now} of {len(futures)} runs done, {so_far / len(futures):.0%}, left {time_left}")
