"""The one renderer of grids: Markdown, CSV and plots of whatever is there."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..encodings.looks import LOOKS, label
from ..metrics import significance
from ..text import table as as_text
from ..training import checkpoint, rows
from . import plots
from .grid import TRAINING_LOSS, Grid, Place, Results
from .tables_spec import Column

UNMEASURED = "-"
BEYOND = "beyond"
COLUMNS = ("block", "row", "column", "metric", "unit", "mean", "std", "repeats", "paper")  # of CSV files
INKS = (
    *("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB"),
    *("#000000", "#994F00", "#40B0A6", "#5D3A9B", "#FF9F40", "#7F7F00"),
)


class Group(NamedTuple):
    """Columns that are shown together, and those of them beyond the trained size. suffix: of file names."""

    caption: str
    columns: dict[str, Column]
    beyond: tuple[str, ...] = ()
    suffix: str = ""


def groups(grid: Grid) -> list[Group]:
    """Positions as they are, and interpolated, if a study over seeds has both; the trained size belongs to both."""
    columns = grid.table.columns
    if not grid.table.seeds:
        return [Group("all", columns)]
    trained = min((column.size for column in columns.values() if column.size), default=0)
    plain = {name: c for name, c in columns.items() if c.interpolate is False}
    other = {name: c for name, c in columns.items() if c.size == trained or name not in plain}
    kinds = [("positions as they are", plain, ""), ("positions interpolated", other, "-interpolated")]
    return [
        Group(caption, shown, tuple(name for name, c in shown.items() if c.size > trained), suffix)
        for caption, shown, suffix in (kinds if len(plain) < len(columns) else kinds[:1])
    ]


def spread(values: Sequence[float], repeats: int, digits: int = 1) -> str:
    """Mean and sample standard deviation; how many repeats if not all."""
    if not values:
        return UNMEASURED
    message = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        message += f" ± {statistics.stdev(values):.{digits}f}"
    return message if len(values) == repeats else f"{message} ({len(values)} of {repeats})"


def cell(grid: Grid, results: Results, place: Place) -> str:
    """What the table shows for a place."""
    _, row, column = place
    values, metric, repeats = grid.values(results, place), grid.metric(place), grid.places.get(place, ())
    message = spread(values, len(repeats), 1 if metric is None or metric.factor == 100 else 2)
    if values and grid.table.columns[column].count and metric is not None:
        samples = grid.values(results, place, "samples")
        right = sum(value / metric.factor * count for value, count in zip(values, samples, strict=True))
        message += f" = {round(right)}/{round(sum(samples))}"
    if not grid.table.paper:
        return message
    figure = grid.table.published(row, column)
    return f"{message} ({UNMEASURED if figure is None else f'{figure:.1f}'})"


def markdown(grid: Grid, results: Results) -> str:
    """A table for each block and group of columns, a legend, tests that the table asks for, and sentences on it."""
    parts, table = [f"{grid.table.title}."], grid.table
    for block in grid.blocks:
        for group in groups(grid):
            lines = []
            for row in grid.rows:
                shown = [row, *(cell(grid, results, (block, row, name)) for name in group.columns)]
                if len(group.beyond) > 1:
                    shown.append(spread(grid.beyond(results, block, row, group.beyond), len(table.seeds)))
                lines.append(shown)
            header = ["", *(name.removesuffix(" interpolated") for name in group.columns)]
            header += [BEYOND] if len(group.beyond) > 1 else []
            caption = f"{group.caption.capitalize()}, {block}:\n\n" if block else ""
            parts.append(f"{caption}{as_text(header, lines)}")
    return "\n\n".join([*parts, _legend(grid, results), *comparison(grid, results), *reading(grid, results)])


def _legend(grid: Grid, results: Results) -> str:
    """What the numbers are, and of how many runs and samples."""
    table, seeds = grid.table, grid.table.seeds
    metrics = dict.fromkeys(repeats[0].metric for repeats in grid.places.values())
    shown = [metric for metric in metrics if metric is not None and metric != TRAINING_LOSS]
    names = [f"{metric.label} in {metric.unit}" if metric.unit else metric.label for metric in shown]
    message = [", ".join([*dict.fromkeys(names)] if len(names) < 4 else sorted({f"in {m.unit}" for m in shown}))]
    if seeds:
        one = f"one run with seed {seeds[0]}"
        many = f"mean ± sample standard deviation of {len(seeds)} runs with seeds {_list(seeds)}"
        message[0] += f", {many if len(seeds) > 1 else one}"
    elif any(len(repeats) > 1 for repeats in grid.places.values()):
        message[0] += ", mean ± sample standard deviation over folds where there are several"
    if table.paper:
        message[0] += ", the paper's figure in parentheses"
    for block in grid.blocks if seeds else ():
        counts = {int(n) for place in grid.places if place[0] == block for n in grid.values(results, place, "samples")}
        if counts:
            message.append(f"{_list(sorted(counts))} samples of {block}")
    lines = [f"{'; '.join(message)}."]
    if any(len(group.beyond) > 1 for group in groups(grid)):
        lines.append(f"{BEYOND}: mean over all sizes above that of training.")
    if grid.has_curves:
        lines.append("Losses are of training, as means over the steps since the last one that was written.")
    lines.append(f"{UNMEASURED}: not measured.")
    if not seeds:
        places = [(block, row, name) for block in grid.blocks for row in grid.rows for name in table.columns]
        lines.append(f"Measured: {sum(grid.is_whole(results, place) for place in places)} of {len(places)}.")
    text = " ".join(lines)
    return text if text[1:2].isupper() else text[0].upper() + text[1:]  # mAP stays as it is


def _list(things: Sequence[object]) -> str:
    words = list(map(str, things))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def comparison(grid: Grid, results: Results) -> list[str]:
    """The tests of [compare], on the paper's figures and on ours as far as there are any."""
    if grid.table.compare is None:
        return []
    rows, columns = grid.table.compare.rows, grid.table.compare.columns
    ours = [[v for c in columns for v in grid.values(results, ("", row, c))] for row in rows]
    theirs = [[v for c in columns if (v := grid.table.published(row, c)) is not None] for row in rows]
    names = (label(rows[0]), label(rows[1]))
    return [
        f"{whose}, over {', '.join(columns)}:\n\n{significance.table(a, b, names)}"
        for whose, (a, b) in (("Paper", theirs), ("Ours", ours))
        if len(a) == len(b) == len(columns)
    ]


