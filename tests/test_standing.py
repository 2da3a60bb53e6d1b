"""Standing goes by evidence: bans for what is proven, less weight for what looks wrong, and nothing for bad luck."""

import json
import logging
import math
import random
from collections import Counter

import numpy as np
import pytest

from ftis_node.learner.batch import after_both
from ftis_node.node.standing import ReputationFile
from ftis_node.objective.diagnostics import TOLERANCE
from ftis_node.swarm import books as book
from ftis_node.swarm.books import BAN_SECONDS
from ftis_node.swarm.claims import DISPROVED, DOUBTED, Claims
from ftis_node.swarm.limits import PEERS_MAX, Budgets
from ftis_node.swarm.pool import NO_LIMIT, Newcomers, Pool
from ftis_node.swarm.reputation import Reputation
from tests.support.clock import Clock
from tests.support.evidence import established, figures, of_ratios
from tests.support.swarm import identity, scored

ALICE, BOB, CAROL = (identity(number).author for number in range(1, 4))
SAMPLES, TOKENS, WORDS = 8, 10, 16


def log_ratios(rng, apart, lie=1.0, samples=SAMPLES, tokens=TOKENS):
    """log ρ of an author whose policy is `apart` from ours and who claims `lie` times its probabilities."""
    logits = rng.normal(size=(samples, tokens, WORDS)) * 1.5
    ours = logits + apart * rng.normal(size=logits.shape)
    taken = (logits + rng.gumbel(size=logits.shape)).argmax(-1)[..., None]

    def logprobs(of):
        return np.take_along_axis(of - np.log(np.exp(of).sum(-1, keepdims=True)), taken, -1)[..., 0]

    return logprobs(ours) - logprobs(logits) - np.log(lie)


def drawn(*of):
    """A step's figures of such an author."""
    return of_ratios(log_ratios(*of))


def picked(reputation, *peers):
    """How often each is asked, of 300 times."""
    rng = random.Random(0)
    return Counter(reputation.pick(peers, rng) for _ in range(300))


def found_out(reputation, rng, *lie):
    """An author lies in this way until it is banned, at most for twenty steps."""
    for _ in range(20):
        reputation.trained(ALICE, 1, drawn(rng, *lie))
        if reputation.banned(ALICE):
            return
    pytest.fail(f"it is not found out: {reputation.report(ALICE)}")


# --- bans -------------------------------------------------------------------------------------------------------------


def test_three_refused_packets_within_an_hour_are_a_ban_and_one_a_day_is_none(clock):
    reputation = Reputation(clock)
    for _ in range(10):
        reputation.refused(ALICE, "malformed")
        clock.now += 24 * 3600
    assert not reputation.banned(ALICE)
    for _ in range(3):
        assert not reputation.banned(BOB)
        reputation.refused(BOB, "EOS interior")
        clock.now += 60
    assert "EOS interior" in reputation.banned(BOB)
    assert not reputation.banned(ALICE)
    assert reputation.report(BOB)["refused"] == {"EOS interior": 3}


def test_each_ban_is_longer_than_the_one_before_and_a_good_day_forgives(clock):
    reputation = Reputation(clock)
    for longer in (1, 4, 16):
        reputation.ban(ALICE, "it lied")
        clock.now += BAN_SECONDS * longer - 1
        assert reputation.banned(ALICE) == "it lied"
        clock.now += 2
        assert not reputation.banned(ALICE)
    clock.now += book.FORGIVING_SECONDS
    reputation.ban(ALICE, "again")
    clock.now += BAN_SECONDS + 1
    assert not reputation.banned(ALICE)


def test_of_a_banned_author_nothing_is_pulled_and_why_is_told(clock, caplog):
    caplog.set_level(logging.WARNING)
    reputation = Reputation(clock)
    assert reputation.may_be_pulled(ALICE, 48)
    reputation.equivocated(ALICE)
    assert not reputation.may_be_pulled(ALICE, 48)
    assert "two different announcements" in caplog.text
    assert reputation.left_alone() == {ALICE: "it signed two different announcements of one round"}


