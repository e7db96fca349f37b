"""The study of sparse attention as tables and a plot, from its numbers alone. What was not measured says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import linear_regression

from .. import text
from ..analysis.tiles import DEFAULT
from ..canvas import save, subplots
from ..encodings.looks import LOOKS
from .sparse import FACTORS, TOLERANCES, Key, Numbers

UNMEASURED = "-"


def _models(numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Data and encoding of each model, in the order of the numbers."""
    yield from dict.fromkeys((data, encoding) for data, encoding, _ in numbers.values)


def _name(encoding: str) -> str:
    return LOOKS[encoding][0]


def _get(numbers: Numbers, key: Key, quantity: str) -> float | None:
    return numbers.values.get(key, {}).get(quantity)


def mean_share(numbers: Numbers, key: Key, tolerance: float = DEFAULT) -> float | None:
    """The share of tiles that a model needs, mean of its layers."""
    values = numbers.values.get(key, {})
    layers = [value for name, value in values.items() if name.startswith("share") and name.endswith(f" {tolerance:g}")]
    return sum(layers) / len(layers) if layers else None


def ratio(over: str, under: str) -> Callable[[Numbers, Key], float | None]:
    def value(numbers: Numbers, key: Key) -> float | None:
        a, b = _get(numbers, key, over), _get(numbers, key, under)
        return a / b if a is not None and b else None

    return value


def exponent(numbers: Numbers, data: str, encoding: str, quantity: str) -> float | None:
    """The power of the number of tokens by which seconds grow, fitted on the factors that were timed."""
    keys = [(data, encoding, factor) for factor in FACTORS]
    found = [(_get(numbers, key, "tokens"), _get(numbers, key, quantity)) for key in keys]
    points = [(math.log(n), math.log(t)) for n, t in found if n and t]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def _cell(value: float | None, form: str) -> str:
    return UNMEASURED if value is None else format(value, form)


def _by_factor(
    numbers: Numbers, factors: Sequence[int], form: str, value: Callable[[Numbers, Key], float | None]
) -> str:
    rows = [
        [data, _name(encoding), *(_cell(value(numbers, (data, encoding, f)), form) for f in factors)]
        for data, encoding in _models(numbers)
    ]
    return text.table(["data", "encoding", *(f"{f}x" for f in factors)], rows, left=2)


def _layers(numbers: Numbers) -> str:
    depth = max((int(q.split()[1]) for v in numbers.values.values() for q in v if q.startswith("share")), default=0)
    names = [f"share {layer} at {DEFAULT:g}" for layer in range(1, depth + 1)]
    rows = [
        [data, _name(encoding), *(_cell(_get(numbers, (data, encoding, FACTORS[-1]), name), ".0%") for name in names)]
        for data, encoding in _models(numbers)
    ]
    return text.table(["data", "encoding", *(f"layer {layer}" for layer in range(1, depth + 1))], rows, left=2)


def _predictions(numbers: Numbers) -> str:
    counted = ["tokens", "samples", "skipping", "right", "right dense", "close", "changed"]
    rows = []
    for (data, encoding, factor), values in numbers.values.items():
        if "samples" in values:
            counts = [f"{values[q]:.0f}" for q in counted]
            rows.append([data, _name(encoding), f"{factor}x", *counts, f"{values['logits apart']:.1e}"])
    return text.table(["data", "encoding", "size", *counted, "logits"], rows, left=3)


def _growth(numbers: Numbers) -> str:
    rows = [
        [data, _name(encoding)]
        + [_cell(exponent(numbers, data, encoding, f"{case} seconds"), ".2f") for case in ("plain", "sparse")]
        for data, encoding in _models(numbers)
    ]
    return text.table(["data", "encoding", "plain", "parapos"], rows, left=2)


def _tolerance(numbers: Numbers) -> str:
    rows = [
        [data, _name(encoding)]
        + [_cell(mean_share(numbers, (data, encoding, FACTORS[-1]), t), ".1%") for t in TOLERANCES]
        for data, encoding in _models(numbers)
    ]
    return text.table(["data", "encoding", *(f"{t:g}" for t in TOLERANCES)], rows, left=2)


def tables(numbers: Numbers) -> dict[str, str]:
    """The tables of the study by their titles, without those of which nothing was measured."""
    large = [factor for factor in FACTORS if factor >= 4]
    every = {
        "Share of pairs of tiles that is needed, mean of the layers": _by_factor(numbers, FACTORS, ".0%", mean_share),
        "The same at 16x, layer by layer": _layers(numbers),
        "Time of all layers, as a ratio to plain attention": _by_factor(
            numbers, large, ".2f", lambda n, key: _get(n, key, "ratio")
        ),
        "The same with every tile": _by_factor(numbers, large, ".2f", lambda n, key: _get(n, key, "dense ratio")),
        "Time of a whole model, as a ratio to the model without an encoding": _by_factor(
            numbers, large, ".2f", lambda n, key: _get(n, key, "model ratio")
        ),
        "Peak memory of the last layer, as a ratio to plain attention": _by_factor(
            numbers, large[1:], ".2f", ratio("sparse bytes", "plain bytes")
        ),
        "Power of the number of tokens by which time grows, 4x to 16x": _growth(numbers),
        "Predictions": _predictions(numbers),
        "Share that is needed at 16x, by tolerance": _tolerance(numbers),
    }
    return {title: table for title, table in every.items() if any(map(_is_told, table.splitlines()[2:]))}


def _is_told(line: str) -> bool:
    """Whether a line of a table has more than a model's name."""
    return any(cell.strip() != UNMEASURED for cell in line.split("|")[3:-1])


def markdown(numbers: Numbers) -> str:
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in tables(numbers).items())


def plot(numbers: Numbers, folder: Path) -> list[Path]:
    """Shares, and times as ratios to plain attention, over the number of tokens: a column per data set."""
    models = list(_models(numbers))
    names = list(dict.fromkeys(data for data, _ in models))
    panels: list[tuple[str, Callable[[Numbers, Key], float | None]]] = [
        ("share of tiles needed", mean_share),
        ("time / plain attention", lambda n, key: _get(n, key, "ratio")),
    ]
    panels = [panel for panel in panels if any(panel[1](numbers, key) is not None for key in numbers.values)]
    size = (3.1 * len(names) + 0.6, 2.8 * len(panels))
    figure, axes = subplots(len(panels), len(names), size=size, squeeze=False)
    for column, data in enumerate(names):
        for row, (title, value) in enumerate(panels):
            axis = axes[row, column]
            for encoding in (e for d, e in models if d == data):
                keys = [(data, encoding, f) for f in FACTORS]
                points = [(numbers.values[k]["tokens"], v) for k in keys if (v := value(numbers, k)) is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=LOOKS[encoding][1], label=_name(encoding))
            axis.set(xscale="log", ylim=(0, None))
            axis.xaxis.minorticks_off()
            axis.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
            if not row:
                axis.set_title(data.replace("_", "-"), fontsize=10)
            if not column:
                axis.set_ylabel(title)
            axis.set_xlabel("tokens" if row == len(panels) - 1 else "")
    axes[0, 0].legend(frameon=False, fontsize=8)
    path = folder / "sparse.png"
    save(figure, path)
    return [path]