def reading(grid: Grid, results: Results) -> list[str]:
    """Which row is chosen, if the table asks that. For each block and group of a study: what holds up best beyond the
    trained size, by how much, how surely."""
    lines, seeds, choose = [], len(grid.table.seeds), grid.table.choose
    for block in grid.blocks if choose else ():
        means = {row: statistics.fmean(v) for row in grid.rows if (v := grid.values(results, (block, row, choose)))}
        metric = grid.metric((block, grid.rows[0], choose))
        if means and metric is not None:
            best = (max if metric.higher_is_better else min)(means, key=lambda row: means[row])
            lines.append(f"- Best by {choose}, of {len(means)} of {len(grid.rows)} rows: {best}.")
    for block in grid.blocks if seeds > 1 else ():
        for group in groups(grid):
            values = {row: grid.beyond(results, block, row, group.beyond) for row in grid.rows}
            whole = [row for row in grid.rows if len(values[row]) == seeds]
            if len(whole) < 2 or len(group.beyond) < 2:
                continue
            metric = grid.metric((block, whole[0], group.beyond[0]))
            sign = -1 if metric is None or metric.higher_is_better else 1
            first, second = sorted(whole, key=lambda row: sign * statistics.fmean(values[row]))[:2]
            gap = abs(statistics.fmean(values[first]) - statistics.fmean(values[second]))
            error = math.sqrt(sum(statistics.variance(values[row]) / seeds for row in (first, second)))
            message = [f"{label(row)} {spread(values[row], seeds)}" for row in (first, second)]
            among = "" if len(whole) == len(grid.rows) else f", among the {len(whole)} of {len(grid.rows)} whole rows,"
            lines.append(
                f"- {block}, {group.caption}: best beyond the trained size{among} is {message[0]}, "
                f"next {message[1]}; the gap is {gap:.1f} points, with a standard error of {error:.1f}."
            )
    return ["\n".join(lines)] if lines else []


