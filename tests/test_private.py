"""Private runs: invitations, certificates, the roster, and nodes that answer members only."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from time import localtime, strftime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.cli.invitations import invitation_in, keep_invitation
from ftis_node.config.run import Run, RunFile, dump_run_file
from ftis_node.config.run import make_run as make_run_of
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import packet_digest
from ftis_node.preflight.redaction import Redactor
from ftis_node.store.home import Home
from ftis_node.swarm import ftis_pb2, overview
from ftis_node.swarm import roster as roster_module
from ftis_node.swarm.certificates import (
    DAY,
    LONGEST,
    Certificate,
    Chain,
    RecordError,
    Removal,
    decode,
    encode,
    why_refused,
)
from ftis_node.swarm.handshake import MEMBERS_ONLY, fetch_run, greeting
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation, invite, read, read_line
from ftis_node.swarm.roster import Book, Roster, read_book
from ftis_node.swarm.self_report import SelfReport
from tests.support.cli import answer, printed, refused
from tests.support.daemons import PATIENCE, Join
from tests.support.swarm import RUN, Member, eventually, identity, make_run, member, packet, stub, transport

FOUNDER, ANN, BEN, CARA, EVE = (identity(number) for number in range(1, 6))
PRIVATE = make_run(founder=FOUNDER.peer_id)
NOW = 1_760_000_000.0


def certificate(signer: Identity, who: Identity, claimed: Identity | None = None, **changes: Any) -> Certificate:
    """A certificate of a week, of its signer or of a claimed issuer; what changes is changed before it is signed."""
    fields = dict(run_id=PRIVATE.id, member=who.author, issuer=(claimed or signer).author, issued_at=int(NOW) - DAY)
    return Certificate(**{**fields, "expires": int(NOW) + 6 * DAY, "invites": True, **changes}).signed_by(signer)


def removal(remover: Identity, who: Identity, at: float = NOW) -> Removal:
    return Removal(run_id=PRIVATE.id, member=who.author, remover=remover.author, at=int(at)).signed_by(remover)


def refusal(chain: Chain, peer: Identity, *removals: Removal, now: float = NOW) -> str | None:
    return why_refused(chain, peer.author, run_id=PRIVATE.id, founder=FOUNDER.author, now=now, removals=removals)


ANNS = (certificate(FOUNDER, ANN),)
BENS = (*ANNS, certificate(ANN, BEN))


# --- certificates -----------------------------------------------------------------------------------------------------


def test_founder_member_and_member_of_a_member_are_let_in() -> None:
    assert refusal((), FOUNDER) is None
    assert refusal(ANNS, ANN) is None
    assert refusal(BENS, BEN) is None


@pytest.mark.parametrize(
    "chain, peer, why",
    [
        ((), EVE, "no certificate"),
        (ANNS, EVE, "another key"),
        ((certificate(EVE, EVE),), EVE, "no chain from the run's founder"),
        ((certificate(EVE, EVE, claimed=FOUNDER),), EVE, "signature"),
        ((*ANNS, certificate(EVE, EVE, claimed=ANN)), EVE, "signature"),
        ((certificate(ANN, BEN),), BEN, "no chain"),
        ((certificate(FOUNDER, ANN, invites=False), certificate(ANN, BEN)), BEN, "may not invite"),
        ((certificate(FOUNDER, ANN, run_id=RUN.id),), ANN, "another run"),
        ((certificate(FOUNDER, ANN, expires=int(NOW)),), ANN, "expired"),
        ((certificate(FOUNDER, ANN, expires=int(NOW)), certificate(ANN, BEN)), BEN, "expired"),
        ((msgspec.structs.replace(ANNS[0], invites=False),), ANN, "signature"),
        ((msgspec.structs.replace(ANNS[0], expires=2**40),), ANN, "signature"),
        ((msgspec.structs.replace(ANNS[0], signature=b""),), ANN, "signature"),
        ((certificate(FOUNDER, ANN, member=b"x"),), ANN, "no chain"),
        (tuple(certificate(FOUNDER, FOUNDER) for _ in range(LONGEST + 1)), EVE, f"more than {LONGEST}"),
    ],
)
def test_who_is_no_member(chain: Chain, peer: Identity, why: str) -> None:
    found = refusal(chain, peer)
    assert found is not None and why in found


def test_a_removal_counts_if_somebody_above_in_the_chain_signed_it_and_ends_what_the_member_issued() -> None:
    for remover in (FOUNDER, ANN):
        assert "was removed" in str(refusal(BENS, BEN, removal(remover, BEN)))
    for remover in (BEN, CARA, EVE):
        assert refusal(BENS, BEN, removal(remover, BEN)) is None
    assert refusal(BENS, BEN, removal(FOUNDER, ANN)) is not None
    assert refusal(ANNS, ANN, removal(BEN, ANN)) is None
    assert refusal(ANNS, ANN, removal(FOUNDER, ANN, at=NOW - 2 * DAY)) is None  # it was invited again since


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    ticket = invite(FOUNDER, PRIVATE.id, [f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"], now=NOW, seconds=DAY)
    gone = removal(FOUNDER, ANN)
    for signed in (ticket, gone, ANNS[0]):
        assert signed.verify(FOUNDER.author) and not signed.verify(ANN.author)
        for other in (ticket, gone, ANNS[0]):
            lent = msgspec.structs.replace(other, signature=signed.signature)
            assert lent.verify(FOUNDER.author) == (other is signed)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_an_error(data: bytes) -> None:
    kinds: tuple[Any, ...] = (Chain, Removal)
    for kind in kinds:
        with contextlib.suppress(RecordError):
            decode(data, kind)
    with pytest.raises(UsageError):
        read(data, NOW)


def test_a_long_record_is_not_read() -> None:
    with pytest.raises(RecordError, match="more than"):
        decode(encode(tuple(certificate(FOUNDER, ANN) for _ in range(20))), Chain)


# --- invitations ------------------------------------------------------------------------------------------------------

ADDRESSES = [f"/ip4/8.8.4.{number}/tcp/4001/p2p/{FOUNDER.peer_id}" for number in range(5)]


def invitation(who: Identity = FOUNDER, **changes: Any) -> Invitation:
    options = dict(now=NOW, seconds=DAY, membership=30 * DAY)
    addresses = [address.replace(FOUNDER.peer_id, who.peer_id) for address in ADDRESSES]
    return invite(who, PRIVATE.id, addresses, **{**options, **changes})


def test_an_invitation_is_one_line_that_reads_back_through_any_wrapping() -> None:
    made = invitation(name="Ana")
    assert made.text.startswith("ftis:") and len(made.text) < 400 and "\n" not in made.text
    wrapped = "  " + "\n".join(made.text[place : place + 40] for place in range(0, len(made.text), 40)) + "\n"
    assert read_line(wrapped, NOW) == made
    assert made.addresses == ADDRESSES[:3] and made.private and made.name == "Ana"
    assert not invitation(membership=0).private


@given(place=st.integers(0, 350), letter=st.sampled_from("AbZ9-_ !"))
def test_a_changed_letter_is_noticed(place: int, letter: str) -> None:
    text = invitation().text
    changed = text[: place % len(text)] + letter + text[place % len(text) + 1 :]
    if changed != text:
        with contextlib.suppress(UsageError):  # the last letter may hold bits that count for nothing
            assert read_line(changed, NOW).encoded == read_line(text, NOW).encoded


def signed(**changes: Any) -> str:
    return msgspec.structs.replace(invitation(), **changes).signed_by(FOUNDER).text


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "begins with ftis:"),
        ("/ip4/192.0.2.1/tcp/1", "begins with ftis:"),
        ("ftis:AAAA", "no invitation, or not a whole one"),
        (invitation().text[:-9], "no invitation, or not a whole one"),
        ("ftis:" + "A" * 4000, "begins with ftis:"),
        (msgspec.structs.replace(invitation(), name="Eve").text, "its signature is wrong"),
        (invitation(seconds=0).text, "has expired"),
        (signed(version=2), "version 2"),
        (signed(dial=()), "its signature is wrong"),
        (signed(dial=("not an address",)), "its signature is wrong"),
        (signed(nonce=b"short"), "its signature is wrong"),
        (signed(inviter=b"nobody"), "its signature is wrong"),
    ],
)
def test_row_49_what_is_no_invitation(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_line(text, NOW)


# --- the roster -------------------------------------------------------------------------------------------------------


class Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


Rosters = Callable[..., Roster]


@pytest.fixture
def roster_of(tmp_path: Path, time: Time) -> Rosters:
    """Makes the roster of an identity; one of the same identity again is that after a restart."""

    def make(who: Identity, ticket: Invitation | None = None) -> Roster:
        home = tmp_path / who.peer_id
        home.mkdir(exist_ok=True)
        return Roster(PRIVATE.id, FOUNDER.peer_id, who, home / "members", home / "orders", ticket, time)

    return make


def joined(inviter: Roster, who: Roster, ticket: Invitation, peer: Identity) -> str | None:
    """One node presents an invitation to another, as handshakes do."""
    why = inviter.why_no_ticket(ticket, peer.author)
    if why is None:
        who.accept(inviter.redeem(ticket, peer.author))
    return why


def test_row_49_an_invitation_makes_one_key_a_member_once(roster_of: Rosters) -> None:
    ticket = invitation()
    founder, ann, eve = roster_of(FOUNDER), roster_of(ANN, ticket), roster_of(EVE, ticket)
    assert founder.is_member and not ann.is_member
    assert ann.ticket_for(FOUNDER.author) == ticket.encoded and ann.ticket_for(BEN.author) == b""
    assert joined(founder, ann, ticket, ANN) is None
    assert ann.is_member and ann.ticket_for(FOUNDER.author) == b"" and founder.admits(ANN.author)
    assert "another key" in str(joined(founder, eve, ticket, EVE))
    assert not eve.is_member and not founder.admits(EVE.author)
    again = roster_of(FOUNDER)  # what was redeemed outlasts a restart
    assert "another key" in str(again.why_no_ticket(ticket, EVE.author))
    assert again.redeem(ticket, ANN.author) == ann.own


def test_only_the_inviters_own_invitation_to_this_run_counts(roster_of: Rosters) -> None:
    founder, ann = roster_of(FOUNDER), roster_of(ANN)
    other_run = invite(FOUNDER, RUN.id, ADDRESSES, now=NOW, seconds=DAY, membership=DAY)
    for wrong in (invitation(ANN), other_run, invitation(membership=0)):
        assert "not of this node" in str(founder.why_no_ticket(wrong, EVE.author))
    assert "may not invite" in str(ann.why_no_ticket(invitation(ANN), EVE.author))  # she is no member
    assert joined(founder, ann, invitation(), ANN) is None
    assert "may not invite" in str(ann.why_no_ticket(invitation(ANN), EVE.author))  # and now one who may not invite


def test_a_member_who_may_invite_does_and_all_come_to_know_it(roster_of: Rosters) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, invitation(invites=True), ANN)
    assert joined(ann, ben, invitation(ANN), BEN) is None and ben.is_member
    assert not founder.admits(BEN.author)
    founder.hear(ann.news(FOUNDER.author), ANN.author)
    assert founder.admits(BEN.author)
    assert ann.news(FOUNDER.author) == []
    ann.forget(FOUNDER.author)
    assert len(ann.news(FOUNDER.author)) == 1


def test_a_removed_member_is_out_everywhere_and_so_are_those_it_invited(roster_of: Rosters, tmp_path: Path) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, (ticket := invitation(invites=True)), ANN)
    joined(ann, ben, invitation(ANN), BEN)
    founder.hear(ann.news(FOUNDER.author), ANN.author)
    orders = tmp_path / FOUNDER.peer_id / "orders"
    orders.mkdir()
    (orders / "x.removal").write_bytes(encode(removal(FOUNDER, ANN)))
    founder.obey()
    assert not list(orders.iterdir())
    assert not founder.admits(ANN.author) and not founder.admits(BEN.author)
    assert "removed" in str(founder.why_no_ticket(ticket, ANN.author))
    assert founder.meet(BEN.author, ben.own) is not None
    ben.hear(founder.news(BEN.author), FOUNDER.author)
    assert not ben.is_member and not roster_of(BEN).is_member  # also after a restart
    assert ben.shut_out.startswith(f"{ANN.peer_id} was removed by {FOUNDER.peer_id} on ")
    assert roster_of(BEN).shut_out == ben.shut_out
    assert founder.renewal(ANN.author) == b""


def test_a_removed_member_learns_of_it_from_whoever_refuses_it_and_believes_the_signature_alone(
    roster_of: Rosters,
) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN, invitation()), roster_of(BEN)
    joined(founder, ann, invitation(invites=True), ANN)
    founder.hear([encode(removal(FOUNDER, ANN))], ANN.author)
    told = founder.removal_for(ANN.author, ann.own)
    assert told and founder.removal_for(EVE.author, ann.own) == b"" == founder.removal_for(ANN.author, b"junk")
    assert ben.removal_for(ANN.author, ann.own) == b""
    for wrong in (b"junk", removal(FOUNDER, BEN), removal(EVE, ANN), removal(ANN, ANN)):
        ann.learn(wrong if isinstance(wrong, bytes) else encode(wrong))
    forged = msgspec.structs.replace(removal(EVE, ANN), remover=FOUNDER.author)
    ann.learn(encode(forged))
    assert ann.is_member and not ann.book.removals
    ann.learn(told)
    assert "this node was removed" in ann.shut_out and "this node was removed" in roster_of(ANN, invitation()).shut_out


def test_withdrawn_invitations_are_void_and_later_ones_are_not(roster_of: Rosters, tmp_path: Path, time: Time) -> None:
    founder = roster_of(FOUNDER)
    orders = tmp_path / FOUNDER.peer_id / "orders"
    orders.mkdir()
    (orders / f"{int(NOW) + 1}.voided").touch()
    (orders / "now.voided").touch()
    (orders / "damaged.removal").write_bytes(b"junk")
    founder.obey()
    assert not list(orders.iterdir())
    assert "withdrawn" in str(founder.why_no_ticket(invitation(), EVE.author))
    assert founder.why_no_ticket(invitation(now=NOW + 2), ANN.author) is None


def test_a_certificate_is_renewed_when_half_of_its_time_is_over_and_ends_otherwise(
    roster_of: Rosters, time: Time
) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, invitation(), ANN)
    joined(founder, ben, invitation(), BEN)
    assert founder.renewal(ANN.author) == b""
    time.now += 16 * DAY
    assert ann.renewal(BEN.author) == b""  # she did not issue it
    ann.accept(founder.renewal(ANN.author))
    time.now += 16 * DAY
    assert ann.is_member and founder.admits(ANN.author)
    assert not ben.is_member and not founder.admits(BEN.author) and "expired" in str(ben.why_no_member())


def test_nobody_but_the_chain_makes_this_node_a_member(roster_of: Rosters) -> None:
    eve = roster_of(EVE)
    for granted in (b"", b"junk", encode(ANNS), encode((certificate(EVE, EVE, claimed=FOUNDER),)), encode(())):
        eve.accept(granted)
        assert not eve.is_member
    eve.hear([b"junk", encode(()), encode(ANNS), encode(removal(EVE, FOUNDER)), encode(removal(EVE, ANN))], ANN.author)
    assert eve.admits(ANN.author) and eve.admits(FOUNDER.author)


def test_a_member_that_makes_up_keys_displaces_those_and_nobody_else(
    roster_of: Rosters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "MEMBERS_MAX", 6)
    founder = roster_of(FOUNDER)
    bens = (certificate(FOUNDER, BEN),)
    founder.hear([encode(ANNS), encode(bens)], ANN.author)
    for number in range(10, 30):
        founder.hear([encode((*ANNS, certificate(ANN, identity(number))))], ANN.author)
    founder.hear([encode((certificate(FOUNDER, CARA),))], CARA.author)
    assert len(founder.book.members) == 6 and founder.admits(BEN.author) and founder.admits(CARA.author)
    for number in range(30, 40):
        founder.hear([encode((certificate(FOUNDER, identity(number)),))], BEN.author)
    assert len(founder.book.members) == 6 and founder.admits(BEN.author) and founder.admits(CARA.author)
    assert len(founder.news(EVE.author)) == 6, "what is forgotten is passed on no more"


def test_a_member_that_makes_up_removals_crowds_out_no_other(
    roster_of: Rosters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "REMOVALS_MAX", 16)
    founder = roster_of(FOUNDER)
    founder.hear([encode(ANNS), encode((certificate(FOUNDER, BEN),))], ANN.author)
    for number in range(10, 50):
        founder.hear([encode(removal(ANN, identity(number)))], ANN.author)
    assert len(founder.book.removals) == 2
    founder.hear([encode(removal(BEN, CARA))], BEN.author)
    for number in range(100, 120):
        founder.hear([encode(removal(FOUNDER, identity(number)))], BEN.author)
    founder.hear([encode(removal(FOUNDER, ANN))], BEN.author)
    assert len(founder.book.removals) == 2 + 1 + 21 and not founder.admits(ANN.author)


def test_records_that_prove_nothing_are_not_remembered_and_cost_a_bounded_time(roster_of: Rosters) -> None:
    founder = roster_of(FOUNDER)
    for number in range(200):
        forged = encode((certificate(EVE, identity(number), claimed=FOUNDER),))
        founder.hear([forged, number.to_bytes(8, "big") * 20, *([forged] * 30)], EVE.author)
    assert founder._told[EVE.author] == set() and not founder.book.members
    late = encode(ANNS)
    founder.hear([late], EVE.author)
    assert not founder.admits(ANN.author), "of this peer no more is checked for a while"
    founder.hear([late], BEN.author)
    assert founder.admits(ANN.author)


def test_a_removal_by_nobody_above_keeps_no_key_out(roster_of: Rosters) -> None:
    founder = roster_of(FOUNDER)
    founder.hear([encode(ANNS), encode(removal(ANN, EVE))], ANN.author)
    assert founder.book.removals and founder.why_no_ticket(invitation(), EVE.author) is None
    founder.hear([encode(removal(FOUNDER, EVE))], ANN.author)
    assert "removed" in str(founder.why_no_ticket(invitation(), EVE.author))


def test_only_who_removed_a_member_can_take_it_back() -> None:
    again = certificate(ANN, BEN, issued_at=int(NOW) + 60)
    assert "removed" in str(refusal((*ANNS, again), BEN, removal(FOUNDER, BEN), now=NOW + 120))
    assert refusal((*ANNS, again), BEN, removal(ANN, BEN), now=NOW + 120) is None
    assert (
        refusal((certificate(FOUNDER, BEN, issued_at=int(NOW) + 60),), BEN, removal(FOUNDER, BEN), now=NOW + 120)
        is None
    )
    later = certificate(FOUNDER, BEN, issued_at=int(NOW) + DAY)
    assert "future" in str(refusal((later,), BEN, removal(FOUNDER, BEN)))


def test_a_certificate_below_another_is_renewed_in_time_for_both(roster_of: Rosters, time: Time) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, invitation(membership=4 * DAY, invites=True), ANN)
    joined(ann, ben, invitation(ANN, membership=400 * DAY), BEN)
    time.now += 3 * DAY
    assert ann.renewal(BEN.author) == b"", "it would last no longer"
    ann.accept(founder.renewal(ANN.author))
    ben.accept(ann.renewal(BEN.author))
    time.now += 3 * DAY
    assert ann.is_member and ben.is_member and founder.renewal(ANN.author)


def test_a_damaged_list_of_members_says_what_to_do(roster_of: Rosters, tmp_path: Path) -> None:
    roster_of(ANN).save()
    assert read_book(tmp_path / ANN.peer_id / "members") is not None
    (tmp_path / ANN.peer_id / "members").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read"):
        roster_of(ANN)


# --- real nodes -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def private_member(
    number: int, path: Path, ticket: Invitation | None = None, **options: Any
) -> AsyncIterator[tuple[Member, Roster]]:
    home = path / f"roster-{number}"
    home.mkdir(exist_ok=True)
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, identity(number), home / "members", home / "orders", ticket)
    bootstraps = ticket.addresses if ticket is not None else []
    async with member(number, path, bootstraps, run=PRIVATE, roster=roster, **options) as node:
        yield node, roster


def ticket_of(node: Member) -> Invitation:
    return invite(node.identity, PRIVATE.id, [node.address], now=unix_seconds(), seconds=DAY, membership=DAY)


async def test_row_49_a_stranger_gets_a_refusal_and_nothing_else(tmp_path: Path) -> None:
    async with private_member(1, tmp_path) as (founder, roster), transport(EVE, tmp_path / "eve") as eve:
        await eve.connect(FOUNDER.author, [founder.address])
        call = stub(eve, FOUNDER)
        forged = greeting(PRIVATE, [])
        forged.certificates = encode((certificate(EVE, EVE, claimed=FOUNDER),))
        stolen = greeting(PRIVATE, [])
        stolen.certificates = encode(ANNS)
        uninvited = greeting(None, [])
        uninvited.invitation = invitation(EVE).encoded
        for hello in (greeting(None, []), greeting(PRIVATE, []), greeting(RUN, []), forged, stolen, uninvited):
            answer = await call.rpc_handshake(hello)
            assert {field.name for field, _ in answer.ListFields()} == {"major", "minor", "refusal"}
        assert (await call.rpc_handshake(greeting(PRIVATE, []))).refusal == MEMBERS_ONLY
        told = await call.rpc_exchange(ftis_pb2.ExchangeRequest(roster=[encode(ANNS)]))
        assert told == ftis_pb2.ExchangeResponse(stranger=True)
        assert not roster.book.members
        chunks = [chunk async for chunk in await call.rpc_fetch(_once(ftis_pb2.FetchRequest(digests=[b"x" * 32])))]
        assert [chunk.status for chunk in chunks] == [ftis_pb2.FetchChunk.BUSY]
        assert EVE.author not in founder.swarm.membership.view


async def _once(request: ftis_pb2.FetchRequest) -> AsyncIterator[ftis_pb2.FetchRequest]:
    yield request


async def test_a_dry_run_reads_the_run_and_leaves_the_invitation_unused(tmp_path: Path) -> None:
    async with private_member(1, tmp_path) as (founder, roster), transport(EVE, tmp_path / "eve") as eve:
        ticket = ticket_of(founder)
        assert (await fetch_run(eve, [founder.address], 0.0, ticket)).run == PRIVATE
        assert not roster.book.redeemed
        with pytest.raises(UserError, match="ask a member for an invitation") as error:
            await fetch_run(eve, [founder.address], 3600.0)
        assert "ftis-node invite" in error.value.fix
        roster.redeem(ticket, BEN.author)
        twice = [founder.address, f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"]
        with pytest.raises(UserError, match="used by another key") as error:
            await fetch_run(eve, twice, 3600.0, ticket)
        assert str(error.value).count("used by another key") == 1


async def test_row_59_an_invitation_is_shown_to_its_inviter_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to another bootstrap, before the run is known, in greetings, or when the inviter is gone."""
    shown: list[bytes] = []
    async with private_member(5, tmp_path) as (eve, _), transport(ANN, tmp_path / "ann") as ann:
        door = eve.swarm.membership.on_handshake

        def look(request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
            shown.append(request.invitation)
            return door(request, peer)

        monkeypatch.setattr(eve.swarm.membership, "on_handshake", look)
        async with private_member(1, tmp_path) as (founder, roster):
            ticket = ticket_of(founder)
            assert (await fetch_run(ann, [eve.address, founder.address], 60.0, ticket)).run == PRIVATE
            async with private_member(3, tmp_path, ticket) as (ben, of_ben):
                await eventually(lambda: of_ben.is_member, "Ben is let in")
                ben.swarm.membership.hear([eve.address])
                await ben.swarm.membership.greet(eve.author)
            assert list(roster.book.redeemed.values()) == [BEN.author]
        with pytest.raises(UserError, match="None of the peers") as error:
            await fetch_run(ann, [eve.address, founder.address], 0.0, ticket)
        assert "the inviter's node runs" in error.value.fix
    assert len(shown) >= 3 and not any(shown)


async def test_the_invited_meet_learn_of_each_other_and_lose_the_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder)) as (ann, of_ann),
        private_member(3, tmp_path, ticket_of(founder)) as (ben, _),
    ):
        nodes = (founder, ann, ben)
        everybody = {node.identity.author for node in nodes}
        await eventually(
            lambda: all({node.identity.author, *node.swarm.membership.view} == everybody for node in nodes),
            "meeting",
        )
        ann.make(2)
        await eventually(lambda: len(ben.admitted) == 2 == len(founder.admitted), "groups of a member")
        orders = tmp_path / "roster-1" / "orders"
        orders.mkdir()
        at = int(unix_seconds())
        gone = removal(FOUNDER, ANN, at=at)
        (orders / "ann.removal").write_bytes(encode(gone))
        roster.obey()
        left = everybody - {ann.identity.author}
        await eventually(
            lambda: all({node.identity.author, *node.swarm.membership.view} == left for node in (founder, ben)),
            "the removal",
        )
        ann.make(1)
        ben.make(1)
        await eventually(lambda: len(founder.admitted) == 3, "a group of Ben's")
        assert ann.identity.author not in [key[0] for key in founder.admitted[2:]]
        await eventually(lambda: of_ann.shut_out != "", "she learns of it")
        day = strftime("%Y-%m-%d", localtime(at))
        assert of_ann.shut_out == f"this node was removed by {FOUNDER.peer_id} on {day}"
        await eventually(lambda: not ann.swarm.membership.view, "she has no peers any more")
        monkeypatch.setattr(ann.swarm.membership, "greet", None)  # nobody is dialled from now on
        ann.swarm.membership.called(FOUNDER.author)
        ann.swarm._to_greet.set()
        await eventually(lambda: not ann.swarm._to_greet.is_set(), "she does not think of it")
        assert not ann.swarm.membership.view


