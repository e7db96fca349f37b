"""ImageNet-1K, ImageNetV2 and ImageNet-R: layouts, labels, the division of the training images, and the check."""

import json
import os
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

from parapos import cli
from parapos.data import FormatError, create_dataset, imagenet
from parapos.data.imagenet import R_CLASSES, Listing, check, restrict, validation_counts, validation_mask, write_split
from parapos.data.imagenet_tree import class_list, list_r, list_test, list_train, list_v2
from parapos.data.sampling import Key
from parapos.data.synthetic import LAYOUTS, write_imagenet
from parapos.data.transforms import Augment

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
LISTS, TABLES = SHARED / "samples" / "imagenet_r_v2", SHARED / "paper" / "tables.toml"
V2 = "imagenetv2-matched-frequency-format-val"
CLS_LOC = "ILSVRC/Data/CLS-LOC"


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The same images in every layout: 12 classes, 20 training and 2 test images each."""
    root = tmp_path_factory.mktemp("imagenet")
    for layout in LAYOUTS:
        write_imagenet(root / layout, classes=12, train=20, test=2, layout=layout, size=(24, 20))
    return root


@pytest.fixture
def tree(trees, tmp_path):
    """A copy of the official layout that a test may break."""
    shutil.copytree(trees / "json", tmp_path / "copy")
    return tmp_path / "copy"


def load(name, split, root, **options):
    return create_dataset(name, split, root=root, size=16, complete=False, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_alike(layout, trees):
    root = trees / layout
    wnids = class_list(root)
    assert len(wnids) == 12
    train, val, test = (load("imagenet", split, root) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (228, 12, 24)
    assert train.classes == val.classes == test.classes == 12
    for dataset in (train, val):
        assert all(wnids[label] == name[:9] for name, label in zip(dataset.files, dataset.labels.tolist(), strict=True))
        assert list(dataset.files) == sorted(dataset.files)
    assert Counter(test.labels.tolist()) == dict.fromkeys(range(12), 2)
    want = {Path(name).name: label for name, label in zip(*_listed(list_test(trees / "folders")), strict=True)}
    assert {Path(name).name: label for name, label in zip(*_listed(list_test(root)), strict=True)} == want
    sample = train[Key(17, 3)]
    assert sample["image"].shape == (3, 16, 16)
    assert (sample["id"], sample["label"]) == (17, int(train.labels[17]))


def _listed(listing):
    return listing.files, listing.labels


@pytest.mark.parametrize("below", [".", "ILSVRC", CLS_LOC])
def test_the_root_may_lie_anywhere_in_the_official_layout(below, trees):
    assert list_train(trees / "csv" / below).files == list_train(trees / "csv").files


def test_metadata_may_lie_in_the_archive(tree):
    for name in ("imagenet_class_index.json", "ILSVRC2012_val_labels.json"):
        shutil.move(tree / name, tree / "ILSVRC" / name)
    shutil.rmtree(tree / CLS_LOC / "train")
    assert len(load("imagenet", "test", tree)) == 24
    assert len(load("imagenet", "test", tree / "ILSVRC")) == 24


def test_the_class_index_knows_classes_that_are_not_on_disk(tree):
    shutil.rmtree(tree / CLS_LOC / "train")
    assert len(class_list(tree)) == 12
    with pytest.raises(FormatError, match="no folder 'train'"):
        load("imagenet", "train", tree)


# The division


def fake(sizes):
    names = [f"n{i:08d}" for i in range(len(sizes))]
    files = sorted(f"{name}/{name}_{j}.JPEG" for name, size in zip(names, sizes, strict=True) for j in range(size))
    return Listing(Path("root"), len(sizes), files, [int(file[1:9]) for file in files])


def imagenet_sizes():
    """1000 class sizes in the range of the real ones, 1,281,167 in all."""
    sizes = [732 + (i * 397) % 569 for i in range(1000)]
    rest = imagenet.TRAIN - sum(sizes)
    order = sorted(range(1000), key=sizes.__getitem__)
    for i in order:
        step = min(1300 - sizes[i], rest)
        sizes[i] += step
        rest -= step
    assert rest == 0
    return sizes


def test_counts_of_the_full_set():
    sizes = imagenet_sizes()
    counts = validation_counts(sizes)
    assert sum(counts) == 12_811
    assert sum(sizes) - sum(counts) == 1_268_356
    assert all(abs(count - size / 100) < 1 for count, size in zip(counts, sizes, strict=True))


def test_counts_follow_the_largest_remainders():
    assert validation_counts([150, 130, 120, 100]) == [2, 1, 1, 1]  # 5 of 500
    assert validation_counts([199, 199, 199, 103]) == [2, 2, 2, 1]  # 7 of 700
    assert validation_counts([50, 250, 300]) == [1, 2, 3]  # at least one each
    assert validation_counts([2] * 3) == [1] * 3
    with pytest.raises(FormatError, match="class 1 has 1 training images, expected at least 2"):
        validation_counts([2, 1])


def test_the_division_is_stratified_disjoint_seeded_and_exact():
    listing = fake([100 + 37 * i for i in range(20)])
    mask = validation_mask(listing)
    total = len(listing.files)
    assert sum(mask) == total // 100
    counts = Counter(label for label, held in zip(listing.labels, mask, strict=True) if held)
    assert all(abs(counts[i] - (100 + 37 * i) / 100) < 1 for i in range(20))
    assert mask == validation_mask(listing)
    assert mask != validation_mask(listing, seed=1)
    held = [file for file, held in zip(listing.files, mask, strict=True) if held]
    assert held[:3] == HELD  # golden: validation sets must stay comparable over versions


HELD = [
    "n00000000/n00000000_86.JPEG",
    "n00000001/n00000001_64.JPEG",
    "n00000002/n00000002_120.JPEG",
]


def test_the_division_depends_on_names_not_on_neighbours():
    """A class keeps its validation images when images of another class come or go."""
    few, many = fake([200, 300]), fake([200, 500])
    held = [
        [f for f, held in zip(listing.files, validation_mask(listing), strict=True) if held and f < "n00000001"]
        for listing in (few, many)
    ]
    assert held[0] == held[1]
    assert len(held[0]) == 2


def test_every_100th():
    listing = fake([150, 201])
    mask = validation_mask(listing, "every_100th")
    assert [i for i, held in enumerate(mask) if held] == [0, 100, 200]
    assert (
        sum(validation_mask(Listing(Path(), 1, ["x"] * imagenet.TRAIN, [0] * imagenet.TRAIN), "every_100th")) == 12_811
    )
    with pytest.raises(ValueError, match="split_seed has no effect"):
        validation_mask(listing, "every_100th", seed=3)
    with pytest.raises(ValueError, match="one of stratified, every_100th, got 'random'"):
        validation_mask(listing, "random")


def test_train_and_val_are_all_training_images(trees, tmp_path):
    root = trees / "json"
    for validation in imagenet.VALIDATION:
        train, val = (load("imagenet", split, root, validation=validation) for split in ("train", "val"))
        assert not set(train.files) & set(val.files)
        assert sorted([*train.files, *val.files]) == list_train(root).files
    one, two = (load("imagenet", "val", root, split_seed=seed) for seed in (0, 1))
    assert list(one.files) != list(two.files)
    first = write_split(root, tmp_path / "val.txt")
    assert (tmp_path / "val.txt").read_text().splitlines() == list(one.files)
    assert first == write_split(root, tmp_path / "again.txt")
    assert first != write_split(root, tmp_path / "other.txt", split_seed=1)


def test_only_training_is_random(trees):
    root = trees / "json"
    train, val = load("imagenet", "train", root), load("imagenet", "val", root)
    assert not torch.equal(train[Key(0, 0)]["image"], train[Key(0, 1)]["image"])
    assert torch.equal(train[Key(0, 1)]["image"], train[Key(0, 1)]["image"])
    assert torch.equal(val[Key(0, 0)]["image"], val[Key(0, 1)]["image"])
    still = load("imagenet", "train", root, augment=Augment(scale=(1.0, 1.0), ratio=(1.2, 1.2), flip=0.0, ops=0))
    assert torch.equal(still[Key(0, 0)]["image"], still[Key(0, 1)]["image"])


# ImageNetV2 and ImageNet-R


def test_v2_folders_are_numbers_not_ranks(trees):
    root = trees / "json"
    v2 = load("imagenet_v2", "test", root)
    assert len(v2) == 24
    assert v2.classes == 12
    assert all(int(name.split("/")[0]) == label for name, label in zip(v2.files, v2.labels.tolist(), strict=True))
    ranks = {name: i for i, name in enumerate(sorted(map(str, range(12))))}
    assert any(ranks[name.split("/")[0]] != label for name, label in zip(v2.files, v2.labels.tolist(), strict=True))
    assert list_v2(root / V2).files == list_v2(root).files


def test_v2_of_an_old_copy_has_wnids(tree):
    wnids = class_list(tree)
    numbered = dict(zip(*_listed(list_v2(tree)), strict=True))
    for label, wnid in enumerate(wnids):
        (tree / V2 / str(label)).rename(tree / V2 / wnid)
    named = dict(zip(*_listed(list_v2(tree)), strict=True))
    assert {Path(name).name: label for name, label in named.items()} == {
        Path(name).name: label for name, label in numbered.items()
    }
    (tree / V2 / wnids[3]).rename(tree / V2 / "other")
    with pytest.raises(FormatError, match="other: not a class, expected one of 12 wnids"):
        list_v2(tree)
    (tree / "imagenet_class_index.json").unlink()
    shutil.rmtree(tree / "ILSVRC")
    with pytest.raises(FormatError, match="12 folders and no class list"):
        list_v2(tree)


def test_v2_alone_has_a_thousand_classes(tree):
    assert create_dataset("imagenet_v2", "test", root=tree / V2, complete=False).classes == 1000


def test_v2_mistakes(tree):
    with pytest.raises(ValueError, match="variant must be one of matched-frequency"):
        list_v2(tree, "best")
    with pytest.raises(FormatError, match=r"imagenetv2-top-images-format-val: no such folder"):
        list_v2(tree, "top-images")
    (tree / V2 / "12").mkdir()
    with pytest.raises(FormatError, match="folder 12, expected numbers from 0 to 11"):
        list_v2(tree)
    (tree / V2 / "12").rename(tree / V2 / "011")
    with pytest.raises(FormatError, match="same number"):
        list_v2(tree)
    (tree / V2 / "011").rename(tree / V2 / "other")
    with pytest.raises(FormatError, match="other: not a number"):
        list_v2(tree)


def test_r_is_labelled_among_all_classes(trees):
    r = load("imagenet_r", "test", trees / "json")
    assert r.classes == 12
    assert Counter(r.labels.tolist()) == {0: 2, 3: 2, 6: 2, 9: 2}
    assert r.subset == [0, 3, 6, 9]
    assert restrict(torch.arange(12.0)[None], r.subset).argmax().item() == 9
    assert load("imagenet", "test", trees / "json").subset is None


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


def test_answers_among_200_or_1000():
    logits = torch.zeros(2, 1000)
    logits[0, 0], logits[0, 4] = 9.0, 3.0  # class 0 is not one of the 200
    logits[1, 988] = 1.0
    assert logits.argmax(1).tolist() == [0, 988]
    assert restrict(logits).argmax(1).tolist() == [4, 988]
    assert restrict(logits).isfinite().sum().item() == 400


# Mistakes on disk


def test_a_full_copy_is_expected(trees):
    with pytest.raises(FormatError, match="240 images, 12 classes, expected 1281167 and 1000; complete=False"):
        create_dataset("imagenet", "train", root=trees / "json")
    with pytest.raises(FormatError, match="24 images, 12 classes, expected 50000 and 1000"):
        create_dataset("imagenet", "test", root=trees / "json")
    with pytest.raises(FormatError, match="expected 10000 and 1000"):
        create_dataset("imagenet_v2", "test", root=trees / "json")
    with pytest.raises(FormatError, match="expected 30000 and 1000"):
        create_dataset("imagenet_r", "test", root=trees / "json")


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
def test_broken_trees_are_explained(how, tree):
    damage, split, told = BREAK[how]
    damage(tree)
    with pytest.raises(FormatError, match=told):
        load("imagenet", split, tree)


def test_a_short_line_in_the_csv(trees, tmp_path):
    shutil.copytree(trees / "csv", tmp_path / "copy")
    path = tmp_path / "copy" / "LOC_val_solution.csv"
    path.write_text(path.read_text() + "ILSVRC2012_val_00000099\n")
    with pytest.raises(FormatError, match="line 26: expected two columns"):
        list_test(tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "split", "told"),
    [
        ("imagenet", "dev", "'train', 'val' or 'test', got 'dev'"),
        ("imagenet_r", "train", "must be 'test', got 'train'"),
    ],
)
def test_bad_splits(name, split, told, trees):
    with pytest.raises(ValueError, match=told):
        load(name, split, trees / "json")


# The check


def test_check_counts_and_reads(tree):
    seen = []
    found = check(tree, complete=False, progress=lambda items, name: seen.append(name) or items)
    rows = {what.strip(): count for what, count, _ in found.rows}
    assert found.problems == []
    assert rows["classes"] == "12"
    assert rows["train images"] == "240"
    assert rows["of them for validation"] == "12"
    assert rows["test images"] == "24"
    assert rows["ImageNet-R images"] == "8"
    assert rows["ImageNetV2 top-images images"] == "not there"
    assert len(seen) == 4
    (tree / CLS_LOC / "val" / "ILSVRC2012_val_00000002.JPEG").write_bytes(b"\xff\xd8broken")
    (problem,) = check(tree, complete=False).problems
    assert problem.startswith("unreadable: ")
    assert "ILSVRC2012_val_00000002.JPEG" in problem
    assert check(tree, complete=False, sample=0).problems == []


def test_check_knows_the_true_counts(tree):
    problems = "\n".join(check(tree, sample=1).problems)
    assert "classes: found 12, expected 1,000" in problems
    assert "train images: found 240, expected 1,281,167" in problems
    assert "test images: found 24, expected 50,000" in problems
    assert "1000 classes have not 50 images each; class 0 has 2" in problems
    assert "top-images" not in problems
    rows = {what.strip(): expected for what, _, expected in check(tree, sample=0).rows}
    assert (rows["of them for training"], rows["of them for validation"]) == ("1,268,356", "12,811")


def test_check_tells_broken_metadata(tree):
    (tree / "imagenet_class_index.json").write_text("{")
    (problem,) = check(tree).problems
    assert "not JSON" in problem


def test_command(tmp_path, capsys):
    root = str(tmp_path / "new")
    assert cli.main(["prepare", "imagenet", "--synthetic", "--root", root]) == 0
    out, err = capsys.readouterr()
    assert "| train images" in out
    assert "validation.txt, sha256" in out
    assert "train images: 240 of 240" in err
    held = (tmp_path / "new" / "validation.txt").read_text().splitlines()
    assert len(held) == 12
    (tmp_path / "new" / "validation.txt").unlink()
    assert cli.main(["prepare", "imagenet", "--check", "--partial", "--sample", "3", "--root", root]) == 0
    assert not (tmp_path / "new" / "validation.txt").exists()
    with pytest.raises(SystemExit) as stop:
        cli.main(["prepare", "imagenet", "--root", root])
    assert stop.value.code == 1
    assert "found 240, expected 1,281,167" in capsys.readouterr().out
    assert not (tmp_path / "new" / "validation.txt").exists()
    assert cli.main(["prepare", "imagenet", "--synthetic", "--root", root]) == 2
    assert capsys.readouterr().err.endswith("not empty, expected a new folder\n")
    assert cli.main(["prepare", "imagenet", "--synthetic", "--check"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


# Recipes


def test_recipes_are_the_papers():
    recipe = pytest.importorskip("parapos.training.recipe")
    full = recipe.load("imagenet")
    sample = {key: tuple(value) if isinstance(value, list) else value for key, value in full.augment.sample.items()}
    assert Augment(**sample) == Augment()
    assert (full.data.size, full.data.options["crop"], full.data.options["normalize"]) == (224, 0.875, False)
    assert (full.optim.epochs, full.optim.batch, full.optim.lr, full.optim.warmup) == (300, 1024, 6e-4, 0.05)
    assert (full.optim.weight_decay, full.optim.decay, full.optim.betas) == (0.05, "all", (0.9, 0.999))
    assert (full.augment.mixup, full.augment.cutmix, full.augment.smoothing) == (0.8, 1.0, 0.1)
    assert (full.run.precision, full.optim.clip, full.optim.ema) == ("16-mixed", 0.0, 0.0)
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in recipe.load(name).model.build(1000).parameters())
            for name in ("imagenet", "imagenet_ablation", "imagenet_matched")
        }
    assert sizes == {"imagenet": 97_491_496, "imagenet_ablation": 24_747_784, "imagenet_matched": 97_491_496}
    ablation = recipe.load("imagenet_ablation")
    assert (ablation.optim.epochs, ablation.optim.warmup) == (150, 0.05)
    assert (ablation.data, ablation.augment) == (full.data, full.augment)


def test_recipes_of_variants_have_the_papers_sizes():
    recipe = pytest.importorskip("parapos.training.recipe")

    def added(name, base, **changes):
        model = recipe.load(name, {f"model.{key.replace('__', '.')}": value for key, value in changes.items()}).model
        with torch.device("meta"):
            return sum(p.numel() for p in model.build(1000).parameters()) - base

    text = Path(recipe.find("imagenet_ablation")).read_text()
    rows = re.findall(r"--model\.options\.(\w+) false +[\d.]+ +([\d,]+)", text)
    assert len(rows) == 5
    for option, count in rows:
        assert added("imagenet_ablation", 21_975_784, **{f"options__{option}": "false"}) == int(count.replace(",", ""))
    own = {"sincos": 0, "rope": 0, "rope_mixed": 16_416, "alibi": 0, "lookhere": 0, "pape_ri": 110_592}
    assert {e: added("imagenet_matched", 86_417_896, encoding=e) - 11_073_600 for e in own} == own


@pytest.mark.skipif(not TABLES.is_file(), reason="no tables of the paper here")
def test_recipes_state_the_papers_scores():
    recipe = pytest.importorskip("parapos.training.recipe")
    tables = tomllib.loads(TABLES.read_text())
    header = Path(recipe.find("imagenet")).read_text()
    for i, encoding in enumerate(tables["ood"]["columns"]):
        plain, scaled = (tables[name][encoding] for name in ("extrapolation", "extrapolation_interpolated"))
        want = [plain[0], plain[4], plain[8], scaled[4], scaled[8]]
        want += [tables["ood"][name][i] for name in ("imagenet_v2", "imagenet_r")]
        (row,) = re.findall(rf"^# +{encoding} +([\d. ]+)$", header, re.MULTILINE)
        assert [float(value) for value in row.split()] == want
    header = Path(recipe.find("imagenet_ablation")).read_text()
    for option in ("distance", "direction", "context", "activation", "projection"):
        (score,) = re.findall(rf"options\.{option} false +([\d.]+)", header)
        assert float(score) == tables["ablations"][f"no_{option}"]


def test_recipes_reach_the_data(trees):
    recipe = pytest.importorskip("parapos.training.recipe")
    changes = {"data.root": str(trees / "json"), "data.options.complete": "false", "data.size": "32"}
    loaded = recipe.load("imagenet", changes)
    for split, count in (("train", 228), ("val", 12), ("test", 24)):
        dataset = loaded.dataset(split)
        assert len(dataset) == count
        assert dataset[0]["image"].shape == (3, 32, 32)
