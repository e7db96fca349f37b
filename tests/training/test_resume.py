"""A run that is killed anywhere and taken up again ends with the same bits as one that nothing disturbed."""

import csv
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from parapos.training import checkpoint

from ..marks import full

SMOKE = ("train", "digits_smoke", "--out")
LAST = "checkpoints/step-000000010.ckpt"


def same(folder, straight):
    """All that a run leaves is equal, bit by bit; TensorBoard has times in it and is left out."""
    for name in ("metrics.csv", "weights.safetensors", "recipe.toml", LAST):
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), name


def finish(parapos, folder, log):
    code, told = parapos(*SMOKE, folder, log=log)
    assert code == 0, told
    return told


def test_a_run_is_a_folder(straight, parapos):
    names = {path.name for path in straight.iterdir()}
    assert names == {"recipe.toml", "versions.json", "metrics.csv", "tensorboard", "checkpoints", "weights.safetensors"}
    assert set(checkpoint.steps(straight / "checkpoints")) == {8, 10}
    assert list((straight / "tensorboard").glob("events*"))
    rows = list(csv.DictReader((straight / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["3", "5", "6", "9", "10"]
    assert all(bool(row["val_top1"]) == (row["lr"] == "") for row in rows)
    assert float(rows[3]["lr"]) > 0


def test_a_finished_run_says_so(straight, parapos, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
    code, told = parapos(*SMOKE, straight, log=tmp_path / "log")
    assert code == 0
    assert "is finished" in told
    assert before == {path: path.stat().st_mtime_ns for path in straight.rglob("*")}


@pytest.mark.parametrize(
    "deaths",
    [
        # a step early, the first after resuming, and late; rows are written at 3, 6, 9 and checkpoints at 2, 4, 5, 6, 8
        [("step", 4), ("step", 1), ("step", 1), ("step", 6)],
        # the write of recipe, versions, header of metrics, checkpoint 2; of 5, 8 and 10
        [("write", 1), ("write", 2), ("write", 4), ("write", 5), ("write", 5), ("write", 4)],
        full([("fsync", 1), ("fsync", 7), ("fsync", 9), ("fsync", 12)]),
        full([("replace", 4), ("replace", 5), ("replace", 4), ("replace", 6), ("replace", 4)]),
        # rows of the metrics
        full([("append", 1), ("append", 2), ("append", 3), ("append", 2)]),
    ],
    ids=lambda deaths: deaths[0][0],
)
def test_killed_where_it_hurts(deaths, parapos, straight, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    for where, nth in deaths:
        code, told = parapos(*SMOKE, folder, log=log, kill_in=where, nth=nth)
        assert code == -signal.SIGKILL, told
    assert "resuming" in finish(parapos, folder, log)
    same(folder, straight)
    assert not list(folder.rglob("*.tmp"))


def test_killed_at_any_time(parapos, straight, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    draw = random.Random(time.time_ns())
    codes = []
    for n in range(5):  # the first long before the end, however fast the machine is
        codes.append(parapos(*SMOKE, folder, log=log, kill_after=draw.uniform(0.02, 0.1) * 2**n)[0])
    assert -signal.SIGKILL in codes
    finish(parapos, folder, log)
    same(folder, straight)


@pytest.mark.full
def test_killed_from_outside(environment, straight, tmp_path):
    """The command as a user runs it, with workers, which change nothing."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "parapos.cli", *SMOKE, str(folder), "--data.workers", "1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        path = folder / "checkpoints" / "step-000000002.ckpt"
        until = time.monotonic() + 600
        while not path.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
    assert path.exists()
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"resuming {folder} at step" in done.stderr
    for name in ("metrics.csv", "weights.safetensors"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes()


@pytest.mark.parametrize("cut", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_noticed(cut, parapos, straight, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert parapos(*SMOKE, folder, log=log, kill_in="step", nth=8)[0] == -signal.SIGKILL
    last = max((folder / "checkpoints").glob("*.ckpt"))
    data = bytearray(last.read_bytes())
    if cut == "truncated":
        data = data[: len(data) * 2 // 3]
    else:
        data[len(data) // 2] ^= 1
    last.write_bytes(data)
    told = finish(parapos, folder, log)
    assert f"{last}: " in told
    assert "using the one before it" in told
    same(folder, straight)


@pytest.mark.parametrize(("where", "nth"), [("part", 10), full("part", 20), ("validation", 1), full("validation", 6)])
def test_sigterm_saves_and_leaves(where, nth, parapos, straight, tmp_path):
    """In a step, in the last of an epoch, in the validation in the middle and in the one at the end."""
    folder, log = tmp_path / "run", tmp_path / "log"
    code, told = parapos(*SMOKE, folder, log=log, term_in=where, nth=nth)
    assert code == 143, told
    step = {("part", 10): 3, ("part", 20): 5, ("validation", 1): 5, ("validation", 6): 10}[where, nth]
    saved = checkpoint.step_path(folder / "checkpoints", step)
    assert f"stopped by SIGTERM; saved {saved}" in told
    assert checkpoint.load(saved)["parapos"]["progress"]["step"] == step
    finish(parapos, folder, log)
    same(folder, straight)


@pytest.mark.full
def test_sigterm_to_all_processes_saves_and_leaves(environment, tmp_path):
    """As a cluster or a service manager sends it: to the workers, too."""
    folder = tmp_path / "run"
    long = ("--data.workers", "1", "--optim.epochs", "400", "--run.tensorboard", "false")
    command = [sys.executable, "-m", "parapos.cli", *SMOKE, str(folder), *long]
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        first = checkpoint.step_path(folder / "checkpoints", 2)
        until = time.monotonic() + 600
        while not first.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        told = process.communicate(timeout=600)[1]
    assert process.returncode == 143, told
    last = told.splitlines()[-1]
    saved, damaged = checkpoint.latest(folder / "checkpoints")
    assert f"stopped by SIGTERM; saved {saved}" in last
    assert not damaged
    assert checkpoint.load(saved)["parapos"]["progress"]["step"] == max(checkpoint.steps(folder / "checkpoints"))


@pytest.mark.parametrize(("every", "good"), [("1", 1), ("2", None)])
def test_a_loss_that_is_not_finite_stops_it(every, good, parapos, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    wild = ("--optim.lr", "1e30", "--optim.clip", "0", "--run.save_every", every)
    code, told = parapos(*SMOKE, folder, *wild, log=log)
    assert code == 1, told
    last = told.splitlines()[-1]
    assert "loss is nan at step 2, from samples " in last
    path = good and checkpoint.step_path(folder / "checkpoints", good)
    assert last.endswith(f"; last good checkpoint: {path or 'none yet'}")
    assert list(checkpoint.steps(folder / "checkpoints")) == ([good] if good else [])
    if path:
        assert all(value.isfinite().all() for value in checkpoint.load(path)["state_dict"].values())


def test_it_learns(parapos, tmp_path):
    small = ("--model.options.dim", "32", "--model.options.depth", "2", "--data.size", "16", "--optim.lr", "4e-3")
    options = (*small, "--optim.epochs", "2", "--run.tensorboard", "false")
    code, told = parapos("train", "digits", "--out", tmp_path / "run", *options, log=tmp_path / "log")
    assert code == 0, told
    rows = [row for row in csv.DictReader((tmp_path / "run" / "metrics.csv").open()) if row["val_loss"]]
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[1] < losses[0] < math.log(10)  # which is what a guess costs
    assert float(rows[1]["val_top1"]) > 0.2


def test_resume_wants_a_run(parapos, straight, tmp_path):
    code, told = parapos(*SMOKE, tmp_path / "none", "--resume", log=tmp_path / "log")
    assert (code, told.count("\n")) == (2, 1)
    assert "nothing to resume" in told
    code, told = parapos(*SMOKE, straight, "--optim.lr", "0.1", log=tmp_path / "log")
    assert (code, told.count("\n")) == (2, 1)
    assert "optim.lr: 0.002, now 0.1" in told
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, told = parapos(*SMOKE, tmp_path / "full", log=tmp_path / "log")
    assert (code, told.count("\n")) == (2, 1)
    assert "expected an empty folder or a run" in told


def test_a_run_is_enough_to_evaluate(parapos, straight, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("recipe.toml", "weights.safetensors"):
        (moved / name).write_bytes((straight / name).read_bytes())
    code, told = parapos("eval", moved, "--split", "val", log=tmp_path / "log")
    assert code == 0, told
    (row,) = csv.DictReader((moved / "evaluations.csv").open())
    best = max(csv.DictReader((straight / "metrics.csv").open()), key=lambda row: float(row["val_top1"] or 0))
    assert row["samples"] == "178"
    for name in ("loss", "top1", "precision", "recall", "f1"):
        assert row[name] == best[f"val_{name}"]
    code, told = parapos(
        "eval", moved, "--size", "24", "--position-scale", "interpolate", "--batch", "50", log=tmp_path / "log"
    )
    assert code == 0, told
    row = list(csv.DictReader((moved / "evaluations.csv").open()))[1]
    assert (row["size"], float(row["position_scale"])) == ("24", 16 / 24)
    code, told = parapos("eval", moved, "--size", "30", log=tmp_path / "log")
    assert code == 2
    assert "multiple of the model's patch size 4, got 30" in told


def test_the_average_is_what_is_exported(straight):
    """The run keeps an average; its weights and the average are both in the checkpoint, and differ."""
    state = checkpoint.load(straight / LAST)
    model, about = checkpoint.load_weights(straight / "weights.safetensors")
    assert about["step"] == 10
    average = state["parapos"]["average"]
    for name, p in model.named_parameters():
        assert torch.equal(p, average[name])
    assert not torch.equal(average["classifier.weight"], state["state_dict"]["model.classifier.weight"])
