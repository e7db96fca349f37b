"""AEDAT 3.1, the format of DvsGesture: lines of text, then packets of events. All numbers are little-endian.

A packet is a header of 28 bytes and `capacity` slots of `size` bytes, of which the first `number` hold events. Polarity
events (type 1) are 8 bytes: x in bits 17-31 of the first word, y in 2-16, polarity in 1, validity in 0; then 31 bits of
time in microseconds, to which the packet's overflow counter adds the higher bits. The origin is the top left corner.
Packets of other types are passed over. Memory is about 30 bytes per 8 bytes of the file, time is linear in its size.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..events import Events
from . import check_bits, check_truncated, ends_early, wrong

HEADER = struct.Struct("<hhiiiiii")  # type, source, size, time's offset, overflow, capacity, number, valid
MAX_HEADER = 64 * 1024  # bytes of text
POLARITY = 1
SIZE, TIME_OFFSET = 8, 4  # of a polarity event
_RECORD = np.dtype([("data", "<u4"), ("t", "<i4")])
_FIRST, _LAST = b"#!AER-DAT3.1", b"#!END-HEADER"


def read(path: str | Path, *, truncated: str = "error") -> Events:
    """All valid polarity events of a file in the order of their time; those of equal time as they are in the file.

    truncated: a last packet that is shorter than it says is an "error", or "keep" takes its whole events and warns.
    """
    data, packets = _open(path, truncated)
    total = sum(number for _, number, _, _ in packets)
    t, word = np.empty(total, np.int64), np.empty(total, np.uint32)
    good = np.ones(total, bool)
    at = 0
    for start, number, overflow, all_valid in packets:
        records = np.frombuffer(data, _RECORD, number, start)
        part = slice(at, at + number)
        if number and records["t"].min() < 0:
            i = int((records["t"] < 0).argmax())
            told = f"time {int(records['t'][i])}, expected 31 bits without a sign"
            raise wrong(path, start + SIZE * i + TIME_OFFSET, told)
        t[part] = records["t"]
        t[part] += overflow << 31
        word[part] = records["data"]
        if not all_valid:
            good[part] = (records["data"] & 1).astype(bool)
        at += number
    if not good.all():
        t, word = t[good], word[good]
    if (t[1:] < t[:-1]).any():
        order = np.argsort(t, kind="stable")
        t, word = t[order], word[order]
    return Events(
        t=t,
        x=(word >> 17).astype(np.uint16),
        y=(word >> 2 & 0x7FFF).astype(np.uint16),
        polarity=(word >> 1 & 1).astype(np.uint8),
    )


def count(path: str | Path, *, truncated: str = "error") -> int:
    """Polarity events of a file, invalid ones included, from the headers of its packets alone."""
    return sum(number for _, number, _, _ in _open(path, truncated)[1])


def write(path: str | Path, events: Events, *, packet: int = 4096) -> None:
    """Writes events as they come, at most `packet` in a packet. Times must be from 0 to below 2^62."""
    if packet < 1:
        raise ValueError(f"packet must be at least 1, got {packet}")
    check_bits(events, t=62, x=15, y=15, polarity=1)
    x, y, polarity = (value.astype(np.uint32) for value in (events.x, events.y, events.polarity))
    records = np.empty(len(events), _RECORD)
    records["data"] = x << 17 | y << 2 | polarity << 1 | 1
    records["t"] = events.t & 0x7FFFFFFF
    overflow = events.t >> 31
    turns = np.flatnonzero(overflow[1:] != overflow[:-1]) + 1
    lines = [_FIRST, b"#Format: RAW", b"#Source 1: DVS128", b"#Start-Time: 2000-01-01 00:00:00 (TZ+0000)", _LAST]
    with open(path, "wb") as file:
        file.write(b"".join(line + b"\r\n" for line in lines))
        for first, last in zip([0, *turns.tolist()], [*turns.tolist(), len(events)], strict=True):
            for start in range(first, last, packet):
                n = min(packet, last - start)
                file.write(HEADER.pack(POLARITY, 1, SIZE, TIME_OFFSET, int(overflow[start]), n, n, n))
                file.write(records[start : start + n].tobytes())


def _open(path: str | Path, truncated: str) -> tuple[Any, list[tuple[int, int, int, bool]]]:
    """The bytes of a file, memory-mapped, and its packets."""
    check_truncated(truncated)
    if os.stat(path).st_size == 0:
        raise wrong(path, 0, f"an empty file, expected {_FIRST.decode()}")
    data = np.memmap(path, np.uint8, "r")
    return data, _packets(path, data, _body(path, bytes(data[:MAX_HEADER])), truncated)


def _body(path: str | Path, head: bytes) -> int:
    """Where the packets begin."""
    first = head.split(b"\n", 1)[0].rstrip(b"\r")
    version = re.fullmatch(rb"#!AER-DAT(\d+\.\d+)", first[:40])
    if not version:
        raise wrong(path, 0, f"not AEDAT, expected the line {_FIRST.decode()}, got {first[:40]!r}")
    if first != _FIRST:
        raise wrong(path, 0, f"AEDAT {version[1].decode()}, which is packed in another way; expected AEDAT 3.1")
    start = 0
    while (end := head.find(b"\n", start)) >= 0:
        line = head[start:end].rstrip(b"\r")
        if line == _LAST:
            return end + 1
        if not line.startswith(b"#"):
            break
        name, _, value = line.partition(b":")
        if name == b"#Format" and value.strip() != b"RAW":
            raise wrong(path, start, f"packets are packed as {value.strip()[:40]!r}, expected b'RAW'")
        start = end + 1
    raise wrong(path, start, f"no line {_LAST.decode()}, expected it after lines with # and in the first {MAX_HEADER}")


def _packets(path: str | Path, data: Any, at: int, truncated: str) -> list[tuple[int, int, int, bool]]:
    """(first byte, events that are there, overflow, whether all are valid) of every packet of polarity events."""
    packets: list[tuple[int, int, int, bool]] = []
    end = len(data)
    while at < end:
        told = ""
        if end - at < HEADER.size:
            told = f"{end - at} bytes are left, expected a packet's header of {HEADER.size}"
        else:
            kind, _, size, offset, overflow, capacity, number, valid = HEADER.unpack_from(data, at)
            _check_header(path, at, kind, size, offset, overflow, capacity, number, valid)
            start, stop = at + HEADER.size, at + HEADER.size + size * capacity
            there = min(number, (end - start) // size)
            if stop > end:
                told = f"a packet of {capacity} x {size} bytes and {number} events, of which only {there} are there"
            if kind == POLARITY:
                packets.append((start, there, overflow, valid == number))
        if told:
            ends_early(path, at, told, sum(number for _, number, _, _ in packets), truncated)
            break
        at = stop
    return packets


def _check_header(
    path: str | Path,
    at: int,
    kind: int,
    size: int,
    offset: int,
    overflow: int,
    capacity: int,
    number: int,
    valid: int,
) -> None:
    if kind < 0:
        raise wrong(path, at, f"a packet of type {kind}, expected 0 or more: it is packed, or not a packet")
    if size < 1:
        raise wrong(path, at + 4, f"events of {size} bytes, expected at least 1")
    if kind == POLARITY and (size, offset) != (SIZE, TIME_OFFSET):
        told = f"polarity events of {size} bytes with the time at byte {offset}, expected {SIZE} and {TIME_OFFSET}"
        raise wrong(path, at + 4, told)
    if overflow < 0:
        raise wrong(path, at + 12, f"time overflow {overflow}, expected 0 or more")
    if capacity < 1:
        raise wrong(path, at + 16, f"a packet with room for {capacity} events, expected at least 1")
    if not 0 <= valid <= number <= capacity:
        told = f"{number} events, {valid} of them valid, in a packet for {capacity}, expected no more than that"
        raise wrong(path, at + 20, told)
