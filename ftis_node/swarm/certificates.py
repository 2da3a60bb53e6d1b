"""Certificates of a private run: signed memberships of one key each, by the founder or an inviter that it appointed.

The run names the founder's key, so its id commits to it. A certificate binds a member's peer id, which libp2p's
connections authenticate, to the run until it expires. It is no secret: without the member's private key it opens
nothing. The founder issues certificates; one that `invites` makes its member an inviter, whose certificates count while
its own does. There is nothing below: what an inviter issues never makes an inviter.

A removal is signed by the founder, for any member, or by an inviter, for what it issued itself. It is for good: the key
gets no other certificate of that signer.

Signed are a context of its own for each kind of message and the msgpack encoding of its fields (Ed25519, RFC 8032), so
no signature of one kind passes for another.
"""

import time
from typing import Any, TypeVar

import msgspec

from ftis_node.swarm import signed
from ftis_node.swarm.identity import is_author, peer_id
from ftis_node.swarm.limits import Bounded
from ftis_node.swarm.signed import Signed

KEYS_MAX = 4096  # that redeemed an invitation
CHAIN_MAX = 2  # certificates in a chain
RECORD_BYTES_MAX = 2048  # of a chain or a removal
AHEAD = 3 * 3600  # seconds by which an issuer's clock may be ahead
MEMBERS_ONLY = "the run is private; ask a member for an invitation"
NOT_APPOINTED = "the founder has not appointed the member that invited it; ask the founder for a new invitation"


class Record(Signed, frozen=True, kw_only=True):
    """What an issuer says of a member. member, issuer: 38-byte peer ids. issued_at: unix seconds."""

    member: bytes
    issuer: bytes
    issued_at: int


class Certificate(Record, frozen=True, kw_only=True):
    """The membership of one key. expires: unix seconds.

    invites: whether the founder, if it is the issuer, appoints the member as an inviter.
    """

    expires: int
    invites: bool = False


class Removal(Record, frozen=True, kw_only=True):
    """The end of a membership."""


Chain = tuple[Certificate, ...]
"""As it is sent: the founder's certificate for a member; or for an inviter, and then that inviter's for a member."""

Kind = TypeVar("Kind", Chain, Removal)


