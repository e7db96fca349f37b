"""Events per second of the Spiking Patches tokenizer, on one core.

The same generated streams go through the compiled loop, the array operations and, a short piece of them, the plain
Python reference; input checks and codes are part of the time. The cases take turns in every round. What counts is the
time of the processor, not of the clock, so other work on the machine disturbs it less; no case uses a second core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .. import text
from ..data.events import Events
from ..tokenizers.spiking_patches import Tokens, reference, tokenize
from . import measure

EVENTS = 500_000
PYTHON_EVENTS = 100_000  # the reference's share
SENSORS = {"DvsGesture": (128, 128), "GEN1": (304, 240)}  # width, height
KINDS = ("uniform", "clustered")
ROUNDS = (3, 200)  # least and most per stream
SECONDS = 60.0
NUMBA, NUMPY, PYTHON = "numba", "NumPy", "Python"

Call = Callable[[], Tokens]


@dataclass(frozen=True)
class Stream:
    """A generated stream. uniform: noise all over the sensor. clustered: nine tenths of it in eight moving blobs."""

    kind: str
    sensor: str
    events: int
    seconds: float = 5.0  # that the events last; then few fall into refractory periods

    def make(self, seed: int = 0) -> Events:
        rng = np.random.default_rng(seed)
        width, height = SENSORS[self.sensor]
        t = np.sort(rng.integers(0, round(self.seconds * 1e6), self.events))
        x, y = rng.uniform(0, width, self.events), rng.uniform(0, height, self.events)
        if self.kind == "clustered":
            blob = rng.integers(0, 8, self.events)
            angle = 2 * np.pi * (t / (self.seconds * 1e6) + blob / 8)
            moving = rng.random(self.events) < 0.9
            noise = rng.normal(0, width / 60, (2, self.events))
            x[moving] = (width * (0.5 + 0.3 * np.cos(angle)) + noise[0])[moving]
            y[moving] = (height * (0.5 + 0.3 * np.sin(angle)) + noise[1])[moving]
        x, y = np.clip(x, 0, width - 1).astype(np.int64), np.clip(y, 0, height - 1).astype(np.int64)
        return Events.of(t, x, y, rng.integers(0, 2, self.events))


def calls(stream: Stream) -> dict[str, tuple[Call, int]]:
    """What is timed, and how many events it takes."""
    width, height = SENSORS[stream.sensor]
    events = stream.make()

    def call(function: Callable[..., Tokens], count: int, **options: Any) -> tuple[Call, int]:
        part = events.select(slice(count))
        fields = (part.t, part.x, part.y, part.polarity)
        return lambda: function(*fields, height=height, width=width, **options), len(part)

    return {
        NUMBA: call(tokenize, stream.events),
        NUMPY: call(tokenize, stream.events, backend="numpy"),
        PYTHON: call(reference, PYTHON_EVENTS),
    }


def run(*, seconds: float = SECONDS, events: int = EVENTS, quick: bool = False) -> dict[str, Any]:
    """Measure every stream for its share of `seconds`, at least three rounds. quick: few events, three rounds."""
    events = min(events, PYTHON_EVENTS) if quick else events
    streams = [Stream(kind, sensor, events) for sensor in SENSORS for kind in KINDS]
    rows = []
    for stream, share in measure.shares(streams, seconds):
        cases = calls(stream)
        tokens = {name: len(call()) for name, (call, _) in cases.items()}  # also compiles
        bounds = (ROUNDS[0], ROUNDS[0]) if quick else ROUNDS
        timed = {name: call for name, (call, _) in cases.items()}
        times = measure.in_turn(timed, measure.processor_time, share, bounds)
        measure.progress(f"{stream.kind}, {stream.sensor}: {len(times[NUMBA])} rounds")
        for name, (_, count) in cases.items():
            rate = measure.spread([count] * len(times[name]), times[name])
            what = {**asdict(stream), "case": name, "events": count, "tokens": tokens[name]}
            rows.append({**what, "events_per_second": rate.pop("ratio"), **rate})
    versions = {"numba": metadata.version("numba"), "numpy": np.__version__}
    return {**measure.machine("cpu", quick=quick), "threads": 1, **versions, "speed": rows}


def markdown(results: dict[str, Any]) -> str:
    """The results as text: million events per second with the quartiles of the rounds."""
    where = f"{results['machine']}, one core, numba {results['numba']}, NumPy {results['numpy']}"
    parts = [
        *measure.warning(results),
        f"Spiking Patches on {where}.",
        "Million events per second of processor time, events to codes with all checks: median (quartiles; rounds).",
    ]
    fewer = next(x["events"] for x in results["speed"] if x["case"] == PYTHON)
    header = ["stream", "sensor", "events", "tokens", NUMBA, NUMPY, f"{PYTHON}, {fewer} events"]
    rows = []
    for kind, sensor in dict.fromkeys((x["kind"], x["sensor"]) for x in results["speed"]):
        entries = {x["case"]: x for x in results["speed"] if (x["kind"], x["sensor"]) == (kind, sensor)}
        size = " x ".join(map(str, SENSORS[sensor]))
        whole = entries[NUMBA]
        cells = [_cell(entries[name]) for name in (NUMBA, NUMPY, PYTHON)]
        rows.append([kind, f"{sensor}, {size}", str(whole["events"]), str(whole["tokens"]), *cells])
    return "\n\n".join([*parts, text.table(header, rows, left=2)])


def _cell(entry: dict[str, Any]) -> str:
    low, high = (f"{x / 1e6:.3g}" for x in entry["quartiles"])
    return f"{entry['events_per_second'] / 1e6:.3g} ({low}-{high}; {entry['rounds']})"


def plot(results: dict[str, Any], path: Path) -> None:
    """Events per second by stream, for each case."""
    points: dict[str, list[tuple[str, float]]] = {NUMBA: [], NUMPY: [], PYTHON: []}
    for x in results["speed"]:
        points[x["case"]].append((f"{x['kind']}\n{x['sensor']}", x["events_per_second"] / 1e6))
    title = [*measure.warning(results), f"Spiking Patches, {results['machine']}, one core"]
    measure.draw(path, [[measure.Panel("", "million events per second", points)]], ". ".join(title))
