"""Spiking Patches: the compiled and the array version against the plain one, by hand, and by what must always hold."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapos.tokenizers import Tokenizer, Tokens, tokenize
from parapos.tokenizers.spiking_patches import reference


def by_numpy(*events, **options):
    return tokenize(*events, backend="numpy", **options)


ALL = pytest.mark.parametrize("make", [tokenize, by_numpy, reference], ids=["numba", "numpy", "reference"])
# t, x, y, polarity on a sensor of 8 x 4 with patches of 4, threshold 3, refractory period 5000
BY_HAND = [
    (0, 1, 1, 1),
    (100, 5, 0, 0),
    (900, 1, 1, 1),
    (1500, 2, 3, 0),  # token of patch 0
    (2000, 0, 0, 1),  # ignored
    (6499, 0, 0, 1),  # ignored, 1 us too early
    (6500, 0, 0, 1),
    (6500, 7, 3, 1),
    (6600, 0, 0, 1),
    (9000, 4, 1, 0),  # token of patch 1
    (9100, 3, 2, 0),  # token of patch 0
    (9200, 6, 2, 1),  # ignored
    (20000, 1, 0, 0),  # left over
]
HAND = dict(width=8, height=4, patch=4, threshold=3, refractory_us=5000)


def same(a, b):
    assert (a.patch, a.buckets) == (b.patch, b.buckets)
    for name in ("t", "x", "y", "codes"):
        one, other = getattr(a, name), getattr(b, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other, err_msg=name)


def dense(tokens):
    """Counts (L, 2, buckets, patch, patch), by adding one event after the other."""
    out = np.zeros((len(tokens), 2 * tokens.buckets * tokens.patch**2), np.int64)
    np.add.at(out, (np.arange(len(tokens))[:, None], tokens.codes), 1)
    return out.reshape(-1, 2, tokens.buckets, tokens.patch, tokens.patch)


def stream(seed):
    """A random stream with its settings: ties, bursts, gaps, refractory periods of every size against its times."""
    rng = np.random.default_rng(seed)
    width, height, patch = rng.integers(1, 14), rng.integers(1, 14), rng.choice([1, 2, 3, 4, 5])
    count = int(rng.choice([0, 1, 7, 60, 400]))
    step = {
        "ties": rng.integers(0, 2, count),
        "even": rng.integers(0, 30, count),
        "bursts": np.where(rng.random(count) < 0.9, 0, rng.integers(0, 200, count)),
        "ages": np.where(rng.random(count) < 0.8, rng.integers(0, 900, count), rng.integers(0, 300_000, count)),
        "edges": rng.choice([0, 1, 499, 500, 1000, 128_000], count),
    }[rng.choice(["ties", "even", "bursts", "ages", "edges"])]
    t = np.cumsum(step) + rng.choice([0, -10_000, 10**15])
    if rng.random() < 0.3:  # one busy patch
        x, y = np.minimum(rng.integers(0, patch, count), width - 1), np.zeros(count, np.int64)
    else:
        x, y = rng.integers(0, width, count), rng.integers(0, height, count)
    refractory = int(rng.choice([0, 1, rng.integers(0, 60), 500, 1000, 128_000, 2**40]))
    options = dict(
        width=int(width),
        height=int(height),
        patch=int(patch),
        threshold=int(rng.integers(1, 9)),
        refractory_us=refractory,
    )
    return (t.astype(np.int64), x.astype(np.uint16), y.astype(np.uint16), rng.integers(0, 2, count, np.uint8)), options


def noise(count, width, height, *, duration=1_000_000, seed=0):
    rng = np.random.default_rng(seed)
    t = np.sort(rng.integers(0, duration, count))
    x, y = rng.integers(0, width, count, np.uint16), rng.integers(0, height, count, np.uint16)
    return t, x, y, rng.integers(0, 2, count, np.uint8)


@ALL
def test_by_hand(make):
    tokens = make(*np.array(BY_HAND).T, **HAND)
    assert tokens.t.tolist() == [1500, 9000, 9100]
    assert tokens.x.tolist() == [0, 1, 0]
    assert tokens.y.tolist() == [0, 0, 0]
    assert tokens.codes.tolist() == [[181, 165, 14], [65, 207, 4], [192, 192, 11]]
    assert dense(tokens)[2, 1, 2, 0, 0] == 2
    assert (tokens.patch, tokens.buckets, len(tokens)) == (4, 10, 3)
    assert [x.dtype.name for x in (tokens.t, tokens.x, tokens.y, tokens.codes)] == ["int64", "int32", "int32", "uint16"]


def test_left_over_events_wait_for_more():
    tokenizer = Tokenizer(**HAND)
    assert len(tokenizer.feed(*np.array(BY_HAND).T)) == 3
    late = tokenizer.feed([20001, 20002], [1, 1], [0, 0], [0, 0])
    assert (late.t.tolist(), late.x.tolist(), late.codes.tolist()) == ([20002], [0], [[1, 1, 1]])


def fed(tokenizer, events, cuts):
    """The tokens of a stream that comes in pieces."""
    parts = [tokenizer.feed(*fields) for fields in zip(*(np.split(x, cuts) for x in events), strict=True)]
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("t", "x", "y", "codes")]
    return Tokens(*joined, tokenizer.settings.patch)


def test_random_streams():
    """Whole and in pieces, however they are cut; a reset starts anew."""
    tokens = 0
    for seed in range(1000):
        events, options = stream(seed)
        want = reference(*events, **options)
        same(tokenize(*events, **options), want)
        same(by_numpy(*events, **options), want)
        rng, tokenizer = np.random.default_rng(seed), Tokenizer(**options)
        for _ in range(2 if seed % 10 == 0 else 1):
            same(fed(tokenizer, events, np.sort(rng.integers(0, len(events[0]) + 1, rng.integers(0, 12)))), want)
            tokenizer.reset()
        tokens += len(want)
    assert tokens > 10_000


def test_streams_of_the_true_size():
    for seed, (width, height, duration) in enumerate([(304, 240, 400_000), (128, 128, 6_000_000), (304, 240, 10)]):
        events = noise(120_000, width, height, duration=duration, seed=seed)
        want = reference(*events, width=width, height=height)
        assert len(want) > 50
        same(tokenize(*events, width=width, height=height), want)
        same(by_numpy(*events, width=width, height=height), want)


def test_event_by_event():
    events, options = stream(8)
    tokenizer = Tokenizer(**options)
    got = [tokenizer.feed(*(x[i : i + 1] for x in events)) for i in range(len(events[0]))]
    want = reference(*events, **options)
    assert len(want) > 3
    assert [x for part in got for x in part.t.tolist()] == want.t.tolist()
    assert [x for part in got for x in part.codes.tolist()] == want.codes.tolist()


@given(st.integers(0, 2**32))
def test_invariants(seed):
    (t, x, y, polarity), options = stream(seed)
    tokens = tokenize(t, x, y, polarity, **options)
    threshold, patch = options["threshold"], options["patch"]
    assert (dense(tokens).sum((1, 2, 3, 4)) == threshold).all()
    assert (np.diff(tokens.t) >= 0).all()
    assert len(tokens) <= len(t) // threshold
    assert (tokens.x < -(-options["width"] // patch)).all()
    assert (tokens.y < -(-options["height"] // patch)).all()
    for place in set(zip(tokens.x.tolist(), tokens.y.tolist(), strict=True)):
        times = tokens.t[(tokens.x == place[0]) & (tokens.y == place[1])]
        assert (np.diff(times) >= options["refractory_us"]).all()
    # the last event of a token is the newest, so it has no age
    assert (tokens.codes[:, -1] // patch**2 % tokens.buckets == 0).all()
    if options["refractory_us"] == 0:
        counts = np.bincount(x // patch + 16 * (y.astype(int) // patch), minlength=1)
        assert len(tokens) == (counts // threshold).sum()

    flipped = tokenize(t, x, y, 1 - polarity, **options)
    np.testing.assert_array_equal(dense(flipped), dense(tokens)[:, ::-1])
    later = tokenize(t + 12_345, x, y, polarity, **options)
    same(Tokens(later.t - 12_345, later.x, later.y, later.codes, later.patch), tokens)


@ALL
@pytest.mark.parametrize(
    ("age", "bucket"),
    [
        *[(0, 0), (999, 0), (1000, 1), (1999, 1), (2000, 2), (3999, 2), (4000, 3), (127_999, 7), (128_000, 8)],
        *[(255_999, 8), (256_000, 9), (10**9, 9), (2**32, 9), (2**32 + 500, 9), (2**48 + 500, 9), (2**63 - 2, 9)],
    ],
)
def test_buckets(make, age, bucket):
    start = -(2**62) + 1 if age > 2**62 else -17
    end = start + age
    tokens = make([start, end], [0, 0], [0, 0], [0, 1], width=1, height=1, patch=1, threshold=2)
    assert tokens.codes.tolist() == [[bucket, 10]]
    assert tokens.t.tolist() == [end]


@ALL
def test_one_pixel_takes_all(make):
    tokens = make(np.zeros(256, int), np.full(256, 303), np.full(256, 239), np.ones(256, int), width=304, height=240)
    counts = dense(tokens)
    assert counts.shape == (1, 2, 10, 16, 16)
    assert counts[0, 1, 0, 239 % 16, 303 % 16] == 256
    assert (tokens.x[0], tokens.y[0]) == (18, 14)


@ALL
@pytest.mark.parametrize("patch", [57, 1])
def test_codes_use_all_16_bits(make, patch):
    """The largest patch that there is: its last code is 2 * 10 * 57^2 - 1 = 64979."""
    tokens = make([0, 0], [patch - 1] * 2, [patch - 1] * 2, [1, 1], width=patch, height=patch, patch=patch, threshold=2)
    late = make([0, 300_000], [patch - 1] * 2, [patch - 1] * 2, [1, 1], width=57, height=57, patch=patch, threshold=2)
    assert tokens.codes.tolist() == [[11 * patch**2 - 1] * 2]
    assert late.codes.tolist() == [[20 * patch**2 - 1, 11 * patch**2 - 1]]


@ALL
def test_no_events(make):
    tokens = make([], [], [], [], width=304, height=240)
    assert len(tokens) == 0
    assert tokens.codes.shape == (0, 256)
    assert (tokens.t.dtype, tokens.codes.dtype) == (np.int64, np.uint16)


@ALL
def test_the_longest_refractory_period(make):
    most = 2**62 - 1
    options = dict(width=1, height=1, patch=1, threshold=1, refractory_us=most)
    assert make([0, most - 1, most], *3 * [[0] * 3], **options).t.tolist() == [0, most]
    assert make([most, most], *3 * [[0] * 2], **options).t.tolist() == [most]


def test_zero_refractory_period_counts_every_event():
    tokens = tokenize([5] * 7, [0] * 7, [0] * 7, [0] * 7, width=1, height=1, patch=1, threshold=2, refractory_us=0)
    assert tokens.t.tolist() == [5, 5, 5]


@ALL
@pytest.mark.parametrize("kind", ["int8", "int16", "uint32", "int64", "uint64", "bool", "list", "strided", "readonly"])
def test_every_kind_of_whole_numbers(make, kind):
    rng = np.random.default_rng(3)
    t = np.sort(rng.integers(0, 100, 200))
    x, y, polarity = rng.integers(0, 8, 200), rng.integers(0, 4, 200), rng.integers(0, 2, 200)
    events = [t, x, y, polarity]
    options = {**HAND, "refractory_us": 20}
    want = reference(*events, **options)
    assert len(want) > 3
    if kind == "list":
        events = [value.tolist() for value in events]
    elif kind == "strided":
        events = [np.repeat(value, 2)[::2] for value in events]
    elif kind == "readonly":
        events = [t, x.astype(np.uint16), y.astype(np.uint16), polarity.astype(np.uint8)]
        for value in events:
            value.flags.writeable = False
    elif kind == "bool":
        events = [t, x, y, polarity.astype(bool)]
    else:
        events = [value.astype(kind) for value in events]
    same(make(*events, **options), want)


@ALL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=[0, 8, 0]), "x must be from 0 to 7, got 8 at index 1"),
        (dict(x=[0, -1, 0]), "x must be from 0 to 7, got -1 at index 1"),
        (dict(x=[0, 65536, 0]), "x must be from 0 to 7, got 65536 at index 1"),
        (dict(y=np.array([0, 4, 0], np.uint16)), "y must be from 0 to 3, got 4 at index 1"),
        (dict(polarity=[0, 1, 2]), "polarity must be from 0 to 1, got 2 at index 2"),
        (dict(polarity=[0, -1, 1]), "polarity must be from 0 to 1, got -1 at index 1"),
        (dict(polarity=[0, 1]), "polarity has 2 entries and t has 3"),
        (dict(t=[0, 2, 1]), "t must not decrease, got 1 at index 2 after 2"),
        (dict(t=[0, 1, 2**62]), f"t must be from -{2**62 - 1} to {2**62 - 1}, got {2**62} at index 2"),
        (dict(t=[-(2**62), 1, 2]), f"t must be from -{2**62 - 1} to {2**62 - 1}, got -{2**62} at index 0"),
        (dict(t=np.array([0, 1, 2**63 + 1], np.uint64)), "t must be from"),
        (
            dict(t=np.array([0, 2**63 + 1, 2], np.uint64)),
            f"t must not decrease, got 2 at index 2 after {2**63 + 1}; sort the events",
        ),
        (dict(t=[0.0, 1.0, 2.0]), "t must be of whole numbers, got float64"),
        (dict(x=["a", "b", "c"]), "x must be of whole numbers"),
        (dict(y=[[0], [1], [2]]), r"y must have one dimension, got shape \(3, 1\)"),
        (dict(t=3), r"t must have one dimension, got shape \(\)"),
        (dict(width=0), "width must be from 1 to 65536, got 0"),
        (dict(height=-1), "height must be from 1"),
        (dict(width=2**16 + 1), "width must be from 1 to 65536, got 65537"),
        (dict(patch=58), "patch must be from 1 to 57, got 58"),
        (dict(threshold=0), "threshold must be from 1"),
        (dict(threshold=True), "threshold must be a whole number, got True"),
        (dict(patch=np.True_), "patch must be a whole number, got .*True"),
        (dict(threshold=2**28 // 2 + 1), "threshold 134217729 x 2 patches, expected at most 268435456 in all"),
        (dict(width=2**16, height=2**16, patch=1, threshold=1), "threshold 1 x 4294967296 patches, expected at most"),
        (dict(refractory_us=-1), "refractory_us must be from 0"),
        (dict(refractory_us=2.5), "refractory_us must be a whole number, got 2.5"),
    ],
)
def test_errors(make, change, message):
    options = {**HAND, "t": [0, 1, 2], "x": [0, 1, 2], "y": [0, 1, 2], "polarity": [0, 1, 0], **change}
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be 'numba' or 'numpy', got 'rust'"):
        tokenize([], [], [], [], width=1, height=1, backend="rust")


def test_refused_input_leaves_the_stream_as_it_was():
    events = np.array(BY_HAND).T
    tokenizer = Tokenizer(**HAND)
    tokenizer.feed(*events[:, :9])
    bad = events[:, 9:].copy()
    for field, value in ((0, 0), (1, 8), (2, 4), (3, 2)):
        broken = bad.copy()
        broken[field, -1] = value
        with pytest.raises(ValueError, match="must"):
            tokenizer.feed(*broken)
    with pytest.raises(ValueError, match="t must not decrease, got 6599 after 6600 of the events fed before"):
        tokenizer.feed([6599], [0], [0], [0])
    assert tokenizer.feed([], [], [], []).t.tolist() == []
    tokens = tokenizer.feed(*bad)
    assert tokens.codes.tolist() == [[65, 207, 4], [192, 192, 11]]
    tokenizer.reset()
    assert len(tokenizer.feed([0], [0], [0], [0])) == 0  # time may start again


def test_tokens_do_not_change_with_later_events():
    tokenizer = Tokenizer(**HAND)
    events = np.array(BY_HAND).T
    first = tokenizer.feed(*events[:, :4])
    tokenizer.feed(*events[:, 4:])
    assert first.codes.tolist() == [[181, 165, 14]]


def test_import_needs_no_numba_and_says_what_brings_it():
    code = """
