"""Sweeps: every cell is evaluated once, however often the sweep is killed, and is what the model says."""

import csv
from itertools import pairwise

import pytest
import torch

from parapos import cli
from parapos.experiments import plots, store, sweep
from parapos.experiments.grid import Run
from parapos.training import checkpoint, fit
from parapos.training.checkpoint import CheckpointError
from parapos.training.schema import Model

from ..run_folders import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def swept(runs, sizes, **options):
    """The grid of a sweep, and what came out."""
    grid = sweep.resolve(runs, sizes, **options)
    return grid, sweep.run(grid)


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
    grid, found = swept([run], [16, 24])
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    dataset = fit.load_run(run).dataset("test", size=24)
    images = torch.stack([dataset[i]["image"] for i in range(len(dataset))])
    labels = torch.tensor([dataset[i]["label"] for i in range(len(dataset))])
    assert grid.rows == ["PaPE", "PaPE, interpolated"]
    for row, factor in zip(grid.rows, (1.0, 16 / 24), strict=True):
        with torch.no_grad():
            right = (model(images, factor).argmax(1) == labels).double().mean()
        assert grid.values(found, ("", row, "24 px")) == [pytest.approx(100 * float(right))]
        assert grid.values(found, ("", row, "24 px"), "samples") == [len(dataset)]
    losses = [grid.values(found, ("", row, "24 px"), "loss") for row in grid.rows]
    assert losses[0] != losses[1]


def test_no_cell_twice(run, calls):
    grid, first = swept([run], [24, 16, 24])
    assert calls == [(16, 1.0), (24, 1.0), (24, 16 / 24)]  # at the trained size both ways are one
    assert swept([run], [16, 24])[1] == first
    other, found = swept([run], [24], interpolate="on")
    place = ("", "PaPE, interpolated", "24 px")
    assert list(other.places) == [place]
    assert other.values(found, place) == grid.values(first, place)
    assert len(calls) == 3


def test_goes_on_after_a_kill(run, calls, monkeypatch):
    real = fit.evaluate

    def die(folder, **options):
        if options["size"] == 24:
            raise KeyboardInterrupt
        return real(folder, **options)

    monkeypatch.setattr(fit, "evaluate", die)
    with pytest.raises(KeyboardInterrupt):
        swept([run], [16, 20, 24], interpolate="off")
    monkeypatch.setattr(fit, "evaluate", real)
    assert [size for size, _ in calls] == [16, 20]
    swept([run], [16, 20, 24], interpolate="off")
    assert [size for size, _ in calls] == [16, 20, 24]


def test_other_weights_and_other_data_are_other_cells(run, calls):
    swept([run], [16])
    swept([run], [16], split="val")
    make_run(run, seed=1)
    swept([run], [16])
    assert len(calls) == 3


def test_the_number_of_tokens_sets_the_batch(run, monkeypatch):
    asked = []
    monkeypatch.setattr(fit, "evaluate", lambda folder, **o: asked.append(o["batch"]) or {"top1": 0.0})
    swept([run], [16, 32, 512], interpolate="off")
    sweep.run(sweep.resolve([run], [64], interpolate="off"), batch=7)
    assert asked == [64, 16, 1, 7]


