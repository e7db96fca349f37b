"""The nuScenes detection score: mean average precision by centre distance, five errors of true positives, and NDS.

Equal to nuscenes-devkit's detection_cvpr_2019. n boxes, C classes, S samples; all places are in the global frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..data import rigid
from ..data.nuscenes_classes import CLASSES
from ..data.nuscenes_frames import Frame

Array = np.ndarray[Any, Any]
RANGES = {  # metres from the car within which a class counts
    **dict.fromkeys(("car", "truck", "bus", "trailer", "construction_vehicle"), 50.0),
    **dict.fromkeys(("pedestrian", "motorcycle", "bicycle"), 40.0),
    **dict.fromkeys(("traffic_cone", "barrier"), 30.0),
}
DISTANCES = (0.5, 1.0, 2.0, 4.0)  # metres between centres of what matches
ERROR_DISTANCE = 2.0
RECALLS = np.linspace(0, 1, 101)
FIRST = 11  # recalls up to 0.1 do not count
LEAST_PRECISION = 0.1
AP_WEIGHT = 5
ERRORS = ("translation", "scale", "orientation", "velocity", "attribute")
UNDEFINED = {("traffic_cone", "orientation"), *((c, e) for c in ("traffic_cone", "barrier") for e in ERRORS[3:])}
CYCLES = [CLASSES.index("bicycle"), CLASSES.index("motorcycle")]


@dataclass(frozen=True, eq=False)
class Objects:
    """Boxes of all samples. sample (n,): the sample's number; label (n,) of `CLASSES`; translation (n, 3); size (n, 3)
    as width, length, height; rotation (n, 4) as w, x, y, z; velocity (n, 2), NaN if unknown; attribute (n,) a number of
    `ATTRIBUTES`, -1 for none; score (n,) of predictions; points (n,) in them, of LiDAR and radar, for what is true."""

    sample: Array
    label: Array
    translation: Array
    size: Array
    rotation: Array
    velocity: Array
    attribute: Array
    score: Array
    points: Array

    def __len__(self) -> int:
        return len(self.sample)

    def select(self, index: Array) -> Objects:
        return Objects(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @classmethod
    def join(cls, parts: Sequence[Objects]) -> Objects:
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    @classmethod
    def empty(cls) -> Objects:
        """No boxes."""
        whole = np.zeros(0, np.int64)
        places = {"translation": np.zeros((0, 3)), "size": np.zeros((0, 3)), "rotation": np.zeros((0, 4))}
        return cls(whole, whole, **places, velocity=np.zeros((0, 2)), attribute=whole, score=np.zeros(0), points=whole)


@dataclass(frozen=True, eq=False)
class Scores:
    """ap (C, 4) by distance; errors (C, 5), NaN where they are undefined; map, nds; mean_errors by name."""

    ap: Array
    errors: Array
    map: float
    nds: float
    mean_errors: dict[str, float]


def truth_of(frames: Sequence[Frame]) -> Objects:
    """What is true in these frames, of which all boxes count that annotators drew; the places are those of samples."""
    parts = [Objects.empty()]
    for number, frame in enumerate(frames):
        rows = frame.objects
        same = {name: rows[name].astype(np.float64) for name in ("translation", "size", "rotation", "velocity")}
        label, attribute = rows["label"].astype(np.int64), rows["attribute"].astype(np.int64)
        points = rows["lidar"].astype(np.int64) + rows["radar"]
        sample, score = np.full(len(rows), number), np.full(len(rows), math.nan)
        parts.append(Objects(sample=sample, label=label, attribute=attribute, score=score, points=points, **same))
    return Objects.join(parts)


def score(frames: Sequence[Frame], found: Objects) -> Scores:
    """Scores of predictions on frames, filtered as the benchmark does."""
    car, racks = np.array([frame.car[:2] for frame in frames]).reshape(-1, 2), [frame.racks for frame in frames]
    truth, found = (counted(part, car, racks) for part in (truth_of(frames), found))
    return judge(truth, found)


def counted(objects: Objects, car: Array, racks: Sequence[Array]) -> Objects:
    """Those that count. car (S, 2): where the car is in each sample; racks: for each sample its racks of bicycles, rows
    (r, 10) of translation, size and rotation, in which no bicycle and no motorcycle counts."""
    limits = np.array([RANGES[name] for name in CLASSES])
    gaps = objects.translation[:, :2] - car[objects.sample]
    kept = objects.select((np.sqrt((gaps**2).sum(1)) < limits[objects.label]) & (objects.points != 0))
    parked = np.zeros(len(kept), bool)
    for row in np.flatnonzero(np.isin(kept.label, CYCLES)):
        parked[row] = any(_holds(rack, kept.translation[row]) for rack in racks[kept.sample[row]])
    return kept.select(~parked)


def _holds(rack: Array, point: Array) -> bool:
    local = (point - rack[:3]) @ rigid.rotation(rack[6:])
    width, length, height = rack[3:6]
    return bool((np.abs(local) <= np.array([length, width, height]) / 2).all())


def judge(truth: Objects, found: Objects) -> Scores:
    """Scores of predictions that count against what is true and counts. Of equal scores, the later row goes first."""
    ap, errors = np.zeros((len(CLASSES), len(DISTANCES))), np.full((len(CLASSES), len(ERRORS)), math.nan)
    for number, name in enumerate(CLASSES):
        true, guessed = (part.select(part.label == number) for part in (truth, found))
        guessed = guessed.select(np.argsort(guessed.score, kind="stable")[::-1])
        matches = _match(true, guessed)
        for column, distance in enumerate(DISTANCES):
            precision, _ = _curve(matches[distance], guessed.score, len(true))
            ap[number, column] = np.maximum(precision[FIRST:] - LEAST_PRECISION, 0).mean() / (1 - LEAST_PRECISION)
        measured = _errors(matches[ERROR_DISTANCE], true, guessed, name)
        for column, error in enumerate(ERRORS):
            if (name, error) not in UNDEFINED:
                errors[number, column] = measured[column]
    mean = float(ap.mean(1).mean())
    by_name = {error: float(np.nanmean(errors[:, column])) for column, error in enumerate(ERRORS)}
    nds = (AP_WEIGHT * mean + sum(max(0.0, 1 - error) for error in by_name.values())) / (AP_WEIGHT + len(ERRORS))
    return Scores(ap, errors, mean, nds, by_name)


def _match(true: Objects, found: Objects) -> dict[float, Array]:
    """For each distance the row of `true` that each of `found` takes, in its order, or -1: the nearest of its sample
    that is free. Only samples with both need a look."""
    matches = {distance: np.full(len(found), -1) for distance in DISTANCES}
    rows: dict[int, list[int]] = {}
    for row, sample in enumerate(true.sample.tolist()):
        rows.setdefault(sample, []).append(row)
    free = {distance: np.ones(len(true), bool) for distance in DISTANCES}
    for place, sample in enumerate(found.sample.tolist()):
        near = rows.get(sample)
        if near is None:
            continue
        gap = np.sqrt(((true.translation[near, :2] - found.translation[place, :2]) ** 2).sum(1))
        if gap.min() >= DISTANCES[-1]:
            continue
        for distance in DISTANCES:
            open_gap = np.where(free[distance][near], gap, math.inf)
            best = int(open_gap.argmin())
            if open_gap[best] < distance:
                matches[distance][place] = near[best]
                free[distance][near[best]] = False
    return matches


def _curve(match: Array, score: Array, total: int) -> tuple[Array, Array]:
    """Precision and score (101,) at the recalls; zeros if nothing matches."""
    hit = match >= 0
    if not hit.any():
        return np.zeros(len(RECALLS)), np.zeros(len(RECALLS))
    true, false = np.cumsum(hit).astype(float), np.cumsum(~hit).astype(float)
    recall = true / total
    precision, at = (np.interp(RECALLS, recall, y, right=0) for y in (true / (true + false), score))
    return precision, at


def _errors(match: Array, true: Objects, found: Objects, name: str) -> list[float]:
    """The mean of each error over the recalls that were reached, 1 if none was."""
    hit = match >= 0
    if not hit.any():
        return [1.0] * len(ERRORS)
    a, b = true.select(match[hit]), found.select(hit)
    _, at = _curve(match, found.score, len(true))
    last = int(np.flatnonzero(at)[-1]) if at.any() else 0
    if last < FIRST:
        return [1.0] * len(ERRORS)
    means = []
    for values in _differences(a, b, math.pi if name == "barrier" else 2 * math.pi):
        running = _running_mean(values)
        means.append(float(np.interp(at[::-1], b.score[::-1], running[::-1])[::-1][FIRST : last + 1].mean()))
    return means


def _differences(true: Objects, found: Objects, period: float) -> list[Array]:
    """(k,) of each error, in the order of `ERRORS`, for k pairs."""
    gap = np.sqrt(((true.translation - found.translation)[:, :2] ** 2).sum(1))
    overlap = np.minimum(true.size, found.size).prod(1)
    scale = 1 - overlap / (true.size.prod(1) + found.size.prod(1) - overlap)
    turn = rigid.yaw_of(rigid.rotation(true.rotation)) - rigid.yaw_of(rigid.rotation(found.rotation))
    turn = (turn + period / 2) % period - period / 2
    speed = np.sqrt(((true.velocity - found.velocity) ** 2).sum(1))
    attribute = np.where(true.attribute < 0, math.nan, (true.attribute != found.attribute).astype(float))
    return [gap, scale, np.abs(turn), speed, attribute]


def _running_mean(values: Array) -> Array:
    """Means of all values so far; NaN are passed over, 0 before the first value, ones if there is none."""
    valid = ~np.isnan(values)
    if not valid.any():
        return np.ones(len(values))
    return np.nancumsum(values) / np.maximum(np.cumsum(valid), 1)
