"""The benchmark runs, measures what it says and writes what it promises."""

import json
import sys

import pytest
import torch

from parapos.bench import attention as bench
from parapos.bench import measure


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def results():
    return bench.run(quick=True)


def write(results, prefix):
    return measure.write(results, bench.markdown(results), bench.plot, prefix)


def test_quick_run(results, tmp_path):
    expected = {(case, dtype, mode) for case in bench.CASES for dtype in bench.DTYPES for mode in bench.MODES}
    for kind in ("time", "memory"):
        assert {(x["case"], x["dtype"], x["mode"]) for x in results[kind]} == expected
        assert all(x["ratio"] == 1 for x in results[kind] if x["case"] == bench.PLAIN)
        assert all(x["tokens"] == 197 for x in results[kind])
    assert all(x["quartiles"][0] <= x["ratio"] <= x["quartiles"][1] and x["rounds"] == 2 for x in results["time"])
    assert all(x["all"] is None and x["largest_two"] is None for x in results["exponents"])
    assert results["torch"] == torch.__version__
    assert results["machine"]

    paths = write(results, tmp_path / "new" / "attention.v1")
    assert [path.name for path in paths] == ["attention.v1.json", "attention.v1.md", "attention.v1.png"]
    assert json.loads(paths[0].read_text()) == results
    lines = paths[1].read_text().splitlines()
    assert sum(line.startswith("| parapos ") for line in lines) == 4
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_a_quick_run_says_that_it_is_no_result(results):
    assert results["quick"] == "a smoke test, not a result"
    assert bench.markdown(results).startswith("A SMOKE TEST, NOT A RESULT (--quick)\n")
    slow = {key: value for key, value in results.items() if key != "quick"}
    assert "SMOKE" not in bench.markdown(slow)


def test_memory_counts_inputs_and_outputs():
    setting = bench.Setting(64, "fp32", "forward")  # large enough for what libraries take besides not to matter
    size = 4 * bench.HEADS * setting.tokens * bench.HEAD_DIM
    taken = measure.apart(bench.measure_memory, bench.PLAIN, setting, "cpu")
    assert 3.9 * size < taken < 6 * size


def test_without_matplotlib(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert [path.suffix for path in write(results, tmp_path / "x")] == [".json", ".md"]
    assert "matplotlib is missing" in capsys.readouterr().err


def test_a_case_that_fails_is_said_to_be_unmeasured(results):
    broken = [{**x, "bytes": None, "ratio": None} if x["case"] == "dense bias" else x for x in results["memory"]]
    time = [x for x in results["time"] if x["case"] != "dense bias"]
    lines = bench.markdown({**results, "memory": broken, "time": time}).splitlines()
    assert all(line.count("not measured") == 4 for line in lines if line.startswith("| dense bias"))


def test_cases_compute_the_same_attention():
    n, m = 17, bench.PARABOLAS
    q, k, v = torch.randn(3, 1, bench.HEADS, n, bench.HEAD_DIM)
    a, b = torch.rand(1, bench.HEADS, n, m), torch.randn(1, bench.HEADS, n, m)
    w_p = torch.rand(bench.HEADS, m, 2) - 0.5
    r = bench.Positions.of(bench.grid_positions(4, 4, cls=True))
    M, g = bench.published.collapse(-a, b, w_p)
    want = bench.CASES["dense bias"](q, k, v, r, M, g)
    for case in ("parapos", "paper form"):
        torch.testing.assert_close(bench.CASES[case](q, k, v, r, M, g), want, atol=2e-4, rtol=0)
    torch.testing.assert_close(bench.CASES["released form"](q, k, v, r, a, -b, w_p), want, atol=2e-4, rtol=0)


def test_exponent():
    sizes = [grid**2 + 1 for grid in bench.GRIDS]
    assert bench.exponent(sizes, [3e4 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    memory = [
        {"case": bench.PLAIN, "dtype": "fp32", "mode": "forward", "tokens": n, "bytes": 7 * n**2 if n > 200 else 7 * n}
        for n in sizes
    ]
    fit = next(x for x in bench._exponents(memory) if (x["case"], x["dtype"]) == (bench.PLAIN, "fp32"))
    assert fit["largest_two"] == pytest.approx(2)
    assert fit["all"] > 2
