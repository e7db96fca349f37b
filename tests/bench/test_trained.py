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


def test_high_resolutions_are_measured_as_heads_of_64_and_as_they_are(monkeypatch):
    from parapos import create_model

    net = create_model("vit_nano_patch4", encoding="pape", num_classes=10, dim=32, depth=2, mlp_dim=32, heads=4).eval()
    monkeypatch.setattr(trained, "SIDE_ROUNDS", {4: (2, 2), 6: (3, 3)})
    monkeypatch.setattr(trained, "_memory", lambda layer: 1.25)
    rows = trained.high_resolution(net, lambda side: [torch.rand(1, 3, 4 * side, 4 * side)], sides=(4, 6, 8))
    assert [(row["tokens"], row["width"]) for row in rows] == [(n, w) for n in (16, 36, 64) for w in trained.WIDTHS]
    assert [row.get("rounds") for row in rows] == [2, 2, 3, 3, None, None]  # plain is not run at the largest
    assert [len(row.get("heads", ())) for row in rows] == [8, 0] * 3  # two layers of four heads
    for i, row in enumerate(rows):  # doubled tokens take doubled time, and one head of the padded ones more
        row["seconds"] = row["tokens"] * (1.0 + i % 2)
        row["heads"] = [row["tokens"], row["tokens"] ** 1.5] if "heads" in row else row.pop("heads", ())
    rows = [row if row["heads"] else {k: v for k, v in row.items() if k != "heads"} for row in rows]
    grown = trained.exponents(rows)
    assert grown == pytest.approx({"heads of 64": 1.0, "steepest head": 1.5, "own heads": 1.0})
    results = {
        "machine": "m",
        "device": "cpu",
        "threads": 2,
        "torch": "t",
        "encoding": "pape",
        "rows": [],
        "kept_memory": True,
    }
    shown = trained.markdown({**results, "high": rows, "exponents": grown})
    assert "steepest head 1.50" in shown
    assert "1.25x" in shown
    assert shown.count("not measured") == 6


def test_the_memory_of_a_layer_is_a_ratio_of_two_processes():
    q = torch.randn(1, 2, 512, 16)
    assert 0.2 < trained._memory((q, q, q, [], 0.25)) < 5  # without terms both do the same


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