def write(grid: Grid, results: Results, path: Path) -> list[Path]:
    """The table as Markdown and CSV, PATH.md and PATH.csv, and plots: values by size for each block and group, and
    losses by step. PATH.png is of a grid without blocks; a block has its own, named after it, in the same folder."""
    text, numbers, plot = (path.with_name(f"{path.name}{end}") for end in (".md", ".csv", ".png"))
    paths = [text, numbers]
    checkpoint.write(text, f"{markdown(grid, results)}\n".encode())
    write_numbers(grid, results, numbers)
    for block in grid.blocks:
        for group in groups(grid):
            of_block = plot.with_name(f"{block}{group.suffix}.png")
            paths += curves(grid, results, block, group, of_block if block else plot)
        if grid.has_curves:
            paths += _losses(grid, results, block, plot.with_name(f"{block}-loss.png"))
    return paths


def write_numbers(grid: Grid, results: Results, path: Path) -> None:
    """The table as CSV: a line per place with mean, spread and number of repeats, and the paper's figure."""
    lines: list[list[object]] = []
    for place in itertools.product(grid.blocks, grid.rows, grid.table.columns):
        values, metric = grid.values(results, place), grid.metric(place)
        about = ["", ""] if metric is None else [metric.name, metric.unit]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        lines.append([*place, *about, mean, deviation, len(values), grid.table.published(*place[1:])])
    rows.write(path, COLUMNS, lines)


def curves(grid: Grid, results: Results, block: str, group: Group, path: Path) -> list[Path]:
    """Values by size, if the columns are two or more sizes and something was measured."""
    columns = {name: c for name, c in group.columns.items() if c.size}
    lines, counts = [], set()
    for row in grid.rows:
        values = [grid.values(results, (block, row, name)) for name in columns]
        counts |= {len(v) for v in values}
        lines.append(_line(grid, row, values))
    if len(columns) < 2 or len(columns) < len(grid.table.columns) * (not block) or not counts - {0}:
        return []
    metric = next(repeats[0].metric for (b, _, c), repeats in grid.places.items() if b == block and c in columns)
    title = f"{block}, {group.caption}: mean and spread of {_seeds(grid, counts)}" if block else grid.table.title
    sizes, trained = [c.size for c in columns.values()], grid.trained(block)
    plots.curves(path, sizes, {"": lines}, trained=trained, title=title, metric=metric)
    return [path]


def _seeds(grid: Grid, counts: set[int]) -> str:
    """How many seeds there are of those that the table wants. counts: of its numbers; 0 where there is none."""
    there, wanted = sorted(counts - {0}), len(grid.table.seeds)
    if there == [wanted]:
        return f"{wanted} seeds"
    return f"{' to '.join(map(str, dict.fromkeys((there[0], there[-1]))))} of {wanted} seeds"


def _line(grid: Grid, row: str, values: Sequence[Sequence[float]], *, has_band: bool = True) -> plots.Line:
    """The curve of a row, in the colour of its encoding if it is named after one. values: of all repeats, by x."""
    spec = grid.table.rows[row]
    ink = "" if row in LOOKS or spec.encoding else INKS[list(grid.table.rows).index(row) % len(INKS)]
    encoding = spec.encoding or spec.changes.get("model.encoding", "")
    means = [statistics.fmean(v) if v else None for v in values]
    line = plots.Line(label(row), encoding, means, spec.dashed, ink)
    if not has_band:
        return line
    low, high = (
        [statistics.fmean(v) + sign * statistics.stdev(v) if len(v) > 1 else None for v in values] for sign in (-1, 1)
    )
    return replace(line, low=low, high=high)


def _losses(grid: Grid, results: Results, block: str, path: Path) -> list[Path]:
    points: dict[str, dict[int, list[float]]] = {}  # row, step: losses of all repeats
    names = {r.run.name: row for (b, row, _), repeats in grid.places.items() if b == block for r in repeats}
    for (run, evaluation), metrics in results.by_evaluation.items():
        step, row = evaluation.removeprefix("step="), names.get(run)
        if row is not None and step.isdecimal() and TRAINING_LOSS.name in metrics:
            points.setdefault(row, {}).setdefault(int(step), []).append(metrics[TRAINING_LOSS.name])
    steps = sorted({step for losses in points.values() for step in losses})
    lines = [
        _line(grid, row, [losses.get(step, []) for step in steps], has_band=False) for row, losses in points.items()
    ]
    counts = {len(repeats) for losses in points.values() for repeats in losses.values()}
    if not steps:
        return []
    plots.losses(path, steps, lines, title=f"{block}: mean training loss of {_seeds(grid, counts)}")
    return [path]
