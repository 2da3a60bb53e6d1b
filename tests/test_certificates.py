"""Certificates and invitations of private runs, each by itself."""

import base64
import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ftis_node.errors import UsageError
from ftis_node.swarm import certificates
from ftis_node.swarm.certificates import Chain, decode, encode
from ftis_node.swarm.invitation import invite, read_line
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.signed import Malformed
from tests.support.members import (
    ADDRESSES,
    ANN,
    ANNS,
    BEN,
    BENS,
    CARA,
    DAY,
    EVE,
    FOUNDER,
    NOW,
    PRIVATE,
    certificate,
    invitation,
    removal,
)
from tests.support.swarm import RUN, identity


def refusal(chain, peer, *removals, now=NOW):
    """Why a member that knows these removals refuses a peer that shows this chain."""
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, identity(99), clock=lambda: now)
    roster.hear([encode(ANNS), *map(encode, removals)] if removals else [], CARA.author)
    return roster.meet(peer.author, encode(chain) if chain else b"")


# --- certificates -----------------------------------------------------------------------------------------------------


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
        ((replace(ANNS[0], invites=False),), ANN, "signature"),
        ((replace(ANNS[0], expires=2**40),), ANN, "signature"),
        ((replace(ANNS[0], signature=b""),), ANN, "signature"),
        ((certificate(FOUNDER, ANN, member=b"x"),), ANN, "no chain"),
        ((*BENS, certificate(BEN, CARA)), CARA, "ask the founder for a new invitation"),
        ((certificate(FOUNDER, FOUNDER), certificate(FOUNDER, EVE)), EVE, "no chain"),
        ((certificate(FOUNDER, ANN, issued_at=int(NOW) + DAY),), ANN, "future"),
    ],
)
def test_who_is_no_member(chain, peer, why):
    assert why in refusal(chain, peer)


def test_a_removal_by_the_founder_or_the_members_own_inviter_is_for_good():
    for remover in (FOUNDER, ANN):
        assert "was removed" in refusal(BENS, BEN, removal(remover, BEN))
    for remover in (BEN, CARA, EVE):
        assert not refusal(BENS, BEN, removal(remover, BEN))
    assert f"{ANN.peer_id} was removed" in refusal(BENS, BEN, removal(FOUNDER, ANN))
    assert not refusal(ANNS, ANN, removal(BEN, ANN))
    again = int(NOW) + 60
    assert "removed" in refusal((*ANNS, certificate(ANN, BEN, issued_at=again)), BEN, removal(ANN, BEN))
    assert "removed" in refusal((certificate(FOUNDER, BEN, issued_at=again),), BEN, removal(FOUNDER, BEN))
    assert not refusal((certificate(FOUNDER, BEN),), BEN, removal(ANN, BEN)), "it gave another certificate"


def test_a_signature_of_one_kind_is_none_of_another():
    ticket = invite(FOUNDER, PRIVATE.id, [f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"], now=NOW, seconds=DAY)
    gone = removal(FOUNDER, ANN)
    for signed in (ticket, gone, ANNS[0]):
        assert signed.verify(FOUNDER.author)
        assert not signed.verify(ANN.author)
        for other in (ticket, gone, ANNS[0]):
            lent = replace(other, signature=signed.signature)
            assert lent.verify(FOUNDER.author) == (other is signed)


def test_a_chain_of_too_many_certificates_is_refused():
    with pytest.raises(Malformed, match="more than"):
        decode(encode(20 * ANNS), Chain)


# --- invitations ------------------------------------------------------------------------------------------------------


def test_an_invitation_is_one_line_that_reads_back_through_any_wrapping():
    made = invitation(name="Ana")
    assert made.text.startswith("ftis:")
    assert len(made.text) < 400
    assert "\n" not in made.text
    wrapped = "  " + "\n".join(made.text[place : place + 40] for place in range(0, len(made.text), 40)) + "\n"
    assert read_line(wrapped, NOW) == made
    assert made.addresses == ADDRESSES[:3]
    assert made.private
    assert made.name == "Ana"
    assert not invitation(membership=0).private


@given(place=st.integers(0, 350), letter=st.sampled_from("AbZ9-_ !"))
def test_a_changed_letter_is_noticed(place, letter):
    text = invitation().text
    changed = text[: place % len(text)] + letter + text[place % len(text) + 1 :]
    if changed != text:
        with contextlib.suppress(UsageError):  # the last letter may hold bits that count for nothing
            assert read_line(changed, NOW).encoded == read_line(text, NOW).encoded


def signed(**changes):
    return replace(invitation(), **changes).signed_by(FOUNDER).text


LATER = "ftis:" + base64.urlsafe_b64encode(msgspec.msgpack.encode([b"run", b"signature", 2, {"new": "field"}])).decode()


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "begins with ftis:"),
        ("/ip4/192.0.2.1/tcp/1", "begins with ftis:"),
        ("ftis:AAAA", "no whole invitation"),
        (invitation().text[:-9], "no whole invitation"),
        ("ftis:" + "A" * 4000, "begins with ftis:"),
        (replace(invitation(), name="Eve").text, "its signature is wrong"),
        (invitation(seconds=0).text, "has expired"),
        (LATER, "of version 2, which is not known here"),
        (signed(dial=()), "its signature is wrong"),
        (signed(dial=("not an address",)), "its signature is wrong"),
        (signed(nonce=b"short"), "its signature is wrong"),
        (signed(inviter=b"nobody"), "its signature is wrong"),
    ],
)
def test_row_49_what_is_no_invitation(text, error):
    with pytest.raises(UsageError, match=error):
        read_line(text, NOW)
