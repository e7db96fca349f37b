"""COCO's layout as a data set: classes both ways, odd images, ways to fit, and bad copies."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from parapos.data import FormatError, create_dataset
from parapos.data.coco import Augment, coco, coco_desk
from parapos.data.coco_tree import DESK, SIDES, _digits, write_desk, write_tiny
from parapos.data.readers import coco_json
from parapos.data.sampling import Key
from parapos.training.recipe import _as_judged
from tests.golden import SAMPLES

PLAIN = Augment(flip=0.0, slots=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco") / "tiny"
    write_tiny(root)
    return root


@pytest.fixture
def copy(tmp_path):
    root = tmp_path / "copy"
    write_tiny(root)
    return root


def load(split, root, **options):
    return coco(split, root=root, complete=False, **{"size": 64, **options})


def change(root, split, edit):
    path = root / "annotations" / f"instances_{split}2017.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_samples(tiny):
    data = load("train", tiny, augment=PLAIN)
    assert [image.id for image in data.instances.images] == sorted(image.id for image in data.instances.images)
    assert (data.classes, data.category_ids, data.class_names) == (3, [1, 3, 90], ["red", "green", "blue"])
    empty = grey = crowds = 0
    for index in range(len(data)):
        sample = data[index]
        image, boxes, labels = sample["image"], sample["boxes"], sample["labels"]
        assert (image.shape, image.dtype, boxes.dtype, labels.dtype) == ((3, 64, 64), *[torch.float32] * 2, torch.int64)
        assert boxes.shape == (len(labels), 4)
        assert (sample["count"], sample["id"]) == (len(labels), index)
        info = data.instances.images[index]
        assert sample["scale"].tolist() == [64 / info.width, 64 / info.height]
        empty += len(labels) == 0
        is_grey = torch.equal(image[0], image[1])
        grey += is_grey and len(labels) > 0
        crowds += int(data.instances.crowd[data.instances.of(index)].sum())
        for (left, top, right, bottom), label in zip(boxes.int().tolist(), labels.tolist(), strict=True):
            if right - left > 6 and bottom - top > 6 and not is_grey:
                middle = image[:, (top + bottom) // 2, (left + right) // 2]
                assert middle.argmax() == label
                assert middle[label] > 0.6
    assert (empty, grey, crowds) == (2, 1, 1)


def test_classes_both_ways(tiny):
    plain, raw = load("val", tiny), load("val", tiny, raw_ids=True)
    assert raw.classes == 91
    assert raw.class_names[90] == "blue"
    for index in range(len(plain)):
        ids = [plain.category_ids[label] for label in plain[index]["labels"].tolist()]
        assert raw[index]["labels"].tolist() == ids
        assert [raw.category_ids[label] for label in raw[index]["labels"].tolist()] == ids


def test_crowds_may_be_dropped_in_training_alone(tiny):
    boxes = {
        drop: [len(load("train", tiny, augment=PLAIN, drop_crowd=drop)[i]["boxes"]) for i in range(20)]
        for drop in (0, 1)
    }
    assert sum(boxes[0]) == sum(boxes[1]) + 1
    judged = load("val", tiny, drop_crowd=True)
    assert sum(len(judged[i]["boxes"]) for i in range(len(judged))) == len(judged.instances.boxes)


def test_boxes_of_less_than_a_pixel_go_in_training_alone(tiny):
    train, judged = load("train", tiny, size=24, augment=PLAIN), load("val", tiny, size=24)
    assert sum(train[i]["count"] for i in range(len(train))) < len(train.instances.boxes)
    assert sum(judged[i]["count"] for i in range(len(judged))) == len(judged.instances.boxes)
    assert _as_judged(train)[0]["count"] == len(train.instances.boxes[train.instances.of(0)])


@pytest.mark.parametrize("fit", ["stretch", "pad", "inside"])
@pytest.mark.parametrize("size", [64, (96, 64)])
def test_ways_to_fit(tiny, fit, size):
    data = load("val", tiny, fit=fit, size=size)
    height, width = (size, size) if isinstance(size, int) else size
    for index in range(len(data)):
        sample, info = data[index], data.instances.images[index]
        found = sample["image"].shape[1:]
        assert (found == (height, width)) if fit != "inside" else (found[0] == height or found[1] == width)
        assert found[0] <= height
        assert found[1] <= width
        x, y = sample["scale"].tolist()
        if fit != "stretch":
            assert abs(x * info.width - y * info.width) <= 1.5  # rounding of a side
        back = sample["boxes"].double() / torch.tensor([x, y, x, y]).double()
        rows = data.instances.boxes[data.instances.of(index)]
        corners = np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:]], 1)
        assert np.allclose(back.numpy(), corners, atol=1e-3)
    with pytest.raises(ValueError, match="fit must be 'pad'"):
        load("train", tiny, fit="stretch", augment=Augment(mode="lsj"))
    assert load("train", tiny, fit="pad", size=size, augment=Augment(mode="lsj"))[5]["image"].shape == (
        3,
        height,
        width,
    )


def test_normalize(tiny):
    plain, scaled = load("val", tiny)[3]["image"], load("val", tiny, normalize=True)[3]["image"]
    assert torch.allclose(scaled[1] * 0.224 + 0.456, plain[1], atol=1e-6)


def test_samples_depend_on_seed_epoch_and_index_alone(tiny):
    for options in ({}, {"fit": "pad", "augment": Augment(mode="lsj")}):
        one, two, other = (
            load("train", tiny, **options),
            load("train", tiny, **options),
            load("train", tiny, seed=1, **options),
        )
        [one[Key(i, 3)] for i in range(8)]
        pairs = [(one[Key(i, e)]["image"], two[Key(i, e)]["image"]) for e in (0, 2) for i in range(6)]
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not torch.equal(one[Key(3, 0)]["image"], one[Key(3, 1)]["image"]) or not torch.equal(
            one[Key(4, 0)]["image"], one[Key(4, 1)]["image"]
        )
        assert any(not torch.equal(one[Key(i, 0)]["image"], other[Key(i, 0)]["image"]) for i in range(8))


def test_blind_test_set(copy):
    (copy / "annotations/instances_test2017.json").unlink()
    data = load("test", copy)
    assert (len(data), data.instances.labelled, data[0]["count"]) == (8, False, 0)


def test_missing_and_corrupt_images(copy):
    data = load("train", copy)
    gone, broken, wrong = data.path(3), data.path(5), data.path(7)
    gone.unlink()
    with pytest.raises(FormatError, match=rf"{gone.name}: no such file, expected image {data.instances.images[3].id} "):
        load("train", copy)
    broken.write_bytes(broken.read_bytes()[:200])
    Image.new("RGB", (8, 8)).save(wrong)
    data = load("train", copy, corrupt="skip", augment=PLAIN)
    assert data[3]["id"] == 4
    assert data[5]["id"] == 6
    assert data[7]["id"] == 8
    assert data.skipped.nonzero().flatten().tolist() == [3, 5, 7]
    with pytest.raises(FormatError, match="cannot be judged"):
        data.as_judged()
    Image.new("RGB", (8, 8)).save(gone)
    with pytest.raises(FormatError, match=f"{broken.name}.*cannot be decoded"):
        load("train", copy)[5]
    with pytest.raises(FormatError, match=f"{wrong.name}: 8 x 8 pixels, expected"):
        load("train", copy)[7]
    for split in ("val", "test"):  # what is judged is never left out
        path = load(split, copy).path(0)
        path.unlink()
        with pytest.raises(FormatError, match="no such file"):
            load(split, copy, corrupt="skip")


def test_bad_boxes_are_named_before_training(copy):
    change(copy, "train", lambda data: data["annotations"][4].update(bbox=[1, 2, -3, 4]))
    with pytest.raises(FormatError, match=r"instances_train2017.json: annotation \d+: .* negative"):
        load("train", copy)
    with pytest.warns(UserWarning, match=r"1 boxes are left out, the first: annotation \d+"):
        data = load("train", copy, corrupt="skip")
    assert len(data.instances.boxes) == 38
    change(copy, "val", lambda data: data["annotations"][0].update(image_id=1))
    with pytest.raises(FormatError, match="image 1 is not in the list"):
        load("val", copy, corrupt="skip")


def test_options_are_checked(tiny, tmp_path):
    with pytest.raises(FormatError, match="expected 118287 and 80; complete=False"):
        coco("train", root=tiny)
    for options, told in (({"fit": "crop"}, "fit must be"), ({"corrupt": "ask"}, "corrupt must be")):
        with pytest.raises(ValueError, match=told):
            load("train", tiny, **options)
    with pytest.raises(ValueError, match="split must be"):
        load("dev", tiny)
    with pytest.raises(FormatError, match="no such file"):
        load("train", tmp_path)


def test_generated_digits(tmp_path):
    write_desk(tmp_path / "desk", images={"train": 6, "val": 2, "test": 2})
    write_desk(tmp_path / "again", images={"train": 6, "val": 2, "test": 2})
    data = coco_desk("train", root=tmp_path / "desk", augment=PLAIN)
    assert (data.classes, data.category_ids) == (13, [number for number, _ in DESK])
    for index in range(len(data)):
        again = coco_desk("train", root=tmp_path / "again", augment=PLAIN)[index]
        assert torch.equal(data[index]["image"], again["image"])
        rows = data.instances.boxes[data.instances.of(index)]
        assert 1 <= len(rows) <= 8
        assert (rows[:, 2:].max(1) >= SIDES[0] - 1).all()
        assert (rows[:, 2:].max(1) <= SIDES[1] + 1).all()
    glyphs = {split: {strokes.tobytes() for _, strokes in found} for split, found in _digits().items()}
    assert len(glyphs["train"]) > 1200
    assert not glyphs["train"] & glyphs["test"]
    assert not glyphs["train"] & glyphs["val"]
    assert coco_json.read(tmp_path / "desk/annotations/instances_test2017.json").labelled


@pytest.mark.skipif(not (SAMPLES / "coco_tiny").is_dir(), reason="no samples")
def test_real_images():
    data = create_dataset("coco", "val", root=SAMPLES / "coco_tiny", complete=False, size=(96, 128), raw_ids=True)
    assert (len(data), data.classes) == (6, 91)
    for index in range(len(data)):
        assert data[index]["image"].shape == (3, 96, 128)
    train = create_dataset("coco", "train", root=SAMPLES / "coco_tiny", complete=False, size=96)
    assert sum(train[Key(i, 1)]["count"] == 0 for i in range(len(train))) >= 2
