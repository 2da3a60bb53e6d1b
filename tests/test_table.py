"""The table holds what is fresh, a fair share of it from each first sender, and chooses authors by turns."""

import random
import sys
from collections import Counter
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ftis_node.packet import packet_digest
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.known import Outcome
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.table import AGE_SLACK, FIRST_SENDER_PART, PEERS_MAX, Table
from tests.support.clock import Clock
from tests.support.swarm import RUN, identity

MAX_AGE = 100.0
ROUNDING = 1e-6  # seconds; a clock is a sum of floats
PEERS = [identity(number).author for number in range(100, 110)]


@cache
def author(number):
    return identity(number)


@cache
def signed(number, round, packets=3, content=0):
    refs = [
        PacketRef(slot, packet_digest(b"%d %d %d %d" % (number, round, slot, content)), 100, 1)
        for slot in range(packets)
    ]
    return announce(author(number), run_id=RUN.id, round=round, policy_step=0, issued_at=0, packets=refs)


class Bench:
    """A table with a clock in hand."""

    def __init__(self, capacity=2048, seed=0):
        self.clock = Clock()
        self.table = Table(MAX_AGE, self.clock, random.Random(seed), capacity=capacity)

    def add(self, made, age=0, first_sender=PEERS[0], held=0):
        return self.table.add(made, made.encode(), age=age, first_sender=first_sender, held=held)

    def known(self, number, round=0):
        known = self.table.get(author(number).author, round)
        assert known is not None
        return known


@pytest.fixture
def bench() -> Bench:
    return Bench()


def everything(known):
    return -1


def test_there_is_one_announcement_an_author_and_round_and_of_two_that_differ_the_first_stands(bench):
    assert bench.add(signed(1, 0)) is Outcome.NEW
    assert bench.add(signed(1, 0), first_sender=PEERS[1]) is Outcome.KNOWN
    assert bench.add(signed(1, 1)) is bench.add(signed(2, 0)) is Outcome.NEW
    assert bench.add(signed(1, 0, content=1)) is bench.add(signed(1, 0, packets=2)) is Outcome.EQUIVOCATION
    assert len(bench.table) == 3 and bench.known(1).announcement == signed(1, 0)


def test_who_told_is_known_to_know_and_to_hold_what_it_says(bench):
    bench.add(signed(1, 0, packets=3), first_sender=PEERS[0], held=0b001)
    bench.add(signed(1, 0, packets=3), first_sender=PEERS[0], held=0b100)
    bench.add(signed(1, 0, packets=3), first_sender=PEERS[1], held=0b11111000)
    known = bench.known(1)
    assert known.knows == bench.table.bit(PEERS[0]) | bench.table.bit(PEERS[1])
    assert [known.held_by(PEERS[0], index) for index in range(3)] == [True, False, True]
    assert not any(known.held_by(PEERS[1], index) for index in range(3)), "there are only three packets"
    assert all(known.held_by(author(1).author, index) for index in range(3)), "the author made them"
    for peer in (PEERS[0], author(1).author):
        known.held_no_more(peer, 0)
        assert not known.held_by(peer, 0) and known.held_by(peer, 2), "it said so"
        bench.table.note_holder(known, peer, 0b001, None)
        assert known.held_by(peer, 0), "and now that it has it"


@given(ages=st.lists(st.tuples(st.floats(0, 150), st.floats(0, 60)), min_size=1, max_size=30))
@example(ages=[(0.0, 1.9), (0.0, 40.0), (0.0, 60.0)])  # 1001.9 + 100, and the clock, differ in the last bit
def test_row_18_nobody_makes_an_announcement_much_older_or_younger_than_it_is(ages):
    bench = Bench()
    heard, claims = None, []
    for number, (claimed, passed) in enumerate(ages):
        bench.clock.now += passed
        bench.table.expire()
        now = bench.clock.now
        outcome = bench.add(signed(1, 0), age=claimed, first_sender=PEERS[number % 10])
        if outcome is Outcome.NEW:
            heard = heard or now
        if outcome is not Outcome.OLD:
            claims.append(now - claimed)
        elif heard is not None:
            assert claimed > MAX_AGE or now > heard + MAX_AGE - ROUNDING
        known = bench.table.get(author(1).author, 0)
        if known is not None:
            assert heard is not None and known.heard == heard
            assert min(heard, max(claims)) - AGE_SLACK * MAX_AGE - ROUNDING <= known.born <= heard + ROUNDING


