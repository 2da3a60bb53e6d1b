"""Private runs: the roster, and what hostile members cannot do."""

from collections.abc import Callable

import msgspec
import pytest

from ftis_node.errors import UserError
from ftis_node.swarm.certificates import Certificate, Chain, Removal, decode, encode
from ftis_node.swarm.invitation import invite
from ftis_node.swarm.roster import Roster, read_book
from tests.support.clock import Clock
from tests.support.members import (
    ADDRESSES,
    ANN,
    ANNS,
    BEN,
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
    assert joined(founder, ann, ticket or invitation(invites=True), ANN) is None
    assert joined(ann, ben, invitation(ANN), BEN) is None and ben.is_member
    return founder, ann, ben


def joined(inviter, who, ticket, peer):
    """A node whose owner was given an invitation presents it to the inviter, as handshakes do."""
    who._invitation = ticket
    issuer = ticket.inviter
    why = inviter.why_no_ticket(ticket, peer.author)
    if why is None:
        assert who.meet(issuer, inviter.own_chain) is None and who.ticket_for(issuer) == ticket.encoded
        who.accept(inviter.redeem(ticket, peer.author), issuer)
    return why


def test_row_49_an_invitation_makes_one_key_a_member_once(roster_of, caplog):
    ticket = invitation()
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, ticket)
    eve = roster_of(EVE, ticket)
    ann.obey()
    assert not caplog.messages, "whose invitation waits has nothing to be told"
    assert founder.is_member and not ann.is_member
    assert ann.ticket_for(FOUNDER.author) == ticket.encoded and ann.ticket_for(BEN.author) == b""
    assert joined(founder, ann, ticket, ANN) is None
    assert ann.is_member and ann.ticket_for(FOUNDER.author) == b"" and founder.admits(ANN.author)
    assert "another key" in str(joined(founder, eve, ticket, EVE))
    assert not eve.is_member and not founder.admits(EVE.author)
    again = roster_of(FOUNDER)  # what was redeemed outlasts a restart
    assert "another key" in str(again.why_no_ticket(ticket, EVE.author))
    assert again.redeem(ticket, ANN.author) == ann.own_chain


def test_what_a_member_is_given_is_on_the_disk(roster_of, monkeypatch):
    synced = []
    monkeypatch.setattr("ftis_node.host.files.sync", synced.append)
    members = two_below(roster_of)
    assert {one._file.parent for one in members if one._file} <= set(synced)


def test_only_the_inviters_own_invitation_to_this_run_counts(roster_of):
    founder, ann = map(roster_of, (FOUNDER, ANN))
    other_run = invite(FOUNDER, RUN.id, ADDRESSES, now=NOW, seconds=DAY, membership=DAY)
    for wrong in (invitation(ANN), other_run, invitation(membership=0)):
        assert "not of this node" in str(founder.why_no_ticket(wrong, EVE.author))
    assert "may not invite" in str(ann.why_no_ticket(invitation(ANN), EVE.author))  # she is no member
    assert joined(founder, ann, invitation(), ANN) is None
    assert "may not invite" in str(ann.why_no_ticket(invitation(ANN), EVE.author))  # and now one who may not invite


def test_a_member_who_may_invite_does_and_all_come_to_know_it(roster_of):
    founder, ann, _ = two_below(roster_of)
    assert not founder.admits(BEN.author)
    told = set()
    heard = set()
    assert not founder.hear(ann.news(told).values(), ANN.author, heard) and heard == told and len(told) == 2
    assert founder.admits(BEN.author)
    assert ann.news(told) == {}


def test_a_removed_member_is_out_everywhere_and_so_are_those_it_invited(roster_of, tmp_path):
    founder, ann, ben = two_below(roster_of, ticket := invitation(invites=True))
    founder.hear(ann.news(set()).values(), ANN.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    founder.obey()
    assert not list((tmp_path / FOUNDER.peer_id / "orders").iterdir())
    assert not founder.admits(ANN.author) and not founder.admits(BEN.author)
    assert "removed" in str(founder.why_no_ticket(ticket, ANN.author))
    assert founder.meet(BEN.author, ben.own_chain) is not None and founder.removal_for(BEN.author)
    ben.hear(founder.news(set()).values(), FOUNDER.author)
    assert not ben.is_member and not roster_of(BEN).is_member  # also after a restart
    assert ben.shut_out.startswith(f"{ANN.peer_id} was removed by {FOUNDER.peer_id} on ")
    assert roster_of(BEN).shut_out == ben.shut_out
    assert founder.renewal(ANN.author, b"") == b""


def test_a_removed_member_learns_of_it_from_who_refuses_it_and_believes_the_signature_alone(roster_of):
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, invitation())
    ben = roster_of(BEN)
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


