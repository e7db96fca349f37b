"""3D boxes as a task: what is kept of a model's answers, how it is judged and written."""

import json
import math

import numpy as np
import pytest
import torch

from parapos.data import FormatError
from parapos.data.nuscenes_classes import ATTRIBUTES, CLASSES
from parapos.models.unitr import Boxes3D
from parapos.tasks import create_task
from parapos.tasks.nuscenes_results import attribute_of, from_results, read_submission, to_global
from parapos.tasks.nuscenes_scores import Objects, counted, score

from ..driving import driving


@pytest.fixture(scope="module")
def data():
    return driving("val")


def true_boxes(frame):
    """What is true, as a perfect model would say it."""
    rows = frame.objects
    boxes = torch.from_numpy(np.nan_to_num(rows["box"]))
    return Boxes3D(boxes, torch.ones(len(rows)), torch.from_numpy(rows["label"].astype(int)))


def filled(task, frames, numbers=None):
    evaluator = task.evaluator()
    for number in range(len(frames)) if numbers is None else numbers:
        evaluator.add(number, *true_boxes(frames[number]))
    return evaluator


def test_a_perfect_model_gets_all_points(data):
    task = create_task("detection3d", data)
    found = filled(task, data.frames).compute()
    assert found["map"] == pytest.approx(1.0)
    assert all(found[f"ap_{name}"] == pytest.approx(1.0) for name in CLASSES)
    for error in ("translation", "scale", "orientation", "velocity"):
        assert found[f"{error}_error"] == pytest.approx(0.0, abs=1e-5)
    assert found["attribute_error"] == pytest.approx(0.0)  # they follow from speeds here
    assert list(found) == [metric.name for metric in task.metrics]
    assert task.headline == "map"


def test_states_of_processes_are_joined(data):
    task = create_task("detection3d", data)
    whole, first, second = (filled(task, data.frames, part) for part in (None, [0, 2], [1]))
    joined = task.evaluator()
    joined.merge([first.state(), second.state()])
    assert joined.compute() == whole.compute()


def test_nothing_found_and_nothing_true(data):
    task = create_task("detection3d", data)
    evaluator = task.evaluator()
    for number in range(3):
        evaluator.add(number, torch.zeros(0, 9), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    found = evaluator.compute()
    assert (found["map"], found["nds"], found["velocity_error"]) == (0.0, 0.0, 1.0)
    blind = driving("val")
    for frame in blind.frames:
        frame.objects = frame.objects[:0]
    assert math.isnan(filled(create_task("detection3d", blind), blind.frames).compute()["map"])


def test_limits_and_what_is_not_finite(data):
    task = create_task("detection3d", data, max_boxes=3, min_score=0.5)
    evaluator = task.evaluator()
    boxes = true_boxes(data.frames[0]).boxes[:6]
    evaluator.add(0, boxes, torch.tensor([0.6, 0.9, 0.1, 0.8, 0.7, 0.4]), torch.zeros(6, dtype=torch.int64))
    assert evaluator.found[0][:, 9].tolist() == pytest.approx([0.9, 0.8, 0.7])
    with pytest.raises(ValueError, match="boxes of sample 0 are not finite"):
        evaluator.add(0, boxes * math.nan, torch.ones(6), torch.zeros(6, dtype=torch.int64))
    for wrong in ({"max_boxes": 0}, {"max_boxes": 501}, {"min_score": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            create_task("detection3d", data, **wrong)
    with pytest.raises(ValueError, match="relabel"):
        task.adapt(task.learned(), "names")
    with pytest.raises(ValueError, match="has 10 classes, the model has 3"):
        task.adapt({"num_classes": 3})


def test_what_is_written_is_read_again(data, tmp_path):
    task = create_task("detection3d", data)
    evaluator = filled(task, data.frames)
    path, table = task.export(evaluator, tmp_path)
    tokens = [frame.token for frame in data.frames]
    again = score(data.frames, read_submission(path, tokens))
    assert again.map == pytest.approx(evaluator.scores().map)
    assert again.nds == pytest.approx(evaluator.scores().nds)
    assert table.read_text().splitlines()[0].startswith("class,ap,ap_0.5m")
    content = json.loads(path.read_text())
    del content["results"][tokens[0]]
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=f"sample {tokens[0]}: a sample of the split is missing"):
        read_submission(path, tokens)


@pytest.mark.parametrize(
    ("sensors", "camera", "lidar"), [("both", True, True), ("lidar", False, True), ("cameras", True, False)]
)
def test_results_say_which_sensors_were_used(tmp_path, sensors, camera, lidar):
    judged = driving("val", sensors=sensors)
    task = create_task("detection3d", judged)
    path, _ = task.export(filled(task, judged.frames), tmp_path)
    others = dict.fromkeys(("use_radar", "use_map", "use_external"), False)
    assert json.loads(path.read_text())["meta"] == {"use_camera": camera, "use_lidar": lidar, **others}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"detection_score": math.nan}, "detection_score"),
        ({"detection_name": "tank"}, "detection_name"),
        ({"size": [1, 2]}, "size must be 3 finite numbers"),
        ({"rotation": [0, 0, 0, 0]}, "rotation"),
        ({"sample_token": "x"}, "sample_token"),
        ({"velocity": "fast"}, "velocity must be 2 finite numbers"),
        ({"size": [-1, 1, 1]}, "size must be 3 positive numbers"),
        ({"size": [1, 0, 1]}, "size must be 3 positive numbers"),
        ({"size": [1, "1", 1]}, "size must be 3 finite numbers"),
        ({"translation": "123"}, "translation must be 3 finite numbers"),
        ({"translation": [True, 0, 0]}, "translation must be 3 finite numbers"),
        ({"detection_score": "0.5"}, "detection_score must be a finite number"),
        ({"detection_score": True}, "detection_score must be a finite number"),
        ({"detection_score": 10**400}, "too large"),
        ({"rotation": [1e-200, 0, 0, 0]}, "rotation must be a quaternion that is not 0"),
        ({"attribute_name": "vehicle.flying"}, "attribute_name must be one of"),
        ({"attribute_name": ["vehicle.moving"]}, "attribute_name must be one of"),
        ({"attribute_name": None}, "attribute_name must be one of"),
    ],
)
def test_results_that_cannot_be_right(change, message):
    box = {"sample_token": "a", "translation": [0, 0, 0], "size": [1, 1, 1], "rotation": [1, 0, 0, 0]}
    box |= {"velocity": [0, 0], "detection_name": "car", "detection_score": 0.5, "attribute_name": ""}
    assert len(from_results({"a": [box]}, ["a"])) == 1
    with pytest.raises(FormatError, match=rf"sample a: box 0: .*({message})"):
        from_results({"a": [{**box, **change}]}, ["a"])
    with pytest.raises(FormatError, match="sample b: not a sample of the split"):
        from_results({"a": [], "b": []}, ["a"])
    with pytest.raises(FormatError, match="sample a: expected a list of at most 500"):
        from_results({"a": [box] * 501}, ["a"])


