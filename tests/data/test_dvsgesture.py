"""DvsGesture: splits, samples against brute force, and the generated tree."""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from parapos.data import FormatError, dvsgesture, preparations
from parapos.data.augment.events import MIRRORED, EventAugment
from parapos.data.batch import collate
from parapos.data.dvsgesture import Gestures, cut, find_root, list_recordings
from parapos.data.events import Events
from parapos.data.events_tree import ROWS, make_dvsgesture
from parapos.data.readers import aedat
from parapos.data.readers.gesture_lists import Row, read_labels, user_of
from parapos.data.sampling import Key
from parapos.tokenizers.spiking_patches import reference

from .event_trees import copy_of, rows, same, small_gestures
from .event_trees import load_gestures as load

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
LISTS = SHARED / "samples" / "dvsgesture"
COLUMNS = "class,startTime_usec,endTime_usec\n"
NO_CHANGE = EventAugment(flip=0.0, operations=("identity",))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small_gestures(tmp_path_factory.mktemp("gestures") / "tree")


@pytest.fixture
def tree(made, tmp_path):
    return copy_of(made, tmp_path)


# Splits


def test_validation_users_are_21_to_23(tmp_path):
    """Without the official lists at hand: every user of both lists goes where the paper's code puts it."""
    names = [f"user{user:02d}_led" for user in range(1, 30)]
    (tmp_path / "trials_to_train.txt").write_text("".join(f"{name}.aedat\n" for name in names[:23]))
    (tmp_path / "trials_to_test.txt").write_text("".join(f"{name}.aedat\n" for name in names[23:]))
    users = {
        split: [user_of(n) for n in list_recordings(tmp_path, split, complete=False)] for split in dvsgesture.SPLITS
    }
    assert users == {"train": list(range(1, 21)), "val": [21, 22, 23], "test": list(range(24, 30))}


def test_splits_are_by_user(made):
    names = {split: list_recordings(made, split, complete=False) for split in ("train", "val", "test")}
    assert names == {
        "train": ["user04_fluorescent", "user04_led"],
        "val": ["user22_fluorescent", "user22_led"],
        "test": ["user24_fluorescent", "user24_led"],
    }
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        list_recordings(made, "dev")


@pytest.mark.skipif(not LISTS.is_dir(), reason="no official lists here")
def test_official_lists():
    names = {split: list_recordings(LISTS, split) for split in ("train", "val", "test")}
    assert len(names["train"]) + len(names["val"]) == 98
    assert len(names["test"]) == 24
    users = {split: {user_of(name) for name in names[split]} for split in names}
    assert users == {"train": set(range(1, 21)), "val": {21, 22, 23}, "test": set(range(24, 30))}


def test_broken_trees_are_explained(tree, tmp_path):
    with pytest.raises(FormatError, match=r"no trials_to_train\.txt, expected the folder of DvsGesture"):
        load("train", tmp_path / "none")
    with pytest.raises(
        FormatError, match=r"trials_to_test\.txt: 2 recordings, expected 24; complete=False accepts this"
    ):
        load("test", tree, complete=True)
    (tree / "user24_led.aedat").unlink()
    found = load("test", tree)
    assert len(found) == 12
    with pytest.raises(FormatError, match=r"user24_led.aedat: no such file; complete=False does without"):
        dvsgesture.list_samples(tree, found.store, ["user24_fluorescent", "user24_led"])
    (tree / "user24_fluorescent_labels.csv").unlink()
    with pytest.raises(FormatError, match="no gestures, expected recordings with labels"):
        load("test", tree)
    (tree / "trials_to_test.txt").write_text("user22_led.aedat\n")
    with pytest.raises(FormatError, match="user22_led is in both lists"):
        load("val", tree)


def test_the_folder_of_the_archive_is_found(tree):
    shutil.copytree(tree, tree.parent / "above" / "DvsGesture")
    assert find_root(tree.parent / "above") == tree.parent / "above" / "DvsGesture"
    assert len(load("val", tree.parent / "above")) == 24


# Samples


def test_a_sample_per_row(made):
    for split in ("train", "val", "test"):
        found = load(split, made)
        assert len(found) == 24
        assert Counter(sample.gesture.label for sample in found.samples) == Counter(2 * ROWS)
        assert (found.classes, found.ragged) == (11, ("codes", "x", "y", "t"))


