"""The measuring tools: ratios by round, memory of a fresh process, and what becomes of one that dies."""

from __future__ import annotations

import os

import pytest
import torch

from parapos.bench import measure

MIB = 2**20


def test_spread_compares_within_a_round():
    found = measure.spread([2.0, 60.0, 3.0], [1.0, 20.0, 3.0])  # a slow round is slow for both
    assert found == {"ratio": 2.0, "quartiles": [1.5, 2.5], "rounds": 3}


def _held_and_passing() -> int:
    """64 MiB that stay and 32 MiB that the call frees again, after 128 MiB that were freed before."""
    torch.ones(32 * MIB)

    def prepare():
        held = torch.ones(16 * MIB)
        return lambda: held.sum() + torch.ones(8 * MIB).sum()

    return measure.peak_memory(prepare, "cpu")


def _dies() -> None:
    os._exit(9)


def test_peak_memory_is_that_of_the_call():
    found = measure.apart(_held_and_passing)
    assert 95 * MIB < found < 110 * MIB


def test_a_process_that_dies_gives_none_and_a_message(capsys):
    assert measure.apart(_dies) is None
    assert "failed" in capsys.readouterr().err


def test_commit(monkeypatch, tmp_path):
    found = measure.commit()
    assert found is None or len(found.removesuffix("-dirty")) >= 7
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "measure.py"))
    assert measure.commit() is None


def test_time_is_positive():
    assert measure.timed(lambda: sum(range(1000)), "cpu") > 0


@pytest.mark.parametrize("name", ["machine", "device", "threads", "torch"])
def test_machine(name):
    assert measure.machine("cpu")[name]


def test_rounds_keep_to_their_bounds():
    assert list(measure.rounds(0.0, (2, 9))) == [0, 1]
    assert list(measure.rounds(1e9, (2, 5))) == [0, 1, 2, 3, 4]


def test_cases_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = measure.in_turn(calls, lambda call: (call(), float(len(order)))[1], 1e9, (1, 3))
    assert "".join(order) == "abcbcacab"
    assert times == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_shares_are_of_the_seconds_that_are_left(monkeypatch):
    clock = iter([0.0, 0.0, 4.0, 12.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert list(measure.shares(["a", "b", "c"], 12.0)) == [("a", 4.0), ("b", 4.0), ("c", 0.0)]


def test_results_without_a_plot(tmp_path):
    assert [path.name for path in measure.write({"a": 1}, "text", None, tmp_path / "x")] == ["x.json", "x.md"]


def test_what_was_not_measured_has_no_panel(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(measure, "save", lambda figure, path: drawn.append([x.get_title() for x in figure.axes]))
    kinds = {"time": [(1, 2.0), (2, float("nan"))], "memory": [(1, float("nan"))]}
    rows = [
        [measure.Panel(f"{mode}: {kind}", "y", {"a": points}) for kind, points in kinds.items()]
        for mode in ("inference", "training")
    ]
    measure.draw(tmp_path / "x.png", rows, "title")
    assert drawn == [["inference: time", "training: time"]]


def test_nothing_measured_leaves_no_plot(tmp_path):
    panel = measure.Panel("time", "y", {"a": [(1, float("nan"))]})
    (tmp_path / "x.png").write_text("of earlier results")
    paths = measure.write({}, "text", lambda _, path: measure.draw(path, [[panel]], "title"), tmp_path / "x")
    assert [path.name for path in paths] == ["x.json", "x.md"]
    assert not (tmp_path / "x.png").exists()
