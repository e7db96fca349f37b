"""`model.init`: a run starts from the backbone of another one."""

import re
import shutil
import signal

import pytest
import torch

from parapos import cli
from parapos.training import checkpoint

SHORT = ("--optim.epochs", "1", "--run.tensorboard", "false", "--optim.lr", "1e-9", "--optim.weight_decay", "0")


def weights(folder):
    return checkpoint.load_weights(folder / "weights.safetensors")[0].state_dict()


def test_all_but_the_outputs_are_taken_over(straight, tmp_path, monkeypatch):
    monkeypatch.chdir(straight.parent)
    words = ["train", "digits_smoke", "--out", str(tmp_path / "run"), "--model.init", straight.name, *SHORT]
    assert cli.main([*words, "--optim.ema", "0"]) == 0
    lender, found = weights(straight), weights(tmp_path / "run")
    for name, want in lender.items():
        same = torch.allclose(found[name], want, rtol=0, atol=1e-6)
        assert same == (not name.startswith("classifier.")), name
    assert f'init = "{straight}"' in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_run_goes_on_without_its_lender(parapos, straight, tmp_path):
    """And to the bit as if nothing had happened."""
    lender, log = tmp_path / "lender", tmp_path / "log"
    shutil.copytree(straight, lender)
    command = ("train", "digits_smoke", "--model.init", lender, *SHORT[:4], "--run.save_every", "1", "--out")
    assert parapos(*command, tmp_path / "killed", log=log, kill_in="step", nth=3)[0] == -signal.SIGKILL
    code, told = parapos(*command, tmp_path / "whole", log=log)
    assert code == 0, told
    shutil.rmtree(lender)
    code, told = parapos("train", tmp_path / "killed", log=log)
    assert code == 0, told
    for name in ("metrics.csv", "weights.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("--model.encoding", "none"), "model.init: expected a run with model.encoding = 'none', .* has 'pape'"),
        (("--model.options.mlp_dim", "40"), "mlp.fc1.weight: expected .*same size and encoding"),
        (("--model.init", "nowhere"), "model.init: .*nowhere: not a run"),
    ],
)
def test_runs_that_do_not_fit_are_refused(straight, tmp_path, capsys, change, word):
    words = ["train", "digits_smoke", "--out", str(tmp_path / "run"), "--model.init", str(straight), *SHORT, *change]
    assert cli.main(words) == 2
    assert re.search(word, capsys.readouterr().err)
    assert not (tmp_path / "run" / "recipe.toml").exists()
