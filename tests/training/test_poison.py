"""Poisoned files and poisoned samples: nothing of theirs runs, and what is said is enough to go on."""

import signal

import pytest
import torch

from parapos import cli
from parapos.data.digits import Digits
from parapos.data.sampling import Key, Plan
from parapos.training import checkpoint

from .test_checkpoint import Evil

SMOKE = ("train", "digits_smoke", "--out")


def test_a_malicious_checkpoint_is_refused(parapos, tmp_path):
    folder, log, mark = tmp_path / "run", tmp_path / "log", tmp_path / "ran"
    assert parapos(*SMOKE, folder, log=log, kill_in="step", nth=8)[0] == -signal.SIGKILL
    last = max((folder / "checkpoints").glob("*.ckpt"))
    state = checkpoint.load(last)
    state["parapos"]["progress"]["step"] = Evil(mark)
    torch.save(state, last)
    code, told = parapos(*SMOKE, folder, log=log)
    assert (code, told.count("\n")) == (2, 1)
    assert told.startswith(f"parapos train: {last}: refused, expected plain types alone")
    assert not mark.exists()


def test_malicious_weights_are_refused(parapos, straight, tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "ran"
    folder.mkdir()
    (folder / "recipe.toml").write_bytes((straight / "recipe.toml").read_bytes())
    torch.save({"x": Evil(mark)}, folder / "weights.safetensors")
    code, told = parapos("eval", folder, log=tmp_path / "log")
    assert (code, told.count("\n")) == (2, 1)
    assert told.startswith(f"parapos eval: {folder / 'weights.safetensors'}: not safetensors")
    assert not mark.exists()


PLAIN = ("--augment.mixup", "0", "--augment.cutmix", "0", "--run.tensorboard", "false")  # no sample mixed into another


def test_a_poisoned_sample_is_named(tmp_path, capsys, monkeypatch):
    """Its image becomes NaN in the second epoch. Healed, the run goes on as if nothing had been."""
    bad, folder, healthy = 77, tmp_path / "run", tmp_path / "healthy"
    plan = Plan(samples=len(Digits("train")), batch=256, part=64)
    (step,) = (
        step
        for step in range(plan.steps, 2 * plan.steps)
        for part in range(plan.parts)
        if Key(bad, 1) in plan.keys(step, part)
    )
    real = Digits.__getitem__

    def poisoned(self, key):
        sample = real(self, key)
        if key == Key(bad, 1):
            sample["image"] = sample["image"] * torch.nan
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(Digits, "__getitem__", poisoned)
        with pytest.raises(SystemExit) as stop:
            cli.main([*SMOKE, str(folder), *PLAIN])
    assert stop.value.code == 1
    good, _ = checkpoint.latest(folder / "checkpoints")
    assert good == checkpoint.step_path(folder / "checkpoints", max(s for s in (5, 6, 8) if s <= step))
    told = f"loss is nan at step {step + 1}, from samples {bad}; last good checkpoint: {good}"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert all(weights.isfinite().all() for weights in checkpoint.load(good)["state_dict"].values())

    for run in (folder, healthy):
        assert cli.main([*SMOKE, str(run), *PLAIN]) == 0
    for name in ("metrics.csv", "weights.safetensors", "checkpoints/step-000000010.ckpt"):
        assert (folder / name).read_bytes() == (healthy / name).read_bytes(), name
