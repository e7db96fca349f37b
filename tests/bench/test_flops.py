"""The paper's efficiency table follows from the model, entry by entry."""

from __future__ import annotations

import pytest

from parapos.bench.flops import gflops

PUBLISHED = {  # inference, training
    ("sincos", 0): (35.1, 105.9),
    ("rope", 0): (35.1, 105.9),
    ("rope_mixed", 0): (35.1, 105.9),
    ("alibi", 0): (35.1, 105.2),
    ("lookhere", 0): (35.1, 105.2),
    ("pape", 2): (35.5, 107.1),
    ("pape", 4): (35.6, 107.6),
    ("pape", 8): (35.7, 108.7),
    ("pape", 16): (36.1, 110.8),
    ("pape", 32): (36.8, 114.9),
    ("pape", 50): (37.6, 119.7),
    ("pape", 64): (38.2, 123.3),
    ("pape_ri", 0): (35.3, 106.4),
}


@pytest.mark.parametrize(("row", "want"), PUBLISHED.items(), ids=str)
def test_every_entry_to_a_tenth(row: tuple[str, int], want: tuple[float, float]) -> None:
    found = [gflops(row[0], parabolas=row[1], training=training) for training in (False, True)]
    assert found == pytest.approx(want, abs=0.0501)
