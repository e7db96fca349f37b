"""Lists and labels of DvsGesture: their traps, what is wrong with them, and damaged files."""

import re

import pytest

from parapos.data import FormatError
from parapos.data.readers.gesture_lists import read_labels, read_trials, user_of

from .fuzz import mutations, overwrite

COLUMNS = "class,startTime_usec,endTime_usec\n"


def test_lists_have_their_traps(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfuser01_fluorescent_led.aedat\r\n\r\n  user29_lab.aedat \n\n")
    assert read_trials(path) == ["user01_fluorescent_led", "user29_lab"]
    assert [user_of(name) for name in read_trials(path)] == [1, 29]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            b"user01_led.aedat\nuser1_led.aedat\n",
            "line 2: expected a name such as user01_led.aedat, got 'user1_led.aedat'",
        ),
        (b"../user01_led.aedat\n", "line 1: expected a name"),
        (b"user01_../led.aedat\n", "line 1: expected a name"),
        (b"user01_led.aedat\n\nuser01_led.aedat", "line 3: user01_led.aedat is here twice"),
        (b"user01_led.aedat\n\xff\xfe", "line 2: not text in UTF-8"),
        (b"\n" * (1024**2 + 1), "more than 1048576 bytes"),
    ],
)
def test_wrong_lists_are_told_with_their_place(text, told, tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=f"list.txt: {told}"):
        read_trials(path)


def test_labels_have_their_traps(tmp_path):
    path = tmp_path / "labels.csv"
    text = f"{COLUMNS}1,5,9\n\n 8 , 10, 20\n8,20,20\n9,15,9999999999999\n11,3,4"
    for change in (text, "\ufeff" + text, text.replace("\n", "\r\n")):
        path.write_text(change, newline="")
        assert read_labels(path) == [(0, 5, 9), (7, 10, 20), (7, 20, 20), (8, 15, 9999999999999), (10, 3, 4)]
    path.write_text(COLUMNS)
    assert read_labels(path) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: expected the columns class,startTime_usec,endTime_usec, got ''"),
        ("1,5,9\n", "line 1: expected the columns class,startTime_usec,endTime_usec, got '1,5,9'"),
        ("class,endTime_usec,startTime_usec\n1,5,9\n", "line 1: expected the columns"),
        (f"{COLUMNS}1,5\n", "line 2: expected three whole numbers with commas, got '1,5'"),
        (f"{COLUMNS}\n1,5,9,7\n", "line 3: expected three whole numbers"),
        (f"{COLUMNS}1,5,9.5\n", "line 2: expected three whole numbers"),
        (f"{COLUMNS}1,-5,9\n", "line 2: expected three whole numbers"),
        (f"{COLUMNS}1,5,{'9' * 19}\n", "line 2: expected three whole numbers"),
        (f"{COLUMNS}0,5,9\n", "line 2: class 0, expected 1 to 11"),
        (f"{COLUMNS}12,5,9\n", "line 2: class 12, expected 1 to 11"),
        (f"{COLUMNS}3,9,8\n", "line 2: a gesture from 9 to 8, expected an end"),
    ],
)
def test_wrong_labels_are_told_with_their_place(text, told, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=re.escape(f"labels.csv: {told}")):
        read_labels(path)


@pytest.mark.parametrize("read", [read_labels, read_trials])
def test_mutated_text(read, tmp_path, tenths):
    seeds = {
        read_labels: f"{COLUMNS}1,5,9\n8,10,20\n9,15,30\n".encode() + b"10,30,31\r\n" * 20,
        read_trials: b"".join(b"user%02d_natural.aedat\r\n" % i for i in range(30)),
    }
    path, good = tmp_path / "broken.csv", 0
    for data in mutations([seeds[read]], 300 * tenths):
        overwrite(path, data)
        try:
            read(path)
            good += 1
        except FormatError:
            pass
    assert 3 * tenths < good < 290 * tenths
