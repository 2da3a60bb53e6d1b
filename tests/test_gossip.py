"""Gossip takes in what is signed, fresh and of this run, counts the rest, and tells nobody anything twice."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.swarm import ftis_pb2, gossip
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.gossip import MAX_ENTRIES, Gossip
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.table import Table
from tests.helpers_swarm import OTHER_RUN, RUN, announcement, identity, packet

ALICE, BOB, CAROL, MALLORY = (identity(number) for number in range(1, 5))


class Talker:
    """One node's gossip, with a clock in hand."""

    def __init__(self, who: Identity, dealt_with: set[tuple[bytes, int, int]] | None = None) -> None:
        self.who = who
        self.now = 0.0
        dealt_with = dealt_with or set()
        table = Table(600.0, lambda: self.now, random.Random(0))
        self.gossip = Gossip(table, RUN, who.author, lambda *key: key in dealt_with)

    def tell(self, other: Talker) -> int:
        """One direction of an exchange; returns how many entries were sent."""
        known, entries = self.gossip.offer(other.who.author, self.now)
        other.gossip.merge(entries, self.who.author)
        self.gossip.told(other.who.author, known)
        return len(entries)

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
    assert alice.tell(bob) == 1
    assert bob.knows(made)
    assert bob.tell(carol) == 1
    assert carol.knows(made)
    assert [a.tell(b) for a, b in ((alice, bob), (bob, alice), (carol, bob), (bob, carol))] == [0, 0, 0, 0]
    assert bob.gossip.counts == {"new": 1}


def test_the_age_grows_by_what_every_hop_held_it(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(ALICE)
    alice.gossip.announce(made)
    alice.now, bob.now, carol.now = 5.0, 70.0, 900.0  # clocks that have nothing to do with one another
    alice.tell(bob)
    bob.now += 7.0
    bob.tell(carol)
    known = carol.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert carol.now - known.born == pytest.approx(12.0)


def test_an_author_holds_all_and_others_what_they_say(alice: Talker, bob: Talker) -> None:
    carol = Talker(CAROL)
    made = made_by(ALICE, packets=12)
    alice.gossip.announce(made)
    alice.tell(bob)
    known = bob.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert known.holders[ALICE.author] == 0b1111_1111_1111
    known.have = 0b1001_0000_0000
    bob.tell(carol)
    at_carol = carol.gossip.table.get(ALICE.author, 0)
    assert at_carol is not None
    assert at_carol.holders[BOB.author] == 0b1001_0000_0000


def test_a_silly_mask_of_what_is_held_claims_no_more_than_there_is(bob: Talker) -> None:
    bob.gossip.merge([entry(made_by(ALICE, packets=2), held=b"\xff" * 100_000)], CAROL.author)
    known = bob.gossip.table.get(ALICE.author, 0)
    assert known is not None
    assert known.holders[CAROL.author] == 0b11


def test_ones_own_newest_is_always_told(alice: Talker, bob: Talker) -> None:
    for number in range(100):
        other = identity(1000 + number)
        alice.gossip.merge([entry(made_by(other, packets=1))], other.author)
    newest = made_by(ALICE)
    alice.gossip.announce(newest)
    assert alice.tell(bob) == MAX_ENTRIES
    assert bob.knows(newest)


def test_groups_dealt_with_in_an_earlier_life_are_not_wanted_again() -> None:
    bob = Talker(BOB, {(ALICE.author, 0, 1)})
    bob.gossip.merge([entry(made_by(ALICE, packets=3))], ALICE.author)
    assert {target.index for target in bob.gossip.table.choose(10, lambda target: True)} == {0, 2}


# --- what is not taken in ---------------------------------------------------------------------------------------------


def refused(bob: Talker, *entries: ftis_pb2.Entry) -> dict[str, int]:
    assert bob.gossip.merge(entries, MALLORY.author) == 0
    assert len(bob.gossip.table) == 0
    assert not any(bob.gossip.quarantined(who.author) for who in (ALICE, CAROL, MALLORY))
    return dict(bob.gossip.counts)


def test_a_forged_one_is_counted_and_its_claimed_author_not_blamed(bob: Talker) -> None:
    forged = bytearray(made_by(ALICE).encode())
    forged[-1] ^= 1
    assert refused(bob, entry(bytes(forged))) == {"forged": 1}
    assert bob.gossip.merge([entry(made_by(ALICE))], MALLORY.author) == 1


def test_a_forged_contradiction_does_not_quarantine_its_victim(bob: Talker) -> None:
    bob.gossip.merge([entry(made_by(ALICE, packets=2))], ALICE.author)
    forged = bytearray(made_by(ALICE, packets=3).encode())
    forged[-1] ^= 1
    bob.gossip.merge([entry(bytes(forged))], MALLORY.author)
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
    assert bob.gossip.merge([entry(made_by(ALICE, issued_at=int(time.time()) - 2 * 3600))], ALICE.author) == 1


def test_one_older_than_anybody_would_train_on_is_counted(bob: Talker) -> None:
    assert refused(bob, entry(made_by(ALICE), age=601.0)) == {"old": 1}
    assert refused(bob, ftis_pb2.Entry(announcement=made_by(ALICE).encode(), age_ms=2**64 - 1)) == {"old": 2}


def test_an_exchange_is_read_up_to_its_limit_only(bob: Talker) -> None:
    entries = [entry(made_by(identity(1000 + number), packets=1)) for number in range(MAX_ENTRIES + 5)]
    assert bob.gossip.merge(entries, MALLORY.author) == MAX_ENTRIES
    assert bob.gossip.counts == {"new": MAX_ENTRIES, "entries over the limit": 1}


def test_what_others_say_that_one_said_oneself_is_ignored(bob: Talker) -> None:
    assert refused(bob, entry(made_by(BOB, 7))) == {"own or quarantined": 1}


def test_two_signed_announcements_of_one_round_quarantine_their_author(bob: Talker) -> None:
    first, second, other = made_by(ALICE, packets=2), made_by(ALICE, packets=3), made_by(ALICE, round=1)
    bob.gossip.merge([entry(first), entry(other)], CAROL.author)
    bob.gossip.merge([entry(second)], MALLORY.author)
    assert bob.gossip.counts["equivocation"] == 1
    assert "two different announcements" in (bob.gossip.quarantined(ALICE.author) or "")
    assert not bob.gossip.quarantined(MALLORY.author), "the messenger is not to blame"
    assert len(bob.gossip.table) == 0
    bob.gossip.merge([entry(other)], CAROL.author)
    assert len(bob.gossip.table) == 0


def test_the_same_packets_signed_again_are_no_contradiction(bob: Talker) -> None:
    bob.gossip.merge([entry(made_by(ALICE, issued_at=int(time.time()) - 50))], ALICE.author)
    bob.gossip.merge([entry(made_by(ALICE))], ALICE.author)
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
    bob.gossip.merge(entries, MALLORY.author)
    assert sum(bob.gossip.counts.values()) == len(entries)
    assert len(bob.gossip.table) <= len(entries)
