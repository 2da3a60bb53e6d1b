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
    return identity(number).author


@cache
def signed(number, round, packets=3, content=0):
    refs = []
    for slot in range(packets):
        digest = packet_digest(b"%d %d %d %d" % (number, round, slot, content))
        refs.append(PacketRef(slot, digest, 100, 1))
    return announce(
        identity(number),
        run_id=RUN.id,
        round=round,
        policy_step=0,
        issued_at=0,
        packets=refs,
    )


SIZE = len(signed(1, 0).encode()) + 3 * 40  # bytes that an announcement takes


class Bench:
    """A table with a clock in hand."""

    def __init__(self, seed=0, **options):
        self.clock = Clock()
        self.table = Table(MAX_AGE, self.clock, random.Random(seed), **options)

    def add(self, made, age=0, first_sender=PEERS[0], held=0):
        return self.table.add(made, made.encode(), age=age, first_sender=first_sender, held=held)

    def hear(self, number, round, packets=3, content=0, **how):
        return self.add(signed(number, round, packets, content), **how)

    def known(self, number, round=0):
        known = self.table.get(author(number), round)
        assert known is not None
        return known

    def choose(self, count, wanted=-1, **options):
        return self.table.choose(count, lambda known: wanted, **options)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def authors_of(chosen):
    """How many packets of each author were chosen."""
    return Counter(target.known.announcement.author for target in chosen)


def keys_of(chosen):
    return [target.key for target in chosen]


def rounds_of(known):
    return sorted(one.announcement.round for one in known)


def test_there_is_one_announcement_an_author_and_round_and_of_two_that_differ_the_first_stands(bench):
    assert bench.hear(1, 0) is Outcome.NEW
    assert bench.hear(1, 0, first_sender=PEERS[1]) is Outcome.KNOWN
    assert bench.hear(1, 1) is Outcome.NEW
    assert bench.hear(2, 0) is Outcome.NEW

    assert bench.hear(1, 0, content=1) is Outcome.EQUIVOCATION
    assert bench.hear(1, 0, packets=2) is Outcome.EQUIVOCATION

    assert len(bench.table) == 3
    assert bench.known(1).announcement == signed(1, 0)


def test_who_told_is_known_to_know_and_to_hold_what_it_says(bench):
    one, other = PEERS[:2]
    for peer, held in (
        (one, 0b001),
        (one, 0b100),
        (other, 0b11111000),
    ):
        bench.hear(1, 0, first_sender=peer, held=held)

    known = bench.known(1)
    assert known.knows == bench.table.bit(one) | bench.table.bit(other)
    assert known.held_among({one}) == 0b101
    assert known.held_among({other}) == 0, "there are only three packets"
    assert all(known.held_by(author(1), index) for index in range(3)), "the author made them"

    for peer in (one, author(1)):
        known.held_no_more(peer, 0)
        assert not known.held_by(peer, 0), "it said so"
        assert known.held_by(peer, 2)

        bench.table.note_holder(known, peer, 0b001, None)
        assert known.held_by(peer, 0), "and now that it has it"


@given(ages=st.lists(st.tuples(st.floats(0, 150), st.floats(0, 60)), min_size=1, max_size=30))
@example(ages=[(0.0, 1.9), (0.0, 40.0), (0.0, 60.0)])  # 1001.9 + 100, and the clock, differ in the last bit
def test_row_18_nobody_makes_an_announcement_much_older_or_younger_than_it_is(ages):
    bench = Bench()
    heard = None
    claims = []
    for number, (claimed, passed) in enumerate(ages):
        bench.clock.now += passed
        bench.table.expire()
        now = bench.clock.now

        outcome = bench.hear(1, 0, age=claimed, first_sender=PEERS[number % 10])

        if outcome is Outcome.NEW:
            heard = heard or now
        if outcome is not Outcome.OLD:
            claims.append(now - claimed)
        elif heard is not None:
            assert claimed > MAX_AGE or now > heard + MAX_AGE - ROUNDING

        known = bench.table.get(author(1), 0)
        if known is not None:
            earliest = min(heard, max(claims)) - AGE_SLACK * MAX_AGE
            assert known.heard == heard
            assert earliest - ROUNDING <= known.born <= heard + ROUNDING


