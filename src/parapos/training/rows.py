"""CSV files of runs and tables. An error names the file and the line that is damaged."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import checkpoint
from .checkpoint import CheckpointError


def read(
    path: Path,
    columns: Sequence[str] = (),
    *,
    optional: Collection[str] = (),
    numbers: Collection[str] = (),
    whole: Collection[str] = (),
    needed: Collection[str] = (),
    growing: bool = False,
) -> list[dict[str, Any]]:
    """The rows of a file with a header. A file that is not there has none.

    columns: of the header, if they must be these; the optional ones may all be missing. numbers: columns that are read
    as such, and left out of a row where they are empty. whole: columns with an integer in every row, if they
    are there. needed: columns that must be there. growing: a last line without an end is still being written, and left
    out.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    data = data[: data.rfind(b"\n") + 1] if growing else data
    if growing and not data:
        return []
    return parse(path, data, columns, optional=optional, numbers=numbers, whole=whole, needed=needed)


def write(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Puts a file with a header in place, whole."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    checkpoint.write(path, text.getvalue().encode())


def parse(
    path: Path,
    data: bytes,
    columns: Sequence[str] = (),
    *,
    optional: Collection[str] = (),
    numbers: Collection[str] = (),
    whole: Collection[str] = (),
    needed: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The same of what a file holds."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise CheckpointError(f"{path}: line {number}: not UTF-8") from None
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[dict[str, Any]] = []
    try:
        header = next(lines, None)
        least = [name for name in columns if name not in optional]
        if header is None or (columns and header not in (list(columns), least)) or len(set(header)) < len(header):
            message = f"the columns {','.join(columns)}" if columns else "a header of different columns"
            raise CheckpointError(f"{path}: expected {message}")
        for name in needed:
            if name not in header:
                raise CheckpointError(f"{path}: expected a column {name}, got {','.join(header)}")
        for line in lines:
            if len(line) != len(header):
                raise ValueError(f"{len(line)} entries, expected {len(header)}")
            row: dict[str, Any] = {}
            for name, value in zip(header, line, strict=True):
                if name in whole:
                    row[name] = int(value)
                elif name not in numbers:
                    row[name] = value
                elif value:
                    row[name] = float(value)
            rows.append(row)
    except (csv.Error, ValueError) as error:
        raise CheckpointError(f"{path}: line {lines.line_num}: {error}") from None
    return rows
