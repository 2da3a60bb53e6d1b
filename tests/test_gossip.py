"""Gossip spreads what is fresh to all, and tells nobody anything twice."""

import random

import msgspec
import pytest

from ftis_node.swarm import ftis_pb2, gossip
from ftis_node.swarm.limits import OWN, Limits
from tests.support.swarm import identity
from tests.support.talkers import ALICE, BOB, CAROL, MALLORY, Spoken, Talker, entry, made_by, mention


def test_news_spread_over_hops_and_are_not_told_twice(alice, bob):
    carol = Talker(CAROL)
    made = made_by(ALICE)
    alice.gossip.announce(made)
    assert alice.exchange(bob) == Spoken(calls=1, entries=1), "nobody can know it yet, so it comes unasked"
    assert bob.knows(made)
    assert bob.exchange(carol) == Spoken(calls=2, entries=1, mentions=1)
    assert carol.knows(made)
    for one, other in (
        (alice, bob),
        (bob, alice),
        (carol, bob),
        (bob, carol),
    ):
        assert one.exchange(other) == Spoken(calls=1)
    assert bob.gossip.counts == {"new": 1}


def test_an_announcement_goes_to_a_node_once_whoever_mentions_it():
    """Twenty nodes exchange at random: every announcement reaches everybody, whole, about once."""
    rng = random.Random(0)
    talkers = [Talker(identity(1000 + number)) for number in range(20)]
    made = [made_by(talker.who) for talker in talkers]
    for talker, one in zip(talkers, made, strict=True):
        talker.gossip.announce(one)
    entries = 0
    for _ in range(12):
        for talker in talkers:
            other = rng.choice(talkers)
            if other is not talker:
                entries += talker.exchange(other).entries
    assert 20 * 19 <= entries < 1.1 * 20 * 19, "but for a few that were pushed"
    for talker in talkers:
        assert all(map(talker.knows, made))
        assert talker.gossip.counts["new"] == 19


@pytest.mark.parametrize("limits", [OWN, Limits(entries=1, mentions=1)])
@pytest.mark.parametrize(("announcements", "peers"), [(100, 1), (600, 6)])
def test_in_the_end_everything_arrives_however_much_there_is(announcements, peers, limits):
    """Also while the peers make new ones of their own, which come unasked, and every fifth answer is lost."""
    rng = random.Random(0)
    bob = Talker(BOB)
    others = [Talker(identity(2000 + number)) for number in range(peers)]
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
    for other in others:
        for known in other.gossip.table:
            assert bob.knows(known.announcement)


def test_a_copy_of_ones_home_is_known_by_what_ones_own_key_has_signed_and_nobody_else_can_show_one(alice, bob):
    mine = made_by(ALICE, 5)
    theirs = made_by(ALICE, 5, packets=1)
    later = made_by(ALICE, 6)
    forged = msgspec.structs.replace(theirs, signature=mine.signature)
    replayed = made_by(ALICE, 7, issued_at=1000)
    alice.gossip.announce(mine)
    for harmless in (mine, made_by(ALICE, 4), forged, replayed):
        alice.hear([entry(harmless)], BOB.author)
        assert not alice.gossip.copied
    for sign in (theirs, later):
        alice.gossip.copied = False
        alice.hear([entry(sign)], BOB.author)
        assert alice.gossip.copied


@pytest.mark.parametrize("lost", [0, 1])
def test_row_68_a_lost_answer_is_told_again_and_nothing_else(alice, bob, lost):
    alice.fill(OWN.entries)
    bob.exchange(alice)
    late = made_by(CAROL, packets=1)
    alice.hear([entry(late)], CAROL.author)
    bob.exchange(alice, lost=lost)
    bob.now += gossip.ASKED_SECONDS
    assert bob.exchange(alice).mentions <= 1, "what came before has come"
    assert bob.knows(late)


def test_row_68_who_always_asks_first_is_asked_too_for_only_who_asks_is_told_again_what_was_lost(alice, bob):
    session = alice.gossip.sessions[BOB.author]
    for _ in range(2):
        alice.gossip.ask(BOB.author)
        for _ in range(2 * gossip.ANSWERS_IN_A_ROW):
            alice.now += 1.0
            bob.exchange(alice)
        assert alice.now - session.asked == gossip.ANSWERS_IN_A_ROW


def test_row_68_what_was_left_of_an_answer_is_asked_for_with_the_second_question(alice, monkeypatch):
    monkeypatch.setattr(gossip, "CHECKS_A_SECOND", 1.0)
    monkeypatch.setattr(gossip, "CHECKS_AT_ONCE", 1.5 * OWN.entries)
    bob = Talker(BOB)
    alice.fill(3 * OWN.entries)
    bob.exchange(alice)
    bob.now += gossip.ASKED_SECONDS
    bob.exchange(alice)
    assert len(bob.gossip.table) < 2 * OWN.entries, "so many signatures are checked for her at once"
    for _ in range(4):
        bob.now += OWN.entries
        bob.exchange(alice)
    assert len(bob.gossip.table) == 3 * OWN.entries


