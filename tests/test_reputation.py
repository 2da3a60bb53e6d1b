"""Keys that cost nothing erase nobody's record, silence nobody, and choose no prompts: rows 34 to 37 and 44."""

import json
import random
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.node.standing import ReputationFile
from ftis_node.swarm import books, gossip, rounds
from ftis_node.swarm.announcement import Announcement, PacketRef, PacketRefs, announce, decode_announcement
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.known import Outcome
from ftis_node.swarm.membership import INBOUND_MAX
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import BYTES_MAX, CAPACITY, Table
from tests.support.clock import Clock
from tests.support.crowds import Crowd
from tests.support.evidence import established, figures
from tests.support.swarm import RUN, eventually, identity, member
from tests.support.talkers import ALICE, BOB, CAROL, MALLORY, Talker, entry, made_by, mention

HOUR_MS = 3_600_000
START = 1_760_000_000


def key(number):
    return number.to_bytes(38, "big")


def put(table, author, round, first_sender, slots=3, size=46):
    """Add an unsigned announcement, for the table checks nothing; the two are named by their numbers."""
    who = key(author)
    refs = PacketRefs.of([PacketRef(slot, bytes(32), 1000, 1) for slot in range(slots)])
    made = Announcement(RUN.id, who, round, 0, 0, refs, bytes(64))
    data = who + round.to_bytes(8, "big")
    return table.add(
        made,
        data.ljust(size),
        age=0.0,
        first_sender=key(first_sender),
    )


@pytest.mark.virtual_time
async def test_row_34_throw_away_peers_leave_those_with_a_record_in_the_view(tmp_path):
    """Their addresses lie in networks of their own, as they say, and the honest ones' in one."""
    async with (
        member(1, tmp_path) as alice,
        member(2, tmp_path, [alice.address]) as bob,
        member(3, tmp_path, [alice.address]) as carol,
    ):
        await eventually(lambda: alice.met(bob, carol), "they have met")
        for one in (bob, carol):
            established(alice.swarm.reputation, one.author)
        membership = alice.swarm.membership
        for number in range(100, 400):
            who = identity(number)
            place = f"/ip4/127.{number % 250}.{number // 250}.1/tcp/4001/p2p/{who.peer_id}"
            membership.on_handshake(greeting(RUN, [place]), who.author)
        assert alice.met(bob, carol)
        assert len(membership.active_view) == INBOUND_MAX


@pytest.mark.virtual_time
async def test_row_34_half_of_the_places_for_inbound_peers_are_for_any(tmp_path):
    async with member(1, tmp_path) as alice:
        membership = alice.swarm.membership
        old = [key(number) for number in range(100, 164)]
        new = [key(number) for number in range(200, 260)]
        for author in old:
            established(alice.swarm.reputation, author)
        for author in [*old, *new]:
            membership.on_handshake(greeting(RUN, []), author)
        assert len(membership.active_view.keys() & set(old)) >= INBOUND_MAX // 2
        assert new[-1] in membership.active_view


# --- records and bans -------------------------------------------------------------------------------------------------


def test_row_34_throw_away_keys_that_contradict_themselves_evict_no_record_and_no_ban_of_one(clock):
    reputation = Reputation(clock)
    established(reputation, ALICE.author)
    established(reputation, BOB.author)
    reputation.ban(BOB.author, "it claims too low probabilities")
    reputation.trained(CAROL.author, 3, figures())
    strangers = [key(number) for number in range(5 * books.STRANGERS_BANNED_MAX)]
    for stranger in strangers:
        reputation.equivocated(stranger)
    assert reputation.established(ALICE.author)
    assert reputation.record(CAROL.author) == 3
    assert reputation.banned(BOB.author)
    assert len(reputation.authors) == 3
    assert len(reputation.left_alone()) == books.STRANGERS_BANNED_MAX + 1
    assert reputation.banned(strangers[-1]), "the latest of them are left alone"


