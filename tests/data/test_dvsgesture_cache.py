"""Prepared gestures are those of the recordings, are taken only while they are good, and written again where not."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from parapos.data import FormatError, cache, dvsgesture
from parapos.data.dvsgesture import check, prepare
from parapos.data.readers import TruncatedWarning, aedat
from parapos.data.readers.gesture_lists import read_labels
from parapos.data.sampling import Key

from .event_trees import copy_of, same, small_gestures
from .event_trees import load_gestures as load

AGAIN = "run `parapos prepare dvsgesture` again"
COLUMNS = "class,startTime_usec,endTime_usec\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small_gestures(tmp_path_factory.mktemp("gestures") / "tree")


@pytest.fixture
def tree(made, tmp_path):
    return copy_of(made, tmp_path)


def test_prepared_gestures_are_the_same(tree):
    raw = {split: load(split, tree) for split in ("train", "val", "test")}
    assert prepare(tree, complete=False) == (6, 0)
    assert {sample.events is None for sample in raw["val"].samples} == {True}
    for split, old in raw.items():
        new = load(split, tree)
        assert {sample.events is None for sample in new.samples} == {False}
        assert all(same(old[Key(i, 2)], new[Key(i, 2)]) for i in range(24))


def test_the_cache_is_enough(tree):
    want = load("val", tree)[5]
    prepare(tree, tree.parent / "elsewhere", complete=False)
    for path in [*tree.glob("*.aedat"), *tree.glob("*.csv")]:
        path.unlink()
    assert same(load("val", tree, cache=tree.parent / "elsewhere")[5], want)
    with pytest.raises(FormatError, match="no gestures"):
        load("val", tree)


def test_preparing_goes_on_where_it_was(tree, monkeypatch):
    cut_short = iter(range(3))
    read = aedat.read

    def killed(path, **options):
        if next(cut_short, None) is None:
            raise KeyboardInterrupt
        return read(path, **options)

    monkeypatch.setattr(aedat, "read", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(tree, complete=False)
    assert len(json.loads((tree / "prepared" / "manifest.json").read_text())["entries"]) == 3
    assert not list(tree.glob("prepared/**/.*"))
    assert len(load("train", tree)) == 24  # some prepared, some not
    monkeypatch.setattr(aedat, "read", read)
    assert prepare(tree, complete=False) == (3, 3)
    assert prepare(tree, complete=False) == (0, 6)


def test_what_changed_is_prepared_again(tree):
    prepare(tree, complete=False)
    labels = tree / "user24_led_labels.csv"
    labels.write_text("".join(labels.read_text().splitlines(True)[:4]))
    with pytest.raises(FormatError, match="not the labels that were prepared; run `parapos prepare dvsgesture` again"):
        load("test", tree)
    (tree / "prepared" / "user04_led" / "07.npy").unlink()
    (tree / "prepared" / "user22_led" / "03.npy").write_bytes(b"short")
    assert prepare(tree, complete=False) == (3, 3)
    assert len(load("test", tree)) == 15
    assert check(tree, complete=False).problems == []


def test_another_recording_is_told(tree):
    """As after a recording that was cut short has been fetched again."""
    prepare(tree, complete=False)
    with open(tree / "user24_led.aedat", "ab") as file:
        file.write(bytes(28))
    with pytest.raises(FormatError, match=r"user24_led\.aedat: not the recording that was prepared"):
        load("test", tree)


def test_the_manifest_counts_and_knows_checksums(tree):
    prepare(tree, complete=False)
    entry = json.loads((tree / "prepared" / "manifest.json").read_text())["entries"]["user24_led"]
    assert entry["bytes"] == (tree / "user24_led.aedat").stat().st_size
    for row, (label, start, end, count, digest) in enumerate(entry["gestures"]):
        data = (tree / "prepared" / "user24_led" / f"{row:02d}.npy").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
        assert (label, start, end) == tuple(read_labels(tree / "user24_led_labels.csv")[row])
        assert len(np.load(tree / "prepared" / "user24_led" / f"{row:02d}.npy")) == count


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"kind": "gen1", "version": 1, "entries": {}}',
        '{"kind": "dvsgesture", "version": 1, "entries": {}}',
        '{"kind": "dvsgesture", "version": 2, "entries": []}',
    ],
)
def test_damaged_manifests(text, tree):
    (tree / "prepared").mkdir()
    (tree / "prepared" / "manifest.json").write_text(text)
    with pytest.raises(FormatError, match="not a manifest of dvsgesture, version 2"):
        load("test", tree)


@pytest.mark.parametrize(
    "entry",
    [
        1,
        {"bytes": 1},
        {"bytes": 1, "labels": "", "early": False, "gestures": [[11, 0, 1, 2, ""]]},
        {"bytes": 1, "labels": "", "early": False, "gestures": [[]]},
        {"bytes": 1, "labels": "", "early": False, "gestures": [[1, 0, 1, float("inf"), ""]]},
        {"bytes": 1, "labels": "", "gestures": [[1, 0, 1, 2, ""]]},
    ],
)
def test_damaged_entries(entry, tree):
    cache.write_manifest(tree / "prepared", "dvsgesture", dvsgesture.VERSION, {"user24_led": entry})
    with pytest.raises(FormatError, match="what the manifest has of user24_led is damaged"):
        load("test", tree)


def test_damaged_files_of_the_cache(tree):
    prepare(tree, complete=False)
    path = tree / "prepared" / "user24_fluorescent" / "00.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = check(tree, complete=False).problems
    assert problem == f"{path}: damaged; remove it and run `parapos prepare dvsgesture` again"
    for damage in (data[:200], b"", np.lib.format.magic(1, 0) + data[8:40], data.replace(b"<u4", b"<i4")):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match=rf"00.npy: expected \d+ rows of .*; remove it and {AGAIN}"):
            load("test", tree)[0]
    found = load("test", tree)
    path.unlink()
    with pytest.raises(FormatError, match=rf"00.npy: not there, expected \d+ rows of .*; {AGAIN}"):
        found[0]
    for field, value in (("x", 128), ("y", 200), ("polarity", 2), ("t", 2**32 - 1)):
        path.write_bytes(data)
        np.lib.format.open_memmap(path, "r+")[field][3] = value
        with pytest.raises(FormatError, match=f"00.npy: not the events of a gesture; remove it and {AGAIN}"):
            found[0]
    path.write_bytes(data)
    np.lib.format.open_memmap(path, "r+")["t"][:2] = (1, 0)
    with pytest.raises(FormatError, match=r"00\.npy: not the events of a gesture"):
        found[0]


def test_long_gestures_cannot_be_prepared(tree):
    (tree / "user24_led_labels.csv").write_text(f"{COLUMNS}1,5,{5 + 2**32}\n")
    with pytest.raises(FormatError, match=r"gesture 0 takes 4294967296 microseconds, expected less than 2\^32"):
        prepare(tree, complete=False)


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "folder" / "file"
    with cache.whole_file(path) as file:
        file.write(b"old")
        assert not path.exists()

    def fail():
        with cache.whole_file(path) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_truncated_recordings(tree):
    path = tree / "user24_led.aedat"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"user24_led\.aedat: at byte .*truncated='keep' takes"):
        load("test", tree)[12]
    with pytest.warns(TruncatedWarning, match="kept the"):
        assert load("test", tree, truncated="keep")[12]["length"] > 0
    with pytest.raises(FormatError, match="truncated='keep'"):
        prepare(tree, complete=False)
    assert "truncated='keep'" in check(tree, complete=False).problems[0]
    assert "--keep-truncated of `parapos prepare`" in check(tree, complete=False).problems[0]
    with pytest.warns(TruncatedWarning):
        assert prepare(tree, complete=False, truncated="keep") == (1, 5)


def test_what_was_kept_of_a_truncated_recording_is_not_taken_for_a_whole_one(tree):
    path = tree / "user24_led.aedat"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(TruncatedWarning):
        prepare(tree, complete=False, truncated="keep")
    assert prepare(tree, complete=False, truncated="keep") == (0, 6)
    assert load("test", tree, truncated="keep")[12]["length"] > 0
    assert len(load("val", tree)) == 24  # whose recordings are whole
    for there in (True, False):
        with pytest.raises(FormatError, match=r"user24_led: prepared from a recording that ends early.*'keep' accepts"):
            load("test", tree)
        if there:
            with pytest.raises(FormatError, match=r"user24_led\.aedat: at byte .*truncated='keep' takes"):
                prepare(tree, complete=False)
            path.unlink()


def in_milliseconds(labels):
    columns, *lines = labels.read_text().splitlines()
    rows = [[int(part) for part in line.split(",")] for line in lines]
    text = "".join(f"{label},{start // 1000},{end // 1000}\n" for label, start, end in rows)
    labels.write_text(f"{columns}\n{text}")


def test_gestures_outside_of_their_recording_are_told(tree):
    labels = tree / "user24_led_labels.csv"
    good = labels.read_text()
    in_milliseconds(labels)
    told = r"user24_led_labels\.csv: gesture 0 is from \d+ to \d+, outside of the recording, expected microseconds from"
    with pytest.raises(FormatError, match=told):
        prepare(tree, complete=False)
    with pytest.raises(FormatError, match=told):
        load("test", tree)[12]
    assert "user24_led" not in dvsgesture.load(tree / "prepared")
    labels.write_text(f"{good.rstrip()}\n1,{10**15},{10**15 + 5}\n")
    with pytest.raises(FormatError, match=r"gesture 12 is from 10{15} to 10{14}5, outside"):
        prepare(tree, complete=False)
    first = aedat.read(tree / "user24_led.aedat").t[0]
    labels.write_text(f"{COLUMNS}1,0,{first - 1}\n")
    with pytest.raises(FormatError, match="gesture 0"):
        prepare(tree, complete=False)
    labels.write_text(f"{COLUMNS}1,0,{first}\n1,{first},{10**9}\n")  # in part is enough
    assert prepare(tree, complete=False) == (1, 5)


def test_recordings_without_events_in_gestures_are_told(tree):
    events = aedat.read(tree / "user24_led.aedat")
    aedat.write(tree / "user24_led.aedat", dataclasses.replace(events, x=events.x + np.uint16(128)))
    with pytest.raises(
        FormatError, match=r"user24_led_labels\.csv: none of the 12 gestures has an event on the sensor"
    ):
        prepare(tree, complete=False)
    aedat.write(tree / "user24_led.aedat", events.select(slice(0, 0)))
    with pytest.raises(FormatError, match=r"gesture 0 .* outside of the recording, which has no events"):
        prepare(tree, complete=False)


def test_prepared_recordings_without_events_are_told(tree):
    prepare(tree, complete=False)
    entry = dvsgesture.load(tree / "prepared")["user24_led"].told()
    path = tree / "prepared" / "user24_led" / "00.npy"
    digest = cache.save_array(path, np.zeros(0, dvsgesture.EVENT))
    entry["gestures"] = [[*entry["gestures"][0][:3], 0, digest]]
    cache.write_manifest(tree / "prepared", "dvsgesture", dvsgesture.VERSION, {"user24_led": entry})
    (problem,) = check(tree, complete=False).problems
    assert problem.startswith(f"{path.parent}: none of the 1 gestures has an event on the sensor")
