"""Significance tests: the paper's folds give the known values, SciPy and counting by hand agree."""

import itertools
import math

import numpy as np
import pytest

from parapos.metrics import significance
from parapos.metrics.significance import (
    compare,
    mann_whitney,
    paired,
    paired_corrected,
    student,
    summary,
    table,
    welch,
    wilcoxon,
)

PAPE, ROPE, MATCHED = [51.4, 48.2, 49.1], [45.3, 43.8, 42.8], [45.4, 46.2, 44.2]
EXPECTED = {  # name: p for RoPE, p for parameter-matched RoPE
    "Welch unpaired, two-sided": (0.0112, 0.0259),
    "Student unpaired, two-sided": (0.0095, 0.0183),
    "paired, two-sided": (0.0114, 0.0691),
    "paired, one-sided": (0.0057, 0.0345),
    "Welch unpaired, one-sided": (0.0056, 0.0130),
    "Wilcoxon signed-rank, two-sided": (0.25, 0.25),
    "Mann-Whitney, two-sided": (0.10, 0.10),
    "paired, overlapping folds (0.39), two-sided": (0.0242, 0.1342),
}


def test_the_published_folds():
    for test, other in zip(compare(PAPE, ROPE), compare(PAPE, MATCHED), strict=True):
        assert (round(test.p, 4), round(other.p, 4)) == EXPECTED[test.name]
    assert len(compare(PAPE, ROPE)) == len(EXPECTED)
    found = welch(PAPE, ROPE), welch(PAPE, MATCHED), paired(PAPE, ROPE), paired(PAPE, MATCHED)
    assert [round(test.statistic, 3) for test in found] == [4.674, 3.853, 9.290, 3.604]
    assert [round(test.df, 2) for test in found] == [3.74, 3.31, 2, 2]


def test_mean_and_sample_deviation():
    assert [summary(values, 2) for values in (PAPE, ROPE, MATCHED)] == ["49.57 ± 1.65", "43.97 ± 1.26", "45.27 ± 1.01"]
    assert summary([1e8, 1e8 + 1, 1e8 + 2]) == "100000001.0 ± 1.0"


def test_the_table_has_every_row():
    text = table(PAPE, ROPE, ("PaPE", "RoPE"))
    assert text.startswith("PaPE: 49.57 ± 1.65 (n = 3)\nRoPE: 43.97 ± 1.26 (n = 3)\n")
    for name, (p, _) in EXPECTED.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert row.endswith(f"| {p:.4f} |")
    assert "| Welch unpaired, two-sided | 4.674 | 3.738 | 0.0112 |" in text


def draws(rng):
    """Pairs of samples of all sizes and spreads, and their sizes' equal part."""
    for n, m in itertools.product((2, 3, 5, 8), repeat=2):
        a, b = rng.normal(0.5, 2, n), rng.normal(0, rng.uniform(0.1, 3), m)
        yield a.tolist(), b.tolist()


