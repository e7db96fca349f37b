"""Detections in the result format of nuScenes: a JSON file that its server and its devkit take, and back again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data import FormatError, rigid
from ..data.nuscenes_classes import ATTRIBUTES, CLASSES
from .nuscenes_scores import Objects

Array = np.ndarray[Any, Any]
MOVING = 0.2  # metres per second from which on something moves
MOST_BOXES = 500  # of a sample
LEAST_LENGTH = 1e-6  # of a quaternion, below which its direction is noise
VEHICLES = ("car", "truck", "construction_vehicle", "bus", "trailer")
CYCLES = ("motorcycle", "bicycle")


def attribute_of(name: str, speed: float) -> str:
    """The attribute that goes with a class and a speed; "" for classes that have none."""
    moves = speed > MOVING
    if name == "pedestrian":
        return "pedestrian.moving" if moves else "pedestrian.standing"
    if name in CYCLES:
        return "cycle.with_rider" if moves else "cycle.without_rider"
    if name in VEHICLES:
        return "vehicle.moving" if moves else "vehicle.stopped" if name == "bus" else "vehicle.parked"
    return ""


def to_global(boxes: Array, scores: Array, labels: Array, lidar2global: Array, sample: int) -> Objects:
    """Boxes (n, 9) in the LiDAR frame of a sample as objects in the global frame. Attributes follow from speeds."""
    turn = lidar2global[:3, :3]
    velocity = np.concatenate([boxes[:, 7:9], np.zeros((len(boxes), 1))], 1) @ turn.T
    headings = turn @ rigid.turn(boxes[:, 6])
    speeds = np.hypot(velocity[:, 0], velocity[:, 1])
    names = [attribute_of(CLASSES[label], speed) for label, speed in zip(labels.tolist(), speeds.tolist(), strict=True)]
    return Objects(
        sample=np.full(len(boxes), sample),
        label=np.asarray(labels, np.int64),
        translation=rigid.apply(lidar2global, boxes[:, :3]),
        size=boxes[:, [4, 3, 5]],
        rotation=np.array([rigid.quaternion_of(matrix) for matrix in headings]).reshape(-1, 4),
        velocity=velocity[:, :2],
        attribute=np.array([number_of(name) for name in names], np.int64),
        score=np.asarray(scores, np.float64),
        points=np.full(len(boxes), -1),
    )


def number_of(attribute: str) -> int:
    """The number of an attribute; -1 for "", which is never right."""
    return ATTRIBUTES.index(attribute) if attribute else -1


def submission(found: Mapping[str, Objects], sensors: str) -> dict[str, Any]:
    """The result file of predictions by sample token. Every sample of the split must be there, also without boxes.
    sensors: what they were made from, "both", "lidar" or "cameras"."""
    meta = {"use_camera": sensors != "lidar", "use_lidar": sensors != "cameras"}
    meta |= dict.fromkeys(("use_radar", "use_map", "use_external"), False)
    return {"meta": meta, "results": {token: _rows(token, objects) for token, objects in found.items()}}


def _rows(token: str, objects: Objects) -> list[dict[str, Any]]:
    return [
        {
            "sample_token": token,
            "translation": objects.translation[i].tolist(),
            "size": objects.size[i].tolist(),
            "rotation": objects.rotation[i].tolist(),
            "velocity": objects.velocity[i].tolist(),
            "detection_name": CLASSES[objects.label[i]],
            "detection_score": float(objects.score[i]),
            "attribute_name": ATTRIBUTES[objects.attribute[i]] if objects.attribute[i] >= 0 else "",
        }
        for i in range(len(objects))
    ]


def read_submission(path: str | Path, tokens: Sequence[str]) -> Objects:
    """The predictions of a result file, in its order. tokens: the samples of the split, whose places are the numbers of
    samples. FormatError if the file has other samples, or boxes that cannot be right."""
    try:
        content = json.loads(Path(path).read_bytes())
        results = content["results"]
        given = list(results)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON with 'results' by sample: {str(error)[:200]}") from None
    return from_results(results, tokens, str(path)) if isinstance(results, dict) else _not_a_table(path, given)


def _not_a_table(path: str | Path, given: Any) -> Objects:
    raise FormatError(f"{path}: results: expected a table of lists by sample token, got {type(given).__name__}")


def from_results(results: Mapping[str, Any], tokens: Sequence[str], path: str = "results") -> Objects:
    """As `read_submission`, of what is below "results"."""
    place = {token: i for i, token in enumerate(tokens)}
    wrong = set(results) ^ set(place)
    if wrong:
        token = min(wrong)
        told = "not a sample of the split" if token in results else "a sample of the split is missing"
        raise FormatError(f"{path}: sample {token}: {told}, expected the {len(place)} samples of the split")
    rows: list[tuple[Any, ...]] = []
    for token, boxes in results.items():
        if not isinstance(boxes, list) or len(boxes) > MOST_BOXES:
            raise FormatError(f"{path}: sample {token}: expected a list of at most {MOST_BOXES} boxes")
        for i, box in enumerate(boxes):
            try:
                rows.append((place[token], *_parsed(box, token)))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                told = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise FormatError(f"{path}: sample {token}: box {i}: {told[:200]}") from None
    if not rows:
        return Objects.empty()
    sample, label, translation, size, rotation, velocity, attribute, score = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    points = np.full(len(rows), -1)
    return Objects(sample, label, translation, size, rotation, velocity, attribute, score, points)


def _parsed(box: Mapping[str, Any], token: str) -> tuple[Any, ...]:
    if box["sample_token"] != token:
        raise ValueError(f"sample_token is {box['sample_token']!r}, expected that of its list")
    if box["detection_name"] not in CLASSES:
        raise ValueError(f"detection_name must be one of {', '.join(CLASSES)}, got {box['detection_name']!r}")
    translation, size, rotation, velocity = (
        _numbers(box, name, count)
        for name, count in (("translation", 3), ("size", 3), ("rotation", 4), ("velocity", 2))
    )
    if min(size) <= 0:
        raise ValueError(f"size must be 3 positive numbers, got {box['size']!r:.80}")
    if math.hypot(*rotation) < LEAST_LENGTH:
        raise ValueError(f"rotation must be a quaternion that is not 0, got {box['rotation']!r:.80}")
    if not _is_number(box["detection_score"]):
        raise ValueError(f"detection_score must be a finite number, got {box['detection_score']!r:.80}")
    if box["attribute_name"] not in ("", *ATTRIBUTES):
        told = f"one of {', '.join(ATTRIBUTES)}, or empty"
        raise ValueError(f"attribute_name must be {told}, got {box['attribute_name']!r:.80}")
    label, attribute = CLASSES.index(box["detection_name"]), number_of(box["attribute_name"])
    return label, translation, size, rotation, velocity, attribute, float(box["detection_score"])


def _numbers(box: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = box[name]
    if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
        raise ValueError(f"{name} must be {count} finite numbers, got {values!r:.80}")
    return [float(value) for value in values]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
