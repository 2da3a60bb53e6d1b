"""The pool gives every group out at most once, lets authors take turns, and keeps nothing that is old or idle."""

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ftis_node.swarm.pool import Pool
from tests.support.clock import Clock
from tests.support.swarm import scored


def pool(max_age=100.0, seed=0):
    clock = Clock()
    return Pool(lambda: max_age, clock, random.Random(seed)), clock


def authors(taken):
    return Counter(one.group.author[0] for one in taken)


def test_which_authors_come_first_is_a_matter_of_chance():
    firsts = Counter()
    for seed in range(200):
        subject, _ = pool(seed=seed)
        for author in (1, 2):
            for slot in range(9 if author == 1 else 1):  # announcing more often is no advantage
                subject.add(scored(author, 0, slot, 950))
        firsts.update(authors(subject.take(1)))
    assert 60 < firsts[1] < 140


def test_what_is_remembered_does_not_grow_for_ever():
    subject, clock = pool(max_age=10)
    for round_ in range(500):
        clock.now += 1
        subject.add(scored(1, round_, 0, clock.now))
        subject.take(1)
    assert len(subject._born) <= 12


def test_a_group_is_kept_to_its_last_second_and_not_longer():
    subject, clock = pool(max_age=100)
    subject.add(scored(1, 0, 0, 950))
    subject.add(scored(1, 0, 1, 960))
    clock.now = 1050
    assert len(subject) == 2
    assert subject.expired == 0
    clock.now = 1050.1
    assert (len(subject), subject.expired) == (1, 1), "also where no step asked since"
    assert [one.born for one in subject.take(5)] == [960]
    subject.add(scored(2, 0, 0, 960))
    clock.now = 1060.1
    assert subject.waiting() == {}


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain list of what should be in it."""

    @initialize(seed=st.integers())
    def start(self, seed):
        self.pool, self.clock = pool(max_age=50, seed=seed)
        self.waiting = {}
        self.given_out = {}
        self.idle = self.expired = 0

    @rule(
        author=st.integers(1, 3),
        slot=st.integers(0, 5),
        age=st.floats(0, 60),
        signal=st.integers(0, 5),
    )
    def add(self, author, slot, age, signal):
        one = scored(author, 0, slot, self.clock.now - age, (1, 0) if signal else (1, 1))
        known = one.group.key in self.waiting or one.group.key in self.given_out
        assert self.pool.add(one) is (bool(signal) and not known)
        self.idle += not signal
        if signal and not known:
            self.waiting[one.group.key] = one

    @rule(count=st.integers(0, 8))
    def take(self, count):
        self.forget_old()
        before = authors(list(self.waiting.values()))
        taken = self.pool.take(count)
        assert len(taken) == min(count, len(self.waiting))
        got = authors(taken)
        for author, number in before.items():
            assert got[author] == number or got[author] >= max(got.values(), default=0) - 1
        for one in taken:
            assert self.waiting.pop(one.group.key) is one
            assert one.born >= self.clock.now - 50
            assert one.group.key not in self.given_out, "given out twice"
            self.given_out[one.group.key] = one.born
        for left in self.waiting.values():
            fresher = [one.born for one in taken if one.group.author == left.group.author]
            assert all(born >= left.born for born in fresher), "a staler group went first"

    @rule(seconds=st.floats(0, 30))
    def time_goes_on(self, seconds):
        self.clock.now += seconds

    def forget_old(self):
        limit = self.clock.now - 50
        old = [key for key, one in self.waiting.items() if one.born < limit]
        self.expired += len(old)
        for key in old:
            del self.waiting[key]
        self.given_out = {key: born for key, born in self.given_out.items() if born >= limit}

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            self.forget_old()
            assert len(self.pool) == len(self.waiting)
            assert self.pool.no_signal == self.idle
            assert self.pool.expired == self.expired


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=40)
