"""author_weight=gain: what an author's groups bring is measured, and what brings little counts less."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch import Tensor

from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.learner import TrainingGroup
from ftis_node.policy.measure import geometry
from ftis_node.swarm.gained import FEWEST_GROUPS, LEAST_WEIGHT, MEMORY_GROUPS, Gained, usual_gain
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.pool import Scored
from ftis_node.swarm.standing import Standing
from tests.support.clock import Clock
from tests.support.evidence import established
from tests.support.learners import BATCH, FOREIGN, LORA, OWN, POLICY, assert_close, changed, gradient_of, learner
from tests.support.small_models import BUILT_IN
from tests.support.steppers import stepper
from tests.support.steps import step_report
from tests.support.swarm import group, identity, packet

ALICE, BOB, CAROL = (identity(number).author for number in range(1, 4))


# --- the measure ---------------------------------------------------------------------------------------------------


def product(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] * other[name]).sum()) for name in one)


def gradient(groups: list[TrainingGroup]) -> dict[str, Tensor]:
    """Of these groups by themselves, times their number: what they add to a batch's before it is divided."""
    subject = learner()
    subject.step(groups)
    return {name: value * len(groups) for name, value in gradient_of(subject).items()}


def test_a_gain_is_the_cosine_with_the_own_gradient_per_pair_of_groups() -> None:
    subject = learner(author_weight="gain")
    report = subject.step(BATCH)
    # of four groups of each, two have a signal
    mine, theirs = gradient(OWN), gradient(FOREIGN)
    cosine = product(mine, theirs) / math.sqrt(product(mine, mine) * product(theirs, theirs))
    assert report.gains["peer"] == pytest.approx(cosine / 2, abs=1e-5)
    first, second = gradient(OWN[:1]), gradient(OWN[1:2])
    cosine = product(first, second) / math.sqrt(product(first, first) * product(second, second))
    assert report.gains["own"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("policy", [POLICY, LORA], ids=["full", "lora"])
def test_to_measure_changes_no_gradient(policy: object) -> None:
    plain, measured = learner(policy), learner(policy, author_weight="gain")  # type: ignore[arg-type]
    assert plain.step(BATCH).gains == {} and measured.step(BATCH).gains.keys() == {"own", "peer"}
    assert_close(gradient_of(plain), gradient_of(measured))


def test_who_trains_against_ones_own_groups_has_a_negative_gain() -> None:
    turned = [changed(group, source="foe", rewards=[1 - r for r in group.parts[0].rewards]) for group in OWN]
    twins = [changed(group, source="twin") for group in OWN]
    gains = learner(objective="nois", author_weight="gain").step([*OWN, *turned, *twins]).gains
    assert gains["foe"] < -0.4 and gains["twin"] == pytest.approx(0.5, abs=1e-5)


def test_without_two_own_groups_with_a_signal_nothing_is_measured() -> None:
    subject = learner(author_weight="gain")
    assert subject.step([*OWN[:1], *OWN[2:], *FOREIGN]).gains == {}
    assert subject.step(FOREIGN).gains == {} and subject.step([]).gains == {}


def test_gains_do_not_hang_on_the_size_of_micro_batches() -> None:
    one, other = learner(author_weight="gain"), learner(author_weight="gain")
    other.micro_batch_tokens = 20
    assert one.step(BATCH).gains == pytest.approx(other.step(BATCH).gains, abs=1e-5)


def test_a_plan_counts_the_two_gradients_that_are_kept() -> None:
    shape = geometry(str(BUILT_IN / "tiny-a"))
    workload = Workload(8, 8, group=4, batch_groups=4)
    plain, measured = (
        plan(shape, 1 << 31, workload, Wishes(by_gain=by_gain, lora=False, dtype="float32"), "cpu", False)
        for by_gain in (False, True)
    )
    assert measured.memory.gradients - plain.memory.gradients == 2 * plain.memory.weights


# --- the weight ----------------------------------------------------------------------------------------------------


def known(mean: float) -> Gained:
    found = Gained()
    found.add(mean, 100)
    return found


def test_a_mean_forgets_and_needs_groups_to_be_known() -> None:
    found = Gained()
    found.add(1.0, int(FEWEST_GROUPS) - 1)
    assert not found.known and found.weight(2.0) == 1.0
    found.add(1.0, 2)
    assert found.known and found.mean == pytest.approx(1.0) and found.weight(2.0) == pytest.approx(0.5)
    for _ in range(int(MEMORY_GROUPS)):
        found.add(0.0, 1)
    assert found.mean < 0.5


def test_a_weight_is_the_part_of_what_is_usual_and_never_more_than_one_nor_nothing() -> None:
    assert known(0.3).weight(0.2) == 1.0
    assert known(0.05).weight(0.2) == pytest.approx(0.25)
    assert known(-0.3).weight(0.2) == LEAST_WEIGHT
    assert known(0.3).weight(0.0) == 1.0 and known(-0.3).weight(-0.1) == 1.0, "nobody gains: no measure"


def test_what_is_usual_is_the_upper_median_of_what_is_known() -> None:
    assert usual_gain([Gained()]) == 0.0
    assert usual_gain([known(0.2), known(-0.4), Gained()]) == pytest.approx(0.2)
    assert usual_gain([known(0.2), known(0.1), known(-0.4)]) == pytest.approx(0.1)


def test_an_author_that_brings_nothing_counts_a_tenth_and_the_others_stay(clock: Clock) -> None:
    standing = Standing(clock)
    assert standing.weight(ALICE) == 1.0
    standing.gained(None, 0.2, 50)
    standing.gained(ALICE, 0.2, 50)
    assert standing.weight(ALICE) == 1.0 and standing.weight(BOB) == 1.0
    standing.gained(BOB, -0.1, 50)
    standing.gained(CAROL, 0.1, 50)
    assert standing.weight(BOB) == LEAST_WEIGHT and standing.weight(CAROL) == pytest.approx(0.5)
    assert "doubted" not in standing.report(BOB).standing


def test_a_step_counts_the_groups_that_brought_it(tmp_path: Path) -> None:
    subject = stepper(tmp_path, others=2)
    groups = [
        Scored(group(author, packet(author, 0, slot)), (0.0, 1.0), 0.0)
        for author, slot in ((ALICE, 0), (ALICE, 1), (BOB, 0))
    ]
    gains = {"own": 0.3, peer_id(ALICE): 0.1, peer_id(BOB): 0.2}
    subject._judge(5, groups, step_report(gains=gains))
    assert subject.standing.own_gained == Gained(5.0, pytest.approx(1.5))
    assert subject.standing.authors[ALICE].gained == Gained(2.0, pytest.approx(0.2))
    assert subject.standing.authors[BOB].gained == Gained(1.0, pytest.approx(0.2))
    subject._judge(5, groups, step_report(gains=gains, skipped="loss or gradient was not finite"))
    assert subject.standing.own_gained.groups == 5.0, "a step that changed nothing says nothing"


def test_gains_outlive_a_restart_and_older_homes_have_none(clock: Clock) -> None:
    standing = Standing(clock)
    standing.gained(None, 0.2, 50)
    for author in (ALICE, BOB):
        established(standing, author)
    standing.gained(ALICE, 0.05, 50)
    facts = json.loads(json.dumps(standing.facts()))
    again = Standing(clock)
    again.take_up(facts)
    assert again.weight(ALICE) == standing.weight(ALICE) == pytest.approx(0.25) and again.weight(BOB) == 1.0
    for row in facts["authors"].values():
        del row["gained"]
    del facts["own_gained"]
    older = Standing(clock)
    older.take_up(facts)
    assert older.weight(ALICE) == 1.0
    assert older.own_gained.groups == 0
