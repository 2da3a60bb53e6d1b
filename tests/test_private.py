"""Private runs: invitations, certificates, the roster, and nodes that answer members only."""

from __future__ import annotations

import base64
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

from ftis_node.cli import invitations as invitations_module
from ftis_node.cli.invitations import invitation_in, keep_invitation
from ftis_node.config.run import Run, RunFile, dump_run_file
from ftis_node.config.run import make_run as make_run_of
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import packet_digest
from ftis_node.preflight.redaction import Redactor
from ftis_node.store.home import Home
from ftis_node.swarm import certificates, chronicle, ftis_pb2
from ftis_node.swarm.certificates import Book, Certificate, Chain, Removal, decode, encode
from ftis_node.swarm.handshake import fetch_run, greeting
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation, invite, read, read_line
from ftis_node.swarm.roster import Roster, read_book
from ftis_node.swarm.self_report import SelfReport
from ftis_node.swarm.signed import Malformed
from tests.support.cli import answer, printed, refused
from tests.support.clock import Clock
from tests.support.daemons import PATIENCE, Join
from tests.support.swarm import RUN, Member, eventually, identity, make_run, member, once, packet, stub, transport

FOUNDER, ANN, BEN, CARA, EVE = (identity(number) for number in range(1, 6))
PRIVATE = make_run(founder=FOUNDER.peer_id)
DAY = 86400
NOW = 1_760_000_000.0


def certificate(signer: Identity, who: Identity, claimed: Identity | None = None, **changes: Any) -> Certificate:
    """A certificate of a week, of its signer or of a claimed issuer; what changes is changed before it is signed."""
    fields = dict(run_id=PRIVATE.id, member=who.author, issuer=(claimed or signer).author, issued_at=int(NOW) - DAY)
    return Certificate(**{**fields, "expires": int(NOW) + 6 * DAY, "invites": True, **changes}).signed_by(signer)


def removal(remover: Identity, who: Identity, at: float = NOW) -> Removal:
    record = Removal(run_id=PRIVATE.id, member=who.author, issuer=remover.author, issued_at=int(at))
    return record.signed_by(remover)


def refusal(chain: Chain, peer: Identity, *removals: Removal, now: float = NOW) -> str | None:
    """Why a member that knows these removals refuses a peer that shows this chain."""
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, identity(99), clock=lambda: now)
    roster.hear([encode(ANNS), *map(encode, removals)] if removals else [], CARA.author)
    return roster.meet(peer.author, encode(chain) if chain else b"")


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
        ((), EVE, certificates.MEMBERS_ONLY),
        (ANNS, EVE, "another key"),
        ((certificate(EVE, EVE),), EVE, "no chain from the run's founder"),
        ((certificate(EVE, EVE, claimed=FOUNDER),), EVE, "signature"),
        ((*ANNS, certificate(EVE, EVE, claimed=ANN)), EVE, "signature"),
        ((certificate(ANN, BEN),), BEN, "no chain"),
        ((certificate(FOUNDER, ANN, invites=False), certificate(ANN, BEN)), BEN, "not appointed"),
        ((certificate(FOUNDER, ANN, run_id=RUN.id),), ANN, "another run"),
        ((certificate(FOUNDER, ANN, expires=int(NOW)),), ANN, "expired"),
        ((certificate(FOUNDER, ANN, expires=int(NOW)), certificate(ANN, BEN)), BEN, "expired"),
        ((msgspec.structs.replace(ANNS[0], invites=False),), ANN, "signature"),
        ((msgspec.structs.replace(ANNS[0], expires=2**40),), ANN, "signature"),
        ((msgspec.structs.replace(ANNS[0], signature=b""),), ANN, "signature"),
        ((certificate(FOUNDER, ANN, member=b"x"),), ANN, "no chain"),
        ((*BENS, certificate(BEN, CARA)), CARA, "ask the founder for a new invitation"),
        ((certificate(FOUNDER, FOUNDER), certificate(FOUNDER, EVE)), EVE, "no chain"),
        ((certificate(FOUNDER, ANN, issued_at=int(NOW) + DAY),), ANN, "future"),
    ],
)
def test_who_is_no_member(chain: Chain, peer: Identity, why: str) -> None:
    found = refusal(chain, peer)
    assert found is not None and why in found


