"""GEN1: which boxes count, and which events belong to a sample."""

import inspect
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from parapos.data import FormatError, gen1
from parapos.data.batch import collate
from parapos.data.events import Events, clean, concatenate
from parapos.data.gen1 import Augment, find_root, last_events, list_clips, usable
from parapos.data.readers import TruncatedWarning, boxes, dat
from parapos.data.sampling import Key
from parapos.tokenizers.spiking_patches import reference

from .event_trees import copy_of, made_of, rows, same, small_gen1
from .event_trees import load_gen1 as load

NO_CHANGE = Augment(flip=0.0, operations=("identity",))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small_gen1(tmp_path_factory.mktemp("gen1") / "tree")


@pytest.fixture
def tree(made, tmp_path):
    return copy_of(made, tmp_path)


def corners(found):
    return [tuple(round(float(value), 3) for value in box) for box in found[["x", "y", "w", "h"]].tolist()]


# Boxes


@pytest.mark.parametrize(
    ("box", "want"),
    [
        ((10, 20, 40, 30), (10, 20, 40, 30)),
        ((-20, -5, 60, 40), (0, 0, 40, 35)),
        ((280, 220, 60, 60), None),  # 23 x 19 pixels are left, a diagonal below 30
        ((270, 200, 60, 60), (270, 200, 33, 39)),  # up to 303 and 239, the last pixels
        ((-50, 10, 40, 40), None),
        ((400, 10, 40, 40), None),
        ((10, 10, 0, 50), None),
        ((10, 10, -20, 50), None),
        ((10, 10, 10, 29), (10, 10, 10, 29)),  # 100 + 841 >= 900
        ((10, 10, 10, 28), None),  # 100 + 784 < 900
        ((10, 10, 9.99, 50), None),
        ((10, 10, 50, 9.99), None),
        ((10, 10, 18, 24), (10, 10, 18, 24)),  # exactly 30
    ],
)
def test_boxes_are_cut_to_the_frame_and_small_ones_dropped(box, want):
    for train in (True, False):
        assert corners(usable(made_of(box), train=train)) == ([want] if want else [])


def test_boxes_as_wide_as_the_frame_are_faulty_in_training_alone():
    found = made_of((0, 10, 273, 50), (0, 10, 273.5, 50), (-10, 10, 400, 50))
    assert corners(usable(found, train=True)) == [(0, 10, 273, 50)]
    assert corners(usable(found, train=False)) == [(0, 10, 273, 50), (0, 10, 273.5, 50), (0, 10, 303, 50)]


def test_unknown_classes_are_left_out_with_a_warning():
    found = made_of((10, 10, 40, 40, 1), (10, 10, 40, 40, 2), (10, 10, 40, 40, 9))
    with pytest.warns(UserWarning, match="a.npy: 2 boxes are left out, the first of class 2, expected 0 or 1"):
        assert usable(found, train=False, name="a.npy")["class_id"].tolist() == [1]


def test_a_sample_per_time_stamp(tree):
    path = next((tree / "val").glob("*_bbox.npy"))
    small = made_of((5, 5, 2, 2), t=300)
    parts = [
        made_of((0, 0, 50, 50), t=500),
        made_of((1, 1, 60, 50), (2, 2, 5, 5), t=200),
        small,
        made_of((3, 3, 50, 50), t=500),
    ]
    boxes.write(path, np.concatenate(parts), layout="old")
    found = load("val", tree)
    assert found.times.tolist() == [200, 500]  # 300 lost its only box
    assert found.objects(0).tolist() == [[1, 1, 60, 50, 0]]
    assert found.objects(1).tolist() == [[0, 0, 50, 50, 0], [3, 3, 50, 50, 0]]
    boxes.write(path, small)
    with pytest.raises(FormatError, match="no boxes, expected clips with labels"):
        load("val", tree)


# Windows of events


def brute(events, time, count, unique=False):
    """By looking at every event."""
    found = [event for event in rows(events) if event[0] <= time and event[1] < 304 and event[2] < 240]
    if unique:
        found = list(dict.fromkeys(found))
    return found[-count:]