def test_scipy_agrees():
    stats = pytest.importorskip("scipy.stats")
    for a, b in draws(np.random.default_rng(0)):
        for one_sided in (False, True):
            side = "greater" if one_sided else "two-sided"
            pairs = [
                (welch(a, b, one_sided=one_sided), stats.ttest_ind(a, b, equal_var=False, alternative=side)),
                (student(a, b, one_sided=one_sided), stats.ttest_ind(a, b, alternative=side)),
                (mann_whitney(a, b, one_sided=one_sided), stats.mannwhitneyu(a, b, alternative=side, method="exact")),
            ]
            if len(a) == len(b):
                pairs.append((paired(a, b, one_sided=one_sided), stats.ttest_rel(a, b, alternative=side)))
                exact = stats.wilcoxon(a, b, alternative=side, method="exact")
                assert wilcoxon(a, b, one_sided=one_sided).p == pytest.approx(exact.pvalue, rel=1e-12)
            for got, want in pairs:
                assert got.statistic == pytest.approx(want.statistic, rel=1e-12)
                assert got.p == pytest.approx(want.pvalue, rel=1e-11)
                if got.df is not None:
                    assert got.df == pytest.approx(want.df, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_rank_tests_count_all_ways(seed):
    """With ties and differences of zero, which draws of whole numbers bring."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 5, (2, 6)).tolist()
    ranks = lambda values: [sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values]  # noqa: E731
    d = [x - y for x, y in zip(a, b, strict=True) if x != y]
    sizes = ranks([abs(x) for x in d])
    found = sum(r for r, x in zip(sizes, d, strict=True) if x > 0)
    sums = [
        sum(r for r, s in zip(sizes, signs, strict=True) if s) for signs in itertools.product((0, 1), repeat=len(d))
    ]
    above = np.mean([s >= found for s in sums])
    assert wilcoxon(a, b, one_sided=True).p == pytest.approx(above)
    assert wilcoxon(a, b).p == pytest.approx(min(1, 2 * min(above, np.mean([s <= found for s in sums]))))
    both = ranks(a + b)
    found = sum(both[:6])
    sums = [sum(chosen) for chosen in itertools.combinations(both, 6)]
    above = np.mean([s >= found for s in sums])
    assert mann_whitney(a, b, one_sided=True).p == pytest.approx(above)
    assert mann_whitney(a, b).p == pytest.approx(min(1, 2 * min(above, np.mean([s <= found for s in sums]))))


def test_differences_are_those_of_decimals():
    """0.3 - 0.2 and 0.2 - 0.1 differ in binary, so they would not share a rank."""
    assert (
        wilcoxon([0.3, 0.2, 0.5], [0.2, 0.1, 0.7], one_sided=True).p == wilcoxon([3, 2, 5], [2, 1, 7], one_sided=True).p
    )
    assert paired([1.1, 2.2, 3.3], [1.0, 2.1, 3.2]).p == 0


def test_correction_for_shared_training_data():
    assert paired_corrected(PAPE, ROPE, ratio=0).p == paired(PAPE, ROPE).p
    ps = [paired_corrected(PAPE, ROPE, ratio=ratio).p for ratio in (0, 0.1, 0.39, 1)]
    assert ps == sorted(ps)
    factor = math.sqrt((1 / 3 + 0.39) / (1 / 3))
    assert paired_corrected(PAPE, ROPE, ratio=0.39).statistic == pytest.approx(paired(PAPE, ROPE).statistic / factor)
    with pytest.raises(ValueError, match="ratio must be 0 or more, got -1"):
        paired_corrected(PAPE, ROPE, ratio=-1)


def test_swapping_the_methods():
    for make in (welch, student, paired, wilcoxon, mann_whitney):
        assert make(ROPE, PAPE).p == pytest.approx(make(PAPE, ROPE).p)
        assert make(ROPE, PAPE, one_sided=True).p > 0.9


def test_scores_without_spread():
    for make in (welch, student, paired):
        assert (make([2, 2], [1, 1]).statistic, make([2, 2], [1, 1]).p) == (math.inf, 0)
        assert make([1, 1], [2, 2], one_sided=True).p == 1
        assert (make([1, 1], [1, 1]).statistic, make([1, 1], [1, 1]).p) == (0, 1)
    assert wilcoxon([1, 1], [1, 1]).p == 1
    assert mann_whitney([1, 1], [1, 1]).p == 1
    assert welch([1, 1 + 1e-200], [1, 1]).p == 1
    assert welch([0, 2e-170], [0, 1e-170]).p == pytest.approx(welch([0, 2], [0, 1]).p)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: welch([1], [1, 2]), "a must have at least 2 scores, got 1"),
        (lambda: student([1, 2], []), "b must have at least 2 scores, got 0"),
        (lambda: paired([1, 2], [1, 2, 3]), "equally many scores to be paired, got 2 and 3"),
        (lambda: welch([1, math.nan], [1, 2]), "a must be finite, got nan"),
        (lambda: mann_whitney([], [1]), "a must have at least 1 scores, got 0"),
        (lambda: summary([1]), "at least 2 scores, got 1"),
    ],
)
def test_bad_scores(call, told):
    with pytest.raises(ValueError, match=told):
        call()


def test_many_scores():
    """Without ties exact; with more ties than can be gone through, the normal approximation, near the exact p."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.2, 1, (2, 100)).tolist()
    stats = pytest.importorskip("scipy.stats")
    assert wilcoxon(a, b).p == stats.wilcoxon(a, b, method="exact").pvalue
    x, y = (np.round(values, 1).tolist() for values in (a, b))
    assert 2 ** len(x) > significance.MOST_WAYS
    assert wilcoxon(x, y).p == pytest.approx(wilcoxon(a, b).p, rel=0.1)
    assert mann_whitney(x, y).p == pytest.approx(mann_whitney(a, b).p, rel=0.1)
