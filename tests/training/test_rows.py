"""CSV files that are read back: what is damaged is told by file and line."""

import re

import pytest

from parapos.training import rows
from parapos.training.checkpoint import CheckpointError


def test_numbers_and_what_is_not_there(tmp_path):
    path = tmp_path / "a.csv"
    assert rows.read(path) == []
    path.write_text('name,step,loss\n"a, b",3,0.25\nc,4,\n')
    assert rows.read(path, whole=["step"], numbers=["loss"]) == [
        {"name": "a, b", "step": 3, "loss": 0.25},
        {"name": "c", "step": 4},
    ]
    assert rows.read(path, ["name", "step", "loss", "more"], optional=["more"])[1]["loss"] == ""


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step\n1\n2")
    assert rows.read(path, growing=True) == [{"step": "1"}]
    path.write_text("ste")
    assert rows.read(path, growing=True) == []


def test_whole_columns_must_be_there(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: expected a column epoch, got a,b")):
        rows.read(path, whole=["epoch"], needed=["epoch"], growing=True)
    assert rows.read(path, whole=["a"]) == [{"a": 1, "b": "2"}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected the columns step,loss"),
        (b"loss,step\n", "expected the columns step,loss"),
        (b"step,loss\n1,2\n1,2,3\n", "line 3: 3 entries, expected 2"),
        (b"step,loss\n1\n", "line 2: 1 entries, expected 2"),
        (b"step,loss\n1,x\n", "line 2: could not convert string to float: 'x'"),
        (b"step,loss\n,1\n", "line 2: invalid literal"),
        (b"step,loss\n1.5,1\n", "line 2: invalid literal"),
        (b"step,loss\n1,2\n\xff,1\n", "line 3: not UTF-8"),
        (b'step,loss\n1,"2\n', "line 2: unexpected end of data"),
    ],
)
def test_damage_is_told_by_line(data, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: {message}")):
        rows.read(path, ["step", "loss"], whole=["step"], numbers=["loss"])
