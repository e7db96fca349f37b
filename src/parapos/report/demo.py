"""The paper's claim in minutes on a CPU: small models, one per encoding, tested at up to four times their resolution.

Each model is a run of the recipe `demo` in OUT/runs, trained in a process of its own with one thread, as many at a time
as there are cores, two at most. Their progress is read from the files that every run writes, so a demo that was killed
goes on where it was. All models get the same number of epochs: those of the recipe, or fewer if this machine cannot do
them in the given time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..data import FormatError
from ..training import checkpoint, fit, recipe
from ..training.recipe import Recipe
from . import analysis, plots, sweep, workers
from .sweep import Cell, Cells, ReportError

ENCODINGS = ("pape", "rope", "alibi", "sincos")
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
SECONDS = 300.0  # for training and testing
MOST_IMAGES, LEAST_IMAGES = 2000, 10  # of a folder in all, and of each of its classes
SPLITS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}  # tenths
QUICK = {
    "optim.epochs": "1",
    "optim.batch": "256",
    "optim.part": "256",
    "model.options.dim": "32",
    "model.options.depth": "2",
    "model.options.mlp_dim": "32",
}
POLL = 0.25  # seconds


@dataclass(frozen=True)
class Result:
    """What came out: the sweep, the sentence that sums it up, and the files."""

    found: sweep.Sweep
    reading: str
    files: tuple[Path, ...]


def run(
    out: Path,
    *,
    data: Path | None = None,
    encodings: Sequence[str] = ENCODINGS,
    seconds: float = SECONDS,
    quick: bool = False,
) -> Result:
    """Trains, tests, draws. data: a folder with a folder of images per class; without it, scikit-learn's digits."""
    for place, name in enumerate(encodings):
        if name in encodings[:place]:
            raise ReportError(f"encodings: expected each once, got {name} twice")
    out.mkdir(parents=True, exist_ok=True)
    changes = dict(QUICK) if quick else {}
    if data is not None:
        changes["data.root"] = str(lay_out(data, out / "data", largest=int(32 * FACTORS[-1])))
    source = "demo" if data is None else "demo_images"
    first = recipe.load(source, {**changes, "model.encoding": encodings[0]})
    sizes = [int(first.data.size * factor) for factor in (FACTORS if not quick else FACTORS[:3:2])]
    jobs = [
        Job(name, out / "runs" / name, recipe.load(source, {**changes, "model.encoding": name})) for name in encodings
    ]
    epochs = _train_all(jobs, sizes, seconds, out / "log.txt")
    found = sweep.run([job.folder for job in jobs], sizes, interpolate="off")
    what = "handwritten digits" if data is None else _readable(data.resolve().name)
    title = f"Small ViTs trained on {what} at {first.data.size} px, tested far above"
    table = found.markdown()
    reading = read(found)
    files = [out / "extrapolation.png", out / "extrapolation.csv", out / "demo.md"]
    found.plot(files[0], title)
    checkpoint.write(files[1], found.csv().encode())
    about = f"{first.model.name}, {epochs} epochs of {what}; top-1 in % on the test images, positions not interpolated."
    checkpoint.write(files[2], f"{about}\n\n{table}\n\n{reading}\n".encode())
    if "pape" in encodings:
        files += _look_inside(out / "runs" / "pape", out, sizes)
    return Result(found, reading, tuple(files))


def read(found: sweep.Sweep) -> str:
    """One sentence on PaPE, or the first encoding, and its best rival at twice the resolution and at the largest."""
    ours = next((row for row in found.rows if row.encoding == "pape"), found.rows[0])
    others = [row for row in found.rows if row is not ours]
    double = min(found.sizes, key=lambda size: abs(size - 2 * found.trained))
    parts = []
    for size in dict.fromkeys((double, found.sizes[-1])):
        at = found.sizes.index(size)
        own = found.values(ours)[at] or 0.0
        told = f"at {size} px ({size / found.trained:g}x) {ours.name} gets {own:.1f}% right"
        if others:
            best = max(others, key=lambda row: found.values(row)[at] or 0.0)
            rival = found.values(best)[at] or 0.0
            how = "ahead of" if own > rival else "behind" if own < rival else "level with"
            gap = f"{abs(own - rival):.1f} points " if own != rival else ""
            told += f", {gap}{how} {'the next best, ' if own > rival else ''}{best.name} with {rival:.1f}%"
        parts.append(told)
    return f"Trained at {found.trained} px: {'; '.join(parts)}."


@dataclass(frozen=True)
class Job:
    encoding: str
    folder: Path
    wanted: Recipe


