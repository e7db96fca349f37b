"""Some models of the demo can be made anew, and the stored numbers of the others stay."""

from pathlib import Path

import pytest

from parapos.experiments import tables
from parapos.experiments.grid import Results
from tools import demo_models


def test_new_numbers_replace_those_of_their_runs():
    old = {("a-0", "1x", "w"): {"top1": 0.1}, ("a-0", "2x", "w"): {"top1": 0.2}, ("b-0", "1x", "v"): {"top1": 0.3}}
    new = {("a-0", "1x", "new"): {"top1": 0.4}}
    both = demo_models.merge(Results(old), Results(new), ["b-0", "a-0"]).scores
    assert list(both.items()) == [(("b-0", "1x", "v"), {"top1": 0.3}), (("a-0", "1x", "new"), {"top1": 0.4})]


def test_what_is_stored_is_in_the_order_of_the_table():
    stored = tables.read_raw(demo_models.RESULTS)
    order = [run.name for run in tables.resolve(tables.load("demo"), Path("runs"), {}).runs]
    assert list(demo_models.merge(stored, Results(), order).scores) == list(stored.scores)


def test_runs_that_are_not_finished_are_not_stored(tmp_path):
    with pytest.raises(SystemExit, match=r"not complete.*demo-pape-0") as stop:
        demo_models.store(tmp_path, ["pape"])
    assert "lookhere" not in str(stop.value)
