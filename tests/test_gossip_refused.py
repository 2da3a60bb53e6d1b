"""Gossip takes in what is signed, fresh and of this run; the rest is counted, and fills no memory."""

import random
import time

import pytest

from ftis_node.swarm import ftis_pb2, gossip, table
from ftis_node.swarm.known import announcement_id
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.sessions import LACKING_MAX, SESSIONS_MAX
from tests.support.swarm import OTHER_RUN, announcement, identity
from tests.support.talkers import ALICE, BOB, CAROL, MALLORY, Talker, entry, made_by, mention


def refused(bob, *entries):
    assert bob.hear(list(entries), MALLORY.author) == 0
    assert len(bob.gossip.table) == 0
    for who in (ALICE, CAROL, MALLORY):
        assert not bob.reputation.banned(who.author)
    return dict(bob.gossip.counts)


def forged(made):
    """An announcement whose signature is wrong."""
    data = bytearray(made.encode())
    data[-1] ^= 1
    return entry(bytes(data))


def test_a_forged_one_is_counted_and_its_claimed_author_not_blamed(bob):
    assert refused(bob, forged(made_by(ALICE))) == {"forged": 1}
    assert bob.hear([entry(made_by(ALICE, packets=2))], MALLORY.author) == 1
    bob.hear([forged(made_by(ALICE, packets=3))], MALLORY.author)
    assert bob.gossip.counts["forged"] == 2
    assert bob.knows(made_by(ALICE, packets=2))
    assert not bob.reputation.banned(ALICE.author), "a forged contradiction quarantines nobody"


def issued(hours, **options):
    """Alice's, of so many hours from now."""
    return made_by(ALICE, issued_at=int(time.time() + hours * 3600), **options)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x98", "malformed"),
        (b"\x90", "malformed"),
        (b"x" * 1000, "malformed"),
        (b"\x98" + b"\x91" * 300, "malformed"),
        (announcement(ALICE, 0, [b"x"], run=OTHER_RUN), "other run"),
        (issued(-4), "replayed"),
        (issued(4), "replayed"),
        (made_by(BOB, 7), "own or banned"),
    ],
)
def test_what_is_not_for_this_node_is_counted(bob, made, why):
    assert refused(bob, entry(made)) == {why: 1}


def test_one_older_than_anybody_would_train_on_is_counted(bob):
    assert refused(bob, entry(made_by(ALICE), age=601.0)) == {"old": 1}

    oldest = ftis_pb2.Entry(announcement=made_by(ALICE).encode(), age_ms=2**64 - 1)
    assert refused(bob, oldest) == {"old": 2}


def test_row_01_who_passes_on_what_is_no_announcement_three_times_is_left_alone(bob):
    for number in range(3):
        assert not bob.reputation.shunned(MALLORY.author)
        bob.hear([entry(bytes([0xC1, number]))], MALLORY.author)
    assert bob.reputation.shunned(MALLORY.author) == "it passed on malformed announcements"


def test_what_a_peer_mentions_beyond_what_is_remembered_is_asked_for_again(bob):
    for first in range(0, 4 * LACKING_MAX, OWN.mentions):
        told = range(first, first + OWN.mentions)
        bob.answers(MALLORY.author, map(mention, told))

    request = bob.gossip.ask(MALLORY.author)
    while request.wanted:
        assert not request.again
        further = bob.gossip.take(request, ftis_pb2.ExchangeResponse(), MALLORY.author)
        request = further or bob.gossip.ask(MALLORY.author)

    assert request.again
    assert not request.latest, "all that it remembered is used up"


def test_with_enough_to_pull_few_mentions_are_remembered_and_the_others_are_asked_for_when_these_are_had(
    bob,
):
    bob.gossip.enough = 0
    made = {}
    for number in range(OWN.mentions):
        one = made_by(identity(number))
        made[announcement_id(one.encode())] = entry(one)

    bob.answers(MALLORY.author, map(mention, made))

    lacking = bob.gossip.sessions[MALLORY.author].lacking
    assert len(lacking) == gossip.FEW_LACKING < OWN.mentions
    while lacking:
        request = bob.gossip.ask(MALLORY.author)
        assert 0 < len(request.wanted) <= gossip.A_FEW
        assert not request.again
        bob.hear([made[id] for id in request.wanted], MALLORY.author)
    assert bob.gossip.ask(MALLORY.author).again, "it forgot the first ones"


def test_a_clock_that_is_two_hours_off_does_no_harm(bob):
    assert bob.hear([entry(issued(-2))], ALICE.author) == 1


def of_strangers(count, first=1000):
    """An announcement of each."""
    return [made_by(identity(first + number), packets=1) for number in range(count)]


def test_row_31_besides_what_it_was_asked_for_a_peer_gives_one_announcement_of_its_own_accord(bob):
    made = of_strangers(10)
    entries = [entry(one) for one in made]
    assert bob.hear(entries[:5], MALLORY.author) == 1
    assert bob.gossip.counts == {"new": 1, "not asked for": 4}

    request = ftis_pb2.ExchangeRequest(entries=entries[:2])
    answer = bob.gossip.answer(request, MALLORY.author)
    assert answer.again, "it may take for told what was left unread"

    bob.gossip.counts.clear()
    answer = bob.answers(MALLORY.author, map(mention, made[1:4]))
    assert len(answer.wanted) == 3
    assert bob.hear(entries[1:3], MALLORY.author) == 2
    assert bob.hear(entries[3:], MALLORY.author) == 1, "it was asked for the other once, and had read that"
    assert bob.hear(entries[6:], CAROL.author) == 1, "what another was asked for is not for it to give"
    assert bob.gossip.counts == {"new": 4, "not asked for": 6 + 3}


