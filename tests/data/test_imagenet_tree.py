"""Where images lie and which class each is: the layouts of ImageNet-1K, ImageNetV2, ImageNet-R, and broken ones."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from parapos.data import FormatError, create_dataset
from parapos.data.imagenet_tree import R_CLASSES, class_list, list_r, list_test, list_train, list_v2
from parapos.data.sampling import Key
from parapos.data.synthetic import LAYOUTS

from .imagenet_trees import CLS_LOC, V2, load

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
LISTS = SHARED / "samples" / "imagenet_r_v2"


def _listed(listing):
    return listing.files, listing.labels


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_alike(layout, imagenets):
    root = imagenets / layout
    wnids = class_list(root)
    assert len(wnids) == 12
    train, val, test = (load("imagenet", split, root) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (228, 12, 24)
    assert train.classes == val.classes == test.classes == 12
    for dataset in (train, val):
        assert all(wnids[label] == name[:9] for name, label in zip(dataset.files, dataset.labels.tolist(), strict=True))
        assert list(dataset.files) == sorted(dataset.files)
    assert Counter(test.labels.tolist()) == dict.fromkeys(range(12), 2)
    want = {Path(name).name: label for name, label in zip(*_listed(list_test(imagenets / "folders")), strict=True)}
    assert {Path(name).name: label for name, label in zip(*_listed(list_test(root)), strict=True)} == want
    sample = train[Key(17, 3)]
    assert sample["image"].shape == (3, 16, 16)
    assert (sample["id"], sample["label"]) == (17, int(train.labels[17]))


@pytest.mark.parametrize("below", [".", "ILSVRC", CLS_LOC])
def test_the_root_may_lie_anywhere_in_the_official_layout(below, imagenets):
    assert list_train(imagenets / "csv" / below).files == list_train(imagenets / "csv").files


def test_metadata_may_lie_in_the_archive(copied):
    for name in ("imagenet_class_index.json", "ILSVRC2012_val_labels.json"):
        shutil.move(copied / name, copied / "ILSVRC" / name)
    shutil.rmtree(copied / CLS_LOC / "train")
    assert len(load("imagenet", "test", copied)) == 24
    assert len(load("imagenet", "test", copied / "ILSVRC")) == 24


def test_the_class_index_knows_classes_that_are_not_on_disk(copied):
    shutil.rmtree(copied / CLS_LOC / "train")
    assert len(class_list(copied)) == 12
    with pytest.raises(FormatError, match="no folder 'train'"):
        load("imagenet", "train", copied)


# ImageNetV2 and ImageNet-R


def test_v2_folders_are_numbers_not_ranks(imagenets):
    root = imagenets / "json"
    v2 = load("imagenet_v2", "test", root)
    assert len(v2) == 24
    assert v2.classes == 12
    assert all(int(name.split("/")[0]) == label for name, label in zip(v2.files, v2.labels.tolist(), strict=True))
    ranks = {name: i for i, name in enumerate(sorted(map(str, range(12))))}
    assert any(ranks[name.split("/")[0]] != label for name, label in zip(v2.files, v2.labels.tolist(), strict=True))
    assert list_v2(root / V2).files == list_v2(root).files


def test_v2_of_an_old_copy_has_wnids(copied):
    wnids = class_list(copied)
    numbered = dict(zip(*_listed(list_v2(copied)), strict=True))
    for label, wnid in enumerate(wnids):
        (copied / V2 / str(label)).rename(copied / V2 / wnid)
    named = dict(zip(*_listed(list_v2(copied)), strict=True))
    assert {Path(name).name: label for name, label in named.items()} == {
        Path(name).name: label for name, label in numbered.items()
    }
    (copied / V2 / wnids[3]).rename(copied / V2 / "other")
    with pytest.raises(FormatError, match="other: not a class, expected one of 12 wnids"):
        list_v2(copied)
    (copied / "imagenet_class_index.json").unlink()
    shutil.rmtree(copied / "ILSVRC")
    with pytest.raises(FormatError, match="12 folders and no class list"):
        list_v2(copied)


def test_v2_alone_has_a_thousand_classes(copied):
    assert create_dataset("imagenet_v2", "test", root=copied / V2, complete=False).classes == 1000


def test_v2_mistakes(copied):
    with pytest.raises(ValueError, match="variant must be one of matched-frequency"):
        list_v2(copied, "best")
    with pytest.raises(FormatError, match=r"imagenetv2-top-images-format-val: no such folder"):
        list_v2(copied, "top-images")
    (copied / V2 / "12").mkdir()
    with pytest.raises(FormatError, match="folder 12, expected numbers from 0 to 11"):
        list_v2(copied)
    (copied / V2 / "12").rename(copied / V2 / "011")
    with pytest.raises(FormatError, match="same number"):
        list_v2(copied)
    (copied / V2 / "011").rename(copied / V2 / "other")
    with pytest.raises(FormatError, match="other: not a number"):
        list_v2(copied)


def test_r_is_labelled_among_all_classes(imagenets):
    r = load("imagenet_r", "test", imagenets / "json")
    assert r.classes == 12
    assert Counter(r.labels.tolist()) == {0: 2, 3: 2, 6: 2, 9: 2}
    assert r.subset == [0, 3, 6, 9]
    assert load("imagenet", "test", imagenets / "json").subset is None


def test_r_classes():
    assert len(set(R_CLASSES)) == 200
    assert list(R_CLASSES) == sorted(R_CLASSES)
    assert sum(R_CLASSES) == 86_135
    assert R_CLASSES[-1] < 1000


def test_r_alone_knows_its_classes_by_rank(tmp_path):
    names = [f"n{7 * i:08d}" for i in range(200)]
    for name in names:
        (tmp_path / "imagenet-r" / name).mkdir(parents=True)
        (tmp_path / "imagenet-r" / name / "art_0.jpg").touch()
    listing = list_r(tmp_path)
    assert listing.labels == list(R_CLASSES)
    assert listing.classes == 1000
    assert list_r(tmp_path / "imagenet-r").labels == list(R_CLASSES)
    shutil.rmtree(tmp_path / "imagenet-r" / names[5])
    with pytest.raises(FormatError, match="199 folders and no class list"):
        list_r(tmp_path)


def test_r_notices_a_wrong_class_list(tmp_path):
    wnids = [f"n{i:08d}" for i in range(1000)]
    index = {i: [wnid, "x"] for i, wnid in enumerate(wnids)}
    (tmp_path / "imagenet_class_index.json").write_text(json.dumps(index))
    for label in R_CLASSES:
        (tmp_path / "imagenet-r" / wnids[label]).mkdir(parents=True)
        (tmp_path / "imagenet-r" / wnids[label] / "art_0.jpg").touch()
    assert list_r(tmp_path).labels == list(R_CLASSES)
    (tmp_path / "imagenet-r" / wnids[1]).rename(tmp_path / "imagenet-r" / wnids[3])
    with pytest.raises(FormatError, match="n00000003 is class 3, which is not one of the 200"):
        list_r(tmp_path)


@pytest.mark.skipif(not LISTS.is_dir(), reason="no class lists here")
def test_r_classes_against_the_published_lists():
    assert (LISTS / "imagenet_r_indices.txt").read_text().split() == [str(i) for i in R_CLASSES]
    wnids = (LISTS / "imagenet_synsets.txt").read_text().split()
    assert wnids == sorted(wnids)
    assert [wnids[i] for i in R_CLASSES] == (LISTS / "imagenet_r_synsets.txt").read_text().split()


# Mistakes on disk


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


VAL, INDEX, LABELS = f"{CLS_LOC}/val", "imagenet_class_index.json", "ILSVRC2012_val_labels.json"
ONE, NEW = f"{VAL}/ILSVRC2012_val_00000001.JPEG", f"{VAL}/new.JPEG"
BREAK = {
    "missing class": (lambda t: shutil.rmtree(t / CLS_LOC / "train/n10000000"), "train", "n10000000: is missing"),
    "extra class": (lambda t: (t / CLS_LOC / "train/n99999999").mkdir(), "train", "n99999999: is no class"),
    "no label": (lambda t: shutil.copy(t / ONE, t / NEW), "test", "new: is not in ILSVRC2012_val_labels.json"),
    "no image": (lambda t: (t / ONE).unlink(), "test", "00000001: is in .* not on disk"),
    "no labels": (lambda t: (t / LABELS).unlink(), "test", "images without labels"),
    "mixed val": (lambda t: (t / VAL / "n10000000").mkdir(), "test", "both images and folders"),
    "not json": (lambda t: (t / INDEX).write_text("{"), "train", "not JSON"),
    "json list": (lambda t: (t / INDEX).write_text("[]"), "train", "JSON object, got a list"),
    "gap": (lambda t: edit(t / INDEX, lambda v: v.pop("4")), "train", "class 4, expected"),
    "unsorted": (
        lambda t: edit(t / INDEX, lambda v: v.update({"0": v["1"], "1": v["0"]})),
        "train",
        "in sorted order",
    ),
    "bad wnid": (
        lambda t: edit(t / LABELS, lambda v: v.update({Path(ONE).name: 7})),
        "test",
        "expected a wnid such as n01440764, got 7",
    ),
    "unknown wnid": (
        lambda t: edit(t / LABELS, lambda v: v.update({Path(ONE).name: "n00000001"})),
        "test",
        "n00000001 is not one of the 12",
    ),
    "empty class": (
        lambda t: [path.unlink() for path in (t / CLS_LOC / "train/n10087109").iterdir()],
        "train",
        "class 11 has 0 training images",
    ),
}


@pytest.mark.parametrize("how", BREAK)
def test_broken_trees_are_explained(how, copied):
    damage, split, told = BREAK[how]
    damage(copied)
    with pytest.raises(FormatError, match=told):
        load("imagenet", split, copied)


def test_a_short_line_in_the_csv(imagenets, tmp_path):
    shutil.copytree(imagenets / "csv", tmp_path / "copy")
    path = tmp_path / "copy" / "LOC_val_solution.csv"
    path.write_text(path.read_text() + "ILSVRC2012_val_00000099\n")
    with pytest.raises(FormatError, match="line 26: expected two columns"):
        list_test(tmp_path / "copy")