def test_a_removal_by_the_founder_or_the_members_own_inviter_is_for_good() -> None:
    for remover in (FOUNDER, ANN):
        assert "was removed" in str(refusal(BENS, BEN, removal(remover, BEN)))
    for remover in (BEN, CARA, EVE):
        assert refusal(BENS, BEN, removal(remover, BEN)) is None
    assert f"{ANN.peer_id} was removed" in str(refusal(BENS, BEN, removal(FOUNDER, ANN)))
    assert refusal(ANNS, ANN, removal(BEN, ANN)) is None
    again = int(NOW) + 60
    assert "removed" in str(refusal((*ANNS, certificate(ANN, BEN, issued_at=again)), BEN, removal(ANN, BEN)))
    assert "removed" in str(refusal((certificate(FOUNDER, BEN, issued_at=again),), BEN, removal(FOUNDER, BEN)))
    assert refusal((certificate(FOUNDER, BEN),), BEN, removal(ANN, BEN)) is None, "it gave another certificate"


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
        with contextlib.suppress(Malformed):
            decode(data, kind)
    with pytest.raises(UsageError):
        read(data, NOW)
    with pytest.raises(Malformed, match="more than"):
        decode(encode(20 * ANNS), Chain)


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


LATER = (
    "ftis:" + base64.urlsafe_b64encode(msgspec.msgpack.encode([b"run", b"signature", 2, {"a new": "field"}])).decode()
)


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "begins with ftis:"),
        ("/ip4/192.0.2.1/tcp/1", "begins with ftis:"),
        ("ftis:AAAA", "no whole invitation"),
        (invitation().text[:-9], "no whole invitation"),
        ("ftis:" + "A" * 4000, "begins with ftis:"),
        (msgspec.structs.replace(invitation(), name="Eve").text, "its signature is wrong"),
        (invitation(seconds=0).text, "has expired"),
        (LATER, "of version 2, which is not known here"),
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


@pytest.fixture
def time() -> Clock:
    return Clock(NOW)


Rosters = Callable[..., Roster]


@pytest.fixture
def roster_of(tmp_path: Path, time: Clock) -> Rosters:
    """Makes the roster of an identity; one of the same identity again is that after a restart."""

    def make(who: Identity, ticket: Invitation | None = None) -> Roster:
        home = tmp_path / who.peer_id
        home.mkdir(exist_ok=True)
        return Roster(PRIVATE.id, FOUNDER.peer_id, who, home / "members", home / "orders", ticket, time)

    return make


def order(home: Path, *removed: Removal) -> None:
    """What `ftis-node remove` leaves to the daemon."""
    (home / "orders").mkdir(exist_ok=True)
    for number, record in enumerate(removed):
        (home / "orders" / f"{number}.removal").write_bytes(encode(record))


def two_below(roster_of: Rosters, ticket: Invitation | None = None) -> tuple[Roster, Roster, Roster]:
    """The founder, Ann, who may invite, and Ben, whom she invited."""
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    assert joined(founder, ann, ticket or invitation(invites=True), ANN) is None
    assert joined(ann, ben, invitation(ANN), BEN) is None and ben.is_member
    return founder, ann, ben