def encode(record: Chain | Removal) -> bytes:
    """A record as it is sent."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """Read a record; signatures are not checked. Raises Malformed."""
    return signed.decode(data, kind, RECORD_BYTES_MAX, "a record of a private run")


def day(at: int) -> str:
    """The day of a time in unix seconds, like 2026-11-30, in this machine's time zone. The time may be any number, for
    its signer chose it: one before 1970 counts as 1970, and one far ahead as the year 36812."""
    return time.strftime("%Y-%m-%d", time.localtime(min(max(0, at), 2**40)))


class MembersBook(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a node knows of its private run, and keeps on disk. All signatures in it hold: `Roster` checks each before
    it puts a record here. Only the node writes the file; commands leave orders for it (`Roster.obey`).

    own: this node's chain; empty before it has one. issued, ended: by issuer and member, the latest certificate and
    removal. redeemed: the key that used each invitation, by nonce. voided: invitations issued before this time, in unix
    seconds, are refused.
    """

    run_id: bytes
    founder: bytes
    own: Chain = ()
    issued: dict[bytes, dict[bytes, Certificate]] = {}
    ended: dict[bytes, dict[bytes, Removal]] = {}
    redeemed: dict[bytes, bytes] = {}
    voided: int = 0

    def __post_init__(self) -> None:
        redeemed = Bounded[bytes, bytes](KEYS_MAX)
        redeemed.update(self.redeemed)  # no more than a file of this node's had
        self.redeemed = redeemed

    def kept(self, record: Certificate | Removal) -> dict[bytes, dict[bytes, Any]]:
        """Where records of this kind are, by issuer and member; the caller may change it."""
        if isinstance(record, Removal):
            return self.ended
        return self.issued

    @property
    def _founders(self) -> dict[bytes, Certificate]:
        """The founder's certificates, by member: only these make inviters."""
        return self.issued.get(self.founder, {})

    def issuers_of(self, key: bytes) -> list[bytes]:
        """Whoever has issued a certificate or a removal of this key that is kept; who did both is there twice."""
        return [issuer for trees in (self.issued, self.ended) for issuer, tree in trees.items() if key in tree]

    def as_sent(self, record: Certificate | Removal) -> bytes:
        """A record as members tell it, in bytes: a certificate with that of its issuer."""
        if isinstance(record, Certificate):
            return encode(self.chain(record))
        return encode(record)

    @property
    def keys(self) -> list[bytes]:
        """The founder's key, and all that have a certificate, which may count no more."""
        members = (member for tree in self.issued.values() for member in tree)
        return list(dict.fromkeys((self.founder, *members)))

    def chain(self, certificate: Certificate) -> Chain:
        """A certificate with that of its issuer, as it is sent; alone if the founder issued it."""
        above = self._founders.get(certificate.issuer)
        if above is None:
            return (certificate,)
        return above, certificate

    def appointed(self, issuer: bytes) -> bool:
        """Whether this key is the founder's, or ever was an inviter's."""
        if issuer == self.founder:
            return True
        above = self._founders.get(issuer)
        return above is not None and above.invites

    def removal_of(self, member: bytes, issuer: bytes) -> Removal | None:
        """The removal that ends what this issuer gives to this member: the founder's of the member or of the issuer, or
        the issuer's of the member; None if there is none of them."""
        by_founder = self.ended.get(self.founder, {})
        by_issuer = self.ended.get(issuer, {})
        return by_founder.get(member) or by_founder.get(issuer) or by_issuer.get(member)

    def why_misshapen(self, chain: Chain, member: bytes) -> str:
        """Return why this cannot be a chain of the run for this key, or "" if it can. Signatures, times and removals
        are not checked."""
        if not chain:
            return MEMBERS_ONLY
        if len(chain) > CHAIN_MAX:
            return NOT_APPOINTED
        issuer = self.founder
        for certificate in chain:
            if certificate.run_id != self.run_id:
                return "its certificate is for another run"
            if certificate.issuer != issuer or certificate.member == self.founder or not is_author(certificate.member):
                return "its certificates make no chain from the run's founder"
            issuer = certificate.member
        if member != issuer:
            return "its certificate is for another key"
        return ""

    def why_refused(self, certificate: Certificate | None, now: float) -> str:
        """Return why a certificate does not make its key a member now, in unix seconds, or "". None is no certificate,
        and so no member. Signatures are not checked."""
        if certificate is None:
            return MEMBERS_ONLY
        removal = self.removal_of(certificate.member, certificate.issuer)
        if removal is not None:
            return f"{peer_id(removal.member)} was removed by {peer_id(removal.issuer)} on {day(removal.issued_at)}"
        if not self.appointed(certificate.issuer):
            return NOT_APPOINTED
        for one in self.chain(certificate):
            if one.expires <= now:
                return f"the certificate of {peer_id(one.member)} has expired"
            if one.issued_at > now + AHEAD:
                return f"the certificate of {peer_id(one.member)} is of the future"
        return ""

    def best(self, member: bytes, now: float) -> Certificate | None:
        """A certificate that makes this key a member now (unix seconds); else one that does not, or None if there is
        none, as for the founder. The founder's certificates come first."""
        trees = (self._founders, *self.issued.values())
        held = [tree[member] for tree in trees if member in tree]
        for certificate in held:
            if not self.why_refused(certificate, now):
                return certificate
        return next(iter(held), None)

    def why_no_member(self, key: bytes, now: float) -> str:
        """Return why this key is no member's, by any certificate, or "" if it is."""
        if key == self.founder:
            return ""
        return self.why_refused(self.best(key, now), now)

    def has_left(self, key: bytes, now: float) -> bool:
        """Whether this key was a member's, as far as is known, and is none any more: it was removed, or has expired."""
        if not self.issuers_of(key):
            return False
        return self.why_no_member(key, now) != ""

    def may_invite(self, key: bytes, now: float) -> bool:
        """Whether this key is the founder's, or an inviter's now."""
        if not self.appointed(key):
            return False
        return key == self.founder or not self.why_refused(self._founders.get(key), now)