def test_row_18_what_left_is_taken_in_again_but_for_no_longer_than_since_it_was_first_heard_of(bench):
    bench.hear(1, 0, age=MAX_AGE - 1)
    bench.clock.now += 50
    bench.table.expire()
    assert len(bench.table) == 0

    assert bench.hear(1, 0, age=10.0) is Outcome.NEW
    assert bench.clock() - bench.known(1).born == 50.0, "it was heard of 50 s ago"

    bench.clock.now += 51
    assert bench.hear(1, 1, first_sender=PEERS[1]) is Outcome.NEW
    bench.table.expire()
    assert bench.hear(1, 0, age=0.0) is Outcome.OLD


def test_what_is_too_old_is_neither_taken_nor_kept_nor_chosen(bench):
    assert bench.hear(1, 0, age=MAX_AGE + 1) is Outcome.OLD
    bench.hear(1, 1, age=MAX_AGE - 10)
    bench.hear(1, 2, age=0)

    bench.clock.now += 11
    [fresh] = bench.table.sample(10, PEERS[5])
    assert fresh.announcement.round == 2
    assert bench.table.get(author(1), 1) is None

    bench.clock.now += MAX_AGE - 10
    assert bench.choose(10) == []


@pytest.fixture
def small() -> Bench:
    """A table of which a first sender's part is four announcements, and an author's too."""
    return Bench(capacity=4 * FIRST_SENDER_PART)


def test_an_introducer_with_much_to_tell_displaces_its_own_oldest(small):
    small.hear(9, 0, first_sender=PEERS[1])
    for round in range(300):
        small.clock.now += 0.1
        assert small.hear(1, round) is Outcome.NEW

    told = [known for known in small.table if known.first_sender == PEERS[0]]
    assert rounds_of(told) == [296, 297, 298, 299]
    assert small.known(9), "another first sender's stays"


def test_who_tells_first_of_what_others_made_cannot_make_it_vanish(small):
    liar, honest = PEERS[:2]
    small.hear(9, 0, first_sender=liar)
    assert small.hear(9, 0, first_sender=honest) is Outcome.KNOWN

    for round in range(300):
        small.clock.now += 0.1
        small.hear(1, round, first_sender=liar)
    assert small.known(9).first_sender == honest
    assert sum(known.first_sender == liar for known in small.table) == 4

    for round in range(1, 5):
        small.clock.now += 0.1
        small.hear(9, round, first_sender=honest)
    assert small.table.get(author(9), 0) is None, "of its own part it is the oldest"


def test_an_authors_part_is_bounded_by_number_and_by_bytes_and_its_oldest_make_room(small):
    for round in range(10):
        small.clock.now += 0.1
        assert small.hear(1, round, first_sender=PEERS[round]) is Outcome.NEW
        small.hear(2, round, first_sender=None)
    assert rounds_of(small.table) == [6, 6, 7, 7, 8, 8, 9, 9]

    many = 3 * FIRST_SENDER_PART
    few = Bench(bytes_max=many * SIZE)
    for number in range(1, 41):
        for round in range(5):
            assert few.hear(number, round, first_sender=PEERS[number % 10]) is Outcome.NEW
            assert len(few.table) <= many
            authors = Counter(known.announcement.author for known in few.table)
            assert authors[author(number)] <= 3


def test_nobody_is_told_what_it_told_or_was_told(bench):
    bench.hear(1, 0, first_sender=PEERS[0])
    bench.hear(2, 0, first_sender=PEERS[1])

    [only] = bench.table.sample(10, PEERS[0])
    assert only.announcement == signed(2, 0)

    bench.table.tell(PEERS[0], only)
    assert bench.table.sample(10, PEERS[0]) == []

    bench.table.forget_peer(PEERS[0])
    assert len(bench.table.sample(10, PEERS[0])) == 2, "it was started anew and may have forgotten all"


def test_recent_authors_are_those_of_recent_announcements(bench):
    bench.hear(1, 0, age=50)
    bench.hear(2, 0, age=5)
    assert bench.table.recent_authors(10) == {author(2)}