def joined(inviter: Roster, who: Roster, ticket: Invitation, peer: Identity) -> str | None:
    """A node whose owner was given an invitation presents it to the inviter, as handshakes do."""
    who._invitation, issuer = ticket, ticket.inviter
    why = inviter.why_no_ticket(ticket, peer.author)
    if why is None:
        assert who.meet(issuer, inviter.own) is None and who.ticket_for(issuer) == ticket.encoded
        who.accept(inviter.redeem(ticket, peer.author), issuer)
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
    founder, ann, _ = two_below(roster_of)
    assert not founder.admits(BEN.author)
    told: set[bytes] = set()
    assert founder.hear(ann.news(told), ANN.author) == told and len(told) == 2
    assert founder.admits(BEN.author)
    assert ann.news(told) == []


def test_a_removed_member_is_out_everywhere_and_so_are_those_it_invited(roster_of: Rosters, tmp_path: Path) -> None:
    founder, ann, ben = two_below(roster_of, ticket := invitation(invites=True))
    founder.hear(ann.news(set()), ANN.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    founder.obey()
    assert not list((tmp_path / FOUNDER.peer_id / "orders").iterdir())
    assert not founder.admits(ANN.author) and not founder.admits(BEN.author)
    assert "removed" in str(founder.why_no_ticket(ticket, ANN.author))
    assert founder.meet(BEN.author, ben.own) is not None and founder.removal_for(BEN.author)
    ben.hear(founder.news(set()), FOUNDER.author)
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
    told = founder.removal_for(ANN.author)
    assert told and founder.removal_for(EVE.author) == b"" == ben.removal_for(ANN.author)
    for wrong in (b"junk", removal(FOUNDER, BEN), removal(EVE, ANN), removal(ANN, ANN)):
        ann.hear([wrong if isinstance(wrong, bytes) else encode(wrong)], EVE.author)
    ann.hear([encode(msgspec.structs.replace(removal(EVE, ANN), issuer=FOUNDER.author))], EVE.author)
    assert ann.is_member and ann.book.ended.keys() <= {FOUNDER.author, ANN.author}
    ann.hear([told], EVE.author)
    assert "this node was removed" in ann.shut_out and "this node was removed" in roster_of(ANN, invitation()).shut_out


def test_what_a_peer_is_known_to_have_are_signatures_that_hold(roster_of: Rosters) -> None:
    cara = roster_of(CARA)
    assert cara.meet(ANN.author, encode(ANNS)) is None
    forged = (msgspec.structs.replace(certificate(FOUNDER, ANN, issued_at=1), signature=bytes(1500)),)
    assert cara.hear([encode(forged), encode(ANNS)], ANN.author) == {ANNS[0].signature}


def test_withdrawn_invitations_are_void_and_later_ones_are_not(roster_of: Rosters, tmp_path: Path, time: Clock) -> None:
    founder = roster_of(FOUNDER)
    order(tmp_path / FOUNDER.peer_id)
    orders = tmp_path / FOUNDER.peer_id / "orders"
    (orders / f"{int(NOW) + 1}.voided").touch()
    (orders / "now.voided").touch()
    (orders / "damaged.removal").write_bytes(b"junk")
    founder.obey()
    assert not list(orders.iterdir())
    assert "withdrawn" in str(founder.why_no_ticket(invitation(), EVE.author))
    assert founder.why_no_ticket(invitation(now=NOW + 2), ANN.author) is None


def test_a_certificate_is_renewed_when_half_of_its_time_is_over_and_ends_otherwise(
    roster_of: Rosters, time: Clock
) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, invitation(), ANN)
    joined(founder, ben, invitation(), BEN)
    assert founder.renewal(ANN.author) == b""
    time.now += 16 * DAY
    assert ann.renewal(BEN.author) == b""  # she did not issue it
    ann.accept(founder.renewal(ANN.author), FOUNDER.author)
    time.now += 16 * DAY
    assert ann.is_member and founder.admits(ANN.author)
    assert not ben.is_member and not founder.admits(BEN.author) and "expired" in str(ben.why_no_member())


