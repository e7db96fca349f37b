"""COCO's lists of instances: what they say, and what is refused with the file and the id."""

import copy
import json
import random
from functools import partial, reduce

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import coco_json
from tests.golden import SAMPLES

from .fuzz import mutations, survive


def whole():
    return {
        "images": [
            {"id": 9, "file_name": "b.jpg", "height": 40, "width": 60},
            {"id": 2, "file_name": "a.jpg", "height": 30, "width": 50},
            {"id": 5, "file_name": "sub/c.jpg", "height": 30, "width": 50},
        ],
        "annotations": [
            {"id": 7, "image_id": 9, "category_id": 90, "bbox": [1, 2, 3, 4], "area": 11.5, "iscrowd": 0},
            {"id": 3, "image_id": 2, "category_id": 3, "bbox": [0, 0, 50, 30], "area": 1500, "iscrowd": 1},
            {"id": 5, "image_id": 9, "category_id": 3, "bbox": [5.5, 6, 0, 1], "area": 0, "iscrowd": 0},
        ],
        "categories": [{"id": 90, "name": "z"}, {"id": 3, "name": "y"}],
    }


def test_what_a_file_says(tmp_path):
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(whole()))
    found = coco_json.read(path)
    assert [image.id for image in found.images] == [2, 5, 9]
    assert found.categories == [(3, "y"), (90, "z")]
    assert [found.boxes[found.of(i)].tolist() for i in range(3)] == [
        [[0, 0, 50, 30]],
        [],
        [[1, 2, 3, 4], [5.5, 6, 0, 1]],
    ]
    assert (found.labels.tolist(), found.crowd.tolist(), found.ids.tolist()) == ([0, 1, 0], [1, 0, 0], [3, 7, 5])
    assert found.area.tolist() == [1500, 11.5, 0]
    again = coco_json.parse(found.dictionary())
    for name in ("images", "categories"):
        assert getattr(again, name) == getattr(found, name)
    for name in ("first", "boxes", "labels", "crowd", "area", "ids"):
        assert np.array_equal(getattr(again, name), getattr(found, name))
    some = found.dictionary([2])
    assert ([image["id"] for image in some["images"]], len(some["annotations"])) == ([9], 2)


def test_a_list_without_annotations():
    data = whole()
    del data["annotations"]
    found = coco_json.parse(data)
    assert (len(found.images), len(found.boxes), found.labelled) == (3, 0, False)


BAD_BOXES = {
    "image 4 is not in the list": {"image_id": 4},
    "category 1 is not in the list": {"category_id": 1},
    "no negative width or height": {"bbox": [1, 1, -2, 3]},
    "expected finite numbers": {"bbox": [1, 1, float("nan"), 3]},
    r"expected finite numbers and": {"bbox": [1, 1, 1e999, 3]},
    "expected a bbox of four numbers": {"bbox": [1, 2, 3]},
    "expected a bbox of four numbers, got None": {"bbox": None},
    r"leaves image 9 of 60 x 40 pixels": {"bbox": [58, 1, 4, 3]},
    r"bbox \[-20, 1, 4, 3\] leaves image 9": {"bbox": [-20, 1, 4, 3]},
    "its id occurs twice": {"id": 3},
    "expected an area of 0 or more": {"area": float("nan")},
    "expected an area of 0 or more, got 1000": {"area": 10**400},
    "expected iscrowd to be 0 or 1": {"iscrowd": 2},
}


@pytest.mark.parametrize("told", BAD_BOXES)
def test_bad_boxes(told):
    data = whole()
    data["annotations"][2].update(BAD_BOXES[told])
    number = data["annotations"][2]["id"]
    with pytest.raises(FormatError, match=f"^here.json: annotation {number}: .*{told}"):
        coco_json.parse(data, "here.json")
    found = coco_json.parse(data, "here.json", skip=True)
    assert (len(found.boxes), len(found.skipped)) == (2, 1)
    assert f"annotation {number}" in found.skipped[0]


BAD_FILES = {
    "category 90: expected a name, got None": ("categories", 0, {"name": None}),
    "category 90: expected a name, got ' '": ("categories", 0, {"name": " "}),
    "category 3: its id occurs twice": ("categories", 0, {"id": 3}),
    "image 2: its id occurs twice": ("images", 0, {"id": 2}),
    "image 9: expected whole height and width, got 0, 60": ("images", 0, {"height": 0}),
    "image 9: expected whole height and width, got 40, None": ("images", 0, {"width": None}),
    "image 9: expected a file_name within the folder": ("images", 0, {"file_name": "../secret.jpg"}),
    "image 9: expected a file_name within": ("images", 0, {"file_name": "/etc/passwd"}),
    "image at place 0: expected a whole id": ("images", 0, {"id": "9"}),
}


