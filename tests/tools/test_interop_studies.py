"""The tables of docs/interop.md are those of the committed results, and the study does what it says."""

import json
import re

import pytest
import torch

pytest.importorskip("timm")
from tools import export_bench, swap_study


@pytest.mark.parametrize("tool", [swap_study, export_bench], ids=lambda tool: tool.__name__)
def test_tables_are_those_of_the_results(tool):
    results = json.loads(tool.RESULTS.read_text())
    assert tool.RESULTS.with_suffix(".md").read_text() == tool.markdown(results)


def test_three_seeds_were_run_with_what_the_page_says():
    results = json.loads(swap_study.RESULTS.read_text())
    assert sorted(results["seeds"]) == ["0", "1", "2"]
    assert (results["epochs"], results["more"]) == (swap_study.EPOCHS, swap_study.MORE)
    for rows in results["seeds"].values():
        assert list(rows) == list(swap_study.ROWS)
        assert all(list(row) == [str(size) for size in swap_study.SIZES] for row in rows.values())


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
        swaps.append(swap_study.swapped.is_swapped(model))
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
