"""Invitations: a run, some addresses of the inviter and an expiry in one line of text, signed by the inviter.

An invitation to an open run saves typing, and shows who invites. One to a private run is also a ticket: the first key
that presents it to the inviter gets a certificate (`swarm.roster`). Until then, whoever has the line may use it.
"""

import base64
import binascii
import os
from collections.abc import Sequence

import msgspec

from ftis_node.errors import UsageError
from ftis_node.swarm.addresses import is_multiaddr, is_plain
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.signed import Malformed, Signed, decode

PREFIX = "ftis:"
VERSION = 1
ADDRESSES_MAX = 3
CHARACTERS_MAX = 2048
NAME_MAX = 64
NONCE_BYTES = 16
_ASK = "Ask for a new one; the inviter makes it with `ftis-node invite`."


class Invitation(Signed, frozen=True, kw_only=True):
    """inviter: 38-byte peer id. issued_at, expires: unix seconds. name: of the inviter, as it calls itself.

    dial: one to three multiaddrs without ``/p2p/INVITER``. nonce: 16 random bytes for a private run, else empty.
    seconds, invites: of the certificate that a private run gives for it.
    """

    version: int = VERSION
    inviter: bytes
    issued_at: int
    expires: int
    dial: tuple[str, ...]
    name: str = ""
    nonce: bytes = b""
    seconds: int = 0
    invites: bool = False

    @property
    def private(self) -> bool:
        """Whether it is for a private run."""
        return bool(self.nonce)

    @property
    def addresses(self) -> list[str]:
        """Whole multiaddrs of the inviter, with its peer id."""
        return [f"{address}/p2p/{peer_id(self.inviter)}" for address in self.dial]

    @property
    def text(self) -> str:
        """The line that the inviter passes on, which begins with ftis: and which `read_line` reads."""
        return PREFIX + base64.urlsafe_b64encode(self.encoded).decode().rstrip("=")


class _Beginning(msgspec.Struct, array_like=True):
    """The fields that invitations of all versions begin with, so that a later one can be named as such."""

    run_id: bytes
    signature: bytes
    version: int


def invite(
    identity: Identity,
    run_id: bytes,
    addresses: Sequence[str],
    *,
    now: float,
    seconds: float,
    name: str = "",
    membership: float = 0,
    invites: bool = False,
) -> Invitation:
    """Sign an invitation. Nothing is stored: the inviter knows it again by its own signature.

    Args:
        addresses: multiaddrs of this identity, the best first; the first three that are plain (`is_plain`) are taken.
            If there are none, the invitation has no address, which `read` refuses: the caller looks at `dial`.
        now: unix seconds. seconds: how long it is valid.
        membership: for a private run, the seconds of the certificate; 0: the run is open.
        invites: for a private run, whether the new member may invite others.
    """
    own = f"/p2p/{identity.peer_id}"
    given = (text for text in addresses if text.endswith(own) and is_plain(text))
    dial = tuple(text.removesuffix(own) for text in given)[:ADDRESSES_MAX]
    return Invitation(
        run_id=run_id,
        inviter=identity.author,
        issued_at=int(now),
        expires=int(now + seconds),
        dial=dial,
        name=name[:NAME_MAX],
        nonce=os.urandom(NONCE_BYTES) if membership else b"",
        seconds=int(membership),
        invites=invites,
    ).signed_by(identity)


def read(data: bytes, now: float) -> Invitation:
    """The invitation in these bytes. Whether it was redeemed or withdrawn, only its inviter's roster knows.

    Args:
        now: unix seconds; at 0 none has expired.

    Raises:
        UsageError: it is none, is not the inviter's, or has expired.
    """
    try:
        version = decode(data, _Beginning, CHARACTERS_MAX, "an invitation").version
        if version != VERSION:
            raise UsageError(f"The invitation is of version {version}, which is not known here.", "Upgrade ftis-node.")
        found = decode(data, Invitation, CHARACTERS_MAX, "an invitation")
    except Malformed:
        raise UsageError("That is no whole invitation.", "Copy the whole line; it begins with ftis:") from None
    sound = len(found.nonce) in (0, NONCE_BYTES) and len(found.name) <= NAME_MAX
    sound &= 0 < len(found.dial) <= ADDRESSES_MAX and all(map(is_multiaddr, found.dial))
    if not sound or not found.verify(found.inviter):
        raise UsageError("The invitation was changed on its way: its signature is wrong.", "Copy the whole line again.")
    if found.expires <= now:
        raise UsageError("The invitation has expired.", _ASK)
    return found


def read_line(text: str, now: float) -> Invitation:
    """The invitation in a line of text; white space around and within it is ignored. now: as for `read`.

    Raises:
        UsageError: as `read` does; or it names an address that only this node's owner may name.
    """
    compact = "".join(text[: 2 * CHARACTERS_MAX].split())
    body = compact.removeprefix(PREFIX)
    if body == compact or len(compact) > CHARACTERS_MAX:
        raise UsageError("An invitation begins with ftis: and is one line.", _ASK)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    found = read(data, now)
    bold = [text for text in found.addresses if not is_plain(text)]
    if bold:
        raise UsageError(
            f"The invitation names {bold[0]!a}, which only this node's owner may name.",
            "Name it with --peers, without the invitation, if you know whose it is; or ask for another invitation.",
        )
    return found
