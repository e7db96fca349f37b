"""nuScenes as a user meets it, on a generated copy with a small network: train, kill, resume, two processes, judge,
export, predict, analyze. Every step is a command; only what is killed needs a process of its own."""

import json
import shutil
import signal

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


def test_every_parameter_is_in_the_optimizer_once_and_moves(run):
    """From where the recipe's seed put it. Biases of the branch that nothing reads start at 0, where decay leaves
    them."""
    recipe, last = fit.load_run(run), checkpoint.load(checkpoint.step_path(run / "checkpoints", 4))
    torch.manual_seed(recipe.run.seed)
    first = dict(recipe.model.build({"num_classes": 10}).named_parameters())
    groups = last["optimizer_states"][0]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    assert sorted(numbers) == list(range(len(first)))
    still = [name for name, p in first.items() if torch.equal(p, last["state_dict"][f"model.{name}"])]
    unread = ("backbone.blocks.3.layers.1.image.", "backbone.blocks.3.image_norm.")
    assert all(name.startswith(unread) and name.endswith("bias") for name in still), still


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
def test_two_processes_equal_one(forked, tmp_path):
    """Parts of one frame each, so that two processes see what one sees, batch norms included."""
    more = [*words(), "--optim.part", "1", "--optim.epochs", "1", "--run.precision", "64-true"]
    parapos(*more, "--out", tmp_path / "one")
    codes, told = forked(*more, "--out", tmp_path / "two", log=tmp_path / "log", processes=2)
    assert codes == [0, 0], told
    one, two = (checkpoint.load(checkpoint.step_path(tmp_path / name / "checkpoints", 2)) for name in ("one", "two"))
    for name, want in one["state_dict"].items():
        found = two["state_dict"][name]
        assert (found.double() - want.double()).norm() <= 1e-8 * max(1e-6, want.double().norm()), name
    a, b = (rows(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert [row["val_map"] for row in a] == [row["val_map"] for row in b]
    assert fit.load_run(tmp_path / "two").task_name == "detection3d"