def test_rows_are_cut_with_both_ends_and_cleaned():
    events = Events.of(
        [9, 10, 10, 12, 13, 15, 15, 16], [1, 2, 128, 4, 5, 6, 7, 8], [0, 1, 2, 3, 128, 5, 127, 7], [1] * 8
    )
    assert rows(cut(events, Row(0, 10, 15))) == [(0, 2, 1, 1), (2, 4, 3, 1), (5, 6, 5, 1), (5, 7, 127, 1)]
    assert rows(cut(events, Row(0, 15, 15))) == [(0, 6, 5, 1), (0, 7, 127, 1)]
    assert (
        len(cut(events, Row(0, 17, 99)))
        == len(cut(events, Row(0, 0, 8)))
        == len(cut(Events.empty(), Row(0, 0, 8)))
        == 0
    )


def test_samples_equal_brute_force(made):
    found = load("val", made)
    all_events = {name: aedat.read(made / f"{name}.aedat") for name in ("user22_fluorescent", "user22_led")}
    for index in (0, 8, 9, 23):
        recording, row, gesture, _ = found.samples[index]
        line = (made / f"{recording}_labels.csv").read_text().splitlines()[row + 1]
        label, start, end = map(int, line.split(","))
        whole = rows(all_events[recording])
        want = [(t - start, x, y, p) for t, x, y, p in whole if start <= t <= end and x < 128 and y < 128]
        assert rows(found.events(index)) == want
        sample = found[index]
        tokens = reference(*zip(*want, strict=True), height=128, width=128, threshold=16)
        assert sample["label"] == gesture.label == label - 1
        assert (sample["id"], sample["length"]) == (index, len(tokens))
        assert len(tokens) > 3
        for name in ("t", "x", "y", "codes"):
            assert np.array_equal(sample[name].numpy(), getattr(tokens, name))
        assert [sample[name].dtype for name in ("codes", "x", "y", "t")] == [torch.int16, *[torch.int64] * 3]


def test_rows_may_overlap(made):
    """Gesture 9 ends after gesture 10 has begun: both have the events in between."""
    found = load("train", made)
    ninth, tenth = (found.samples[i].gesture for i in (9, 10))
    assert (ninth.label, tenth.label) == (8, 9)
    shared = ninth.end - tenth.start
    assert shared > 0
    last, first = found.events(9), found.events(10)
    inside = last.t >= tenth.start - ninth.start
    assert inside.sum() == (first.t <= shared).sum() > 0


def test_a_clock_that_overflows(made):
    """The first recording crosses 2^31 microseconds."""
    events = aedat.read(made / "user04_fluorescent.aedat")
    assert events.t[0] < 2**31 < events.t[-1]
    found = load("train", made)
    assert all(len(found.events(i)) > 1000 for i in range(12))


def test_rows_without_events_have_no_tokens(tree):
    labels = tree / "user24_led_labels.csv"
    first, second = read_labels(labels)[:2]
    pause = first.end + 5000, second.start - 5000
    rows = [(1, *pause), (2, pause[0], pause[0]), (1, first.start, first.end)]
    labels.write_text(COLUMNS + "".join(f"{label},{start},{end}\n" for label, start, end in rows))
    (tree / "user24_fluorescent_labels.csv").write_text(COLUMNS)
    for now in ("raw", "prepared"):
        found = load("test", tree)
        batch = collate([found[0], found[1]], found.ragged)
        assert batch["codes"].shape == (2, 0, 16), now
        assert batch["length"].tolist() == [0, 0]
        preparations.prepare(dvsgesture, preparations.Job(tree, complete=False))
        assert len(found[0]["t"]) == 0


def test_samples_of_different_length_make_a_batch(made):
    found = load("test", made)
    batch = collate([found[i] for i in range(6)], found.ragged)
    lengths = batch["length"].tolist()
    assert len(set(lengths)) > 1
    assert batch["codes"].shape == (6, max(lengths), 16)
    shortest = lengths.index(min(lengths))
    assert torch.equal(batch["t"][shortest, : lengths[shortest]], found[shortest]["t"])
    assert not batch["codes"][shortest, lengths[shortest] :].any()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"patch": 41}, "patch 41 has 33620 codes, expected at most 32768"),
        ({"patch": 0}, "patch must be from 1"),
        ({"threshold": 0}, "threshold"),
    ],
)
def test_settings_are_checked(options, told, made):
    with pytest.raises(ValueError, match=told):
        load("val", made, **options)
    assert load("val", made, patch=32)[0]["x"].max() < 4


