"""docs/results/sparse.md has the numbers of docs/results/sparse/numbers.csv, and they hold what the page says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from parapos.bench import sparse, sparse_view

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "results" / "sparse.md").read_text(encoding="utf-8")
NUMBERS = sparse.Numbers.read(DOCS / "results" / "sparse" / "numbers.csv")


def test_tables_are_those_of_the_raw_numbers() -> None:
    block = PAGE.split("<!-- sparse -->\n")[1].split("\n<!-- /sparse -->")[0]
    assert block == sparse_view.markdown(NUMBERS)


def test_no_prediction_changes_unless_two_logits_were_close() -> None:
    looked_at = [values for values in NUMBERS.values.values() if "samples" in values]
    assert looked_at
    assert all(values["changed"] == 0 for values in looked_at)
    assert "Skipping moved no logit by more than 4e-6" in PAGE
    assert 0 < max(values["logits apart"] for values in looked_at) <= 4e-6


def test_every_model_was_looked_at_at_every_size() -> None:
    """As many samples as the page says, and shares of all."""
    counts = {1: 64, 2: 64, 4: 64, 8: 16, 16: 12}
    assert "64 samples up to 4x, 16 at 8x, 12 at 16x" in PAGE
    for data, encoding, factor in product(sparse.RECIPES, sparse.ENCODINGS, sparse.FACTORS):
        assert NUMBERS.values[data, encoding, factor]["samples"] == counts[factor]
        assert sparse_view.mean_share(NUMBERS, (data, encoding, factor)) is not None


@pytest.mark.parametrize("encoding", ["pape", "pape_ri"])
def test_the_share_falls_with_the_size(encoding: str) -> None:
    for data in dict.fromkeys(data for data, other, _ in NUMBERS.values if other == encoding):
        found = [sparse_view.mean_share(NUMBERS, (data, encoding, factor)) for factor in sparse.FACTORS]
        shares = [share for share in found if share is not None]
        assert shares == sorted(shares, reverse=True)


def test_the_sentence_about_digits_is_true() -> None:
    told = [f"{sparse_view.mean_share(NUMBERS, ('digits', 'pape', f)) or 0:.0%} at {f}x" for f in (4, 8, 16)]
    assert f"on digits {', '.join(told)}" in PAGE