def test_files_of_results_that_are_none(tmp_path):
    for content in (b"no", b"[]", b'{"results": []}', b'{"meta": 1}', b"[" * 10_000):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(FormatError, match="results"):
            read_submission(tmp_path / "a.json", [])


def test_attributes_follow_from_class_and_speed():
    assert attribute_of("car", 0.21) == "vehicle.moving"
    assert attribute_of("car", 0.2) == "vehicle.parked"
    assert attribute_of("bus", 0.1) == "vehicle.stopped"
    assert (attribute_of("bicycle", 1.0), attribute_of("motorcycle", 0.0)) == (
        "cycle.with_rider",
        "cycle.without_rider",
    )
    assert (attribute_of("pedestrian", 1.0), attribute_of("pedestrian", 0.0)) == (ATTRIBUTES[0], ATTRIBUTES[2])
    assert {attribute_of(name, 5.0) for name in ("barrier", "traffic_cone")} == {""}


def test_global_and_back(data):
    frame = data.frames[2]
    objects = to_global(frame.objects["box"], np.ones(20), frame.objects["label"], frame.lidar2global, 0)
    assert np.allclose(objects.translation, frame.objects["translation"], atol=1e-6)
    assert np.allclose(objects.size, frame.objects["size"])
    assert np.allclose(objects.velocity, frame.objects["velocity"], atol=1e-6)
    same = np.abs((objects.rotation * frame.objects["rotation"]).sum(1))
    assert np.allclose(same, 1, atol=1e-6)


def test_what_counts_ends_strictly_at_the_range_and_not_in_racks():
    places = [[50.0, 0, 0], [49.9, 0, 0], [5.0, 5.0, 0], [9.0, 9.0, 0]]
    n = len(places)
    objects = Objects(
        sample=np.zeros(n, int), label=np.array([0, 0, CLASSES.index("bicycle"), CLASSES.index("bicycle")]),
        translation=np.array(places), size=np.ones((n, 3)), rotation=np.tile([1.0, 0, 0, 0], (n, 1)),
        velocity=np.zeros((n, 2)), attribute=np.full(n, -1), score=np.ones(n), points=np.ones(n, int),
    )  # fmt: skip
    rack = np.array([[5.0, 5.0, 0, 2, 4, 2, 1, 0, 0, 0]])
    kept = counted(objects, np.zeros((1, 2)), [rack])
    assert kept.translation[:, 0].tolist() == [49.9, 9.0]
    none = counted(objects.select(np.zeros(0, int)), np.zeros((1, 2)), [rack])
    assert len(none) == 0
