"""Augmentations of raw events, before they are tokenized: a flip, then exactly one operation of several.

`draw` picks what happens, `apply` does it, `augment` is both, and `tokenize_augmented` also falls back to the untouched
sample where nothing would be left to learn from. All randomness comes from the one generator that is passed in.
Times stay in order. A coordinate that leaves the frame is found before it is cast, so none wraps around.

Boxes are (M, 4 or more): x, y of the top left corner, width, height; columns after these ride along unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..events import Events, concatenate

__all__ = [
    "DVSGESTURE",
    "GEN1",
    "MIRRORED",
    "Augmented",
    "Change",
    "EventAugment",
    "apply",
    "augment",
    "cutmix",
    "draw",
    "tokenize_augmented",
]

OPERATIONS = ("identity", "area", "time", "event", "shear", "roll", "rotation")
MIRRORED = (0, 2, 1, 6, 5, 4, 3, 7, 8, 9, 10)  # label of a DvsGesture gesture in the mirror: arm and direction swap

Boxes = npt.NDArray[Any]
T = TypeVar("T", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class EventAugment:
    """What may happen to the events of a training sample. The defaults are those of DvsGesture.

    flip: probability of a horizontal flip, which comes first. operations: one of these is drawn evenly and comes next.
    area: range of the share of width and height that a dropped rectangle has. time: range of the share of the duration
    that is dropped. event: range of the share of events that are dropped, each by itself. shear: x moves by up to this
    many pixels per row. roll: x and y move by up to this many pixels, around the edges. rotation: up to these degrees.
    """

    flip: float = 0.5
    operations: tuple[str, ...] = OPERATIONS
    area: tuple[float, float] = (0.05, 0.3)
    time: tuple[float, float] = (0.1, 0.75)
    event: tuple[float, float] = (0.1, 0.75)
    shear: float = 0.3
    roll: int = 5
    rotation: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be from 0 to 1, got {self.flip!r}")
        if not self.operations or not set(self.operations) <= set(OPERATIONS):
            raise ValueError(f"operations must be some of {', '.join(OPERATIONS)}, got {self.operations!r}")
        for name in ("area", "time", "event"):
            found = getattr(self, name)
            if len(found) != 2 or not 0 <= found[0] <= found[1] <= 1:
                raise ValueError(f"{name} must be two numbers from 0 to 1, the smaller first, got {found!r}")
        for name, most in (("shear", 100.0), ("roll", 65535), ("rotation", 180.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 0 to {most}, got {getattr(self, name)!r}")


DVSGESTURE = EventAugment()
GEN1 = EventAugment(operations=("identity", "area", "time", "event", "rotation"), rotation=20.0)


@dataclass(frozen=True)
class Change:
    """What happens to a sample: a flip or none, then an operation with its values.

    area: share of a side, x and y of the centre. time: start and length as shares of the duration. event: share.
    shear: pixels per row. roll: pixels in x and y. rotation: degrees.
    """

    flip: bool
    operation: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Augmented:
    """A sample and what was done to it. The label of a gesture follows a flip: `MIRRORED[label]`."""

    events: Events
    boxes: Boxes | None
    change: Change


def draw(settings: EventAugment, width: int, height: int, rng: np.random.Generator) -> Change:
    """A change within the settings, for a frame of width x height."""
    flip = bool(rng.random() < settings.flip)
    operation = settings.operations[rng.integers(len(settings.operations))]
    values: tuple[float, ...] = ()
    if operation == "area":
        values = (rng.uniform(*settings.area), int(rng.integers(width)), int(rng.integers(height)))
    elif operation == "time":
        values = (rng.random(), rng.uniform(*settings.time))
    elif operation == "event":
        values = (rng.uniform(*settings.event),)
    elif operation == "shear":
        values = (rng.uniform(-settings.shear, settings.shear),)
    elif operation == "roll":
        values = tuple(int(step) for step in rng.integers(-settings.roll, settings.roll, size=2, endpoint=True))
    elif operation == "rotation":
        values = (rng.uniform(-settings.rotation, settings.rotation),)
    return Change(flip, operation, values)


def apply(
    change: Change, events: Events, width: int, height: int, rng: np.random.Generator, boxes: Boxes | None = None
) -> tuple[Events, Boxes | None]:
    """The changed events, and the boxes that are still to be found in them. `rng` chooses among single events.

    Events must lie in the frame. Where dropping would leave no event, nothing is dropped. Shear and roll move no boxes,
    so boxes given to these are an error.
    """
    if len(events) and (events.x.max() >= width or events.y.max() >= height):
        found = f"{events.x.max()}, {events.y.max()}"
        raise ValueError(f"events: x and y go up to {found}, expected less than {width}, {height}; clean them first")
    if boxes is not None and (boxes.ndim != 2 or boxes.shape[1] < 4 or boxes.dtype.kind != "f"):
        raise ValueError(f"boxes must be floats (M, 4 or more), got {boxes.dtype} {boxes.shape}")
    if change.flip:
        events = _moved(events, x=width - 1 - events.x.astype(np.int32))
        if boxes is not None:
            boxes = boxes.copy()
            boxes[:, 0] = width - (boxes[:, 0] + boxes[:, 2])
    if change.operation in ("shear", "roll") and boxes is not None:
        raise ValueError(f"operation {change.operation} is for events without boxes, got {len(boxes)} boxes")
    match change.operation, change.values:
        case "identity", ():
            return events, boxes
        case "area", (share, x, y):
            return _drop_area(events, boxes, _rectangle(share, x, y, width, height))
        case "time", (start, length):
            return _dropped(events, _in_time(events.t, start, length)), boxes
        case "event", (share,):
            return _dropped(events, rng.random(len(events)) <= share), boxes
        case "shear", (slope,):
            return _kept(events, np.floor(events.x + slope * events.y), events.y, width, height), boxes
        case "roll", (dx, dy):
            column, row = events.x.astype(np.int64) + int(dx), events.y.astype(np.int64) + int(dy)
            return _moved(events, x=column % width, y=row % height), boxes
        case "rotation", (degrees,):
            right, down = _rotated(events.x, events.y, degrees, width, height)
            turned = None if boxes is None else _rotate_boxes(boxes, degrees, width, height)
            return _kept(events, np.floor(right), np.floor(down), width, height), turned
    raise ValueError(f"unknown change {change!r}, expected one of {', '.join(OPERATIONS)} with its values")


def augment(
    events: Events,
    rng: np.random.Generator,
    *,
    width: int,
    height: int,
    settings: EventAugment = DVSGESTURE,
    boxes: Boxes | None = None,
) -> Augmented:
    """A randomly changed sample; see `EventAugment` and `apply`."""
    change = draw(settings, width, height, rng)
    return Augmented(*apply(change, events, width, height, rng, boxes), change)


def tokenize_augmented(
    events: Events,
    rng: np.random.Generator,
    tokenize: Callable[[Events], T],
    *,
    width: int,
    height: int,
    settings: EventAugment = DVSGESTURE,
    boxes: Boxes | None = None,
    count: Callable[[T], int] = len,
) -> tuple[T, Augmented]:
    """What `tokenize` makes of an augmented sample, and the sample. `count` tells the number of tokens.

    Of the untouched sample if the changed one has no tokens, or no boxes where there were some before.
    """
    found = augment(events, rng, width=width, height=height, settings=settings, boxes=boxes)
    lost = boxes is not None and found.boxes is not None and len(boxes) > 0 and len(found.boxes) == 0
    if not lost:
        tokens = tokenize(found.events)
        if count(tokens):
            return tokens, found
    return tokenize(events), Augmented(events, boxes, Change(False, "identity"))


def cutmix(
    events: Events, partner: Events, rng: np.random.Generator, *, width: int, height: int
) -> tuple[Events, float]:
    """Events outside a random rectangle and a partner's inside it, in order of time, and the share of the former.

    The share is the weight of the sample's label; the partner's label has the rest. If both have nothing to give,
    the sample stays as it is with weight 1.
    """
    side = math.sqrt(1 - rng.random())
    low, high = [], []
    for size in (width, height):
        length = math.floor(size * side)
        least = (length + 1) // 2
        centre = int(rng.integers(least, max(size - least, least), endpoint=True))
        low.append(centre - length / 2)
        high.append(centre + length / 2)

    def inside(found: Events) -> npt.NDArray[np.bool_]:
        in_x = (low[0] <= found.x) & (found.x <= high[0])
        return in_x & (low[1] <= found.y) & (found.y <= high[1])

    own, other = events.select(~inside(events)), partner.select(inside(partner))
    if not len(own) + len(other):
        return events, 1.0
    mixed = concatenate([own, other])
    return mixed.select(np.argsort(mixed.t, kind="stable")), len(own) / len(mixed)


def _moved(events: Events, *, x: npt.NDArray[Any], y: npt.NDArray[Any] | None = None) -> Events:
    """The events at other places, which must be in the frame."""
    y = events.y if y is None else y
    return Events(events.t, x.astype(np.uint16), y.astype(np.uint16), events.polarity)


def _kept(events: Events, x: npt.NDArray[Any], y: npt.NDArray[Any], width: int, height: int) -> Events:
    """The events at other places, without those that leave the frame."""
    stay = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return _moved(events.select(stay), x=x[stay], y=y[stay])


def _dropped(events: Events, drop: npt.NDArray[np.bool_]) -> Events:
    return events if drop.all() else events.select(~drop)


def _in_time(t: npt.NDArray[np.int64], start: float, length: float) -> npt.NDArray[np.bool_]:
    if not len(t):
        return np.zeros(0, np.bool_)
    duration = int(t[-1]) - int(t[0])
    first = int(t[0]) + math.floor(start * duration)
    last = first + math.ceil(length * duration)  # may lie past the end
    return (first <= t) & (t <= last)


def _rectangle(share: float, x: float, y: float, width: int, height: int) -> tuple[int, int, int, int]:
    """First and last column, first and last row."""
    w, h = math.ceil(width * share), math.ceil(height * share)
    return max(0, int(x - w / 2)), min(width, int(x + w / 2)), max(0, int(y - h / 2)), min(height, int(y + h / 2))


def _drop_area(
    events: Events, boxes: Boxes | None, rectangle: tuple[int, int, int, int]
) -> tuple[Events, Boxes | None]:
    """Without the events in the rectangle and without the boxes that touch it."""
    left, right, top, bottom = rectangle
    drop = (left <= events.x) & (events.x <= right) & (top <= events.y) & (events.y <= bottom)
    if drop.all():
        return events, boxes
    if boxes is not None:
        x, y, w, h = boxes[:, :4].T
        boxes = boxes[(x > right) | (x + w < left) | (y > bottom) | (y + h < top)]
    return events.select(~drop), boxes


def _rotated(
    x: npt.NDArray[Any], y: npt.NDArray[Any], degrees: float, width: int, height: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Points turned about the centre of the frame."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    right, down = x - width / 2, y - height / 2
    return width / 2 + right * cos - down * sin, height / 2 + right * sin + down * cos


def _rotate_boxes(boxes: Boxes, degrees: float, width: int, height: int) -> Boxes:
    """The upright boxes around the turned ones, without those that leave the frame or touch its right or lower end."""
    x, y, w, h = boxes[:, :4].astype(np.float64).T
    corners = _rotated(np.stack([x, x + w, x, x + w]), np.stack([y, y, y + h, y + h]), degrees, width, height)
    left, top = (axis.min(axis=0) for axis in corners)
    right, bottom = (axis.max(axis=0) for axis in corners)
    out = boxes.copy()
    out[:, :4] = np.stack([left, top, right - left, bottom - top], axis=1)
    return out[(left >= 0) & (top >= 0) & (right < width) & (bottom < height)]
