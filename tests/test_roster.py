"""Private runs: the roster, and what hostile members cannot do."""

from collections.abc import Callable

import msgspec
import pytest

from ftis_node.errors import UserError
from ftis_node.swarm.certificates import Certificate, Chain, Removal, decode, encode
from ftis_node.swarm.invitation import invite
from ftis_node.swarm.roster import Roster
from tests.support.clock import Clock
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
    order,
    removal,
    tell,
)
from tests.support.swarm import RUN, identity

# --- the roster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def time() -> Clock:
    return Clock(NOW)


Rosters = Callable[..., Roster]


@pytest.fixture
def roster_of(tmp_path, time) -> Rosters:
    """Makes the roster of an identity; one of the same identity again is that after a restart."""

    def make(who, ticket=None):
        home = tmp_path / who.peer_id
        home.mkdir(exist_ok=True)
        return Roster(PRIVATE.id, FOUNDER.peer_id, who, home / "members", home / "orders", ticket, time)

    return make


def two_below(roster_of, ticket=None):
    """The founder, Ann, who may invite, and Ben, whom she invited."""
    founder, ann, ben = map(roster_of, (FOUNDER, ANN, BEN))
    ticket = ticket or invitation(invites=True)
    assert not joined(founder, ann, ticket, ANN)
    assert not joined(ann, ben, invitation(ANN), BEN)
    assert ben.is_member
    return founder, ann, ben


def joined(inviter, who, ticket, peer):
    """A node whose owner was given an invitation presents it to the inviter, as handshakes do."""
    who._invitation = ticket
    issuer = ticket.inviter
    why = inviter.why_no_ticket(ticket, peer.author)
    if not why:
        assert not who.meet(issuer, inviter.own_chain)
        assert who.ticket_for(issuer) == ticket.encoded
        who.accept(inviter.redeem(ticket, peer.author), issuer)
    return why


def refusal(inviter, ticket, peer):
    return str(inviter.why_no_ticket(ticket, peer.author))


def invited_by_ann(who):
    return (*ANNS, certificate(ANN, who))


def crowd(count):
    """So many identities that are nobody's above."""
    return [identity(1000 + number) for number in range(count)]


def test_row_49_an_invitation_makes_one_key_a_member_once(roster_of, caplog):
    ticket = invitation()
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, ticket)
    eve = roster_of(EVE, ticket)
    ann.obey()
    assert not caplog.messages, "whose invitation waits has nothing to be told"
    assert founder.is_member
    assert not ann.is_member
    assert ann.ticket_for(FOUNDER.author) == ticket.encoded
    assert ann.ticket_for(BEN.author) == b""
    assert not joined(founder, ann, ticket, ANN)
    assert ann.is_member
    assert ann.ticket_for(FOUNDER.author) == b""
    assert founder.admits(ANN.author)
    assert "another key" in str(joined(founder, eve, ticket, EVE))
    assert not eve.is_member
    assert not founder.admits(EVE.author)
    again = roster_of(FOUNDER)  # what was redeemed outlasts a restart
    assert "another key" in refusal(again, ticket, EVE)
    assert again.redeem(ticket, ANN.author) == ann.own_chain