def test_mentions_are_read_up_to_their_limit_only(bob):
    bob.answers(MALLORY.author, map(mention, range(OWN.mentions + 5)))
    assert len(bob.gossip.sessions[MALLORY.author].lacking) == OWN.mentions
    assert bob.gossip.counts == {"over the limits": 1}


def test_no_message_is_larger_than_the_other_takes(alice):
    alice.fill(20)
    small = Limits(entries=3, mentions=5)
    request = alice.gossip.ask(BOB.author, small)
    assert len(request.mentions) == 5

    wanted = [known.id for known in alice.gossip.table]
    answer = ftis_pb2.ExchangeResponse(mentions=map(mention, range(10)), wanted=wanted)
    follow = alice.gossip.take(request, answer, BOB.author, small)
    assert len(follow.entries) == 3
    assert len(follow.wanted) == 3

    answer = alice.gossip.answer(ftis_pb2.ExchangeRequest(wanted=wanted), CAROL.author, small)
    assert len(answer.entries) == 3
    assert len(answer.mentions) == 5


def test_who_knows_enough_to_pull_asks_for_a_few_more_at_a_time_those_that_the_other_holds_first(alice):
    mentions = [mention(1000 + number) for number in range(64)]
    for held in mentions[::8]:
        held.held = b"\x01"
    alice.fill(gossip.ENOUGH_OPEN - 1)
    assert len(alice.answers(BOB.author, mentions).wanted) == OWN.entries

    alice.fill(gossip.ENOUGH_OPEN)
    alice.now += gossip.COUNT_SECONDS
    few = alice.answers(CAROL.author, mentions).wanted
    assert len(few) == gossip.A_FEW
    assert all(id % 8 == 0 for id in few)

    alice.gossip.enough *= 2
    assert len(alice.answers(CAROL.author, mentions).wanted) == OWN.entries, "an observer pulls none"

    for known in alice.gossip.table:
        known.done = 1
    alice.gossip.enough = gossip.ENOUGH_OPEN
    alice.now += gossip.COUNT_SECONDS
    assert len(alice.answers(MALLORY.author, mentions).wanted) == OWN.entries, "there is nothing left to pull"


def test_two_signed_announcements_of_one_round_ban_their_author(bob):
    first = entry(made_by(ALICE, packets=2))
    of_another_round = entry(made_by(ALICE, round=1))
    bob.hear([first, of_another_round], CAROL.author)

    second = entry(made_by(ALICE, packets=3))
    bob.hear([second], MALLORY.author)

    assert bob.gossip.counts["equivocation"] == 1
    assert "two different announcements" in bob.reputation.banned(ALICE.author)
    assert not bob.reputation.banned(MALLORY.author), "the messenger is not to blame"

    bob.hear([entry(made_by(ALICE, round=2))], CAROL.author)
    assert bob.gossip.counts["own or banned"] == 1


def test_the_same_packets_signed_again_are_no_contradiction(bob):
    bob.hear([entry(issued(-0.01))], ALICE.author)
    bob.hear([entry(made_by(ALICE))], ALICE.author)
    assert bob.gossip.counts == {"new": 1, "known": 1}


def test_mentions_without_number_do_not_fill_the_memory(bob):
    rng = random.Random(0)

    def made_up():
        return [mention(rng.getrandbits(64)) for _ in range(OWN.mentions)]

    for number in range(SESSIONS_MAX + 20):
        bob.answers(identity(1000 + number).author, made_up())
    for _ in range(20):
        bob.answers(MALLORY.author, made_up())
    assert len(bob.gossip.sessions) == SESSIONS_MAX
    assert len(bob.gossip.sessions[MALLORY.author].lacking) == LACKING_MAX

    for _ in range(gossip.IDS_MAX // OWN.entries + 10):
        answer = ftis_pb2.ExchangeResponse(mentions=made_up())
        bob.gossip.take(ftis_pb2.ExchangeRequest(), answer, MALLORY.author)
    assert len(bob.gossip._asked) == gossip.IDS_MAX


def test_identities_without_number_do_not_fill_an_announcement(bob):
    bob.hear([entry(made_by(ALICE))], ALICE.author)
    known = bob.only
    for number in range(table.PEERS_MAX + 20):
        other = identity(1000 + number).author
        bob.answers(other, [mention(known.id, held=b"\x01")])
        bob.gossip.answer(ftis_pb2.ExchangeRequest(), identity(2000 + number).author)
        bob.gossip.ask(CAROL.author)

    assert known.knows.bit_count() == table.PEERS_MAX
    assert table.PEERS_MAX // 3 <= len(known.holders) < table.PEERS_MAX
    assert other in known.holders
    assert not bob.gossip.ask(CAROL.author).mentions, "who is talked to is not forgotten for them, nor told again"


def test_row_31_of_one_peer_only_so_many_signatures_are_checked(monkeypatch):
    monkeypatch.setattr(gossip, "CHECKS_A_SECOND", 1.0)
    monkeypatch.setattr(gossip, "CHECKS_AT_ONCE", 10.0)
    bob = Talker(BOB)

    def heard(made, first_sender):
        return sum(bob.hear([entry(one)], first_sender.author) for one in made)

    flood = of_strangers(20)
    assert heard(flood, MALLORY) == 10
    assert bob.gossip.counts == {"new": 10, "over the budget": 10}
    assert heard(flood[10:], CAROL) == 10, "others may still tell of them"

    bob.now += 5.0
    assert heard(of_strangers(20, first=2000), MALLORY) == 5
