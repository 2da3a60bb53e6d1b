"""Statistics over seeds: intervals, paired tests of a difference, of sameness, and of many claims at once.

No interval made of eight values alone can hold a mean that a rare collapse moves: where one seed in ten collapses, 43 %
of samples of eight show none. So a collapse is declared, counted and given an interval of its own (`collapse_share`),
and other intervals are of the seeds that did not collapse.

A value is one seed's figure, most often the final pass@1 of a node (0 to 1). Two methods are compared in pairs: the
i-th value of each is that of the i-th seed, whose warm-up checkpoint both started from. Every figure has the unit of
the values, except p, which has none.

All functions raise ValueError for values that are empty, not finite or, in pairs, of unequal number.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Sample: TypeAlias = NDArray[np.float64]
Key = TypeVar("Key")

MARGIN = 0.03  # of pass@1: what is called the same, stated before any run
EXACT_UP_TO = 16  # pairs, of which all 2^16 flips are tried
FLIPS = 99_999  # drawn for more pairs than that
COLLAPSED = 0.5  # of its start, and
FALLEN = 0.1  # under it: a seed that ends below both has collapsed
RESAMPLED_FROM = 4  # values on; of three a single one, drawn three times, would be a limit
ALL_RESAMPLES_UP_TO = 9  # values, of which all 24,310 resamples are weighed
RESAMPLES = 9_999  # drawn for more values than that
LEAST_SPREAD = 0.1  # of the sample's: what a resample has at least, for one value drawn again and again has none
ROUNDING = 5e-6  # of the values' size: what their six digits may add to equal numbers


@dataclass(frozen=True)
class Interval:
    """The mean of `n` values between the limits of its confidence interval, which are nan where n = 1."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Equivalence:
    """The mean difference of pairs, its 90 % interval, and p of the null that it is the margin or more."""

    difference: float
    low: float
    high: float
    p: float


