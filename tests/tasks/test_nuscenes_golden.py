"""The nuScenes score against figures of nuscenes-devkit 1.2.0."""

import json
import math

import numpy as np
import pytest

from parapos.data.nuscenes_classes import CLASSES, scenes
from parapos.data.nuscenes_frames import scene_frames
from parapos.data.readers.nuscenes_tables import TABLES, Tables
from parapos.tasks.nuscenes_results import from_results
from parapos.tasks.nuscenes_scores import DISTANCES, ERRORS, counted, score, truth_of

from .. import golden

NAMES = {"translation": "trans_err", "scale": "scale_err", "orientation": "orient_err", "velocity": "vel_err"}
NAMES |= {"attribute": "attr_err"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    known = {}

    def load(path):
        if path not in known:
            content = json.loads(path.read_text())
            folder = tmp_path_factory.mktemp("tables") / "v1.0-mini"
            folder.mkdir()
            for name in TABLES:
                (folder / f"{name}.json").write_text(json.dumps(content["tables"][name]))
            tables = Tables(folder)
            split = scenes("v1.0-mini")
            chosen = [row["token"] for row in tables["scene"].values() if split.get(row["name"]) == "val"]
            known[path] = content, tables, [frame for token in chosen for frame in scene_frames(tables, token)]
        return known[path]

    return load


def close(value, expected):
    return math.isnan(value) if expected is None else abs(value - expected) <= 1e-6


@golden.files("nuscenes-metric*.json")
def test_every_case_has_the_devkits_metrics(path, opened):
    content, _, frames = opened(path)
    places = [frame.token for frame in frames]
    for name, case in content["cases"].items():
        found = score(frames, from_results(case["submission"]["results"], places))
        expected = case["metrics"]
        assert close(found.map, expected["mean_ap"]), name
        assert close(found.nds, expected["nd_score"]), name
        for row, label in enumerate(CLASSES):
            for column, distance in enumerate(DISTANCES):
                assert close(found.ap[row, column], expected["label_aps"][label][str(distance)]), (name, label)
            for column, error in enumerate(ERRORS):
                assert close(found.errors[row, column], expected["label_tp_errors"][label][NAMES[error]]), (name, label)
        for error in ERRORS:
            assert close(found.mean_errors[error], expected["tp_errors"][NAMES[error]]), (name, error)


@golden.files("nuscenes-metric*.json")
def test_what_counts_and_velocities_are_the_devkits(path, opened):
    content, tables, frames = opened(path)
    places = [frame.token for frame in frames]
    car = np.array([frame.car[:2] for frame in frames])
    kept = counted(truth_of(frames), car, [frame.racks for frame in frames])
    counts = np.bincount(kept.sample, minlength=len(frames)).tolist()
    assert dict(zip(places, counts, strict=True)) == content["gt_boxes_after_filter"]
    for token, expected in content["gt_velocity"].items():
        found = tables.velocity(tables["sample_annotation"][token])
        assert all(close(a, b) for a, b in zip(found, expected, strict=False)), token