async def test_a_transfer_to_a_removed_member_ends(tmp_path: Path) -> None:
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder)) as (
            ann,
            _,
        ),
    ):
        await eventually(lambda: founder.met(ann), "a meeting")
        founder.make(3)
        digests = [packet_digest(packet(founder.author, 0, slot, run=PRIVATE)) for slot in range(3)]
        chunks = founder.swarm.on_fetch(ftis_pb2.FetchRequest(digests=digests), ann.author)
        assert (await anext(chunks)).digest == digests[0]
        roster.hear([encode(removal(FOUNDER, ANN, at=unix_seconds()))], FOUNDER.author)
        assert [chunk async for chunk in chunks] == []


def test_runs_without_a_founder_keep_their_ids() -> None:
    assert b"founder" not in RUN.canonical_json() and b"founder" in PRIVATE.canonical_json()
    with pytest.raises(UsageError):
        make_run_of(**{**RUN.model_dump(), "founder": "Ana"})


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def home_of(tmp_path: Path) -> Callable[..., Path]:
    """Makes the home of an identity in a run, with the roster that it would have."""

    def make(who: Identity, run: Run | None = PRIVATE, own: Chain = (), members: Sequence[Chain] = ()) -> Path:
        home = tmp_path / f"home of {who.peer_id}"
        home.mkdir()
        who.keep(home / "identity.key")
        if run is not None:
            (home / "run.toml").write_text(dump_run_file(RunFile(run=run)))
        book = Book(run_id=PRIVATE.id, founder=FOUNDER.author, own=own)
        book.members = {chain[-1].member: chain for chain in members}
        (home / "members").write_bytes(msgspec.msgpack.encode(book))
        return home

    return make


