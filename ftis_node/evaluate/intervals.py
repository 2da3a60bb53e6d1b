"""What chance may have done to rates: the interval of one, and of the difference of two on the same questions.

scipy's statistics take a second to import, which a daemon should not take before its first step.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ftis_node.evaluate.evaluation import PairedFigures
from ftis_node.evaluate.judging import Judged


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a rate that was `correct` of `count` (Wilson 1927, eq. 5); of none it is anything."""
    from scipy import stats

    if count == 0:
        return 0.0, 1.0
    interval = stats.binomtest(correct, count).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def paired(first: Sequence[Judged], second: Sequence[Judged]) -> PairedFigures:
    """Two policies' verdicts on the same questions in the same order."""
    right = (verdict.score.reward == 1.0 for verdict in first)
    also = (verdict.score.reward == 1.0 for verdict in second)
    pairs = Counter(zip(right, also, strict=True))
    return paired_figures(pairs[True, True], pairs[True, False], pairs[False, True], pairs[False, False])


def paired_figures(both: int, first: int, second: int, neither: int) -> PairedFigures:
    """The difference of pass@1, and how likely it is by chance, where so many were right by both, by one, by none."""
    from scipy import stats

    count = both + first + second + neither
    discordant = first + second
    low, high = _newcombe(both, first, second, neither)
    p = 1.0
    if discordant:
        p = stats.binomtest(first, discordant).pvalue
    difference = (first - second) / max(1, count)
    return PairedFigures(difference, low, high, float(p), both, first, second, neither)


def _newcombe(a: int, b: int, c: int, d: int) -> tuple[float, float]:
    """Newcombe's interval of a difference of paired proportions (1998, Stat. Med. 17:2635, method 10)."""
    n = a + b + c + d
    if n == 0:
        return -1.0, 1.0
    first = a + b
    second = a + c
    p1 = first / n
    p2 = second / n
    l1, u1 = wilson(first, n)
    l2, u2 = wilson(second, n)
    product: float = a * d - b * c
    if product > 0:
        product = max(product - n / 2, 0)  # corrected for continuity
    margins = first * (n - first) * second * (n - second)
    phi = 0.0
    if margins:
        phi = product / math.sqrt(margins)

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    below = reach(p1 - l1, u2 - p2)
    above = reach(u1 - p1, p2 - l2)
    return p1 - p2 - below, p1 - p2 + above
