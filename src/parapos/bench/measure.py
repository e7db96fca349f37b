"""How the benchmarks measure: seconds of calls in turn, peak memory in a fresh process, the machine, and what they
write."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from .. import plugins, processes
from ..canvas import save, subplots
from ..machine import cpu_name
from ..malloc import release_memory

P = ParamSpec("P")
T = TypeVar("T")
SMOKE = "a smoke test, not a result"  # what --quick measures


def progress(message: str) -> None:
    """One line for the user; results go to stdout, this does not."""
    print(message, file=sys.stderr, flush=True)


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    return processor_time(call, time.perf_counter)


def processor_time(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds that processors spend on one call in this process. Other work on the machine disturbs it less."""
    before = clock()
    call()
    return clock() - before


def shares(things: Sequence[T], seconds: float) -> Iterator[tuple[T, float]]:
    """Each thing with its equal share of the seconds that are left for it and those after it."""
    start = time.perf_counter()
    for index, thing in enumerate(things):
        yield thing, (seconds - (time.perf_counter() - start)) / (len(things) - index)


def rounds(seconds: float, bounds: tuple[int, int]) -> Iterator[int]:
    """Counts rounds from 0 until `seconds` are over. bounds: the least and the most rounds."""
    start = time.perf_counter()
    for done in range(bounds[1]):
        if done >= bounds[0] and time.perf_counter() - start > seconds:
            return
        yield done


def rotated(things: Iterable[T], by: int) -> list[T]:
    """Starts with another thing in each round, so that none always follows the same one."""
    order = list(things)
    turn = by % len(order)
    return order[turn:] + order[:turn]


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    clock: Callable[[Callable[[], object]], float],
    seconds: float,
    bounds: tuple[int, int],
) -> dict[str, list[float]]:
    """What the clock says per case and round, the cases in turn; rounds as in `rounds`."""
    times: dict[str, list[float]] = {case: [] for case in calls}
    for done in rounds(seconds, bounds):
        for case in rotated(calls, done):
            times[case].append(clock(calls[case]))
    return times


def spread(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios of values to base, both taken round by round."""
    ratios = [x / y for x, y in zip(values, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": middle, "quartiles": [low, high], "rounds": len(ratios)}


def _resident(peak: bool) -> int:
    """Bytes this process holds in memory, now or at most so far."""
    try:
        if not peak:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
        return int(status.split()[0]) * 1024
    except (OSError, IndexError):
        import resource  # not on Windows

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024


def peak_memory(prepare: Callable[[], Callable[[], object]], device: str) -> int:
    """Peak bytes while the prepared call runs, above what the process held before `prepare`. For a fresh process."""
    gc.collect()
    release_memory()  # or the call would use, unseen, what a warm-up left
    before = torch.cuda.memory_allocated() if device == "cuda" else _resident(peak=False)
    call = prepare()
    gc.collect()
    release_memory()  # what was made on the way to the call and dropped is not of it
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    result = call()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _resident(peak=True)
    del result
    return peak - before


def _begin(threads: int, modules: Sequence[str]) -> None:
    """Makes a new process as the one that started it."""
    torch.set_num_threads(threads)
    plugins.load(modules)


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The function's result from a process of its own; None, with a message, if memory did not suffice there."""
    try:
        with processes.pool(1, function.__module__, _begin, torch.get_num_threads(), plugins.given) as pool:
            return pool.submit(function, *args, **kwargs).result()
    except (BrokenProcessPool, RuntimeError, MemoryError) as error:
        short = isinstance(error, BrokenProcessPool | MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
        if not short:
            raise
        progress(f"failed: {', '.join(map(str, args))}: {error}")
        return None


def machine(device: str, *, quick: bool = False) -> dict[str, Any]:
    """Where results come from, and whether they are none: those of --quick."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **({"quick": SMOKE} if quick else {}),
    }


def where(results: Mapping[str, Any]) -> str:
    """The machine of the results in words."""
    return f"{results['machine']}, {results['device']}, threads: {results['threads']}, torch {results['torch']}"


def warning(results: Mapping[str, Any]) -> list[str]:
    """What must stand above the results of --quick."""
    return [f"{results['quick'].upper()} (--quick)"] if "quick" in results else []


def show_ratio(entry: Mapping[str, Any]) -> str:
    """Median ratio, quartiles and rounds of an entry that `spread` made."""
    low, high = entry["quartiles"]
    return f"{entry['ratio']:.2f}x ({low:.2f} to {high:.2f}; {entry['rounds']})"


def commit() -> str | None:
    """The commit this code is at, with "-dirty" after changes; None where it is not a git checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "flops.py")  # a site-packages folder may lie in some other checkout
        return git("describe", "--always", "--dirty", "--exclude", "*")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(
    results: dict[str, Any], markdown: str, plot: Callable[[dict[str, Any], Path], None] | None, prefix: Path
) -> list[Path]:
    """PREFIX.json, PREFIX.md and, with something to plot and matplotlib, PREFIX.png. Returns what was written."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = [prefix.with_name(prefix.name + end) for end in (".json", ".md", ".png")]
    paths[0].write_text(json.dumps(results, indent=1) + "\n")
    paths[1].write_text(markdown + "\n")
    paths[2].unlink(missing_ok=True)  # a plot of earlier results
    try:
        if plot is not None:
            plot(results, paths[2])
    except ModuleNotFoundError as error:
        progress(f"no plot: {error.name} is missing, install parapos[report]")
    return [path for path in paths if path.exists()]


class Panel(NamedTuple):
    """Curves by name: points (x, y), where x is a number or a name."""

    title: str
    ylabel: str
    curves: Mapping[str, Sequence[tuple[Any, float]]]


def draw(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Rows of panels with logarithmic axes and one legend for all. Neighbouring curves share a hue, dark and light.

    Columns of panels without a number are left out; if that leaves none, nothing is written.
    """
    from matplotlib import colormaps

    measured = (c for c in zip(*rows, strict=True) if any(y == y for p in c for xs in p.curves.values() for _, y in xs))
    if not (rows := list(zip(*measured, strict=True))):
        return
    figure, axes = subplots(len(rows), len(rows[0]), size=(5.2 * len(rows[0]), 3.9 * len(rows)), squeeze=False)
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.curves))
    inks = colormaps["tab20"]
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        xs: list[Any] = list(dict.fromkeys(x for points in panel.curves.values() for x, _ in points))
        numbers = all(not isinstance(x, str) for x in xs)
        for name, points in ((name, points) for name, points in panel.curves.items() if points):
            ink, line = inks(names.index(name) % inks.N), "o-" if numbers else "o"
            at = [x if numbers else xs.index(x) for x, _ in points]
            axis.plot(at, [y for _, y in points], line, color=ink, markersize=4, label=name)
        axis.set(title=panel.title, ylabel=panel.ylabel, yscale="log", xscale="log" if numbers else "linear")
        axis.set_xticks(xs if numbers else range(len(xs)), [str(x) for x in xs], rotation=0 if numbers else 60)
        axis.xaxis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.grid(alpha=0.3, which="both", axis="y")
    handles = {handle.get_label(): handle for axis in axes.flat for handle in axis.lines}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