def test_row_18_what_left_is_taken_in_again_but_for_no_longer_than_since_it_was_first_heard_of(bench):
    bench.add(signed(1, 0), age=MAX_AGE - 1)
    bench.clock.now += 50
    bench.table.expire()
    assert len(bench.table) == 0
    assert bench.add(signed(1, 0), age=10.0) is Outcome.NEW
    assert bench.clock() - bench.known(1).born == 50.0, "it was heard of 50 s ago"
    bench.clock.now += 51
    assert bench.add(signed(1, 1), first_sender=PEERS[1]) is Outcome.NEW
    bench.table.expire()
    assert bench.add(signed(1, 0), age=0.0) is Outcome.OLD


def test_what_is_too_old_is_neither_taken_nor_kept_nor_chosen(bench):
    assert bench.add(signed(1, 0), age=MAX_AGE + 1) is Outcome.OLD
    bench.add(signed(1, 1), age=MAX_AGE - 10)
    bench.add(signed(1, 2), age=0)
    bench.clock.now += 11
    assert [known.announcement.round for known in bench.table.sample(10, PEERS[5])] == [2]
    assert bench.table.get(author(1).author, 1) is None
    bench.clock.now += MAX_AGE - 10
    assert bench.table.choose(10, everything) == []


@pytest.fixture
def small() -> Bench:
    """A table of which an first sender's part is four announcements, and an author's too."""
    return Bench(capacity=4 * FIRST_SENDER_PART)


def test_an_introducer_with_much_to_tell_displaces_its_own_oldest(small):
    small.add(signed(9, 0), first_sender=PEERS[1])
    for round in range(300):
        small.clock.now += 0.1
        assert small.add(signed(1, round)) is Outcome.NEW
    told = sorted(known.announcement.round for known in small.table if known.first_sender == PEERS[0])
    assert told == [296, 297, 298, 299]
    assert small.known(9), "another first sender's stays"


def test_who_tells_first_of_what_others_made_cannot_make_it_vanish(small):
    liar, honest = PEERS[:2]
    small.add(signed(9, 0), first_sender=liar)
    assert small.add(signed(9, 0), first_sender=honest) is Outcome.KNOWN
    for round in range(300):
        small.clock.now += 0.1
        small.add(signed(1, round), first_sender=liar)
    assert small.known(9).first_sender == honest and sum(known.first_sender == liar for known in small.table) == 4
    for round in range(4):
        small.clock.now += 0.1
        small.add(signed(9, 1 + round), first_sender=honest)
    assert small.table.get(author(9).author, 0) is None, "of its own part it is the oldest"


def test_an_authors_part_is_bounded_by_number_and_by_bytes_and_its_oldest_make_room(small):
    for round in range(10):
        small.clock.now += 0.1
        assert small.add(signed(1, round), first_sender=PEERS[round]) is Outcome.NEW
        small.add(signed(2, round), first_sender=None)
    assert sorted(known.announcement.round for known in small.table) == [6, 6, 7, 7, 8, 8, 9, 9]
    size = len(signed(1, 0).encode()) + 3 * 40
    bytes_max = 3 * FIRST_SENDER_PART * size
    few = Table(MAX_AGE, small.clock, random.Random(0), bytes_max=bytes_max)
    for number in range(1, 41):
        for round in range(5):
            made = signed(number, round)
            assert few.add(made, made.encode(), age=0.0, first_sender=PEERS[number % 10]) is Outcome.NEW
            assert len(few) * size <= bytes_max and len(few._authors.of(made.author)) <= 3


def test_nobody_is_told_what_it_told_or_was_told(bench):
    bench.add(signed(1, 0), first_sender=PEERS[0])
    bench.add(signed(2, 0), first_sender=PEERS[1])
    [only] = bench.table.sample(10, PEERS[0])
    assert only.announcement == signed(2, 0)
    bench.table.tell(PEERS[0], only)
    assert bench.table.sample(10, PEERS[0]) == []
    bench.table.forget_peer(PEERS[0])
    assert len(bench.table.sample(10, PEERS[0])) == 2, "it was started anew and may have forgotten all"


def test_recent_authors_are_those_of_recent_announcements(bench):
    bench.add(signed(1, 0), age=50)
    bench.add(signed(2, 0), age=5)
    assert bench.table.recent_authors(10) == {author(2).author}