# Augmentation


def test_training_is_augmented_and_evaluation_is_not(made):
    train, plain = load("train", made), load("train", made, augment=NO_CHANGE)
    assert train.augment == EventAugment()
    assert load("val", made).augment is None
    assert sum(not same(train[i], plain[i]) for i in range(24)) > 12
    assert same(plain[Key(3, 0)], plain[Key(3, 9)])


def test_a_flip_changes_the_label(made):
    plain, flipped = (
        load("train", made, augment=EventAugment(flip=flip, operations=("identity",))) for flip in (0.0, 1.0)
    )
    for index in range(12):
        assert flipped[index]["label"] == MIRRORED[plain[index]["label"]]
    events, mirrored = plain.events(3), Counter(flipped[3]["x"].tolist())
    turned = Events(events.t, (127 - events.x).astype(np.uint16), events.y, events.polarity)
    assert mirrored == Counter(plain.tokenizing(turned).x.tolist())


def test_what_augmentation_empties_is_left_alone(made):
    """All events but a few go, so that no token is left: the sample and its label stay as they were."""
    harsh = EventAugment(flip=1.0, operations=("event",), event=(0.999, 0.999))
    found, plain = load("train", made, augment=harsh), load("train", made, augment=NO_CHANGE)
    for index in (1, 3, 5):
        assert same(found[index], plain[index])


def test_samples_depend_on_seed_epoch_and_index_alone(made):
    found = load("train", made)
    keys = [Key(i, epoch) for epoch in (0, 5) for i in (3, 0, 17, 8)]
    want = [found[key] for key in keys]
    assert not same(want[0], want[4])
    assert not all(same(a, b) for a, b in zip(want, (load("train", made, seed=1)[key] for key in keys), strict=True))
    for workers in (1, 2):
        loader = DataLoader(found, sampler=keys, batch_size=None, num_workers=workers)
        assert all(same(a, b) for a, b in zip(want, loader, strict=True))


# The generated tree


def test_generated_trees_repeat(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_dvsgesture(tmp_path / name, users=(1,), lights=("lab",), seconds=0.05, seed=seed)
    a, b, c = ((tmp_path / name / "user01_lab.aedat").read_bytes() for name in "abc")
    assert a == b != c
    with pytest.raises(FormatError, match="not empty, expected a new folder"):
        make_dvsgesture(tmp_path / "a")
    assert (tmp_path / "a" / "gesture_mapping.csv").read_text().splitlines()[8] == "arm_roll,8"


def test_generated_gestures_mirror_into_their_class(tmp_path):
    """The mean picture of mirrored gestures is nearer to that of the class they become than to that they were."""
    make_dvsgesture(tmp_path / "a", users=(1, 2, 3), lights=("lab", "led"), seconds=0.5, rate=6000)
    found = load("train", tmp_path / "a")
    assert isinstance(found, Gestures)
    means = np.zeros((11, 16, 16))
    for index, sample in enumerate(found.samples):
        events = found.events(index)
        means[sample.gesture.label] += np.histogram2d(events.y, events.x, 16, ((0, 128), (0, 128)))[0]
    for label in (1, 2, 3, 4, 5, 6):
        distance = {other: np.abs(means[label][:, ::-1] - means[other]).sum() for other in (label, MIRRORED[label])}
        assert distance[MIRRORED[label]] < 0.5 * distance[label]


def test_recipes_reach_the_data(made):
    recipe = pytest.importorskip("parapos.training.recipe")
    loaded = recipe.load("dvsgesture_smoke", {"data.root": str(made)})
    for split in ("train", "val", "test"):
        dataset = loaded.dataset(split)
        assert len(dataset) == 24
        batch = collate([dataset[i] for i in range(3)], dataset.ragged)
        net = loaded.model.build({"num_classes": dataset.classes})
        assert net(*(batch[name] for name in net.inputs)).shape == (3, 11)
    assert dataset.tokenizing.patch == net.patch
    assert loaded.dataset("train").augment == EventAugment(operations=("identity", "roll"))