Homes = Callable[..., Path]
HERE = "--address", f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"


def lasting(*signers: tuple[Identity, Identity], **changes: Any) -> Chain:
    """A chain that is valid now."""
    now = int(unix_seconds())
    times = {"issued_at": now - DAY, "expires": now + DAY}
    return tuple(certificate(issuer, who, **{**times, **changes}) for issuer, who in signers)


def test_invite_prints_a_line_that_join_reads_from_itself_a_file_or_stdin(
    home_of: Homes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of(FOUNDER)
    told = answer("invite", "--home", home, "--name", "Ana", *HERE)
    made = invitation_in(told["invitation"], Home(tmp_path / "nowhere"))
    assert (made.run_id, made.inviter, made.name, made.private) == (PRIVATE.id, FOUNDER.author, "Ana", True)
    assert told["private"] and made.seconds == 180 * DAY and told["expires"] == made.expires
    (tmp_path / "line").write_text(made.text + "\n")
    assert invitation_in(str(tmp_path / "line"), Home(tmp_path / "nowhere")) == made
    monkeypatch.setattr("sys.stdin", io.StringIO(made.text + "\n"))
    assert invitation_in("-", Home(tmp_path / "nowhere")) == made
    assert "█" in printed("invite", "--home", home, "--qr", *HERE)
    keep_invitation(Home(tmp_path / "new"), made)
    assert (tmp_path / "new" / "invitation").stat().st_mode & 0o777 == 0o600
    assert made.text not in Redactor(None).clean(f"join {made.text} --home x")


def test_an_invitation_to_an_open_run_is_no_ticket(home_of: Homes, tmp_path: Path) -> None:
    home = home_of(FOUNDER, RUN)
    made = invitation_in(printed("invite", "--home", home, *HERE).strip(), Home(tmp_path / "nowhere"))
    assert not made.private and made.run_id == RUN.id
    assert "has no members" in refused("members", "--home", home).what


def names(home: Path, known: dict[Identity, str]) -> None:
    """Keeps what nodes call themselves as a daemon on the home would."""
    now = unix_seconds()
    book = overview.Book(PRIVATE.id, now)
    for who, name in known.items():
        report = SelfReport(run_id=PRIVATE.id, author=who.author, at=int(now), name=name)
        book.nodes[who.author] = overview.Seen(now, now, who.author, report=report)
    Home(home).swarm_history.write_bytes(msgspec.msgpack.encode(book))


def test_members_are_listed_with_who_invited_them(home_of: Homes) -> None:
    anns = lasting((FOUNDER, ANN))
    gone = lasting((FOUNDER, ANN), (ANN, BEN), issued_at=1, expires=2)
    home = home_of(FOUNDER, members=[anns, gone])
    rows = {row["id"]: row for row in answer("members", "--home", home)["members"]}
    assert rows[FOUNDER.peer_id]["founder"] and rows[ANN.peer_id]["invited_by"] == FOUNDER.peer_id
    assert rows[ANN.peer_id]["why"] is None and "expired" in rows[BEN.peer_id]["why"]
    text = printed("members", "--home", home)
    assert "this node; the founder" in text and "may invite" in text and "no member" in text
    names(home, {ANN: "Ann", BEN: "Ann"})
    told = printed("members", "--home", home)
    assert f"Ann ({ANN.peer_id})  until" in told and f"invited by Ann ({ANN.peer_id})" in told
    assert {row["name"] for row in answer("members", "--home", home)["members"]} == {None, "Ann"}
    ambiguous = refused("remove", "Ann", "--home", home)
    assert "2 members call themselves 'Ann'" in ambiguous.what and BEN.peer_id in ambiguous.fix
    names(home, {ANN: "Ann", EVE: "Eve"})
    assert answer("remove", "Ann", "--home", home)["removed"] == ANN.peer_id
    assert "No member calls itself 'Eve'" in refused("remove", "Eve", "--home", home).what


def test_an_order_to_remove_waits_for_the_daemon(home_of: Homes) -> None:
    home = home_of(FOUNDER, members=[lasting((FOUNDER, ANN))])
    assert answer("remove", ANN.peer_id, "--invitations", "--home", home)["removed"] == ANN.peer_id
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, FOUNDER, home / "members", home / "orders")
    assert roster.admits(ANN.author)
    roster.obey()
    assert not roster.admits(ANN.author) and roster.book.voided > 0