def test_row_34_who_passes_on_contradictions_without_end_is_slowed_down_and_never_blamed():
    bob = Talker(BOB)

    def contradicts(number):
        who = identity(3000 + number)
        for packets in (1, 2):
            bob.hear([entry(made_by(who, packets=packets))], MALLORY.author)
        return bool(bob.reputation.banned(who.author))

    banned = [contradicts(number) for number in range(40)]
    assert 0 < sum(banned) <= gossip.CHECKS_AT_ONCE / gossip.CONTRADICTION_CHECKS + 1
    assert bob.gossip.counts["over the budget"] > 0
    assert not bob.reputation.shunned(MALLORY.author)
    bob.now += 2 * gossip.CONTRADICTION_CHECKS / gossip.CHECKS_A_SECOND
    assert contradicts(100), "and it may go on at a rate"
    assert bob.hear([entry(made_by(ALICE))], CAROL.author) == 1, "others pay nothing for it"


def test_row_35_of_many_authors_those_with_least_evidence_make_room_and_half_is_for_those_with_a_record(
    clock, monkeypatch
):
    monkeypatch.setattr(books, "AUTHORS_MAX", 20)
    reputation = Reputation(clock)
    first, *others = [key(number) for number in range(10)]
    for author in (first, *others):
        established(reputation, author)
    for number in range(100, 1100):
        reputation.admitted(key(number), completions=1, tokens=1)
    assert all(map(reputation.established, (first, *others)))
    assert len(reputation.authors) == 20
    late = key(2000)
    established(reputation, late)
    clock.now += books.EVIDENCE_HALF_LIFE
    for author in (*others, late):
        established(reputation, author)
    reputation.admitted(key(3000), completions=1, tokens=1)
    assert not reputation.established(first), "above their half, the one with the least fresh evidence goes"
    assert all(map(reputation.established, (*others, late)))


