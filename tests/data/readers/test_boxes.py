"""GEN1 boxes: both layouts, what is no box, and damaged files."""

import io
import pickle

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import boxes

from .fuzz import mutations, survive

CORNER = [("x", "<f4"), ("y", "<f4"), ("w", "<f4"), ("h", "<f4")]
OLD = np.dtype([("ts", "<u8"), *CORNER, ("class_id", "u1"), ("confidence", "<f4"), ("track_id", "<u4")])
NEW = np.dtype(
    {
        "names": ["t", "x", "y", "w", "h", "class_id", "track_id", "class_confidence"],
        "formats": ["<i8", "<f4", "<f4", "<f4", "<f4", "<u4", "<u4", "<f4"],
        "offsets": [0, 8, 12, 16, 20, 24, 28, 32],
        "itemsize": 40,
    }
)
ROWS = [(250_000, -3.5, 2.0, 40.0, 30.5, 0, 7, 0.75), (500_000, 10.0, 20.0, 12.0, 48.0, 1, 8, 1.0)]


def old_rows():
    return np.array([(t, x, y, w, h, kind, sure, track) for t, x, y, w, h, kind, track, sure in ROWS], OLD)


@pytest.fixture
def put(tmp_path):
    def write(array, **options):
        path = tmp_path / "file_bbox.npy"
        if isinstance(array, bytes):
            path.write_bytes(array)
        else:
            np.save(path, array, **options)
        return path

    return write


@pytest.mark.parametrize("array", [old_rows(), np.array(ROWS, NEW), np.array(ROWS, NEW.newbyteorder(">"))])
def test_both_layouts_read_alike(array, put):
    found = boxes.read(put(array))
    assert found.dtype == boxes.BOX == NEW
    assert found.tolist() == ROWS


def test_fields_may_be_wider_and_others_may_be_there(put):
    wide = np.zeros(2, [("more", "<f8"), *((name, "<f8" if name == "w" else OLD[name]) for name in OLD.names)])
    for name in OLD.names:
        wide[name] = old_rows()[name]
    assert boxes.read(put(wide)).tolist() == ROWS


def test_no_boxes(put):
    assert len(boxes.read(put(np.empty(0, OLD)))) == 0


@pytest.mark.parametrize("layout", ["new", "old"])
def test_what_is_written_reads_back(layout, tmp_path):
    rows = np.array(ROWS, boxes.BOX)
    boxes.write(tmp_path / "a.npy", rows, layout=layout)
    assert np.load(tmp_path / "a.npy").dtype == {"new": NEW, "old": OLD}[layout]
    assert boxes.read(tmp_path / "a.npy").tolist() == ROWS
    with pytest.raises(ValueError, match="layout must be one of new, old, got 'other'"):
        boxes.write(tmp_path / "a.npy", rows, layout="other")
    with pytest.raises(ValueError, match="boxes must be an array of BOX"):
        boxes.write(tmp_path / "a.npy", old_rows())


def changed(**fields):
    rows = old_rows()
    for name, value in fields.items():
        rows[name][1] = value
    return rows


def retyped(name, kind):
    return old_rows().astype([(field, kind if field == name else OLD[field]) for field in OLD.names])


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (changed(ts=2**63), r"at byte 289: ts of box 1 is 9223372036854775808, expected 0 to 2\^63 - 1"),
        (np.array([ROWS[0], (-1, *ROWS[1][1:])], NEW), "t of box 1 is -1, expected 0 to"),
        (changed(x=np.nan), "at byte 297: x of box 1 is nan, expected a finite number"),
        (changed(h=np.inf), "h of box 1 is inf"),
        (retyped("ts", "<f8"), "field ts is float64, expected a int64"),
        (retyped("class_id", "O"), "bytes of boxes, expected 2 x|field class_id is object"),
        (retyped("x", "<i4"), "field x is int32"),
        (retyped("x", "S4"), "field x is "),
        (np.zeros((2, 2), OLD), r"shape \(2, 2\), expected one dimension"),
        (np.zeros((), OLD), r"shape \(\), expected one dimension"),
        (np.zeros(3), "fields None, expected t among them"),
        (old_rows()[["ts", "x", "y", "w"]], "expected h among them"),
        (saved(old_rows())[:-1], "at byte 256: 65 bytes of boxes, expected 2 x 33"),
        (saved(old_rows()) + b"\0", "at byte 256: 67 bytes of boxes"),
        (saved(old_rows()).replace(b"(2,)", b"(9,)"), "66 bytes of boxes, expected 9 x 33"),
        (saved(old_rows()).replace(b"(2,), ", b"(-2,),"), r"shape \(-2,\)"),
        (
            saved(old_rows()).replace(b"(2,), }", b"(1" + b"0" * 40 + b",), }"),
            "106 bytes of boxes, expected 10000000000000000000 x 33",
        ),
        (b"", "at byte 0: not an array file of NumPy"),
        (b"PK\x03\x04" + bytes(100), "at byte 0: not an array file of NumPy"),
        (pickle.dumps(ROWS), "at byte 0: not an array file of NumPy"),
        (b"\x93NUMPY\x03\x00" + bytes(100), r"version \(3, 0\)"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "at byte 0: not an array file"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(array, told, put):
    with pytest.raises(FormatError, match=r"file_bbox.npy: at byte \d+: ") as error:
        boxes.read(put(array))
    assert error.match(told)


def test_a_file_that_is_too_large(put, monkeypatch):
    monkeypatch.setattr(boxes, "MAX_BYTES", 100)
    with pytest.raises(FormatError, match="at byte 0: 322 bytes, expected at most 100"):
        boxes.read(put(old_rows()))


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        boxes.read(tmp_path / "none.npy")


def test_mutated_files(tmp_path, tenths):
    seeds = [saved(old_rows()), saved(np.array(ROWS * 4, NEW)), saved(np.array(ROWS, boxes.BOX))]
    files = mutations(seeds, 330 * tenths)
    good, refused = survive(boxes.read, files, tmp_path / "broken.npy", per_byte=16, least=600_000)
    assert min(good, refused) > 5 * tenths


@pytest.mark.parametrize(
    ("descr", "count"), [("[]", 10**12), ("'|S0'", 7), ("'|V0'", 7), ("'|O'", 0), ("[('ts', '<u8'), ('o', '|O')]", 0)]
)
def test_headers_that_promise_nothing_readable(descr, count, tmp_path):
    """No mutation of a good file finds these."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': ({count},), }}".encode().ljust(117) + b"\n"
    path = tmp_path / "x_bbox.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(FormatError, match=r"x_bbox\.npy: at byte 0: "):
        boxes.read(path)
