"""Two processes train as one does, and evaluate every sample once, whoever starts them."""

import csv
import json
import subprocess
import sys

import pytest

from parapos.training import checkpoint

# In float64 the order of sums changes weights by about 1e-15 of their norm, and five steps of Adam change that little.
# A sample that is lost, doubled, weighted or mixed otherwise changes them by more than 1e-3. 1e-10 tells these apart.
CHANGES = ("--run.precision", "64-true", "--optim.epochs", "1", "--run.tensorboard", "false")
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


@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["torchrun", "devices"])
def test_two_processes_equal_one(launcher, one, start, tmp_path):
    """4 whole steps and one of 242 samples, 2 parts for each process; 3 evaluation batches, so one process runs out."""
    two = tmp_path / "two"
    own = () if launcher else ("--run.devices", "2", "--run.accelerator", "cpu", "--run.strategy", "ddp")
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


def test_two_processes_evaluate_every_sample_once(straight, parapos, start, tmp_path):
    """353 images in 7 batches: the last one is not full, and one process has nothing to do at the end."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("recipe.toml", "weights.safetensors"):
            (tmp_path / name / file).write_bytes((straight / file).read_bytes())
    code, told = parapos("eval", tmp_path / "one", "--batch", "51", log=tmp_path / "log")
    assert code == 0, told
    out = start(TORCHRUN, "eval", tmp_path / "two", "--batch", "51")
    assert out.count("| digits ") == 1
    (want,), (found,) = (list(csv.DictReader((tmp_path / f / "evaluations.csv").open())) for f in ("one", "two"))
    assert float(found.pop("loss")) == pytest.approx(float(want.pop("loss")), rel=1e-6)
    assert found == want
    assert found["samples"] == "353"
