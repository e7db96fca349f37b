"""Events: what they hold, what is refused, and how they are put in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapos.data.dvsgesture import Gestures
from parapos.data.event_tokens import Tokenizing, tensors
from parapos.data.events import Events, clean, concatenate
from parapos.data.gen1 import Clips

from .test_event_augment import FIELDS, H, W, make, rows


def test_events():
    events = make()
    assert len(events) == 500
    assert [getattr(events, name).dtype.name for name in FIELDS] == ["int64", "uint16", "uint16", "uint8"]
    assert rows(events.select(events.x < 9)) == [row for row in rows(events) if row[1] < 9]
    assert rows(events.select(slice(3, 5))) == rows(events)[3:5]
    assert rows(events.select(np.array([4, 1]))) == [rows(events)[4], rows(events)[1]]
    assert np.shares_memory(events.select(slice(3, 5)).t, events.t)
    assert len(Events.empty()) == len(concatenate([])) == 0
    assert rows(concatenate([events, Events.empty(), events])) == 2 * rows(events)
    assert rows(Events.of([], [], [], [])) == []
    assert rows(Events.of([-5], [65535], [0], [True])) == [(-5, 65535, 0, 1)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Events.of([0], [-1], [0], [0]), "x runs from -1 to -1, which uint16 cannot hold"),
        (lambda: Events.of([0], [0], [65536], [0]), "y runs from 65536"),
        (lambda: Events.of([0.5], [0], [0], [0]), "t is float64, expected whole numbers"),
        (lambda: Events.of([0], [0], [0], [0, 1]), "polarity has 2 entries and t has 1"),
        (lambda: Events(np.zeros(1), *3 * [np.zeros(1, np.uint16)]), "t is float64"),
        (lambda: Events([0], [0], [0], [0]), "t is list, expected a NumPy array of int64"),
        (lambda: Events.of([[0]], [0], [0], [0]), r"t is int64 \(1, 1\)"),
    ],
)
def test_events_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_clean():
    """Clamped to the start, in order of time with ties as they were, and without what lies outside."""
    found = Events.of([5, 1, -3, 5, 1, 2, 0], [1, 2, 3, 4, 5, 9, 6], [0, 0, 0, 0, 0, 0, 7], [0, 1, 0, 1, 0, 1, 0])
    assert rows(clean(found, 8, 4)) == [(0, 3, 0, 0), (1, 2, 0, 1), (1, 5, 0, 0), (5, 1, 0, 0), (5, 4, 0, 1)]
    assert [row[0] for row in rows(clean(found, 8, 4, start=2))] == [2, 2, 2, 5, 5]
    assert [row[1] for row in rows(clean(found, 8, 4, start=2))] == [2, 3, 5, 1, 4]
    tidy = make()
    assert clean(tidy, W, H) is tidy
    assert len(clean(Events.empty(), W, H)) == 0


@given(st.integers(0, 2**32))
def test_clean_is_a_stable_sort(seed):
    rng = np.random.default_rng(seed)
    found = Events.of(*rng.integers(0, 6, (3, 40)), np.arange(40))
    start = int(rng.integers(0, 4))
    want = sorted(((max(t, start), x, y, p) for t, x, y, p in rows(found) if x < 5 and y < 4), key=lambda row: row[0])
    assert rows(clean(found, 5, 4, start=start)) == want


@pytest.mark.parametrize(("clock", "times"), [("time", [0, 3, 10]), ("age", [10, 7, 0])])
def test_one_way_for_time(clock, times):
    """The earliest token is 0 on the clock that counts from the start, and the largest on the one that counts ages."""
    tokens = Tokenizing(height=8, width=8, patch=4, threshold=1, refractory_us=0)(
        Events.of([1000, 1003, 1010], [0, 4, 0], [0, 0, 4], [1, 0, 1])
    )
    sample = tensors(tokens, clock, origin=1000 if clock == "time" else 1010)
    assert (sample["t"].tolist(), sample["length"]) == (times, 3)
    with pytest.raises(ValueError, match="clock must be one of time, age, got 'clock'"):
        tensors(tokens, "clock", origin=0)


def test_data_sets_state_their_clock():
    assert (Gestures.clock, Clips.clock) == ("time", "age")
