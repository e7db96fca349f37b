"""Attention timed with the numbers of a trained run: what is measured is what the model hands to attention."""

import json

import pytest
import torch

from parapos import blocks, cli
from parapos.bench import trained
from parapos.training import checkpoint, fit

from ..run_folders import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def test_layers_hold_what_the_model_attends_with(run, monkeypatch):
    """Repeated heads and zeros change nothing: the first heads of the kept calls give what the model computes."""
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    image = fit.load_run(run).dataset("test", size=32)[0]["image"][None]
    outputs, attend = [], blocks.attend

    def record(*args, **options):
        outputs.append(attend(*args, **options))
        return outputs[-1]

    monkeypatch.setattr(blocks, "attend", record)
    kept = trained.layers(model, [image])
    assert len(kept) == len(outputs) == sum(isinstance(m, blocks.Attention) for m in model.modules())
    for (q, k, v, terms, scale), want in zip(kept, outputs, strict=True):
        assert q.shape[1] == k.shape[1] == v.shape[1] == trained.HEADS
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == trained.HEAD_DIM
        assert len(terms) == 1
        repeats = -(-trained.HEADS // want.shape[1])
        found = trained.CASES["parapos"](q, k, v, terms, scale)[:, ::repeats, :, : want.shape[-1]]
        torch.testing.assert_close(found, want[:, : found.shape[1]], atol=1e-5, rtol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_training_has_gradients_of_all_that_is_learned(run, monkeypatch):
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    kept = trained.layers(model, [fit.load_run(run).dataset("test")[0]["image"][None]])
    real, counts = torch.autograd.grad, []

    def grad(out, leaves, dout):
        counts.append(len(leaves))
        return real(out, leaves, dout)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for case in trained.CASES:
        trained._call(case, kept, "forward")()
        assert not counts
        trained._call(case, kept, "forward+backward")()
        assert set(counts) == {3 if case == "plain SDPA" else 5}  # q, k, v, and M and g of PaPE
        counts.clear()


def test_the_command(run, tmp_path, capsys):
    words = ["bench", "attention", "--trained", str(run), "--threads", "1"]
    assert cli.main([*words, "--quick", "--out", str(tmp_path / "trained.v1")]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("|")[1:4] for line in out.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in line] for line in lines] == [["1x", "16", mode] for mode in trained.MODES]
    assert f"wrote {tmp_path / 'trained.v1.json'}" in err
    found = json.loads((tmp_path / "trained.v1.json").read_text())
    assert found["encoding"] == "pape"
    assert [(row["factor"], row["mode"], row["rounds"]) for row in found["rows"]] == [
        (1, "forward", 2), (1, "forward+backward", 2)
    ]  # fmt: skip
    assert (tmp_path / "trained.v1.md").read_text() == trained.markdown(found) + "\n"


def test_sizes_grow_by_their_factors(run, monkeypatch):
    monkeypatch.setattr(trained, "FACTORS", (1, 2))
    monkeypatch.setattr(trained, "ROUNDS", (2, 2))
    rows = trained.run(run, seconds=1)["rows"]
    assert [row["tokens"] for row in rows] == [16, 16, 64, 64]


@pytest.mark.parametrize(
    ("given", "message"),
    [("nothing", "nothing: not a run, it has no recipe.toml"), ("run --device cuda", "--trained measures on the CPU")],
)
def test_errors_are_one_line(given, message, run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(run.parent)
    assert cli.main(["bench", "attention", "--quick", "--trained", *given.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
