"""Is one method better than another, given a few scores of each: every test that a report might name, side by side.

With three folds the choice of the test decides the answer, so `compare` makes all of them, by scipy.stats. One-sided
tests ask whether a is greater than b. A paired test takes a[i] and b[i] to be of the same fold or seed.

Scores are taken as the decimals that they are printed as: 0.3 - 0.2 and 0.2 - 0.1 are equal. Rank tests leave out
differences of zero, and equal values share the mean of their ranks. Their p is exact: by the known distribution without
ties, and with ties by going through all signs or all ways to choose, if these are at most MOST_WAYS; beyond that it is
the normal approximation with correction for ties. Two-sided p of rank tests is twice the smaller tail. Scores without
any spread decide by themselves: equal ones say nothing (p = 1), others all (p = 0).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

UCF101_RATIO = 0.39  # test clips over training clips of a fold
MOST_WAYS = 2**16  # that a rank test with ties goes through


@dataclass(frozen=True)
class Test:
    """A test's result. df is None for tests without degrees of freedom."""

    __test__ = False  # pytest must not collect it

    name: str
    statistic: float
    p: float
    df: float | None = None


def summary(values: Sequence[float], digits: int = 1) -> str:
    """For a table: mean ± sample standard deviation."""
    checked = _checked("values", values, 2)
    return f"{statistics.mean(checked):.{digits}f} ± {statistics.stdev(checked):.{digits}f}"