def test_what_a_peer_is_known_to_have_are_signatures_that_hold(roster_of):
    cara = roster_of(CARA)
    assert cara.meet(ANN.author, encode(ANNS)) is None
    forged = (msgspec.structs.replace(certificate(FOUNDER, ANN, issued_at=1), signature=bytes(1500)),)
    told = set()
    assert not cara.hear([encode(forged), encode(ANNS)], ANN.author, told) and told == {ANNS[0].signature}


def test_withdrawn_invitations_are_void_and_later_ones_are_not(roster_of, tmp_path, time):
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


def test_a_certificate_is_renewed_at_half_its_time_and_ends_otherwise(roster_of, time):
    founder, ann, ben = map(roster_of, (FOUNDER, ANN, BEN))
    joined(founder, ann, invitation(), ANN)
    joined(founder, ben, invitation(), BEN)
    assert founder.renewal(ANN.author, ann.own_chain) == b"" and not ann.due_at(FOUNDER.author)
    time.now += 16 * DAY
    assert ann.renewal(BEN.author, ben.own_chain) == b"" and not ann.due_at(BEN.author)  # she did not issue it
    assert ann.due_at(FOUNDER.author) and not founder.due_at(ANN.author)
    lost = founder.renewal(ANN.author, ann.own_chain)
    assert founder.renewal(ANN.author, ann.own_chain) == lost != b"", "the answer may have been lost"
    ann.accept(lost, FOUNDER.author)
    assert founder.renewal(ANN.author, ann.own_chain) == b"" and not ann.due_at(FOUNDER.author)
    time.now += 16 * DAY
    assert ann.is_member and founder.admits(ANN.author)
    assert not ben.is_member and not founder.admits(BEN.author) and "expired" in str(ben.why_no_member())


def test_a_certificate_of_an_inviter_counts_while_the_inviters_own_does(roster_of, time):
    founder, ann, ben = map(roster_of, (FOUNDER, ANN, BEN))
    joined(founder, ann, invitation(membership=4 * DAY, invites=True), ANN)
    joined(ann, ben, invitation(ANN, membership=400 * DAY), BEN)
    time.now += 3 * DAY
    assert ann.renewal(BEN.author, ben.own_chain) == b"", "half of its time is not over"
    ann.accept(founder.renewal(ANN.author, ann.own_chain), FOUNDER.author)
    time.now += 2 * DAY
    assert "the certificate of " + ANN.peer_id in str(ben.why_no_member())
    ben.hear(ann.news(set()).values(), ANN.author)
    assert ben.is_member and ben.own_chain == encode((decode(ann.own_chain, Chain)[0], decode(ben.own_chain, Chain)[1]))
    assert roster_of(BEN).own_chain == ben.own_chain


def test_the_founder_appoints_a_member_that_is_there_already_by_another_invitation(roster_of):
    founder, _, ben = two_below(roster_of)
    joined(founder, ben, invitation(), BEN)
    assert not ben.book.may_invite(BEN.author, NOW) and len(decode(ben.own_chain, Chain)) == 1
    assert ben.ticket_for(FOUNDER.author) == b""
    joined(founder, ben, invitation(invites=True), BEN)
    assert ben.book.may_invite(BEN.author, NOW) and ben.ticket_for(FOUNDER.author) == b""
    assert "only the founder" in str(ben.why_no_ticket(invitation(BEN, invites=True), EVE.author))


# --- three hostile members --------------------------------------------------------------------------------------------


def test_row_56_nobody_gives_a_certificate_unasked_and_nobody_takes_over_the_founder(roster_of):
    """Ann may invite, Ben is removed, Eve is Ann's; they offer all that they can sign to the founder and to Cara."""
    founder, ann, cara = map(roster_of, (FOUNDER, ANN, CARA))
    joined(founder, ann, invitation(invites=True), ANN)
    joined(founder, cara, invitation(), CARA)
    cara.hear([encode(ANNS), encode((certificate(FOUNDER, BEN),)), encode(removal(FOUNDER, BEN))], ANN.author)
    own = cara.own_chain
    later = dict(issued_at=int(NOW) + 60, expires=int(NOW) + 900 * DAY)
    for victim, who in ((founder, FOUNDER), (cara, CARA)):
        for peer, issuer in ((ANN, ANN), (BEN, BEN), (EVE, ANN), (FOUNDER, ANN), (ANN, EVE)):
            for above in (ANNS, (certificate(issuer, issuer, claimed=FOUNDER),), ()):
                chain = encode((*above, certificate(issuer, who, **later)))
                victim.hear([chain], peer.author)
                victim.accept(chain, peer.author)
    assert founder.own_chain == b"" and founder.is_member and cara.own_chain == own and cara.is_member
    founder.hear([encode(removal(ANN, CARA)), encode(removal(ANN, FOUNDER))], ANN.author)
    assert founder.admits(CARA.author), "hers is the founder's certificate, whatever others sign for her"


