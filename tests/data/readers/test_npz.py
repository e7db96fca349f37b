"""NPZ: arrays by name, packed or not, damaged and lying archives."""

import io
import pickle
import zipfile

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import npz

from .fuzz import mutations, survive

COORD, LABEL = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, -1], np.int16)
NAMES = ("coord", "label")


def archive(packed=False, **arrays):
    buffer = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def member(data, name="coord.npy"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, data)
    return buffer.getvalue()


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def put(tmp_path, data):
    path = tmp_path / "file.npz"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_by_name(packed, tmp_path):
    data = archive(packed, Coord=np.asfortranarray(COORD), label=LABEL, other=np.array(["text"]))
    found = npz.read(put(tmp_path, data), NAMES)
    assert list(found) == ["coord", "label"]  # what is not asked for is not looked at
    assert np.array_equal(found["coord"], COORD)
    assert np.array_equal(found["label"], LABEL)


HUGE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 3), }"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not a readable NPZ archive"),
        (b"PK", "not a readable NPZ archive"),
        (archive(coord=COORD)[:-30], "not a readable NPZ archive"),
        (archive(coord=np.array([{}], object)), "of object, expected numbers"),
        (archive(coord=np.array(["a"])), "expected numbers"),
        (member(b"nothing"), "not a readable NPZ archive"),
        (member(header(HUGE) + b"\0" * 48), r"48 bytes of array 'coord.npy', expected \(4000000000, 3\)"),
        (member(header(HUGE.replace(b"4000000000", b"-1"))), "bytes of array|not a readable"),
        (member(header(b"__import__('os').abort()") + b"\0" * 48), "not a readable NPZ archive"),
        (member(pickle.dumps([1])), "not a readable NPZ archive"),
    ],
)
def test_refused(data, told, tmp_path):
    with pytest.raises(FormatError, match=rf"file\.npz: at byte \d+: .*({told})"):
        npz.read(put(tmp_path, data), NAMES)


def test_what_unpacks_to_far_more_than_the_file_is_refused(tmp_path, monkeypatch):
    path = put(tmp_path, archive(True, coord=np.zeros((100_000, 3), np.float32)))
    assert len(npz.read(path, NAMES)["coord"]) == 100_000
    monkeypatch.setattr(npz, "LEAST", 1000)
    with pytest.raises(FormatError, match="unpacks to 1200000 bytes, expected at most"):
        npz.read(path, NAMES)


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_broken_files(count, tmp_path):
    seeds = [archive(packed, coord=COORD, label=LABEL) for packed in (False, True)]
    files = mutations(seeds, count)
    good, refused = survive(lambda p: npz.read(p, NAMES), files, tmp_path / "a.npz", per_byte=80, least=600_000)
    assert good > count // 100
    assert refused > count // 4
