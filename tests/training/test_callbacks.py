"""The metrics file and what is shown on the way."""

import sys

import pytest

from parapos.training.callbacks import Display, Recorder
from parapos.training.checkpoint import CheckpointError

HEADER = "step,epoch,lr,train_loss,val_loss\n"


def test_rows_are_kept_as_far_as_they_are_known(tmp_path):
    path = tmp_path / "metrics.csv"
    recorder = Recorder(path, ["loss"])
    assert recorder.rewind(0, 0, 0) is None
    for step in (1, 2, 3):
        recorder.add({"step": step, "epoch": 1, "lr": 0.1 + 0.2, "train_loss": step / 3})
    recorder.add({"step": 3, "epoch": 1, "val_loss": 1.0})
    recorder.flush()
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == HEADER
    assert lines[1] == "1,1,0.30000000000000004,0.3333333333333333,\n"
    with open(path, "a") as file:
        file.write("4,1,0.1")  # what a kill leaves
    assert recorder.rewind(3, 3, 4) is None
    assert path.read_text() == "".join(lines)
    assert recorder.rewind(3, 0, 3) is None  # saved before the validation
    assert path.read_text() == "".join(lines[:4])
    assert recorder.rewind(2, 0, 2) is None
    assert path.read_text() == "".join(lines[:3])
    assert recorder.rewind(5, 0, 5) == f"{path}: has 2 of 5 rows; the others are lost"
    path.write_text("other\n")
    with pytest.raises(CheckpointError, match="expected the columns step,epoch,lr,train_loss,val_loss"):
        recorder.rewind(1, 0, 1)


def test_lost_rows_never_come_twice(tmp_path):
    """Rows were lost, the run went on and was killed after rows that its checkpoint does not know."""
    path = tmp_path / "metrics.csv"
    recorder = Recorder(path, ["loss"])
    rows = [f"{step},1,0.1,1.0,\n" for step in range(1, 9)]
    path.write_text(HEADER + "".join(rows[:1]))  # rows 2 to 4 are lost
    assert recorder.rewind(4, 0, 4) == f"{path}: has 1 of 4 rows; the others are lost"
    path.write_text(path.read_text() + "".join(rows[4:8]))  # and the checkpoint is of step 6
    recorder.rewind(6, 0, 6)
    path.write_text(path.read_text() + "".join(rows[6:8]))
    assert path.read_text() == HEADER + rows[0] + "".join(rows[4:8])


def test_named_parts_have_columns(tmp_path):
    recorder = Recorder(tmp_path / "metrics.csv", ["iou"], parts=("boxes", "classes"))
    assert recorder.columns == ["step", "epoch", "lr", "train_loss", "train_boxes", "train_classes", "val_iou"]


@pytest.mark.parametrize("terminal", [True, False])
def test_display(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    display = Display(10, 2)
    display.step(3, 0.5)
    display.row({"step": 3, "epoch": 1, "lr": 0.1, "train_loss": 0.5}, 2)
    display.row({"step": 5, "epoch": 1, "val_loss": 0.25}, 2)
    display.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "epoch 1/2 step 5/10, val_loss 0.25, left " in err
    assert ("train_loss 0.5" in err) == (not terminal)
    assert ("━" in err) == terminal
