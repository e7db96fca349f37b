"""ImageNet as a user meets it, on a generated copy with a nano model: check, train, kill, go on, test, sweep, tables,
analysis. Every step is a command; only what is killed needs a process of its own."""

import json
import shutil
import signal
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from PIL import Image

from parapos import cli, recipes
from parapos.experiments import tables
from parapos.training import checkpoint, fit

from .commands import parapos, rows, words

TABLES = (
    "extrapolation",
    "extrapolation-interpolated",
    "extrapolation-best",
    "ood",
    "ablations",
    "parameter-matched",
    "efficiency",
)
TINY = {
    "data.options.complete": "false",
    "data.size": "64",
    "data.workers": "0",
    "model.name": "vit_official_nano_patch16",
    "optim.batch": "64",
    "run.precision": "32-true",
    "run.compile": "false",
    "run.threads": "1",  # bits depend on their number
}
SHORT = {"optim.epochs": "2", "optim.lr": "3e-3", "optim.part": "32", "run.save_every": "2", "run.log_every": "3"}


def images(dataset):
    return torch.stack([dataset[i]["image"] for i in range(len(dataset))])


def size_of(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.size


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The generated copy: 12 classes, 240 training and 36 test images, ImageNetV2 and ImageNet-R."""
    folder = tmp_path_factory.mktemp("data") / "imagenet"
    parapos("prepare", "imagenet", "--synthetic", "--root", folder)
    return folder


@pytest.fixture(scope="module")
def train(root):
    return ["train", "imagenet", "--data.root", str(root), *words(TINY | SHORT)]


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    """A run that nothing disturbed: 2 epochs of 4 steps, the last of each smaller, in parts of 32."""
    folder = tmp_path_factory.mktemp("runs") / "nano"
    parapos(*train, "--out", folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it that a test may add to. Its classifier is drawn at random: answers after 8 steps are all alike."""
    folder = tmp_path / "nano"
    shutil.copytree(trained, folder)
    model, about = checkpoint.load_weights(folder / "weights.safetensors")
    torch.nn.init.normal_(model.classifier.weight)
    with torch.no_grad():
        model.classifier.bias -= model(images(fit.load_run(folder).dataset("test"))).mean(0)
    checkpoint.export(folder / "weights.safetensors", model.state_dict(), **about)
    return folder


def test_check(root, capsys):
    parapos("prepare", "imagenet", "--check", "--partial", "--root", root)
    found = [[cell.strip() for cell in line.split("|")[1:3]] for line in capsys.readouterr().out.splitlines()]
    for line in (["classes", "12"], ["train images", "240"], ["of them for validation", "12"], ["test images", "36"]):
        assert line in found
    assert ["ImageNet-R images", "12"] in found
    with pytest.raises(SystemExit) as stop:
        cli.main(["prepare", "imagenet", "--check", "--root", str(root)])
    assert stop.value.code == 1
    assert "train images: found 240, expected 1,281,167" in capsys.readouterr().out


def test_killed_and_gone_on_with(train, trained, forked, tmp_path, capsys):
    """SIGKILL once there is a checkpoint. The data is read by a worker there, which changes nothing."""
    folder = tmp_path / "killed"
    death = dict(kill_in="step", nth=3, log=tmp_path / "log")  # in the third step; saved after the second
    assert forked(*train, "--out", folder, "--data.workers", "1", **death)[0] == -signal.SIGKILL
    assert max(checkpoint.steps(folder / "checkpoints")) < 8
    parapos(*train, "--out", folder, "--resume")
    assert f"resuming {folder} at step" in capsys.readouterr().err
    for name in ("metrics.csv", "weights.safetensors", "checkpoints/step-000000008.ckpt"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes(), name


def test_eval_is_what_the_model_says(run, capsys):
    """On the test images, ImageNetV2, and ImageNet-R, which also asks for answers among its own classes."""
    parapos("eval", run)
    parapos("eval", run, "--data", "imagenet_v2", "--size", "96", "--position-scale", "interpolate")
    parapos("eval", run, "--data", "imagenet_r")
    out = capsys.readouterr().out
    assert out.count("top1_4") == 1
    found = rows(run / "evaluations.csv")
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    for row, name, size in zip(found, (None, "imagenet_v2", "imagenet_r"), (64, 96, 64), strict=True):
        dataset = fit.load_run(run).dataset("test", name, size=size)
        with torch.no_grad():
            logits = model(images(dataset), 64 / size)
        assert len(logits.argmax(1).unique()) > 3
        assert int(row["samples"]) == len(dataset)
        assert float(row["top1"]) == pytest.approx(float((logits.argmax(1) == dataset.labels).double().mean()))
        if name == "imagenet_r":
            assert dataset.subset == [0, 3, 6, 9]
            among = torch.tensor(dataset.subset)[logits[:, dataset.subset].argmax(1)]
            assert float(row["top1_4"]) == pytest.approx(float((among == dataset.labels).double().mean()))
            assert float(row["top1_4"]) > float(row["top1"])
        else:
            assert row["top1_4"] == ""


def test_sweep_over_five_resolutions(run, monkeypatch, capsys):
    sizes = [32, 48, 64, 96, 128]
    command = ["sweep", run, "--sizes", ",".join(map(str, sizes)), "--interpolate", "both"]
    parapos(*command)
    told = capsys.readouterr().out
    found = rows(run / "sweep" / "sweep.csv")
    assert [(row["row"], row["column"]) for row in found] == [
        (name, f"{size} px") for name in ("PaPE", "PaPE, interpolated") for size in sizes
    ]
    long = rows(run / "cells.csv")
    assert {row["value"] for row in long if row["metric"] == "samples"} == {"36.0"}
    assert len({row["value"] for row in long if row["metric"] == "loss"}) == 9  # at the trained size both ways are one
    assert (run / "sweep" / "sweep.md").read_text() == told
    assert min(size_of(run / "sweep" / "sweep.png")) > 300
    parapos("eval", run, "--size", "128", "--position-scale", "interpolate")
    (row,) = rows(run / "evaluations.csv")
    assert 100 * float(row["top1"]) == pytest.approx(float(found[-1]["mean"]))
    capsys.readouterr()
    monkeypatch.setattr(fit, "evaluate", None)  # nothing is evaluated twice
    parapos(*command)
    assert capsys.readouterr().out == told


@pytest.mark.full
@pytest.mark.parametrize("name", TABLES)
def test_every_table_says_what_it_would_do(name, root, tmp_path, capsys):
    assert name in recipes.shelf("tables")
    here = {"data.root": root, "data.options.complete": "false"}
    changes = {} if name in ("parameter-matched", "efficiency") else here  # which also want videos, or nothing
    parapos("table", name, "--dry-run", "--root", tmp_path / "runs", *words(changes))
    out = capsys.readouterr().out
    table = tables.load(name)
    assert table.title in out
    assert "hours" in out
    if name == "efficiency":
        assert "14 rows: none, sincos" in out
    else:
        assert f"Measured: 0 of {len(table.rows) * len(table.columns)}." in out
        for run in tables.resolve(table, tmp_path / "runs", {}).runs:
            assert f"parapos train {run.source} --out {run.folder}" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_two_runs_make_a_table(root, tmp_path, monkeypatch, capsys):
    """Two of the seven rows, trained and tested at all nine resolutions; 32-pixel patches keep 1024 pixels cheap. Other
    tables of the same runs only add what they lack."""
    small = {"model.options.patch": 32, "model.options.depth": 1, "optim.epochs": 1, "run.tensorboard": "false"}
    runs, changes = tmp_path / "runs", words(TINY | small | {"data.root": root})
    command = ["table", "extrapolation", "--only", "pape,rope", "--root", runs, *changes]
    parapos(*command)
    out = capsys.readouterr().out
    assert "Measured: 18 of 18." in out
    lines = {line.split("|")[1].strip(): line for line in out.splitlines() if line.startswith("|")}
    for name, papers in (("pape", ("80.6", "74.9")), ("rope", ("80.3", "42.3"))):
        cells = [cell.split() for cell in lines[name].split("|")[2:-1]]
        assert [cells[0][1], cells[-1][1]] == [f"({figure})" for figure in papers]
        long = [row for row in rows(runs / f"imagenet-{name}" / "cells.csv") if row["metric"] == "top1"]
        kept = {parse_qs(row["evaluation"])["size"][0]: float(row["value"]) for row in long}
        assert [ours for ours, _ in cells] == [f"{100 * top1:.1f}" for top1 in kept.values()]
        assert list(kept) == ["224", "320", "384", "448", "512", "640", "768", "896", "1024"]
    whole = (runs / "tables" / "extrapolation.md").read_text()
    assert "Measured: 18 of 63." in whole
    assert whole.count(" - (") == 45
    assert min(size_of(runs / "tables" / "extrapolation.png")) > 300

    parapos("table", "ood", "--only", "pape", "--root", runs, *changes)  # of the same run
    told = capsys.readouterr().out
    assert "Measured: 3 of 3." in told
    parapos("eval", runs / "imagenet-pape", "--data", "imagenet_r")
    (want,) = rows(runs / "imagenet-pape" / "evaluations.csv")
    long = [row for row in rows(runs / "imagenet-pape" / "cells.csv") if "data=imagenet_r" in row["evaluation"]]
    found = {row["metric"]: row["value"] for row in long}
    assert found["top1"] == want["top1"]  # among all classes, as the paper's
    assert found["top1_4"] == want["top1_4"]
    (line,) = (line for line in told.splitlines() if line.startswith("| pape"))
    shown = [f"{100 * float(want[name]):.1f} ({figure})" for name, figure in (("top1", "29.4"), ("top1_4", "-"))]
    assert [cell.strip() for cell in line.split("|")[3:5]] == shown
    capsys.readouterr()

    monkeypatch.setattr(fit, "train", None)  # nothing is done twice
    monkeypatch.setattr(fit, "evaluate", None)
    parapos(*command)
    assert capsys.readouterr().out == out
    parapos("table", "extrapolation-best", *command[2:], "--dry-run")
    rope, pape = (line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {runs}"))
    assert "| finished " in pape
    assert "| finished " in rope
    assert "| 9 of 9 " in pape  # the same cells
    assert "| 0 of 9 " in rope  # interpolated there


@pytest.mark.full
def test_the_efficiency_table_is_measured(tmp_path, capsys, monkeypatch):
    """The table of `parapos bench model`, here of a nano model at a small size."""
    monkeypatch.setattr("parapos.bench.model.PROCESSES", 1)
    table = tmp_path / "small.toml"
    table.write_text("""
title = "Cost of encodings, a nano model"
[bench]
model = "vit_official_nano_patch16"
encodings = ["none", "rope", "pape"]
parabolas = [2]
sizes = [32]
batch = 1
seconds = 0.5
rounds = 2
""")
    command = ["table", table, "--root", tmp_path / "runs"]
    parapos(*command, "--only", "none,pape")
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| pape")]
    counts, costs = lines
    assert counts[0] == costs[0] == "pape m=2"
    assert counts[1] == f"{757_992 + 4 * 4 * 2 * (2 * 128 + 2):,}"
    assert all("x (" in cell or cell.endswith("x") for cell in costs[1:])
    assert "rope" not in "".join(line[0] for line in lines)
    kept = json.loads((tmp_path / "runs" / "tables" / "small.json").read_text())
    assert {(x["row"], x["mode"]) for x in kept["time"]} == {
        (row, mode) for row in ("none", "pape m=2") for mode in ("inference", "training")
    }
    parapos(*command, "--from-cache")
    assert capsys.readouterr().out == out


def test_analyze(run, capsys):
    parapos("analyze", run, "--images", "12", "--index", "5", "--query", "2,3", "--layer", "2", "--head", "4")
    out = run / "analysis"
    heads = json.loads((out / "heads.json").read_text())
    assert heads["samples"] == 12
    for name in ("z", "bounded", "pairs"):
        assert np.array(heads[name], dtype=float).shape == (4, 4)
    assert np.isfinite(np.array(heads["z"])).all()
    assert (np.abs(np.array(heads["bounded"])) <= 1).all()
    maps = np.load(out / "maps.npz")
    for name in ("distance", "direction", "semantics", "attention", "sum"):
        assert maps[name].shape == (4, 4), name
    assert maps["image"].shape == (3, 64, 64)
    assert maps["query"].tolist() == [1, 2]
    assert maps["distance"][1, 2] == maps["direction"][1, 2] == 0
    assert 0 < maps["attention"].sum() < 1  # the class token has the rest
    np.testing.assert_allclose(maps["sum"], maps["distance"] + maps["direction"] + maps["semantics"])
    for name in ("heads.png", "maps.png"):
        assert min(size_of(out / name)) > 200
    assert str(out / "maps.png") in capsys.readouterr().err
