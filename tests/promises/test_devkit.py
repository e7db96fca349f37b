"""nuscenes-devkit in an environment of its own: it loads the generated copy, and gives the same scores.

PARAPOS_DEVKIT names the Python of an environment that has it; without that, one is made, for which a network is needed.
"""

import json
import os
import subprocess
import venv

import numpy as np
import pytest

from parapos.data.nuscenes_classes import ATTRIBUTES, CLASSES
from parapos.tasks.nuscenes_results import from_results
from parapos.tasks.nuscenes_scores import DISTANCES, ERRORS, score

from ..driving import driving, tree

NAMES = dict(zip(ERRORS, ("trans_err", "scale_err", "orient_err", "vel_err", "attr_err"), strict=True))
SCRIPT = """
import json, sys
from nuscenes.nuscenes import NuScenes
from nuscenes.eval.common.config import config_factory
from nuscenes.eval.detection.evaluate import DetectionEval
root, out, *paths = sys.argv[1:]
nusc = NuScenes("v1.0-mini", root, verbose=False)
boxes = {}
for note in nusc.sample_annotation:
    box = nusc.get_box(note["token"])
    velocity = nusc.box_velocity(note["token"]).tolist()
    boxes[note["token"]] = [*box.center.tolist(), *box.wlh.tolist(), *box.orientation.elements.tolist(), *velocity]
links = {s["token"]: sorted(s["data"]) for s in nusc.sample}
found = []
for path in paths:
    judge = DetectionEval(nusc, config_factory("detection_cvpr_2019"), path, "mini_val", out, verbose=False)
    metrics, _ = judge.evaluate()
    found.append(metrics.serialize())
print("FOUND" + json.dumps({"boxes": boxes, "links": links, "metrics": found}))
"""


@pytest.fixture(scope="module")
def devkit(tmp_path_factory):
    """A Python that has the devkit."""
    if given := os.environ.get("PARAPOS_DEVKIT"):
        return given
    folder = tmp_path_factory.mktemp("devkit")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--timeout", "20", "nuscenes-devkit==1.2.0"], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"nuscenes-devkit cannot be installed here: {done.stderr[-200:]!r}")
    return python


def submission(frames, seed=None, shift=0.0, without=None):
    """What is true as predictions; with a seed, moved by chance, doubled, dropped and confused."""
    rng = np.random.default_rng(seed)
    results = {}
    for frame in frames:
        rows = []
        for row in frame.objects:
            for copy in range(1 if seed is None else int(rng.integers(0, 4))):
                noise = np.zeros(9) if seed is None else rng.normal(0, [0.7, 0.7, 0.3, 0.2, 0.2, 0.2, 0.4, 0.5, 0.5])
                label = int(row["label"]) if seed is None or rng.random() < 0.8 else int(rng.integers(10))
                if CLASSES[label] == without:
                    continue
                attribute = int(row["attribute"]) if seed is None else int(rng.integers(-1, 8))
                yaw = 2 * np.arctan2(row["rotation"][3], row["rotation"][0]) + noise[6]
                rows.append(
                    {
                        "sample_token": frame.token,
                        "translation": (row["translation"] + noise[:3] + [shift, 0, 0]).tolist(),
                        "size": (row["size"] * np.exp(noise[3:6])).tolist(),
                        "rotation": [float(np.cos(yaw / 2)), 0.0, 0.0, float(np.sin(yaw / 2))],
                        "velocity": (np.nan_to_num(row["velocity"]) + noise[7:]).tolist(),
                        "detection_name": CLASSES[label],
                        "detection_score": 1.0 if seed is None else float(np.round(rng.random(), 1 + copy)),
                        "attribute_name": ATTRIBUTES[attribute] if attribute >= 0 else "",
                    }
                )
        results[frame.token] = rows
    return {"meta": dict.fromkeys(("use_camera", "use_lidar"), True) | dict.fromkeys(
        ("use_radar", "use_map", "use_external"), False), "results": results}  # fmt: skip


def judged(frames, given):
    return score(frames, from_results(given["results"], [frame.token for frame in frames]))


def test_what_is_true_gets_all_points():
    frames = driving("val").frames
    whole = judged(frames, submission(frames))
    assert whole.map == pytest.approx(1.0)
    assert whole.nds == pytest.approx(1.0)
    assert judged(frames, submission(frames, without="bus")).map == pytest.approx(0.9)
    assert judged(frames, submission(frames, shift=0.75)).map == pytest.approx(0.75)
    nothing = judged(frames, {"results": {frame.token: [] for frame in frames}})
    assert (nothing.map, nothing.nds) == (0.0, 0.0)
    assert set(nothing.mean_errors.values()) == {1.0}


@pytest.mark.full
def test_the_devkit_agrees(devkit, tmp_path):
    frames = driving("val").frames
    cases = [submission(frames), submission(frames, without="car"), submission(frames, shift=0.75)]
    cases += [submission(frames, seed=seed) for seed in range(4)]
    paths = []
    for number, case in enumerate(cases):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(case))
    done = subprocess.run(
        [devkit, "-c", SCRIPT, str(tree()), str(tmp_path / "out"), *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "MPLBACKEND": "agg"},
    )
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    for case, expected in zip(cases, found["metrics"], strict=True):
        ours = judged(frames, case)
        assert ours.map == pytest.approx(expected["mean_ap"], abs=1e-6)
        assert ours.nds == pytest.approx(expected["nd_score"], abs=1e-6)
        for i, name in enumerate(CLASSES):
            aps = [expected["label_aps"][name][str(distance)] for distance in DISTANCES]
            assert ours.ap[i] == pytest.approx(aps, abs=1e-6)
            errors = [expected["label_tp_errors"][name][NAMES[error]] for error in ERRORS]
            assert ours.errors[i] == pytest.approx(errors, abs=1e-6, nan_ok=True)
    from parapos.data.readers.nuscenes_tables import Tables

    tables = Tables(tree() / "v1.0-mini")
    for token, row in tables["sample_annotation"].items():
        numbers = [*row["translation"], *row["size"], *row["rotation"], *tables.velocity(row)]
        assert numbers == pytest.approx(found["boxes"][token], abs=1e-6, nan_ok=True)
    assert {token: sorted(tables.keyframes(token)) for token in tables["sample"]} == found["links"]
