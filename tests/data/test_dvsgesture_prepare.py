"""Prepared gestures are those of the recordings, are taken only while they are good, and written again where not."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from parapos.data import FormatError, dvsgesture, preparations
from parapos.data.readers import TruncatedWarning, aedat
from parapos.data.readers.gesture_lists import read_labels
from parapos.data.sampling import Key

from .event_trees import copy_of, same, small_gestures
from .event_trees import load_gestures as load

AGAIN = "run `parapos prepare dvsgesture` again"
COLUMNS = "class,startTime_usec,endTime_usec\n"


def job(root, cache=None, *, complete=False, truncated="error"):
    return preparations.Job(root, cache, complete=complete, options={"keep_truncated": truncated == "keep"})


def check(root, **options):
    return preparations.check(dvsgesture, job(root, **options))


def prepare(root, cache=None, **options):
    """(done now, done before); the first failure is raised."""
    done = preparations.prepare(dvsgesture, job(root, cache, **options))
    if done.failed:
        raise FormatError(done.failed[0])
    return done.now, done.before


def manifest(tree):
    """Lines of the manifest after the first."""
    lines = (tree / "prepared" / "manifest.jsonl").read_text().splitlines()
    return {line["name"]: line for line in map(json.loads, lines[1:])}


def change_entry(tree, name, **changes):
    path = tree / "prepared" / "manifest.jsonl"
    header, *_ = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps({**manifest(tree)[name], **changes})}\n")


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
    assert len(manifest(tree)) == 3
    assert not list(tree.glob("prepared/**/.*.part"))
    assert len(load("train", tree)) == 24  # some prepared, some not
    monkeypatch.setattr(aedat, "read", read)
    assert prepare(tree, complete=False) == (3, 3)
    assert prepare(tree, complete=False) == (0, 6)


def test_what_changed_is_prepared_again(tree):
    prepare(tree, complete=False)
    labels = tree / "user24_led_labels.csv"
    labels.write_text("".join(labels.read_text().splitlines(True)[:4]))
    with pytest.raises(FormatError, match=f"user24_led_labels.csv: changed since it was prepared; {AGAIN}"):
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
    with pytest.raises(FormatError, match=r"user24_led\.aedat: changed since it was prepared"):
        load("test", tree)


def test_the_manifest_counts_and_knows_checksums(tree):
    prepare(tree)
    entry = manifest(tree)["user24_led"]
    labels = tree / "user24_led_labels.csv"
    size, digest = (tree / "user24_led.aedat").stat().st_size, hashlib.sha256(labels.read_bytes()).hexdigest()
    assert entry["sources"] == [size, digest]
    assert entry["facts"] == {"early": False, "gestures": [list(row) for row in read_labels(labels)]}
    assert len(entry["files"]) == 12
    for name, (size, digest, shape) in entry["files"].items():
        data = (tree / "prepared" / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
        assert [len(np.load(tree / "prepared" / name))] == shape


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"early": False, "gestures": [[11, 0, 1]]},
        {"early": False, "gestures": [[]]},
        {"early": False, "gestures": [[1, 0, 1]] * 13},
        {"early": False, "gestures": [[1, 0, float("inf")]]},
        {"early": 1, "gestures": [[1, 0, 1]]},
        {"gestures": [[1, 0, 1]]},
    ],
)
def test_damaged_entries(facts, tree):
    prepare(tree)
    change_entry(tree, "user24_led", facts=facts)
    with pytest.raises(FormatError, match=f"what the manifest has of user24_led is damaged; .* and {AGAIN}"):
        load("test", tree)


def test_damaged_files_of_the_cache(tree):
    prepare(tree, complete=False)
    path = tree / "prepared" / "user24_fluorescent" / "00.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = check(tree, complete=False).problems
    assert problem == f"{path}: damaged, its SHA-256 differs; remove it and {AGAIN}"
    for damage in (data[:200], b"", np.lib.format.magic(1, 0) + data[8:40], data.replace(b"<u4", b"<i4")):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match=rf"00.npy: expected .* \(\d+,\), got .*; remove it and {AGAIN}"):
            load("test", tree)[0]
    found = load("test", tree)
    path.unlink()
    with pytest.raises(FormatError, match=rf"00.npy: not there, expected .* \(\d+,\); {AGAIN}"):
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
    assert "user24_led" not in dvsgesture.open_store(job(tree)).entries()
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
    prepare(tree)
    path = tree / "prepared" / "user24_led" / "00.npy"
    np.save(path, np.zeros(0, dvsgesture.EVENT))
    data, facts = path.read_bytes(), manifest(tree)["user24_led"]["facts"]
    files = {"user24_led/00.npy": [len(data), hashlib.sha256(data).hexdigest(), [0]]}
    change_entry(tree, "user24_led", files=files, facts={**facts, "gestures": facts["gestures"][:1]})
    (problem,) = check(tree, complete=False).problems
    assert problem.startswith(f"{path.parent}: none of the 1 gestures has an event on the sensor")