import sys
import parapos, parapos.data, parapos.data.events, parapos.data.augment.events, parapos.tokenizers
assert "numba" not in sys.modules
sys.modules["numba"] = None
from parapos.tokenizers import Tokenizer, tokenize
assert len(tokenize([1], [0], [0], [1], width=1, height=1, threshold=1, backend="numpy")) == 1
for call in (lambda: tokenize([], [], [], [], width=1, height=1), lambda: Tokenizer(width=1, height=1)):
    try:
        call()
    except ModuleNotFoundError as error:
        assert "needs numba" in str(error) and "pip install 'parapos[events]'" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiles_where_nothing_can_be_kept(monkeypatch):
    import numba
    from numba.core import caching

    from parapos.tokenizers import spiking_patches_numba

    def double(n):
        return 2 * n

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(double)
    assert spiking_patches_numba._compiled(numba.int64)(double)(21) == 42


def test_codes_are_the_counts():
    """One patch that never rests: its k-th token counts the k-th `threshold` events."""
    t, x, y, polarity = noise(5000, 16, 16, duration=3_000_000)
    tokens = tokenize(t, x, y, polarity, width=16, height=16, threshold=50, refractory_us=0)
    assert len(tokens) == 100
    want = np.zeros((100, 2, 10, 16, 16), int)
    for i in range(5000):
        k = i // 50
        age = (t[50 * k + 49] - t[i]) / 1000
        bucket = sum(age >= edge for edge in (1, 2, 4, 8, 16, 32, 64, 128, 256))
        want[k, polarity[i], bucket, y[i], x[i]] += 1
    np.testing.assert_array_equal(dense(tokens), want)


@pytest.mark.parametrize("kind", ["uniform", "clustered"])
def test_throughput(kind):
    """Twenty times the plain loop, which takes about a million events per second. What it takes here is printed.

    How fast that is on a machine is for `parapos bench tokenizer` to say: a test that shares its cores cannot."""
    from parapos.bench.measure import timed
    from parapos.bench.tokenizer import NUMBA, PYTHON, Stream, calls

    found = calls(Stream(kind, "GEN1", 500_000))
    rates = {}
    for name in (NUMBA, PYTHON):
        call, count = found[name]
        call()
        rates[name] = count / min(timed(call, "cpu") for _ in range(10 if name == NUMBA else 3))
        print(f"{kind}, {name}: {rates[name] / 1e6:.2f} million events per second")
    assert rates[NUMBA] > 20 * rates[PYTHON]