def test_what_a_member_is_given_is_on_the_disk(roster_of, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("ftis_node.host.files.sync", synced.append)
    two_below(roster_of)
    assert {tmp_path / who.peer_id for who in (FOUNDER, ANN, BEN)} <= set(synced)


def test_only_the_inviters_own_invitation_to_this_run_counts(roster_of):
    founder, ann = map(roster_of, (FOUNDER, ANN))
    other_run = invite(FOUNDER, RUN.id, ADDRESSES, now=NOW, seconds=DAY, membership=DAY)
    for wrong in (invitation(ANN), other_run, invitation(membership=0)):
        assert "not of this node" in refusal(founder, wrong, EVE)
    assert "may not invite" in refusal(ann, invitation(ANN), EVE), "she is no member"
    assert not joined(founder, ann, invitation(), ANN)
    assert "may not invite" in refusal(ann, invitation(ANN), EVE), "and now one who may not invite"


def test_a_member_who_may_invite_does_and_all_come_to_know_it(roster_of):
    founder, ann, _ = two_below(roster_of)
    assert not founder.admits(BEN.author)
    told = set()
    heard = set()
    assert not founder.hear(ann.news(told).values(), ANN.author, heard)
    assert heard == told
    assert len(told) == 2
    assert founder.admits(BEN.author)
    assert ann.news(told) == {}


def test_a_removed_member_is_out_everywhere_and_so_are_those_it_invited(roster_of, tmp_path):
    ticket = invitation(invites=True)
    founder, ann, ben = two_below(roster_of, ticket)
    founder.hear(ann.news(set()).values(), ANN.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    founder.obey()
    assert not list((tmp_path / FOUNDER.peer_id / "orders").iterdir())
    assert not founder.admits(ANN.author)
    assert not founder.admits(BEN.author)
    assert "removed" in refusal(founder, ticket, ANN)
    assert founder.meet(BEN.author, ben.own_chain)
    assert founder.removal_for(BEN.author)
    ben.hear(founder.news(set()).values(), FOUNDER.author)
    assert not ben.is_member
    assert ben.shut_out.startswith(f"{ANN.peer_id} was removed by {FOUNDER.peer_id} on ")
    restarted = roster_of(BEN)
    assert not restarted.is_member
    assert restarted.shut_out == ben.shut_out
    assert founder.renewal(ANN.author, b"") == b""


def test_a_removed_member_learns_of_it_from_who_refuses_it_and_believes_the_signature_alone(roster_of):
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, invitation())
    ben = roster_of(BEN)
    joined(founder, ann, invitation(invites=True), ANN)
    tell(founder, ANN, removal(FOUNDER, ANN))
    told = founder.removal_for(ANN.author)
    assert told
    assert founder.removal_for(EVE.author) == b""
    assert ben.removal_for(ANN.author) == b""
    ann.hear([b"junk"], EVE.author)
    forged = msgspec.structs.replace(removal(EVE, ANN), issuer=FOUNDER.author)
    for wrong in (removal(FOUNDER, BEN), removal(EVE, ANN), removal(ANN, ANN), forged):
        tell(ann, EVE, wrong)
    assert ann.is_member
    assert ann.book.ended.keys() <= {FOUNDER.author, ANN.author}
    ann.hear([told], EVE.author)
    for one in (ann, roster_of(ANN, invitation())):
        assert "this node was removed" in one.shut_out


def test_what_a_peer_is_known_to_have_are_signatures_that_hold(roster_of):
    cara = roster_of(CARA)
    assert not cara.meet(ANN.author, encode(ANNS))
    forged = msgspec.structs.replace(certificate(FOUNDER, ANN, issued_at=1), signature=bytes(1500))
    known = set()
    assert not tell(cara, ANN, (forged,), ANNS, known=known)
    assert known == {ANNS[0].signature}


def test_withdrawn_invitations_are_void_and_later_ones_are_not(roster_of, tmp_path):
    founder = roster_of(FOUNDER)
    order(tmp_path / FOUNDER.peer_id)
    orders = tmp_path / FOUNDER.peer_id / "orders"
    (orders / f"{int(NOW) + 1}.voided").touch()
    (orders / "now.voided").touch()
    (orders / "damaged.removal").write_bytes(b"junk")
    founder.obey()
    assert not list(orders.iterdir())
    assert "withdrawn" in refusal(founder, invitation(), EVE)
    assert not founder.why_no_ticket(invitation(now=NOW + 2), ANN.author)


def test_a_certificate_is_renewed_at_half_its_time_and_ends_otherwise(roster_of, time):
    founder, ann, ben = map(roster_of, (FOUNDER, ANN, BEN))
    joined(founder, ann, invitation(), ANN)
    joined(founder, ben, invitation(), BEN)

    def is_not_due():
        if ann.due_at(FOUNDER.author):
            return False
        return founder.renewal(ANN.author, ann.own_chain) == b""

    assert is_not_due()
    time.now += 16 * DAY
    assert ann.renewal(BEN.author, ben.own_chain) == b"", "she did not issue it"
    assert not ben.due_at(ANN.author)
    assert ann.due_at(FOUNDER.author)
    assert not founder.due_at(ANN.author)
    lost = founder.renewal(ANN.author, ann.own_chain)
    assert lost
    assert founder.renewal(ANN.author, ann.own_chain) == lost, "the answer may have been lost"
    ann.accept(lost, FOUNDER.author)
    assert is_not_due()
    time.now += 16 * DAY
    assert ann.is_member
    assert founder.admits(ANN.author)
    assert not ben.is_member
    assert not founder.admits(BEN.author)
    assert "expired" in str(ben.why_no_member())


def test_a_certificate_of_an_inviter_counts_while_the_inviters_own_does(roster_of, time):
    founder, ann, ben = map(roster_of, (FOUNDER, ANN, BEN))
    joined(founder, ann, invitation(membership=4 * DAY, invites=True), ANN)
    joined(ann, ben, invitation(ANN, membership=400 * DAY), BEN)
    time.now += 3 * DAY
    assert ann.renewal(BEN.author, ben.own_chain) == b"", "half of its time is not over"
    ann.accept(founder.renewal(ANN.author, ann.own_chain), FOUNDER.author)
    time.now += 2 * DAY
    assert f"the certificate of {ANN.peer_id}" in str(ben.why_no_member())
    ben.hear(ann.news(set()).values(), ANN.author)
    assert ben.is_member
    renewed = decode(ann.own_chain, Chain)[0]
    assert ben.own_chain == encode((renewed, decode(ben.own_chain, Chain)[1]))
    assert roster_of(BEN).own_chain == ben.own_chain


def test_the_founder_appoints_a_member_that_is_there_already_by_another_invitation(roster_of):
    founder, _, ben = two_below(roster_of)
    joined(founder, ben, invitation(), BEN)
    assert not ben.may_invite
    assert len(decode(ben.own_chain, Chain)) == 1
    assert ben.ticket_for(FOUNDER.author) == b""
    joined(founder, ben, invitation(invites=True), BEN)
    assert ben.may_invite
    assert ben.ticket_for(FOUNDER.author) == b""
    assert "only the founder" in refusal(ben, invitation(BEN, invites=True), EVE)


# --- three hostile members --------------------------------------------------------------------------------------------


def test_row_56_nobody_gives_a_certificate_unasked_and_nobody_takes_over_the_founder(roster_of):
    """Ann may invite, Ben is removed, Eve is Ann's; they offer all that they can sign to the founder and to Cara."""
    founder, ann, cara = map(roster_of, (FOUNDER, ANN, CARA))
    joined(founder, ann, invitation(invites=True), ANN)
    joined(founder, cara, invitation(), CARA)
    tell(cara, ANN, ANNS, (certificate(FOUNDER, BEN),), removal(FOUNDER, BEN))
    own = cara.own_chain
    later = dict(issued_at=int(NOW) + 60, expires=int(NOW) + 900 * DAY)
    for victim, who in ((founder, FOUNDER), (cara, CARA)):
        for peer, issuer in (
            (ANN, ANN),
            (BEN, BEN),
            (EVE, ANN),
            (FOUNDER, ANN),
            (ANN, EVE),
        ):
            own_made = (certificate(issuer, issuer, claimed=FOUNDER),)
            last = certificate(issuer, who, **later)
            for above in (ANNS, own_made, ()):
                chain = (*above, last)
                tell(victim, peer, chain)
                victim.accept(encode(chain), peer.author)
    assert founder.own_chain == b""
    assert founder.is_member
    assert cara.own_chain == own
    assert cara.is_member
    tell(founder, ANN, removal(ANN, CARA), removal(ANN, FOUNDER))
    assert founder.admits(CARA.author), "hers is the founder's certificate, whatever others sign for her"


def test_row_57_removals_made_up_by_the_hundred_displace_nobodys_order(roster_of, tmp_path):
    """Eight keys of one member, and an inviter, sign as many removals as they can; then owners remove members."""
    founder = roster_of(FOUNDER)
    dan = identity(50)
    keys = [identity(number) for number in range(60, 68)]
    dans = (certificate(FOUNDER, dan),)
    caras = (*dans, certificate(dan, CARA))
    tell(founder, ANN, ANNS, dans, caras)
    for key in keys:
        tell(founder, ANN, invited_by_ann(key))
    for remover in (*keys, ANN):
        junk = [removal(remover, who) for who in crowd(64)]
        tell(founder, remover, *junk[:32])
        tell(founder, remover, *junk[32:])
    assert founder.book.ended.keys() == {ANN.author}, "a key that invited nobody ends nothing"
    assert founder.admits(CARA.author)
    tell(founder, dan, removal(dan, CARA))
    assert not founder.admits(CARA.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    founder.obey()
    for out in (ANN, keys[0]):
        assert not founder.admits(out.author)
    assert founder.admits(dan.author)
    news = founder.news(set())
    first = next(iter(news.values()))
    assert decode(first, Removal) == removal(FOUNDER, ANN), "told before what others signed"


def liars(roster):
    """Who is found to have lied to the node from now on."""
    found = []
    roster.lied = lambda peer, what: found.append(peer)
    return found


def test_row_58_a_record_costs_one_signature_check_and_each_forged_one_its_teller(roster_of, monkeypatch, time):
    checked = []
    check = Certificate.verify

    def counted(self, signer):
        checked.append(signer)
        return check(self, signer)

    monkeypatch.setattr(Certificate, "verify", counted)
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)  # no budget grows meanwhile
    founder = roster_of(FOUNDER)
    lies = liars(founder)
    tell(founder, ANN, ANNS)
    full = [invited_by_ann(who) for who in crowd(590)]
    for _ in range(2):
        for chain in full:
            founder.meet(chain[-1].member, encode(chain))
            tell(founder, ANN, chain)
        assert len(checked) == 1 + 512, "nor one that is known, or for which there is no room"
    known = set()
    for who in crowd(3):
        assert not tell(founder, EVE, (certificate(EVE, who, claimed=FOUNDER),), known=known)
        assert not known, "what proves nothing is not remembered"
    assert lies == [EVE.author] * 3, "after three it is left alone"
    assert not founder.meet(BEN.author, encode((certificate(FOUNDER, BEN),))), "others have their own"
    time.now += 7 * DAY
    founder.obey()
    assert not founder.book.issued[ANN.author], "whose time is over make room"


def test_row_67_no_member_below_an_inviter_keeps_a_removal_from_a_node(roster_of):
    cara = roster_of(CARA)
    lies = liars(cara)
    keys = [identity(number) for number in range(60, 63)]
    for key in (BEN, *keys):
        assert not cara.meet(key.author, encode(invited_by_ann(key)))
    for number, who in enumerate(crowd(1100)):
        forged = certificate(EVE, who, claimed=ANN)
        tell(cara, keys[number % 3], (*ANNS, forged))
    assert set(lies) == {key.author for key in keys}, "the forgers, and nobody else"
    assert len(lies) == 1100
    assert cara.admits(BEN.author)
    known = set()
    assert not tell(cara, ANN, removal(ANN, BEN), known=known)
    assert len(known) == 1
    tell(cara, keys[0], removal(FOUNDER, keys[0]))
    for removed in (BEN, keys[0]):
        assert not cara.admits(removed.author), "the founder's is checked whoever brings it"


def test_row_67_what_is_refused_of_one_inviter_holds_up_no_other_inviters_removal(roster_of, monkeypatch):
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)
    ben = roster_of(BEN)
    monkeypatch.setattr("ftis_node.swarm.roster.NEW_AT_ONCE", 8.0)
    cara = roster_of(CARA)
    eves = (certificate(FOUNDER, EVE),)
    many = crowd(200)
    tell(ben, ANN, eves, ANNS, BENS)
    for one in many:
        invited = (*eves, certificate(EVE, one))
        tell(ben, EVE, invited, removal(EVE, one))
    tell(ben, ANN, removal(ANN, BEN))
    assert not cara.meet(BEN.author, encode(BENS))
    told = set()
    for _ in range(100):
        news = ben.news(told)
        if cara.hear(news.values(), FOUNDER.author):
            told.difference_update(news)
    assert not cara.admits(BEN.author), "and Ben has not used up what is checked for him"
    assert not tell(cara, FOUNDER, invited_by_ann(many[0]))


