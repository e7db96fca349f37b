"""nuScenes as a user meets it, on a generated copy with a small network: train, kill, resume, two processes, judge,
export, predict, analyze. Every step is a command; only what is killed needs a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from parapos import predict
from parapos.data.nuscenes_classes import CAMERAS
from parapos.data.readers import sweeps
from parapos.training import checkpoint, fit

from ..driving import driving, tree
from .commands import parapos, rows

WORDS = ["train", "nuscenes_smoke", "--data.options.balance", "false", "--data.options.sweeps", "2"]
WORDS += ["--run.save_every", "1", "--run.tensorboard", "false"]


def words():
    return [*WORDS, "--data.root", str(tree())]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "driving"
    parapos(*words(), "--out", folder)
    return folder


def test_judged_and_submitted(run, tmp_path, capsys):
    parapos("eval", run, "--split", "val", "--predictions", tmp_path)
    assert "mAP: " in capsys.readouterr().out
    parapos("eval", run, "--split", "val", "--data", "nuscenes_lidar")
    found = rows(run / "evaluations.csv")
    assert [row["data"] for row in found] == ["nuscenes", "nuscenes_lidar"]
    for row in found:
        classes = [float(value) for key, value in row.items() if key.startswith("ap_")]
        assert float(row["map"]) == pytest.approx(np.mean(classes))
    written = json.loads((tmp_path / "results_nusc.json").read_text())
    assert list(written["results"]) == [frame.token for frame in driving("val").frames]
    assert written["meta"]["use_camera"]
    boxes = written["results"][driving("val").frames[0].token]
    assert len(boxes) <= 20
    assert all(np.linalg.norm(box["rotation"]) == pytest.approx(1) for box in boxes)
    assert len((tmp_path / "classes.csv").read_text().splitlines()) == 11


def test_the_network_moves_everything_that_reaches_its_boxes(run):
    """Every parameter is in the optimizer once; what changed between two checkpoints is almost all of them."""
    first, last = (checkpoint.load(checkpoint.step_path(run / "checkpoints", step)) for step in (3, 4))
    groups = last["optimizer_states"][0]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    named = [name for name in last["state_dict"] if "running" not in name and "num_batches" not in name]
    assert len(numbers) == len(set(numbers))
    moved = {name for name in named if not torch.equal(first["state_dict"][name], last["state_dict"][name])}
    for part in ("patches.projection.weight", "pillars.pfn_layers.0.linear.weight"):
        assert any(name.endswith(part) for name in moved), part


def test_pictures_of_keyframes(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tree(), folder, ignore=shutil.ignore_patterns("prepared"))
    file = driving("val").frames[1].sweeps[0].file
    parapos("predict", run, folder / file, "--threshold", "0.0", "--out", tmp_path / "out")
    (entry,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["files"]
    assert len(entry["truth"]) == 20
    assert entry["missing_cameras"] == []
    assert entry["boxes"] == sorted(entry["boxes"], key=lambda box: -box["score"])
    with Image.open(tmp_path / "out" / entry["picture"]) as picture:
        assert picture.size == (entry["width"], entry["height"]) == (1200, 1116)
    predictor = predict.load(run, threshold=0.0)
    whole = predictor(folder / file)
    assert len(whole.answers) == len(entry["boxes"])
    for channel in CAMERAS[1:3]:
        shutil.rmtree(folder / "samples" / channel)
    fewer = predictor(folder / file)
    assert fewer.frame.about["missing_cameras"] == list(CAMERAS[1:3])
    assert fewer.draw().size == (1200, 1116)
    shutil.copy(folder / file, tmp_path / "alone.pcd.bin")
    alone = predictor(tmp_path / "alone.pcd.bin")
    assert alone.frame.about["missing_cameras"] == list(CAMERAS)
    assert alone.draw().size == (600, 622)
    sweeps.write(tmp_path / "empty.pcd.bin", np.zeros((0, 5)))
    assert predictor(tmp_path / "empty.pcd.bin").frame.about["points"] == 0


def test_a_pillar_looks_at_the_cameras(run, tmp_path):
    parapos("analyze", run, "--split", "val", "--samples", "1", "--query", "8,8", "--out", tmp_path)
    maps = np.load(tmp_path / "maps.npz")
    total = np.nansum(maps["attention"]) + np.nansum(maps["pillars"])
    assert total == pytest.approx(1.0)
    place = maps["places"][maps["query"]]
    assert np.abs(place - 8).max() < 3
    assert maps["attention"].shape == (6, 8, 22)
    heads = json.loads((tmp_path / "heads.json").read_text())
    assert np.array(heads["bounded"]).shape == (8, 4)


@pytest.mark.full
def test_killed_and_resumed_to_the_bit(run, forked, tmp_path, capsys):
    folder = tmp_path / "killed"
    death = dict(kill_in="step", nth=3, log=tmp_path / "log")  # in the third step; saved after the second
    assert forked(*words(), "--out", folder, **death)[0] == -signal.SIGKILL
    parapos(*words(), "--out", folder, "--resume")
    assert f"resuming {folder} at step" in capsys.readouterr().err
    for name in ("metrics.csv", "weights.safetensors"):
        assert (folder / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.full
def test_two_processes_equal_one(tmp_path):
    more = ["--optim.part", "1", "--optim.epochs", "1", "--run.precision", "64-true"]
    parapos(*words(), *more, "--out", tmp_path / "one")
    devices = ["--run.devices", "2", "--run.accelerator", "cpu", "--run.strategy", "ddp"]
    command = [sys.executable, "-m", "parapos", *words(), *more, *devices, "--out", str(tmp_path / "two")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    one, two = (checkpoint.load(checkpoint.step_path(tmp_path / name / "checkpoints", 2)) for name in ("one", "two"))
    for name, want in one["state_dict"].items():
        found = two["state_dict"][name]
        assert (found.double() - want.double()).norm() <= 1e-8 * max(1e-6, want.double().norm()), name
    a, b = (rows(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert [row["val_map"] for row in a] == [row["val_map"] for row in b]
    assert fit.load_run(tmp_path / "two").task_name == "detection3d"