def test_a_certificate_of_an_inviter_counts_while_the_inviters_own_does(roster_of: Rosters, time: Clock) -> None:
    founder, ann, ben = roster_of(FOUNDER), roster_of(ANN), roster_of(BEN)
    joined(founder, ann, invitation(membership=4 * DAY, invites=True), ANN)
    joined(ann, ben, invitation(ANN, membership=400 * DAY), BEN)
    time.now += 3 * DAY
    assert ann.renewal(BEN.author) == b"", "half of its time is not over"
    ann.accept(founder.renewal(ANN.author), FOUNDER.author)
    time.now += 2 * DAY
    assert "the certificate of " + ANN.peer_id in str(ben.why_no_member())
    ben.hear(ann.news(set()), ANN.author)
    assert ben.is_member and ben.own == encode((decode(ann.own, Chain)[0], decode(ben.own, Chain)[1]))
    assert roster_of(BEN).own == ben.own


def test_the_founder_appoints_a_member_that_is_there_already_by_another_invitation(roster_of: Rosters) -> None:
    founder, _, ben = two_below(roster_of)
    joined(founder, ben, invitation(), BEN)
    assert not ben.book.may_invite(BEN.author, NOW) and len(decode(ben.own, Chain)) == 1
    assert ben.ticket_for(FOUNDER.author) == b""
    joined(founder, ben, invitation(invites=True), BEN)
    assert ben.book.may_invite(BEN.author, NOW) and ben.ticket_for(FOUNDER.author) == b""
    assert "only the founder" in str(ben.why_no_ticket(invitation(BEN, invites=True), EVE.author))


def test_a_home_of_an_earlier_version_goes_on_and_one_below_two_inviters_is_told_what_to_do(
    roster_of: Rosters, tmp_path: Path
) -> None:
    caras = (*BENS, certificate(BEN, CARA))
    for who, own in ((FOUNDER, ()), (ANN, ANNS), (BEN, BENS), (CARA, caras)):
        book = Book(PRIVATE.id, FOUNDER.author)
        book.own, book.members, book.removals = own, {BEN.author: BENS, CARA.author: caras}, [removal(FOUNDER, EVE)]
        (tmp_path / who.peer_id).mkdir()
        (tmp_path / who.peer_id / "members").write_bytes(msgspec.msgpack.encode(book))
    founder, ann, ben, cara = map(roster_of, (FOUNDER, ANN, BEN, CARA))
    assert founder.is_member and ann.own == encode(ANNS) and ben.own == encode(BENS)
    assert founder.admits(BEN.author) and not founder.admits(CARA.author)
    assert "removed" in str(founder.why_no_ticket(invitation(), EVE.author))
    assert "ask the founder for a new invitation" in cara.shut_out
    assert joined(founder, cara, invitation(), CARA) is None and roster_of(CARA).is_member


# --- three hostile members --------------------------------------------------------------------------------------------


def test_row_56_nobody_gives_a_certificate_unasked_and_nobody_takes_over_the_founder(roster_of: Rosters) -> None:
    """Ann may invite, Ben is removed, Eve is Ann's; they offer all that they can sign to the founder and to Cara."""
    founder, ann, cara = roster_of(FOUNDER), roster_of(ANN), roster_of(CARA)
    joined(founder, ann, invitation(invites=True), ANN)
    joined(founder, cara, invitation(), CARA)
    cara.hear([encode(ANNS), encode((certificate(FOUNDER, BEN),)), encode(removal(FOUNDER, BEN))], ANN.author)
    own, later = cara.own, dict[str, Any](issued_at=int(NOW) + 60, expires=int(NOW) + 900 * DAY)
    for victim, who in ((founder, FOUNDER), (cara, CARA)):
        for peer, issuer in ((ANN, ANN), (BEN, BEN), (EVE, ANN), (FOUNDER, ANN), (ANN, EVE)):
            for above in (ANNS, (certificate(issuer, issuer, claimed=FOUNDER),), ()):
                chain = encode((*above, certificate(issuer, who, **later)))
                victim.hear([chain], peer.author)
                victim.accept(chain, peer.author)
    assert founder.own == b"" and founder.is_member and cara.own == own and cara.is_member
    founder.hear([encode(removal(ANN, CARA)), encode(removal(ANN, FOUNDER))], ANN.author)
    assert founder.admits(CARA.author), "hers is the founder's certificate, whatever others sign for her"


