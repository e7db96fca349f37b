"""ImageNet as datasets: the division of the training images, what is random, and how much is expected."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from parapos.data import FormatError, create_dataset, imagenet
from parapos.data.imagenet import Listing, validation_counts, validation_mask, write_split
from parapos.data.imagenet_tree import list_train
from parapos.data.sampling import Key
from parapos.data.transforms import Augment

from .imagenet_trees import load


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


def test_train_and_val_are_all_training_images(imagenets, tmp_path):
    root = imagenets / "json"
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


def test_only_training_is_random(imagenets):
    root = imagenets / "json"
    train, val = load("imagenet", "train", root), load("imagenet", "val", root)
    assert not torch.equal(train[Key(0, 0)]["image"], train[Key(0, 1)]["image"])
    assert torch.equal(train[Key(0, 1)]["image"], train[Key(0, 1)]["image"])
    assert torch.equal(val[Key(0, 0)]["image"], val[Key(0, 1)]["image"])
    still = load("imagenet", "train", root, augment=Augment(scale=(1.0, 1.0), ratio=(1.2, 1.2), flip=0.0, ops=0))
    assert torch.equal(still[Key(0, 0)]["image"], still[Key(0, 1)]["image"])


def test_a_full_copy_is_expected(imagenets):
    with pytest.raises(FormatError, match="240 images, 12 classes, expected 1281167 and 1000; complete=False"):
        create_dataset("imagenet", "train", root=imagenets / "json")
    with pytest.raises(FormatError, match="24 images, 12 classes, expected 50000 and 1000"):
        create_dataset("imagenet", "test", root=imagenets / "json")
    with pytest.raises(FormatError, match="expected 10000 and 1000"):
        create_dataset("imagenet_v2", "test", root=imagenets / "json")
    with pytest.raises(FormatError, match="expected 30000 and 1000"):
        create_dataset("imagenet_r", "test", root=imagenets / "json")


@pytest.mark.parametrize(
    ("name", "split", "told"),
    [
        ("imagenet", "dev", "'train', 'val' or 'test', got 'dev'"),
        ("imagenet_r", "train", "must be 'test', got 'train'"),
    ],
)
def test_bad_splits(name, split, told, imagenets):
    with pytest.raises(ValueError, match=told):
        load(name, split, imagenets / "json")
