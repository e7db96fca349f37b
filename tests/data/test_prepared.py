"""The store of prepared files: whole or absent, resumed after a kill, checked, and refused where not as expected."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.prepared import Check, Entry, Item, Output, StaleError, Store, map_array, whole_file

from .readers.fuzz import mutations, overwrite

AGAIN = "run `parapos prepare x` again"
HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': ('<u2', 'fortran_order': False, 'shape': (3,), }".ljust(128)


def rows(path, dtype, count):
    return map_array(
        path, f"{count} rows of {np.dtype(dtype)}", lambda x: (x.dtype, x.shape) == (dtype, (count,)), AGAIN
    )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", HEADER, b"\x93NUMPY\x01\x00", b"\x80\x04N."])
def test_what_is_no_array_is_told(content, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.npy: expected 3 rows of uint16"):
        rows(path, "<u2", 3)


def test_another_array_is_told(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(4, "<u2"))
    assert rows(path, "<u2", 4).tolist() == [0] * 4
    for dtype, count in (("<u2", 3), ("<u4", 4)):
        with pytest.raises(FormatError, match=rf"got uint16 \(4,\); remove it and {AGAIN}"):
            rows(path, dtype, count)
    for missing in (tmp_path / "y.npy", path / "z.npy"):
        with pytest.raises(FormatError, match=rf"{missing.name}: not there, expected 1 rows of uint16; {AGAIN}"):
            rows(missing, "<u2", 1)


def double(item, *, factor=2, bad=(), slow=0.0):
    """Two files of a source with a number in it: its double as an array, and the text again."""
    text = item.sized[0].read_text()
    if item.name in bad:
        raise FormatError(f"{item.sized[0]}: bad number")
    if item.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(slow)
    files = [(f"{item.name}/a.npy", np.full(3, factor * int(text), "<i4")), (f"{item.name}/b.txt", text.encode())]
    return Output(iter(files), facts={"number": int(text)}, note="odd" if int(text) % 2 else "")


def items_of(root, names="abcde"):
    items = []
    for i, name in enumerate(names):
        path, labels = root / f"{name}.txt", root / f"{name}.csv"
        if not path.exists():
            path.write_text(str(10 + i))
            labels.write_text("x")
        items.append(Item(name, sized=(path,), hashed=(labels,)))
    return items


def store_of(root, **options):
    return Store(root, None, "numbers", **{"version": 1, "items": "numbers", **options})


def names(store):
    return list(store.entries())


@pytest.mark.parametrize("workers", [1, 2])
def test_files_and_facts_are_those_of_the_items(workers, tmp_path):
    """A bad one does not stop the others, and the next run makes up for it."""
    store, items, shown = store_of(tmp_path), items_of(tmp_path), []

    def progress(numbers, name):
        shown.append((len(numbers), name))
        return numbers

    make = partial(double, bad=("c",))
    done = store.prepare(items, make, workers=workers, progress=progress)
    assert (done.now, done.before, sorted(done.notes)) == (4, 0, ["b: odd", "d: odd"])
    assert done.failed == [f"{tmp_path / 'c.txt'}: bad number"]
    assert shown == [(5, "numbers")]
    assert sorted(store.entries()) == list("abde")
    assert store.prepare(items, double).now == 1
    entries = store.entries()
    assert sorted(entries) == list("abcde")
    for i, item in enumerate(items):
        assert store.array(f"{item.name}/a.npy", np.dtype("<i4"), (3,)).tolist() == [2 * (10 + i)] * 3
        assert (store.folder / item.name / "b.txt").read_text() == str(10 + i)
        assert entries[item.name].facts == {"number": 10 + i}
        assert store.is_current(item, entries[item.name])
    again = store.prepare(items, double)
    assert (again.now, again.before) == (0, 5)
    assert not list(store.folder.rglob("*.part"))


def test_a_worker_that_dies_is_one_error(tmp_path):
    store = store_of(tmp_path)
    with pytest.raises(ChildProcessError, match=r"a worker process was killed, .*use fewer --workers"):
        store.prepare(items_of(tmp_path, ["dies"]), double, workers=2)
    assert names(store) == []


def test_memory_is_bounded(tmp_path):
    """No more than two items per process are handed out before the first is done, and files are made one by one."""
    alive = []

    def make(item):
        def files():
            for i in range(4):
                alive.append(1)
                yield f"{item.name}{i}.npy", np.zeros(1, "<i4")
                alive.pop()
                assert len(alive) == 0

        return Output(files())

    assert store_of(tmp_path).prepare(items_of(tmp_path), make).now == 5


SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from tests.data.test_prepared import double, items_of, store_of
root = Path(sys.argv[1])
store_of(root).prepare(items_of(root), partial(double, slow=0.3), workers=int(sys.argv[2]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_it_resumes(workers, tmp_path):
    items_of(tmp_path)
    store = store_of(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), str(workers)], start_new_session=True)
    manifest = store.folder / "manifest.jsonl"
    deadline = time.monotonic() + 60
    while not (manifest.exists() and manifest.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = names(store)
    assert 2 <= len(before) < 5
    (store.folder / "e").mkdir(exist_ok=True)
    (store.folder / "e" / ".a.npy.1.part").write_bytes(b"half")
    with open(manifest, "ab") as file:
        file.write(b'{"name": "e", "sou')  # as if killed within a line
    assert names(store) == before
    done = store.prepare(items_of(tmp_path), double)
    assert (done.now, done.before) == (5 - len(before), len(before))
    assert sorted(names(store)) == list("abcde")
    assert not list(store.folder.rglob("*.part"))
    result = Check()
    store.check(items_of(tmp_path), result)
    assert result.problems == []


def test_one_at_a_time(tmp_path):
    store = store_of(tmp_path)
    store.prepare(items_of(tmp_path), double)
    with open(store.folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FormatError, match="another `parapos prepare` is writing here; wait for it"):
            store.prepare(items_of(tmp_path), double)
    assert store.prepare(items_of(tmp_path), double).before == 5


def test_what_changed_is_made_again(tmp_path):
    store, items = store_of(tmp_path), items_of(tmp_path)
    store.prepare(items, double)
    (tmp_path / "a.txt").write_text("100")  # another size
    (tmp_path / "b.csv").write_text("y")  # other content of the same size
    (store.folder / "c" / "a.npy").unlink()
    with open(store.folder / "d" / "b.txt", "a") as file:
        file.write("x")
    (tmp_path / "e.txt").write_text("15")  # the same size: not seen, as promised
    entries = store.entries()
    assert [store.is_current(item, entries[item.name]) for item in items] == [False] * 4 + [True]
    changed = [store.changed(item, entries[item.name]) for item in items]
    assert changed == [tmp_path / "a.txt", tmp_path / "b.csv", None, None, None]
    result = Check()
    store.check(items, result)
    again = "run `parapos prepare numbers` again"
    assert result.rows == [("prepared numbers", "1", ""), ("  prepared files missing, cut or damaged", "2", "0")]
    assert result.problems == [
        f"{store.folder / 'c' / 'a.npy'}: not there; {again}",
        f"{store.folder / 'd' / 'b.txt'}: 3 bytes, expected 2 as in the manifest; {again}",
        f"{tmp_path / 'a.txt'}: changed since it was prepared; {again}",
        f"{tmp_path / 'b.csv'}: changed since it was prepared; {again}",
    ]
    quick = Check()
    store.check(items, quick, quick=True)
    assert (quick.rows, quick.problems) == ([("prepared numbers", "1", "")], [])
    assert store.prepare(items, double).now == 4
    assert store.array("a/a.npy", np.dtype("<i4"), (3,)).tolist() == [200] * 3
    assert store.prepare(items, double, redo=lambda entry: entry.facts["number"] == 100).now == 1
    (tmp_path / "a.txt").unlink()
    assert not store.is_current(items[0], store.entries()["a"])
    assert store.changed(items[0], store.entries()["a"]) is None


def test_files_that_an_item_no_longer_has_are_removed(tmp_path):
    store, items = store_of(tmp_path), items_of(tmp_path, "a")
    store.prepare(items, double)
    store.prepare(items, lambda item: Output([("a/b.txt", b"7")]), redo=lambda entry: True)
    assert sorted(path.name for path in (store.folder / "a").iterdir()) == ["b.txt"]


def test_other_settings_and_versions_are_refused_and_made_again(tmp_path):
    store_of(tmp_path, factor=2).prepare(items_of(tmp_path), double)
    for other in (store_of(tmp_path, factor=3), store_of(tmp_path, version=2, factor=2)):
        with pytest.raises(StaleError, match=r"manifest\.jsonl: prepared with version .*; run `parapos prepare"):
            other.entries()
        result = Check()
        assert other.check(items_of(tmp_path), result) == {}
        assert len(result.problems) == 1
    other = store_of(tmp_path, factor=3)
    assert other.again == "run `parapos prepare numbers --factor 3` again"
    assert other.prepare(items_of(tmp_path), partial(double, factor=3)).now == 5
    assert other.array("a/a.npy", np.dtype("<i4"), (3,)).tolist() == [30] * 3
    with pytest.raises(FormatError, match="files prepared for 'numbers', expected 'letters'; choose another folder"):
        Store(tmp_path, None, "letters", 1, "letters").prepare([], double)


def test_stores_of_earlier_versions_are_refused_and_made_again(tmp_path):
    store = store_of(tmp_path)
    store.folder.mkdir()
    (store.folder / "manifest.json").write_text('{"kind": "numbers", "version": 1, "entries": {}}')
    told = r"manifest\.json: written by an earlier version of parapos.*; run `parapos prepare numbers` again"
    with pytest.raises(StaleError, match=told):
        store.entries()
    assert store.prepare(items_of(tmp_path), double).now == 5
    assert not (store.folder / "manifest.json").exists()
    assert len(store.entries()) == 5


def test_damaged_manifests_are_told(tmp_path):
    store = store_of(tmp_path)
    store.prepare(items_of(tmp_path), double)
    path = store.folder / "manifest.jsonl"
    good = path.read_text()
    for line, text in (
        (1, "{\n"),
        (1, "[]\n"),
        (1, '{"kind": "numbers"}\n'),
        (2, good.splitlines()[0] + "\n7\n"),
        (2, good.splitlines()[0] + '\n{"name": "a", "sources": [], "files": {"x": [1]}, "facts": {}, "note": ""}\n'),
        (3, "\n".join(good.splitlines()[:2]) + "\nnull\n"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=rf"manifest\.jsonl: line {line} is damaged; remove the file and run"):
            store.entries()
        with pytest.raises(FormatError, match="is damaged"):
            store.prepare(items_of(tmp_path), double)


def test_mutated_manifests_give_entries_or_a_format_error(tmp_path, tenths):
    store = store_of(tmp_path, factor=2)
    store.prepare(items_of(tmp_path), double)
    path, good, bad = store.folder / "manifest.jsonl", 0, 0
    for data in mutations([path.read_bytes()], 300 * tenths):
        overwrite(path, data)
        try:
            entries = store.entries()
            good += all(isinstance(entry, Entry) for entry in entries.values())
            result = Check()
            store.check(items_of(tmp_path), result, quick=True)
        except FormatError as error:
            bad += str(error).startswith(f"{path}: ") and len(str(error)) < len(str(path)) + 1000
    assert good + bad == 300 * tenths
    assert min(good, bad) > 5 * tenths


def test_files_stay_in_the_store(tmp_path):
    store = store_of(tmp_path)
    done = store.prepare(items_of(tmp_path, "a"), lambda item: Output([("../outside.txt", b"x")]))
    assert done.failed == [f"../outside.txt: outside of {store.folder}, expected a path in it"]
    assert not (tmp_path / "outside.txt").exists()


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "folder" / "file"
    with whole_file(path) as file:
        file.write(b"old")
        assert not path.exists()

    def fail():
        with whole_file(path) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_stops_it(tmp_path, monkeypatch):
    store = store_of(tmp_path)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="No space left"):
        store.prepare(items_of(tmp_path), double)
    assert names(store) == []
    assert json.loads((store.folder / "manifest.jsonl").read_text())["kind"] == "numbers"