def welch(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Welch's t-test of unpaired scores, whose variances may differ."""
    return _unpaired("Welch unpaired", a, b, one_sided, equal_var=False)


def student(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Student's t-test of unpaired scores with one variance."""
    return _unpaired("Student unpaired", a, b, one_sided, equal_var=True)


def paired(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Student's t-test of the differences a[i] - b[i]."""
    return _of_differences("paired", _differences(a, b), 0.0, one_sided)


def paired_corrected(a: Sequence[float], b: Sequence[float], *, ratio: float, one_sided: bool = False) -> Test:
    """The paired test for folds that share training data, after Nadeau and Bengio: the variance of the mean difference
    is (1/n + ratio) of that of the differences. ratio: samples for testing over those for training."""
    if not (math.isfinite(ratio) and ratio >= 0):
        raise ValueError(f"ratio must be 0 or more, got {ratio!r}")
    return _of_differences(f"paired, overlapping folds ({ratio:g})", _differences(a, b), ratio, one_sided)


def wilcoxon(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Wilcoxon's signed-rank test. The statistic is the sum of the ranks of positive differences."""
    from scipy import stats

    name, differences = _named("Wilcoxon signed-rank", one_sided), [d for d in _differences(a, b) if d]
    if not differences:
        return Test(name, 0.0, 1.0)
    method = _method([abs(d) for d in differences], 2 ** len(differences))
    values = _floats(differences)
    upper = stats.wilcoxon(values, alternative="greater", method=method)
    p = upper.pvalue if one_sided else stats.wilcoxon(values, method=method).pvalue
    return Test(name, float(upper.statistic), float(p))


def mann_whitney(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """The test of Mann and Whitney: which ranks a has among all scores. The statistic is U of a."""
    from scipy import stats

    x, y = _checked("a", a, 1), _checked("b", b, 1)
    method = _method([*x, *y], math.comb(len(x) + len(y), len(x)))
    side = "greater" if one_sided else "two-sided"
    result = stats.mannwhitneyu(_floats(x), _floats(y), alternative=side, method=method)
    return Test(_named("Mann-Whitney", one_sided), float(result.statistic), float(result.pvalue))


def compare(a: Sequence[float], b: Sequence[float], *, ratio: float = UCF101_RATIO) -> list[Test]:
    """All tests of a against b, score by score of the same fold. ratio is for the corrected paired test."""
    return [
        welch(a, b),
        student(a, b),
        paired(a, b),
        paired(a, b, one_sided=True),
        welch(a, b, one_sided=True),
        wilcoxon(a, b),
        mann_whitney(a, b),
        paired_corrected(a, b, ratio=ratio),
    ]


def table(
    a: Sequence[float], b: Sequence[float], names: tuple[str, str] = ("a", "b"), *, ratio: float = UCF101_RATIO
) -> str:
    """Both means with sample standard deviations, and all tests, as Markdown."""
    lines = [f"{name}: {summary(values, 2)} (n = {len(values)})" for name, values in zip(names, (a, b), strict=True)]
    lines += ["", f"| {names[0]} against {names[1]} | statistic | df | p |", "|---|---|---|---|"]
    for test in compare(a, b, ratio=ratio):
        df = "" if test.df is None else f"{test.df:.4g}"
        lines.append(f"| {test.name} | {test.statistic:.3f} | {df} | {test.p:.4f} |")
    return "\n".join(lines)


def _unpaired(name: str, a: Sequence[float], b: Sequence[float], one_sided: bool, *, equal_var: bool) -> Test:
    from scipy import stats

    x, y = _checked("a", a, 2), _checked("b", b, 2)
    if len(set(x)) == len(set(y)) == 1:
        return _certain(name, x[0] - y[0], len(x) + len(y) - 2, one_sided)
    scale = max(map(abs, (*x, *y)))
    side = "greater" if one_sided else "two-sided"
    result = stats.ttest_ind(_floats(x, scale), _floats(y, scale), equal_var=equal_var, alternative=side)
    return Test(_named(name, one_sided), float(result.statistic), float(result.pvalue), float(result.df))


def _of_differences(name: str, differences: Sequence[Decimal], ratio: float, one_sided: bool) -> Test:
    """ratio: 0 for Student's test, else the correction of Nadeau and Bengio."""
    from scipy import stats

    df = len(differences) - 1
    if len(set(differences)) == 1:
        return _certain(name, differences[0], df, one_sided)
    values = _floats(differences, max(map(abs, differences)))
    error = statistics.stdev(values) * math.sqrt(1 / len(values) + ratio)
    t = statistics.fmean(values) / error
    p = stats.t.sf(t, df) if one_sided else 2 * stats.t.sf(abs(t), df)
    return Test(_named(name, one_sided), t, float(p), float(df))


def _certain(name: str, difference: Decimal, df: int, one_sided: bool) -> Test:
    """Of scores without any spread."""
    t = math.copysign(math.inf, difference) if difference else 0.0
    p = (0.0 if t > 0 else 1.0 if t < 0 else 0.5) if one_sided else (0.0 if t else 1.0)
    return Test(_named(name, one_sided), t, p, float(df))


def _method(values: Sequence[Decimal], ways: int) -> Any:
    """How a rank test gets its p, as scipy.stats names it."""
    from scipy import stats

    if len(set(values)) == len(values):
        return "exact"
    return stats.PermutationMethod(n_resamples=MOST_WAYS + 1) if ways <= MOST_WAYS else "asymptotic"


def _named(name: str, one_sided: bool) -> str:
    return f"{name}, {'one' if one_sided else 'two'}-sided"


def _checked(name: str, values: Sequence[float], least: int) -> list[Decimal]:
    if len(values) < least:
        raise ValueError(f"{name} must have at least {least} scores, got {len(values)}")
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
    return [Decimal(repr(float(value))) for value in values]


def _differences(a: Sequence[float], b: Sequence[float]) -> list[Decimal]:
    x, y = _checked("a", a, 2), _checked("b", b, 2)
    if len(x) != len(y):
        raise ValueError(f"a and b must have equally many scores to be paired, got {len(x)} and {len(y)}")
    return [u - v for u, v in zip(x, y, strict=True)]


def _floats(values: Sequence[Decimal], scale: Decimal = Decimal(1)) -> list[float]:
    return [float(value / scale) for value in values]
