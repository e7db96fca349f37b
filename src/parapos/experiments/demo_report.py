"""What the demo says and draws: its own training beside the shipped models and the eight seeds they come from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..encodings.looks import label
from ..text import table as as_text
from . import plots
from .grid import Grid, Results
from .render import UNMEASURED, Group, groups, spread

SLACK = 2.0  # points by which the interval of the seeds is widened: other CPUs round differently


def block_of(grid: Grid) -> str:
    """The one block of a grid: what its models are trained on."""
    return next(iter(grid.places))[0]


@dataclass(frozen=True)
class Committed:
    """The table `demo` over all its seeds."""

    grid: Grid
    results: Results

    @property
    def seeds(self) -> int:
        return len(self.grid.table.seeds)

    def values(self, encoding: str, column: str) -> list[float]:
        """A number per seed; none for an encoding that the table does not have."""
        return self.grid.values(self.results, (block_of(self.grid), encoding, column))

    def interval(self, encoding: str, column: str) -> tuple[float, float] | None:
        """The smallest and the largest number of the seeds."""
        values = self.values(encoding, column)
        return (min(values), max(values)) if values else None

    def holds(self, encoding: str, column: str, value: float) -> bool:
        """Whether a number lies in the interval, widened by SLACK."""
        between = self.interval(encoding, column)
        return between is None or between[0] - SLACK <= value <= between[1] + SLACK

    def beyond(self, encoding: str, group: Group) -> list[float]:
        return self.grid.beyond(self.results, block_of(self.grid), encoding, group.beyond)

    def better(self, encoding: str) -> Group:
        """Positions as they are or interpolated: what carries further beyond the trained size, as a mean over seeds."""
        return max(groups(self.grid), key=lambda group: statistics.fmean(self.beyond(encoding, group)))

    @property
    def encodings(self) -> list[str]:
        """By the mean beyond the trained size, each at its better setting, best first."""
        means = {row: statistics.fmean(self.beyond(row, self.better(row))) for row in self.grid.rows}
        return sorted(means, key=lambda row: -means[row])


def _header(grid: Grid, group: Group) -> list[str]:
    trained = grid.trained(block_of(grid))
    sizes = [column.size or 0 for column in group.columns.values()]
    return ["", *(f"{size} px, {size / trained:g}x" for size in sizes)]


def better_table(seeds: Committed) -> str:
    """Mean and spread over the seeds, each encoding at its better setting, best first."""
    first = groups(seeds.grid)[0]
    rows = []
    for name in seeds.encodings:
        group = seeds.better(name)
        cells = [spread(seeds.values(name, column), seeds.seeds) for column in group.columns]
        rows.append([f"{label(name)}, {_setting(group)}", *cells, spread(seeds.beyond(name, group), seeds.seeds)])
    return as_text([*_header(seeds.grid, first), "beyond 1x"], rows)


def _heading(group: Group) -> str:
    return group.caption[0].upper() + group.caption[1:]


def _setting(group: Group) -> str:
    return group.caption.removeprefix("positions ")


def bars(seeds: Committed, factor: float, width: int = 24) -> str:
    """A picture for a terminal: means over seeds at a multiple of the trained size, a bar per encoding and setting."""
    grid, trained = seeds.grid, seeds.grid.trained(block_of(seeds.grid))
    columns = {_heading(group): _column_at(group, factor * trained) for group in groups(grid)}
    names = max(len(label(name)) for name in grid.rows)
    lines = [f"{'':{names}}  " + "".join(f"{heading:{width + 8}}" for heading in columns).rstrip()]
    for name in grid.rows:
        cells = []
        for column in columns.values():
            mean = statistics.fmean(seeds.values(name, column))
            filled = round(mean / 100 * width)
            cells.append(f"{'█' * filled}{'░' * (width - filled)} {mean:5.1f}  ")
        lines.append(f"{label(name):{names}}  {''.join(cells).rstrip()}")
    size = f"{factor * trained:g} px, {factor:g} times the trained size"
    return f"Tested at {size}, right answers in %, mean of {seeds.seeds} seeds:\n\n" + "\n".join(lines)


def _column_at(group: Group, size: float) -> str:
    return next(name for name, column in group.columns.items() if column.size == size)


def story(seeds: Committed) -> str:
    """What the seeds say: the order of the encodings beyond the trained size for each setting of the positions, and how
    sure it is that PaPE differs from the best of the others."""
    lines = []
    for group in groups(seeds.grid):
        values = {name: seeds.beyond(name, group) for name in seeds.grid.rows}
        order = sorted(values, key=lambda name: -statistics.fmean(values[name]))
        listed = ", ".join(f"{label(name)} {spread(values[name], seeds.seeds)}" for name in order)
        lines.append(f"- {_heading(group)}: {listed}.\n  {_gap(values)}")
    words = f"Mean accuracy beyond the trained size in %, {seeds.seeds} seeds, ± sample standard deviation:"
    return "\n".join([words, "", *lines])


def _gap(values: dict[str, list[float]], ours: str = "pape") -> str:
    """By how much PaPE differs from the best of the others."""
    other = max((name for name in values if name != ours), key=lambda name: statistics.fmean(values[name]))
    gap = statistics.fmean(values[ours]) - statistics.fmean(values[other])
    error = math.sqrt(sum(statistics.variance(values[name]) / len(values[name]) for name in (ours, other)))
    where = "ahead of" if gap > 0 else "behind"
    surely = "" if abs(gap) > 2 * error else ", which may be chance"
    return f"{label(ours)} is {abs(gap):.1f} points {where} {label(other)} (standard error {error:.1f}{surely})."


def summary(seeds: Committed, factors: Sequence[float] = (2, 4)) -> str:
    """Mean and spread over the seeds at the trained size and at some multiples of it, as they are and interpolated."""
    grid, trained = seeds.grid, seeds.grid.trained(block_of(seeds.grid))
    first, *others = groups(grid)
    columns = {f"{trained} px": next(iter(first.columns))}
    for group in (first, *others):
        for name, column in group.columns.items():
            if (column.size or 0) / trained in factors:
                columns[f"{(column.size or 0) / trained:g}x, {_setting(group)}"] = name
    rows = [
        [label(name), *(spread(seeds.values(name, column), seeds.seeds) for column in columns.values())]
        for name in grid.rows
    ]
    return as_text(["right answers, %", *columns], rows)


def _tables(seeds: Committed, grid: Grid, rows: Sequence[tuple[str, Grid, Results]]) -> str:
    """A table per setting; for each encoding the rows that are given, and the interval of the seeds."""
    parts = []
    for group in groups(grid):
        lines = []
        for name in grid.rows:
            for words, source, results in rows:
                values = [source.values(results, (block_of(source), name, column)) for column in group.columns]
                lines.append([f"{label(name)}, {words}", *(f"{v[0]:.1f}" if v else UNMEASURED for v in values)])
            known = [seeds.interval(name, column) for column in group.columns]
            cells = [UNMEASURED if pair is None else f"{pair[0]:.1f} to {pair[1]:.1f}" for pair in known]
            lines.append([f"{label(name)}, {seeds.seeds} seeds", *cells])
        parts.append(f"{_heading(group)}:\n\n{as_text(_header(grid, group), lines)}")
    return "\n\n".join(parts)


def _what(seeds: Committed, grid: Grid, results: Results) -> str:
    counts = {int(n) for place in grid.places for n in grid.values(results, place, "samples")}
    samples = ", ".join(map(str, sorted(counts)))
    return (
        f"Right answers in % of {samples} test images. {seeds.seeds} seeds: the smallest and the largest result of the "
        "same recipe."
    )


def introduction(seeds: Committed, title: str, factors: Sequence[float] = (2, 4)) -> str:
    """What the seeds gave, which needs no computing."""
    return "\n\n".join([f"{title}.", *(bars(seeds, factor) for factor in factors), story(seeds)])


def shipped(seeds: Committed, grid: Grid, results: Results) -> str:
    """The tables of the shipped models."""
    return f"{_tables(seeds, grid, [('shipped', grid, results)])}\n\n{_what(seeds, grid, results)}"


def side_by_side(seeds: Committed, grid: Grid, results: Results, shipped: Results) -> tuple[str, bool]:
    """The tables of what was trained here, and whether it reached what the seeds say it should."""
    rows = [("trained here", grid, results)]
    if shipped.scores:
        rows.append(("shipped", grid, shipped))
    verdict, is_reached = judge(seeds, grid, results)
    closing = [story(seeds)] if is_reached else []
    return "\n\n".join([_tables(seeds, grid, rows), _what(seeds, grid, results), verdict, *closing]), is_reached


def judge(seeds: Committed, grid: Grid, results: Results) -> tuple[str, bool]:
    """Where the numbers are outside the interval of the seeds, and whether none is below it."""
    compared, outside, is_reached = 0, [], True
    for (_, name, column), repeats in grid.places.items():
        between = seeds.interval(name, column)
        if between is None:
            continue
        compared += 1
        value = grid.values(results, (block_of(grid), name, column))[0]
        if not seeds.holds(name, column, value):
            unit = repeats[0].metric.unit
            outside.append(f"{label(name)}, {column}: {value:.1f}{unit}, seeds {between[0]:.1f} to {between[1]:.1f}")
            is_reached = is_reached and value > between[1]
    if not compared:
        return "None of these encodings is shipped, so there is nothing to compare them with.", True
    rule = f"the interval of {seeds.seeds} seeds, widened by {SLACK:g} points"
    if not outside:
        return f"Trained here: all {compared} results lie in {rule}.", True
    lines = "".join(f"\n- {line}" for line in outside)
    failed = (
        ""
        if is_reached
        else (
            "\n\nThis training did not reach what the shipped models have, so read nothing into its numbers. Please "
            "report it with what `parapos doctor` prints."
        )
    )
    return f"Trained here: {len(outside)} of {compared} results lie outside {rule}:\n{lines}{failed}", is_reached


def reading(grid: Grid, results: Results) -> str:
    """One sentence on PaPE, or the first encoding, and its best rival at twice the resolution and at the largest, each
    at the setting that is better at that size."""
    trained = grid.trained(block_of(grid))
    sizes = sorted({column.size or 0 for column in grid.table.columns.values()})
    ours = "pape" if "pape" in grid.rows else grid.rows[0]
    metric = grid.places[block_of(grid), ours, next(iter(grid.table.columns))][0].metric
    parts = []
    for size in dict.fromkeys((min(sizes, key=lambda size: abs(size - 2 * trained)), sizes[-1])):
        columns = [name for name, column in grid.table.columns.items() if column.size == size]
        best = {row: max(grid.values(results, (block_of(grid), row, name))[0] for name in columns) for row in grid.rows}
        own = best.pop(ours)
        message = f"at {size} px ({size / trained:g}x) {label(ours)} gets {own:.1f}{metric.unit} {metric.label}"
        if best:
            name = max(best, key=lambda row: best[row])
            rival = best[name]
            how = "ahead of" if own > rival else "behind" if own < rival else "level with"
            gap = f"{abs(own - rival):.1f} points " if own != rival else ""
            next_best = "the next best, " if own > rival else ""
            message += f", {gap}{how} {next_best}{label(name)} with {rival:.1f}{metric.unit}"
        parts.append(message)
    return (
        f"Trained at {trained} px: {'; '.join(parts)}. One seed; positions as they are or interpolated, whichever is "
        "better at that size."
    )


def draw(path: Path, seeds: Committed | None, grid: Grid | None, results: Results, dots: str = "") -> None:
    """Accuracy over the size, a panel per setting of the positions: mean and range of the seeds, and a dot for each
    number of a grid. Without seeds, the numbers of the grid as lines."""
    shown = grid
    if shown is None:
        assert seeds is not None, "a plot of nothing"
        shown = seeds.grid
    panels = {}
    for group in groups(shown):
        lines = []
        for name in shown.rows:
            known = [seeds.values(name, column) if seeds else [] for column in group.columns]
            own = [grid.values(results, (block_of(grid), name, column)) if grid else [] for column in group.columns]
            single = [v[0] if v else None for v in own]
            means = [statistics.fmean(v) if v else None for v in known] if seeds else single
            line = plots.Line(label(name), name, means)
            if seeds:
                low, high = ([pick(v, default=None) for v in known] for pick in (min, max))
                line = replace(line, low=low, high=high, dots=single)
            lines.append(line)
        panels[_heading(group)] = lines
    sizes = [column.size or 0 for column in groups(shown)[0].columns.values()]
    trained, metric = shown.trained(block_of(shown)), next(iter(shown.places.values()))[0].metric
    words = f"lines and bands: mean and range of {seeds.seeds} seeds" if seeds else "one seed"
    title = "; ".join(filter(None, (f"{block_of(shown)}, trained at {trained} px", words, dots)))
    plots.curves(path, sizes, panels, trained=trained, title=title[0].upper() + title[1:], metric=metric)
