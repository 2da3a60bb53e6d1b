"""Which claims of an experiment its seeds bear out, by a rule that was fixed before the runs.

For d = a−b of each seed (with a factor f·a−b), averaged over the nodes that the claim is
about:

compare     the test for it                                    the tests against it
greater     permutation, two-sided, if the mean of d is > 0    permutation if it is < 0, or TOST within ±margin
less        the same with the signs exchanged
same        TOST within ±margin                                permutation, if |mean of d| ≥ margin
not worse   t test of mean of d > −margin, one-sided           permutation if it is < 0

A claim is reproduced if the adjusted p of the test for it is below 0.05, else not reproduced if that of a test against
it is, else inconclusive. The order matters: a difference that is significant but smaller than the margin still is
"same", and a real gain that is smaller than the margin still is "greater"; the notes say so. A seed that collapsed
counts in every test with the value it has: one in eight is enough to leave "same" inconclusive, and in the first cell
"not worse" and "greater". The interval that is told is of the pairs in which no cell collapsed. No verdict says
anything of collapses too rare for the seeds to show. For costs (time, generated) less is better, so "not worse" takes d
with its sign exchanged, and there is no margin unless the claim states one in the cost's unit.

Families. Holm (1979) needs only valid p values, not tests of one kind. So the p values *for* all claims of a family are
adjusted together, whatever their kind: with 95 % none of the family is called reproduced wrongly. The p values
*against* them are adjusted among themselves alike. A p whose sign condition fails is 1, which only makes it larger, as
is one that could not be computed. Against "greater" the smaller of two p counts, which costs no further adjustment:
both tests err only where a is better by the margin or more, and there a mean that is significantly below 0 is also
significantly below the margin.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ftis_node.lab.manifest import ALL, Claim
from ftis_node.lab.reporting import statistics
from ftis_node.lab.reporting.results import Results, over_nodes
from ftis_node.lab.reporting.statistics import Equivalence, Interval, paired_difference, paired_permutation

Verdict: TypeAlias = Literal["reproduced", "not reproduced", "inconclusive"]
LEVEL = 0.05
NO_TEST = Equivalence(math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One claim's raw figures; what could not be computed is nan.

    difference: of the pairs without a collapse. mean: of all pairs, which the tests are of. collapsed: pairs with one.
    p: of the permutation test. margin: nan where none applies. sameness: TOST. p_not_worse: one-sided. p_for and
    p_against: of the tests that decide, 1 where they cannot. floor: the least that p_for can be with so few seeds.
    """

    difference: Interval
    p: float
    margin: float
    sameness: Equivalence
    p_not_worse: float
    p_for: float
    p_against: float
    floor: float
    notes: tuple[str, ...]
    mean: float = math.nan
    collapsed: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim, its evidence, the p values that Holm's method adjusted within its family, and what follows.

    floor: the least that `adjusted_for` can be with so few seeds and so many claims.
    """

    claim: Claim
    evidence: Evidence
    adjusted_for: float
    adjusted_against: float
    floor: float
    verdict: Verdict
    notes: tuple[str, ...]


def judge(results: Results) -> list[Finding]:
    """The finding of each claim of the manifest, in its order."""
    claims = results.manifest.claims
    evidence = [weigh(results, claim) for claim in claims]
    families: dict[str, list[int]] = defaultdict(list)
    for place, claim in enumerate(claims):
        families[claim.family].append(place)

    def adjust(of: Callable[[Evidence], float]) -> dict[int, float]:
        adjusted = {}
        for places in families.values():
            found = statistics.holm({str(place): of(evidence[place]) for place in places})
            adjusted.update({int(place): p for place, p in found.items()})
        return adjusted

    supports = adjust(lambda e: e.p_for)
    refutes = adjust(lambda e: e.p_against)
    floors = adjust(lambda e: e.floor)
    return [_finding(claim, evidence[i], supports[i], refutes[i], floors[i]) for i, claim in enumerate(claims)]


def weigh(results: Results, claim: Claim) -> Evidence:
    """The raw figures of one claim, before any adjustment for others."""
    nodes = [node for node in results.nodes(*claim.cells) if claim.node in (ALL, node)]
    per_cell = [over_nodes([results.claimed(cell, node, claim) for node in nodes]) for cell in claim.cells]
    seeds = sorted(set.intersection(*(set(values) for values in per_cell)))
    notes = _unpaired(results, claim, per_cell, seeds)
    if not seeds:
        return _untested(0, notes or ("no seed is finished in all of its cells",))
    columns = [[values[seed] for seed in seeds] for values in per_cell]
    if any(math.isinf(value) for column in columns for value in column):
        return _untested(len(seeds), (_censored(results, claim, columns), *notes))
    first = [claim.factor * value for value in columns[0]]
    fallen: set[int] = set()
    if claim.measure == "final":
        for cell, node in itertools.product(claim.cells, nodes):
            fallen |= results.collapsed(cell, node, claim.on)
    return _test(claim, first, columns[1], notes, [seed not in fallen for seed in seeds])


def _test(claim: Claim, a: list[float], b: list[float], notes: tuple[str, ...], settled: list[bool]) -> Evidence:
    """Evidence of values by seed, of the claim's first cell and of its second; settled: of pairs without a collapse."""
    difference = paired_difference(a, b)
    p = paired_permutation(a, b)
    margin = _margin(claim)
    has_margin = not math.isnan(margin)
    sameness = NO_TEST
    p_not_worse = math.nan
    if has_margin:
        sameness = statistics.equivalent(a, b, margin=margin)
        better, other = a, b
        if claim.measure != "final":
            better, other = b, a  # less is better
        p_not_worse = statistics.not_worse(better, other, margin=margin)
    p_for, p_against = _decisive(claim, difference.mean, p, margin, sameness.p, p_not_worse)
    if difference.n == 1:
        notes = ("one seed: no interval and no test", *notes)
    elif difference.low == difference.high:
        notes = ("the difference is the same for all seeds: an interval without width is no certainty", *notes)
    if not has_margin and claim.compare in ("same", "not worse"):
        notes = (f"the claim states no margin for its {claim.measure}: sameness was not tested", *notes)
    floor = _floor(claim, difference.n)
    mean = difference.mean
    collapsed = settled.count(False)
    if collapsed:
        difference = Interval(math.nan, math.nan, math.nan, 0)
        if any(settled):
            difference = paired_difference(*(list(itertools.compress(values, settled)) for values in (a, b)))
        notes = (f"a seed collapsed in {collapsed} of {len(settled)} pairs, which only the tests have", *notes)
    return Evidence(difference, p, margin, sameness, p_not_worse, p_for, p_against, floor, notes, mean, collapsed)


