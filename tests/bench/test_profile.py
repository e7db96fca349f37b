"""The profile: kinds add up to the whole, and the floor is the ratio of the counted GFLOP."""

from __future__ import annotations

import pytest

from parapos.bench import model as bench_model
from parapos.bench import profile as profile

SETTING = bench_model.Setting("vit_official_nano_patch16", 64, 1, "fp32", "cpu")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::addmm"], "products outside it"),
        (["aten::mkldnn_convolution"], "products outside it"),
        (["aten::convolution_backward"], "products outside it"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["aten::bmm", "parapos::attention_backward", "autograd::engine"], "attention"),
        (["aten::bmm", "_AttentionBackward"], "attention"),
        (["aten::_fused_adamw_"], "optimizer"),
        (["aten::mul", "aten::linear"], profile.REST),
        (["aten::softplus"], profile.REST),
    ],
)
def test_kinds(names, kind):
    assert profile.kind(names) == kind


def test_the_profile_tells_every_kind_and_the_floor(capsys):
    row = bench_model.Row("pape", 8)
    found = profile.run(row, SETTING, rounds=1)
    for mode in bench_model.MODES:
        counted = [bench_model.count(r, SETTING.model, 64, "cpu")[mode] for r in (row, bench_model.Row("none"))]
        assert found["modes"][mode]["floor"] == pytest.approx(counted[0] / counted[1])
        spent = found["modes"][mode]["ms"]
        assert spent["pape m=8"].keys() == spent["none"].keys()
        assert spent["pape m=8"]["attention"] > 0
        assert spent["none"]["products outside it"] > 0
        assert ("optimizer" in spent["none"]) == (mode == "training")
    told = profile.markdown(found)
    assert told.count("floor set by the GFLOP") == 2
    assert "round 1 of 1" in capsys.readouterr().err
