"""The one scheduler of grids: trains and evaluates what is missing, in this process or in several of one thread each.

For small models, many processes of one thread are faster than many threads in one. What a process prints goes to a log
file; progress is read from the files that every run writes. A killed parent takes its processes along, which first save
what they have: run the same command again to resume.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .. import processes
from ..malloc import keep_memory
from ..training import fit, rows
from ..training.runs import FINISHED
from .grid import Job
from .store import Cells, ReportError, read, value_of

SAY = 10.0  # seconds
SAVE = 30.0  # seconds that training has to save when the parent is gone
TRAINING = 0.8  # share of training in the time of a run, to tell how far it is
Tell = Callable[[str], object]


def run_all(
    jobs: Sequence[Job],
    count: int,
    log: Path,
    tell: Tell,
    done: Callable[[], object],
    batch: int | None = None,
) -> None:
    """Trains and evaluates runs. count: of processes, 0 for this one. done: called here after every run.
    batch: samples at a time in evaluations of this process, instead of as many as the recipe's batch has tokens."""
    if not count or not jobs:
        for job in jobs:
            _do(job, tell, batch)
            done()
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with processes.pool(count, __name__, begin, str(log)) as pool:
        try:
            _follow({pool.submit(work, job): job for job in jobs}, log, tell, done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # at Ctrl-C the processes get the signal too, and save
            raise


def _do(job: Job, tell: Tell, batch: int | None = None) -> None:
    folder, wanted = job.run.folder, job.run.wanted
    if (state := job.run.state()) != FINISHED:
        tell(f"{folder}: {state}, training")
        tell(fit.train(wanted, folder))
    cells, headline = Cells(folder), job.run.metric()
    for evaluation, names in job.evaluations.items():
        is_kept = cells.get(evaluation) is not None
        metrics = cells.measure(evaluation, batch, wanted.data.root)
        for name in sorted(names):
            if value_of(metrics, name) is None:
                message = f"expected the metric {name}, {evaluation.data or wanted.data.name} does not report it"
                raise ReportError(f"{folder}: {evaluation.label}: {message}, or did not when the run was evaluated")
        value = metrics.get(headline.name)
        shown = "" if value is None else f": {headline.label} {value * headline.factor:.2f} {headline.unit}".rstrip()
        tell(f"{job.run.label or job.run.name}, {evaluation.label}{shown}{' (kept)' if is_kept else ''}")


def begin(log: str) -> None:
    """In a new process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    keep_memory()
    torch.set_num_threads(1)
    processes.end_with_parent(SAVE)


def work(job: Job) -> str | None:
    """Trains and evaluates a run. Gives what went wrong, in words, as not every exception survives the way back."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return "its parent process is gone"
    try:
        _do(job, lambda line: print(line, file=sys.stderr))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def progress(job: Job) -> tuple[float, str]:
    """How much of a run is done, from 0 to 1, and its last result in a few words."""
    path, headline = job.run.folder / "metrics.csv", job.run.metric()
    name = f"val_{headline.name}"
    message = rows.read(path, whole=["epoch"], needed=["epoch"], numbers=[name], growing=True)
    validated = [row for row in message if name in row]
    share = max((row["epoch"] for row in validated), default=0) / job.run.wanted.optim.epochs
    words = "" if not validated else f"validation {headline.label} {validated[-1][name] * headline.factor:.3g}"
    tested = len(read(job.run.folder / "cells.csv"))
    if tested:
        words = f"{tested} of {len(job.evaluations)} evaluations"
    training = 0.0 if job.run.given else TRAINING
    return training * share + (1 - training) * min(1.0, tested / max(1, len(job.evaluations))), words


@contextmanager
def board(tell: Tell) -> Iterator[tuple[Callable[[float, str], object], float]]:
    """How progress is shown, a bar in a terminal and lines elsewhere, and after how many seconds again."""
    if not sys.stderr.isatty():
        yield lambda share, text: tell(text), SAY
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    columns = (SpinnerColumn(), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=text), SAY / 10


def _follow(futures: dict[Future[Any], Job], log: Path, tell: Tell, done: Callable[[], object]) -> None:
    """Says how far they are and how long it may take, until all are done or one fails."""
    shares = {future: progress(job)[0] for future, job in futures.items()}
    begun, began = sum(shares.values()), time.monotonic()
    left = dict(futures)
    with board(tell) as (show, every):
        show(begun / len(futures), "starting processes; each loads PyTorch first, which takes some seconds")
        while left:
            for future in wait(left, every, FIRST_COMPLETED).done:
                job = left.pop(future)
                try:
                    wrong = future.result()
                except BrokenProcessPool:
                    wrong = 'its process died; if a script started it, call parapos under `if __name__ == "__main__":`'
                if wrong is not None:
                    raise ReportError(f"{job.run.folder}: {wrong} (what it said is in {log})")
                shares[future] = 1.0
                done()
            parts = []
            for future, job in left.items():
                if future.running():
                    shares[future], words = progress(job)
                    parts.append(f"{job.run.label or job.run.name} {shares[future]:.0%} {words}".rstrip())
            so_far = sum(shares.values())
            rate = (so_far - begun) / (time.monotonic() - began)
            if not rate and every < SAY:
                continue  # the processes are still starting, as the bar says
            time_left = str(timedelta(seconds=round((len(futures) - so_far) / rate))) if rate else "?"
            runs = f"{len(futures) - len(left)} of {len(futures)} runs done"
            show(so_far / len(futures), " | ".join([f"{runs}, {so_far / len(futures):.0%}, left {time_left}", *parts]))