def test_row_68_what_a_budget_left_is_told_again(roster_of, monkeypatch):
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)
    cara = roster_of(CARA)
    inviters = [identity(number) for number in range(60, 64)]
    records = [(certificate(FOUNDER, inviter),) for inviter in inviters]
    for number, who in enumerate(crowd(1200)):
        place = number % 4
        records.append((*records[place], certificate(inviters[place], who)))
    known = set()
    left = [tell(cara, ANN, record, known=known) for record in records]
    assert len(known) == left.index(True) == 1024, "so many are checked for one peer"
    assert all(left[1024:])
    for record in records:
        assert not tell(cara, BEN, record, known=known)
    assert len(known) == len(records)


def test_row_68_what_a_clock_that_is_behind_refuses_is_known_when_it_is_set_right(roster_of, time):
    ben = roster_of(BEN)
    now = int(NOW)
    inviter = (certificate(FOUNDER, ANN, issued_at=now),)
    invited = (*inviter, certificate(ANN, EVE, issued_at=now))
    tell(ben, ANN, inviter, invited, removal(ANN, EVE))
    time.now -= DAY
    cara = roster_of(CARA)
    cara.hear(ben.news(set()).values(), BEN.author)
    assert "future" in str(cara.meet(ANN.author, encode(inviter)))
    tell(cara, BEN, (certificate(FOUNDER, ANN, issued_at=now + 1),))
    time.now += DAY
    assert not cara.meet(ANN.author, encode(inviter)), "and none of the future displaced it"
    assert "removed" in cara.meet(EVE.author, encode(invited))


