"""A task that is not classification, from a plug-in, through sweeps, tables and plots by its own metrics."""

import csv
import sys
from pathlib import Path

import pytest

from parapos import cli, list_encodings
from parapos.bench import measure
from parapos.data import DATASETS
from parapos.encodings import ENCODINGS
from parapos.encodings.looks import LOOKS
from parapos.experiments import tables
from parapos.models import MODELS
from parapos.tasks import TASKS
from parapos.training import fit

FOLDER = Path(__file__).parents[1] / "plugins" / "toy_boxes"
SQUARES = FOLDER / "squares.toml"
QUICK = ["--optim.epochs", "1"]
TABLE = f"""
title = "Boxes around squares"
recipe = "{SQUARES}"

[rows]
pape = {{ "model.encoding" = "pape", "data.size" = 16 }}
toy_shift = {{ "model.encoding" = "toy_shift", "data.size" = 16 }}

[columns]
16 = {{ size = 16 }}
24 = {{ size = 24, data = "toy_squares" }}
"""
RAGGED = f"""
title = "Boxes in images that are not square"
recipe = "{SQUARES}"

[rows]
pape = {{ "model.encoding" = "pape" }}

[columns]
overlap = {{ split = "val" }}
distance = {{ metric = "distance" }}
"""
STUDY = TABLE.replace(f'recipe = "{SQUARES}"', f'seeds = [1, 2]\n[blocks]\nsquares = "{SQUARES}"') + (
    "loss = { loss_at = 2 }\n"
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch, registries):
    """The plug-in can be imported, here and in other processes, and is forgotten after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{Path(cli.__file__).parents[1]}")
    sys.modules.pop("toy_boxes", None)
    yield
    sys.modules.pop("toy_boxes", None)


def parapos(*words):
    return cli.main([str(word) for word in words])


def forget():
    """The plug-in, as in a new process."""
    sys.modules.pop("toy_boxes", None)
    for registry in (DATASETS, ENCODINGS, LOOKS, MODELS, TASKS):
        for name in [name for name in registry if name.startswith("toy_")]:
            del registry[name]


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def is_png(path):
    return path.read_bytes()[1:4] == b"PNG"


def test_sweep(tmp_path, capsys):
    runs = []
    for encoding in ("pape", "toy_shift"):
        runs.append(tmp_path / encoding)
        changes = ("--data.size", 16, "--model.encoding", encoding)
        assert parapos("train", SQUARES, "--out", runs[-1], *changes, *QUICK) == 0
    capsys.readouterr()
    words = ["--sizes", "16,24", "--out", tmp_path / "out"]
    assert parapos("sweep", *runs, *words) == 0
    out = capsys.readouterr().out
    assert "Mean IoU in %" in out
    assert "| shift, interpolated |" in out
    found = rows_of(tmp_path / "out" / "sweep.csv")
    assert {row["metric"] for row in found} == {"miou"}
    assert len(found) == 8
    shown = next(row for row in found if (row["row"], row["column"]) == ("shift", "24 px"))
    assert parapos("eval", runs[1], "--size", 24) == 0
    (evaluated,) = rows_of(runs[1] / "evaluations.csv")
    assert float(shown["mean"]) == pytest.approx(100 * float(evaluated["miou"]))
    assert is_png(tmp_path / "out" / "sweep.png")
    capsys.readouterr()
    assert parapos("sweep", *runs, *words) == 0
    assert capsys.readouterr().out == out


def test_sweep_of_weights_alone(tmp_path, capsys):
    run = tmp_path / "run"
    assert parapos("train", SQUARES, "--out", run, "--data.size", 16, *QUICK) == 0
    forget()
    out = tmp_path / "out"
    words = ["--recipe", SQUARES, "--sizes", 24, "--interpolate", "off", "--out", out]
    assert parapos("sweep", run / "weights.safetensors", *words) == 0
    assert fit.load_run(out).plugins == ("toy_boxes",)
    assert [row["metric"] for row in rows_of(out / "sweep.csv")] == ["miou"]


def test_table(tmp_path, capsys):
    path = tmp_path / "boxes.toml"
    path.write_text(TABLE)
    root = tmp_path / "runs"
    words = ["table", path, "--root", root, *QUICK]
    assert parapos(*words, "--dry-run") == 0
    assert not root.exists()
    capsys.readouterr()
    assert parapos(*words) == 0
    out = capsys.readouterr().out
    assert "Mean IoU in %" in out
    assert "Measured: 4 of 4." in out
    found = rows_of(root / "tables" / "boxes.csv")
    assert {row["metric"] for row in found} == {"miou"}
    assert all(0 < float(row["mean"]) < 100 for row in found)
    assert is_png(root / "tables" / "boxes.png")
    assert parapos(*words, "--from-cache") == 0
    assert capsys.readouterr().out == out


def test_table_of_samples_that_are_not_square(tmp_path, capsys):
    path = tmp_path / "ragged.toml"
    path.write_text(RAGGED)
    root = tmp_path / "runs"
    assert parapos("table", path, "--root", root, *QUICK) == 0
    assert "Mean IoU in %, L1 distance in px." in capsys.readouterr().out
    overlap, distance = rows_of(root / "tables" / "ragged.csv")
    assert (overlap["metric"], distance["metric"]) == ("miou", "distance")
    (validated,) = (row for row in rows_of(root / "squares-pape" / "metrics.csv") if row["val_miou"])
    assert float(overlap["mean"]) == pytest.approx(100 * float(validated["val_miou"]))


def test_study_over_seeds(tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    out = tmp_path / "out"
    words = ["table", path, "--root", tmp_path / "runs", "--results", out]
    assert parapos(*words, "--jobs", 1, *QUICK) == 0
    told = capsys.readouterr().out
    assert "Mean IoU in %, mean ± sample standard deviation of 2 runs with seeds 1 and 2" in told
    assert {row["metric"] for row in rows_of(out / "cells.csv")} == {"samples", "miou", "distance"}
    plots = sorted(file.name for file in out.glob("*.png"))
    assert len(plots) == 2, plots
    assert all(is_png(out / name) for name in plots)
    for name in plots:
        (out / name).unlink()
    assert parapos(*words, "--from-cache") == 0
    assert sorted(file.name for file in out.glob("*.png")) == plots


def test_metrics_and_data_that_nobody_has(tmp_path, capsys):
    path = tmp_path / "wrong.toml"
    for old, new, message in (
        ('metric = "distance"', 'metric = "top1"', "metric: .*miou, distance"),
        ('metric = "distance"', 'data = "toy_circles"', "columns.distance.data: expected one of .*toy_squares"),
    ):
        path.write_text(RAGGED.replace(old, new))
        with pytest.raises(tables.ReportError, match=message):
            tables.resolve(tables.load(path), tmp_path, {})


def test_analysis_and_figures_load_the_plugins_of_a_run(tmp_path):
    run = tmp_path / "run"
    assert parapos("train", SQUARES, "--out", run, "--data.size", 16, *QUICK) == 0
    for words in (["analyze", run, "--samples", 2], ["figure", "heads", "--run", run]):
        forget()
        assert parapos(*words, "--out", tmp_path / words[0]) == 0
        assert is_png(tmp_path / words[0] / "heads.png")


def test_plugins_by_name_on_the_command_line(tmp_path, capsys):
    """For commands that have no recipe to name them in: demo, bench, and processes that they start."""
    words = ["demo", "--quick", "--encodings", "toy_shift", "--out", tmp_path / "demo"]
    assert parapos(*words) == 2
    assert "unknown 'toy_shift', expected some of" in capsys.readouterr().err
    assert parapos("--plugin", "toy_boxes", *words) == 0
    assert "shift gets" in capsys.readouterr().out
    assert fit.load_run(tmp_path / "demo" / "runs" / "toy_shift").plugins == ("toy_boxes",)
    forget()
    bench = ["bench", "profile", "--encoding", "toy_shift", "--plugin=toy_boxes", "--rounds", 1]
    assert parapos(*bench, "--model", "vit_nano_patch4", "--size", 16) == 0
    assert "toy_shift" in capsys.readouterr().out
    names = measure.apart(list_encodings)
    assert names is not None
    assert "toy_shift" in names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plugin", "no_such_module", "doctor"], "--plugin: cannot import 'no_such_module': No module named"),
        (["doctor", "--plugin"], "--plugin: expected the name of a module"),
    ],
)
def test_plugins_that_cannot_be_loaded(words, message, capsys):
    assert parapos(*words) == 2
    assert capsys.readouterr().err.startswith(f"parapos: {message}")
