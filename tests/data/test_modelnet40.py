"""ModelNet40 and generated shapes: both layouts prepared and read, the held-back tenth, views for voting."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from parapos.data import FormatError, create_dataset, modelnet40
from parapos.data.batch import collate
from parapos.data.objects import ObjectAugment
from parapos.data.point_trees import make_modelnet40
from parapos.data.points import PACKED, farthest
from parapos.data.preparations import Job, check, prepare
from parapos.data.readers.modelnet_lists import read_points
from parapos.data.sampling import Key
from parapos.tasks import create_task

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
REAL = SHARED / "samples" / "modelnet40" / "ModelNet40_off"
OPTIONS = {"sampling": "farthest", "points": 64}


@pytest.fixture(scope="module", params=[False, True], ids=["resampled", "meshes"])
def tree(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "modelnet40"
    make_modelnet40(root, train=5, test=1, points=150, meshes=request.param)
    done = prepare(modelnet40, Job(root, complete=False, options=OPTIONS))
    assert (done.now, done.failed, done.notes) == (72, [], [])
    return root


def opened(split, root, **options):
    return create_dataset("modelnet40", split, root=root, complete=False, points=64, grid_size=0.1, **options)


def test_splits(tree):
    sets = {split: opened(split, tree) for split in ("train", "val", "test")}
    assert {split: len(found) for split, found in sets.items()} == {"train": 48, "val": 12, "test": 12}
    assert sets["train"].class_names == sets["test"].class_names
    assert len(sets["train"].class_names) == 12
    assert sorted(sets["val"].labels) == list(range(12)), "a tenth of each class, at least one"
    assert not set(sets["train"].names) & set(sets["val"].names)
    for found in sets.values():
        assert all(
            name.rpartition("_")[0] == found.class_names[label]
            for name, label in zip(found.names, found.labels, strict=True)
        )
    assert opened("val", tree, val="test").names == sets["test"].names
    assert len(opened("train", tree, val="test")) == 60
    assert opened("val", tree, split_seed=1).names != sets["val"].names
    assert "table_stand" in sets["train"].class_names


def test_points_are_chosen_once(tree):
    store = modelnet40.open_store(Job(tree, options=OPTIONS))
    if (tree / "modelnet40_train.txt").is_file():
        dataset = opened("test", tree)
        name = dataset.names[3]
        raw = read_points(tree / name.rpartition("_")[0] / f"{name}.txt")
        assert np.array_equal(dataset.load(3), raw[farthest(raw[:, :3], 64)])
        assert np.array_equal(dataset.load(3)[0], raw[0])
    again = prepare(modelnet40, Job(tree, complete=False, options=OPTIONS))
    assert (again.now, again.before) == (0, 72)
    assert check(modelnet40, Job(tree, complete=False, options=OPTIONS)).problems == []
    with pytest.raises(FormatError, match=r"prepared with .*'points': 64.*expected .*'points': 32"):
        create_dataset("modelnet40", "test", root=tree, complete=False, points=32)
    assert store.folder == tree / "prepared"


def test_samples(tree):
    dataset = opened("train", tree)
    first, again, later = dataset[Key(2, 1)], dataset[Key(2, 1)], dataset[Key(2, 2)]
    assert all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(again[key])) for key in first)
    assert not torch.equal(first["coord"][:5], later["coord"][:5])
    assert torch.equal(first["feat"][:, :3], first["coord"])
    kept = np.array(dataset.load(2))
    dataset[Key(2, 3)]
    assert np.array_equal(dataset.load(2), kept)
    judged = opened("test", tree)[0]
    assert float((judged["coord"] ** 2).sum(1).max()) <= 1.0001
    assert len(torch.unique(judged["grid_coord"], dim=0)) == len(judged["grid_coord"])


def test_variation_is_that_of_the_paper():
    assert ObjectAugment() == ObjectAugment(scale=(0.7, 1.5), shift=0.2)
    off = ObjectAugment(scale=(1.0, 1.0), shift=0.0, shuffle=False)
    plain = create_dataset("shapes", "train", train=12, augment=off)
    varied = create_dataset("shapes", "train", train=12)
    assert len(plain[0]["coord"]) > 100
    assert float(plain[0]["coord"].abs().max()) <= 1.01
    spans = [np.ptp(varied[Key(0, e)]["coord"].numpy(), axis=0) for e in range(20)]
    assert np.std(spans, axis=0).min() > 0.2


def test_views_vote(tree):
    one, ten = (
        opened("test", tree),
        create_dataset("modelnet40_voting", "test", root=tree, complete=False, points=64, grid_size=0.1),
    )
    samples = [ten[i] for i in range(3)]
    again = ten[1]
    assert all(torch.equal(torch.as_tensor(samples[1][key]), torch.as_tensor(again[key])) for key in again)
    batch = collate(samples, packed=PACKED)
    assert batch["offset"].shape == (30,)
    assert int(batch["offset"][-1]) == len(batch["coord"]) == sum(len(sample["coord"]) for sample in samples)
    size = int(batch["offset"][0])
    assert torch.equal(batch["coord"][:size], one[0]["coord"])

    class Model:
        inputs = ("coord", "offset")

        def __call__(self, coord, offset):
            starts = [0, *offset.tolist()]
            rows = [coord[a:b].abs().mean(0) for a, b in pairwise(starts)]
            return torch.cat([scale * torch.stack(rows) for scale in (3, 2, 1, -1)], 1)

    task = create_task("classification", ten)
    evaluator = task.evaluator(keep_predictions=True)
    evaluator.update(Model(), task.collate(samples))
    logits = Model()(batch["coord"], batch["offset"]).view(3, 10, 12)
    expected = logits.softmax(-1).sum(1).argmax(-1)
    assert [row[2][0] for row in evaluator.answers] == expected.tolist()
    assert list(evaluator.compute()) == ["loss", "top1", "precision", "recall", "f1"]


def test_packed_rows_must_agree():
    good = {"coord": torch.zeros(3, 3), "feat": torch.zeros(3, 2), "id": 0}
    batch = collate([good, {**good, "id": 1}], packed=("coord", "feat"))
    assert batch["offset"].tolist() == [3, 6]
    for bad in ({"feat": torch.zeros(2, 2)}, {"views": torch.tensor([1, 1])}):
        with pytest.raises(ValueError, match=r"sample 7 has rows: coord 3.*expected as many of coord, feat"):
            collate([{**good, **bad, "id": 7}], packed=("coord", "feat"))


@pytest.mark.parametrize("sampling", ["random", "first"])
def test_other_samplings(sampling, tmp_path):
    make_modelnet40(tmp_path / "m", train=1, test=1, points=40)
    options = {"sampling": sampling, "points": 16}
    done = prepare(modelnet40, Job(tmp_path / "m", complete=False, options=options))
    assert done.now == 24
    found = create_dataset("modelnet40", "test", root=tmp_path / "m", complete=False, val="test", **options)
    raw = read_points(tmp_path / "m" / found.names[0].rpartition("_")[0] / f"{found.names[0]}.txt")
    points = {tuple(row) for row in found.load(0).tolist()}
    assert points <= {tuple(row) for row in raw.tolist()}
    assert (found.load(0).tolist() == raw[:16].tolist()) == (sampling == "first")


def test_refused(tree, tmp_path):
    with pytest.raises(FormatError, match=r"neither modelnet40_shape_names\.txt nor"):
        create_dataset("modelnet40", "train", root=tmp_path)
    with pytest.raises(FormatError, match="60 train shapes of 12 classes, expected 9843 of 40"):
        create_dataset("modelnet40", "train", root=tree, points=64)
    for wrong in (dict(split="all"), dict(val="none"), dict(sampling="best")):
        with pytest.raises(ValueError, match="must be one of"):
            create_dataset("modelnet40", wrong.pop("split", "train"), root=tree, complete=False, **wrong)
    with pytest.raises(ValueError, match="positive grid_size and votes"):
        opened("test", tree, votes=0)


def test_what_is_damaged_is_told(tmp_path):
    make_modelnet40(tmp_path / "m", train=2, test=1, points=30, meshes=True)
    paths = sorted((tmp_path / "m").glob("*/train/*.off"))
    paths[0].write_bytes(paths[0].read_bytes()[:60])
    paths[1].write_text("OFF\n3 1 0\n0 0 0\n1 0 0\n2 0 0\n3 0 1 2\n")
    done = prepare(modelnet40, Job(tmp_path / "m", complete=False, options=OPTIONS))
    assert done.now == 34
    assert [told.partition(": at byte ")[0] for told in sorted(done.failed)] == sorted(map(str, paths[:2]))
    assert any("a mesh without area" in told for told in done.failed)
    job = Job(tmp_path / "m", complete=False, options=OPTIONS)
    assert sum(str(paths[0]) in told for told in check(modelnet40, job).problems) == 1


@pytest.mark.skipif(not REAL.is_dir(), reason="no real meshes here")
def test_real_meshes(tmp_path):
    root = tmp_path / "m"
    root.mkdir()
    (root / "ModelNet40").symlink_to(REAL)
    job = Job(root, tmp_path / "cache", complete=False, options={"sampling": "random", "points": 1024})
    done = prepare(modelnet40, job)
    assert done.failed == []
    assert done.now >= 3
    found = create_dataset(
        "modelnet40", "train", root=root, cache=tmp_path / "cache", complete=False, sampling="random", points=1024
    )
    assert len(found[0]["coord"]) > 500


@pytest.mark.parametrize("name", ["rooms", "shapes"])
def test_generated_sets_are_the_same_every_time_and_differ_by_split(name):
    sets = {split: create_dataset(name, split, train=6, test=6) for split in ("train", "val", "test")}
    load = {split: found.load(0) for split, found in sets.items()}
    first = {split: np.asarray(one.coord if name == "rooms" else one) for split, one in load.items()}
    assert not np.array_equal(first["train"][:50], first["val"][:50])
    again = create_dataset(name, "test", train=6, test=6).load(0)
    assert np.array_equal(np.asarray(again.coord if name == "rooms" else again), first["test"])
    with pytest.raises(ValueError, match=r"expected (rooms|objects)"):
        create_dataset(name, "train", train=0)
    with pytest.raises(ValueError, match="split must be one of"):
        create_dataset(name, "all")


def test_rooms_have_classes_that_differ_in_height_alone():
    dataset = create_dataset("rooms", "train")
    tops = {name: [] for name in dataset.class_names}
    for index in range(24):
        cloud = dataset.cloud(index)
        for label, name in enumerate(dataset.class_names):
            heights = cloud.coord[cloud.segment == label, 2]
            if len(heights):
                tops[name].append(heights.mean())
    assert all(len(found) >= 3 for found in tops.values())
    for low, high in (("bench", "table"), ("ball", "lamp"), ("heater", "picture")):
        assert max(tops[low]) < min(tops[high]), (low, high)
    held_out = create_dataset("rooms", "test")
    spans = {}
    for name, found in (("train", dataset), ("test", held_out)):
        clouds = [found.cloud(i) for i in range(24)]
        lamps = [c.coord[c.segment == 5] for c in clouds]
        spans[name] = [np.ptp(points[:, 2]) for points in lamps if 0 < len(points) < 400]
    usual = (min(spans["train"]), max(spans["train"]))
    other = [span for span in spans["test"] if not usual[0] * 0.97 < span < usual[1] * 1.03]
    assert len(other) > len(spans["test"]) / 2
