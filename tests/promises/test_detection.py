"""COCO and GEN1 as a user meets them, on generated copies with nano detectors: prepare, train, kill, go on, test, two
processes, other sizes, files for servers, tables. Every step is a command; what is killed has a process of its own."""

import csv
import json
import signal

import pytest
import torch

from parapos import cli
from parapos.data.readers import boxes as box_files
from parapos.training import checkpoint, fit
from tests.marks import full

from .commands import parapos, rows, words

SHORT = {"optim.epochs": "2", "run.save_every": "2", "run.log_every": "2", "run.tensorboard": "false"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with both data sets, prepared."""
    root = tmp_path_factory.mktemp("data")
    for name in ("coco", "gen1"):
        parapos("prepare", name, "--synthetic", "--root", root / name)
    return root


@pytest.fixture(scope="module", params=["coco", full("gen1")])
def subject(request, data, tmp_path_factory):
    """A data set, the command that trains on it, and a run that nothing disturbed."""
    name = request.param
    train = ["train", f"{name}_smoke", "--data.root", str(data / name), *words(SHORT)]
    folder = tmp_path_factory.mktemp("runs") / name
    parapos(*train, "--out", folder)
    return name, train, folder


def test_checked(data, capsys):
    parapos("prepare", "coco", "--check", "--partial", "--root", data / "coco")
    told = capsys.readouterr().out
    assert "train images" in told
    assert "unreadable" in told
    with pytest.raises(SystemExit):
        cli.main(["prepare", "coco", "--check", "--root", str(data / "coco")])
    assert "118,287" in capsys.readouterr().out


def test_eval_and_files_for_servers(subject, data, tmp_path):
    name, _, folder = subject
    parapos("eval", folder, "--predictions", tmp_path / "out")
    (found,) = rows(folder / "evaluations.csv")
    assert 0 <= float(found["map"]) <= 1
    curves = list(csv.reader((tmp_path / "out/precision-recall.csv").open()))
    assert len(curves) == 102
    classes = rows(tmp_path / "out/classes.csv")
    assert float(classes[0]["ap"]) == pytest.approx(float(found[f"ap_{classes[0]['name']}"]), abs=1e-5)
    changes = {"task.options.max_det": "1", "task.options.min_score": "0"}
    parapos("eval", folder, *words(changes), "--predictions", tmp_path / "few")
    assert rows(folder / "evaluations.csv")[-1]["task.options.max_det"] == "1"
    assert cli.main(["eval", str(folder), "--model.encoding", "rope"]) == 2
    dataset = fit.load_run(folder).dataset("test")
    if name == "coco":
        results = json.loads((tmp_path / "out/detections_test2017_parapos_results.json").read_text())
        assert {row["category_id"] for row in results} <= {1, 3, 90}
        assert {row["image_id"] for row in results} <= {image.id for image in dataset.instances.images}
        few = json.loads((tmp_path / "few/detections_test2017_parapos_results.json").read_text())
        assert sorted(row["image_id"] for row in few) == [image.id for image in dataset.instances.images]
    else:
        for clip in dataset.names:
            assert len(box_files.read(tmp_path / "out" / f"{clip}_bbox.npy"))
        assert "psee_map" in found
        assert sum(len(box_files.read(path)) for path in (tmp_path / "few").glob("*_bbox.npy")) == len(dataset)
    history = rows(folder / "metrics.csv")
    assert {"train_box", "train_cls", "train_dfl", "val_map", "val_map50"} <= set(history[0])
    assert float(history[0]["train_box"]) > 0


@pytest.mark.full
def test_killed_and_gone_on_with(subject, forked, tmp_path, capsys):
    _, train, trained = subject
    folder = tmp_path / "killed"
    death = dict(kill_in="step", nth=3, log=tmp_path / "log")  # in the third step; saved after the second
    assert forked(*train, "--out", folder, **death)[0] == -signal.SIGKILL
    parapos(*train, "--out", folder, "--resume")
    assert f"resuming {folder} at step" in capsys.readouterr().err
    for name in ("metrics.csv", "weights.safetensors"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes(), name


@pytest.mark.full
def test_two_processes_equal_one(subject, forked, tmp_path):
    """The same parts, shared out: weights, running statistics and the metrics of both processes agree."""
    _, train, _ = subject
    halves = ["--optim.part", "2", "--optim.batch", "4"]
    one, two = tmp_path / "one", tmp_path / "two"
    parapos(*train, *halves, "--out", one)
    codes, told = forked(*train, *halves, "--out", two, log=tmp_path / "log", processes=2)
    assert codes == [0, 0], told
    histories = [rows(folder / "metrics.csv") for folder in (one, two)]
    assert len(histories[0]) == len(histories[1])
    for want, found in zip(*histories, strict=True):
        for key, value in want.items():
            assert found[key] == value or float(found[key]) == pytest.approx(float(value), abs=1e-3), key
    newest = [checkpoint.latest(folder / "checkpoints")[0] for folder in (one, two)]
    first, second = (checkpoint.load(path)["state_dict"] for path in newest)
    for key, want in first.items():
        if torch.is_floating_point(want):
            assert (second[key] - want).norm() <= 1e-4 * want.norm() + 1e-6, key
    (two / "weights.safetensors").write_bytes((one / "weights.safetensors").read_bytes())
    parapos("eval", one)
    assert forked("eval", two, log=tmp_path / "log", processes=2)[0] == [0, 0]
    (want,), (found,) = (rows(folder / "evaluations.csv") for folder in (one, two))
    assert want == found


def test_other_sizes(subject, tmp_path, capsys):
    """mAP at sizes that training never saw, with and without interpolated positions."""
    name, _, folder = subject
    argv = ["sweep", str(folder), "--sizes", "64,96,128", "--out", str(tmp_path)]
    if name == "gen1":
        assert cli.main(argv) == 2
        assert "has no size to sweep" in capsys.readouterr().err
        return
    parapos(*argv)
    table = (tmp_path / "sweep.md").read_text()
    assert "interpolated" in table
    assert all(f"{size} px" in table for size in (64, 96, 128))
    assert "mAP" in table
    assert (tmp_path / "sweep.png").is_file()


@pytest.mark.full
def test_cells_of_the_table(data, tmp_path, capsys):
    """The table of all data sets has cells for boxes; here with small models and generated copies."""
    table = tmp_path / "boxes.toml"
    table.write_text(
        'title = "Boxes"\nrecipe = "coco_smoke"\n[rows]\npape = { "model.encoding" = "pape" }\n'
        'rope = { "model.encoding" = "rope" }\n[columns]\n'
        'gen1 = { recipe = "gen1_smoke", root = "gen1" }\ncoco = { root = "coco", split = "val" }\n'
    )
    argv = ["table", table, "--root", tmp_path / "runs", "--data.root", data, "--optim.epochs", "1"]
    parapos(*argv)
    told = capsys.readouterr().out
    assert "mAP in %" in told
    assert "Measured: 4 of 4." in told
    parapos("table", "generality", "--dry-run", "--data.root", "data")
    told = capsys.readouterr().out
    assert "--data.root data/coco" in told
    assert "--data.root data/gen1" in told
    assert "gen1-lookhere" not in told
