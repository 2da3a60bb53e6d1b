"""Gossip takes in what is signed, fresh and of this run, counts the rest, and tells nobody anything twice."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.swarm import ftis_pb2, gossip, table
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.swarm import QUESTIONS
from ftis_node.swarm.table import Table, announcement_id
from tests.helpers_swarm import OTHER_RUN, RUN, announcement, identity, packet

ALICE, BOB, CAROL, MALLORY = (identity(number) for number in range(1, 5))


@dataclass
class Spoken:
    """What went over the wire in an exchange."""

    calls: int = 0
    entries: int = 0
    mentions: int = 0

    def add(self, request: ftis_pb2.ExchangeRequest, answer: ftis_pb2.ExchangeResponse) -> None:
        self.calls += 1
        self.entries += len(request.entries) + len(answer.entries)
        self.mentions += len(request.mentions) + len(answer.mentions)


class Talker:
    """One node's gossip, with a clock in hand."""

    def __init__(self, who: Identity, dealt_with: set[tuple[bytes, int, int]] | None = None) -> None:
        self.who = who
        self.now = 0.0
        dealt_with = dealt_with or set()
        self.news = 0
        known = Table(600.0, lambda: self.now, random.Random(0))
        self.gossip = Gossip(known, RUN, who.author, lambda *key: key in dealt_with, self._heard_news)

    def _heard_news(self) -> None:
        self.news += 1

    def exchange(self, other: Talker, *, lost: int | None = None) -> Spoken:
        """Asks `other` as the daemon does; of call number `lost` the answer does not come."""
        spoken = Spoken()
        request: ftis_pb2.ExchangeRequest | None = self.gossip.ask(other.who.author)
        while request is not None and spoken.calls < QUESTIONS:
            answer = other.gossip.answer(request, self.who.author)
            if spoken.calls == lost:
                self.gossip.failed(request, other.who.author)
                return spoken
            spoken.add(request, answer)
            request = self.gossip.take(request, answer, other.who.author)
        if request is not None:
            self.gossip.unsent(request, other.who.author)
        return spoken

    def hear(self, entries: list[ftis_pb2.Entry], introducer: bytes) -> int:
        """Takes in entries that nobody asked for; returns how many were new."""
        before = self.gossip.counts["new"]
        self.gossip.answer(ftis_pb2.ExchangeRequest(entries=entries), introducer)
        return self.gossip.counts["new"] - before

    def knows(self, made: Announcement) -> bool:
        return self.gossip.table.get(made.author, made.round) is not None


def made_by(who: Identity, round: int = 0, packets: int = 2, **options: int) -> Announcement:
    bodies = [packet(who.author, round, slot) for slot in range(packets)]
    return announcement(who, round, bodies, **options)


def entry(made: Announcement | bytes, age: float = 0.0, held: bytes = b"") -> ftis_pb2.Entry:
    data = made if isinstance(made, bytes) else made.encode()
    return ftis_pb2.Entry(announcement=data, age_ms=int(age * 1000), held=held)


@pytest.fixture
def alice() -> Talker:
    return Talker(ALICE)


@pytest.fixture
def bob() -> Talker:
    return Talker(BOB)


