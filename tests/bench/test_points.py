"""parapos bench points: it runs, it compares what is equal, and it says when it is no result."""

import json
from pathlib import Path

import pytest
import torch

from parapos.bench import points
from parapos.cli import main

ROOT = Path(__file__).parents[2]


def test_cases_compare_what_is_equal():
    calls = points.convolution(500, 4, 3)
    torch.testing.assert_close(calls["sparse"](), calls["dense"](), rtol=1e-4, atol=1e-5)
    calls = points.serialization(500)
    assert all(sorted(call().tolist()) == list(range(500)) for call in calls.values())
    for backward in (False, True):
        for call in points.attention(300, "ptv3_nano", "pape", backward).values():
            call()


def test_attention_is_measured_in_all_patches(monkeypatch):
    seen = []
    monkeypatch.setattr(points.Attention, "forward", lambda self, x, r, mask: seen.append(x.shape[:2].numel()) or x)
    points.attention(3000, "ptv3_nano", "pape", False)["pape"]()
    assert sum(seen) >= 3000


@pytest.mark.full
def test_quick_run(tmp_path, capsys):
    main(["bench", "points", "--quick", "--seconds", "1", "--out", str(tmp_path / "points")])
    told, results = capsys.readouterr().out, json.loads((tmp_path / "points.json").read_text())
    assert told.startswith("A SMOKE TEST")
    assert told.strip() == (tmp_path / "points.md").read_text().strip()
    found = {(row["what"], row["case"]): row for row in results["ratios"]}
    assert found["serialization", "hilbert"]["limit"] == 4.0
    assert found["serialization", "z"]["limit"] == 1.5
    assert found["attention forward", "pape"]["limit"] == 1.25
    assert found["attention with backward", "pape"]["limit"] == 1.35
    assert {"sparse", "sparse with search"} <= {case for what, case in found if what.startswith("convolution")}
    assert all(row["ratio"] > 0 and row["rounds"] == 3 for row in found.values())
    assert results["relative_time"][0] == 1
    assert all(peak > 0 for peaks in results["peak_bytes"].values() for peak in peaks)
    assert results["time_exponent"] == pytest.approx(points.growth([500, 1000], results["relative_time"]))
    assert "time grows as points^" in told
    assert "memory grows as points^" in told


def test_parts(tmp_path, capsys):
    main(["bench", "points", "--quick", "--seconds", "0.1", "--parts", "time", "--out", str(tmp_path / "points")])
    results = json.loads((tmp_path / "points.json").read_text())
    assert {"ratios", "peak_bytes"}.isdisjoint(results)
    assert "1.00x" in capsys.readouterr().out
    assert main(["bench", "points", "--parts", "speed", "--out", str(tmp_path / "no")]) == 2
    assert "expected some of ratios, time, memory, got 'speed'" in capsys.readouterr().err


def test_rooms_are_surfaces():
    cells = points.room(2000)
    assert cells.shape == (2000, 3)
    assert len(cells.unique(dim=0)) == 2000
    assert torch.equal(cells, points.room(2000))
    near = torch.cdist(cells[:200].double(), cells.double()) <= 1.01
    assert near.sum(1).float().mean() > 2.5  # most cells have neighbours


def test_growth_is_the_exponent():
    assert points.growth([10, 20, 40], [5, 10, 20]) == pytest.approx(1)
    assert points.growth([10, 20, 40], [1, 4, 16]) == pytest.approx(2)


def committed(name):
    """Results in benchmarks/, which docs/points.md has, too."""
    path = ROOT / "benchmarks" / f"{name}.json"
    results = json.loads(path.read_text())
    assert "quick" not in results
    assert (results["network"], results["encoding"]) == ("ptv3_scannet", "pape")
    assert results["sizes"] == [10_000, 40_000, 100_000, 400_000]
    assert path.with_suffix(".md").read_text() == points.markdown(results) + "\n"
    assert points.markdown(results) in (ROOT / "docs" / "points.md").read_text()
    return results


def test_committed_ratios():
    results = committed("points")
    rows = {(row["what"], row["case"]): row for row in results["ratios"]}
    for curve in points.CURVES:
        row = rows["serialization", curve]
        assert row["size"] == "1000000 points"
        assert row["ratio"] <= (1.5 if curve.startswith("z") else 4)
    for what in ("convolution 5, 6 to 32", "convolution 3, 32 to 32"):
        assert rows[what, "sparse with search"]["ratio"] < 1
    assert results["time_exponent"] <= 1.1


def test_committed_memory():
    results = committed("points_memory")
    place = results["sizes"].index(100_000)
    assert results["peak_bytes"]["forward"][place] <= 4e9
    assert results["peak_bytes"]["training step"][place] <= 12e9
    assert results["memory_exponent"] <= 1.1
