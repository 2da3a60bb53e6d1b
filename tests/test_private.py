"""Private runs: nodes that answer members only."""

import contextlib
from time import localtime, strftime

import msgspec
import pytest

from ftis_node.config.run import make_run as make_run_of
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import packet_digest
from ftis_node.swarm import certificates, ftis_pb2
from ftis_node.swarm.certificates import Chain, MembersBook, decode, encode
from ftis_node.swarm.handshake import fetch_run, greeting
from ftis_node.swarm.invitation import invite
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.roster import Roster
from tests.support.members import (
    ANN,
    ANNS,
    BEN,
    CARA,
    DAY,
    EVE,
    FOUNDER,
    PRIVATE,
    certificate,
    invitation,
    lasting,
    order,
    removal,
    tell,
)
from tests.support.swarm import PATIENCE, RUN, all_meet, eventually, identity, member, once, packet, transport

pytestmark = pytest.mark.virtual_time


@contextlib.asynccontextmanager
async def private_member(number, path, ticket=None, **options):
    home = path / f"roster-{number}"
    home.mkdir(exist_ok=True)
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, identity(number), home / "members", home / "orders", ticket)
    given = ticket.addresses if ticket is not None else []
    async with member(number, path, given=given, run=PRIVATE, roster=roster, **options) as node:
        yield node, roster


def ticket_of(node, *, invites=False):
    options = dict(now=unix_seconds(), seconds=DAY, membership=DAY, invites=invites)
    return invite(node.identity, PRIVATE.id, [node.address], **options)


async def test_row_49_a_stranger_gets_a_refusal_and_nothing_else(tmp_path):
    async with private_member(1, tmp_path) as (founder, roster), transport(EVE, tmp_path / "eve") as eve:
        await eve.connect(FOUNDER.author, [founder.address])
        plain = greeting(PRIVATE, [])
        forged = greeting(PRIVATE, [])
        forged.certificates = encode((certificate(EVE, EVE, claimed=FOUNDER),))
        stolen = greeting(PRIVATE, [])
        stolen.certificates = encode(ANNS)
        uninvited = greeting(None, [])
        uninvited.invitation = invitation(EVE).encoded
        of_no_run = greeting(None, [])
        of_another_run = greeting(RUN, [])

        for hello in (of_no_run, of_another_run, forged, stolen, uninvited, plain):
            answer = await eve.handshake(FOUNDER.author, hello, PATIENCE)
            fields = {field.name for field, _ in answer.ListFields()}
            assert fields == {"major", "minor", "refusal"}
        assert answer.refusal == certificates.MEMBERS_ONLY

        chain = ftis_pb2.ExchangeRequest(roster=[encode(ANNS)])
        told = await eve.exchange(FOUNDER.author, chain, PATIENCE)
        assert told == ftis_pb2.ExchangeResponse(stranger=True)
        assert not roster.book.issued

        request = once(ftis_pb2.FetchRequest(digests=[b"x" * 32]))
        chunks = await eve.fetch(FOUNDER.author, request)
        assert (await anext(chunks)).status == ftis_pb2.FetchChunk.BUSY
        assert EVE.author not in founder.swarm.membership.active_view


async def test_a_dry_run_reads_the_run_and_leaves_the_invitation_unused(tmp_path):
    async with private_member(1, tmp_path) as (founder, roster), transport(EVE, tmp_path / "eve") as eve:
        ticket = ticket_of(founder)
        found = await fetch_run(eve, [founder.address], 0.0, ticket)
        assert found.run == PRIVATE
        assert not roster.book.redeemed

        with pytest.raises(UserError, match="ask a member for an invitation") as error:
            await fetch_run(eve, [founder.address], 3600.0)
        assert "ftis-node invite" in error.value.fix

        roster.redeem(ticket, BEN.author)
        twice = [founder.address, f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"]
        with pytest.raises(UserError, match="used by another key") as error:
            await fetch_run(eve, twice, 3600.0, ticket)
        assert str(error.value).count("used by another key") == 1


async def test_row_59_an_invitation_goes_to_its_inviter_only(tmp_path, monkeypatch):
    """Not to another bootstrap, before the run is known, in greetings, or when the inviter is gone."""
    shown = []
    async with private_member(5, tmp_path) as (eve, _), transport(ANN, tmp_path / "ann") as ann:
        door = eve.swarm.membership.on_handshake

        def look(request, peer):
            shown.append(request.invitation)
            return door(request, peer)

        monkeypatch.setattr(eve.swarm.membership, "on_handshake", look)
        async with private_member(1, tmp_path) as (founder, roster):
            ticket = ticket_of(founder)
            both = [eve.address, founder.address]
            found = await fetch_run(ann, both, 60.0, ticket)
            assert found.run == PRIVATE

            async with private_member(3, tmp_path, ticket) as (ben, of_ben):
                await eventually(lambda: of_ben.is_member, "Ben is let in")
                ben.swarm.membership.addresses.hear([eve.address])
                await ben.swarm.membership.greet(eve.author)
            assert list(roster.book.redeemed.values()) == [BEN.author]

        with pytest.raises(UserError, match="None of the peers") as error:
            await fetch_run(ann, both, 0.0, ticket)
        assert "the inviter's node runs" in error.value.fix
    assert len(shown) >= 3
    assert not any(shown)


async def test_the_invited_meet_and_lose_the_removed(tmp_path, monkeypatch):
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder)) as (ann, of_ann),
        private_member(3, tmp_path, ticket_of(founder)) as (ben, _),
    ):
        await all_meet(founder, ann, ben)
        ann.make(2)
        await eventually(lambda: len(ben.admitted) == 2 == len(founder.admitted), "groups of a member")

        at = int(unix_seconds())
        order(tmp_path / "roster-1", removal(FOUNDER, ANN, at=at))
        roster.obey()
        await eventually(lambda: not founder.met(ann) and not ben.met(ann), "the removal")
        assert founder.met(ben)

        ann.make(1)
        bens = ben.make(1)
        await eventually(lambda: len(founder.admitted) == 3, "a group of Ben's")
        assert set(founder.admitted[2:]) == bens

        await eventually(lambda: of_ann.shut_out != "", "she learns of it")
        day = strftime("%Y-%m-%d", localtime(at))
        assert of_ann.shut_out == f"this node was removed by {FOUNDER.peer_id} on {day}"
        await eventually(lambda: not ann.swarm.membership.active_view, "she has no peers any more")
        monkeypatch.setattr(ann.swarm.membership, "greet", None)  # nobody is dialled from now on
        ann.swarm.membership.addresses.called(FOUNDER.author)
        ann.swarm._to_greet.set()
        await eventually(lambda: not ann.swarm._to_greet.is_set(), "she does not think of it")
        assert not ann.swarm.membership.active_view


