"""ScanNet: a generated tree in the true formats, prepared, checked and read; what is damaged in it; a real scene."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from parapos.data import FormatError, create_dataset, scannet
from parapos.data.augment.points import PointAugment
from parapos.data.point_trees import make_scannet
from parapos.data.points import vertex_normals
from parapos.data.preparations import Job, check, prepare
from parapos.data.prepared import Item
from parapos.data.readers import ply
from parapos.data.sampling import Key
from parapos.data.scenes import Scenes

from .readers.fuzz import address_space, mutations, overwrite

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
REAL = SHARED / "samples" / "scannet"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "scannet"
    make_scannet(root, train=3, val=2, test=1, step=0.25)
    done = prepare(scannet, Job(root, complete=False))
    assert (done.now, done.before, done.failed) == (6, 0, [])
    assert any("gym ball" in note for note in done.notes)
    return root


def scene(root, name="scene0000_00"):
    folder = root / "scans" / name
    return (
        folder / f"{name}_vh_clean_2.ply",
        folder / f"{name}_vh_clean_2.0.010000.segs.json",
        folder / f"{name}.aggregation.json",
    )


def test_prepared_arrays_are_what_the_files_say(tree):
    mesh, segs, groups = scene(tree)
    found, prepared = ply.read(mesh), tree / "prepared/train/scene0000_00"
    arrays = {path.stem: np.load(path) for path in prepared.iterdir()}
    assert set(arrays) == {"coord", "color", "normal", "segment20", "instance"}
    assert np.array_equal(arrays["coord"], found.columns("x", "y", "z"))
    assert np.array_equal(arrays["color"], found.columns("red", "green", "blue"))
    assert np.array_equal(arrays["normal"], vertex_normals(arrays["coord"], found.faces))
    segments = json.loads(segs.read_text())["segIndices"]
    expected, instance = [-1] * len(segments), [-1] * len(segments)
    ids = {"floor": 1, "wall": 0, "dining table": 6, "desk": 12, "office chair": 4, "picture": 10, "kitchen cabinet": 2}
    for group in json.loads(groups.read_text())["segGroups"]:
        for i, segment in enumerate(segments):
            if segment in group["segments"]:
                expected[i], instance[i] = ids.get(group["label"], -1), group["id"]
    assert arrays["segment20"].tolist() == expected
    assert arrays["instance"].tolist() == instance
    assert {-1, 0, 1} <= set(expected)
    assert {path.stem for path in (tree / "prepared/test/scene0005_00").iterdir()} == {"coord", "color", "normal"}


def test_the_three_forms_of_files_make_the_same_arrays(tmp_path):
    made = []
    for form in ("ascii", "binary_big_endian"):
        root = tmp_path / form
        make_scannet(root, train=1, val=0, test=0, step=0.4)
        mesh = scene(root)[0]
        found = ply.read(mesh)
        ply.write(mesh, found.vertex, found.faces, form)
        prepare(scannet, Job(root, complete=False))
        made.append({p.stem: np.load(p) for p in (root / "prepared/train/scene0000_00").iterdir()})
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])


def test_check_resume_and_change(tree, tmp_path):
    assert check(scannet, Job(tree, complete=False)).problems == []
    again = prepare(scannet, Job(tree, complete=False))
    assert (again.now, again.before) == (0, 6)
    official = check(scannet, Job(tree, quick=True)).problems
    assert any("train: listed scenes: found 3, expected 1,201" in told for told in official)
    root = tmp_path / "other"
    make_scannet(root, train=2, val=1, test=0, step=0.4)
    prepare(scannet, Job(root, complete=False))
    (root / "prepared/train/scene0000_00/coord.npy").unlink()
    assert prepare(scannet, Job(root, complete=False)).now == 1
    groups = scene(root)[2]
    groups.write_text(groups.read_text().replace("wall", "floor"))
    assert any("changed since it was prepared" in told for told in check(scannet, Job(root, complete=False)).problems)
    assert prepare(scannet, Job(root, complete=False)).now == 1


def damaged(change):
    def apply(root):
        mesh, segs, groups = scene(root)
        change(mesh, segs, groups)

    return apply


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m, s, g: m.write_bytes(m.read_bytes()[:-100]), "vh_clean_2.ply: at byte "),
        (lambda m, s, g: s.write_text('{"segIndices": [1, 2]}'), "over-segments of 2 vertices"),
        (lambda m, s, g: s.write_text("{"), "segs.json: at byte 1: not JSON"),
        (
            lambda m, s, g: g.write_text('{"segGroups": [{"id": 0, "label": "wall", "segments": [99999]}]}'),
            "over-segment 99999, which no vertex has",
        ),
        (lambda m, s, g: ply.write(m, {k: np.zeros(0, np.float32) for k in "xyz"}), "no vertices, expected a scene"),
        (lambda m, s, g: ply.write(m, {k: np.zeros(3, np.float32) for k in "xyz"}), "expected colours and faces"),
    ],
)
def test_what_is_damaged_is_told_and_nothing_is_half_written(change, told, tmp_path):
    make_scannet(tmp_path / "d", train=2, val=0, test=0, step=0.4)
    damaged(change)(tmp_path / "d")
    done = prepare(scannet, Job(tmp_path / "d", complete=False))
    assert done.now == 1
    assert len(done.failed) == 1
    assert told in done.failed[0]
    assert not (tmp_path / "d/prepared/train/scene0000_00").exists()
    assert (tmp_path / "d/prepared/train/scene0001_00/coord.npy").is_file()


def test_one_vertex_and_vertices_that_coincide(tmp_path):
    make_scannet(tmp_path / "d", train=2, val=0, test=0, step=0.4)
    for name, count in (("scene0000_00", 1), ("scene0001_00", 7)):
        mesh, segs, groups = scene(tmp_path / "d", name)
        vertex = {axis: np.ones(count, np.float32) for axis in "xyz"}
        vertex |= {c: np.full(count, 9, np.uint8) for c in ("red", "green", "blue")}
        ply.write(mesh, vertex, np.zeros((0, 3), np.int32))
        segs.write_text(json.dumps({"segIndices": [4] * count}))
        groups.write_text(json.dumps({"segGroups": [{"id": 0, "label": "wall", "segments": [4]}]}))
    assert prepare(scannet, Job(tmp_path / "d", complete=False)).failed == []
    dataset = create_dataset("scannet", "train", root=tmp_path / "d", complete=False)
    for index in range(2):
        for epoch in range(3):
            sample = dataset[Key(index, epoch)]
            assert len(sample["coord"]) >= 1
            assert all(value.isfinite().all() for key, value in sample.items() if key != "id")


def test_training_samples_follow_from_seed_epoch_and_index(tree):
    dataset = create_dataset("scannet", "train", root=tree, complete=False, grid_size=0.1, point_max=300)
    first, again, later = dataset[Key(1, 4)], dataset[Key(1, 4)], dataset[Key(1, 5)]
    assert all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(again[key])) for key in first)
    assert not torch.equal(first["coord"], later["coord"][: len(first["coord"])])
    assert len(first["coord"]) == 300
    assert first["feat"].shape == (300, 6)
    assert len(torch.unique(first["grid_coord"], dim=0)) == 300
    assert int(first["grid_coord"].min()) >= 0
    other = create_dataset("scannet", "train", root=tree, complete=False, grid_size=0.1, point_max=300, seed=1)
    assert not torch.equal(other[Key(1, 4)]["coord"], first["coord"])
    mapped = np.load(tree / "prepared/train/scene0001_00/coord.npy")
    assert np.array_equal(dataset.load(1).coord, mapped), "what is on disk stays as it is"
    judged = dataset.as_judged()
    assert torch.equal(judged[Key(0, 1)]["labels"], judged[Key(0, 2)]["labels"])
    assert set(judged[0]) == {"feat", "coord", "grid_coord", "inverse", "labels", "id"}


def test_quick_samples_judge_all_points(tree):
    dataset = create_dataset("scannet", "val", root=tree, complete=False, grid_size=0.3)
    sample = dataset[0]
    points = len(np.load(tree / "prepared/val/scene0003_00/coord.npy"))
    assert len(sample["inverse"]) == len(sample["labels"]) == points > len(sample["coord"])
    assert int(sample["inverse"].max()) == len(sample["coord"]) - 1
    assert float(sample["coord"][:, :2].mean()) == pytest.approx(0, abs=0.5)
    hidden = create_dataset("scannet_precise", "test", root=tree, complete=False)[0]
    assert (hidden["labels"] == -1).all()
    assert set(hidden) == {"cloud", "labels", "id"}


def test_pointcepts_layout_is_read_as_it_is(tree, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(tree / "prepared" / split)
    found = create_dataset("scannet", "val", root=tmp_path, complete=False)
    assert found.names == ["scene0003_00", "scene0004_00"]
    assert torch.equal(found[1]["labels"], create_dataset("scannet", "val", root=tree, complete=False)[1]["labels"])


def test_refused(tree, tmp_path):
    with pytest.raises(FormatError, match=r"3 prepared scenes, expected 1201; run `parapos prepare scannet`"):
        create_dataset("scannet", "train", root=tree)
    with pytest.raises(FormatError, match="no prepared scenes"):
        create_dataset("scannet", "train", root=tmp_path, complete=False)
    with pytest.raises(ValueError, match="split must be one of train, val, test"):
        create_dataset("scannet", "all", root=tree)
    for wrong, told in (
        (dict(evaluation="exact"), "evaluation must be one of quick"),
        (dict(grid_size=0), "positive grid_size"),
        (dict(features=["colour"]), "features must be some of"),
    ):
        with pytest.raises(ValueError, match=told):
            create_dataset("scannet", "train", root=tree, complete=False, **wrong)
    bad = Scenes(
        ["room"], lambda i: scannet.load_scene(tree / "prepared/train/scene0000_00", ""), ["only"],
        grid_size=0.1, point_max=9, features=["normal"], augment=PointAugment(),
    )  # fmt: skip
    with pytest.raises(FormatError, match=r"room: labels from -1 to .*, expected -1 to 0"):
        bad[0]
    path = tmp_path / "train/scene0000_00"
    path.mkdir(parents=True)
    np.save(path / "coord.npy", np.full((4, 3), np.nan, np.float32))
    for name, array in (("color", np.zeros((4, 3), np.uint8)), ("normal", np.zeros((4, 3), np.float32))):
        np.save(path / f"{name}.npy", array)
    with pytest.raises(FormatError, match=r"coord\.npy: coordinates that are not finite"):
        create_dataset("scannet", "train", root=tmp_path, complete=False)[0]
    np.save(path / "coord.npy", np.zeros((4, 3), np.float32))
    np.save(path / "normal.npy", np.full((4, 3), np.inf, np.float32))
    with pytest.raises(FormatError, match=r"normal\.npy: normals that are not finite; remove it"):
        create_dataset("scannet", "train", root=tmp_path, complete=False)[0]
    np.save(path / "coord.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(FormatError, match=r"color\.npy: expected an array of 3 x \(3,\), got uint8 \(4, 3\)"):
        create_dataset("scannet", "train", root=tmp_path, complete=False)[0]


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["coord", "color", "normal", "segment20"])
def test_broken_arrays(name, count, tree, tmp_path):
    """Arrays from elsewhere may be anything: a scene comes out, or a FormatError that names the file."""
    for path in (tree / "prepared/train/scene0000_00").iterdir():
        np.save(tmp_path / path.name, np.load(path)[:20])
    path, refused = tmp_path / f"{name}.npy", []
    with address_space(64 * 1024**2), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy reads headers as Python
        for data in mutations([path.read_bytes()], count):
            overwrite(path, data)
            try:
                cloud = scannet.load_scene(tmp_path, "prepare again")
                assert np.isfinite(cloud.coord).all()
                assert np.isfinite(cloud.normal).all()
                assert len(cloud.coord) == len(cloud.color) == len(cloud.normal) == len(cloud.segment)
            except FormatError as error:
                refused.append(str(error))
    assert all(told.startswith(str(tmp_path)) and len(told) < len(str(path)) + 400 for told in refused)
    assert count // 4 < len(refused) < count


@pytest.mark.skipif(not REAL.is_dir(), reason="no real scene here")
def test_a_real_scene():
    for mesh in sorted(REAL.glob("scans/*/*.ply")):
        made = scannet.make(Item("test/real", sized=(mesh,)), {})
        arrays = {name.split("/")[-1]: array for name, array in made.files}
        length = np.linalg.norm(arrays["normal.npy"], axis=1)
        assert length.max() < 1.0001
        assert (length > 0.99).mean() > 0.98
        floor = arrays["coord.npy"][:, 2] < np.percentile(arrays["coord.npy"][:, 2], 10)
        assert np.median(arrays["normal.npy"][floor, 2]) > 0.9, "the floor looks up"