def test_a_peer_that_passes_on_forgeries_is_left_alone_and_one_that_fails_is_only_asked_less(clock):
    reputation = Reputation(clock)
    reputation.failed(BOB)
    assert not reputation.shunned(BOB)
    assert 0 < picked(reputation, ALICE, BOB, CAROL)[BOB] < 60
    clock.now += 24 * 3600
    assert picked(reputation, ALICE, BOB, CAROL)[BOB] > 60, "that was yesterday"
    for _ in range(3):
        assert not reputation.shunned(CAROL)
        reputation.lied(CAROL, "passed on forged announcements")
    assert reputation.shunned(CAROL) == "it passed on forged announcements"
    assert not reputation.banned(CAROL), "what it signs itself is another matter"


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [0.0, 0.05, 0.5, 2.0])
def test_honest_claims_are_never_held_against_anybody_however_far_the_policies_are_apart(apart):
    rng = np.random.default_rng(0)
    for number in range(4):
        reputation = Reputation(Clock())
        for _ in range(200):
            reputation.trained(ALICE, 1, drawn(rng, apart))
            assert reputation.weight(ALICE) == 1.0, f"author {number}: {reputation.report(ALICE)}"
        assert reputation.established(ALICE)


def test_honest_short_answers_keep_the_level_however_often_one_looks():
    """One-token answers, judged every twelve samples: a fixed bound of two standard errors doubts one author in ten."""
    rng = np.random.default_rng(0)
    paid = []
    for _ in range(60):
        claims = Claims()
        most = 0.0
        for look in np.split(log_ratios(rng, 0.225, samples=2004, tokens=1), 167):
            claims.add(of_ratios(look))
            most = max(most, claims.paid)
        paid.append(most)
    assert sum(most >= DOUBTED for most in paid) <= 2, "at most 4 %"
    assert max(paid) < DISPROVED, "at most 0.4 %"


def test_a_weak_honest_author_is_not_doubted_although_groups_are_picked_by_their_rewards():
    """Right in one of ten, the reader in two of ten: given that rewards differ, the mean of ρ over all is above 1."""
    rng = np.random.default_rng(0)
    order = random.Random(0)
    means = []
    claims = Claims()
    ratio = np.log([0.8 / 0.9, 0.2 / 0.1])  # by whether it is right
    for right in rng.random((2000, 8)) < 0.1:
        if right.all() or not right.any():
            continue
        ratios = ratio[right.astype(int)]
        means.append(np.exp(ratios).mean())
        judged = after_both(right.astype(float).tolist(), [True] * 8, order)
        if any(judged):
            claims.add(of_ratios(ratios[judged][:, None]))
        assert claims.paid < DOUBTED
    assert np.mean(means) > 1.05
    assert claims.samples > 1000
    assert abs(claims.mean_weight - 1) < 3 * claims.error


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_row_10_an_author_that_begins_to_lie_late_is_found(rng, clock):
    reputation = Reputation(clock)
    for _ in range(1000):
        reputation.trained(ALICE, 1, drawn(rng, 0.357, 1.0, 12, 3))
    assert reputation.established(ALICE)
    found_out(reputation, rng, 0.357, math.exp(-0.2), 12, 3)


def test_claims_that_rounding_lowers_are_never_doubted(rng, clock):
    reputation = Reputation(clock)
    for _ in range(1000):
        reputation.trained(ALICE, 1, drawn(rng, 0.05, math.exp(-TOLERANCE)))
        assert reputation.weight(ALICE) == 1.0


@pytest.mark.parametrize(
    ("lie", "apart"),
    [
        (0.9, 0.05),
        (0.5, 0.5),
        (0.7, 1.0),
        (0.8, 1.672),
    ],
)
def test_row_10_too_low_claims_lead_to_a_ban_within_a_few_steps(lie, apart, rng, clock):
    reputation = Reputation(clock)
    found_out(reputation, rng, apart, lie)
    assert "min(ρ, 2)" in reputation.banned(ALICE)
    assert reputation.weight(ALICE) == 0.0
    assert not reputation.established(ALICE)


