"""Two processes train as one does, and evaluate every sample once."""

import csv
import json
import subprocess
import sys

from parapos.training import checkpoint

# In float64 the order of sums changes weights by about 1e-15 of their norm, and five steps of Adam change that little.
# A sample that is lost, doubled, weighted or mixed otherwise changes them by more than 1e-3. 1e-10 tells these apart.
CHANGES = ("--run.precision", "64-true", "--optim.epochs", "1", "--run.tensorboard", "false")


def test_two_processes_equal_one(parapos, environment, tmp_path):
    """4 whole steps and one of 242 samples, 2 parts for each process; 3 evaluation batches, so one process runs out."""
    one, two = tmp_path / "one", tmp_path / "two"
    code, told = parapos("train", "digits_smoke", "--out", one, *CHANGES, log=tmp_path / "log")
    assert code == 0, told
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "parapos.cli", "train", "digits_smoke", "--out", str(two), *CHANGES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is finished") == 1

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