async def test_who_was_a_member_and_is_none_is_not_dialled(tmp_path, monkeypatch):
    """Also by an order that waits for the node. But one whose invitation is to be used is, whatever is known of it."""
    book = MembersBook(PRIVATE.id, FOUNDER.author, issued={FOUNDER.author: {}})
    for who, ends in (
        (ANN, 2),
        (EVE, 2**40),
        (BEN, 2**40),
    ):
        [given] = lasting((FOUNDER, who), expires=ends)
        book.issued[FOUNDER.author][who.author] = given
    met = [f"/ip4/127.0.0.1/tcp/9/p2p/{who.peer_id}" for who in (FOUNDER, ANN, BEN, EVE)]
    known = KnownAddresses(met=met)
    greeted = set()

    async def greet(self, peer):
        greeted.add(peer)
        return False

    monkeypatch.setattr(Membership, "greet", greet)
    anns = invitation(ANN, now=unix_seconds())
    for number, ticket, dialled in (
        (1, None, {EVE}),
        (4, anns, {FOUNDER, EVE, ANN}),
    ):
        home = tmp_path / f"member-{number}"
        home.mkdir()
        known.write(home / "peers.json")
        roster = tmp_path / f"roster-{number}"
        roster.mkdir()
        (roster / "members").write_bytes(msgspec.msgpack.encode(book))
        order(roster, removal(FOUNDER, BEN))
        async with private_member(number, tmp_path, ticket, cache=True):
            assert greeted == {who.author for who in dialled}
        greeted.clear()


async def test_a_transfer_to_a_removed_member_ends(tmp_path):
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder)) as (ann, _),
    ):
        await eventually(lambda: founder.met(ann), "a meeting")
        founder.make(3)
        digests = [packet_digest(packet(founder.author, 0, slot, run=PRIVATE)) for slot in range(3)]

        chunks = founder.swarm.on_fetch(ftis_pb2.FetchRequest(digests=digests), ann.author)
        first = await anext(chunks)
        assert first.digest == digests[0]

        tell(roster, FOUNDER, removal(FOUNDER, ANN, at=unix_seconds()))
        assert [chunk async for chunk in chunks] == []


async def test_row_56_a_hostile_answer_to_a_greeting_gives_nobody_a_certificate(tmp_path):
    """Ann may invite, Ben is removed: both answer the founder's and Cara's greetings with certificates below Ann's."""
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder, invites=True)) as (ann, of_ann),
        private_member(3, tmp_path, ticket_of(founder)) as (ben, of_ben),
        private_member(4, tmp_path, ticket_of(founder)) as (cara, of_cara),
    ):
        await all_meet(founder, ann, ben, cara)
        own = of_cara.own_chain
        anns = decode(of_ann.own_chain, Chain)
        lasts = dict(expires=anns[0].expires + 99 * DAY, issued_at=int(unix_seconds()))

        def hostile(node, own_roster):
            async def answer(request, peer):
                hello = greeting(PRIVATE, [node.address])
                hello.certificates = own_roster.own_chain
                whom = {FOUNDER.author: FOUNDER, CARA.author: CARA}.get(peer, BEN)
                hello.granted = encode((*anns, certificate(ANN, whom, **lasts)))
                return hello

            return answer

        ann.swarm.on_handshake = hostile(ann, of_ann)
        ben.swarm.on_handshake = hostile(ben, of_ben)
        tell(roster, CARA, removal(FOUNDER, BEN, at=unix_seconds()))
        for victim in (founder, cara):
            membership = victim.swarm.membership
            assert await membership.greet(ANN.author)
            await membership.greet(BEN.author)

        assert roster.own_chain == b""
        assert roster.book.own == ()
        assert of_cara.own_chain == own
        assert not roster.why_no_ticket(ticket_of(founder), EVE.author), "the founder invites as before"


def test_runs_without_a_founder_keep_their_ids():
    assert b"founder" not in RUN.canonical_json()
    assert b"founder" in PRIVATE.canonical_json()

    fields = RUN.model_dump() | {"founder": "Ana"}
    with pytest.raises(UsageError):
        make_run_of(**fields)