def test_row_10_too_high_claims_earn_nothing_and_need_no_ban(rng, clock):
    reputation = Reputation(clock)
    for _ in range(100):
        reputation.trained(ALICE, 1, drawn(rng, 0.5, 20.0))
    assert reputation.report(ALICE)["mean_importance"] < 0.1
    assert not reputation.banned(ALICE)


def test_doubted_claims_count_half_and_build_no_record(clock):
    reputation = Reputation(clock)
    reputation.trained(ALICE, 5, figures(64, paid=5.0))  # 148 to 1
    told = reputation.report(ALICE)
    assert told["weight"] == 0.5
    assert told["record"] == 0
    assert "doubted" in told["standing"]


def test_a_defence_that_is_off_gathers_evidence_and_does_nothing(clock):
    reputation = Reputation(clock, ())
    for _ in range(10):
        reputation.trained(ALICE, 1, figures(64, excess=300.0, squares=64.0, paid=10.0))
    assert not reputation.banned(ALICE)
    assert reputation.weight(ALICE) == 1.0
    assert reputation.report(ALICE)["mean_importance"] > 1.4
    established(reputation, BOB)
    assert reputation.newcomers_room(24) == NO_LIMIT


# --- newcomers --------------------------------------------------------------------------------------------------------


def test_row_15_who_has_no_record_shares_a_quarter_unless_nobody_has_one(clock):
    reputation = Reputation(clock)
    reputation.trained(ALICE, 5, figures())
    assert reputation.newcomers_room(24) == NO_LIMIT
    established(reputation, ALICE)
    assert reputation.newcomers_room(24) == 6
    assert reputation.newcomers_room(2) == 1
    reputation.ban(ALICE, "it lied")
    assert reputation.newcomers_room(24) == NO_LIMIT


def test_row_15_eight_sybils_get_a_quarter_of_the_batch_together(clock):
    reputation = Reputation(clock)
    pool = Pool(lambda: 600.0, clock, random.Random(0))
    known = bytes([8]) * 38
    established(reputation, known)
    for number in range(8):
        for round in range(4):
            pool.add(scored(number, round, 0, clock.now))
    for round in range(40):
        pool.add(scored(8, round, 0, clock.now))
    newcomers = Newcomers(lambda author: not reputation.established(author), reputation.newcomers_room(24))
    assert Counter(one.group.author == known for one in pool.take(24, newcomers)) == {True: 18, False: 6}
    assert len(pool.take(24, newcomers)) == 22, "in the same batch there is room for no more of them"


# --- rounds, floods, memory -------------------------------------------------------------------------------------------


def test_row_32_what_was_pulled_of_an_author_is_counted_by_the_step(clock):
    reputation = Reputation(clock)
    for _ in range(48):
        reputation.note_pull(ALICE, step_seconds=10.0)
    assert reputation.pulled(ALICE) == 48
    assert reputation.pulled(BOB) == 0
    clock.now += 10
    assert reputation.pulled(ALICE) == pytest.approx(24)


def test_row_31_identities_without_number_do_not_fill_the_books_nor_push_out_a_record(clock):
    reputation = Reputation(clock)
    established(reputation, ALICE)
    reputation.equivocated(BOB)
    for number in range(book.AUTHORS_MAX + 100):
        stranger = number.to_bytes(38, "big")
        reputation.refused(stranger, "malformed")
        reputation.failed(stranger)
    assert len(reputation.authors) == book.AUTHORS_MAX
    assert len(reputation.holders) == book.HOLDERS_MAX
    assert reputation.established(ALICE)
    assert reputation.banned(BOB)


def test_row_17_who_calls_without_end_is_not_answered_and_others_are(clock):
    calls = Budgets(clock, 50.0, 200.0)
    assert [calls.take(ALICE) for _ in range(205)] == [True] * 200 + [False] * 5
    assert calls.take(BOB)
    clock.now += 1.0
    assert [calls.take(ALICE) for _ in range(60)].count(True) == 50
    for number in range(2 * PEERS_MAX):
        calls.take(number.to_bytes(38, "big"))
    assert all(calls.take(ALICE) for _ in range(200)), "no more peers are remembered"
    slow = Budgets(clock, 0.2, 1.0)
    asked = 0
    for _ in range(600):
        clock.now += 0.5
        asked += slow.take(ALICE)
    assert asked >= 50, "what was asked for in vain is regained all the same"