def test_row_57_removals_made_up_by_the_hundred_displace_nobodys_order(roster_of, tmp_path):
    """Eight keys of one member, and an inviter, sign as many removals as they can; then owners remove members."""
    founder = roster_of(FOUNDER)
    dan = identity(50)
    keys = [identity(number) for number in range(60, 68)]
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
    assert decode(next(iter(founder.news(set()).values())), Removal) == removal(FOUNDER, ANN), (
        "told before what others signed"
    )


def test_row_58_a_record_costs_one_signature_check_and_each_forged_one_its_teller(roster_of, monkeypatch, time):
    checked = []
    check = Certificate.verify

    def counted(self, signer):
        checked.append(signer)
        return check(self, signer)

    monkeypatch.setattr(Certificate, "verify", counted)
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)  # no budget grows meanwhile
    founder = roster_of(FOUNDER)
    lies = []
    founder.lied = lambda peer, what: lies.append(peer)
    founder.hear([encode(ANNS)], ANN.author)
    full = [(*ANNS, certificate(ANN, identity(number))) for number in range(10, 600)]
    for _ in range(2):
        for chain in full:
            founder.meet(chain[-1].member, encode(chain))
            founder.hear([encode(chain)], ANN.author)
        assert len(checked) == 1 + 512, "nor one that is known, or for which there is no room"
    told = set()
    for number in range(3):
        made_up = encode((certificate(EVE, identity(1000 + number), claimed=FOUNDER),))
        assert not founder.hear([made_up], EVE.author, told) and not told, "what proves nothing is not remembered"
    assert lies == [EVE.author] * 3, "after three it is left alone"
    assert founder.meet(BEN.author, encode((certificate(FOUNDER, BEN),))) is None, "others have their own"
    time.now += 7 * DAY
    founder.obey()
    assert not founder.book.issued[ANN.author], "whose time is over make room"


def test_row_67_no_member_below_an_inviter_keeps_a_removal_from_a_node(roster_of):
    cara = roster_of(CARA)
    lies = []
    cara.lied = lambda peer, what: lies.append(peer)
    keys = [identity(number) for number in range(60, 63)]
    for key in (BEN, *keys):
        assert cara.meet(key.author, encode((*ANNS, certificate(ANN, key)))) is None
    for number in range(1100):
        cara.hear([encode((*ANNS, certificate(EVE, identity(1000 + number), claimed=ANN)))], keys[number % 3].author)
    assert set(lies) == {key.author for key in keys} and len(lies) == 1100, "the forgers, and nobody else"
    assert cara.admits(BEN.author)
    told = set()
    assert not cara.hear([encode(removal(ANN, BEN))], ANN.author, told) and len(told) == 1
    cara.hear([encode(removal(FOUNDER, keys[0]))], keys[0].author, told)
    assert not any(map(cara.admits, (BEN.author, keys[0].author))), "the founder's is checked whoever brings it"


def test_row_67_what_is_refused_of_one_inviter_holds_up_no_other_inviters_removal(roster_of, monkeypatch):
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)
    ben, told = roster_of(BEN), set()
    monkeypatch.setattr("ftis_node.swarm.roster.NEW_AT_ONCE", 8.0)
    cara = roster_of(CARA)
    appointed = [(certificate(FOUNDER, EVE),), ANNS]
    crowd = [identity(1000 + number) for number in range(200)]
    ben.hear([encode(record) for record in (*appointed, (*ANNS, certificate(ANN, BEN)))], ANN.author)
    for one in crowd:
        ben.hear([encode((*appointed[0], certificate(EVE, one))), encode(removal(EVE, one))], EVE.author)
    ben.hear([encode(removal(ANN, BEN))], ANN.author)
    assert cara.meet(BEN.author, encode((*ANNS, certificate(ANN, BEN)))) is None
    for _ in range(100):
        news = ben.news(told)
        if cara.hear(news.values(), FOUNDER.author):
            told.difference_update(news)
    assert not cara.admits(BEN.author), "and Ben has not used up what is checked for him"
    assert not cara.hear([encode((*ANNS, certificate(ANN, crowd[0])))], FOUNDER.author)


