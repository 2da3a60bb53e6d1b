"""A claim's verdict follows from the seeds by the rule that the report states."""

import math

import numpy as np
import pytest
from scipy import stats

from ftis_node.lab.reporting.claims import Finding, judge
from ftis_node.lab.reporting.results import read_results
from ftis_node.lab.reporting.statistics import not_worse
from tests.support.lab_report import Laboratory

SPREAD = [-0.012, 0.009, -0.004, 0.011, -0.008, 0.002, 0.007, -0.005]  # of mean 0: what seeds differ by


def around(mean, scale=1.0):
    return [mean + scale * spread for spread in SPREAD]


def judged(lab):
    return judge(read_results(lab.write()))


VERDICTS = [
    ("greater", 0.1, 1, "reproduced"),
    ("greater", 0.02, 1, "reproduced"),  # smaller than the margin, but there
    ("greater", 0.0, 1, "not reproduced"),  # as good as the same
    ("greater", -0.1, 1, "not reproduced"),
    ("greater", 0.03, 8, "inconclusive"),
    ("less", -0.1, 1, "reproduced"),
    ("less", 0.1, 1, "not reproduced"),
    ("same", 0.0, 1, "reproduced"),
    ("same", 0.015, 1, "reproduced"),  # significantly different, but within the margin
    ("same", 0.1, 1, "not reproduced"),
    ("same", 0.027, 1, "inconclusive"),  # significantly different, and perhaps beyond the margin
    ("same", 0.0, 8, "inconclusive"),
    ("not worse", 0.2, 8, "reproduced"),
    ("not worse", 0.0, 1, "reproduced"),
    ("not worse", -0.015, 1, "reproduced"),
    ("not worse", -0.1, 1, "not reproduced"),
    ("not worse", 0.0, 8, "inconclusive"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Finding]:
    """Of each line above, in a family of its own."""
    lab = Laboratory(tmp_path_factory.mktemp("verdicts"))
    lab.cell("base", {"A": 0.5})
    for line in VERDICTS:
        compare, shift, scale, _ = line
        name = str(line)
        lab.cell(name, {"A": around(0.5 + shift, scale)})
        lab.claim(compare, name, "base", family=name)
    return judged(lab)


@pytest.mark.parametrize("line", VERDICTS)
def test_each_verdict(found, line):
    finding = found[VERDICTS.index(line)]
    _, shift, _, verdict = line
    assert finding.verdict == verdict
    assert finding.evidence.difference.mean == pytest.approx(shift)


def test_non_inferiority_is_the_one_sided_t_test():
    draw = np.random.default_rng(1)
    for shift in (-0.05, -0.01, 0.0, 0.02, 0.3):
        a = draw.normal(0.5 + shift, 0.05, 7)
        b = draw.normal(0.5, 0.05, 7)
        oracle = stats.ttest_1samp(a - b, -0.03, alternative="greater").pvalue
        assert not_worse(list(a), list(b), margin=0.03) == pytest.approx(oracle)

    for level, p in (
        (0.5, 0),
        (0.9, 0),
        (0.4, 1),
    ):
        assert not_worse([level] * 3, [0.5] * 3, margin=0.03) == p
    assert math.isnan(not_worse([0.9], [0.5], margin=0.03))


def test_the_mean_over_nodes_is_of_those_that_both_cells_have(tmp_path):
    lab = Laboratory(tmp_path)
    lab.cell("two", {"A": 0.5, "B": 0.3})
    lab.cell("three", {"A": 0.6, "B": 0.5, "C": 0.0})
    for node in ("all", "B", "C"):
        lab.claim("greater", "three", "two", node=node)

    every, one, none = judged(lab)

    assert every.evidence.difference.mean == pytest.approx(0.15)
    assert one.evidence.difference.mean == pytest.approx(0.2)
    assert none.verdict == "inconclusive"
    assert none.evidence.difference.n == 0


def test_a_factor_turns_sooner_into_so_many_times_as_soon(tmp_path):
    ends = [0.9 + 0.001 * seed for seed in range(8)]
    lab = Laboratory(tmp_path, target=0.5)
    lab.cell("slow", {"A": [end - 0.3 for end in ends]})
    lab.cell("fast", {"A": ends})
    for factor in (1.0, 1.2, 3.0):
        lab.claim("less", "fast", "slow", measure="time", factor=factor, family=str(factor))

    verdicts = [finding.verdict for finding in judged(lab)]

    assert verdicts == ["reproduced", "reproduced", "not reproduced"]


def test_only_seeds_that_both_cells_finished_are_compared(tmp_path):
    lab = Laboratory(tmp_path)
    lab.cell("base", {"A": 0.5}, absent=[0])
    lab.cell("method", {"A": [0.0, *around(0.7)[1:6], 0.0, 0.0]}, unfinished=[6, 7])
    lab.claim("greater", "method", "base")

    (finding,) = judged(lab)

    difference = finding.evidence.difference
    assert difference.n == 5
    assert difference.mean == pytest.approx(0.2, abs=0.01)


def test_with_too_few_seeds_no_permutation_decides(tmp_path):
    lab = Laboratory(tmp_path, seeds=5)
    lab.cell("base", {"A": 0.5})
    lab.cell("method", {"A": around(0.8)})
    lab.claim("greater", "method", "base")
    lab.claim("not worse", "method", "base", family="other")

    greater, other = judged(lab)

    assert greater.verdict == "inconclusive"
    assert greater.evidence.p == greater.adjusted_for == 2 / 32
    assert other.verdict == "reproduced"


def test_holm_adjusts_all_kinds_of_a_family_together(tmp_path):
    lab = Laboratory(tmp_path)
    lab.cell("base", {"A": 0.5})
    lab.cell("method", {"A": around(0.9)})
    lab.cell("twin", {"A": around(0.5)})
    lab.claim("greater", "method", "base")
    lab.claim("same", "twin", "base")
    lab.claim("greater", "method", "base", family="alone")

    greater, same, apart = judged(lab)

    assert same.evidence.p_for < greater.evidence.p_for == 2 / 256
    assert same.adjusted_for == pytest.approx(2 * same.evidence.p_for)
    assert greater.adjusted_for == greater.evidence.p_for == apart.adjusted_for  # the last of its family
    assert greater.adjusted_against == same.adjusted_against == 1


def test_one_seed_decides_nothing(tmp_path):
    lab = Laboratory(tmp_path, seeds=1)
    lab.cell("base", {"A": 0.5})
    lab.cell("method", {"A": 0.9})
    for compare in ("greater", "less", "same", "not worse"):
        lab.claim(compare, "method", "base")
    for finding in judged(lab):
        assert finding.verdict == "inconclusive"
        assert math.isnan(finding.evidence.difference.low)


def costly(tmp_path):
    lab = Laboratory(tmp_path, target=0.5)
    for name, end in (
        ("slow", 0.6),
        ("fast", 0.9),
        ("never", 0.3),
    ):
        lab.cell(name, {"A": around(end)})
    return lab


@pytest.mark.parametrize(("measure", "per_step"), [("time", 2.0), ("generated", 144.0)])
def test_costs_are_compared_where_all_seeds_reached_the_target(tmp_path, measure, per_step):
    lab = costly(tmp_path)
    lab.claim("less", "fast", "slow", measure=measure)
    lab.claim("less", "fast", "never", measure=measure)

    reached, censored = judged(lab)

    # the curve rises from 0.2 to its end in 15 steps, so it is at 0.5 after 15·0.3/(end − 0.2)
    fast, slow = (4.5 / (np.array(around(end)) - 0.2) for end in (0.9, 0.6))
    saved = (fast - slow).mean()
    assert reached.verdict == "reproduced"
    assert reached.evidence.difference.mean == pytest.approx(per_step * saved)
    assert censored.verdict == "inconclusive"
    assert censored.evidence.difference.n == 8
    assert math.isnan(censored.evidence.difference.mean), "a seed that never got there has no cost"


def test_a_cost_has_no_margin_unless_the_claim_states_one(tmp_path):
    lab = costly(tmp_path)
    lab.claim("not worse", "fast", "slow", measure="time")
    lab.claim("not worse", "fast", "slow", measure="time", margin=1.0)
    without, within = judged(lab)
    assert without.verdict == "inconclusive"
    assert math.isnan(without.evidence.margin_used)
    assert within.verdict == "reproduced"  # less time is better


def test_another_set_is_judged_by_its_own_evaluations(tmp_path):
    lab = Laboratory(tmp_path)
    lab.cell("a", {"A": around(0.8)}, harder=True)
    lab.cell("b", {"A": 0.6}, harder=True)
    for name in ("harder", "unheard of"):
        lab.claim("greater", "a", "b", set=name)

    harder, unknown = judged(lab)

    assert harder.evidence.difference.mean == pytest.approx(0.1)
    assert unknown.evidence.difference.n == 0
