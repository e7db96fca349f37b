"""Augmentations of events: each operation against its definition event by event, and what is drawn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos.data.augment import events as aug
from parapos.data.augment.events import DVSGESTURE, GEN1, MIRRORED, Change, EventAugment, apply, augment, cutmix, draw
from parapos.data.events import Events, clean
from parapos.data.sampling import Key, sample_seed

W, H = 128, 96
FIELDS = ("t", "x", "y", "polarity")


def make(count=500, *, width=W, height=H, seed=0, duration=10_000):
    rng = np.random.default_rng(seed)
    t = np.sort(rng.integers(0, duration, count))
    return Events.of(t, rng.integers(0, width, count), rng.integers(0, height, count), rng.integers(0, 2, count))


def rows(events):
    return list(zip(*(getattr(events, name).tolist() for name in FIELDS), strict=True))


def run(operation, *values, events=None, boxes=None, flip=False, width=W, height=H):
    found = make() if events is None else events
    return apply(Change(flip, operation, values), found, width, height, np.random.default_rng(1), boxes)


def boxes(*corners):
    return np.array([[*corner, i] for i, corner in enumerate(corners)], np.float64).reshape(-1, 5)


# what each operation does


def test_flip():
    events, _ = run("identity", flip=True)
    assert rows(events) == [(t, W - 1 - x, y, p) for t, x, y, p in rows(make())]
    again, _ = run("identity", flip=True, events=events)
    assert rows(again) == rows(make())
    found = boxes((10, 20, 30, 40), (0, 0, 128, 96))
    _, flipped = run("identity", flip=True, boxes=found)
    assert flipped.tolist() == [[88, 20, 30, 40, 0], [0, 0, 128, 96, 1]]
    assert run("identity", flip=True, boxes=flipped)[1].tolist() == found.tolist()
    assert found[0, 0] == 10  # the input is left alone


def test_label_in_the_mirror():
    assert sorted(MIRRORED) == list(range(11))
    assert [MIRRORED[MIRRORED[label]] for label in range(11)] == list(range(11))
    assert [(a, b) for a, b in enumerate(MIRRORED) if a < b] == [(1, 2), (3, 6), (4, 5)]


@pytest.mark.parametrize(
    ("values", "inside"),
    [  # first and last column, first and last row; int() rounds towards zero
        ((0.1, 64, 48), (57, 70, 43, 53)),  # 13 x 10 pixels
        ((0.3, 0, 0), (0, 19, 0, 14)),  # 39 x 29
        ((0.3, 127, 95), (107, 128, 80, 96)),
        ((0.0, 5, 6), (5, 5, 6, 6)),
    ],
)
def test_drop_area(values, inside):
    left, right, top, bottom = inside
    all_pixels = Events.of(np.arange(W * H), np.tile(np.arange(W), H), np.repeat(np.arange(H), W), np.zeros(W * H, int))
    events, _ = run("area", *values, events=all_pixels)
    assert rows(events) == [
        row for row in rows(all_pixels) if not (left <= row[1] <= right and top <= row[2] <= bottom)
    ]
    assert len(events) < len(all_pixels)


def test_drop_area_removes_the_boxes_it_touches():
    # columns 57 to 70, rows 43 to 53
    found = boxes((0, 0, 56, 96), (0, 0, 57, 96), (71, 0, 10, 96), (70, 0, 10, 96), (60, 0, 5, 42), (60, 53, 5, 9))
    _, kept = run("area", 0.1, 64, 48, boxes=found)
    assert kept[:, 4].tolist() == [0, 2, 4]


def test_drop_time():
    events = Events.of([100, 149, 150, 151, 174, 175, 176, 200], *np.zeros((3, 8), int))
    assert run("time", 0.5, 0.25, events=events)[0].t.tolist() == [100, 149, 176, 200]  # 150 to 175, both gone
    assert run("time", 0.505, 0.245, events=events)[0].t.tolist() == [100, 149, 176, 200]  # floor to 150, ceil to 175
    assert run("time", 0.5, 0.7, events=events)[0].t.tolist() == [100, 149]  # past the end


def test_drop_event():
    events, _ = run("event", 0.3, events=make(20_000))
    assert abs(len(events) / 20_000 - 0.7) < 0.02
    want = np.random.default_rng(1).random(20_000) > 0.3
    assert rows(events) == rows(make(20_000).select(want))


@pytest.mark.parametrize(("operation", "values"), [("area", (1.0, 64, 48)), ("time", (0.0, 1.0)), ("event", (1.0,))])
def test_dropping_everything_drops_nothing(operation, values):
    found = boxes((10, 10, 30, 30))
    events, kept = run(operation, *values, boxes=found)
    assert rows(events) == rows(make())
    assert kept.tolist() == found.tolist()


@pytest.mark.parametrize("slope", [0.0, 0.3, -0.3, 0.123])
def test_shear(slope):
    events, _ = run("shear", slope)
    want = [(t, math.floor(x + slope * y), y, p) for t, x, y, p in rows(make())]
    assert rows(events) == [row for row in want if 0 <= row[1] < W]
    assert (len(events) == 500) == (slope == 0)


@pytest.mark.parametrize(("dx", "dy"), [(0, 0), (5, -5), (-3, 2)])
def test_roll_is_a_bijection(dx, dy):
    events, _ = run("roll", dx, dy)
    assert rows(events) == [(t, (x + dx) % W, (y + dy) % H, p) for t, x, y, p in rows(make())]
    assert rows(run("roll", -dx, -dy, events=events)[0]) == rows(make())


@pytest.mark.parametrize("degrees", [0.0, 30.0, -20.0, 90.0, 180.0])
@pytest.mark.parametrize(("width", "height"), [(W, H), (7, 5)])
def test_rotation(degrees, width, height):
    found = make(width=width, height=height)
    events, _ = run("rotation", degrees, events=found, width=width, height=height)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    want = []
    for t, x, y, p in rows(found):
        u, v = x - width / 2, y - height / 2
        x, y = math.floor(width / 2 + u * cos - v * sin), math.floor(height / 2 + u * sin + v * cos)
        if 0 <= x < width and 0 <= y < height:
            want.append((t, x, y, p))
    assert rows(events) == want
    assert (rows(events) == rows(found)) == (degrees == 0)


def test_rotation_of_boxes():
    found = boxes((54, 38, 20, 20), (0, 38, 20, 20), (0, 0, 128, 96))
    _, turned = run("rotation", 90.0, boxes=found)
    # about (64, 48): the first is centred there and stays, the others leave a frame that is wider than high
    np.testing.assert_allclose(turned, found[:1], atol=1e-12)
    _, turned = run("rotation", 45.0, boxes=found)
    np.testing.assert_allclose(turned[0], [64 - 200**0.5, 48 - 200**0.5, 800**0.5, 800**0.5, 0])
    inside = boxes((0, 0, 127, 95), (0, 5, 20, 20), (107, 75, 20, 20))  # as they are cut to the frame
    assert run("rotation", 0.0, boxes=inside)[1].tolist() == inside.tolist()
    _, moved = run("rotation", -90.0, boxes=boxes((64, 48, 30, 10)))
    np.testing.assert_allclose(moved, [[64, 18, 10, 30, 0]], atol=1e-12)


def test_turned_boxes_that_touch_the_right_or_lower_end_go():
    """As in the released code, which keeps left and top edges at 0. A flip maps x = 0 to W."""
    found = boxes((100, 40, 27, 10), (100, 40, 27.5, 10), (100, 40, 28, 10), (0, 40, 9, 10), (0.5, 40, 9, 10))
    _, kept = run("rotation", 0.0, boxes=found)
    assert kept[:, 4].tolist() == [0, 1, 3, 4]
    _, kept = run("rotation", 0.0, boxes=found, flip=True)
    assert kept[:, 4].tolist() == [0, 1, 2, 4]
    low = boxes((10, 70, 10, 25.5), (10, 70, 10, 26))
    assert run("rotation", 0.0, boxes=low)[1][:, 4].tolist() == [0]


def test_operations_without_boxes():
    for operation, values in (("shear", (0.1,)), ("roll", (1, 1))):
        with pytest.raises(ValueError, match=f"operation {operation} is for events without boxes, got 1 boxes"):
            run(operation, *values, boxes=boxes((1, 1, 2, 2)))


def test_wrong_input():
    with pytest.raises(ValueError, match=r"x and y go up to .* expected less than 50, 96; clean them first"):
        run("identity", width=50)
    with pytest.raises(ValueError, match="unknown change"):
        run("rotation")
    for wrong in (np.zeros(4), np.zeros((1, 3)), np.zeros((1, 4), int)):
        with pytest.raises(ValueError, match=r"boxes must be floats \(M, 4 or more\)"):
            run("identity", boxes=wrong)


@given(st.integers(0, 2**32))
def test_whatever_is_drawn_events_stay_in_order_and_in_the_frame(seed):
    rng = np.random.default_rng(seed)
    width, height = (int(size) for size in rng.integers(1, 40, 2))
    wild = EventAugment(area=(0, 1), time=(0, 1), event=(0, 1), shear=100.0, roll=65535, rotation=180.0)
    events = make(int(rng.integers(0, 50)), width=width, height=height, seed=seed)
    found = augment(events, rng, width=width, height=height, settings=wild).events
    assert len(found) <= len(events)
    assert (found.x < width).all()
    assert (found.y < height).all()
    assert (np.diff(found.t) >= 0).all()
    assert [getattr(found, name).dtype for name in FIELDS] == [getattr(events, name).dtype for name in FIELDS]


@given(st.integers(0, 2**32))
def test_boxes_stay_in_the_frame(seed):
    rng = np.random.default_rng(seed)
    left, top = rng.uniform(0, W - 20, 30), rng.uniform(0, H - 20, 30)
    found = np.stack([left, top, rng.uniform(0, W - 1 - left), rng.uniform(0, H - 1 - top), np.arange(30)], axis=1)
    settings = EventAugment(operations=GEN1.operations, rotation=180.0)
    changed = augment(make(), rng, width=W, height=H, settings=settings, boxes=found)
    kept = changed.boxes
    assert (kept[:, :2] >= -1e-9).all()
    assert (kept[:, :2] + kept[:, 2:4] <= np.array([W, H]) + 1e-9).all()
    assert (kept[:, 2:4] >= 0).all()
    assert np.isin(kept[:, 4], found[:, 4]).all()


# what is drawn


def test_draws():
    """Ten thousand draws: every value in its range and spread over it, operations and flip as likely as said."""
    for settings, operations, degrees in ((DVSGESTURE, 7, 30), (GEN1, 5, 20)):
        rng = np.random.default_rng(0)
        drawn = [draw(settings, 304, 240, rng) for _ in range(10_000)]
        found = {name: np.array([x.values for x in drawn if x.operation == name]) for name in settings.operations}
        counts = np.array([len(x) for x in found.values()])
        assert len(counts) == operations
        expected = 10_000 / operations
        assert ((counts - expected) ** 2 / expected).sum() < 22.5  # chi square, 6 degrees of freedom, p = 0.001
        assert abs(sum(x.flip for x in drawn) - 5000) < 3.3 * 50  # p = 0.001
        ranges = {
            "area": [(0.05, 0.3), (0, 303), (0, 239)],
            "time": [(0, 1), (0.1, 0.75)],
            "event": [(0.1, 0.75)],
            "shear": [(-0.3, 0.3)],
            "roll": [(-5, 5), (-5, 5)],
            "rotation": [(-degrees, degrees)],
        }
        assert found["identity"].size == 0
        for name in settings.operations[1:]:
            assert found[name].shape[1] == len(ranges[name])
            for values, (low, high) in zip(found[name].T, ranges[name], strict=True):
                assert low <= values.min() < low + 0.01 * (high - low)
                assert high - 0.01 * (high - low) < values.max() <= high
                assert abs(values.mean() - (low + high) / 2) < 0.05 * (high - low)
    rolls = np.array([x.values for x in (draw(EventAugment(operations=("roll",)), 9, 9, rng) for _ in range(2000))])
    assert len(np.unique(rolls, axis=0)) == 121


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (dict(flip=1.5), "flip must be from 0 to 1, got 1.5"),
        (dict(operations=()), "operations must be some of identity"),
        (dict(operations=("zoom",)), r"operations must be some of .*, got \('zoom',\)"),
        (dict(area=(0.3, 0.1)), r"area must be two numbers from 0 to 1, the smaller first, got \(0.3, 0.1\)"),
        (dict(time=(0.1, 1.1)), "time must be two numbers"),
        (dict(event=(0.1,)), "event must be two numbers"),
        (dict(shear=-0.1), "shear must be from 0 to 100"),
        (dict(roll=-1), "roll must be from 0"),
        (dict(rotation=float("nan")), "rotation must be from 0 to 180"),
    ],
)
def test_settings_are_checked(option, message):
    with pytest.raises(ValueError, match=message):
        EventAugment(**option)


def test_flip_may_be_certain_or_impossible():
    rng = np.random.default_rng(0)
    assert not any(draw(EventAugment(flip=0.0), W, H, rng).flip for _ in range(100))
    assert all(draw(EventAugment(flip=1.0), W, H, rng).flip for _ in range(100))


# falling back


def tokens_of(least):
    return lambda events: range(max(0, len(events) - least))


def test_a_sample_without_tokens_stays_as_it_was():
    events = make()
    settings = EventAugment(flip=1.0, operations=("event",), event=(0.7, 0.75))
    options = dict(width=W, height=H, settings=settings)
    tokens, found = aug.tokenize_augmented(events, np.random.default_rng(0), tokens_of(0), **options)
    assert (found.change.flip, found.change.operation) == (True, "event")
    assert len(tokens) == len(found.events) < 200
    tokens, found = aug.tokenize_augmented(events, np.random.default_rng(0), tokens_of(400), **options)
    assert found.change == Change(False, "identity")  # so the label stays as well
    assert found.events is events
    assert len(tokens) == 100
    counted = dict(count=lambda sample: sample["length"], **options)
    sample, found = aug.tokenize_augmented(
        events, np.random.default_rng(0), lambda x: {"length": max(0, len(x) - 400)}, **counted
    )
    assert (sample["length"], found.events) == (100, events)
    tokens, found = aug.tokenize_augmented(Events.empty(), np.random.default_rng(0), tokens_of(0), **options)
    assert len(tokens) == len(found.events) == 0


def test_a_sample_that_lost_its_boxes_stays_as_it_was():
    events, found = make(), boxes((0, 0, 128, 96))
    settings = EventAugment(flip=1.0, operations=("rotation",), rotation=20.0)
    options = dict(width=W, height=H, settings=settings)
    _, whole = aug.tokenize_augmented(events, np.random.default_rng(0), tokens_of(0), boxes=found, **options)
    assert whole.change == Change(False, "identity")
    assert whole.boxes is found
    none = boxes()
    _, turned = aug.tokenize_augmented(events, np.random.default_rng(0), tokens_of(0), boxes=none, **options)
    assert turned.change.operation == "rotation"
    small = boxes((60, 40, 8, 8), (0, 0, 128, 96))
    _, turned = aug.tokenize_augmented(events, np.random.default_rng(0), tokens_of(0), boxes=small, **options)
    assert turned.boxes[:, 4].tolist() == [0]


# CutMix


def pixels(width, height, polarity):
    """One event on every pixel, in an order of its own."""
    t = np.random.default_rng(polarity).permutation(width * height)
    y, x = np.divmod(np.arange(width * height), width)
    return clean(Events.of(t, x, y, np.full(width * height, polarity)), width, height)


def test_cutmix():
    width, height = 24, 17
    spans = set()
    for seed in range(300):
        mixed, share = cutmix(
            pixels(width, height, 0), pixels(width, height, 1), np.random.default_rng(seed), width=width, height=height
        )
        own, other = mixed.select(mixed.polarity == 0), mixed.select(mixed.polarity == 1)
        assert (np.diff(mixed.t) >= 0).all()
        assert share == len(own) / (width * height)
        places = sorted((row[1], row[2]) for row in rows(mixed))
        assert places == [(x, y) for x in range(width) for y in range(height)]  # what one gives the other leaves out
        if not len(other):
            continue
        span = [int(axis.max()) - int(axis.min()) + 1 for axis in (other.x, other.y)]
        assert len(other) == span[0] * span[1]  # a full rectangle
        side = math.sqrt(1 - np.random.default_rng(seed).random())
        for found, size in zip(span, (width, height), strict=True):
            length = math.floor(size * side)
            assert length <= found <= length + 1  # both ends belong to it
        spans.add(tuple(span))
    assert len(spans) > 20


def test_cutmix_of_one_pixel_and_of_nothing():
    for width, height in ((1, 1), (3, 2)):
        events = make(20, width=width, height=height)
        for seed in range(50):
            mixed, share = cutmix(events, Events.empty(), np.random.default_rng(seed), width=width, height=height)
            assert share == 1
            assert len(mixed)
    assert cutmix(Events.empty(), Events.empty(), np.random.default_rng(0), width=4, height=4)[1] == 1
    ties = Events.of([5, 5], [0, 3], [0, 3], [0, 0])
    mixed, _ = cutmix(
        ties, Events.of([5] * 16, *np.divmod(np.arange(16), 4), [1] * 16), np.random.default_rng(3), width=4, height=4
    )
    assert mixed.polarity.tolist() == sorted(mixed.polarity.tolist())  # at equal times the sample comes first


# one sample, whoever makes it


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, key):
        rng = np.random.default_rng(sample_seed(7, key.epoch, key.index))
        found = augment(make(seed=key.index), rng, width=W, height=H)
        return [(found.change.flip, found.change.operation, found.change.values), rows(found.events)]


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    keys = [Key(index, epoch) for epoch in (0, 1) for index in range(8)]
    got = []
    for workers in (0, 1, 2):
        loader = torch.utils.data.DataLoader(Samples(), sampler=keys, batch_size=None, num_workers=workers)
        got.append(list(loader))
    assert got[0] == got[1] == got[2]
    assert [x[0] for x in got[0][:8]] != [x[0] for x in got[0][8:]]
