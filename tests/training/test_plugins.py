"""A task, a model, a dataset and an encoding from outside of the package, through every part of the engine."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import parapos as library
from parapos import cli, plugins
from parapos.encodings.looks import LOOKS
from parapos.training import checkpoint, fit, recipe
from parapos.training.recipe import RecipeError

FOLDER = Path(__file__).parents[1] / "plugins" / "toy_boxes"
SQUARES = FOLDER / "squares.toml"
LAST = "checkpoints/step-000000006.ckpt"


@pytest.fixture(autouse=True)
def _importable(monkeypatch, registries):
    """The plug-in can be imported, and is forgotten after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("toy_boxes", None)


@pytest.fixture(scope="module")
def one(parapos, tmp_path_factory):
    """A run of the toy task that nothing disturbed, in float64."""
    folder = tmp_path_factory.mktemp("toy") / "run"
    code, told = parapos("train", SQUARES, "--out", folder, "--run.precision", "64-true", log=folder.parent / "log")
    assert code == 0, told
    assert "best val_miou" in told
    return folder


def test_killed_and_resumed_to_the_bit(one, parapos, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    command = ("train", SQUARES, "--out", folder, "--run.precision", "64-true")
    for where, nth in (("step", 4), ("append", 2), ("write", 3)):
        code, told = parapos(*command, log=log, kill_in=where, nth=nth)
        assert code == -signal.SIGKILL, told
    assert parapos(*command, log=log)[0] == 0
    for name in ("metrics.csv", "weights.safetensors", "recipe.toml", LAST):
        assert (folder / name).read_bytes() == (one / name).read_bytes(), name


def test_two_processes_equal_one(one, parapos, tmp_path):
    """The weight of a step is the number of boxes in all parts of all processes; 8 samples are left for the last."""
    two = tmp_path / "two"
    words = ("train", SQUARES, "--out", two, "--run.precision", "64-true", "--run.strategy", "ddp")
    codes, told = parapos(*words, log=tmp_path / "log", processes=2)
    assert codes == [0, 0], told
    first, second = (checkpoint.load(folder / LAST) for folder in (one, two))
    for values in (lambda state: state["state_dict"], lambda state: state["parapos"]["average"]):
        for name, want in values(first).items():
            assert (values(second)[name] - want).norm() <= 1e-10 * want.norm(), name
    a, b = (list(csv.DictReader((folder / "metrics.csv").open())) for folder in (one, two))
    assert len(a) == len(b) == 5
    for want, found in zip(a, b, strict=True):
        assert {k: float(v or 0) for k, v in found.items()} == pytest.approx(
            {k: float(v or 0) for k, v in want.items()}
        )


def test_evaluation_by_its_own_metrics(one, tmp_path, capsys):
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("recipe.toml", "weights.safetensors"):
        shutil.copy(one / name, moved)
    assert cli.main(["eval", str(moved), "--split", "val", "--predictions", str(tmp_path / "boxes")]) == 0
    (row,) = csv.DictReader((moved / "evaluations.csv").open())
    best = max(csv.DictReader((one / "metrics.csv").open()), key=lambda row: float(row["val_miou"] or 0))
    for name in ("miou", "distance"):
        assert row[name] == best[f"val_{name}"]
    assert row["size"] == "16x24"
    assert "mean IoU: " in capsys.readouterr().out
    boxes = json.loads((tmp_path / "boxes" / "boxes.json").read_text())
    assert len(boxes) == 20
    assert {len(part) for part in boxes.values()} > {1, 2}
    found = fit.evaluate(moved, size=(32, 48), position_scale=0.5)
    assert set(found) == {"samples", "miou", "distance"}
    assert [metric.name for metric in fit.metrics_of(moved)] == ["miou", "distance"]
    assert fit.headline_of(moved).label == "mean IoU"


def test_the_run_names_its_plugins(one, monkeypatch):
    assert fit.load_run(one).plugins == ("toy_boxes",)
    assert checkpoint.load_weights(one / "weights.safetensors")[1]["plugins"] == ["toy_boxes"]


def test_unknown_plugins_are_told(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    for value, message in (
        ('["no_such_module"]', "plugins: cannot import 'no_such_module': No module named.*PYTHONPATH"),
        ('"toy_boxes"', "plugins: expected a list of names of modules, got 'toy_boxes'"),
        ('["broken_plugin"]', "plugins: cannot import 'broken_plugin': ZeroDivisionError: division by zero"),
    ):
        (tmp_path / "broken_plugin.py").write_text("1 / 0")
        monkeypatch.syspath_prepend(str(tmp_path))
        path.write_text(f'plugins = {value}\nextends = "digits"\n')
        with pytest.raises(RecipeError, match=f"mine.toml: {message}"):
            recipe.load(path)


def test_options_of_a_task(tmp_path):
    with pytest.raises(RecipeError, match=r"task.options.centre: .*expected some of center; did you mean 'center'"):
        recipe.load(SQUARES, {"task.options.centre": "1"})
    with pytest.raises(RecipeError, match=r"augment.smoothing: task toy_boxes has no smoothing, expected 0"):
        recipe.load(SQUARES, {"augment.smoothing": "0.1"})
    with pytest.raises(RecipeError, match=r"task.name: expected one of classification, .*did you mean 'toy_boxes'"):
        recipe.load(SQUARES, {"task.name": "toy_box"})
    with pytest.raises(
        RecipeError, match=r"data.size: expected a multiple of the model's patch size 8, got \(16, 20\)"
    ):
        recipe.load(SQUARES, {"data.size": "[16, 20]"})


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (
            SQUARES,
            {"task.name": "classification", "task.options": "{}", "model.name": "vit_nano_patch4", "data.size": "16"},
            "task classification: expected a dataset with `classes`, Squares has none; change task.name or data.name",
        ),
        (
            SQUARES,
            {"task.name": "classification", "task.options": "{}"},
            "squares.toml: task.name: classification sets num_classes, which model toy_box_net does not take",
        ),
        (
            "digits_smoke",
            {"task.name": "toy_boxes", "augment.mixup": "0", "augment.cutmix": "0", "augment.smoothing": "0"},
            "task toy_boxes: expected samples with 'target', they have image, label, id; change task.name or data.name",
        ),
    ],
)
def test_a_task_that_does_not_fit_its_data(source, changes, message, tmp_path, capsys):
    words = [word for key, value in changes.items() for word in (f"--{key}", value)]
    assert cli.main(["--plugin", "toy_boxes", "train", str(source), "--out", str(tmp_path / "run"), *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"parapos train: {message}"


def test_an_encoding_from_outside(tmp_path):
    recipe.load(SQUARES)
    import toy_boxes

    assert "toy_shift" in library.list_encodings()
    assert LOOKS["toy_shift"] == ("shift", "#112233")
    library.register_encoding("toy_shift", toy_boxes.Shift, label="shift", color="#112233")
    with pytest.raises(ValueError, match="encoding 'pape' is taken by PaPE"):
        library.register_encoding("pape", toy_boxes.Shift)
    with pytest.raises(TypeError, match="Encoding must say what it promises"):
        library.register_encoding("other", library.Encoding)
    with pytest.raises(ValueError, match="color must be '#rrggbb', got 'red'"):
        library.register_encoding("other", toy_boxes.Shift, color="red")
    with pytest.raises(ValueError, match="model 'vit_nano_patch4' is taken by ViT"):
        library.register_model("vit_nano_patch4", toy_boxes.BoxNet)
    with pytest.raises(ValueError, match="dataset 'digits' is there already"):
        library.register_dataset("digits", toy_boxes.Squares)
    words = ["train", str(SQUARES), "--out", str(tmp_path / "run"), "--model.encoding", "toy_shift"]
    assert cli.main([*words, "--optim.epochs", "1"]) == 0
    assert fit.evaluate(tmp_path / "run")["miou"] > 0


def test_a_plugin_of_its_own_wheel(tmp_path, environment):
    """Built and installed elsewhere, its entry point makes it known to commands that never heard of it."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*install, "--target", target, source], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.splitlines()[-1:]}")
    recipe_file = tmp_path / "mine.toml"
    recipe_file.write_text(SQUARES.read_text().replace('plugins = ["toy_boxes"]\n', ""))
    package = Path(library.__file__).parents[1]
    known = {**environment, "PYTHONPATH": os.pathsep.join([str(target), str(package)])}
    words = ["train", str(recipe_file), "--out", str(tmp_path / "run"), "--optim.epochs", "1"]
    command = [sys.executable, "-m", "parapos.cli", *words]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best val_miou" in done.stdout


def test_a_broken_entry_point_is_told(monkeypatch, capsys):
    class Broken:
        name, value = "bad", "bad_module"

        def load(self):
            raise ImportError("no such thing")

    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [Broken()])
    plugins.load_installed.cache_clear()
    plugins.load_installed()
    assert capsys.readouterr().err == "parapos: plug-in bad (bad_module): ImportError: no such thing\n"
    plugins.load_installed.cache_clear()