def no_interval(n: int) -> Interval:
    """Where no mean can be told of `n` values."""
    return Interval(math.nan, math.nan, math.nan, n)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean x̄ with the wider, limit by limit, of two 95 % intervals.

    Student's (1908) is x̄ ± t(n−1, 0.975)·s/√n, where s² = Σ(x−x̄)²/(n−1). The studentised bootstrap's (Efron 1979) is
    x̄ − q·s/√n with q the 97.5 and 2.5 % points of (x̄*−x̄)√n/s* over resamples of the values, which heeds their skew;
    s* is at least `LEAST_SPREAD`·s. All resamples are weighed, or `RESAMPLES` that are the same each time. Of eight
    values it holds the mean in 96 % of normal samples, and in 94 % or more of those at a ceiling (Student's 88 to 94).

    One value says nothing of the spread: its limits are nan. Values that are all equal estimate a spread of 0 and have
    an interval of no width, which is the formula's answer and no certainty. Limits may lie outside [0, 1].
    """
    return _interval(_sample(values))


def collapse_share(collapsed: int, seeds: int) -> Interval:
    """The share of seeds that collapsed, with its exact 95 % interval (Clopper and Pearson 1934); 0 of 8 is up to 0.37.

    Raises:
        ValueError: also where more collapsed than there are.
    """
    test = stats.binomtest(collapsed, seeds)
    around = test.proportion_ci(0.95, method="exact")
    return Interval(collapsed / seeds, float(around.low), float(around.high), seeds)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """The mean of a−b with its interval over the pairs, as `mean_interval`; positive where `a` is the better."""
    differences, _ = _pairs(a, b)
    return _interval(differences)


def paired_permutation(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the null that a method's name does not matter within a pair (Fisher 1935, §21).

    Under it each difference d = a−b could as well be −d: p is the share of sign flips s with |Σ s·d| ≥ |Σ d|. Up to
    `EXACT_UP_TO` pairs all 2^n are tried, the observed one included, so that p is at least 2/2^n: fewer than 6 pairs
    cannot reach 0.05, nor can 8 in a Holm family of more than 6. For more than 16, N = `FLIPS` are drawn, k of
    them as extreme: p = (k+1)/(N+1) (Phipson and Smyth 2010). p is never 0, and 1 where all pairs are equal.

    scipy's `permutation_test` gives the same p but for two things: it doubles the smaller tail, thus 2(k+1)/(N+1), and
    it allows for rounding in proportion to Σ d, which misses ties where Σ d is nearly 0.
    """
    differences, rounding = _pairs(a, b)
    sizes = np.sort(np.abs(differences))  # neither the pairs' order nor a swap of a and b may change what is drawn
    observed = abs(float(differences.sum())) - rounding
    if len(sizes) <= EXACT_UP_TO:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate((sums + size, sums - size))
        return float(np.mean(np.abs(sums) >= observed))
    draw = np.random.default_rng(0)
    sums = np.zeros(FLIPS)
    for size in sizes:
        signs = draw.choice((-1.0, 1.0), FLIPS)
        sums += size * signs
    as_extreme = int(np.sum(np.abs(sums) >= observed))
    return (as_extreme + 1) / (FLIPS + 1)


def equivalent(a: Sequence[float], b: Sequence[float], *, margin: float = MARGIN) -> Equivalence:
    """Two one-sided paired t tests: is the mean of a−b within ±margin (Schuirmann 1987)?

    p is the larger one of `not_worse` either way round; p < 0.05 exactly where the 90 % interval lies within ±margin.
    `margin` has the unit of the values and is stated before they are seen.

    One pair allows no test: p and the limits are nan. Differences that are all equal, as where both methods always
    reach 1, have a p at its limit: 0 within the margin, 1 on it or beyond, which is no certainty.

    Raises:
        ValueError: also for a margin that is not finite and above 0.
    """
    p_low = not_worse(a, b, margin=margin)
    p_high = not_worse(b, a, margin=margin)
    differences, _ = _pairs(a, b)
    around = _student(differences, 0.9)
    return Equivalence(around.mean, around.low, around.high, max(p_low, p_high))


def not_worse(a: Sequence[float], b: Sequence[float], *, margin: float = MARGIN) -> float:
    """p of the null that the mean of a−b is −margin or less: the one-sided paired t test of non-inferiority.

    p < 0.05 exactly where the lower limit of the 90 % interval, a one-sided limit of 95 %, lies above −margin. nan for
    one pair; 0 or 1 where the differences do not vary.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin of {margin} is not finite and above 0")
    differences, rounding = _pairs(a, b)
    if len(differences) < 2:
        return math.nan
    if float(np.ptp(differences)) <= rounding:
        if float(differences.mean()) > rounding - margin:
            return 0.0
        return 1.0
    return float(stats.ttest_1samp(differences, -margin, alternative="greater").pvalue)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjusted p of each claim of a family: to believe those ≤ α errs in a share α of families at most (Holm 1979).

    With p₁ ≤ … ≤ p_m the adjusted p_i is max over j ≤ i of min(1, (m−j+1)·p_j), in the order of `p_values`; the claims
    may depend on one another. One that could not be tested belongs into the family with p = 1.

    Raises:
        ValueError: also for a p outside [0, 1].
    """
    raw = _sample(list(p_values.values()))
    if raw.min() < 0 or raw.max() > 1:
        raise ValueError("a p value lies outside [0, 1]")
    order = np.argsort(raw, kind="stable")
    factors = np.arange(len(raw), 0, -1)
    in_order = np.minimum(1.0, factors * raw[order])
    adjusted = np.empty(len(raw))
    adjusted[order] = np.maximum.accumulate(in_order)
    return dict(zip(p_values, adjusted.tolist(), strict=True))


def bands(curves: Sequence[Sequence[float]]) -> list[Interval]:
    """`mean_interval` over seeds at each position of their curves, one of the same length per seed.

    A band holds at each position by itself, not for the whole curve at once.
    """
    table = np.stack(list(map(_sample, curves)))
    return list(map(_interval, table.T))


def reached(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The first x at which a curve of (x, pass@1) reaches `target`, on straight lines between its evaluations.

    x is what the reaching costs (seconds or samples); it never falls. The curve's first x if it starts at or above the
    target; None if it never gets there, which is no large x: a mean over seeds must not leave it out silently.

    Raises:
        ValueError: also where x falls.
    """
    xs = _sample([x for x, _ in curve])
    ys = _sample([y for _, y in curve])
    _sample([target])
    if np.any(np.diff(xs) < 0):
        raise ValueError("x falls along the curve")
    if ys[0] >= target:
        return float(xs[0])
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y1 >= target:
            way = (target - y0) / (y1 - y0)
            x = float(x0 + way * (x1 - x0))
            return min(float(x1), x)
    return None


def _sample(values: Sequence[float]) -> Sample:
    """The values as an array. Raises ValueError if there are none, or one is not finite."""
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        raise ValueError("no values")
    if not np.isfinite(sample).all():
        raise ValueError("a value is not finite")
    return sample


def _pairs(a: Sequence[float], b: Sequence[float]) -> tuple[Sample, float]:
    """a−b, and how far rounding may have moved the sum of them: logged values have six digits
    (`trial.Trial._write`)."""
    first = _sample(a)
    second = _sample(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values make no pairs")
    size = float(np.abs(first).sum() + np.abs(second).sum())
    return first - second, ROUNDING * size


def _student(sample: Sample, level: float) -> Interval:
    """The mean with Student's interval at this level."""
    n = len(sample)
    mean = float(sample.mean())
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    error = float(sample.std(ddof=1)) / math.sqrt(n)
    quantile = float(stats.t.ppf((1 + level) / 2, n - 1))
    half = quantile * error
    return Interval(mean, mean - half, mean + half, n)


def _interval(sample: Sample) -> Interval:
    """See `mean_interval`."""
    student = _student(sample, 0.95)
    n = student.n
    mean = student.mean
    spread = float(sample.std())
    equal = spread <= ROUNDING * float(np.abs(sample).max())
    if n < RESAMPLED_FROM or equal:
        return student
    counts, weights = _resamples(n)
    apart = np.sort(sample) - mean  # the order of the seeds may not matter
    means = counts @ apart / n
    variances = counts @ apart**2 / n - means**2
    least = (LEAST_SPREAD * spread) ** 2
    spreads = np.sqrt(np.maximum(variances, least))
    below, above = np.quantile(
        means / spreads,
        (0.975, 0.025),
        weights=weights,
        method="inverted_cdf",
    )
    low = mean - float(below) * spread
    high = mean - float(above) * spread
    return Interval(mean, min(student.low, low), max(student.high, high), n)


@functools.cache
def _resamples(n: int) -> tuple[Sample, Sample]:
    """How often each resample has each value `[R, n]`, and the probability of each resample `[R]`."""
    if n > ALL_RESAMPLES_UP_TO:
        alike = np.full(n, 1 / n)
        drawn = np.random.default_rng(0).multinomial(n, alike, RESAMPLES)
        return drawn.astype(np.float64), np.full(RESAMPLES, 1 / RESAMPLES)
    chosen = np.array(list(itertools.combinations_with_replacement(range(n), n)))
    columns = [np.sum(chosen == value, axis=1) for value in range(n)]
    counts = np.stack(columns, axis=1).astype(np.float64)
    orders = math.factorial(n) / special.factorial(counts).prod(axis=1)
    return counts, orders / n**n
