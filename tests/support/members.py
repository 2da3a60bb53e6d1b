"""Members of a private run: what they sign, and what their owners leave to the daemon."""

from pathlib import Path
from typing import Any

from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm.certificates import Certificate, Chain, Removal, encode
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation, invite
from ftis_node.swarm.roster import Roster
from tests.support.swarm import identity, make_run

FOUNDER, ANN, BEN, CARA, EVE = (identity(number) for number in range(1, 6))
PRIVATE = make_run(founder=FOUNDER.peer_id)
DAY = 86400
NOW = 1_760_000_000.0


def certificate(signer: Identity, who: Identity, claimed: Identity | None = None, **changes: Any) -> Certificate:
    """A certificate of a week, of its signer or of a claimed issuer; what changes is changed before it is signed."""
    fields = {
        "run_id": PRIVATE.id,
        "member": who.author,
        "issuer": (claimed or signer).author,
        "issued_at": int(NOW) - DAY,
        "expires": int(NOW) + 6 * DAY,
        "invites": True,
    }
    return Certificate(**fields | changes).signed_by(signer)


def removal(remover: Identity, who: Identity, at: float = NOW) -> Removal:
    return Removal(
        run_id=PRIVATE.id,
        member=who.author,
        issuer=remover.author,
        issued_at=int(at),
    ).signed_by(remover)


def lasting(*signers: tuple[Identity, Identity], **changes: Any) -> Chain:
    """Certificates that are valid now."""
    now = int(unix_seconds())
    times = {"issued_at": now - DAY, "expires": now + DAY} | changes
    return tuple(certificate(issuer, who, **times) for issuer, who in signers)


ANNS = (certificate(FOUNDER, ANN),)
BENS = (*ANNS, certificate(ANN, BEN))
ADDRESSES = [f"/ip4/8.8.4.{number}/tcp/4001/p2p/{FOUNDER.peer_id}" for number in range(5)]


def invitation(who: Identity = FOUNDER, **changes: Any) -> Invitation:
    options = {"now": NOW, "seconds": DAY, "membership": 30 * DAY}
    addresses = [address.replace(FOUNDER.peer_id, who.peer_id) for address in ADDRESSES]
    return invite(who, PRIVATE.id, addresses, **options | changes)


def tell(roster: Roster, teller: Identity, *records: Chain | Removal, known: set[bytes] | None = None) -> bool:
    """A peer shows a node these records; return whether the node leaves some of them for later.

    known: signatures that the peer is known to have; those of the records that hold are added.
    """
    return roster.hear([encode(record) for record in records], teller.author, known)


def order(home: Path, *removed: Removal):
    """What `ftis-node remove` leaves to the daemon."""
    orders = home / "orders"
    orders.mkdir(exist_ok=True)
    for number, record in enumerate(removed):
        (orders / f"{number}.removal").write_bytes(encode(record))