@given(
    rounds=st.dictionaries(st.integers(1, 6), st.integers(1, 4), min_size=1),
    count=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_authors_take_turns_and_nothing_is_chosen_twice(rounds, count, seed):
    bench = Bench(seed=seed)
    for number, many in rounds.items():
        for round in range(many):
            bench.add(signed(number, round, packets=2), age=10 * round)
    chosen = bench.table.choose(count, everything)
    assert len({target.key for target in chosen}) == len(chosen) == min(count, 2 * sum(rounds.values()))
    taken = Counter(target.known.announcement.author for target in chosen)
    for number, many in rounds.items():
        had = taken[author(number).author]
        assert had == 2 * many or had >= max(taken.values()) - 1, "an author was passed over"


def test_what_is_done_on_its_way_or_unwanted_is_not_chosen(bench):
    bench.add(signed(1, 0, packets=4))
    known = bench.known(1)
    known.done, known.pulling = 0b0001, 0b0010
    assert {target.index for target in bench.table.choose(10, everything)} == {2, 3}
    assert {target.index for target in bench.table.choose(10, lambda known: ~(1 << 3))} == {2}


def test_what_may_be_had_of_some_peers_is_what_they_hold_and_everything_of_its_author(bench):
    bench.add(signed(1, 0, packets=4))
    known = bench.known(1)
    one, other = author(2).author, author(3).author
    bench.table.note_holder(known, one, 0b0011, None)
    bench.table.note_holder(known, other, 0b0110, None)
    assert [known.held_among(peers) for peers in ({one}, {other}, {one, other}, set())] == [0b0011, 0b0110, 0b0111, 0]
    assert known.held_among({author(1).author}) & known.unsettled == 0b1111


def test_row_76_for_identities_without_number_nobody_in_the_view_is_forgotten(bench):
    table = bench.table = Table(MAX_AGE, bench.clock, random.Random(0), view={PEERS[0]})
    bench.add(signed(1, 0, packets=3), first_sender=PEERS[0], held=0b101)
    for number in range(PEERS_MAX + 10):
        table.note_holder(bench.known(1), author(1000 + number).author, 0b001, None)
        assert table.sample(1, author(1000 + number).author) == []
    assert bench.known(1).copied_among({PEERS[0]}) == 0b101
    assert bench.known(1).holders.keys() == {PEERS[0], author(1).author}, "what others hold makes no scan slower"
    assert table.sample(1, PEERS[0]) == [], "it is not told again"


def test_the_fresher_of_two_is_preferred(bench):
    for number in range(1, 11):
        bench.add(signed(number, 0, packets=1), age=float(number))
    first = Counter(bench.table.choose(1, everything)[0].known.announcement.author for _ in range(500))
    freshest, oldest = first[author(1).author], first[author(10).author]
    assert oldest == 0, "the oldest loses against whomever it is drawn with"
    assert 60 < freshest < 140, "the freshest wins whenever it is drawn, one time in five"


def test_of_one_author_the_freshest_goes_first(bench):
    for round, age in enumerate((30, 10, 20)):
        bench.add(signed(1, round, packets=1), age=age)
    assert [target.known.announcement.round for target in bench.table.choose(3, everything)] == [1, 2, 0]


def test_of_an_authors_packets_of_about_one_age_one_that_others_hold_is_chosen_first(bench):
    """Else all would load it from the author as soon as it announces it."""
    for round, age in ((0, 99.0), (1, 40.0), (2, 5.0)):
        bench.add(signed(1, round), age=age, first_sender=PEERS[0], held=0b010 if round < 2 else 0)
    chosen = bench.table.choose(3, everything, peers={PEERS[0], author(1).author})
    assert [(target.known.announcement.round, target.index) for target in chosen] == [(1, 1), (2, 2), (2, 1)]


class TableMachine(RuleBasedStateMachine):
    """Whatever is done, what is kept beside the announcements agrees with them, and nothing too old stays."""

    @initialize(capacity=st.sampled_from([1, 8, 16, 24]), seed=st.integers(0, 9))
    def begin(self, capacity, seed):
        self.bench = Bench(capacity, seed)
        self.table = self.bench.table

    @rule(
        who=st.integers(1, 5),
        round=st.integers(0, 8),
        content=st.sampled_from([0, 0, 0, 1]),
        age=st.sampled_from([-5.0, 0.0, 50.0, 99.9, 100.0, 100.1, 300.0]),
        first_sender=st.sampled_from([None, *PEERS[:4]]),
        held=st.integers(-1, 9),
    )
    def add(self, who, round, content, age, first_sender, held):
        made = signed(who, round, content=content)
        if self.bench.add(made, age, first_sender, held) is Outcome.NEW:
            assert self.table.get(made.author, made.round) is not None

    @rule(which=st.integers(0, 23), peer=st.sampled_from(PEERS[:4]), age=st.none() | st.floats(-10, 300))
    def hear_of(self, which, peer, age):
        if known := list(self.table):
            born = None if age is None else self.bench.clock() - age
            self.table.note_holder(known[which % len(known)], peer, 1, born)

    @rule(seconds=st.sampled_from([0.1, 10.0, 50.0, 101.0]))
    def time_goes_on(self, seconds):
        self.bench.clock.now += seconds

    @rule()
    def expire(self):
        self.table.expire()
        assert all(self.bench.clock() - known.born <= MAX_AGE + ROUNDING for known in self.table)

    @rule(count=st.integers(0, 5), peer=st.sampled_from(PEERS[:4]), tell=st.booleans())
    def sample(self, count, peer, tell):
        drawn = self.table.sample(count, peer)
        bit = self.table.bit(peer)
        new = sum(not known.knows & bit for known in self.table)
        assert len({known.key for known in drawn}) == len(drawn) <= count
        assert all(known in self.table for known in drawn)
        assert sum(not known.knows & bit for known in drawn) == min(count, new)
        for known in drawn if tell else ():
            self.table.tell(peer, known)

    @invariant()
    def all_agrees(self):
        if not hasattr(self, "table"):
            return
        table, known = self.table, list(self.table)
        assert table._by_id == {one.id: one for one in known}
        authors = table._authors, lambda one: one.announcement.author
        for shares, whose in ((table._first_sent, lambda one: one.first_sender), authors):
            held = {}
            for one in known:
                if whose(one) is not None:
                    held.setdefault(whose(one), {})[one.key] = one
            assert shares.by == held
            assert shares.size == {who: sum(one.size for one in ones.values()) for who, ones in held.items()}
            assert all(len(ones) <= max(1, table.capacity // FIRST_SENDER_PART) for ones in held.values())
        assert table._bytes == sum(one.size for one in known)
        assert len(known) <= table.capacity and len(table._left) <= 2 * table.capacity


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(stateful_step_count=80)


# --- by row -----------------------------------------------------------------------------------------------------------


def rows_of(made):
    """A row of its own for each packet."""
    return {index: made.author[-1] << 16 | made.round << 8 | ref.slot for index, ref in enumerate(made.packets)}


def by_row(*announcements):
    table = Table(MAX_AGE, Clock(), random.Random(0), rows_of=rows_of)
    for made in announcements:
        table.add(made, made.encode(), age=0.0, first_sender=PEERS[0])
    return table


def test_the_packets_of_named_rows_are_chosen_and_no_others():
    one, two = signed(1, 1), signed(2, 1)
    table, wanted = by_row(one, two), [rows_of(two)[1], rows_of(one)[2]]
    chosen = table.choose(3, everything, rows=wanted)
    assert {target.key for target in chosen} == {(two.author, 1, 1), (one.author, 1, 2)}
    assert [target.key for target in table.choose(1, everything, rows=wanted[:1])] == [(two.author, 1, 1)]
    assert not table.choose(3, lambda known: 0, rows=wanted), "no free holder"
    for target in chosen:
        target.known.pulling |= 1 << target.index
    assert not table.choose(3, everything, rows=wanted), "they are under way"


def test_of_named_rows_the_first_are_chosen_authors_take_turns_and_other_rows_cost_nothing():
    def same_rows(made):
        return dict.fromkeys(range(7), 900) | {index: index for index in range(7, 10)}

    table = Table(MAX_AGE, Clock(), random.Random(0), rows_of=same_rows)
    for number in range(40):
        made = signed(number, 1, 10)
        table.add(made, made.encode(), age=0.0, first_sender=PEERS[number % 10])
    calls = Counter()
    sys.setprofile(lambda frame, event, what: calls.update([event]))
    chosen = table.choose(2, everything, rows=[9, 33, 8, 7])
    sys.setprofile(None)
    assert [target.known.rows[target.index] for target in chosen] == [9, 8]
    assert len({target.known.announcement.author for target in chosen}) == 2
    assert calls["call"] + calls["c_call"] < 3 * 40 * 10, "three calls a packet that was announced"
    every = Counter(target.known.announcement.author for target in table.choose(3, everything, rows=[9, 33, 8, 7]))
    assert every.total() == 3 == len(every)


def test_newcomers_share_their_part_of_named_rows_and_keep_nobody_out():
    strangers, other = [signed(1, round, 1) for round in range(20)], signed(2, 1, 1)
    rows = [rows_of(one)[0] for one in (*strangers, other)]
    table = by_row(*strangers, other)
    assert len(table.choose(9, everything, Newcomers(lambda who: True, room=2), rows)) == 2
    chosen = table.choose(1, everything, Newcomers(lambda who: who != other.author, room=0), rows)
    assert [target.key for target in chosen] == [(other.author, 1, 0)], "theirs are all named before"
