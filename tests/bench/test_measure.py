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
