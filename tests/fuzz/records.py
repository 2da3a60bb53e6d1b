"""Targets that are no packets or messages: records of private runs, invitations, mDNS, replies of the jail, GGUF."""

import base64
import ipaddress
import random
from typing import Any

import msgpack
from zeroconf import ServiceInfo

from ftis_node.errors import UsageError
from ftis_node.policy.gguf.folder import blocks
from ftis_node.policy.gguf.header import UnusableFile, read_header
from ftis_node.policy.gguf.words import LISTS
from ftis_node.swarm.addresses import is_plain
from ftis_node.swarm.certificates import Certificate, Removal, encode
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import PREFIX, Invitation, invite, read, read_line
from ftis_node.swarm.lan import SERVICE, TASK_MAX, read_node
from ftis_node.swarm.roster import Roster
from ftis_node.tasks.jail import read_reply
from tests.fuzz.changes import raw
from tests.fuzz.packed import repacked, signed_again
from tests.fuzz.world import NOW, PEERS, RUN, stopped_clock

FOUNDER, INVITER, OWN, TELLER = PEERS[:4]
INTERFACE = ipaddress.IPv4Interface("192.168.7.2/24")
LITERALS = (int, float, complex, str, bytes, bool, type(None), type(...))


def read_record(data: bytes):
    """A record that a member tells, shows of itself, or gives unasked."""
    with stopped_clock():
        roster = Roster(RUN.id, FOUNDER.peer_id, OWN)
        roster.hear([data], TELLER.author)
        why = roster.meet(TELLER.author, data)
        assert why.isprintable(), "a refusal does not print"
        roster.accept(data, FOUNDER.author)
        admitted = {peer.author for peer in PEERS if roster.admits(peer.author)}
    book = roster.book
    assert not book.own, "it took a certificate that it did not ask for"
    for part in (book.issued, book.ended):
        for issuer, records in part.items():
            for member, record in records.items():
                assert (record.issuer, record.member, record.run_id) == (issuer, member, RUN.id), "it is of another"
                assert record.verify(issuer) and member != FOUNDER.author, "nobody who may has signed it"
    members = {FOUNDER.author}
    for issuer, records in book.issued.items():
        if book.appointed(issuer):
            members |= records.keys()
    assert admitted <= members, "somebody is a member without a certificate"


def read_invitation(data: bytes):
    """A line that somebody pastes."""
    try:
        found = read_line(data.decode("utf-8", "ignore"), NOW)
    except UsageError as error:
        assert str(error).isprintable(), "an error does not print"
        return
    assert read(found.encoded, NOW) == found == read_line(found.text, NOW), "it does not read back"
    assert found.verify(found.inviter), "its inviter did not sign it"
    assert all(map(is_plain, found.addresses)), "it names what only an owner may name"


def read_mdns(data: bytes):
    """What a neighbour tells of itself: its name, its TXT record, its addresses and its port."""
    try:
        name, text, addresses, port = msgpack.unpackb(data)
        info = ServiceInfo(SERVICE, f"{name}.{SERVICE}", properties=text, addresses=addresses, port=port)
        properties = info.properties
        parsed = info.parsed_addresses()
    except Exception:  # the node's own caller takes whatever zeroconf raises
        return
    try:
        found = read_node(str(name), properties, parsed, port, INTERFACE)
    except ValueError:
        return
    assert found.task.isprintable() and len(found.task) <= TASK_MAX, "a task does not print, or is long"
    assert len(found.addresses) <= 4, "many addresses"
    for address in found.addresses:
        assert is_plain(address), "an address that no peer may name"
        host = ipaddress.ip_address(address.split("/")[2])
        assert host in INTERFACE.network, "an address of another network"


def read_gguf(data: bytes):
    """The header of a file of weights from somebody's page."""
    try:
        header = read_header(data, blocks(), LISTS)
    except UnusableFile as error:
        assert str(error).isprintable(), "an error does not print"
        return
    assert sum(one.size for one in header.tensors.values()) <= len(data), "tensors are larger than their file"


