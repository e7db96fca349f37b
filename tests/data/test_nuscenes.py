"""nuScenes as a data set: what a sample holds, sensors left out, balanced drawing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from parapos.data import FormatError, create_dataset
from parapos.data.nuscenes import Augment, balanced
from parapos.data.nuscenes_classes import CATEGORIES, CLASSES, IGNORED, SAMPLES, scenes
from parapos.data.nuscenes_sensors import sweep_points
from parapos.data.sampling import Key
from parapos.models.unitr import CLASSES as MODEL_CLASSES

from ..driving import RANGE, SMALL, driving, tree

STILL = dict(resize=(0.48, 0.48), image_flip=0.0, image_turn=0.0, flip=0.0, turn=0.0, scale=(1.0, 1.0), shift=0.0)


def same(a, b):
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_scenes_and_categories_are_the_benchmarks():
    splits = list(scenes("v1.0-trainval").values())
    assert (splits.count("train"), splits.count("val")) == (700, 150)
    assert len(scenes("v1.0-test")) == 150
    assert not set(scenes("v1.0-test")) & set(scenes("v1.0-trainval"))
    assert set(scenes("v1.0-mini")) < set(scenes("v1.0-trainval"))
    assert len(CATEGORIES) + len(IGNORED) == 23
    assert set(CATEGORIES.values()) == set(CLASSES) == set(MODEL_CLASSES)
    assert SAMPLES["v1.0-trainval", "train"] + SAMPLES["v1.0-trainval", "val"] == 34_149


def test_a_sample_is_what_the_model_takes():
    data = driving("val")
    sample = data[0]
    assert sample["points"].dtype == torch.float32
    assert sample["points"].shape[1] == 5
    assert sample["images"].shape == (6, 3, 64, 176)
    assert sample["image_mask"].tolist() == [True] * 6
    assert sample["boxes"].shape == (20, 9)
    assert sample["boxes"].isfinite().all()
    assert sorted(set(sample["labels"].tolist())) == list(range(10))
    assert torch.equal(sample["lidar_aug"], torch.eye(4))
    assert (sample["points"][:, :2].abs() <= 21.6).all()
    assert (sample["points"][:, 4] >= 0).all()


def test_the_start_of_a_scene_repeats_its_oldest_sweep():
    frame = driving("val").frames[0]
    once, thrice = (sweep_points(tree(), frame, count) for count in (1, 3))
    near = (np.abs(once[:, :2]) < 1).all(1).sum()  # points on the car, which older sweeps leave out
    assert near > 0
    assert len(thrice) == 3 * len(once) - 2 * near
    assert set(np.unique(thrice[:, 4])) == {0.0}
    older = driving("val").frames[1]
    points = sweep_points(tree(), older, 10)
    counts = [int((points[:, 4] == np.float32(sweep.lag)).sum()) for sweep in older.sweeps]
    assert counts[-1] > 5 * counts[1]  # the fifth of five stands for six


def test_training_samples_follow_from_seed_epoch_and_place():
    a, b, c = driving("train"), driving("train"), driving("train", seed=1)
    assert same(a[Key(3, 1)], b[Key(3, 1)])
    assert not same(a[Key(3, 1)], a[Key(3, 2)])
    assert (a.order == b.order).all()
    assert (a.order != c.order).any()
    still = a.as_judged()
    assert len(still) == 3
    assert len(a) == 30
    assert same(still[1], still[Key(1, 5)])


def test_sensors_can_be_left_out():
    lidar, cameras = driving("val", sensors="lidar")[0], driving("val", sensors="cameras")[0]
    assert not lidar["image_mask"].any()
    assert not lidar["images"].any()
    assert len(lidar["points"])
    assert cameras["image_mask"].all()
    assert len(cameras["points"]) == 0
    varied = driving("train", sensors="cameras")[Key(0, 0)]
    assert len(varied["points"]) == 0
    other = create_dataset("nuscenes_lidar", "val", root=tree(), point_range=RANGE, **SMALL)
    assert other.sensors == "lidar"


def test_no_boxes_in_the_range_draws_another_frame(monkeypatch):
    monkeypatch.setattr("parapos.data.nuscenes.MOST_TRIES", 3)
    data = driving("train", augment=Augment(**STILL, paste=(0,) * 10))
    frames = [replace(frame, objects=frame.objects[:0]) for frame in data.frames]
    data.frames[0] = frames[0]
    data.order = np.zeros(1, np.int64)
    sample = data[0]
    assert sample["id"] != 0
    assert sample["count"] == 20
    data.frames = frames
    with pytest.raises(FormatError, match="3 frames without a box"):
        data[0]
    assert data.as_judged()[0]["count"] == 0


def test_rare_classes_are_drawn_as_often():
    labels = [np.array([0] + [9] * (i % 20 == 0) + [3] * (i % 5 == 0)) for i in range(400)]
    order = balanced(labels, 0)
    total = 400 + 20 + 80
    assert len(order) == 3 * int(total / 10)
    counts = [sum(label in labels[i] for i in order) for label in (0, 3, 9)]
    assert counts[0] == len(order)
    assert min(counts[1:]) >= total // 10
    assert (order == balanced(labels, 0)).all()
    assert (order != balanced(labels, 1)).any()
    with pytest.raises(FormatError, match="no frame has a box"):
        balanced([np.zeros(0, int)], 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sweeps", 11),
        ("resize", 0.0),
        ("sensors", "radar"),
        ("missing", "skip"),
        ("tables", "v2"),
        ("point_range", (1,)),
    ],
)
def test_options_that_cannot_be(option, value):
    with pytest.raises(ValueError, match=option):
        driving("val", **{option: value})
