"""Pickles are read without being run: plain values and arrays of bytes come out, and anything else is a FormatError."""

import pickle
import pickletools

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import pickled

from .fuzz import mutations, survive

VALUE = {
    "batch_label": "training batch 1 of 5",
    "labels": [6, 9, 0, 300, -2],
    "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "filenames": ["a.png", "b.png"],
}


class Evil:
    def __reduce__(self):
        return print, ("owned",)


def same(found, expected):
    assert found.keys() == expected.keys()
    assert np.array_equal(found["data"], expected["data"])
    return all(found[key] == expected[key] for key in expected if key != "data")


def test_what_is_written_is_read_by_both_readers():
    data = pickled.dumps(VALUE)
    assert same(pickled.loads(data, "x"), VALUE)
    other = pickle.loads(data, encoding="latin-1")  # our own bytes
    assert same(other, VALUE)
    assert other["data"].dtype == np.uint8
    names = {operation.name for operation, _, _ in pickletools.genops(data)}
    assert {"SHORT_BINSTRING", "BINSTRING", "GLOBAL", "REDUCE", "BUILD", "SETITEMS", "APPENDS"} <= names


def test_pickles_of_python_with_memo():
    """As pickle writes protocol 2, with BINPUT and BINGET, one item at a time and in one go."""
    for value in ({"a": ["text"] * 3, "b": (1, 2), "c": [True, None, 70000]}, [1], {"a": 1}, (), (1,), (1, 2, 3), "x"):
        assert pickled.loads(pickle.dumps(value, 2), "x") == value


def test_arrays_in_the_order_of_columns():
    data = pickled.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3)})
    turned = data.replace(b"\x89T", b"\x88T")
    assert pickled.loads(turned, "x")["data"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (pickle.dumps(Evil(), 2), "it names '__builtin__ print'"),
        (pickle.dumps(Evil(), 0), "it names"),
        (pickle.dumps(Evil(), 4), "operation "),
        (pickle.dumps({1, 2}, 2), "it names"),
        (pickle.dumps(1.5, 2), "operation BINFLOAT"),
        (pickle.dumps(2**80, 2), "operation LONG1"),
        (pickle.dumps(np.zeros(3, "f4"), 2), "it names"),
        (b"cos\nsystem\n(S'true'\ntR.", "it names 'os system'"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", "for something else than bytes"),
        (b"\x80\x02K\x01)R.", "it calls what is no function"),
        (b"\x80\x02}K\x01b.", "it changes what is no array"),
        (b"\x80\x02cnumpy\nndarray\n.", None),
        (b"\x80\x02K\x01", "not a whole pickle"),
        (b"", "not a whole pickle"),
        (b"\x80\x02.", "not a whole pickle"),
        (b"\x80\x02K\x01K\x02.", "not a whole pickle"),
        (b"\x80\x02}(K\x01u.", "not a whole pickle"),
        (b"\x80\x02](K\x01]e.", None),
        (b"\x80\x02}]K\x01s.", "not a whole pickle"),
        (b"\x80\x02e.", "not a whole pickle"),
        (b"\x80\x02h\x07.", "not a whole pickle"),
        (b"\x80\x02T\xff\xff\xff\x7fabc.", "not a whole pickle"),
        (b"\x80\x02j\xff\xff\xff\xff.", "not a whole pickle"),
        (b"\x80\x02\x96\xff\xff\xff\xff\xff\xff\xff\x00abc.", "not a whole pickle"),
    ],
)
def test_what_is_not_plain_is_refused(data, told, capsys):
    if told is None:
        pickled.loads(data, "x.bin")
    else:
        with pytest.raises(FormatError, match=rf"x\.bin: at byte \d+: .*{told}"):
            pickled.loads(data, "x.bin")
    assert capsys.readouterr().out == ""


def test_arrays_must_have_the_bytes_of_their_shape():
    data = pickled.dumps({"data": np.zeros((3, 4), np.uint8)})
    for shape in (b"K\x03K\x05\x86", b"K\x03J\xff\xff\xff\x7f\x86", b"J\xff\xff\xff\xffK\x04\x86"):
        with pytest.raises(FormatError, match="an array of"):
            pickled.loads(data.replace(b"K\x03K\x04\x86", shape), "x")


def test_any_bytes_are_a_value_or_a_format_error(tmp_path, tenths):
    seeds = [pickled.dumps(VALUE), pickle.dumps({"a": [1, 2, ("x", None)], "b": "x" * 300}, 2)]
    read = lambda path: pickled.loads(path.read_bytes(), path)  # noqa: E731
    good, bad = survive(read, mutations(seeds, 2_000 * tenths), tmp_path / "x", per_byte=100, least=100_000)
    assert good + bad == 2_000 * tenths
    assert min(good, bad) > 50 * tenths


@pytest.mark.parametrize("value", [1.5, np.zeros(3), {1: object()}, np.zeros(3, np.uint8)])
def test_what_cannot_be_written(value):
    with pytest.raises(ValueError, match="cannot write"):
        pickled.dumps(value)