@given(
    rounds=st.dictionaries(st.integers(1, 6), st.integers(1, 4), min_size=1),
    count=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_authors_take_turns_and_nothing_is_chosen_twice(rounds, count, seed):
    bench = Bench(seed=seed)
    for number, many in rounds.items():
        for round in range(many):
            bench.hear(number, round, packets=2, age=10 * round)

    chosen = bench.choose(count)

    announced = 2 * sum(rounds.values())
    assert len(set(keys_of(chosen))) == len(chosen) == min(count, announced)
    taken = authors_of(chosen)
    most = max(taken.values())
    for number, many in rounds.items():
        had = taken[author(number)]
        assert had == 2 * many or had >= most - 1, "an author was passed over"


def test_what_is_done_on_its_way_or_unwanted_is_not_chosen(bench):
    bench.hear(1, 0, packets=4)
    known = bench.known(1)
    known.done = 0b0001
    known.pulling = 0b0010

    for wanted, indices in (
        (-1, {2, 3}),
        (0b0111, {2}),
    ):
        chosen = bench.choose(10, wanted)
        assert {target.index for target in chosen} == indices


def test_what_may_be_had_of_some_peers_is_what_they_hold_and_everything_of_its_author(bench):
    bench.hear(1, 0, packets=4)
    known = bench.known(1)
    one, other = PEERS[2:4]
    bench.table.note_holder(known, one, 0b0011, None)
    bench.table.note_holder(known, other, 0b0110, None)

    assert known.held_among({other}) == 0b0110
    assert known.held_among({one, other}) == 0b0111
    assert known.held_among(set()) == 0
    assert known.held_among({author(1)}) & known.unsettled == 0b1111


def test_row_76_for_identities_without_number_nobody_in_the_view_is_forgotten(bench):
    table = bench.table = Table(MAX_AGE, bench.clock, view={PEERS[0]})
    bench.hear(1, 0, held=0b101)
    known = bench.known(1)

    for number in range(1000, 1010 + PEERS_MAX):
        stranger = author(number)
        table.note_holder(known, stranger, 0b001, None)
        assert table.sample(1, stranger) == []

    assert known.copied_among({PEERS[0]}) == 0b101
    assert known.holders.keys() == {PEERS[0], author(1)}, "what others hold makes no scan slower"
    assert table.sample(1, PEERS[0]) == [], "it is not told again"


def test_the_fresher_of_two_is_preferred(bench):
    for number in range(1, 11):
        bench.hear(number, 0, packets=1, age=float(number))

    first = Counter()
    for _ in range(500):
        first += authors_of(bench.choose(1))

    assert first[author(10)] == 0, "the oldest loses against whomever it is drawn with"
    assert 60 < first[author(1)] < 140, "the freshest wins whenever it is drawn, one time in five"


def test_of_one_author_the_freshest_goes_first(bench):
    for round, age in enumerate((30, 10, 20)):
        bench.hear(1, round, packets=1, age=age)

    chosen = bench.choose(3)
    assert [target.known.announcement.round for target in chosen] == [1, 2, 0]


def test_of_an_authors_packets_of_about_one_age_one_that_others_hold_is_chosen_first(bench):
    """Else all would load it from the author as soon as it announces it."""
    made_by = author(1)
    for round, age, held in (
        (0, 99.0, 0b010),
        (1, 40.0, 0b010),
        (2, 5.0, 0),
    ):
        bench.hear(1, round, age=age, held=held)

    chosen = bench.choose(3, peers={PEERS[0], made_by})

    assert keys_of(chosen) == [
        (made_by, 1, 1),
        (made_by, 2, 2),
        (made_by, 2, 1),
    ]


class TableMachine(RuleBasedStateMachine):
    """Whatever is done, each has its part of the room, by number and by bytes, and nothing too old stays."""

    @initialize(capacity=st.sampled_from([1, 8, 16, 24]), many=st.sampled_from([8, 12, 1000]), seed=st.integers(0, 9))
    def begin(self, capacity, many, seed):
        """A table of so many announcements, and of the bytes of so many."""
        self.bench = Bench(seed, capacity=capacity, bytes_max=many * SIZE)
        self.table = self.bench.table
        self.most = min(capacity, many)
        self.share = max(1, self.most // FIRST_SENDER_PART)

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
        before = len(self.table)
        outcome = self.bench.add(made, age, first_sender, held)
        if outcome is Outcome.NEW:
            assert self.table.get(made.author, made.round) is not None
            assert len(self.table) >= before - 1, "few make room: the author's oldest, the first sender's, or one"

    @rule(which=st.integers(0, 23), peer=st.sampled_from(PEERS[:4]), age=st.none() | st.floats(-10, 300))
    def hear_of(self, which, peer, age):
        known = list(self.table)
        if known:
            born = None if age is None else self.bench.clock() - age
            self.table.note_holder(known[which % len(known)], peer, 1, born)

    @rule(seconds=st.sampled_from([0.1, 10.0, 50.0, 101.0]))
    def time_goes_on(self, seconds):
        self.bench.clock.now += seconds

    @rule()
    def expire(self):
        self.table.expire()
        oldest = self.bench.clock() - MAX_AGE - ROUNDING
        assert all(known.born >= oldest for known in self.table)

    @rule(count=st.integers(0, 5), peer=st.sampled_from(PEERS[:4]), tell=st.booleans())
    def sample(self, count, peer, tell):
        drawn = self.table.sample(count, peer)

        assert len(set(keys_of(drawn))) == len(drawn) <= count
        assert all(known in self.table for known in drawn)
        bit = self.table.bit(peer)
        new = [known for known in self.table if not known.knows & bit]
        assert sum(known in new for known in drawn) == min(count, len(new))

        if tell:
            for known in drawn:
                self.table.tell(peer, known)

    @invariant()
    def each_has_its_part(self):
        known = list(self.table)
        assert len(known) <= self.most
        assert all(self.table.find(one.id) is one for one in known)
        authors = Counter(one.announcement.author for one in known)
        senders = Counter(one.first_sender for one in known if one.first_sender is not None)
        for shares in (authors, senders):
            assert max(shares.values(), default=0) <= self.share


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(stateful_step_count=80)


# --- by row -----------------------------------------------------------------------------------------------------------


def rows_of(made):
    """A row of its own for each packet."""
    return {index: made.author[-1] << 16 | made.round << 8 | ref.slot for index, ref in enumerate(made.packets)}


def by_row(*announcements):
    bench = Bench(rows_of=rows_of)
    for made in announcements:
        bench.add(made)
    return bench


def test_the_packets_of_named_rows_are_chosen_and_no_others():
    one = signed(1, 1)
    two = signed(2, 1)
    bench = by_row(one, two)
    first = (two.author, 1, 1)
    second = (one.author, 1, 2)
    wanted = [rows_of(two)[1], rows_of(one)[2]]

    chosen = bench.choose(3, rows=wanted)

    assert set(keys_of(chosen)) == {first, second}
    assert keys_of(bench.choose(1, rows=wanted[:1])) == [first]
    assert not bench.choose(3, 0, rows=wanted), "no free holder"

    for target in chosen:
        target.known.pulling |= 1 << target.index
    assert not bench.choose(3, rows=wanted), "they are under way"


def test_of_named_rows_the_first_are_chosen_authors_take_turns_and_other_rows_cost_nothing():
    def same_rows(made):
        return dict.fromkeys(range(7), 900) | {index: index for index in range(7, 10)}

    bench = Bench(rows_of=same_rows)
    for number in range(40):
        bench.hear(number, 1, 10, first_sender=PEERS[number % 10])

    calls = Counter()
    sys.setprofile(lambda frame, event, what: calls.update([event]))
    chosen = bench.choose(2, rows=[9, 33, 8, 7])
    sys.setprofile(None)

    assert [target.known.rows[target.index] for target in chosen] == [9, 8]
    assert len(authors_of(chosen)) == 2
    assert calls["call"] + calls["c_call"] < 3 * 40 * 10, "three calls a packet that was announced"
    assert len(authors_of(bench.choose(3, rows=[9, 33, 8, 7]))) == 3


def test_newcomers_share_their_part_of_named_rows_and_keep_nobody_out():
    strangers = [signed(1, round, 1) for round in range(20)]
    other = signed(2, 1, 1)
    rows = [rows_of(one)[0] for one in (*strangers, other)]
    bench = by_row(*strangers, other)

    everybody = Newcomers(lambda who: True, room=2)
    assert len(bench.choose(9, newcomers=everybody, rows=rows)) == 2

    all_but_the_other = Newcomers(lambda who: who != other.author, room=0)
    chosen = bench.choose(1, newcomers=all_but_the_other, rows=rows)
    assert keys_of(chosen) == [(other.author, 1, 0)], "theirs are all named before"
