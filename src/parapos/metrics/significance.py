"""Is one method better than another, given a few scores of each: every test that a report might name, side by side.

With three folds the choice of the test decides the answer, so `compare` makes all of them. One-sided tests ask whether
a is greater than b. A paired test takes a[i] and b[i] to be of the same fold or seed.

Scores are taken as the decimals that they are printed as, and sums are exact: 0.3 - 0.2 and 0.2 - 0.1 are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_EXACT = 100  # scores of one method in a rank test
MAX_SQUARE = Fraction(10) ** 300  # of t; what is larger counts as infinite
UCF101_RATIO = 0.39  # test clips over training clips of a fold


@dataclass(frozen=True)
class Test:
    """A test's result. df is None for tests without degrees of freedom."""

    __test__ = False  # pytest must not collect it

    name: str
    statistic: float
    p: float
    df: float | None = None


def mean(values: Sequence[float]) -> float:
    return float(_mean(_exact("values", values, 1)))


def sample_std(values: Sequence[float]) -> float:
    """The standard deviation with n - 1 in the denominator."""
    return math.sqrt(_variance(_exact("values", values, 2)))


def summary(values: Sequence[float], digits: int = 1) -> str:
    """For a table: mean ± sample standard deviation."""
    return f"{mean(values):.{digits}f} ± {sample_std(values):.{digits}f}"


def welch(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Welch's t-test of unpaired scores, whose variances may differ."""
    x, y = _exact("a", a, 2), _exact("b", b, 2)
    u, v = _variance(x) / len(x), _variance(y) / len(y)
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1)) if u + v else len(x) + len(y) - 2
    return _t_test("Welch unpaired", _mean(x) - _mean(y), u + v, df, one_sided)


