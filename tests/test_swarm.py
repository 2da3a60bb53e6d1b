"""Nodes on one machine, really connected: all groups reach all who want them, each once, and only the guilty pay."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from ftis_node.packet import packet_digest
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import Reason
from ftis_node.swarm.books import STRIKES
from ftis_node.swarm.fetch import fetch
from ftis_node.swarm.known import Target
from ftis_node.swarm.membership import Peer
from ftis_node.swarm.traffic import Traffic
from tests.support.swarm import PATIENCE, all_meet, announcement, eventually, identity, member, packet, stub

virtual_time = pytest.mark.virtual_time


class Swarms:
    """Starts members, and ends those that a test did not end itself."""

    def __init__(self, path, stack):
        self.path = path
        self._stack = stack
        self._own = {}

    async def join(self, number, *bootstraps, port=0):
        own = AsyncExitStack()
        addresses = [other.address for other in bootstraps]
        joined = await own.enter_async_context(member(number, self.path, addresses, port=port))
        self._own[joined] = own
        self._stack.push_async_callback(own.aclose)
        return joined

    async def leave(self, who):
        await self._own[who].aclose()

    async def meeting(self, count):
        """So many have met, also those who knew the first only."""
        nodes = [await self.join(1)]
        nodes += [await self.join(number, nodes[0]) for number in range(2, count + 1)]
        await all_meet(*nodes)
        return nodes


@pytest.fixture
async def swarms(tmp_path) -> AsyncIterator[Swarms]:
    async with AsyncExitStack() as stack:
        yield Swarms(tmp_path, stack)


async def gets(keys, *members):
    """Waits until each member has admitted exactly these groups, each once."""
    for who in members:
        await eventually(lambda who=who: len(who.admitted) >= len(keys), f"{len(keys)} groups came")
        assert sorted(who.admitted) == sorted(keys)


async def test_everybody_ends_with_all_groups_of_the_others_each_admitted_once(swarms):
    nodes = await swarms.meeting(3)
    made = {node: set() for node in nodes}
    for _ in range(4):
        for node in nodes:
            made[node] |= node.make(6)

    for node in nodes:
        foreign = set()
        for other in nodes:
            if other is not node:
                foreign |= made[other]
        await gets(foreign, node)
        assert node.pulling.rejections == {}
        books = node.swarm.reputation.authors
        assert sum(book.admitted for book in books.values()) == 48
        assert node.author not in books
    served = sum((node.store.served for node in nodes), Counter())
    assert list(served.values()) == [2] * 72, "every packet goes over the wire once to each of two"


@virtual_time
async def test_a_node_pulls_no_more_than_it_wants(swarms):
    first, second = await swarms.meeting(2)
    second.appetite = 3
    first.make(10)
    await eventually(lambda: len(second.admitted) == 3, "it got what it wanted")

    first.make(10)
    second.appetite = 5
    second.swarm.wake()
    await eventually(lambda: len(second.admitted) == 5, "it got what it wanted then")


@virtual_time
async def test_when_one_leaves_the_others_go_on_and_who_comes_late_meets_all_and_catches_up(swarms):
    first, second, third = await swarms.meeting(3)
    made = first.make(4)
    await gets(made, second, third)

    await swarms.leave(first)
    more = second.make(4)
    await gets(made | more, third)
    back = third.make(4)
    await gets(made | back, second)
    await eventually(lambda: not second.met(first) and not third.met(first), "they note that it is gone")
    for who in (second, third):
        assert not any(book.refused for book in who.swarm.reputation.authors.values())

    late = await swarms.join(4, second)

    def met_all():
        return late.met(second, third) and second.met(late) and third.met(late)

    await eventually(met_all, "it met all")
    await gets(made | more | back, late)
    await gets(made | more | late.make(2), third)


async def test_a_node_restarted_on_another_port_is_found_again_and_repeats_nothing(swarms):
    first, second, third = await swarms.meeting(3)
    before = first.make(3)
    await gets(before, second, third)

    await swarms.leave(first)
    again = await swarms.join(1, second)
    assert again.author == first.author
    assert again.address != first.address
    await eventually(lambda: second.met(again) and third.met(again), "both have met it again")
    assert second.swarm.membership.active_view[again.author].addresses[0] == again.address

    after = again.make(3)
    assert not before & after, "a round came twice"
    await gets(before | after, second, third)
    assert not second.swarm.reputation.banned(again.author)


@virtual_time
async def test_who_was_restarted_and_knows_nobody_is_told_everything_again(swarms):
    first, second = await swarms.meeting(2)
    second.appetite = 0
    made = first.make(3)
    await eventually(lambda: second.swarm.gossip.table.get(first.author, 0) is not None, "it has heard of them")

    await swarms.leave(second)
    again = await swarms.join(2)
    assert not again.swarm.membership.active_view

    first.swarm.membership.addresses.hear([again.address])
    first.swarm._to_greet.set()
    await gets(made, again)


@virtual_time
async def test_row_69_70_a_holder_that_is_away_or_busy_for_a_while_costs_no_packet(swarms, monkeypatch):
    first, second = await swarms.meeting(2)
    made = first.make(4)
    await gets(made, second)
    await swarms.leave(first)
    serve = second.pulling.uploads.serve
    asked = []

    async def at_times(request, peer, *, may=True):
        asked.append(len(request.digests))
        if len(asked) < 5:
            raise ConnectionError("it is away")
        busy = len(asked) < 8
        async for chunk in serve(request, peer, may=may and not busy):
            yield chunk

    monkeypatch.setattr(second.pulling.uploads, "serve", at_times)
    third = await swarms.join(3, second)
    await gets(made, third)
    assert len(asked) >= 8


@virtual_time
async def test_row_77_a_node_that_restarts_tells_of_the_packets_that_it_has_on_disk(swarms):
    first = await swarms.join(1)
    made = first.make(3)
    for _ in range(2):
        await swarms.leave(first)
        first = await swarms.join(1)
    second = await swarms.join(2, first)
    await gets(made, second)
    assert not second.swarm.reputation.banned(first.author)

    await swarms.leave(second)
    second = await swarms.join(2, first)
    await eventually(lambda: any(known.have for known in second.swarm.gossip.table), "it knows what it has")
    await swarms.leave(first)
    await gets(made, await swarms.join(3, second))


# --- who is to blame --------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_bad_author_is_refused_then_ignored_and_alone_blamed(swarms):
    reason = str(Reason.EOS_INTERIOR)  # `test_admission` has all reasons
    good, bad, judge = await swarms.meeting(3)
    good.appetite = 0
    bad.make(1, interior_eos=True)
    swarm = judge.swarm
    await eventually(lambda: judge.pulling.rejections[reason] == 1, "the packet was refused")
    assert not swarm.reputation.banned(bad.author), "one may be a mistake"

    honest = good.make(4)
    await gets(honest, judge)
    bad.make(STRIKES - 1, interior_eos=True)
    await eventually(lambda: swarm.reputation.banned(bad.author), "the author is quarantined")
    assert judge.pulling.rejections == {reason: STRIKES}
    refused = {author: book.refused.total() for author, book in swarm.reputation.authors.items()}
    assert refused == {bad.author: STRIKES, good.author: 0}
    assert not swarm.reputation.banned(good.author)

    bad.make(1)
    await gets(honest | good.make(2), judge)
    assert judge.store.seen(bad.author, 0, 0), "it would be fetched again after a restart"


@virtual_time
async def test_wrong_bytes_are_held_against_the_holder(swarms, caplog):
    caplog.set_level(logging.INFO, "ftis_node.swarm.pulling")
    author = await swarms.join(1)
    holder = await swarms.join(2, author)
    made = author.make(3)
    await gets(made, holder)
    await swarms.leave(author)

    body = holder.store.body
    holder.pulling.uploads.body = lambda digest: (body(digest) or b"")[:-1] + b"!"

    victim = await swarms.join(3, holder)
    await eventually(lambda: victim.pulling.rejections["wrong bytes"] > 0, "the holder was found out")
    [known] = victim.swarm.gossip.table
    await eventually(lambda: not victim.pulling.pulls, "nothing is on its way")
    assert known.announcement.author == author.author
    chosen = victim.swarm.gossip.table.choose(9, lambda known: -1)
    assert not any(map(victim.pulling._holders, chosen))
    assert victim.admitted == []
    assert not any(book.refused for book in victim.swarm.reputation.authors.values())
    assert not victim.swarm.reputation.banned(author.author)
    assert not any(victim.store.seen(*key) for key in made), "it may still come from somebody else"
    assert "other bytes than the author signed" in caplog.text

    again = await swarms.join(1, victim)
    await eventually(lambda: victim.met(again), "the author is back")
    await gets(made, victim)


@virtual_time
async def test_a_silent_holder_does_not_keep_the_node_from_the_others(swarms):
    first, second, third = await swarms.meeting(3)
    silence = asyncio.Event()

    class Silent:
        async def serve(self, *asked, may):
            await silence.wait()
            yield ftis_pb2.FetchChunk()

    first.pulling.uploads = Silent()
    third.appetite = 0

    first.make(4)
    await eventually(lambda: first.author in second.pulling._occupied_holders, "the silent one was asked")

    await gets(third.make(5), second)
    assert first.author in second.pulling._occupied_holders
    silence.set()


@virtual_time
async def test_who_waited_longest_is_asked_first_and_who_has_just_asked_is_not(swarms, monkeypatch):
    """And those who are silent hold the others up for a moment only."""
    swarm = (await swarms.join(1)).swarm
    sessions = swarm.membership.sessions
    asked = []

    async def silence(peer):
        asked.append(peer)
        await asyncio.sleep(PATIENCE)

    monkeypatch.setattr(swarm, "_exchange", silence)
    talker, *peers = [identity(number).author for number in range(2, 9)]
    sessions[talker].asked = math.inf
    for place, peer in enumerate(peers):
        sessions[peer].asked = -(9.0 ** (9 - place))
    sessions.begin(peers[5])  # to greet anew is no way to the front
    swarm.membership.active_view.update((peer, Peer(peer, [], "", True)) for peer in (talker, *reversed(peers)))
    await eventually(lambda: asked[5:] != [], "six were asked")
    await asyncio.sleep(5 * swarm.interval)
    assert asked == peers


@virtual_time
async def test_an_announcement_of_any_round_that_can_be_signed_breaks_nothing(swarms):
    first, second = await swarms.meeting(2)
    largest = 2**64 - 1
    body = packet(first.author, largest, 0)
    made = announcement(first.identity, largest, [body])
    entry = ftis_pb2.Entry(announcement=made.encode())
    await first.transport.exchange(second.author, ftis_pb2.ExchangeRequest(entries=[entry]), PATIENCE)
    assert second.swarm.gossip.counts["too far ahead"] == 1

    made = first.make(2)
    await eventually(lambda: made <= set(second.admitted), "the exchange goes on")


# --- strangers, and the end -------------------------------------------------------------------------------------------


@virtual_time
async def test_who_has_left_the_view_is_still_answered(swarms):
    first, second = await swarms.meeting(2)
    second.appetite = 0
    [(_, round, _)] = first.make(1)
    known = first.swarm.gossip.table.get(first.author, round)
    assert known is not None
    first.swarm.membership.active_view.pop(second.author)

    answer = await second.transport.exchange(first.author, ftis_pb2.ExchangeRequest(), PATIENCE)
    assert not answer.stranger

    target = Target(known, 0)
    fetched = [chunk.packet async for _, chunk in fetch(second.transport, first.author, [target], Traffic())]
    assert [packet_digest(data) for data in fetched if data] == [target.ref.digest]


async def test_a_closed_swarm_answers_nothing_and_leaves_no_task_behind(swarms):
    first, second = await swarms.meeting(2)
    second.make(2)
    await gets({(second.author, 0, 0), (second.author, 0, 1)}, first)
    await second.swarm.close()
    with pytest.raises(Exception):  # noqa: B017 - hivemind raises what it likes
        await stub(first.transport, second.identity).rpc_exchange(ftis_pb2.ExchangeRequest(), timeout=2)

    names = [task.get_name() for task in asyncio.all_tasks()]
    assert sorted(name for name in names if name.endswith("loop")) == [
        "Pulling.loop",
        "Swarm._exchange_loop",
        "Swarm._maintain_loop",
        "Swarm._record_loop",
    ], "those of the first"


@virtual_time
async def test_a_loop_that_meets_an_unforeseen_error_goes_on(swarms, caplog):
    first, second = await swarms.meeting(2)
    trade = second.pulling.trade
    failed = asyncio.Event()

    async def fail_once(*group):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the disk is full")
        await trade.on_groups(*group)

    second.pulling.trade = replace(trade, on_groups=fail_once)
    made = first.make(4)
    await eventually(lambda: set(second.admitted) == made, "what failed came again")
    assert len(second.admitted) == 4
    assert "the disk is full" in caplog.text