def test_what_one_does_not_give_is_asked_of_another(alice, bob):
    made = made_by(MALLORY)
    alice.hear([entry(made)], MALLORY.author)
    request = asked_in_vain(bob, CAROL, made)
    assert alice.exchange(bob).entries == 0, "Carol has been asked and may still answer"
    assert bob.gossip.take(request, ftis_pb2.ExchangeResponse(), CAROL.author) is None
    bob.exchange(alice)
    assert bob.knows(made)


def asked_in_vain(bob, other, made):
    """Bob asks another, who mentions an announcement; returns what Bob then asks for."""
    promise = ftis_pb2.ExchangeResponse(mentions=[mention(made)])
    return bob.gossip.take(bob.gossip.ask(other.author), promise, other.author)


def test_one_who_mentions_and_does_not_give_holds_an_announcement_up_once(alice, bob):
    """However often it does so, and whether it asks or is asked."""
    made = made_by(MALLORY)
    alice.hear([entry(made)], MALLORY.author)
    assert asked_in_vain(bob, CAROL, made).wanted
    alice.exchange(bob)
    assert not bob.knows(made)
    bob.now += gossip.ASKED_SECONDS
    assert bob.gossip.ask(CAROL.author).wanted, "it is asked again, and silent again"
    for number in range(10):
        bob.answers(identity(1000 + number).author, [mention(made)])
    alice.exchange(bob)
    assert bob.knows(made)


def test_who_mentioned_an_announcement_is_known_to_hold_its_packets_whoever_gave_it(alice, bob):
    carol = Talker(CAROL)
    made = made_by(MALLORY, packets=3)
    for talker in (alice, carol):
        talker.hear([entry(made)], MALLORY.author)
    alice.only.obtained(0b101)
    opening = bob.gossip.ask(ALICE.author)
    request = bob.gossip.take(opening, alice.gossip.answer(opening, BOB.author), ALICE.author)
    assert request.wanted
    bob.now += gossip.ASKED_SECONDS  # Alice is slow, and Carol faster
    bob.exchange(carol)
    assert bob.only.holders[ALICE.author] == 0b101
    assert not bob.gossip.ask(ALICE.author).mentions, "she knows it"


def test_two_that_ask_one_another_at_once_take_in_all_that_either_asked_for(alice, bob):
    alice.fill(100)
    alice.exchange(bob, lost=0)
    asked = bob.gossip.ask(ALICE.author)
    asking = alice.gossip.ask(BOB.author)
    follow = alice.gossip.take(asking, bob.gossip.answer(asking, ALICE.author), BOB.author)
    assert len(follow.entries) == len(asked.wanted) == OWN.entries
    answer = alice.gossip.answer(asked, BOB.author)
    bob.gossip.answer(follow, ALICE.author)
    bob.gossip.take(asked, answer, ALICE.author)
    assert len(bob.gossip.table) == 2 * OWN.entries


def test_what_fits_no_message_is_mentioned_again(alice, bob, monkeypatch):
    monkeypatch.setitem(OWN.__dict__, "room", 1000)
    for number in range(20):
        other = identity(1000 + number)
        alice.hear([entry(made_by(other))], other.author)
    for _ in range(3):
        assert bob.exchange(alice).calls == 2
        bob.now += gossip.ASKED_SECONDS
    assert len(bob.gossip.table) == 20


def test_one_id_many_times_is_answered_once(alice):
    alice.hear([entry(made_by(CAROL))], CAROL.author)
    assert len(alice.answers(BOB.author, wanted=[alice.only.id] * 32).entries) == 1


def test_who_shakes_hands_again_is_still_asked_for_what_it_mentioned(alice, bob):
    made = made_by(CAROL)
    alice.hear([entry(made)], CAROL.author)
    bob.gossip.answer(alice.gossip.ask(BOB.author), ALICE.author)
    bob.gossip.sessions.begin(ALICE.author)
    bob.gossip.table.forget_peer(ALICE.author)
    bob.exchange(alice)
    assert bob.knows(made)


def test_who_has_got_more_packets_says_so_and_nothing_else(alice, bob):
    made = made_by(CAROL, packets=12)
    for talker in (alice, bob):
        talker.hear([entry(made)], CAROL.author)
    alice.exchange(bob)
    bob.news = 0
    alice.only.obtained(0b1000_0000_0001)
    assert alice.exchange(bob) == Spoken(calls=1, mentions=1)
    assert bob.only.holders[ALICE.author] == alice.only.have
    assert bob.news == 1, "there may be something to pull from her"
    assert alice.exchange(bob) == Spoken(calls=1)