def test_what_the_commands_refuse(home_of: Homes, tmp_path: Path) -> None:
    home = home_of(BEN, own=lasting((FOUNDER, ANN), (ANN, BEN), invites=False), members=[lasting((FOUNDER, ANN))])
    assert "may not invite" in refused("invite", "--home", home, *HERE).what
    assert f"Ask {FOUNDER.peer_id}" in refused("remove", ANN.peer_id, "--home", home).fix
    assert "Nobody" in refused("remove", "--home", home).what
    assert "not an Ed25519" in refused("remove", "Ann", "--home", home).what
    founder = home_of(FOUNDER)
    assert "no address" in refused("invite", "--home", founder, "--address", "/ip4/127.0.0.1/tcp/1025").what
    assert "is no time" in refused("invite", "--home", founder, "--expires", "soon", *HERE).what
    assert "no run yet" in refused("members", "--home", home_of(CARA, run=None)).what


def test_what_join_refuses(home_of: Homes, tmp_path: Path) -> None:
    line = ("join", "--dry-run", "--device", "cpu", "--model", "tiny-a", "--home")
    fresh = invitation(now=unix_seconds()).text
    assert "no file that holds one" in refused(*line, tmp_path / "x", str(tmp_path / "none")).what
    assert "has expired" in refused(*line, tmp_path / "x", invitation().text).what
    assert "--private begins a run" in refused(*line, tmp_path / "x", "--private", fresh).what
    assert "is to run" in refused(*line, home_of(ANN, RUN), fresh).what
    assert "The run is open" in refused(*line, home_of(BEN, RUN), "--private").what


