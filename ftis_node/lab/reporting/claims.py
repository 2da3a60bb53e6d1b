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
"same", and a real gain that is smaller than the margin still is "greater". A seed that collapsed
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
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ftis_node.lab.manifest import ALL, Claim
from ftis_node.lab.reporting import statistics
from ftis_node.lab.reporting.results import Results, over_nodes
from ftis_node.lab.reporting.statistics import (
    Equivalence,
    Interval,
    no_interval,
    paired_difference,
    paired_permutation,
)

Verdict: TypeAlias = Literal["reproduced", "not reproduced", "inconclusive"]
LEVEL = 0.05
NO_TEST = Equivalence(math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Evidence:
    """One claim's raw figures; what could not be computed is nan.

    difference           of the pairs without a collapse
    mean                 of all pairs, which the tests are of
    collapsed            pairs with a collapse
    p                    of the permutation test
    margin_used          nan where none applies
    sameness             TOST
    p_not_worse          one-sided
    p_for, p_against     of the tests that decide, 1 where they cannot
    """

    difference: Interval
    mean: float = math.nan
    collapsed: int = 0
    p: float = math.nan
    margin_used: float = math.nan
    sameness: Equivalence = NO_TEST
    p_not_worse: float = math.nan
    p_for: float = 1.0
    p_against: float = 1.0


@dataclass(frozen=True)
class Finding:
    """A claim, its evidence, the p values that Holm's method adjusted within its family, and what follows."""

    claim: Claim
    evidence: Evidence
    adjusted_for: float
    adjusted_against: float

    @property
    def verdict(self) -> Verdict:
        """By both p values in this order, each below 0.05 or not."""
        if self.adjusted_for < LEVEL:
            return "reproduced"
        if self.adjusted_against < LEVEL:
            return "not reproduced"
        return "inconclusive"


def judge(results: Results) -> list[Finding]:
    """The finding of each claim of the manifest, in its order. Claims without a family are one family together."""
    claims = results.manifest.claims
    evidence = [weigh(results, claim) for claim in claims]
    families: dict[str, list[int]] = defaultdict(list)
    for place, claim in enumerate(claims):
        families[claim.family].append(place)
    supports: dict[int, float] = {}
    refutes: dict[int, float] = {}
    for places in families.values():
        supports |= statistics.holm({place: evidence[place].p_for for place in places})
        refutes |= statistics.holm({place: evidence[place].p_against for place in places})
    findings = []
    for place, claim in enumerate(claims):
        findings.append(Finding(claim, evidence[place], supports[place], refutes[place]))
    return findings


def weigh(results: Results, claim: Claim) -> Evidence:
    """The raw figures of one claim, before any adjustment for others.

    Nothing is tested where no seed is finished in both cells, or where one never reached the target of a cost.
    """
    nodes = [node for node in results.nodes(*claim.cells) if claim.node in (ALL, node)]
    first = over_nodes([results.claimed(claim.a, node, claim) for node in nodes])
    second = over_nodes([results.claimed(claim.b, node, claim) for node in nodes])
    seeds = sorted(first.keys() & second.keys())
    a = [claim.factor * first[seed] for seed in seeds]
    b = [second[seed] for seed in seeds]
    if not seeds or math.inf in a + b:
        return Evidence(no_interval(len(seeds)))
    fallen = set()
    if claim.measure == "final":
        for cell, node in itertools.product(claim.cells, nodes):
            fallen |= results.collapsed(cell, node, claim.on)
    return _tested(claim, a, b, [seed not in fallen for seed in seeds])


def _tested(claim: Claim, a: list[float], b: list[float], settled: list[bool]) -> Evidence:
    """Evidence of values by seed, of the claim's first cell and of its second; settled: of pairs without a collapse."""
    every = paired_difference(a, b)
    p = paired_permutation(a, b)
    margin = _margin(claim)
    sameness = NO_TEST
    p_not_worse = math.nan
    if not math.isnan(margin):
        sameness = statistics.equivalent(a, b, margin=margin)
        if claim.measure == "final":
            p_not_worse = statistics.not_worse(a, b, margin=margin)
        else:
            p_not_worse = statistics.not_worse(b, a, margin=margin)  # of costs less is better
    p_for, p_against = _decisive(claim, every.mean, p, margin, sameness.p, p_not_worse)
    difference = no_interval(0)
    if any(settled):
        kept_a = list(itertools.compress(a, settled))
        kept_b = list(itertools.compress(b, settled))
        difference = paired_difference(kept_a, kept_b)
    return Evidence(
        difference=difference,
        mean=every.mean,
        collapsed=settled.count(False),
        p=p,
        margin_used=margin,
        sameness=sameness,
        p_not_worse=p_not_worse,
        p_for=p_for,
        p_against=p_against,
    )


def _margin(claim: Claim) -> float:
    """The claim's margin, in the unit of its measure; nan where there is none."""
    if claim.margin is not None:
        return claim.margin
    if claim.measure == "final":
        return statistics.MARGIN
    return math.nan


def _decisive(
    claim: Claim,
    mean: float,
    p: float,
    margin: float,
    p_same: float,
    p_not_worse: float,
) -> tuple[float, float]:
    """p for the claim and p against it, 1 where a sign condition fails. mean: of the first cell's less the second's.

    p: of the permutation test; p_same, p_not_worse: nan where the test was impossible, which then decides nothing.
    """
    if math.isnan(p_same):
        p_same = 1.0
    if math.isnan(p_not_worse):
        p_not_worse = 1.0
    if claim.compare == "same":
        if abs(mean) >= margin:
            return p_same, p
        return p_same, 1.0
    if claim.compare == "not worse":
        worse = mean < 0
        if claim.measure != "final":
            worse = mean > 0  # of costs less is better
        if worse:
            return p_not_worse, p
        return p_not_worse, 1.0
    as_claimed = mean > 0
    if claim.compare == "less":
        as_claimed = mean < 0
    if as_claimed:
        return p, p_same
    return 1.0, min(p, p_same)
