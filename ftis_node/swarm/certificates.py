"""Certificates of a private run: signed memberships of one key each, in a chain that begins at the run's founder.

The run names the founder's key, so its id commits to it. A certificate binds a member's peer id, which libp2p's
connections authenticate, to the run until it expires. It is no secret: without the member's private key it opens
nothing. Its issuer is the founder, or a member whose own certificate allows inviting, so a chain of at most `LONGEST`
certificates leads to the founder. A removal is signed by one who stands above the member in that chain. It also ends
what the removed member has issued. Only its signer can undo it, by a later certificate of its own; else a member below
would issue another one.

Signed are a context of its own for each kind of message and the msgpack encoding of its fields (Ed25519, RFC 8032), so
no signature of one kind passes for another.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import lru_cache
from typing import Self, TypeVar

import msgspec

from ftis_node.errors import FtisError
from ftis_node.swarm.identity import SIGNATURE_BYTES, Identity, is_author, peer_id, verify

LONGEST = 4  # certificates in a chain
RECORD_BYTES_MAX = 2048  # of a chain or a removal
DAY = 86400
AHEAD = 3 * 3600  # seconds by which an issuer's clock may be ahead


class RecordError(FtisError):
    """Bytes that are no record of a private run."""


class Signed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """Fields with an Ed25519 signature. run_id: 16 bytes."""

    run_id: bytes
    signature: bytes = b""

    @classmethod
    def context(cls) -> bytes:
        """What is signed before the fields."""
        return f"ftis/{cls.__name__.lower()}/1".encode()

    def signed_by(self, identity: Identity) -> Self:
        """The same with this identity's signature."""
        return msgspec.structs.replace(self, signature=identity.sign(self._message()))

    def verify(self, signer: bytes) -> bool:
        """Whether the signature is that of `signer`, a 38-byte peer id."""
        return len(self.signature) == SIGNATURE_BYTES and verify(signer, self._message(), self.signature)

    def _message(self) -> bytes:
        return self.context() + msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))


class Certificate(Signed, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """The membership of one key. member, issuer: 38-byte peer ids. issued_at, expires: unix seconds.

    invites: whether the member may invite others.
    """

    member: bytes
    issuer: bytes
    issued_at: int
    expires: int
    invites: bool = False


class Removal(Signed, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a membership, and of all that it issued. member, remover: 38-byte peer ids. at: unix seconds."""

    member: bytes
    remover: bytes
    at: int


Chain = tuple[Certificate, ...]
"""The founder's certificate for a member, that member's for the next, and so on; empty for the founder."""

Kind = TypeVar("Kind", Chain, Removal)


def encode(record: Chain | Removal) -> bytes:
    """A record as it is sent and kept."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """Read a record; signatures are not checked. Raises RecordError."""
    if len(data) > RECORD_BYTES_MAX:
        raise RecordError(f"a record of a private run has more than {RECORD_BYTES_MAX} bytes")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"no {getattr(kind, '__name__', 'chain').lower()}: {error}") from None


def why_refused(
    chain: Chain, peer: bytes, *, run_id: bytes, founder: bytes, now: float, removals: Collection[Removal] = ()
) -> str | None:
    """Return why this chain does not make `peer` a member, or None if it does.

    Args:
        peer, founder: 38-byte peer ids. now: unix seconds.
        removals: those whose signatures hold.
    """
    if peer == founder:
        return None
    if not chain:
        return "it shows no certificate"
    if len(chain) > LONGEST:
        return f"its chain has more than {LONGEST} certificates"
    issuer = founder
    for certificate in chain:
        if certificate.run_id != run_id:
            return "its certificate is for another run"
        if certificate.issuer != issuer or not is_author(certificate.member):
            return "its certificates make no chain from the run's founder"
        issuer = certificate.member
    if issuer != peer:
        return "its certificate is for another key"
    if (removal := removal_of(chain, removals)) is not None:
        day = time.strftime("%Y-%m-%d", time.localtime(removal.at))
        return f"{peer_id(removal.member)} was removed by {peer_id(removal.remover)} on {day}"
    for certificate in chain:
        if certificate.expires <= now:
            return f"the certificate of {peer_id(certificate.member)} has expired"
        if certificate.issued_at > now + AHEAD:
            return f"the certificate of {peer_id(certificate.member)} is of the future"
    if not all(certificate.invites for certificate in chain[:-1]):
        return "a member invited it that may not invite"
    if not _genuine(chain):
        return "a signature in its certificates is wrong"
    return None


def removal_of(chain: Chain, removals: Collection[Removal]) -> Removal | None:
    """The removal that ends a membership: by one above in its chain, and, if by the issuer, not followed by a later
    certificate. Signatures are not checked."""
    above = [certificate.issuer for certificate in chain]
    for place, certificate in enumerate(chain):
        for removal in removals:
            if removal.member != certificate.member or removal.remover not in above[: place + 1]:
                continue
            if removal.remover != certificate.issuer or removal.at >= certificate.issued_at:
                return removal
    return None


@lru_cache(maxsize=2048)
def _genuine(chain: Chain) -> bool:
    return all(certificate.verify(certificate.issuer) for certificate in chain)


def ends(chain: Chain) -> int:
    """When a chain expires, in unix seconds: with the first of its certificates. 0 for an empty one."""
    return min((certificate.expires for certificate in chain), default=0)


def may_invite(chain: Chain, own: bytes, founder: bytes) -> bool:
    """Whether the member of a valid chain may issue certificates."""
    return own == founder or (0 < len(chain) < LONGEST and chain[-1].invites)
