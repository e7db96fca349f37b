"""The model benchmark: the paper's table in, ours beside it, and every figure what it claims to be."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from torch.utils import flop_counter

import parapos.bench.flop_formulas  # noqa: F401  registers the formulas
from parapos.bench import driving, flops, measure
from parapos.bench import model as bench
from parapos.bench import model_view as view
from parapos.recipes import paper, published

NANO = "vit_official_nano_patch16"  # 4 heads, so no lookhere


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "PROCESSES", 1)
        return bench.run(model=NANO, encodings=("lookhere", "pape"), parabolas=(50,), sizes=(64,), rounds=2)


@pytest.mark.parametrize(("peaks", "memory"), [([5, 1, 3], 3), ([5, None, 3], None)])
def test_memory_is_a_median_of_processes(peaks, memory, monkeypatch):
    left = peaks * len(bench.MODES)
    monkeypatch.setattr(measure, "apart", lambda *args: left.pop(0))
    entries = bench._all_memory([bench.Row("none")], [bench.Setting(NANO, 64, 1, "fp32", "cpu")])
    assert [entry["bytes"] for entry in entries] == [memory, memory]


def test_rows_are_the_papers_and_none():
    rows = [str(row) for row in bench.make_rows(bench.ENCODINGS, bench.PARABOLAS)]
    assert rows[0] == bench.BASE
    assert set(rows[1:]) == set(paper()["efficiency"]["rows"])
    assert [str(row) for row in bench.make_rows(["pape", "none", "rope"], [3])] == ["none", "pape m=3", "rope"]


def test_the_direct_form_is_a_row_of_its_own():
    _, many, direct = bench.make_rows(["pape"], [50], direct=True)
    assert str(direct) == "pape direct"
    assert bench.analytic(direct, "vit_base_patch16", 224) is None
    held = [bench.parameters(row, "vit_base_patch16")["positional"] for row in (many, direct)]
    assert held[1] < 0.06 * held[0]
    assert {m.form for m in bench.build(direct, NANO).modules() if hasattr(m, "form")} == {"direct"}


def test_parameters_are_the_papers():
    base = bench.parameters(bench.Row("none"), "vit_base_patch16")
    assert base == {"parameters": 86_417_896, "positional": 0}
    for row in bench.make_rows(bench.ENCODINGS, bench.PARABOLAS)[1:]:
        found = bench.parameters(row, "vit_base_patch16")
        assert found["parameters"] == base["parameters"] + found["positional"]
        assert found["parameters"] == pytest.approx(published("efficiency", str(row), "parameters"), abs=0.5e5)
        if row.encoding == "pape":
            assert found["positional"] == 221_472 * row.parabolas


def test_counted_gflop_is_the_arithmetic():
    found = bench.count(bench.Row("rope"), "vit_base_patch16", 224, "cpu")
    assert found == pytest.approx(bench.analytic(bench.Row("rope"), "vit_base_patch16", 224), rel=1e-4)


OURS = ("attention", "attention_backward")  # operators of the kernel that serves PaPE here


def test_counted_gflop_grows_with_parabolas_by_their_projections(monkeypatch):
    for name in OURS:
        monkeypatch.setitem(flop_counter.flop_registry, getattr(torch.ops.parapos, name), lambda *_, **__: 0)
    few, many = (bench.count(bench.Row("pape", m), NANO, 224, "cpu") for m in (2, 50))
    added = 4 * 48 * 2 * 197 * 4 * (128 + 4) / 1e9  # W_a, and its outputs into the form M
    assert many["inference"] - few["inference"] == pytest.approx(added, rel=0.02)
    assert many["training"] - few["training"] == pytest.approx(3 * added, rel=0.02)


def test_analytic_is_for_the_papers_model_alone():
    assert bench.analytic(bench.Row("pape", 8), "vit_base_patch16", 224)["training"] == flops.gflops(
        "pape", parabolas=8, training=True
    )
    assert bench.analytic(bench.Row("pape", 8), "vit_base_patch16", 448) is None
    assert bench.analytic(bench.Row("pape", 8), NANO, 224) is None


def test_increase_is_the_papers_last_row():
    """PaPE over the cheapest baseline, per column, as the paper prints it."""
    section = paper()["efficiency"]
    want = dict(zip(section["columns"], (13, None, 14, 14, 17, 20, 7, 14), strict=True))
    for column, percent in want.items():
        if percent is not None:
            figures = {row: published("efficiency", row, column) for row in section["rows"]}
            assert view.Column(column, figures).increase == f"+{percent}%", column


def test_rows_share_the_trunk_and_a_step_changes_nothing():
    trunk, net = bench.build(bench.Row("none"), NANO), bench.build(bench.Row("pape", 4), NANO)
    bench.share(net, trunk)
    own = {name for name, p in net.named_parameters() if not any(p is x for x in trunk.parameters())}
    assert own
    assert all(".encoding." in name for name in own)
    state: defaultdict[object, object] = defaultdict(dict)
    setting = bench.Setting(NANO, 32, 2, "fp32", "cpu")
    before = [p.detach().clone() for p in net.parameters()]
    for row in (trunk, net):
        bench.prepare(row, bench.adamw(row, state), setting)()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert len(state) == len(before)
    moments = [state[p]["exp_avg"].abs().max() for p in net.parameters()]
    assert all(x > 0 for x in moments), "a parameter without a gradient takes no part in the step"


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_types(dtype):
    net = bench.build(bench.Row("pape", 4), NANO)
    setting = bench.Setting(NANO, 32, 2, dtype, "cpu")
    out = bench.prepare(net, None, setting)()
    assert out.dtype == bench.DTYPES[dtype]
    assert not net.training
    bench.prepare(net, bench.adamw(net), setting)()
    assert net.training


def test_rows_take_turns(monkeypatch):
    rows = bench.make_rows(["sincos", "rope"], [])
    nets = {row: bench.build(row, NANO) for row in rows}
    ran = []
    for row, net in nets.items():
        net.label = str(row)
        net.register_forward_hook(lambda module, *_: ran.append((module.label, module.training)))
    monkeypatch.setattr(measure, "timed", lambda call, device: (call(), 1.0)[1])
    times = bench.measure_time(nets, defaultdict(dict), bench.Setting(NANO, 32, 1, "fp32", "cpu"), 1e9, 2)
    assert {len(x) for x in times.values()} == {2}
    assert ran[:2] == [("none", False), ("none", True)]  # the warm-up at full size
    want = ["none", "sincos", "rope"]
    assert ran[2:8] == [(name, training) for training in (False, True) for name in want]
    assert ran[8:] == [(name, training) for training in (False, True) for name in [*want[1:], want[0]]]


def test_results(results):
    assert results["missing"].keys() == {"lookhere"}
    names = ["none", "pape m=50"]
    for kind in ("time", "memory"):
        found = [(x["row"], x["size"], x["mode"]) for x in results[kind]]
        assert sorted(found) == sorted((n, s, m) for n in names for s in (64,) for m in bench.MODES)
        assert all(x["ratio"] == 1 for x in results[kind] if x["row"] == "none")
    assert all(x["quartiles"][0] <= x["ratio"] <= x["quartiles"][1] and x["rounds"] == 2 for x in results["time"])
    assert results["machine"]
    assert results["torch"] == torch.__version__
    assert {"commit", "threads", "protocol", "batch", "dtype", "model"} <= results.keys()


def test_memory_holds_weights_and_in_training_moments(results):
    parameters = {x["row"]: x["parameters"] for x in results["rows"]}
    for x in results["memory"]:
        copies = 4 if x["mode"] == "training" else 1  # weights, gradients, two moments
        least = 4 * copies * parameters[x["row"]]
        assert least < x["bytes"] < 3 * least, x


def test_written_files(results, tmp_path):
    larger = {kind: results[kind] + [{**x, "size": 128} for x in results[kind]] for kind in ("rows", "time", "memory")}
    results = {**results, **larger, "sizes": [64, 128]}
    paths = measure.write(results, view.markdown(results), view.plot, tmp_path / "new" / "model.v1")
    assert [path.name for path in paths] == ["model.v1.json", "model.v1.md", "model.v1.png"]
    assert json.loads(paths[0].read_text()) == results
    lines = paths[1].read_text().splitlines()
    assert sum(line.startswith("| pape m=50") for line in lines) == 4  # two tables, two sizes
    assert any(line.startswith("lookhere: not measured, lookhere is defined for") for line in lines)
    assert not any("paper |" in line for line in lines)  # another model than the paper's
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_the_paper_stands_beside_its_own_model(results):
    renamed = {**results, "model": "vit_base_patch16", "sizes": [224]}
    for kind in ("rows", "time", "memory"):
        renamed[kind] = [{**x, "size": 224} for x in results[kind] if x["size"] == 64]
    line = next(x for x in view.markdown(renamed).splitlines() if x.startswith("| pape m=50") and "x" in x[12:])
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[1::2] == ["1.14x", "1.20x", "1.17x", "1.14x"]


def test_a_row_that_fails_is_said_to_be_unmeasured(monkeypatch):
    def apart(function, row, mode, setting):
        return None if row.encoding == "sincos" and mode == "training" else 2**20

    monkeypatch.setattr(measure, "apart", apart)
    found = bench.run(model=NANO, encodings=("sincos", "rope"), sizes=(32,), rounds=2)
    assert {x["row"] for x in found["time"]} == {"none", "rope"}
    line = next(x for x in view.markdown(found).splitlines() if x.startswith("| sincos") and "measured" in x)
    assert line.count("not measured") == 3


def test_a_network_of_several_sensors_is_measured_like_the_others(monkeypatch):
    monkeypatch.setattr(driving, "STEPS", 108)  # a tenth of the points
    none, pape = bench.Row("none"), bench.Row("pape", 50)
    assert {"unitr", "unitr_nano"} <= set(bench.MODELS)
    held = [bench.parameters(row, "unitr") for row in (none, pape)]
    assert [x["parameters"] for x in held] == [11_818_847, 12_644_447]
    assert held[1]["positional"] == 825_600
    counts = [bench.count(row, "unitr_nano", 64, "cpu") for row in (none, pape)]
    for mode in bench.MODES:
        assert counts[0][mode] < counts[1][mode] < 1.5 * counts[0][mode]
    setting = bench.Setting("unitr_nano", 64, 2, "fp32", "cpu")
    for mode in bench.MODES:
        bench.step(bench.build(pape, "unitr_nano"), mode, setting)()


def test_parts_can_be_measured_alone(monkeypatch):
    monkeypatch.setattr(driving, "STEPS", 108)
    options = dict(model="unitr_nano", encodings=["pape"], parabolas=[2], sizes=[64], seconds=0.1, rounds=2)
    found = bench.run(**options, parts=["time"])
    assert (found["memory"], len(found["time"])) == ([], 4)
    assert all(row["gflop"] == {"inference": None, "training": None} for row in found["rows"])
    assert view.markdown(found).count("not measured") == 4  # memory of two rows in two modes
