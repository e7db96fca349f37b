"""Tables over seeds: the same grid for every seed and data set, told as mean and spread of all runs.

Such a table has `seeds`, [blocks] with a recipe for each data set, `minutes` that a run takes, and rows and columns as
other tables; a column may be `loss_at` a step of training. A run is the folder ROOT/RECIPE-ROW-SEED. What they gave is
kept in two files, cells.csv with a line per run and evaluation, curves.csv with the losses and validations on the way;
all else, tables, sentences and plots, is made from these two alone, here or where no run is.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..encodings import ENCODINGS
from ..text import table as as_text
from ..training import checkpoint, recipe, rows
from . import plots, tables_jobs, workers
from .sweep import UNMEASURED, Cells, ReportError
from .tables import FINISHED, Run, check_cells, check_changes, check_rows
from .tables_spec import Column, Table

CELLS = ("data", "row", "seed", "column", "size", "position_scale", "samples", "loss", "top1")
WHOLE = ("size", "samples", "step")
CURVES = ("data", "row", "seed", "step", "train_loss", "val_loss", "val_top1")
INKS = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#CCBB44",
    "#66CCEE",
    "#AA3377",
    "#BBBBBB",
    "#000000",
    "#994F00",
    "#40B0A6",
    "#5D3A9B",
    "#FF9F40",
    "#7F7F00",
)
BEYOND = "beyond"


@dataclass(frozen=True)
class Job:
    """A run and its place in the table."""

    block: str
    row: str
    seed: int
    run: Run


def resolve(table: Table, root: Path, changes: Mapping[str, str], only: Sequence[str] = ()) -> list[Job]:
    """The runs, seed by seed, so that a whole table comes first. `data.root` goes to data sets that have one."""
    check_rows(table, only)
    check_changes(table, changes, only)
    rooted = {block: bool(recipe.load(source).data.root) for block, source in table.blocks.items()}
    if "data.root" in changes and not any(rooted.values()):
        raise ReportError(f"data.root: expected nothing, no data set of the table {table.name} has a root")
    jobs = []
    for seed in table.seeds:
        for row, spec in table.rows.items():
            for block, source in table.blocks.items():
                if only and row not in only:
                    continue
                both = {**spec.changes, **changes, "run.seed": str(seed)}
                if not rooted[block]:
                    both.pop("data.root", None)
                wanted = recipe.load(spec.recipe or source, both)
                columns = {name: column for name, column in table.columns.items() if not column.loss_at}
                cells = {(row, name): column.cell(row, wanted.data.size) for name, column in columns.items()}
                folder = root / f"{Path(spec.recipe or source).stem}-{row}-{seed}"
                jobs.append(Job(block, row, seed, Run(spec.recipe or source, both, folder, wanted, cells)))
                if seed == table.seeds[0]:
                    check_cells(table, jobs[-1].run)
    return jobs


Place = tuple[str, str, int]  # block, row, seed


@dataclass(frozen=True)
class Results:
    """All that is known of the runs: numbers of an evaluation by place and column, and points of a curve by place."""

    cells: dict[Place, dict[str, dict[str, float]]] = field(default_factory=dict)
    curves: dict[Place, list[dict[str, float]]] = field(default_factory=dict)

    def values(self, table: Table, block: str, row: str, column: str) -> list[float]:
        """Of all seeds that have it: percent right, or a training loss."""
        at, found = table.columns[column].loss_at, []
        for seed in table.seeds:
            place = (block, row, seed)
            if at:
                found += [p["train_loss"] for p in self.curves.get(place, ()) if p["step"] == at and "train_loss" in p]
            elif column in self.cells.get(place, {}):
                found.append(100 * self.cells[place][column]["top1"])
        return found

    def beyond(self, table: Table, block: str, row: str, columns: Sequence[str]) -> list[float]:
        """The mean over some columns, for all seeds that have them all."""
        found = []
        for seed in table.seeds:
            cells = self.cells.get((block, row, seed), {})
            if columns and all(column in cells for column in columns):
                found.append(statistics.fmean(100 * cells[column]["top1"] for column in columns))
        return found


def collect(jobs: Sequence[Job]) -> Results:
    """What finished runs have."""
    found = Results()
    for job in jobs:
        place, folder = (job.block, job.row, job.seed), job.run.folder
        if not (folder / "weights.safetensors").is_file() or job.run.state() != FINISHED:
            continue
        cells = Cells(folder)
        kept = {column: (cells.get(cell), cell) for (_, column), cell in job.run.cells.items()}
        found.cells[place] = {
            column: {
                "size": float(cell.size),
                "position_scale": cell.position_scale,
                **{name: got[name] for name in ("samples", "loss", "top1")},
            }
            for column, (got, cell) in kept.items()
            if got is not None
        }
        found.curves[place] = [
            {name: line[name] for name in CURVES[3:] if name in line} for line in workers.read(folder / "metrics.csv")
        ]
    return found


def make(table: Table, jobs: Sequence[Job], out: Path, count: int, tell: Callable[[str], object]) -> Results:
    """Does what is not done yet, `count` runs at a time, and writes the raw results after every run."""
    todo = [job for job in jobs if any(cell is None for cell in _kept(job))]
    tell(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there, {len(todo)} to do with {count} processes")

    def done(run: Run) -> None:
        found = collect(jobs)
        write_raw(found, out)
        job = next(job for job in jobs if job.run is run)
        told = ", ".join(f"{name} {100 * cell['top1']:.1f}" for name, cell in found.cells[_place(job)].items())
        tell(f"{run.folder.name}: {told}")

    if todo:
        tables_jobs.run_all([job.run for job in todo], count, out / "log.txt", tell, done)
    return collect(jobs)


def _place(job: Job) -> Place:
    return job.block, job.row, job.seed


def _kept(job: Job) -> list[dict[str, float] | None]:
    if not (job.run.folder / "weights.safetensors").is_file() or job.run.state() != FINISHED:
        return [None]
    cells = Cells(job.run.folder)
    return [cells.get(cell) for cell in job.run.cells.values()]


def estimate(table: Table, jobs: Sequence[Job]) -> str:
    """What is there, what is left, and how long that may take."""
    states = [(job, job.run.state()) for job in jobs]
    todo = [job for job in jobs if any(cell is None for cell in _kept(job))]
    lines = [[str(job.run.folder), state, "-" if job in todo else "all"] for job, state in states]
    hours = len(todo) * table.minutes / 60
    how = f"at {table.minutes:g} minutes of one core for a run, as measured once; less with more --jobs"
    told = as_text(["run", "state", "cells"], lines, left=3)
    return f"{told}\n\nLeft: {len(todo)} runs, about {hours:.1f} hours {how}."


def write_raw(found: Results, out: Path) -> list[Path]:
    """OUT/cells.csv and curves.csv."""
    cells = [
        [*place, column, *(_text(name, cell) for name in CELLS[4:])]
        for place, some in found.cells.items()
        for column, cell in some.items()
    ]
    curves = [
        [*place, *(_text(name, point) for name in CURVES[3:])] for place, some in found.curves.items() for point in some
    ]
    for name, header, lines in (("cells", CELLS, cells), ("curves", CURVES, curves)):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)
        checkpoint.write(out / f"{name}.csv", text.getvalue().encode())
    return [out / "cells.csv", out / "curves.csv"]


def _text(name: str, values: Mapping[str, float]) -> str:
    if name not in values:
        return ""
    return str(int(values[name])) if name in WHOLE else repr(values[name])


def read_raw(folder: Path) -> Results:
    """What `write_raw` wrote."""
    found = Results()
    for name, header in (("cells", CELLS), ("curves", CURVES)):
        path = folder / f"{name}.csv"
        if not path.is_file():
            raise ReportError(f"{path}: no such file; give --results DIR, or make the table without --from-cache")
        skip = header[: 4 if name == "cells" else 3]
        whole = [key for key in ("seed", *WHOLE) if key in header]
        numbers = [key for key in header if key not in (*skip, *WHOLE)]
        for number, line in enumerate(rows.read(path, header, whole=whole, numbers=numbers), 2):
            place = (line["data"], line["row"], line["seed"])
            values = {key: value for key, value in line.items() if key not in skip}
            if name == "cells":
                if len(line) < len(header):
                    raise ReportError(f"{path}: line {number}: expected a number in every column")
                found.cells.setdefault(place, {})[line["column"]] = values
            else:
                found.curves.setdefault(place, []).append(values)
    return found


def _told(values: Sequence[float], seeds: int, digits: int = 1) -> str:
    """Mean and sample standard deviation; how many seeds if not all."""
    if not values:
        return UNMEASURED
    told = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        told += f" ± {statistics.stdev(values):.{digits}f}"
    return told if len(values) == seeds else f"{told} ({len(values)} of {seeds})"


def name_of(row: str) -> str:
    return plots.NAMES[row] if row in ENCODINGS else row


@dataclass(frozen=True)
class Group:
    """Columns that are shown together: what is measured at the trained size, and beyond it."""

    caption: str
    columns: dict[str, Column]
    beyond: tuple[str, ...]

    @property
    def told(self) -> str:
        return self.caption[0].lower() + self.caption[1:]


def groups(table: Table) -> list[Group]:
    """Positions as they are, and interpolated; the trained size belongs to both."""
    sizes = [column.size for column in table.columns.values() if column.size]
    trained = min(sizes, default=0)
    plain = {name: c for name, c in table.columns.items() if c.interpolate is False}
    other = {name: c for name, c in table.columns.items() if c.interpolate is not False}
    found = [Group("Positions as they are", plain, _larger(plain, trained))]
    if other:
        both = {name: c for name, c in table.columns.items() if c.size == trained or name in other}
        found.append(Group("Positions interpolated", both, _larger(both, trained)))
    return found


def _larger(columns: Mapping[str, Column], trained: int) -> tuple[str, ...]:
    return tuple(name for name, c in columns.items() if c.size and c.size > trained)


def markdown(table: Table, found: Results, only: Sequence[str] = ()) -> str:
    """A table for each data set and way of positions, and sentences that sum them up."""
    rows, parts = [row for row in table.rows if not only or row in only], [f"{table.title}."]
    for block in table.blocks:
        for group in groups(table):
            lines = []
            for row in rows:
                shown = [row]
                for name, column in group.columns.items():
                    digits = 2 if column.loss_at else 1
                    shown.append(_told(found.values(table, block, row, name), len(table.seeds), digits))
                if len(group.beyond) > 1:
                    shown.append(_told(found.beyond(table, block, row, group.beyond), len(table.seeds)))
                lines.append(shown)
            header = ["", *(name.removesuffix(" interpolated") for name in group.columns)]
            header += [BEYOND] if len(group.beyond) > 1 else []
            parts.append(f"{group.caption}, {block}:\n\n{as_text(header, lines)}")
    return "\n\n".join([*parts, _legend(table, found), *reading(table, found, rows)])


def _legend(table: Table, found: Results) -> str:
    """What the numbers are, and of how many runs and images."""
    count, runs = len(table.seeds), f"one run with seed {table.seeds[0]}"
    if count > 1:
        runs = f"mean ± sample standard deviation of {count} runs with seeds {_list(table.seeds)}"
    told = [f"Top-1 in %, {runs}"]
    for block in table.blocks:
        cells = (c for place, some in found.cells.items() if place[0] == block for c in some.values())
        if counts := sorted({int(cell["samples"]) for cell in cells}):
            told.append(f"{_list(counts)} images of {block}")
    lines = [f"{'; '.join(told)}."]
    if any(len(group.beyond) > 1 for group in groups(table)):
        lines.append(f"{BEYOND}: mean over all sizes above that of training.")
    if any(column.loss_at for column in table.columns.values()):
        lines.append("Losses are of training, as means over the steps since the last one that was written.")
    return " ".join([*lines, f"{UNMEASURED}: not measured."])


def _list(things: Sequence[object]) -> str:
    words = list(map(str, things))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def reading(table: Table, found: Results, rows: Sequence[str]) -> list[str]:
    """For each data set and way of positions: who holds up best beyond the trained size, by how much, how surely."""
    lines = []
    for block in table.blocks:
        for group in groups(table):
            values = {row: found.beyond(table, block, row, group.beyond) for row in rows}
            whole = [row for row in rows if len(values[row]) == len(table.seeds) > 1]
            if len(whole) < 2 or len(group.beyond) < 2:
                continue
            first, second = sorted(whole, key=lambda row: -statistics.fmean(values[row]))[:2]
            gap = statistics.fmean(values[first]) - statistics.fmean(values[second])
            error = math.sqrt(sum(statistics.variance(values[row]) / len(table.seeds) for row in (first, second)))
            told = [f"{name_of(row)} {_told(values[row], len(table.seeds))}" for row in (first, second)]
            among = "" if len(whole) == len(rows) else f", among the {len(whole)} of {len(rows)} rows with all seeds,"
            lines.append(
                f"- {block}, {group.told}: best beyond the trained size{among} is {told[0]}, "
                f"next {told[1]}; the gap is {gap:.1f} points, with a standard error of {error:.1f}."
            )
    return ["\n".join(lines)] if lines else []


def write(table: Table, found: Results, out: Path, changes: Mapping[str, str] | None = None) -> list[Path]:
    """OUT/table.md and the plots: accuracy by size for each data set and way of positions, and losses by step."""
    size = {key: value for key, value in (changes or {}).items() if key == "data.size"}
    paths = [out / "table.md"]
    checkpoint.write(paths[0], f"{markdown(table, found)}\n".encode())
    for block, source in table.blocks.items():
        for group in groups(table):
            columns = {name: c for name, c in group.columns.items() if c.size}
            lines = [_line(table, found, block, row, list(columns)) for row in table.rows]
            lines = [line for line in lines if any(v is not None for v in line.values)]
            if len(columns) < 2 or not lines:
                continue
            end = "" if group.caption.endswith("are") else "-interpolated"
            paths.append(out / f"{block}{end}.png")
            counts = {len(found.values(table, block, row, name)) for row in table.rows for name in columns}
            title = f"{block}, {group.told}: mean and spread of {_seeds(table, counts)}"
            sizes, trained = [c.size or 0 for c in columns.values()], recipe.load(source, size).data.size
            plots.curves(paths[-1], sizes, lines, trained=trained, title=title, ylabel="top-1 accuracy, %")
        if any(column.loss_at for column in table.columns.values()):
            paths.append(out / f"{block}-loss.png")
            _plot_losses(table, found, block, paths[-1])
    return paths


def _seeds(table: Table, counts: set[int]) -> str:
    """How many seeds there are of those that the table wants. counts: of its numbers; 0 where there is none."""
    there, wanted = sorted(counts - {0}), len(table.seeds)
    if there == [wanted]:
        return f"{wanted} seeds"
    return f"{' to '.join(map(str, dict.fromkeys((there[0], there[-1]))))} of {wanted} seeds"


def _ink(table: Table, row: str) -> str:
    return "" if row in ENCODINGS else INKS[list(table.rows).index(row) % len(INKS)]


def _line(table: Table, found: Results, block: str, row: str, columns: Sequence[str]) -> plots.Line:
    values = [found.values(table, block, row, name) for name in columns]
    means = [statistics.fmean(v) if v else None for v in values]
    spreads = [statistics.stdev(v) if len(v) > 1 else None for v in values]
    encoding = table.rows[row].changes.get("model.encoding", "pape")
    return plots.Line(name_of(row), encoding, means, spread=spreads, colour=_ink(table, row))


def _plot_losses(table: Table, found: Results, block: str, path: Path) -> None:
    points: dict[str, dict[int, list[float]]] = {}  # row, step: losses of all seeds
    for row in table.rows:
        for seed in table.seeds:
            for point in found.curves.get((block, row, seed), ()):
                if "train_loss" in point:
                    points.setdefault(row, {}).setdefault(int(point["step"]), []).append(point["train_loss"])
    steps = sorted({step for some in points.values() for step in some})
    lines = []
    for row, some in points.items():
        means = [statistics.fmean(some[step]) if step in some else None for step in steps]
        encoding = table.rows[row].changes.get("model.encoding", "pape")
        lines.append(plots.Line(name_of(row), encoding, means, colour=_ink(table, row)))
    if steps:
        counts = {len(losses) for some in points.values() for losses in some.values()}
        plots.losses(path, steps, lines, title=f"{block}: mean training loss of {_seeds(table, counts)}")