def student(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Student's t-test of unpaired scores with one variance."""
    x, y = _exact("a", a, 2), _exact("b", b, 2)
    df = len(x) + len(y) - 2
    pooled = ((len(x) - 1) * _variance(x) + (len(y) - 1) * _variance(y)) / df
    variance = pooled * (Fraction(1, len(x)) + Fraction(1, len(y)))
    return _t_test("Student unpaired", _mean(x) - _mean(y), variance, df, one_sided)


def paired(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Student's t-test of the differences a[i] - b[i]."""
    differences = _differences(a, b)
    variance = _variance(differences) / len(differences)
    return _t_test("paired", _mean(differences), variance, len(differences) - 1, one_sided)


def paired_corrected(a: Sequence[float], b: Sequence[float], *, ratio: float, one_sided: bool = False) -> Test:
    """The paired test for folds that share training data, after Nadeau and Bengio: the variance of the mean difference
    is (1/n + ratio) of that of the differences. ratio: samples for testing over those for training."""
    if not (math.isfinite(ratio) and ratio >= 0):
        raise ValueError(f"ratio must be 0 or more, got {ratio!r}")
    differences = _differences(a, b)
    variance = (Fraction(1, len(differences)) + Fraction(repr(float(ratio)))) * _variance(differences)
    name = f"paired, overlapping folds ({ratio:g})"
    return _t_test(name, _mean(differences), variance, len(differences) - 1, one_sided)


def wilcoxon(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """Wilcoxon's signed-rank test, exact. The statistic is the sum of the ranks of positive differences.

    Differences of zero are left out. Equal ones share the mean of their ranks, and the signs alone are random.
    """
    differences = [d for d in _differences(a, b) if d]
    _check_few(len(differences))
    ranks = _doubled_ranks([abs(d) for d in differences])
    ways = {0: 1}
    for rank in ranks:
        ways = _added(ways, {total + rank: count for total, count in ways.items()})
    found = sum(rank for rank, d in zip(ranks, differences, strict=True) if d > 0)
    return Test(_named("Wilcoxon signed-rank", one_sided), found / 2, _tail(ways, found, one_sided))


def mann_whitney(a: Sequence[float], b: Sequence[float], *, one_sided: bool = False) -> Test:
    """The test of Mann and Whitney, exact: which ranks a has among all scores. The statistic is U of a.

    Equal scores share the mean of their ranks, and which scores are a's is random.
    """
    _check_few(max(len(a), len(b)))
    ranks = _doubled_ranks([*_exact("a", a, 1), *_exact("b", b, 1)])
    chosen: list[dict[int, int]] = [{0: 1}, *({} for _ in a)]  # by number of ranks taken: ways to reach a sum
    for rank in ranks:
        for k in range(len(a), 0, -1):
            chosen[k] = _added(chosen[k], {total + rank: count for total, count in chosen[k - 1].items()})
    found = sum(ranks[: len(a)])
    u = found / 2 - len(a) * (len(a) + 1) / 2
    return Test(_named("Mann-Whitney", one_sided), u, _tail(chosen[-1], found, one_sided))


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


def t_tail(t: float, df: float) -> float:
    """The probability that Student's t with df degrees of freedom exceeds t."""
    if not df > 0:
        raise ValueError(f"df must be positive, got {df!r}")
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    if square < df:  # else the digits of a small t are lost
        half = 0.5 - 0.5 * incomplete_beta(0.5, df / 2, square / (df + square))
    else:
        half = 0.5 * incomplete_beta(df / 2, 0.5, df / (df + square))
    return half if t >= 0 else 1 - half


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"expected a, b > 0 and x from 0 to 1, got a={a!r}, b={b!r}, x={x!r}")
    if x in (0, 1):
        return float(x)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front / a * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1/(1+ d1/(1+ d2/(1+ ...))) by Lentz's method, with the d of the incomplete beta function."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 10_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + factor * d) or tiny)
            c = (1 + factor / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            return value
    raise ArithmeticError(f"the incomplete beta function does not converge for a={a!r}, b={b!r}, x={x!r}")


def _t_test(name: str, difference: Fraction, variance: Fraction, df: Fraction | int, one_sided: bool) -> Test:
    """Scores without any spread decide by themselves: equal ones say nothing, others all."""
    square = difference**2 / variance if variance else Fraction()
    certain = square > MAX_SQUARE or (difference and not variance)
    t = math.copysign(math.inf if certain else math.sqrt(square), difference)
    p = t_tail(t, float(df)) if one_sided else min(1.0, 2 * t_tail(abs(t), float(df)))
    return Test(_named(name, one_sided), t, p, float(df))


def _named(name: str, one_sided: bool) -> str:
    return f"{name}, {'one' if one_sided else 'two'}-sided"


def _exact(name: str, values: Sequence[float], least: int) -> list[Fraction]:
    if len(values) < least:
        raise ValueError(f"{name} must have at least {least} scores, got {len(values)}")
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
    return [Fraction(repr(float(value))) for value in values]


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction()) / len(values)


def _variance(values: Sequence[Fraction]) -> Fraction:
    middle = _mean(values)
    return sum(((value - middle) ** 2 for value in values), Fraction()) / (len(values) - 1)


def _differences(a: Sequence[float], b: Sequence[float]) -> list[Fraction]:
    x, y = _exact("a", a, 2), _exact("b", b, 2)
    if len(x) != len(y):
        raise ValueError(f"a and b must have equally many scores to be paired, got {len(x)} and {len(y)}")
    return [u - v for u, v in zip(x, y, strict=True)]


def _doubled_ranks(values: Sequence[Fraction]) -> list[int]:
    """Twice the rank of each value from 1; equal values get the mean of theirs, so twice it is whole."""
    order = sorted(values)
    first = {value: i for i, value in reversed(list(enumerate(order)))}
    last = {value: i for i, value in enumerate(order)}
    return [first[value] + last[value] + 2 for value in values]


def _added(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    both = dict(one)
    for key, count in other.items():
        both[key] = both.get(key, 0) + count
    return both


def _tail(ways: dict[int, int], found: int, one_sided: bool) -> float:
    """The share of ways to reach at least `found`; two-sided: twice the smaller tail."""
    total = sum(ways.values())
    above = sum(count for value, count in ways.items() if value >= found)
    below = sum(count for value, count in ways.items() if value <= found)
    return above / total if one_sided else min(1.0, 2 * min(above, below) / total)


def _check_few(count: int) -> None:
    if count > MAX_EXACT:
        raise ValueError(f"a rank test is made for up to {MAX_EXACT} scores, got {count}")