def _epochs(jobs: Sequence[Job], seconds: float, pool: ProcessPoolExecutor, workers: int) -> int:
    """Epochs that all models can do in the time, at most those of the recipe; those of a run that was begun."""
    for job in jobs:
        if (job.folder / "recipe.toml").is_file():
            return fit.load_run(job.folder).optim.epochs
    first = jobs[0].wanted
    if first.optim.epochs == 1:
        return 1
    began = time.monotonic()
    each = sum(pool.map(_seconds_per_image, [job.wanted for job in jobs]))  # with all processes at work
    seconds -= time.monotonic() - began
    images, tests = len(first.dataset("train")), len(first.dataset("test"))
    testing = 1.4 * each * tests * sum(factor**2 for factor in FACTORS) / workers  # attention outgrows the tokens
    possible = int((seconds - testing) / (1.15 * each * images / workers))  # reading and validation are the rest
    return max(1, min(first.optim.epochs, possible))


def _seconds_per_image(wanted: Recipe, steps: int = 5) -> float:
    """Of a training step in this process."""
    batch, size = wanted.optim.part or wanted.optim.batch, wanted.data.size
    model, images = wanted.model.build({"num_classes": 10}), torch.rand(batch, 3, size, size)
    labels = torch.zeros(batch, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / batch


def _train_all(jobs: Sequence[Job], sizes: Sequence[int], seconds: float, log: Path) -> int:
    """Runs all jobs in processes of their own, and shows how they get on. Gives the number of epochs."""
    for job in jobs:
        _check_same(job)
    if all(_tested(job, sizes) for job in jobs):
        return fit.load_run(jobs[0].folder).optim.epochs
    count = min(2, os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=workers.begin, initargs=(str(log), os.getpid())) as pool:
        try:
            epochs = _epochs(jobs, seconds, pool, count)
            jobs = [replace(job, wanted=_with_epochs(job.wanted, epochs)) for job in jobs]
            futures = {
                job.encoding: pool.submit(workers.work, job.wanted, job.folder, [Cell(size) for size in sizes])
                for job in jobs
            }
            _follow(jobs, sizes, futures)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # the processes got the signal too, and save
            raise
    for name, future in futures.items():
        if (wrong := future.result()) is not None:
            raise ReportError(f"{plots.NAMES[name]}: {wrong} (what it said is in {log})")
    return epochs


def _check_same(job: Job) -> None:
    """A folder may hold this run, with any number of epochs, and no other."""
    if not (job.folder / "recipe.toml").is_file():
        return
    held = fit.load_run(job.folder)
    change = recipe.difference(held, _with_epochs(job.wanted, held.optim.epochs))
    if change:
        raise ReportError(f"{job.folder}: holds a run of another demo ({change}); take another --out")


def _tested(job: Job, sizes: Sequence[int]) -> bool:
    """Whether nothing is left to do; cells come after the last epoch."""
    if not (job.folder / "weights.safetensors").is_file():
        return False
    cells = Cells(job.folder)
    return all(cells.get(Cell(size)) is not None for size in sizes)


def _with_epochs(wanted: Recipe, epochs: int) -> Recipe:
    return replace(wanted, optim=replace(wanted.optim, epochs=epochs))


@dataclass(frozen=True)
class State:
    """How far a job is: the share of its steps that is done, and a few words."""

    share: float
    told: str


def _state(job: Job, steps: int, sizes: Sequence[int], future: Future[Any]) -> State:
    step, accuracy = 0, ""
    for row in workers.read(job.folder / "metrics.csv"):
        step = row["step"]
        if "val_top1" in row:
            accuracy = f"validation {100 * row['val_top1']:.0f}%"
    tested = workers.read(job.folder / "cells.csv")
    if tested:
        accuracy = f"at {tested[-1]['size']} px {100 * tested[-1]['top1']:.0f}%"
    if future.done():
        accuracy = f"done, {accuracy}"
    elif step >= steps and len(tested) < len(sizes):
        accuracy = f"testing, {accuracy}"
    return State(0.9 * step / steps + 0.1 * len(tested) / len(sizes), accuracy)


def _follow(jobs: Sequence[Job], sizes: Sequence[int], futures: dict[str, Future[Any]]) -> None:
    """Shows progress until all are done: bars in a terminal, a line every ten seconds elsewhere."""
    plan = jobs[0].wanted
    steps = plan.optim.epochs * -(-len(plan.dataset("train")) // plan.optim.batch)
    show, close = _bars(jobs) if sys.stderr.isatty() else _lines(jobs)
    try:
        while True:
            over = all(future.done() for future in futures.values())
            show({job.encoding: _state(job, steps, sizes, futures[job.encoding]) for job in jobs}, over)
            if over or any(f.done() and (f.exception() or f.result()) for f in futures.values()):
                return
            time.sleep(POLL)
    finally:
        close()


Show = Callable[[dict[str, State], bool], None]


def _bars(jobs: Sequence[Job]) -> tuple[Show, Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.fields[name]:10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()]
    bars = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
    tasks = {job.encoding: bars.add_task("", total=1.0, name=plots.NAMES[job.encoding], start=False) for job in jobs}
    bars.start()

    def show(states: dict[str, State], over: bool) -> None:
        for name, state in states.items():
            if state.share and not bars.tasks[tasks[name]].started:
                bars.start_task(tasks[name])
            bars.update(tasks[name], completed=state.share, description=state.told)

    return show, bars.stop


def _lines(jobs: Sequence[Job]) -> tuple[Show, Callable[[], None]]:
    began, told = time.monotonic(), 0.0

    def show(states: dict[str, State], over: bool) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < 10 and not over:
            return
        told = now
        parts = [f"{plots.NAMES[name]} {state.share:.0%} {state.told}".rstrip() for name, state in states.items()]
        print(f"{now - began:4.0f} s  {' | '.join(parts)}", file=sys.stderr, flush=True)

    return show, lambda: None


def _look_inside(folder: Path, out: Path, sizes: Sequence[int]) -> list[Path]:
    """The heads of the PaPE model, and what one of them sees at the smallest and at the largest size."""
    model, _ = analysis.load(folder)
    wanted = fit.load_run(folder)
    small, large = sizes[0], sizes[-1]
    found = analysis.score_heads(model, wanted.dataset("test"), 64, batch=16)
    files = [out / "heads.png", out / "maps.png"]
    plots.heads(files[0], found.z, found.bounded, title="PaPE")
    layer, head = analysis.choose(found.bounded, None, None)
    rows = []
    for size in (small, large):
        image = wanted.dataset("test", size=size)[0]["image"]
        grid = size // getattr(model, "patch", 1)
        query = (max(1, grid * 3 // 8), max(1, grid * 5 // 8))
        rows.append(analysis.make_maps(model, image, layer=layer, head=head, query=query, name=f"{size} px"))
    plots.maps(files[1], rows, title=f"PaPE, layer {layer}, head {head}: the same model at two resolutions")
    return files


def lay_out(source: Path, folder: Path, *, largest: int) -> Path:
    """root/<split>/<class>/<image> from a folder of class folders, as small copies: seven tenths of a class in "train",
    one in "val", two in "test", by a hash of their names. A source that has these splits is used itself."""
    from ..data.images import list_folders, list_images

    if not source.is_dir():
        raise ReportError(f"{source}: no such folder, expected one with a folder of images for each class")
    names = list_folders(source)
    if set(SPLITS) <= set(names):
        return source.resolve()
    done = folder / "source.txt"
    if done.is_file():
        if (other := os.fsdecode(done.read_bytes())) != str(source.resolve()):
            raise ReportError(f"{folder}: made from {_readable(other)}; take another --out")
        return folder.resolve()
    files = {name: list_images(source / name) for name in names}
    few = [name for name in names if len(files[name]) < LEAST_IMAGES]
    if len(names) < 2 or few:
        told = f"{few[0]} has {len(files[few[0]])}" if few else f"got {len(names)} folders"
        raise ReportError(f"{source}: expected two or more folders of {LEAST_IMAGES} or more images, {told}")
    most = max(LEAST_IMAGES, MOST_IMAGES // len(names))
    for name in names:
        order = sorted(files[name], key=lambda file: hashlib.blake2b(os.fsencode(f"{name}/{file}")).digest())
        for number, file in enumerate(order[:most]):
            split = next(split for split, tenths in SPLITS.items() if number % 10 in tenths)
            _copy_small(source / name / file, folder / split / name / f"{number:05d}.png", int(largest / 0.875))
    checkpoint.write(done, os.fsencode(source.resolve()))
    return folder.resolve()


def _readable(name: str) -> str:
    """A file name as text; what is not UTF-8 in it is replaced."""
    return os.fsencode(name).decode(errors="replace")


def _copy_small(source: Path, path: Path, side: int) -> None:
    """A copy whose shorter side is at most `side`; an unreadable image is told and left out."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    from ..data.images import read_image
    from ..data.transforms import ResizeShorter

    try:
        image = read_image(source)
        image = ResizeShorter(side)(image) if min(image.shape[1:]) > side else image
    except FormatError as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    v2.functional.to_pil_image(image).save(path)
