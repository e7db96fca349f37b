"""Sweeps: every cell is evaluated once, however often the sweep is killed, and is what the model says."""

import csv
from itertools import pairwise

import pytest
import torch

from parapos import cli
from parapos.experiments import plots, sweep
from parapos.training import checkpoint, fit
from parapos.training.checkpoint import CheckpointError

from ..run_folders import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def calls(monkeypatch):
    """Sizes and factors of real evaluations, in order."""
    seen, real = [], fit.evaluate

    def evaluate(folder, **options):
        seen.append((options["size"], options["position_scale"]))
        return real(folder, **options)

    monkeypatch.setattr(fit, "evaluate", evaluate)
    return seen


def test_a_cell_is_what_the_model_says(run):
    found = sweep.run([run], [16, 24])
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    dataset = fit.load_run(run).dataset("test", size=24)
    images = torch.stack([dataset[i]["image"] for i in range(len(dataset))])
    labels = torch.tensor([dataset[i]["label"] for i in range(len(dataset))])
    for row, factor in zip(found.rows, (1.0, 16 / 24), strict=True):
        with torch.no_grad():
            right = (model(images, factor).argmax(1) == labels).double().mean()
        assert found.values(row)[1] == pytest.approx(100 * float(right))
        assert row.cells[1]["samples"] == len(dataset)
    assert found.rows[0].cells[1] != found.rows[1].cells[1]


def test_no_cell_twice(run, calls):
    first = sweep.run([run], [24, 16, 24])
    assert calls == [(16, 1.0), (24, 1.0), (24, 16 / 24)]  # at the trained size both ways are one
    assert sweep.run([run], [16, 24]) == first
    assert sweep.run([run], [24], interpolate="on").rows == (
        sweep.Row("PaPE", "pape", True, (first.rows[1].cells[1],)),
    )
    assert len(calls) == 3


def test_goes_on_after_a_kill(run, calls, monkeypatch):
    real = fit.evaluate

    def die(folder, **options):
        if options["size"] == 24:
            raise KeyboardInterrupt
        return real(folder, **options)

    monkeypatch.setattr(fit, "evaluate", die)
    with pytest.raises(KeyboardInterrupt):
        sweep.run([run], [16, 20, 24], interpolate="off")
    monkeypatch.setattr(fit, "evaluate", real)
    assert [size for size, _ in calls] == [16, 20]
    sweep.run([run], [16, 20, 24], interpolate="off")
    assert [size for size, _ in calls] == [16, 20, 24]


def test_other_weights_and_other_data_are_other_cells(run, calls):
    sweep.run([run], [16])
    sweep.run([run], [16], split="val")
    make_run(run, seed=1)
    sweep.run([run], [16])
    assert len(calls) == 3


def test_the_number_of_tokens_sets_the_batch(run, monkeypatch):
    asked = []
    monkeypatch.setattr(
        fit, "evaluate", lambda folder, **o: asked.append(o["batch"]) or dict.fromkeys(sweep.METRICS, 0)
    )
    sweep.run([run], [16, 32, 512], interpolate="off")
    sweep.run([run], [64], interpolate="off", batch=7)
    assert asked == [64, 16, 1, 7]


def test_command_writes_table_csv_and_plot(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", "rope")
    words = ["sweep", str(run), str(other), "--sizes", "16,24", "--interpolate", "off", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["PaPE", "RoPE"]
    assert "PaPE, 24 px: top-1" in err
    with open(tmp_path / "out/sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["encoding"], row["size"]) for row in rows] == [
        ("pape", "16"), ("pape", "24"), ("rope", "16"), ("rope", "24")
    ]  # fmt: skip
    assert (tmp_path / "out/sweep.md").read_text() == out
    assert (tmp_path / "out/sweep.png").read_bytes()[1:4] == b"PNG"


def test_weights_alone(run, tmp_path, capsys):
    weights = (run / "weights.safetensors").rename(tmp_path / "w.safetensors")
    words = ["sweep", str(weights), "--sizes", "16", "--recipe", "digits", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert "| PaPE" in capsys.readouterr().out
    assert fit.load_run(tmp_path / "out").model.options["dim"] == 32  # of the file, not of the recipe
    assert cli.main(words[:4] + words[6:]) == 2
    assert "--recipe" in capsys.readouterr().err
    for key in ("model.encoding", "optim.lr", "data.size"):
        assert cli.main([*words, f"--{key}", "16"]) == 2
        assert f"--{key}: expected nothing, {weights} says what the model is" in capsys.readouterr().err
    assert cli.main([*words, "--data.eval_batch", "7", "--out", str(tmp_path / "other")]) == 0


def test_errors_are_one_line(run, tmp_path, capsys):
    small = make_run(tmp_path / "small", data__size="8")
    (small / "nothing").mkdir()
    for words, message in (
        (f"{run} {small} --sizes 16", "must be trained at one size, got"),
        (f"{small}/nothing --sizes 16", "not a run"),
        (f"{run} --sizes 16,18", "multiple of the model's patch size 4, got 18"),
        (f"{run} {run}/../run --sizes 16", "must be different ones"),
        (f"{run} --sizes 16 --data cats", "unknown dataset 'cats'"),
        (f"{run} --sizes 16 --optim.lr 1", "for weights alone"),
        (f"{run}", "required: --sizes"),
    ):
        assert cli.main(["sweep", *words.split()]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert out == ""
    (run / "cells.csv").write_text("a,b\n")
    with pytest.raises(CheckpointError, match=r"expected the columns"):
        sweep.run([run], [16])
    (run / "weights.safetensors").unlink()
    with pytest.raises(sweep.ReportError, match=r"has no weights.safetensors yet"):
        sweep.run([run], [16])


@pytest.mark.parametrize("wanted", [[], [5.0], [1, 1, 1], [50, 10, 12, 48, 11], [0, 3, 100]])
def test_labels_keep_apart_and_in_order(wanted):
    heights = plots._spread(wanted, 5)
    order = sorted(range(len(wanted)), key=lambda i: heights[i])
    assert [wanted[i] for i in order] == sorted(wanted)
    placed = [heights[i] for i in order]
    assert all(b - a > 4.999 for a, b in pairwise(placed))
    assert sum(heights) == pytest.approx(sum(wanted))
