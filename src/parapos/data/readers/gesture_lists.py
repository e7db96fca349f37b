"""The text files of DvsGesture: lists of recordings, and the labels of a recording.

A list has a file name such as user01_fluorescent_led.aedat per line. Labels are a CSV file: class 1 to 11, first and
last microsecond of a gesture on the clock of the recording. Rows may overlap and classes may repeat, so a row is known
by its place alone. A byte order mark, carriage returns and blank lines are passed over.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from . import read_lines, wrong_line

CLASSES = 11
MAX_BYTES = 1024**2  # the true files have a few hundred
COLUMNS = ("class", "startTime_usec", "endTime_usec")
_NAME = re.compile(r"user(\d\d)_([a-z_]+)\.aedat", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


class Row(NamedTuple):
    """A gesture: class from 0, and its first and last microsecond, both inclusive."""

    label: int
    start: int
    end: int


def read_trials(path: str | Path) -> list[str]:
    """Names of recordings without their suffix, in the order of the list."""
    names: dict[str, None] = {}
    for number, line in read_lines(path, MAX_BYTES):
        if not _NAME.fullmatch(line):
            raise wrong_line(path, number, f"expected a name such as user01_led.aedat, got {line[:80]!r}")
        name = line.removesuffix(".aedat")
        if name in names:
            raise wrong_line(path, number, f"{line} is here twice, expected it once")
        names[name] = None
    return list(names)


def user_of(name: str) -> int:
    """The user of a recording: the two digits of its name."""
    return int(name[4:6])


def read_labels(path: str | Path) -> list[Row]:
    """The gestures of a recording in the order of its file."""
    lines = read_lines(path, MAX_BYTES)
    if not lines or tuple(part.strip() for part in lines[0][1].split(",")) != COLUMNS:
        number, line = lines[0] if lines else (1, "")
        raise wrong_line(path, number, f"expected the columns {','.join(COLUMNS)}, got {line[:80]!r}")
    rows: list[Row] = []
    for number, line in lines[1:]:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not all(map(_NUMBER.fullmatch, parts)):
            raise wrong_line(path, number, f"expected three whole numbers with commas, got {line[:80]!r}")
        label, start, end = map(int, parts)
        if not 1 <= label <= CLASSES:
            raise wrong_line(path, number, f"class {label}, expected 1 to {CLASSES}")
        if end < start:
            raise wrong_line(
                path, number, f"a gesture from {start} to {end}, expected an end that is not before its start"
            )
        rows.append(Row(label - 1, start, end))
    return rows
