"""DvsGesture and GEN1 of generated events, in the true formats and layouts: seconds to write, for tests and trials.

Gestures are blobs that move, each class in its own way, and a mirrored gesture is that of the class it should become.
GEN1 has cars, wide boxes, and pedestrians, tall ones, that move across the frame and leave events along their edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import FormatError
from .events import Events, concatenate
from .readers import aedat, boxes, dat

Array = np.ndarray[Any, Any]
GESTURES = (
    "hand_clapping",
    "right_hand_wave",
    "left_hand_wave",
    "right_arm_clockwise",
    "right_arm_counter_clockwise",
    "left_arm_clockwise",
    "left_arm_counter_clockwise",
    "arm_roll",
    "air_drums",
    "air_guitar",
    "other_gestures",
)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10)  # the true recordings have the arm roll twice
_SIDE = 128  # pixels of the DVS128
_CAR, _PEDESTRIAN = (64, 36), (16, 44)  # width and height in pixels


def make_dvsgesture(
    root: str | Path,
    *,
    users: Sequence[int] = (1, 2, 3, 21, 24),
    lights: Sequence[str] = ("fluorescent", "led"),
    seconds: float = 0.6,
    rate: int = 12_000,
    seed: int = 0,
) -> list[str]:
    """Writes recordings of 12 gestures each, their labels and the two lists; the names of the recordings.

    Users from 24 on are for testing, 21 to 23 for validation. rate: events per second. The first recording crosses an
    overflow of the clock; in all of them gesture 9 ends after gesture 10 has begun. The folder must be empty or new.
    """
    root = _new_folder(root)
    rng = np.random.default_rng(seed)
    names = [f"user{user:02d}_{light}" for user in users for light in lights]
    length = round(seconds * 1e6)
    for i, name in enumerate(names):
        clock = 2**31 - 3 * length if i == 0 else int(rng.integers(10**6, 10**7))
        parts, rows = [], ["class,startTime_usec,endTime_usec"]
        for label in ROWS:
            clock += int(rng.integers(20_000, 40_000))
            late = 50_000 if label == 8 else 0
            rows.append(f"{label + 1},{clock},{clock + length + late}")
            parts.append(_gesture(label, clock, length, round(seconds * rate), rng))
            clock += length
        aedat.write(root / f"{name}.aedat", concatenate(parts))
        end = "\r\n" if i % 2 else "\n"
        (root / f"{name}_labels.csv").write_bytes(end.join([*rows, ""]).encode())
    for part, chosen in (("train", range(1, 24)), ("test", range(24, 100))):
        lines = [f"{name}.aedat\n" for name in names if int(name[4:6]) in chosen]
        (root / f"trials_to_{part}.txt").write_text("".join(lines))
    mapping = [f"{name},{label}\n" for label, name in enumerate(GESTURES, 1)]
    (root / "gesture_mapping.csv").write_text("action,label\n" + "".join(mapping))
    return names


def make_gen1(
    root: str | Path,
    *,
    clips: tuple[int, int, int] = (2, 1, 1),
    seconds: float = 2.0,
    rate: int = 40_000,
    seed: int = 0,
) -> list[str]:
    """Writes clips for train, val and test with boxes every quarter of a second; "<split>/<name>" of each.

    What the true files have is here as well: events outside the frame, events twice, boxes that are too small, boxes
    that stick out of the frame, faulty boxes as wide as the frame, and labels in the old layout and the new.
    """
    root = _new_folder(root)
    rng = np.random.default_rng(seed)
    made = []
    for split, count in zip(("train", "val", "test"), clips, strict=True):
        (root / split).mkdir()
        for i in range(count):
            name = f"17-03-30_12-53-58_{60_000_000 * i}_{60_000_000 * (i + 1)}"
            events, labels = _clip(round(seconds * 1e6), round(seconds * rate), rng)
            dat.write(root / split / f"{name}_td.dat", events, width=304, height=240, kind=12 * (i % 2))
            boxes.write(root / split / f"{name}_bbox.npy", labels, layout=("old", "new")[i % 2])
            made.append(f"{split}/{name}")
    return made


def _new_folder(root: str | Path) -> Path:
    root = Path(root)
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _centre(label: int, turn: Array, second: Array) -> tuple[Array, Array]:
    """Where the blob of each event is, in shares of the frame. turn: phase in radians; second: whether it is the second
    blob of a gesture that has two."""
    sin, cos, sign = np.sin(turn), np.cos(turn), np.where(second, 1.0, -1.0)
    still = np.full_like(turn, 0.5)
    side = 0.7 if label in (2, 5, 6) else 0.3
    if label == 0:
        return 0.5 + sign * (0.2 + 0.12 * cos), still
    if label in (1, 2):
        return side + 0.15 * sin, still - 0.2
    if label in (3, 4, 5, 6):
        clockwise = 1.0 if label in (3, 5) else -1.0  # y points down
        return side + 0.17 * cos, 0.6 + clockwise * 0.17 * sin
    if label == 7:
        return still, 0.5 + sign * 0.25 * sin
    if label == 8:
        return 0.5 + sign * 0.25, 0.6 + sign * 0.2 * sin
    if label == 9:
        return still, 0.65 + 0.2 * sin
    step = np.floor(turn)
    return 0.5 + 0.3 * np.sin(12.9 * step), 0.5 + 0.3 * np.sin(78.2 * step)


def _gesture(label: int, start: int, length: int, count: int, rng: np.random.Generator) -> Events:
    """Events on the rim of moving blobs, brighter ahead and darker behind. A fifth is of the body in the middle, which
    tells left from right; a twentieth is noise."""
    t = np.sort(rng.integers(0, length, count))
    speed, phase = rng.uniform(1.6, 2.4) * 2 * math.pi * 1e-6, rng.uniform(0, 2 * math.pi)
    turn, second = phase + speed * t, rng.random(count) < 0.5
    x, y = _centre(label, turn, second)
    before_x, before_y = _centre(label, turn - 0.05, second)
    shift = rng.uniform(-0.04, 0.04, 2)
    angle, radius = rng.uniform(0, 2 * math.pi, count), rng.normal(6, 1.5, count)
    rim_x, rim_y = radius * np.cos(angle), radius * np.sin(angle)
    polarity = rim_x * (x - before_x) + rim_y * (y - before_y) > 0
    px, py = _SIDE * (x + shift[0]) + rim_x, _SIDE * (y + shift[1]) + rim_y
    kind = rng.random(count)
    for chosen, low, high in ((kind < 0.2, (0.47, 0.3), (0.53, 0.95)), (kind > 0.95, (0, 0), (1, 1))):
        px[chosen], py[chosen] = _SIDE * rng.uniform(low, high, (int(chosen.sum()), 2)).T
        polarity[chosen] = rng.random(int(chosen.sum())) < 0.5
    inside = (px >= 0) & (px < _SIDE) & (py >= 0) & (py < _SIDE)
    return Events(
        t=(t + start)[inside],
        x=px[inside].astype(np.uint16),
        y=py[inside].astype(np.uint16),
        polarity=polarity[inside].astype(np.uint8),
    )


def _clip(length: int, count: int, rng: np.random.Generator) -> tuple[Events, Array]:
    t = np.sort(rng.integers(0, length, count))
    sizes = (_CAR, _PEDESTRIAN)
    left, top = rng.uniform(20, 60, 2), rng.uniform((20, 120), (60, 180))
    speed = rng.uniform(20, 60, 2) * 1e-6  # pixels per microsecond
    which = rng.integers(0, 2, count)
    width, height = np.array(sizes)[which].T
    along, upright, far = rng.random(count), rng.random(count) < 0.6, rng.random(count) < 0.5
    x = left[which] + speed[which] * t + width * np.where(upright, far, along)
    y = top[which] + height * np.where(upright, along, far)
    x, y = x + rng.normal(0, 1, count), y + rng.normal(0, 1, count)
    noise = rng.random(count) < 0.2
    x[noise], y[noise] = rng.uniform(0, (320, 240), (int(noise.sum()), 2)).T  # 304 to 319 are outside the frame
    again = 1 + ((x > 255) & (rng.random(count) < 0.5))
    events = Events(
        t=np.repeat(t, again),
        x=np.repeat(x.clip(0, 319), again).astype(np.uint16),
        y=np.repeat(y.clip(0, 239), again).astype(np.uint16),
        polarity=np.repeat(far, again).astype(np.uint8),
    )
    rows: list[tuple[float, ...]] = []
    for time in range(250_000, length + 1, 250_000):
        for k, size in enumerate(sizes):
            rows.append((time, left[k] + speed[k] * time, top[k], *size, k, k, 1.0))
        rows.append((time, -20.0, 100.0, 60.0, 30.0, 0, 2, 1.0))
        rows.append((time, 150.0, 30.0, 6.0, 8.0, 1, 3, 1.0))
        if time % 1_000_000 == 0:
            rows.append((time, 2.0, 90.0, 300.0, 120.0, 0, 4, 1.0))
    return events, np.array(rows, boxes.BOX)