def test_daemons_an_invitation_and_a_removal(join: Join) -> None:
    """As people do it: a founder, one who is invited and later removed, and one who has only the run file."""
    founder = join("founder", "--model", "tiny-a", "--private", "--name", "Ana")
    at = "--home", founder.home.path
    founder.wait(lambda s: s.get("step", 0) >= 1, "a step")
    line = answer("invite", "--home", founder.home.path)["invitation"]
    uninvited = join("uninvited", "--run", str(founder.home.run_file), "--model", "tiny-b")
    invited = join("invited", line, "--model", "tiny-b", "--name", "Ben")
    invited.wait(lambda s: s.get("foreign_groups_used"), "a group of the founder's")
    assert uninvited.process is not None and uninvited.process.wait(PATIENCE) == 1
    assert "no member of its private run" in uninvited.log()
    founder.wait(lambda s: f"Ben ({Identity.load(invited.home.key).peer_id})" in printed("members", *at), "his name")
    assert "Ben (" in printed("peers", *at)
    printed("remove", "Ben", *at)
    invited.wait(lambda s: "this node was removed by Ana" in s["reason"], "it is told")
    assert invited.status()["state"] == "ALONE" and not invited.status()["peers"]
    assert "  this node; no member: Ben (" in printed("members", "--home", invited.home.path)
    assert invited.stop() == 0
    removed = join("invited", line, "--model", "tiny-b")
    assert removed.process is not None and removed.process.wait(PATIENCE) == 1
    assert "this node was removed by" in removed.log() and "with a new --home" in removed.log()