def read_from_jail(data: bytes):
    """A line that an answer's process writes to the one that has the tests, which ends on any error."""
    try:
        _, value = read_reply(data.decode("utf-8", "ignore"))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    parts = [value]
    for part in parts:  # grows meanwhile
        if isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, list | tuple | set):
            parts += part
        else:
            assert type(part) in LITERALS, f"{type(part)} is no literal"


# --- what they begin with ---------------------------------------------------------------------------------------------


def record_seeds() -> list[bytes]:
    def certificate(member: Identity, issuer: Identity, invites: bool = False) -> Certificate:
        who = {"run_id": RUN.id, "member": member.author, "issuer": issuer.author}
        return Certificate(**who, issued_at=NOW - 9, expires=NOW + 9999, invites=invites).signed_by(issuer)

    appointed = certificate(INVITER, FOUNDER, invites=True)
    chains = [(appointed,)]
    for peer in (TELLER, OWN):
        chains.append((certificate(peer, FOUNDER),))
        chains.append((appointed, certificate(peer, INVITER)))
    removals = []
    for issuer in (FOUNDER, INVITER):
        made = Removal(
            run_id=RUN.id,
            member=TELLER.author,
            issuer=issuer.author,
            issued_at=NOW,
        )
        removals.append(made.signed_by(issuer))
    return [encode(record) for record in (*chains, *removals)]


def invitation_seeds() -> list[bytes]:
    addresses = [f"/ip4/192.168.7.9/tcp/4001/p2p/{FOUNDER.peer_id}", f"/ip6/2606::1/tcp/443/p2p/{FOUNDER.peer_id}"]
    kinds = ({"name": "a friend"}, {"membership": 9999, "invites": True})
    made = []
    for kind in kinds:
        invitation = invite(FOUNDER, RUN.id, addresses, now=NOW - 9, seconds=999, **kind)
        made.append(invitation.text.encode())
    return made


def mdns_seeds() -> list[bytes]:
    pairs = (b"run=" + RUN.id.hex().encode(), b"task=gsm8k", b"protocol=4")
    addresses = [ipaddress.ip_address(text).packed for text in ("192.168.7.9", "127.0.0.1", "10.0.0.1", "::1")]
    text = b"".join(bytes([len(pair)]) + pair for pair in pairs)
    return [msgpack.packb([peer.peer_id, text, addresses, 4001]) for peer in PEERS[:2]]


def jail_seeds() -> list[bytes]:
    values = (1, -2.5, 1j, "a\n'b", b"\xff", [1, (2, {3})], {"a": [None, True]}, 10**400, ...)
    replies = [repr(("", value)) for value in values]
    return [text.encode() for text in (*replies, "('ValueError', 0)", "('', 1e999)")]


def gguf_seeds() -> list[bytes]:
    return [b"GGUF\3\0\0\0" + bytes(16)]


# --- how they change --------------------------------------------------------------------------------------------------


_certificate = signed_again(Certificate, "issuer")
_removal = signed_again(Removal, "issuer")
_invitation = repacked(signed_again(Invitation, "inviter"))


def _record(fields: Any, rng: random.Random) -> Any:
    """Some field of each certificate of a chain changed, or of a removal."""
    if isinstance(fields, list) and fields and isinstance(fields[0], list):
        return [_certificate(one, rng) for one in fields]
    return _removal(fields, rng)


change_record = repacked(_record)


def change_invitation(data: bytes, rng: random.Random) -> bytes:
    body = data.removeprefix(PREFIX.encode())
    try:
        packed = base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4))
    except ValueError:
        return raw(data, rng)
    changed = base64.urlsafe_b64encode(_invitation(packed, rng))
    return PREFIX.encode() + changed.rstrip(b"=")