def test_row_57_removals_made_up_by_the_hundred_displace_nobodys_order(roster_of: Rosters, tmp_path: Path) -> None:
    """Eight keys of one member, and an inviter, sign as many removals as they can; then owners remove members."""
    founder, dan, keys = roster_of(FOUNDER), identity(50), [identity(number) for number in range(60, 68)]
    dans = (certificate(FOUNDER, dan),)
    for chain in (ANNS, dans, (*dans, certificate(dan, CARA)), *((*ANNS, certificate(ANN, key)) for key in keys)):
        founder.hear([encode(chain)], ANN.author)
    for remover in (*keys, ANN):
        junk = [encode(removal(remover, identity(1000 + number))) for number in range(64)]
        founder.hear(junk[:32], remover.author)
        founder.hear(junk[32:], remover.author)
    assert founder.book.ended.keys() == {ANN.author}, "a key that invited nobody ends nothing"
    assert founder.admits(CARA.author)
    founder.hear([encode(removal(dan, CARA))], dan.author)
    assert not founder.admits(CARA.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    founder.obey()
    assert not any(map(founder.admits, (ANN.author, keys[0].author))) and founder.admits(dan.author)
    assert decode(founder.news(set())[0], Removal) == removal(FOUNDER, ANN), "told before what others signed"


def test_row_58_a_record_costs_one_signature_check_and_an_inviters_keys_share_a_budget(
    roster_of: Rosters, monkeypatch: pytest.MonkeyPatch, time: Clock
) -> None:
    checked: list[bytes] = []
    check = Certificate.verify

    def counted(self: Certificate, signer: bytes) -> bool:
        checked.append(signer)
        return check(self, signer)

    monkeypatch.setattr(Certificate, "verify", counted)
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)  # no budget grows meanwhile
    founder, keys = roster_of(FOUNDER), [identity(number) for number in range(10, 13)]
    founder.hear([encode(ANNS)], ANN.author)
    full = [(*ANNS, certificate(ANN, identity(number))) for number in range(10, 600)]
    founder.hear([encode(full[0])], ANN.author)
    founder.meet(full[0][-1].member, b"")
    for chain in full[1:]:
        founder.meet(chain[-1].member, encode(chain))
    assert len(checked) == 1 + 512, "a chain for which there is no room is not checked"
    for chain in full[1:]:
        founder.meet(chain[-1].member, encode(chain))
        founder.hear([encode(chain)], ANN.author)
    assert len(checked) == 1 + 512, "nor one that is known"
    checked.clear()
    for number in range(600):
        for key in keys:
            made_up = encode((certificate(key, identity(1000 + number), claimed=FOUNDER),))
            assert not founder.hear([made_up], key.author), "what proves nothing is not remembered"
    assert 1000 < len(checked) <= 1024, "one budget, for three keys, one of which shows no certificate"
    assert founder.meet(BEN.author, encode((certificate(FOUNDER, BEN),))) is None, "others have their own"
    time.now += 7 * DAY
    founder.obey()
    assert not founder.book.issued[ANN.author], "whose time is over make room"


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


def ticket_of(node: Member, *, invites: bool = False) -> Invitation:
    options = dict[str, Any](now=unix_seconds(), seconds=DAY, membership=DAY, invites=invites)
    return invite(node.identity, PRIVATE.id, [node.address], **options)