def _margin(claim: Claim) -> float:
    """In the unit of the claim's measure; nan where there is none."""
    if claim.margin is not None:
        return claim.margin
    if claim.measure == "final":
        return statistics.MARGIN
    return math.nan


def _decisive(
    claim: Claim, mean: float, p: float, margin: float, p_same: float, p_not_worse: float
) -> tuple[float, float]:
    """p for the claim and p against it, 1 where a sign condition fails or a test was impossible."""
    if math.isnan(p_same):
        p_same = 1.0
    if math.isnan(p_not_worse):
        p_not_worse = 1.0
    if claim.compare == "same":
        apart = abs(mean) >= margin
        return p_same, _if(apart, p)
    if claim.compare == "not worse":
        return p_not_worse, _if(_gain(claim, mean) < 0, p)
    as_claimed = mean > 0
    if claim.compare == "less":
        as_claimed = mean < 0
    if as_claimed:
        return p, p_same
    return 1.0, min(p, p_same)


def _if(sign: bool, p: float) -> float:
    """p, or 1 where its sign condition fails."""
    if sign:
        return p
    return 1.0


def _gain(claim: Claim, mean: float) -> float:
    """A mean difference, positive where the first cell is the better: of costs less is."""
    if claim.measure == "final":
        return mean
    return -mean


def _finding(claim: Claim, evidence: Evidence, supports: float, refutes: float, floor: float) -> Finding:
    verdict: Verdict = "inconclusive"
    if supports < LEVEL:
        verdict = "reproduced"
    elif refutes < LEVEL:
        verdict = "not reproduced"
    notes = list(evidence.notes)
    mean = evidence.difference.mean
    if verdict == "reproduced" and claim.compare in ("greater", "less") and abs(mean) < evidence.margin:
        notes.append(f"the difference is smaller than the margin of {evidence.margin:g}")
    if verdict == "reproduced" and claim.compare in ("same", "not worse") and evidence.p < LEVEL:
        if claim.compare == "not worse" and _gain(claim, mean) > 0:
            notes.append("it is even better (p unadjusted)")
        else:
            notes.append("there is a difference (p unadjusted), within the margin")
    if floor >= LEVEL and not math.isnan(evidence.p):
        notes.append(f"too few seeds: no result could have made the adjusted p smaller than {floor:.3g}")
    return Finding(claim, evidence, supports, refutes, floor, verdict, tuple(notes))


def _unpaired(results: Results, claim: Claim, per_cell: list[dict[int, float]], seeds: list[int]) -> tuple[str, ...]:
    empty = [results.label(cell) for cell, values in zip(claim.cells, per_cell, strict=True) if not values]
    if empty:
        where = ""
        if claim.node != ALL:
            where = f" for node {claim.node}"
        return (f"no value{where} on {claim.on} from {', '.join(dict.fromkeys(empty))}",)
    left_out = sorted({seed for values in per_cell for seed in values} - set(seeds))
    if not left_out:
        return ()
    return (f"without the seeds {', '.join(map(str, left_out))}, which not all cells have",)


def _censored(results: Results, claim: Claim, columns: list[list[float]]) -> str:
    counts = [
        f"{results.label(cell)} {sum(map(math.isfinite, column))} of {len(column)}"
        for cell, column in zip(claim.cells, columns, strict=True)
    ]
    return f"not tested: not every seed reached {results.manifest.target:g} ({', '.join(counts)})"


def _untested(n: int, notes: tuple[str, ...]) -> Evidence:
    difference = Interval(math.nan, math.nan, math.nan, n)
    return Evidence(difference, math.nan, math.nan, NO_TEST, math.nan, 1.0, 1.0, 1.0, notes)


def _floor(claim: Claim, n: int) -> float:
    """The smallest p that the claim's test of n pairs can have."""
    if claim.compare in ("same", "not worse"):
        return float(n < 2)
    if n <= statistics.EXACT_UP_TO:
        return 0.5 ** (n - 1)
    return 1 / (statistics.FLIPS + 1)
