"""Two processes train as one does, evaluate every sample once, whoever starts them, and end together."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parapos.training import checkpoint

# In float64 the order of sums changes weights by about 1e-15 of their norm, and five steps of Adam change that little.
# A sample that is lost, doubled, weighted or mixed otherwise changes them by more than 1e-3. 1e-10 tells these apart.
CHANGES = ("--run.precision", "64-true", "--optim.epochs", "1", "--run.tensorboard", "false")
DEVICES = ("--run.devices", "2", "--run.accelerator", "cpu", "--run.strategy", "ddp")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def one(parapos, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    code, told = parapos("train", "digits_smoke", "--out", folder, *CHANGES, log=folder.parent / "log")
    assert code == 0, told
    return folder


@pytest.fixture
def start(environment):
    """start(launcher, *words): a command of parapos in two processes, by torchrun or by itself; what it printed."""

    def run(launcher, *words):
        command = [sys.executable, *launcher, "-m", "parapos.cli", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("launcher", [pytest.param(TORCHRUN, marks=pytest.mark.full), ()], ids=["torchrun", "devices"])
def test_two_processes_equal_one(launcher, one, start, tmp_path):
    """4 whole steps and one of 242 samples, 2 parts for each process; 3 evaluation batches, so one process runs out."""
    two = tmp_path / "two"
    own = () if launcher else DEVICES
    out = start(launcher, "train", "digits_smoke", "--out", two, *CHANGES, *own)
    assert out.count("is finished") == 1

    assert [json.loads((f / "versions.json").read_text())[-1]["processes"] for f in (one, two)] == [1, 2]
    first, second = (checkpoint.load(checkpoint.step_path(f / "checkpoints", 5)) for f in (one, two))
    assert first["parapos"]["progress"]["step"] == second["parapos"]["progress"]["step"] == 5
    for values in (lambda state: state["state_dict"], lambda state: state["parapos"]["average"]):
        for name, want in values(first).items():
            assert (values(second)[name] - want).norm() <= 1e-10 * want.norm(), name
    a, b = (list(csv.DictReader((f / "metrics.csv").open())) for f in (one, two))
    assert len(a) == len(b) == 2
    for want, found in zip(a, b, strict=True):
        for name, value in want.items():
            if name in ("val_loss", "train_loss") and value:
                assert abs(float(found[name]) - float(value)) < 1e-6
            else:
                assert found[name] == value, name


def test_two_processes_evaluate_every_sample_once(straight, parapos, tmp_path):
    """353 images in 7 batches: the last one is not full, and one process has nothing to do at the end."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("recipe.toml", "weights.safetensors"):
            (tmp_path / name / file).write_bytes((straight / file).read_bytes())
    code, told = parapos("eval", tmp_path / "one", "--batch", "51", log=tmp_path / "log")
    assert code == 0, told
    codes, told = parapos("eval", tmp_path / "two", "--batch", "51", log=tmp_path / "both", processes=2)
    assert codes == [0, 0], told
    assert told.count("| digits ") == 1
    (want,), (found,) = (list(csv.DictReader((tmp_path / f / "evaluations.csv").open())) for f in ("one", "two"))
    assert float(found.pop("loss")) == pytest.approx(float(want.pop("loss")), rel=1e-6)
    assert found == want
    assert found["samples"] == "353"


def second(main):
    """The process that a run of two started by itself."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another's
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == main and b"LOCAL_RANK=1" in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise AssertionError(f"{main} has no second process")


@pytest.fixture
def signalled(environment, tmp_path):
    """signalled(send): a run of two processes in which `send(pid)` is called at a checkpoint; its folder, how it ended
    and what it said."""

    def run(send):
        folder = tmp_path / "run"
        words = ["train", "digits_smoke", "--out", str(folder), *CHANGES, *DEVICES, "--run.save_every", "1"]
        command = [sys.executable, "-m", "parapos.cli", *words, "--optim.epochs", "200"]
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
            try:
                until = time.monotonic() + 600
                while not checkpoint.steps(folder / "checkpoints") and process.poll() is None:
                    assert time.monotonic() < until
                    time.sleep(0.01)
                send(process.pid)
                told = process.communicate(timeout=600)[1]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return folder, process.returncode, told

    return run


@pytest.mark.parametrize("send", [pytest.param(os.kill, marks=pytest.mark.full), os.killpg], ids=["first", "both"])
def test_sigterm_stops_both_after_a_checkpoint(send, signalled):
    folder, code, told = signalled(lambda pid: send(pid, signal.SIGTERM))
    assert code == 143, told
    saved, damaged = checkpoint.latest(folder / "checkpoints")
    assert f"stopped by SIGTERM; saved {saved}" in told
    assert not damaged


def test_a_process_that_dies_takes_the_other_along(parapos, tmp_path):
    """No process waits for ever, and the same command resumes."""
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ("train", "digits_smoke", "--out", folder, *CHANGES, "--run.save_every", "1")
    codes, told = parapos(*words, log=log, processes=2, rank=1, kill_in="step", nth=3)
    assert codes[1] == -signal.SIGKILL, told
    assert codes[0] not in (0, 143), told
    assert max(checkpoint.steps(folder / "checkpoints")) in (1, 2)
    codes, told = parapos(*words, log=log, processes=2)
    assert codes == [0, 0], told
    assert f"resuming {folder} at step" in told


@pytest.mark.full
def test_one_that_dies_takes_the_other_along(signalled, parapos, tmp_path):
    """No process waits for ever, and the run goes on from its last checkpoint."""
    folder, code, told = signalled(lambda pid: os.kill(second(pid), signal.SIGKILL))
    assert code not in (0, 143), told
    done = max(checkpoint.steps(folder / "checkpoints"))
    alone = ("--run.devices", "1", "--run.strategy", "auto")
    code, told = parapos("train", folder, *alone, log=tmp_path / "log", term_in="part", nth=1)
    assert code == 143, told
    assert f"resuming {folder} at step {done} of 1000" in told


@pytest.mark.full
def test_a_loss_that_is_not_finite_stops_both(environment, tmp_path):
    words = ["train", "digits_smoke", "--out", str(tmp_path / "run"), *CHANGES, *DEVICES, "--run.save_every", "1"]
    command = [sys.executable, "-m", "parapos.cli", *words, "--optim.lr", "1e200", "--optim.clip", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "last good checkpoint" in done.stderr