async def test_row_49_a_stranger_gets_a_refusal_and_nothing_else(tmp_path: Path) -> None:
    async with private_member(1, tmp_path) as (founder, roster), transport(EVE, tmp_path / "eve") as eve:
        await eve.connect(FOUNDER.author, [founder.address])
        call = stub(eve, FOUNDER)
        forged, stolen, uninvited = greeting(PRIVATE, []), greeting(PRIVATE, []), greeting(None, [])
        forged.certificates = encode((certificate(EVE, EVE, claimed=FOUNDER),))
        stolen.certificates, uninvited.invitation = encode(ANNS), invitation(EVE).encoded
        for hello in (greeting(None, []), greeting(PRIVATE, []), greeting(RUN, []), forged, stolen, uninvited):
            answer = await call.rpc_handshake(hello)
            assert {field.name for field, _ in answer.ListFields()} == {"major", "minor", "refusal"}
        assert (await call.rpc_handshake(greeting(PRIVATE, []))).refusal == certificates.MEMBERS_ONLY
        told = await call.rpc_exchange(ftis_pb2.ExchangeRequest(roster=[encode(ANNS)]))
        assert told == ftis_pb2.ExchangeResponse(stranger=True)
        assert not roster.book.issued
        chunks = [chunk async for chunk in await call.rpc_fetch(once(ftis_pb2.FetchRequest(digests=[b"x" * 32])))]
        assert [chunk.status for chunk in chunks] == [ftis_pb2.FetchChunk.BUSY]
        assert EVE.author not in founder.swarm.membership.active_view


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
                ben.swarm.membership.addresses.hear([eve.address])
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

        def meet(*nodes: Member) -> bool:
            everybody = {node.identity.author for node in nodes}
            return all({node.identity.author, *node.swarm.membership.active_view} == everybody for node in nodes)

        await eventually(lambda: meet(founder, ann, ben), "meeting")
        ann.make(2)
        await eventually(lambda: len(ben.admitted) == 2 == len(founder.admitted), "groups of a member")
        at = int(unix_seconds())
        order(tmp_path / "roster-1", removal(FOUNDER, ANN, at=at))
        roster.obey()
        await eventually(lambda: meet(founder, ben), "the removal")
        ann.make(1)
        ben.make(1)
        await eventually(lambda: len(founder.admitted) == 3, "a group of Ben's")
        assert ann.identity.author not in [key[0] for key in founder.admitted[2:]]
        await eventually(lambda: of_ann.shut_out != "", "she learns of it")
        day = strftime("%Y-%m-%d", localtime(at))
        assert of_ann.shut_out == f"this node was removed by {FOUNDER.peer_id} on {day}"
        await eventually(lambda: not ann.swarm.membership.active_view, "she has no peers any more")
        monkeypatch.setattr(ann.swarm.membership, "greet", None)  # nobody is dialled from now on
        ann.swarm.membership.addresses.called(FOUNDER.author)
        ann.swarm._to_greet.set()
        await eventually(lambda: not ann.swarm._to_greet.is_set(), "she does not think of it")
        assert not ann.swarm.membership.active_view


async def test_a_transfer_to_a_removed_member_ends(tmp_path: Path) -> None:
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder)) as (ann, _),
    ):
        await eventually(lambda: founder.met(ann), "a meeting")
        founder.make(3)
        digests = [packet_digest(packet(founder.author, 0, slot, run=PRIVATE)) for slot in range(3)]
        chunks = founder.swarm.on_fetch(ftis_pb2.FetchRequest(digests=digests), ann.author)
        assert (await anext(chunks)).digest == digests[0]
        roster.hear([encode(removal(FOUNDER, ANN, at=unix_seconds()))], FOUNDER.author)
        assert [chunk async for chunk in chunks] == []