def test_row_68_what_a_budget_left_is_told_again(roster_of, monkeypatch):
    monkeypatch.setattr("ftis_node.swarm.roster.boot_seconds", lambda: 0.0)
    cara = roster_of(CARA)
    inviters = [identity(number) for number in range(60, 64)]
    records = [(certificate(FOUNDER, inviter),) for inviter in inviters]
    records += [(*records[n % 4], certificate(inviters[n % 4], identity(1000 + n))) for n in range(1200)]
    told = set()
    left = [cara.hear([encode(record)], ANN.author, told) for record in records]
    assert len(told) == 1024 == left.index(True) and all(left[1024:]), "so many are checked for one peer"
    assert not any(cara.hear([encode(record)], BEN.author, told) for record in records) and len(told) == len(records)


def test_row_68_what_a_clock_that_is_behind_refuses_is_known_when_it_is_set_right(roster_of, time):
    ben = roster_of(BEN)
    inviter = (certificate(FOUNDER, ANN, issued_at=int(NOW)),)
    invited = (*inviter, certificate(ANN, EVE, issued_at=int(NOW)))
    ben.hear([encode(inviter), encode(invited), encode(removal(ANN, EVE))], ANN.author)
    time.now -= DAY
    cara = roster_of(CARA)
    cara.hear(ben.news(set()).values(), BEN.author)
    assert "future" in str(cara.meet(ANN.author, encode(inviter)))
    cara.hear([encode((certificate(FOUNDER, ANN, issued_at=int(NOW) + 1),))], BEN.author)
    time.now += DAY
    assert cara.meet(ANN.author, encode(inviter)) is None, "and none of the future displaced it"
    assert "removed" in str(cara.meet(EVE.author, encode(invited)))


def test_row_72_what_peers_tell_is_written_with_the_next_orders_and_not_at_each_message(roster_of, tmp_path):
    founder = roster_of(FOUNDER)
    file = tmp_path / FOUNDER.peer_id / "members"
    founder.hear([encode(ANNS)], ANN.author)
    file.unlink()
    for number in range(20):
        founder.hear([encode((*ANNS, certificate(ANN, identity(1000 + number))))], ANN.author)
    assert not file.exists(), "what the founder signed was written at once"
    founder.obey()
    founder.hear([encode((*ANNS, certificate(ANN, BEN)))], ANN.author)
    assert roster_of(FOUNDER).admits(identity(1019).author) and not roster_of(FOUNDER).admits(BEN.author)
    founder.redeem(invitation(), CARA.author)
    assert roster_of(FOUNDER).admits(CARA.author) and roster_of(FOUNDER).admits(BEN.author)


def test_row_72_a_handshake_that_changes_nothing_writes_nothing(roster_of):
    ticket = invitation()
    founder = roster_of(FOUNDER)
    ann = roster_of(ANN, ticket)
    joined(founder, ann, ticket, ANN)
    founder._file.unlink()
    chain = ann.own_chain
    for shown in (b"", chain):
        assert founder.redeem(ticket, ANN.author) == chain and founder.renewal(ANN.author, shown) in (b"", chain)
    assert not founder._file.exists()
    founder.redeem(invitation(), BEN.author)
    assert founder._file.exists()


def test_an_order_that_cannot_be_read_stays_and_keeps_no_other_from_being_obeyed(roster_of, tmp_path, caplog):
    founder = roster_of(FOUNDER)
    founder.hear([encode(ANNS)], ANN.author)
    order(tmp_path / FOUNDER.peer_id, removal(FOUNDER, ANN))
    (unreadable := tmp_path / FOUNDER.peer_id / "orders" / "-.removal").mkdir()
    for _ in range(2):
        founder.obey()
    assert not founder.admits(ANN.author) and unreadable.exists()
    assert sum("cannot be carried out yet" in message for message in caplog.messages) == 1


def test_a_damaged_list_of_members_says_what_to_do(roster_of, tmp_path):
    roster_of(ANN).save()
    assert read_book(tmp_path / ANN.peer_id / "members") is not None
    (tmp_path / ANN.peer_id / "members").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read"):
        roster_of(ANN)