@pytest.mark.parametrize("told", BAD_FILES)
@pytest.mark.parametrize("skip", [False, True])
def test_files_that_are_broken_as_a_whole(told, skip):
    data = whole()
    key, place, change = BAD_FILES[told]
    data[key][place].update(change)
    with pytest.raises(FormatError, match=f"^here.json: {told}"):
        coco_json.parse(data, "here.json", skip=skip)


def test_files_that_are_no_lists(tmp_path):
    path = tmp_path / "cut.json"
    text = json.dumps(whole())
    for cut in (0, 1, 40, len(text) // 2, len(text) - 1):
        path.write_text(text[:cut])
        with pytest.raises(FormatError, match=r"cut.json: not JSON, perhaps cut off"):
            coco_json.read(path)
    for value in ([], 3, {"images": []}, {"images": {}}, {**whole(), "categories": []}, {**whole(), "annotations": 1}):
        path.write_text(json.dumps(value))
        with pytest.raises(FormatError, match=r"cut.json: "):
            coco_json.read(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(FormatError):
        coco_json.read(path)
    with pytest.raises(FormatError, match="no such file"):
        coco_json.read(tmp_path / "nothing.json")


ODD = [
    None,
    True,
    -1,
    0,
    2**70,
    10**400,
    -1e308,
    float("nan"),
    "",
    "x" * 900,
    "\ud800",
    [],
    {},
    [1] * 900,
    [[1, 2]] * 4,
]
ODD.append(reduce(lambda inner, _: [inner], range(900), 0))  # nested as deeply as JSON may be


def structured(count):
    """Files with values that were replaced, taken away or doubled: JSON, but not what COCO's files hold."""
    rng = random.Random(1)
    for _ in range(count):
        data = copy.deepcopy(whole())
        for _ in range(rng.randint(1, 2)):
            part = data
            while True:
                key = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
                if not isinstance(part[key], dict | list) or not part[key] or rng.random() < 0.2:
                    break
                part = part[key]
            if rng.random() < 0.2:
                del part[key]
            elif isinstance(part, list) and rng.random() < 0.2:
                part.append(copy.deepcopy(part[key]))
            else:
                part[key] = rng.choice(ODD)
            if not data:
                break
        yield json.dumps(data).encode()


@pytest.mark.parametrize("skip", [False, True])
def test_broken_files(skip, tmp_path):
    """Half of them broken as bytes, of which few are still JSON, and half as JSON."""
    path, text, count = tmp_path / "x.json", json.dumps(whole()).encode(), 1500
    for files, least in ((mutations([text], count), 1), (structured(count), count // 60)):
        read = partial(coco_json.read, skip=skip)
        good, refused = survive(read, files, path, per_byte=100, least=10**6, place="")
        assert min(good, refused) >= least


def test_an_id_that_no_array_holds(tmp_path):
    data = whole()
    data["annotations"][1]["id"] = 2**70
    with pytest.raises(FormatError, match="annotation at place 1: expected a dictionary with a whole id"):
        coco_json.parse(data)
    assert len(coco_json.parse(data, skip=True).boxes) == 2


def test_names_must_be_text_that_files_can_have(tmp_path):
    for key, name in (("images", "file_name"), ("categories", "name")):
        data = whole()
        data[key][0][name] = "a\ud800"
        with pytest.raises(FormatError, match="expected a "):
            coco_json.parse(data)


@pytest.mark.parametrize("names", [("car", "car"), ("a b", "a_b")])
def test_each_category_has_a_metric_of_its_own(names):
    data = whole()
    for category, name in zip(data["categories"], names, strict=True):
        category["name"] = name
    message = f"^here.json: category 3: its name {names[1]!r} gives the metric of category 90, {names[0]!r}"
    for skip in (False, True):
        with pytest.raises(FormatError, match=message):
            coco_json.parse(data, "here.json", skip=skip)
    data["categories"][1]["name"] = "A b"
    assert len(coco_json.parse(data).categories) == 2


@pytest.mark.skipif(not (SAMPLES / "coco_tiny").is_dir(), reason="no samples")
def test_real_files():
    found = coco_json.read(SAMPLES / "coco_tiny/annotations/instances_train2017.json")
    assert (len(found.images), len(found.boxes), int(found.crowd.sum()), len(found.categories)) == (32, 288, 4, 80)
    assert found.skipped == []
