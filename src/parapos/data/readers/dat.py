"""Prophesee DAT, the format of GEN1 and N-CARS: lines of text that begin with "% ", two bytes, then records of 8 bytes.

The two bytes are the type of events (0 or 12, packed alike) and their size, 8. A file without any line of text does not
have them either. A record is two little-endian words: time in microseconds; x in bits 0-13, y in 14-27, polarity in bit
28. The file is memory-mapped: opening it reads the header alone, and a slice takes about 30 bytes of memory per event.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from ..events import Events
from . import check_bits, check_truncated, ends_early, wrong

MAX_HEADER = 64 * 1024  # bytes of text
TYPES = (0, 12)
VERSIONS = (2, 3)  # version 1 packs coordinates in fewer bits
SIDES = ("left", "right")
PIECE = 4_000_000  # events to look at at a time
_RECORD = np.dtype([("t", "<u4"), ("word", "<u4")])


class DatFile:
    """An open file; its `len` is the number of events. width and height are None if the header does not tell them.

    truncated: a last record that is cut short is an "error", or "keep" leaves it out and warns. Open a file in the
    process that reads it, for a mapping is not to be passed on.
    """

    def __init__(self, path: str | Path, *, truncated: str = "error") -> None:
        check_truncated(truncated)
        self.path = Path(path)
        size = os.stat(path).st_size
        if size == 0:
            raise wrong(path, 0, "an empty file, expected text or events")
        self.start, fields = _header(self.path)
        self.width, self.height = fields.get("Width"), fields.get("Height")
        count, rest = divmod(size - self.start, _RECORD.itemsize)
        if rest:
            told = f"{rest} bytes are left, expected an event of {_RECORD.itemsize}"
            ends_early(path, size - rest, told, count, truncated)
        self._records = np.memmap(path, _RECORD, "r", self.start, (count,)) if count else np.empty(0, _RECORD)

    def __len__(self) -> int:
        return len(self._records)

    def time(self, index: int) -> int:
        """Time of an event in microseconds."""
        return int(self._records["t"][index])

    def slice(self, start: int, stop: int) -> Events:
        """The events from `start` to before `stop`, both from 0 to the number of events."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"expected 0 <= start <= stop <= {len(self)}, got {start} and {stop}")
        records = self._records[start:stop]
        word = np.array(records["word"], np.uint32)
        return Events(
            t=np.array(records["t"], np.int64),
            x=(word & 0x3FFF).astype(np.uint16),
            y=(word >> 14 & 0x3FFF).astype(np.uint16),
            polarity=(word >> 28 & 1).astype(np.uint8),
        )

    def check_order(self, start: int = 0, stop: int | None = None) -> None:
        """FormatError if one of these events, or else of all, is earlier than the one before it. Reads their times."""
        stop = len(self) if stop is None else stop
        for first in range(start, stop - 1, PIECE):
            t = self._records["t"][first : min(first + PIECE + 1, stop)]
            back = t[1:] < t[:-1]
            if back.any():
                i = int(back.argmax()) + 1
                told = f"time goes back from {t[i - 1]} to {t[i]} at event {first + i}, expected never"
                raise wrong(self.path, self.start + _RECORD.itemsize * (first + i), told)

    def find(self, time: int, side: str = "left") -> int:
        """How many events are before a time ("left"), or not after it ("right"). Times must not decrease."""
        if side not in SIDES:
            raise ValueError(f"side must be one of {', '.join(SIDES)}, got {side!r}")
        search = bisect_left if side == "left" else bisect_right
        return search(range(len(self)), time, key=self.time)


def read(path: str | Path, *, truncated: str = "error") -> Events:
    """All events of a file, in its order."""
    file = DatFile(path, truncated=truncated)
    return file.slice(0, len(file))


def write(
    path: str | Path,
    events: Events,
    *,
    width: int | None = None,
    height: int | None = None,
    kind: int = 12,
    text: bool = True,
) -> None:
    """Writes events as they come. text=False leaves the lines and the two bytes out, as the oldest files do."""
    if kind not in TYPES:
        raise ValueError(f"kind must be one of {TYPES}, got {kind}")
    check_bits(events, t=32, x=14, y=14, polarity=1)
    x, y, polarity = (value.astype(np.uint32) for value in (events.x, events.y, events.polarity))
    records = np.empty(len(events), _RECORD)
    records["t"], records["word"] = events.t, x | y << 14 | polarity << 28
    lines = [f"Data file containing {'Event2D' if kind == 0 else 'EventCD'} events.", "Version 2"]
    lines += [f"{name} {value}" for name, value in (("Height", height), ("Width", width)) if value is not None]
    data = records.tobytes()
    if text:
        data = "".join(f"% {line}\n" for line in lines).encode() + bytes([kind, _RECORD.itemsize]) + data
    elif not data:
        raise ValueError("a file without text needs events, got none")
    elif data.startswith(b"% "):
        raise ValueError(f"the first time {events.t[0]} looks like text in a file without; expected text=True")
    Path(path).write_bytes(data)


def _header(path: Path) -> tuple[int, dict[str, int]]:
    """Where the records begin, and the numbers that lines of text tell."""
    with open(path, "rb") as file:
        head = file.read(MAX_HEADER)
    start = 0
    fields: dict[str, int] = {}
    while head[start : start + 2] == b"% ":
        end = head.find(b"\n", start)
        if end < 0:
            raise wrong(path, start, f"a line that does not end, expected all text in the first {MAX_HEADER} bytes")
        name, _, value = head[start + 2 : end].strip().partition(b" ")
        if name in (b"Width", b"Height", b"Version"):
            if not re.fullmatch(rb"0*[1-9]\d{0,4}", value.strip()):
                raise wrong(path, start, f"{name.decode()} {value[:40]!r}, expected a number from 1 to 99999")
            if fields.setdefault(name.decode(), int(value)) != int(value):
                raise wrong(path, start, f"{name.decode()} {int(value)}, expected {fields[name.decode()]} as before")
        start = end + 1
    if not start:
        return 0, fields
    if fields.get("Version", VERSIONS[0]) not in VERSIONS:
        raise wrong(path, 0, f"version {fields['Version']}, expected one of {VERSIONS}")
    if len(head) < start + 2:
        raise wrong(path, start, "the file ends, expected the type and the size of events")
    if head[start] not in TYPES or head[start + 1] != _RECORD.itemsize:
        told = f"events of type {head[start]} and {head[start + 1]} bytes, expected type {TYPES} and 8 bytes"
        raise wrong(path, start, told)
    return start + 2, fields