def test_the_age_grows_by_what_every_hop_held_it(alice, bob):
    carol = Talker(CAROL)
    alice.gossip.announce(made_by(ALICE))
    alice.now = 5.0
    bob.now = 70.0
    carol.now = 900.0  # clocks that have nothing to do with one another
    alice.exchange(bob)
    bob.now += 7.0
    bob.exchange(carol)
    assert carol.now - carol.only.born == pytest.approx(12.0)


@pytest.mark.parametrize("lie", [599.0, 400.0])
def test_row_18_who_tells_first_of_a_great_age_removes_nothing(alice, bob, lie):
    carol = Talker(CAROL)
    made = made_by(identity(9))
    for talker in (bob, carol):
        talker.hear([entry(made, age=lie)], MALLORY.author)
    bob.exchange(carol)
    alice.hear([entry(made)], identity(9).author)
    carol.exchange(alice)
    for _ in range(3):
        carol.now += 1.0
        bob.now += 1.0
        alice.now += 1.0
        carol.exchange(alice)
        bob.exchange(carol)
    for talker in (alice, bob, carol):
        talker.now += 300.0
        talker.gossip.table.expire()
        assert talker.knows(made)
    assert alice.exchange(carol) == Spoken(calls=1), "all of them agree again"


def test_row_18_what_a_liar_made_expire_is_asked_for_again(alice, bob):
    made = made_by(CAROL)
    bob.hear([entry(made, age=599.5)], MALLORY.author)
    bob.now = 1.0
    alice.now = 1.0
    bob.gossip.table.expire()
    assert not bob.knows(made)
    alice.hear([entry(made, age=1.0)], CAROL.author)
    bob.exchange(alice)
    assert bob.knows(made)


def test_row_18_an_age_that_is_told_too_small_keeps_nothing_for_longer_than_it_was_known(bob):
    made = made_by(CAROL)
    bob.hear([entry(made, age=100.0)], CAROL.author)
    for _ in range(70):
        bob.now += 10.0
        bob.hear([entry(made)], MALLORY.author)
        bob.answers(MALLORY.author, [mention(made, age=1)])
    bob.gossip.table.expire()
    assert not bob.knows(made)


def test_a_mention_without_an_age_changes_none(bob):
    made = made_by(CAROL)
    bob.hear([entry(made, age=100.0)], CAROL.author)
    answer = bob.answers(ALICE.author, [mention(made)])
    assert bob.only.born == -100.0
    assert not answer.mentions


def test_an_author_holds_all_and_others_what_they_say(alice, bob):
    carol = Talker(CAROL)
    made = made_by(ALICE, packets=12)
    alice.gossip.announce(made)
    alice.exchange(bob)
    assert bob.only.holders[ALICE.author] == 0b1111_1111_1111
    bob.only.obtained(0b1001_0000_0000)
    bob.exchange(carol)
    assert carol.only.holders[BOB.author] == 0b1001_0000_0000
    carol.hear([entry(made, held=b"\xff" * 100_000)], MALLORY.author)
    assert carol.only.holders[MALLORY.author] == 0b1111_1111_1111, "no more than there is"


def test_ones_own_newest_is_always_told(alice, bob):
    alice.fill(100)
    newest = made_by(ALICE)
    alice.gossip.announce(newest)
    for _ in range(20):  # while he is down
        alice.gossip.failed(alice.gossip.ask(BOB.author), BOB.author)
    bob.gossip.answer(alice.gossip.ask(BOB.author), ALICE.author)
    assert bob.knows(newest)


def test_ones_own_newest_is_pushed_to_a_few_and_mentioned_to_the_rest(alice):
    """In a small swarm it is pushed to all, so nobody mentions what others have just made."""
    alice.gossip.announce(made_by(ALICE))
    for number in range(gossip.PUSHED + 3):
        request = alice.gossip.ask(identity(1000 + number).author)
        pushed = number < gossip.PUSHED
        assert len(request.entries) == pushed
        assert len(request.mentions) == (not pushed)
    alice.now += 601.0
    alice.gossip.table.expire()
    request = alice.gossip.ask(BOB.author)
    assert not request.entries
    assert not request.mentions, "it is too old for anybody"
    alice.gossip.tells_all = True
    alice.gossip.announce(made_by(ALICE, 1))
    alice.hear([entry(made_by(BOB))], BOB.author)
    for number in range(gossip.PUSHED + 1):
        request = alice.gossip.ask(identity(1000 + number).author)
        assert request.entries
        assert not request.mentions
    alice.now += gossip.FRESH_SECONDS
    assert alice.gossip.ask(MALLORY.author).mentions