def test_row_72_what_peers_tell_is_written_with_the_next_orders_and_not_at_each_message(roster_of, tmp_path):
    founder = roster_of(FOUNDER)
    file = tmp_path / FOUNDER.peer_id / "members"
    tell(founder, ANN, ANNS)
    file.unlink()
    many = crowd(20)
    for who in many:
        tell(founder, ANN, invited_by_ann(who))
    assert not file.exists(), "what the founder signed was written at once"
    founder.obey()
    tell(founder, ANN, BENS)
    restarted = roster_of(FOUNDER)
    assert restarted.admits(many[-1].author)
    assert not restarted.admits(BEN.author)
    founder.redeem(invitation(), CARA.author)
    restarted = roster_of(FOUNDER)
    assert restarted.admits(CARA.author)
    assert restarted.admits(BEN.author)


def test_row_72_a_handshake_that_changes_nothing_writes_nothing(roster_of, tmp_path):
    ticket = invitation()
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, ticket)
    joined(founder, ann, ticket, ANN)
    file = tmp_path / FOUNDER.peer_id / "members"
    file.unlink()
    chain = ann.own_chain
    for shown in (b"", chain):
        assert founder.redeem(ticket, ANN.author) == chain
        assert founder.renewal(ANN.author, shown) in (b"", chain)
    assert not file.exists()
    founder.redeem(invitation(), BEN.author)
    assert file.exists()


def test_an_order_that_cannot_be_read_stays_and_keeps_no_other_from_being_obeyed(roster_of, tmp_path, caplog):
    founder = roster_of(FOUNDER)
    tell(founder, ANN, ANNS)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    unreadable = tmp_path / FOUNDER.peer_id / "orders" / "-.removal"
    unreadable.mkdir()
    for _ in range(2):
        founder.obey()
    assert not founder.admits(ANN.author)
    assert unreadable.exists()
    assert caplog.text.count("cannot be carried out yet") == 1


def test_a_damaged_list_of_members_says_what_to_do(roster_of, tmp_path):
    roster_of(ANN).save()
    (tmp_path / ANN.peer_id / "members").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read"):
        roster_of(ANN)
