"""Text files of ScanNet and ModelNet40: what they mean, damaged ones, and the real lists."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import modelnet_lists, scannet_lists

from .fuzz import mutations, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SCANNET, MODELNET = SHARED / "samples/scannet", SHARED / "samples/modelnet40/modelnet40_normal_resampled"
SEGS = json.dumps({"params": {}, "segIndices": [3, 3, 10, 3, 17]}).encode()
GROUPS = json.dumps(
    {"segGroups": [{"id": 0, "label": "chair", "segments": [3]}, {"id": 4, "label": "ghost", "segments": [17, 3]}]}
).encode()
TABLE = b"id\traw_category\tcategory\tcount\tnyu40id\r\n"
TABLE += b"1\tchair\tchair\t9\t5\r\n2\tchair\tx\t1\t7\r\n3\tlamp\tlamp\t9\t35\r\n"
SCENES = b"scene0000_00\nscene0001_01\r\n\nscene0706_00"
CLASSES, LIST = b"bed\nnight_stand\n", b"bed_0001\nnight_stand_0002\n"
POINTS = b"0.5,-1,2e-1,0,0,1\n1,2,3,0,1,0\n"


def put(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


def test_segments_groups_and_categories(tmp_path):
    segments = scannet_lists.read_segments(put(tmp_path, SEGS))
    groups = scannet_lists.read_groups(put(tmp_path, GROUPS))
    table = scannet_lists.read_categories(put(tmp_path, TABLE))
    assert table == {"chair": 5, "lamp": 35}
    label, instance = scannet_lists.label_vertices("g", segments, groups[:1], table, {5: 4})
    assert label.tolist() == [4, 4, -1, 4, -1]
    assert instance.tolist() == [0, 0, -1, 0, -1]
    label, instance = scannet_lists.label_vertices("g", segments, groups, table, {5: 4})
    assert label.tolist() == [-1] * 5  # the later group overwrites, and the table does not have its category
    assert instance.tolist() == [4, 4, -1, 4, 4]
    with pytest.raises(FormatError, match=r"g: at byte 0: segGroups\[1\] has over-segment 17, which no vertex has"):
        scannet_lists.label_vertices("g", segments[:4], groups, table, {5: 4})
    with pytest.raises(FormatError, match="over-segment 3, which no vertex has"):
        scannet_lists.label_vertices("g", segments[:0], groups, table, {5: 4})


def test_scenes_classes_shapes_and_points(tmp_path):
    assert scannet_lists.read_scenes(put(tmp_path, SCENES)) == ["scene0000_00", "scene0001_01", "scene0706_00"]
    classes = modelnet_lists.read_classes(put(tmp_path, CLASSES))
    assert modelnet_lists.read_shapes(put(tmp_path, LIST), classes) == [("bed_0001", 0), ("night_stand_0002", 1)]
    points = modelnet_lists.read_points(put(tmp_path, POINTS))
    assert points.dtype == np.float32
    assert points.tolist() == [[0.5, -1, np.float32(0.2), 0, 0, 1], [1, 2, 3, 0, 1, 0]]


def read_shapes(path):
    return modelnet_lists.read_shapes(path, ["bed", "night_stand"])


@pytest.mark.parametrize(
    ("read", "data", "told"),
    [
        (scannet_lists.read_segments, b"", "at byte 0: not JSON"),
        (scannet_lists.read_segments, b"[1]", 'at byte 0: expected {"segIndices"'),
        (scannet_lists.read_segments, b'{"segIndices": [1, 2.0]}', r"segIndices\[1\] is '2.0'"),
        (scannet_lists.read_segments, b'{"segIndices": [true]}', r"segIndices\[0\]"),
        (scannet_lists.read_segments, b'{"segIndices": [' + b"9" * 5000 + b"]}", "at byte 0: "),
        (scannet_lists.read_segments, b'{"segIndices": ' + b"[" * 100_000, "nested too deeply"),
        (scannet_lists.read_groups, b'{"segGroups": [{"id": 1}]}', r"segGroups\[0\]: expected a whole number id"),
        (scannet_lists.read_groups, b'{"segGroups": [3]}', r"segGroups\[0\]"),
        (scannet_lists.read_groups, b"\xff", "at byte 0"),
        (scannet_lists.read_categories, b"a\tb\n", "line 1: expected columns raw_category and nyu40id"),
        (scannet_lists.read_categories, TABLE.replace(b"35", b"x"), "line 4: expected a category and its nyu40id"),
        (scannet_lists.read_scenes, b"scene1\n", "line 1: expected a name such as"),
        (scannet_lists.read_scenes, b"scene0000_00\nscene0000_00", "line 2: scene0000_00 is here twice"),
        (modelnet_lists.read_classes, b"bed\nbed\n", "line 2"),
        (modelnet_lists.read_classes, b"../bed\n", "line 1: expected the name of a class"),
        (read_shapes, b"table_0001\n", "line 1: expected a class of the list and a number"),
        (read_shapes, b"bed_0001\nbed_0001\n", "line 2: bed_0001 is here twice"),
        (modelnet_lists.read_points, b"", "at byte 0: no points"),
        (modelnet_lists.read_points, POINTS + b"1,2,3\n", "at byte 30: b'1,2,3', expected six finite numbers"),
        (modelnet_lists.read_points, POINTS + b"1,2,nan,0,0,1\n", "at byte 30"),
    ],
)
def test_refused(read, data, told, tmp_path):
    with pytest.raises(FormatError, match=f"file: .*{told}"):
        read(put(tmp_path, data))


READERS = {
    "segments": (scannet_lists.read_segments, SEGS, "at byte "),
    "groups": (scannet_lists.read_groups, GROUPS, "at byte "),
    "categories": (scannet_lists.read_categories, TABLE, "line "),
    "scenes": (scannet_lists.read_scenes, SCENES, "line "),
    "classes": (modelnet_lists.read_classes, CLASSES, "line "),
    "shapes": (read_shapes, LIST, "line "),
    "points": (modelnet_lists.read_points, POINTS, "at byte "),
}


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", READERS)
def test_broken_files(name, count, tmp_path):
    read, seed, place = READERS[name]
    files = mutations([seed], count)
    good, refused = survive(read, files, tmp_path / "file", per_byte=80, least=200_000, place=place)
    assert good >= count // 300
    assert refused > count // 10


@pytest.mark.skipif(not SCANNET.is_dir(), reason="no real lists here")
def test_real_lists_of_scannet():
    table = scannet_lists.read_categories(SCANNET / "scannetv2-labels.combined.tsv")
    assert (table["wall"], table["chair"], table["object"]) == (1, 5, 40)
    lists = {
        s: scannet_lists.read_scenes(SCANNET / f"Tasks_Benchmark/scannetv2_{s}.txt") for s in ("train", "val", "test")
    }
    assert [len(names) for names in lists.values()] == [1201, 312, 100]
    assert not set(lists["train"]) & set(lists["val"])


@pytest.mark.skipif(not MODELNET.is_dir(), reason="no real lists here")
def test_real_lists_of_modelnet():
    classes = modelnet_lists.read_classes(MODELNET / "modelnet40_shape_names.txt")
    assert (len(classes), classes.index("night_stand"), classes[-1]) == (40, 23, "xbox")
    for part, count in (("train", 9843), ("test", 2468)):
        shapes = modelnet_lists.read_shapes(MODELNET / f"modelnet40_{part}.txt", classes)
        assert len(shapes) == count
        assert {label for _, label in shapes} == set(range(40))
