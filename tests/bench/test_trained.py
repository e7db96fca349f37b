"""Attention with a trained run's own numbers: every size and mode is measured, and --quick says what it is."""

from __future__ import annotations

import json

import pytest
import torch

from parapos.bench import trained
from parapos.cli import main

from ..run_folders import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "digits-pape", "pape")


def test_layers_have_twelve_heads_and_the_same_attention():
    torch.manual_seed(0)
    from parapos import create_model

    net = create_model("vit_nano_patch4", encoding="pape", num_classes=10, dim=32, depth=2, mlp_dim=32, heads=4).eval()
    kept = trained.layers(net, [torch.rand(1, 3, 16, 16)])
    assert len(kept) == 2
    for q, k, v, terms, scale in kept:
        assert q.shape == k.shape == v.shape == (1, trained.HEADS, 16, trained.HEAD_DIM)
        out = trained._attention(trained.OURS, q, k, v, terms, scale)
        torch.testing.assert_close(out[:, 0], out[:, 2])  # repeats of one head
        assert not torch.allclose(out, trained._attention(trained.PLAIN, q, k, v, terms, scale))
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_quick_run(folder, tmp_path, capsys):
    assert main(["bench", "attention", "--trained", str(folder), "--quick", "--out", f"{tmp_path}/x"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("A SMOKE TEST, NOT A RESULT (--quick)\n")
    assert f"wrote {tmp_path}/x.json" in err
    results = json.loads((tmp_path / "x.json").read_text())
    assert results["quick"] == "a smoke test, not a result"
    assert [(row["factor"], row["mode"], row["rounds"]) for row in results["rows"]] == [
        (1, m, 2) for m in trained.MODES
    ]
    assert (tmp_path / "x.md").read_text() == out
    assert not (tmp_path / "x.png").exists()