def test_command_writes_table_csv_and_plot(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", "rope")
    words = ["sweep", str(run), str(other), "--sizes", "16,24", "--interpolate", "off", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in lines[2:]] == ["PaPE", "RoPE"]
    assert "PaPE, 24 px: top-1" in err
    with open(tmp_path / "out/sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["column"], row["metric"]) for row in rows] == [
        ("PaPE", "16 px", "top1"), ("PaPE", "24 px", "top1"), ("RoPE", "16 px", "top1"), ("RoPE", "24 px", "top1")
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
        swept([run], [16])
    (run / "weights.safetensors").unlink()
    with pytest.raises(sweep.ReportError, match=r"has no weights.safetensors yet"):
        swept([run], [16])


@pytest.mark.parametrize("wanted", [[], [5.0], [1, 1, 1], [50, 10, 12, 48, 11], [0, 3, 100]])
def test_labels_keep_apart_and_in_order(wanted):
    heights = plots._spread(wanted, 5)
    order = sorted(range(len(wanted)), key=lambda i: heights[i])
    assert [wanted[i] for i in order] == sorted(wanted)
    placed = [heights[i] for i in order]
    assert all(b - a > 4.999 for a, b in pairwise(placed))
    assert sum(heights) == pytest.approx(sum(wanted))


def test_a_model_is_built_and_a_file_is_read_once(run, monkeypatch):
    """By the sweep itself; every evaluation loads the weights anew."""
    swept([run], [16, 24])
    built, read, real_build, real_read = [], [], Model.build, store.read
    monkeypatch.setattr(Model, "build", lambda *args: built.append(args) or real_build(*args))
    monkeypatch.setattr(store, "read", lambda path: read.append(path) or real_read(path))
    one = Run("", {}, run, fit.load_run(run))
    built.clear()
    for _ in range(2):
        one.check_sizes("run", [16, 20, 24])
    assert len(built) == 1
    read.clear()
    cells = store.Cells(run)
    for _ in range(2):
        assert cells.measure(store.Evaluation(24)) == cells.get(store.Evaluation(24))
    assert read == [run / "cells.csv"]


def test_a_folder_that_cannot_be_written_is_told_before_the_work(run, tmp_path, calls, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["sweep", str(run), "--sizes", "16", "--out", str(tmp_path / "file")]) == 2
    assert "file: File exists" in capsys.readouterr().err
    assert cli.main(["analyze", str(run), "--out", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert "file: File exists" in err
    assert "scored" not in err
    assert calls == []


def test_long_rows_have_any_metric_and_no_blanks(tmp_path):
    scores = {("a", "size=8", "w"): {"mean_iou": 0.5, "samples": 3.0}, ("b", "step=4", ""): {"train_loss": 1 / 3}}
    store.write(tmp_path / "cells.csv", scores)
    assert (tmp_path / "cells.csv").read_text().splitlines()[:2] == [
        "run,evaluation,metric,value,weights", "a,size=8,mean_iou,0.5,w"
    ]  # fmt: skip
    assert store.read(tmp_path / "cells.csv") == scores
    (tmp_path / "cells.csv").write_text("run,evaluation,metric,value,weights\na,size=8,mean_iou,,w\n")
    with pytest.raises(CheckpointError, match=r"line 2: expected a number as value"):
        store.read(tmp_path / "cells.csv")


def test_files_of_older_versions_are_read(run):
    """A column per metric, blank where the task has no such one."""
    weights = store.Cells(run).weights
    header = "weights,size,position_scale,data,split,root,samples,loss,top1,precision,recall,f1,top1_subset"
    (run / "cells.csv").write_text(f"{header}\n{weights},24,0.5,,test,,10.0,1.5,0.25,0.1,,,\n")
    cells = store.Cells(run)
    assert cells.get(store.Evaluation(24, 0.5)) == {"samples": 10.0, "loss": 1.5, "top1": 0.25, "precision": 0.1}
    cells.measure(store.Evaluation(16))
    known = [str(store.Evaluation(24, 0.5)), str(store.Evaluation(16))]
    assert list(store.Cells(run).scores) == [(evaluation, weights) for evaluation in known]
    assert (run / "cells.csv").read_text().startswith("run,evaluation,metric,value,weights\n")


def test_a_folder_without_permission_is_told_before_the_work(run, tmp_path, calls, monkeypatch, capsys):
    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    for command in (["sweep", str(run), "--sizes", "16"], ["analyze", str(run)]):
        assert cli.main([*command, "--out", str(tmp_path / "out")]) == 2
        assert "Permission denied" in capsys.readouterr().err
    assert calls == []


def test_one_store_evaluates_once(run, calls):
    cells = store.Cells(run)
    assert cells.measure(store.Evaluation(24)) == cells.measure(store.Evaluation(24))
    assert len(calls) == 1
