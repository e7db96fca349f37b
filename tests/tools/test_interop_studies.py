"""The tables of docs/interop.md are those of the committed results, and the study does what it says."""

import json
import re
from itertools import product

import pytest
import torch

pytest.importorskip("timm")
from parapos.interop.swapping import is_swapped
from tools import export_bench, swap_study


def test_the_table_is_that_of_the_results():
    results = json.loads(swap_study.RESULTS.read_text())
    assert swap_study.RESULTS.with_suffix(".md").read_text() == swap_study.markdown(results)
    assert set(results["seeds"]) <= {"0", "1", "2"}
    assert (results["epochs"], results["more"]) == (swap_study.EPOCHS, swap_study.MORE)
    for rows in results["seeds"].values():
        assert list(rows) == list(swap_study.ROWS)
        assert all(list(row) == [str(size) for size in swap_study.SIZES] for row in rows.values())


def test_the_table_of_exports_is_that_of_the_results():
    results = json.loads(export_bench.RESULTS.read_text())
    assert export_bench.RESULTS.with_suffix(".md").read_text() == export_bench.markdown(results)
    found = {(row["encoding"], row["size"], row["way"]) for row in results["rows"]}
    assert found == set(product(export_bench.ENCODINGS, export_bench.SIZES, ("PyTorch", *export_bench.WAYS)))
    assert all(row["error"] <= 1e-4 for row in results["rows"] if row["way"] != "ONNX int8")


def test_the_table_of_exports():
    common = {"encoding": "pape", "bytes": 2_000_000, "error": 1e-6, "ms": 3.0}
    rows = [
        {**common, "size": size, "way": way, "ratio": ratio}
        for way, ratio in (("PyTorch", 1.0), ("ONNX", 0.75))
        for size in (224, 448)
    ]
    table = export_bench.markdown({"model": "net", "rounds": 3, "rows": rows})
    assert "| pape | PyTorch | 2.0 |  | 1.00 | 1.00 |" in table
    assert "| pape | ONNX | 2.0 | 1e-06 | 0.75 | 0.75 |" in table


class Few(swap_study.Digits):
    """Sixteen digits."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.images, self.labels = self.images[:16], self.labels[:16]


def test_the_study_for_real(monkeypatch):
    monkeypatch.setattr(swap_study, "Digits", Few)
    monkeypatch.setattr(swap_study, "SIZES", (32, 48))
    swaps, rates, learn = [], [], swap_study.learn

    def watch(model, data, groups, *args):
        swaps.append(is_swapped(model))
        rates.append([group["lr"] for group in groups])
        before = [p.detach().clone() for group in groups for p in group["params"]]
        learn(model, data, groups, *args)
        after = [p for group in groups for p in group["params"]]
        assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) > len(after) // 2

    monkeypatch.setattr(swap_study, "learn", watch)
    rows = swap_study.study(0, epochs=1, more=1)
    assert list(rows) == list(swap_study.ROWS)
    assert swaps == [False, False, True, True]
    assert rates == [[2e-3], [1e-3], [1e-3, 4e-3], [1e-3, 4e-3]]
    table = swap_study.markdown({"epochs": 1, "more": 1, "seeds": {"0": rows}})
    assert len(re.findall(r"^\| (?!top-1|---)", table, re.M)) == 4
