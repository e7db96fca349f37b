"""Mixed precision and compilation: the same run otherwise, and as exact to go on with."""

import csv
import signal

import pytest
import torch

from parapos import cli
from parapos.training import checkpoint

LAST = "checkpoints/step-000000010.ckpt"
KEPT = ("metrics.csv", "weights.safetensors", LAST)
SHORT = ("--optim.epochs", "1", "--run.tensorboard", "false")


def losses(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) for name in ("train_loss", "val_loss") if row[name]]


@pytest.mark.full
def test_half_precision_goes_on_to_the_bit(parapos, straight, tmp_path):
    half, killed, log = tmp_path / "half", tmp_path / "killed", tmp_path / "log"
    command = ("train", "digits_smoke", "--run.precision", "bf16-mixed", "--out")
    assert parapos(*command, killed, log=log, kill_in="step", nth=7)[0] == -signal.SIGKILL
    for folder in (half, killed):
        code, told = parapos(*command, folder, log=log)
        assert code == 0, told
    for name in KEPT:
        assert (killed / name).read_bytes() == (half / name).read_bytes(), name
    assert losses(half) != losses(straight)
    assert losses(half) == pytest.approx(losses(straight), rel=0.02)
    state = checkpoint.load(half / LAST)["state_dict"]
    assert {value.dtype for value in state.values()} == {torch.float32}  # the weights themselves are whole


@pytest.mark.full
def test_a_compiled_model_trains_alike(tmp_path, monkeypatch):
    """With the capture of torch.compile and without its compiler, which takes a minute."""
    compiled, real = [], torch.nn.Module.compile

    def capture(self, **options):
        compiled.append(type(self).__name__)
        real(self, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", capture)
    plain, fast = tmp_path / "plain", tmp_path / "fast"
    assert cli.main(["train", "digits_smoke", "--out", str(plain), *SHORT]) == 0
    assert compiled == []
    assert cli.main(["train", "digits_smoke", "--out", str(fast), *SHORT, "--run.compile", "true"]) == 0
    assert compiled == ["ViT"]
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)
    weights = [checkpoint.load_weights(folder / "weights.safetensors")[0].state_dict() for folder in (plain, fast)]
    assert weights[0].keys() == weights[1].keys()
    for name, want in weights[0].items():
        torch.testing.assert_close(weights[1][name], want, rtol=1e-3, atol=1e-4)