@given(
    events=st.lists(
        st.tuples(st.integers(0, 12), st.integers(302, 305), st.sampled_from([0, 239, 240]), st.integers(0, 1)),
        max_size=40,
    ),
    time=st.integers(-1, 14),
    count=st.integers(1, 45),
    unique=st.booleans(),
)
@example(events=[(5, 303, 0, 1), (5, 303, 0, 0), (5, 303, 0, 1)], time=5, count=1, unique=True)
def test_windows_equal_brute_force(events, time, count, unique, tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "a_td.dat"
    stream = Events.of(*zip(*sorted(events, key=lambda event: event[0]), strict=True)) if events else Events.empty()
    dat.write(path, stream)
    assert rows(last_events(dat.DatFile(path), time, count, unique=unique)) == brute(stream, time, count, unique)


def test_the_window_is_the_last_500_000_events(tmp_path):
    """As in the paper; of times 0, 1, 2, ... each is an event."""
    count = 500_003
    path = tmp_path / "a_td.dat"
    dat.write(path, Events.of(np.arange(count), np.zeros(count, int), np.zeros(count, int), np.zeros(count, int)))
    for time, first, last in ((count, 3, count - 1), (count - 2, 2, count - 2), (9, 0, 9)):
        window = last_events(dat.DatFile(path), time)
        assert np.array_equal(window.t, np.arange(first, last + 1))
    assert gen1.LAST == inspect.signature(gen1.gen1).parameters["last"].default == 500_000


def chunked(events, time, count, length=250_000):
    """As if a clip were cut into quarters of a second, cleaned one by one, and taken from the label backwards."""
    chunks = []
    for start in range(0, int(events.t[-1]) + 1, length):
        inside = (events.t >= start) & (events.t < start + length)
        chunks.append(clean(events.select(inside), 304, 240, start=start))
    last = min(time // length, len(chunks) - 1)
    found = chunks[last].select(chunks[last].t <= time)
    while len(found) < count and last > 0:
        last -= 1
        found = concatenate([chunks[last], found])
    return found.select(slice(max(0, len(found) - count), None))


def test_chunks_give_the_same_windows(made):
    file = dat.DatFile(next((made / "train").glob("*_td.dat")))
    events = file.slice(0, len(file))
    for time in (0, 1, 249_999, 250_000, 600_000, 999_999, 5_000_000):
        for count in (1, 1000, 9000, 10**6):
            want = chunked(events, time, count)
            assert rows(last_events(file, time, count)) == rows(want) == brute(events, time, count)


BACK = "time goes back from {} to {} at event {}, expected never"


def test_windows_that_go_back_in_time_are_told(tmp_path):
    path = tmp_path / "a_td.dat"
    dat.write(path, Events.of([0, 5, 4, 6, 7, 8], *np.zeros((3, 6), int)))
    file = dat.DatFile(path)
    with pytest.raises(FormatError, match=f"a_td.dat: at byte {file.start + 16}: {BACK.format(5, 4, 2)}"):
        last_events(file, 9)
    assert last_events(file, 9, 4).t.tolist() == [4, 6, 7, 8]


def test_clips_that_go_back_in_time_are_told(tree):
    """A clock that starts again: every window is in order, and most of them are wrong."""
    path = next((tree / "val").glob("*_td.dat"))
    events = dat.read(path)
    dat.write(path, concatenate([events, events]), width=304, height=240)
    at, told = len(events), BACK.format(events.t[-1], events.t[0], len(events))
    found = load("val", tree, last=10)
    for _ in range(2):
        with pytest.raises(FormatError, match=f"{path}: at byte {dat.DatFile(path).start + 8 * at}: {told}"):
            found[0]


def test_a_clip_is_looked_through_once(tree, monkeypatch):
    found, seen, check = load("train", tree), [], dat.DatFile.check_order

    def counted(file, *part):
        seen.append(file.path if not part else None)
        check(file, *part)

    monkeypatch.setattr(dat.DatFile, "check_order", counted)
    for index in (0, 1, 4, 5, 1):
        found[index]
    assert len([path for path in seen if path]) == len({path for path in seen if path}) == 2


# Samples


def test_samples_equal_brute_force(made):
    for split in ("train", "val", "test"):
        found = load(split, made, augment=NO_CHANGE if split == "train" else None, last=5000)
        assert (found.classes, found.ragged) == (
            2,
            ("codes", "x", "y", "t", "boxes", "labels", "truth.boxes", "truth.labels"),
        )
        assert len(found) == 4 * len(found.names)
        for index in range(len(found)):
            name, time = found.names[found.clips[index]], int(found.times[index])
            want = brute(dat.read(made / split / f"{name}_td.dat"), time, 5000)
            tokens = reference(*zip(*want, strict=True), height=240, width=304, threshold=16)
            sample = found[index]
            assert (sample["length"], sample["time"], sample["id"]) == (len(tokens), time, index)
            assert len(tokens) > 10
            assert np.array_equal(sample["t"].numpy(), time - tokens.t)
            assert (sample["t"] >= 0).all()
            for key in ("x", "y", "codes"):
                assert np.array_equal(sample[key].numpy(), getattr(tokens, key))
            labels = boxes.read(made / split / f"{name}_bbox.npy")
            kept = usable(labels[labels["t"] == time], train=split == "train")
            x, y, w, h = (kept[key].astype(float) for key in ("x", "y", "w", "h"))
            corners = np.stack([x, y, x + w, y + h], 1)
            assert torch.equal(sample["boxes"], torch.tensor(corners, dtype=torch.float32))
            assert sample["labels"].tolist() == kept["class_id"].tolist()
            assert sample["count"] == len(kept) > 1


def test_the_frame_has_all_that_the_tree_promises(made):
    """Events outside the frame and twice, both layouts, and boxes that must go."""
    paths = sorted((made / "train").glob("*_bbox.npy"))
    assert {np.load(path).dtype.names[0] for path in paths} == {"ts", "t"}
    assert (
        len(boxes.read(paths[0]))
        > len(usable(boxes.read(paths[0]), train=False))
        > len(usable(boxes.read(paths[0]), train=True))
    )
    events = dat.read(next((made / "train").glob("*_td.dat")))
    assert (events.x >= 304).any()
    assert len(set(rows(events))) < len(events)


def test_labels_before_and_after_all_events(tree):
    path = next((tree / "test").glob("*_bbox.npy"))
    events = dat.read(next((tree / "test").glob("*_td.dat")))
    dat.write(next((tree / "test").glob("*_td.dat")), Events(events.t + 1000, events.x, events.y, events.polarity))
    boxes.write(path, np.concatenate([made_of((0, 0, 50, 50), t=5), made_of((0, 0, 50, 50), t=10**9)]))
    found = load("test", tree)
    first, last = found[0], found[1]
    assert (first["length"], first["count"], first["codes"].shape) == (0, 1, (0, 16))
    assert len(found.events(1)) == ((events.x < 304) & (events.y < 240)).sum()
    assert last["length"] > 10
    batch = collate([first, last], found.ragged)
    assert batch["codes"].shape == (2, last["length"], 16)
    assert batch["count"].tolist() == [1, 1]


def test_samples_with_different_numbers_of_boxes_make_a_batch(made):
    found = load("val", made)
    samples = [found[i] for i in range(4)]
    batch = collate(samples, found.ragged)
    most = max(sample["count"] for sample in samples)
    assert min(sample["count"] for sample in samples) < most
    assert batch["boxes"].shape == (4, most, 4)
    assert batch["labels"].shape == (4, most)


def test_events_that_occur_twice_may_count_once(made):
    plain, once = load("val", made), load("val", made, unique=True)
    a, b = rows(plain.events(3)), rows(once.events(3))
    assert len(b) < len(a)
    assert b == list(dict.fromkeys(a))


# Augmentation


def test_augmentation_is_for_training(made):
    train, plain = load("train", made), load("train", made, augment=NO_CHANGE)
    assert (train.augment, load("test", made).augment) == (Augment(), None)
    assert train.augment.operations == ("identity", "area", "time", "event", "rotation")
    assert train.augment.rotation == 20
    assert sum(not same(train[i], plain[i]) for i in range(8)) > 3
    with pytest.raises(ValueError, match="operations must be some of identity, area, time, event, rotation"):
        Augment(operations=("shear",))
    with pytest.raises(ValueError, match="flip must be from 0 to 1"):
        Augment(flip=2.0)


def test_a_flip_takes_boxes_along(made):
    plain, flipped = (load("train", made, augment=Augment(flip=flip, operations=("identity",))) for flip in (0.0, 1.0))
    for index in range(4):
        old, new = plain[index], flipped[index]
        assert torch.allclose(new["boxes"][:, [2, 0]], 304 - old["boxes"][:, [0, 2]], atol=1e-4)
        assert torch.equal(new["boxes"][:, 1::2], old["boxes"][:, 1::2])
        assert torch.equal(new["labels"], old["labels"])


def test_a_sample_that_loses_all_boxes_or_tokens_is_left_alone(made):
    plain = load("train", made, augment=NO_CHANGE)
    no_tokens = load("train", made, augment=Augment(flip=1.0, operations=("event",), event=(0.999, 0.999)))
    assert all(same(no_tokens[Key(i, 1)], plain[i]) for i in range(8))
    no_boxes = load("train", made, augment=Augment(flip=1.0, operations=("area",), area=(0.9, 0.9)))
    found = [(no_boxes[Key(i, epoch)], plain[i]) for i in range(8) for epoch in range(4)]
    assert all(new["count"] for new, _ in found)
    assert 0 < sum(same(new, old) for new, old in found) < len(found)


def test_samples_depend_on_seed_epoch_and_index_alone(made):
    found = load("train", made)
    keys = [Key(i, epoch) for epoch in (0, 5) for i in (3, 0, 7)]
    want = [found[key] for key in keys]
    assert not all(same(want[i], want[i + 3]) for i in range(3))
    for workers in (1, 2):
        loader = DataLoader(found, sampler=keys, batch_size=None, num_workers=workers)
        assert all(same(a, b) for a, b in zip(want, loader, strict=True))


# Folders


def test_broken_trees_are_explained(tree, tmp_path):
    with pytest.raises(FormatError, match="none of the folders train, val, test, expected the folder of GEN1"):
        load("train", tmp_path / "none")
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        load("dev", tree)
    with pytest.raises(FormatError, match="train: 2 clips, expected 1460; complete=False accepts this"):
        load("train", tree, complete=True)
    with pytest.raises(ValueError, match="last must be at least 1, got 0"):
        load("train", tree, last=0)
    first, second = list_clips(tree, "train", complete=False)
    (tree / "train" / f".{first}_td.dat").touch()
    (tree / "train" / f"{first}_td.dat").unlink()
    assert list_clips(tree, "train", complete=False) == [second]
    with pytest.raises(FormatError, match=f"{first}_td.dat: no such file; complete=False does without this clip"):
        list_clips(tree, "train")
    shutil.rmtree(tree / "val")
    with pytest.raises(FormatError, match="val: no such folder"):
        load("val", tree)


def test_the_folder_of_the_archive_is_found(tree):
    inner = tree.parent / "above" / gen1.ARCHIVE
    shutil.copytree(tree, inner)
    assert find_root(tree.parent / "above") == inner


def test_files_of_another_sensor_are_refused(tree):
    path = next((tree / "val").glob("*_td.dat"))
    dat.write(path, dat.read(path), width=1280, height=720)
    with pytest.raises(FormatError, match="a sensor of 1280 x 720, expected 304 x 240"):
        load("val", tree)[0]


def test_truncated_clips(tree):
    path = next((tree / "val").glob("*_td.dat"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match="truncated='keep' takes"):
        load("val", tree)[0]
    with pytest.warns(TruncatedWarning):
        assert load("val", tree, truncated="keep")[0]["length"] > 0