@pytest.mark.parametrize("authors", [1100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_row_35_in_a_swarm_of_thousands_some_become_established_and_stay_so(authors):
    heard = {1100: 60, 10_000: 300}
    crowd = Crowd(authors, heard=heard[authors])
    for _ in range(30):
        crowd.run(20)
        if crowd.established():
            break
    first = crowd.established()
    assert first
    assert crowd.reputation.newcomers_room(24) == 6, "both defences are on"
    crowd.run(60)
    assert first <= crowd.established()


def test_row_35_a_book_of_an_older_version_is_taken_up(tmp_path, clock):
    claims = {name: 0.0 for name in ("samples", "tokens", "excess", "squares", "surprising", "likelihood")}
    old = {
        ALICE.author.hex(): {"sound": 25, "claims": claims, "ban": {"left": 0.0, "reason": "", "level": 0}},
        BOB.author.hex(): {"sound": 0, "claims": claims, "ban": {"left": 60.0, "reason": "it lied", "level": 1}},
    }
    (tmp_path / "standing.json").write_text(json.dumps({"authors": old}))
    for _ in range(2):  # the second reads what this version wrote
        reputation = Reputation(clock)
        ReputationFile(tmp_path / "standing.json", reputation).write()
        assert reputation.established(ALICE.author)
        assert reputation.banned(BOB.author) == "it lied"


# --- rounds -----------------------------------------------------------------------------------------------------------


class Receiver:
    """A node that hears of rounds, with both clocks in hand."""

    def __init__(self):
        self.clock = Clock()
        self.unix = float(START)
        self.rounds = rounds.Rounds(self.clock, lambda: self.unix)

    def passes(self, seconds):
        self.clock.now += seconds
        self.unix += seconds

    def takes(self, round):
        return self.rounds.follows(b"author", int(round))


def test_row_36_rounds_told_from_the_top_downwards_choose_no_prompts():
    receiver = Receiver()
    assert not receiver.takes(2**64 - 1), "the first lies near the clock"
    top = 1000 * START + 2 * HOUR_MS
    assert receiver.takes(top)
    taken = [round for round in range(top - 1, top - 20_000, -1) if receiver.takes(round)]
    assert len(taken) == rounds.ROUNDS_LATE
    assert min(taken) == top - rounds.ROUNDS_LATE


def test_row_36_rounds_far_ahead_do_not_follow_but_for_one_new_beginning_near_the_clock():
    receiver = Receiver()
    first = 1000 * START - 2 * HOUR_MS
    assert receiver.takes(first)
    late = rounds.ROUNDS_A_SECOND * rounds.LATE_SECONDS
    highest = first + rounds.ROUNDS_AHEAD + late
    assert receiver.takes(highest), "what was received first may have been the oldest"
    assert receiver.takes(highest + HOUR_MS / 2), "its store may have been lost"
    highest += HOUR_MS / 2 + late
    assert receiver.takes(highest)
    assert not receiver.takes(highest + HOUR_MS / 2), "and that so soon again it was not"
    assert not receiver.takes(1000 * START + 4 * HOUR_MS)
    receiver.passes(100)
    assert receiver.takes(highest + rounds.ROUNDS_AHEAD + 1600)


def test_row_36_an_author_that_keeps_near_its_clock_is_heard_by_all_who_heard_early_late_or_once():
    early = Receiver()
    once = Receiver()
    number = 1000 * START
    assert once.takes(number)
    for minute in range(24 * 60):
        wall = 1000 * early.unix
        number += 1
        if number <= wall - 2 * HOUR_MS:
            number = wall
        assert early.takes(number), "it has heard every round"
        late = Receiver()
        late.unix = early.unix
        assert late.takes(number), "it has heard none before"
        if minute % 150 == 149:
            assert once.takes(number), "it hears one in two and a half hours"
        early.passes(60)
        once.passes(60)


@given(st.randoms(use_true_random=False), st.floats(0.01, rounds.ROUNDS_AHEAD / 600))
def test_row_36_a_newcomer_takes_an_authors_ten_minutes_in_any_order(rng, a_second):
    """Of a faster author, whose ten minutes have over 64 rounds, those too far above the second one come later."""
    receiver = Receiver()
    receiver.unix += 600
    told = list(range(1000 * START, 1000 * START + int(600 * a_second)))
    rng.shuffle(told)
    assert all(map(receiver.takes, told))


def test_row_36_a_receiver_whose_clock_was_set_back_hears_an_author_again():
    receiver = Receiver()
    receiver.unix += 72 * 3600
    assert receiver.takes(1000 * receiver.unix)
    receiver.unix = START
    assert receiver.takes(1000 * START)
    assert receiver.takes(1000 * START + 1)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(-10, 20_000), st.floats(0, 4000)), max_size=30))
def test_row_36_what_is_taken_lies_near_the_highest_and_never_beyond_the_fence(steps):
    receiver = Receiver()
    highest = 0
    for round, passed in steps:
        number = round
        if round <= 20_000:  # beside the highest one
            number += highest or 1000 * START
        if receiver.takes(number):
            assert number >= highest - rounds.ROUNDS_LATE
            assert number <= 1000 * (receiver.unix + rounds.FENCE_SECONDS)
            highest = max(highest, number)
        receiver.passes(passed)


def test_row_36_authors_without_number_fill_no_memory(monkeypatch):
    monkeypatch.setattr(rounds, "AUTHORS_MAX", 50)
    receiver = Receiver()
    for number in range(200):
        assert receiver.rounds.follows(key(number), 1000 * START)
    assert len(receiver.rounds) == 50


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_senders", [9, 20])
def test_row_37_many_first_senders_displace_nothing_of_authors_with_a_record(first_senders, clock):
    honest = {key(number) for number in range(50)}
    table = Table(600.0, clock, random.Random(0), recorded=honest.__contains__)
    flood = iter(range(1000, 1_000_000))
    kept = []
    for second in range(12):
        clock.now += 1.0
        for _ in range(50):
            for first_sender in range(first_senders):
                put(table, next(flood), 0, 900 + first_sender)
        for number in range(3):
            author = (3 * second + number) % 50
            told_by = 800 + number
            if second % 2:  # the attackers are the first to tell of some of them
                told_by = 900 + number
            put(table, author, second, told_by)
            kept.append((key(author), second))
    assert len(table) == CAPACITY
    for one in kept:
        assert table.get(*one) is not None