def test_news_spread_over_hops_and_are_not_told_twice(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(ALICE)
    alice.gossip.announce(made)
    assert alice.exchange(bob) == Spoken(calls=1, entries=1), "nobody can know it yet, so it comes unasked"
    assert bob.knows(made)
    assert bob.exchange(carol) == Spoken(calls=2, entries=1, mentions=1)
    assert carol.knows(made)
    pairs = (alice, bob), (bob, alice), (carol, bob), (bob, carol)
    assert [a.exchange(b) for a, b in pairs] == [Spoken(calls=1)] * 4
    assert bob.gossip.counts == {"new": 1}


def test_who_asks_learns_in_the_same_exchange_what_the_other_has(alice: Talker, bob: Talker) -> None:
    made = made_by(CAROL)
    alice.hear([entry(made)], CAROL.author)
    assert bob.exchange(alice) == Spoken(calls=2, entries=1, mentions=1)
    assert bob.knows(made)
    assert bob.news == 1


def test_an_announcement_goes_to_a_node_once_whoever_mentions_it() -> None:
    """Twenty nodes exchange at random: every announcement reaches everybody, whole, about once."""
    rng = random.Random(0)
    talkers = [Talker(identity(1000 + number)) for number in range(20)]
    made = [made_by(talker.who) for talker in talkers]
    for talker, announcement_ in zip(talkers, made, strict=True):
        talker.gossip.announce(announcement_)
    spoken = [a.exchange(b) for _ in range(12) for a in talkers for b in rng.sample(talkers, 1) if a is not b]
    assert all(talker.knows(one) for talker in talkers for one in made)
    assert 20 * 19 <= sum(exchange.entries for exchange in spoken) < 1.1 * 20 * 19, "but for a few that were pushed"
    assert all(talker.gossip.counts["new"] == 19 for talker in talkers)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_answer_loses_no_news(alice: Talker, bob: Talker, lost: int) -> None:
    of_alice, of_bob = [made_by(CAROL, round) for round in (0, 1)]
    alice.hear([entry(of_alice)], CAROL.author)
    bob.hear([entry(of_bob)], CAROL.author)
    alice.exchange(bob, lost=lost)
    alice.now += gossip.ASKED_SECONDS
    alice.exchange(bob)
    assert alice.knows(of_bob) and bob.knows(of_alice)
    assert alice.exchange(bob) == Spoken(calls=1)


@pytest.mark.parametrize("limits", [OWN, Limits(entries=1, mentions=1)])
@pytest.mark.parametrize(("announcements", "peers"), [(100, 1), (600, 6)])
def test_in_the_end_everything_arrives_however_much_there_is(announcements: int, peers: int, limits: Limits) -> None:
    """Also while the peers make new ones of their own, which come unasked, and every fifth answer is lost."""
    rng = random.Random(0)
    bob, others = Talker(BOB), [Talker(identity(2000 + number)) for number in range(peers)]
    for number in range(announcements // 5 if limits.entries == 1 else announcements):
        maker = identity(3000 + number)
        rng.choice(others).hear([entry(made_by(maker, packets=1))], maker.author)
    for number in range(400):
        other = rng.choice(others)
        if number < 10:
            other.gossip.announce(made_by(other.who, number))
        one, two = (bob, other) if number % 2 else (other, bob)
        if number < 300:
            one.exchange(two, lost=rng.choice([0, 1, None, None, None]))
        else:
            one.exchange(two)
        for talker in (bob, *others):
            talker.now += 1.0
    known = {(known.announcement.author, known.announcement.round) for other in others for known in other.gossip.table}
    assert known <= {(known.announcement.author, known.announcement.round) for known in bob.gossip.table}


def test_what_one_does_not_give_is_asked_of_another(alice: Talker, bob: Talker) -> None:
    made = made_by(MALLORY)
    alice.hear([entry(made)], MALLORY.author)
    request = asked_in_vain(bob, CAROL, made)
    assert alice.exchange(bob).entries == 0, "Carol has been asked and may still answer"
    assert bob.gossip.take(request, ftis_pb2.ExchangeResponse(), CAROL.author) is None
    bob.exchange(alice)
    assert bob.knows(made)


def asked_in_vain(bob: Talker, other: Identity, made: Announcement) -> ftis_pb2.ExchangeRequest:
    """Bob asks another, who mentions an announcement; returns what Bob then asks for."""
    promise = ftis_pb2.ExchangeResponse(mentions=[ftis_pb2.Mention(id=announcement_id(made.encode()))])
    request = bob.gossip.take(bob.gossip.ask(other.author), promise, other.author)
    assert request is not None
    return request


def test_one_who_mentions_and_does_not_give_holds_an_announcement_up_once(alice: Talker, bob: Talker) -> None:
    """However often it does so, and whether it asks or is asked."""
    made = made_by(MALLORY)
    alice.hear([entry(made)], MALLORY.author)
    assert asked_in_vain(bob, CAROL, made).wanted
    alice.exchange(bob)
    assert not bob.knows(made)
    bob.now += gossip.ASKED_SECONDS
    assert bob.gossip.ask(CAROL.author).wanted, "it is asked again, and silent again"
    mention = ftis_pb2.Mention(id=announcement_id(made.encode()))
    for number in range(10):
        bob.gossip.answer(ftis_pb2.ExchangeRequest(mentions=[mention]), identity(1000 + number).author)
    alice.exchange(bob)
    assert bob.knows(made)


def test_who_mentioned_an_announcement_is_known_to_hold_its_packets_whoever_gave_it(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(MALLORY, packets=3)
    for talker in (alice, carol):
        talker.hear([entry(made)], MALLORY.author)
    [at_alice] = alice.gossip.table
    at_alice.have = 0b101
    opening = bob.gossip.ask(ALICE.author)
    request = bob.gossip.take(opening, alice.gossip.answer(opening, BOB.author), ALICE.author)
    assert request is not None and request.wanted
    bob.now += gossip.ASKED_SECONDS  # Alice is slow, and Carol faster
    bob.exchange(carol)
    [at_bob] = bob.gossip.table
    assert at_bob.holders[ALICE.author] == 0b101
    assert not bob.gossip.ask(ALICE.author).mentions, "she knows it"


def test_one_id_many_times_is_answered_once(alice: Talker) -> None:
    alice.hear([entry(made_by(CAROL))], CAROL.author)
    [known] = alice.gossip.table
    assert len(alice.gossip.answer(ftis_pb2.ExchangeRequest(wanted=[known.id] * 32), BOB.author).entries) == 1


def test_who_shakes_hands_again_is_still_asked_for_what_it_mentioned(alice: Talker, bob: Talker) -> None:
    made = made_by(CAROL)
    alice.hear([entry(made)], CAROL.author)
    bob.gossip.answer(alice.gossip.ask(BOB.author), ALICE.author)
    bob.gossip.forget_peer(ALICE.author)
    bob.exchange(alice)
    assert bob.knows(made)


def test_who_has_got_more_packets_says_so_and_nothing_else(alice: Talker, bob: Talker) -> None:
    made = made_by(CAROL, packets=12)
    for talker in (alice, bob):
        talker.hear([entry(made)], CAROL.author)
    alice.exchange(bob)
    bob.news = 0
    [known] = alice.gossip.table
    known.have = 0b1000_0000_0001
    assert alice.exchange(bob) == Spoken(calls=1, mentions=1)
    [at_bob] = bob.gossip.table
    assert at_bob.holders[ALICE.author] == known.have
    assert bob.news == 1, "there may be something to pull from her"
    assert alice.exchange(bob) == Spoken(calls=1)


def test_a_newcomer_catches_up_within_a_few_exchanges(alice: Talker, bob: Talker) -> None:
    for number in range(100):
        alice.hear([entry(made_by(identity(1000 + number), packets=1))], CAROL.author)
    for _ in range(3):
        bob.exchange(alice)
    assert len(bob.gossip.table) == 100


def test_the_age_grows_by_what_every_hop_held_it(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(ALICE)
    alice.gossip.announce(made)
    alice.now, bob.now, carol.now = 5.0, 70.0, 900.0  # clocks that have nothing to do with one another
    alice.exchange(bob)
    bob.now += 7.0
    bob.exchange(carol)
    known = carol.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert carol.now - known.born == pytest.approx(12.0)


def test_an_author_holds_all_and_others_what_they_say(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(ALICE, packets=12)
    alice.gossip.announce(made)
    alice.exchange(bob)
    known = bob.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert known.holders[ALICE.author] == 0b1111_1111_1111
    known.have = 0b1001_0000_0000
    bob.exchange(carol)
    at_carol = carol.gossip.table.get(ALICE.author, 0)
    assert at_carol is not None
    assert at_carol.holders[BOB.author] == 0b1001_0000_0000


def test_a_silly_mask_of_what_is_held_claims_no_more_than_there_is(bob: Talker) -> None:
    bob.hear([entry(made_by(ALICE, packets=2), held=b"\xff" * 100_000)], CAROL.author)
    known = bob.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert known.holders[CAROL.author] == 0b11


def test_ones_own_newest_is_always_told(alice: Talker, bob: Talker) -> None:
    for number in range(100):
        other = identity(1000 + number)
        alice.hear([entry(made_by(other, packets=1))], other.author)
    newest = made_by(ALICE)
    alice.gossip.announce(newest)
    bob.gossip.answer(alice.gossip.ask(BOB.author), ALICE.author)
    assert bob.knows(newest)


def test_ones_own_newest_is_pushed_to_a_few_and_mentioned_to_the_rest(alice: Talker) -> None:
    alice.gossip.announce(made_by(ALICE))
    requests = [alice.gossip.ask(identity(1000 + number).author) for number in range(gossip.PUSHED + 3)]
    assert [len(request.entries) for request in requests] == [1] * gossip.PUSHED + [0] * 3
    assert [len(request.mentions) for request in requests] == [0] * gossip.PUSHED + [1] * 3


def test_ones_own_newest_is_not_told_when_it_is_too_old_for_anybody(alice: Talker) -> None:
    alice.gossip.announce(made_by(ALICE))
    alice.now += 601.0
    alice.gossip.table.expire()
    request = alice.gossip.ask(BOB.author)
    assert not request.entries and not request.mentions


def test_groups_dealt_with_in_an_earlier_life_are_not_wanted_again() -> None:
    bob = Talker(BOB, {(ALICE.author, 0, 1)})
    bob.hear([entry(made_by(ALICE, packets=3))], ALICE.author)
    assert {target.index for target in bob.gossip.table.choose(10, lambda target: True)} == {0, 2}


# --- what is not taken in ---------------------------------------------------------------------------------------------


def refused(bob: Talker, *entries: ftis_pb2.Entry) -> dict[str, int]:
    assert bob.hear(list(entries), MALLORY.author) == 0
    assert len(bob.gossip.table) == 0
    assert not any(bob.gossip.quarantined(who.author) for who in (ALICE, CAROL, MALLORY))
    return dict(bob.gossip.counts)


def test_a_forged_one_is_counted_and_its_claimed_author_not_blamed(bob: Talker) -> None:
    forged = bytearray(made_by(ALICE).encode())
    forged[-1] ^= 1
    assert refused(bob, entry(bytes(forged))) == {"forged": 1}
    assert bob.hear([entry(made_by(ALICE))], MALLORY.author) == 1


def test_a_forged_contradiction_does_not_quarantine_its_victim(bob: Talker) -> None:
    bob.hear([entry(made_by(ALICE, packets=2))], ALICE.author)
    forged = bytearray(made_by(ALICE, packets=3).encode())
    forged[-1] ^= 1
    bob.hear([entry(bytes(forged))], MALLORY.author)
    assert bob.gossip.counts["forged"] == 1
    assert bob.gossip.quarantined(ALICE.author) is None
    assert bob.knows(made_by(ALICE))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x98", b"\x90", b"x" * 1000, b"\x98" + b"\x91" * 300])
def test_a_malformed_one_is_counted(bob: Talker, data: bytes) -> None:
    assert refused(bob, entry(data)) == {"malformed": 1}


def test_one_of_another_run_is_counted(bob: Talker) -> None:
    assert refused(bob, entry(announcement(ALICE, 0, [b"x"], run=OTHER_RUN))) == {"other run": 1}


@pytest.mark.parametrize("hours", [-4, 4])
def test_one_signed_hours_ago_or_ahead_is_a_replay(bob: Talker, hours: int) -> None:
    assert refused(bob, entry(made_by(ALICE, issued_at=int(time.time()) + hours * 3600))) == {"replayed": 1}


def test_a_clock_that_is_two_hours_off_does_no_harm(bob: Talker) -> None:
    assert bob.hear([entry(made_by(ALICE, issued_at=int(time.time()) - 2 * 3600))], ALICE.author) == 1


def test_one_older_than_anybody_would_train_on_is_counted(bob: Talker) -> None:
    assert refused(bob, entry(made_by(ALICE), age=601.0)) == {"old": 1}
    assert refused(bob, ftis_pb2.Entry(announcement=made_by(ALICE).encode(), age_ms=2**64 - 1)) == {"old": 2}


def test_an_exchange_is_read_up_to_its_limit_only(bob: Talker) -> None:
    entries = [entry(made_by(identity(1000 + number), packets=1)) for number in range(OWN.entries + 5)]
    assert bob.hear(entries, MALLORY.author) == OWN.entries
    assert bob.gossip.counts == {"new": OWN.entries, "over the limits": 1}


def test_no_message_is_larger_than_the_other_takes(alice: Talker) -> None:
    made = [made_by(identity(1000 + number), packets=1) for number in range(20)]
    for one in made:
        alice.hear([entry(one)], MALLORY.author)
    small = Limits(entries=3, mentions=5)
    request = alice.gossip.ask(BOB.author, small)
    assert len(request.mentions) == 5
    wanted = [announcement_id(one.encode()) for one in made]
    answer = ftis_pb2.ExchangeResponse(mentions=[ftis_pb2.Mention(id=id) for id in range(10)], wanted=wanted)
    follow = alice.gossip.take(request, answer, BOB.author, small)
    assert follow is not None and len(follow.entries) == 3 and len(follow.wanted) == 3
    answer = alice.gossip.answer(ftis_pb2.ExchangeRequest(wanted=wanted), CAROL.author, small)
    assert len(answer.entries) == 3 and len(answer.mentions) == 5


def test_who_knows_enough_to_pull_asks_for_a_few_more_at_a_time_those_that_the_other_holds_first(alice: Talker) -> None:
    mentions = [ftis_pb2.Mention(id=1000 + number, held=b"\x01" * (number % 8 == 0)) for number in range(64)]
    request = ftis_pb2.ExchangeRequest(mentions=mentions)
    made = [made_by(identity(1000 + number), packets=1) for number in range(gossip.ENOUGH_OPEN)]
    for one in made[:-1]:
        alice.hear([entry(one)], identity(5).author)
    assert len(alice.gossip.answer(request, BOB.author).wanted) == OWN.entries
    alice.hear([entry(made[-1])], identity(5).author)
    alice.now += gossip.COUNT_SECONDS
    wanted = alice.gossip.answer(request, CAROL.author).wanted
    assert len(wanted) == gossip.A_FEW and all(id % 8 == 0 for id in wanted)
    for known in alice.gossip.table:
        known.done = 1
    alice.now += gossip.COUNT_SECONDS
    assert len(alice.gossip.answer(request, MALLORY.author).wanted) == OWN.entries, "there is nothing left to pull"


def test_what_others_say_that_one_said_oneself_is_ignored(bob: Talker) -> None:
    assert refused(bob, entry(made_by(BOB, 7))) == {"own or quarantined": 1}


def test_two_signed_announcements_of_one_round_quarantine_their_author(bob: Talker) -> None:
    first, second, other = made_by(ALICE, packets=2), made_by(ALICE, packets=3), made_by(ALICE, round=1)
    bob.hear([entry(first), entry(other)], CAROL.author)
    bob.hear([entry(second)], MALLORY.author)
    assert bob.gossip.counts["equivocation"] == 1
    assert "two different announcements" in (bob.gossip.quarantined(ALICE.author) or "")
    assert not bob.gossip.quarantined(MALLORY.author), "the messenger is not to blame"
    assert len(bob.gossip.table) == 0
    bob.hear([entry(other)], CAROL.author)
    assert len(bob.gossip.table) == 0


def test_the_same_packets_signed_again_are_no_contradiction(bob: Talker) -> None:
    bob.hear([entry(made_by(ALICE, issued_at=int(time.time()) - 50))], ALICE.author)
    bob.hear([entry(made_by(ALICE))], ALICE.author)
    assert bob.gossip.counts == {"new": 1, "known": 1}


def test_a_quarantine_ends(bob: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "QUARANTINE_SECONDS", -1.0)
    bob.gossip.quarantine(ALICE.author, "for nothing")
    assert bob.gossip.quarantined(ALICE.author) is None


def test_identities_without_number_do_not_fill_the_quarantine(bob: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "QUARANTINED_MAX", 8)
    for number in range(20):
        bob.gossip.quarantine(identity(1000 + number).author, "it equivocated")
    assert len(bob.gossip._quarantine) == 8
    assert bob.gossip.quarantined(identity(1019).author) is not None


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(
        st.builds(
            lambda data, age, held: ftis_pb2.Entry(announcement=data, age_ms=age, held=held),
            st.one_of(
                st.binary(max_size=400),
                st.integers(0, 2**64 - 1).map(lambda round: made_by(ALICE, round, packets=1).encode()),
                st.tuples(st.integers(0, 200), st.integers(0, 255)).map(
                    lambda flip: bytes(
                        byte ^ flip[1] if index == flip[0] else byte
                        for index, byte in enumerate(made_by(CAROL).encode())
                    )
                ),
            ),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=20),
        ),
        max_size=8,
    )
)
def test_nothing_that_a_peer_says_raises(entries: list[ftis_pb2.Entry]) -> None:
    bob = Talker(BOB)
    bob.hear(entries, MALLORY.author)
    assert sum(bob.gossip.counts.values()) == len(entries)
    assert len(bob.gossip.table) <= len(entries)


_IDS = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(
    mentions=st.lists(st.builds(ftis_pb2.Mention, id=_IDS, held=st.binary(max_size=600)), max_size=100),
    wanted=st.lists(_IDS, max_size=100),
    again=st.booleans(),
)
def test_nothing_that_a_peer_mentions_or_wants_raises_or_is_believed(
    mentions: list[ftis_pb2.Mention], wanted: list[int], again: bool
) -> None:
    bob = Talker(BOB)
    bob.gossip.announce(made_by(BOB))
    for number in range(3):
        request = ftis_pb2.ExchangeRequest(mentions=mentions, wanted=wanted, again=again)
        answer = bob.gossip.answer(request, identity(1000 + number).author)
        assert len(answer.wanted) <= OWN.entries
    assert len(bob.gossip.table) == 1
    assert sum(map(len, bob.gossip._lacking.values())) <= 3 * OWN.mentions


def test_mentions_without_number_do_not_fill_the_memory(bob: Talker) -> None:
    rng = random.Random(0)
    for number in range(gossip.PEERS_MAX + 20):
        mentions = [ftis_pb2.Mention(id=rng.getrandbits(64)) for _ in range(OWN.mentions)]
        bob.gossip.answer(ftis_pb2.ExchangeRequest(mentions=mentions), identity(1000 + number).author)
    for _ in range(20):
        mentions = [ftis_pb2.Mention(id=rng.getrandbits(64)) for _ in range(OWN.mentions)]
        bob.gossip.answer(ftis_pb2.ExchangeRequest(mentions=mentions), MALLORY.author)
    assert len(bob.gossip._lacking) <= gossip.PEERS_MAX
    assert len(bob.gossip._lacking[MALLORY.author]) <= gossip.LACKING_MAX
    for _ in range(gossip.IDS_MAX // OWN.entries + 10):
        mentions = [ftis_pb2.Mention(id=rng.getrandbits(64)) for _ in range(OWN.mentions)]
        bob.gossip.take(ftis_pb2.ExchangeRequest(), ftis_pb2.ExchangeResponse(mentions=mentions), MALLORY.author)
    assert len(bob.gossip._asked) == gossip.IDS_MAX


def test_identities_without_number_do_not_fill_an_announcement(bob: Talker) -> None:
    bob.hear([entry(made_by(ALICE))], ALICE.author)
    [known] = bob.gossip.table
    for number in range(table.PEERS_MAX + 20):
        other = identity(1000 + number).author
        bob.gossip.answer(ftis_pb2.ExchangeRequest(mentions=[ftis_pb2.Mention(id=known.id, held=b"\x01")]), other)
        bob.gossip.answer(ftis_pb2.ExchangeRequest(), identity(2000 + number).author)
    assert len(known.told) == len(known.holders) == table.PEERS_MAX
    assert other in known.holders