# --- what is told and kept --------------------------------------------------------------------------------------------


def test_records_and_bans_outlive_the_process(tmp_path, clock):
    before = Reputation(clock)
    established(before, ALICE)
    before.trained(ALICE, 1, figures(64, paid=3.0))
    before.ban(BOB, "it lied")
    before.admitted(CAROL, completions=8, tokens=80)
    clock.now += 100
    ReputationFile(tmp_path / "standing.json", before).write()
    later = Clock(7.0)
    after = Reputation(later)
    ReputationFile(tmp_path / "standing.json", after)
    assert after.established(ALICE)
    assert after.banned(BOB) == "it lied"
    assert CAROL not in after.authors
    for told in ("mean_importance", "loss_share"):
        assert after.report(ALICE)[told] == before.report(ALICE)[told] != 0.0
    claims = after.authors[ALICE].claims
    assert claims == before.authors[ALICE].claims
    assert claims.paid > 10
    later.now += BAN_SECONDS - 99
    assert not after.banned(BOB)


ENDLESS = '{"authors": {"00": {"sound": 1e999, "ban": {"left": 0, "reason": "", "level": 1}}}}'
DAMAGED = ["", "[]", "{}", '{"authors": {"zz": {}}}', '{"authors": []}', "\x00", "1e999", ENDLESS, "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGED)
def test_row_21_a_damaged_book_makes_everybody_a_newcomer(tmp_path, text, clock, caplog):
    path = tmp_path / "standing.json"
    path.write_text(text)
    reputation = Reputation(clock)
    books = ReputationFile(path, reputation)
    assert not reputation.authors
    assert "damaged" in caplog.text
    books.write()
    assert json.loads(path.read_text()) == {"authors": {}}


def test_what_a_peer_is_told_to_be_is_in_plain_words(clock):
    reputation = Reputation(clock)
    assert reputation.report(ALICE)["standing"] == "newcomer"
    reputation.admitted(ALICE, completions=4, tokens=40)
    reputation.scored(ALICE, (1.0, 0.0, 0.0, 0.0), signal=True)
    reputation.scored(ALICE, (0.0, 0.0, 0.0, 0.0), signal=False)
    told = reputation.report(ALICE)
    assert told["mean_length"] == 10.0
    assert told["mean_reward"] == 0.125
    assert told["no_signal"] == 1
    established(reputation, ALICE)
    assert reputation.report(ALICE)["standing"] == "established"


def test_whose_groups_teach_nothing_is_pulled_from_less_and_again_when_they_do(clock):
    reputation = Reputation(clock)

    def pulled_a_step():
        clock.now += 1000.0
        count = 0
        while reputation.may_be_pulled(ALICE, 48):
            reputation.note_pull(ALICE, 1.0)
            count += 1
        return count

    assert pulled_a_step() == 48
    for _ in range(200):
        reputation.scored(ALICE, [0.0, 0.0], signal=False)
    assert pulled_a_step() == 1
    for _ in range(20):
        reputation.scored(ALICE, [0.0, 1.0], signal=True)
    assert pulled_a_step() == 48


@pytest.mark.parametrize("delivered", [4, 400])
def test_row_69_of_two_holders_who_delivered_less_lately_is_asked_more_but_four_times_at_most(clock, delivered):
    reputation = Reputation(clock)
    for _ in range(delivered):
        reputation.delivered(BOB)
    assert 40 < picked(reputation, ALICE, BOB)[BOB] < 100
    fresh = [number.to_bytes(38, "big") for number in range(31)]
    assert picked(reputation, BOB, *fresh)[BOB] > 30, "fresh keys share one chance"
    for _ in range(3):
        reputation.failed(ALICE)
    assert picked(reputation, ALICE, BOB)[ALICE] < 50, "a fault weighs more"