def test_row_37_while_nobody_has_a_record_nine_floods_make_room_for_themselves(clock):
    table = Table(600.0, clock, random.Random(0))
    flood = iter(range(1000, 1_000_000))
    for second in range(15):
        clock.now += 1.0
        for number in range(450):
            put(table, next(flood), 0, 900 + number % 9)
        for number in range(3):
            put(table, number, second, 800 + number)
    assert sum(known.announcement.author < key(3) for known in table) == 45


def test_row_37_authors_with_a_record_leave_half_of_the_table_to_others(clock):
    honest = {key(number) for number in range(100)}
    table = Table(600.0, clock, random.Random(0), capacity=256, recorded=honest.__contains__)
    for number in range(2000):
        put(table, number % 100, number, 5000 + number % 40)
        put(table, 1000 + number, 0, 6000 + number % 40)
    assert len(table) == 256
    others = [known for known in table if known.announcement.author not in honest]
    assert 120 <= len(others) <= 136


def test_row_37_a_record_that_was_got_meanwhile_counts(clock):
    honest = set()
    table = Table(600.0, clock, random.Random(0), capacity=64, recorded=honest.__contains__)
    for number in range(20):
        put(table, number, 0, 7000 + number)
        honest.add(key(number))
    for number in range(100, 1000):
        put(table, number, 0, 5000 + number % 40)
    for author in honest:
        assert table.get(author, 0) is not None


def test_row_35_the_newcomer_nearest_to_a_record_is_preferred_and_others_are_tried_too(clock):
    table = Table(600.0, clock, random.Random(0))
    for number in range(400):
        put(table, number, 0, 5000 + number, slots=1)
    begun = {key(number): 1 + number % 19 for number in range(40)}
    newcomers = Newcomers(lambda author: True, record=lambda author: begun.get(author, 0))
    targets = table.choose(24, lambda known: -1, newcomers)
    chosen = {target.known.announcement.author for target in targets}
    assert len(chosen) == 24
    nearest = chosen & begun.keys()
    assert 10 <= len(nearest) < 24
    assert max(begun[author] for author in nearest) == 19


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_row_44_an_announcement_takes_a_few_bytes_a_packet_in_memory():
    refs = [PacketRef(slot, bytes([slot]) * 32, 4000 + slot, 1) for slot in range(RUN.slots)]
    made = announce(
        ALICE,
        run_id=RUN.id,
        round=1,
        policy_step=0,
        issued_at=int(time.time()),
        packets=refs,
    )
    read = decode_announcement(made.encode(), max_packets=RUN.slots).packets
    assert sys.getsizeof(read.packed) < 100 + 40 * RUN.slots
    assert list(read) == refs
    assert read[-1] == refs[-1]
    assert read.largest == 4000 + RUN.slots - 1


def test_row_44_a_table_of_the_largest_announcements_keeps_within_its_bytes(clock):
    table = Table(600.0, clock, random.Random(0))
    for number in range(600):
        outcome = put(table, number, 0, 5000 + number % 40, slots=256, size=45 * 256)
        assert outcome is Outcome.NEW
    assert sum(known.size for known in table) <= BYTES_MAX
    assert 300 <= len(table) < 600


def test_row_44_what_a_mention_says_is_held_is_kept_for_the_runs_slots_only():
    bob = Talker(BOB)
    bob.answers(MALLORY.author, [mention(7, held=b"\xff" * 600)])
    [lacking] = bob.gossip.sessions[MALLORY.author].lacking.values()
    assert lacking.held.bit_length() <= 8 * ((RUN.slots + 7) // 8)