async def test_row_56_a_hostile_answer_to_a_greeting_gives_nobody_a_certificate(tmp_path: Path) -> None:
    """Ann may invite, Ben is removed: both answer the founder's and Cara's greetings with certificates below Ann's."""
    async with (
        private_member(1, tmp_path) as (founder, roster),
        private_member(2, tmp_path, ticket_of(founder, invites=True)) as (ann, of_ann),
        private_member(3, tmp_path, ticket_of(founder)) as (ben, _),
        private_member(4, tmp_path, ticket_of(founder)) as (cara, of_cara),
    ):
        await eventually(lambda: founder.met(ann, ben, cara) and cara.met(ann, ben), "meeting")
        own, anns = of_cara.own, decode(of_ann.own, Chain)
        lasts = dict[str, Any](expires=anns[0].expires + 99 * DAY, issued_at=int(unix_seconds()))

        def hostile(node: Member) -> Callable[..., Any]:
            async def answer(request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
                hello = greeting(PRIVATE, [node.address])
                hello.certificates = node.swarm.roster.own if node.swarm.roster is not None else b""
                whom = {FOUNDER.author: FOUNDER, CARA.author: CARA}.get(peer, BEN)
                hello.granted = encode((*anns, certificate(ANN, whom, **lasts)))
                return hello

            return answer

        for node in (ann, ben):
            node.swarm.on_handshake = hostile(node)  # type: ignore[method-assign]
        roster.hear([encode(removal(FOUNDER, BEN, at=unix_seconds()))], CARA.author)
        for victim in (founder, cara):
            assert await victim.swarm.membership.greet(ANN.author)
            await victim.swarm.membership.greet(BEN.author)
        assert roster.own == b"" and roster.book.own == () and of_cara.own == own
        assert roster.why_no_ticket(ticket_of(founder), EVE.author) is None, "the founder invites as before"


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
        for *_, last in members:
            book.issued.setdefault(last.issuer, {})[last.member] = last
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
    book = chronicle.Chronicle(PRIVATE.id, now)
    for who, name in known.items():
        report = SelfReport(run_id=PRIVATE.id, author=who.author, at=int(now), name=name)
        book.nodes[who.author] = chronicle.Seen(now, now, who.author, report=report)
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


def test_an_order_to_remove_waits_for_the_daemon_and_one_without_effect_is_told_to_the_owner(
    home_of: Homes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twice = [lasting((FOUNDER, ANN), (ANN, BEN)), lasting((FOUNDER, BEN)), lasting((FOUNDER, ANN), (ANN, CARA))]
    home = home_of(ANN, own=lasting((FOUNDER, ANN)), members=[*twice, lasting((FOUNDER, EVE))])
    assert "cannot remove" in refused("remove", EVE.peer_id, "--home", home).what
    assert not list((home / "orders").iterdir())
    assert f"stays a member by {FOUNDER.peer_id}" in printed("remove", BEN.peer_id, "--home", home)
    (home / "orders" / "eve.removal").write_bytes(encode(removal(CARA, EVE)))
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, ANN, home / "members", home / "orders")
    roster.obey()
    assert "has no effect: only the founder and its inviters" in caplog.text and roster.admits(BEN.author)
    assert answer("remove", CARA.peer_id, "--invitations", "--home", home)["removed"] == CARA.peer_id
    assert roster.admits(CARA.author)
    roster.obey()
    assert not roster.admits(CARA.author) and roster.book.voided > 0
    monkeypatch.setattr(invitations_module, "RECORDS_MAX", 1)
    assert "no more removals" in refused("remove", CARA.peer_id, "--home", home).what


def test_what_the_commands_refuse(home_of: Homes, tmp_path: Path) -> None:
    home = home_of(BEN, own=lasting((FOUNDER, ANN), (ANN, BEN)), members=[lasting((FOUNDER, ANN))])
    assert "may not invite" in refused("invite", "--home", home, *HERE).what
    assert f"Ask {FOUNDER.peer_id}" in refused("remove", ANN.peer_id, "--home", home).fix
    inviter = home_of(ANN, own=lasting((FOUNDER, ANN)))
    assert "Only the founder can appoint" in refused("invite", "--may-invite", "--home", inviter, *HERE).what
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
