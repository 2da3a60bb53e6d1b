"""Places: where a member of a private run says that it may be dialled in its local networks.

A member signs its place and members pass it on, so that two that were never connected can meet: nobody's word about
another is taken (`local_networks`). A public address needs none, for any peer may name it.
"""

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm.addresses import varied
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.limits import Budgets
from ftis_node.swarm.open_run import OpenRun
from ftis_node.swarm.signed import Malformed, Signed, decode

DIAL_MAX = 4  # addresses of a place
PLACE_BYTES_MAX = 512
KEPT_MAX = 256  # places
CHECKS_A_SECOND = 1.0  # of signatures, of each peer that passes places on
CHECKS_AT_ONCE = 64.0


class Place(Signed, frozen=True, kw_only=True):
    """member: 38-byte peer id. issued_at: unix seconds. dial: multiaddrs without ``/p2p/MEMBER``."""

    member: bytes
    issued_at: int
    dial: tuple[str, ...]

    @property
    def addresses(self) -> list[str]:
        """Whole multiaddrs of the member."""
        return [f"{text}/p2p/{peer_id(self.member)}" for text in self.dial[:DIAL_MAX]]


@dataclass
class Places:
    """This node's own place, and the newest that it knows of each other member; none in an open run.

    view: the active view, fewer than 256 peers; their places never make room for others.
    """

    run_id: bytes
    identity: Identity
    roster: OpenRun
    view: Container[bytes]

    def __post_init__(self) -> None:
        self._checks = Budgets(boot_seconds, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._kept = dict[bytes, Place]()  # by member
        self._own: Place | None = None

    def signed_own(self, addresses: Sequence[str]) -> bytes:
        """This node's place as it is sent: it may be dialled at these addresses. It is signed anew only if they have
        changed, and is then of a later second than the one before, whatever the clock says."""
        suffix = f"/p2p/{self.identity.peer_id}"
        dial = tuple(text.removesuffix(suffix) for text in varied(addresses, DIAL_MAX))
        if self._own is None or self._own.dial != dial:
            at = int(unix_seconds())
            if self._own is not None:
                at = max(at, self._own.issued_at + 1)
            made = Place(run_id=self.run_id, member=self.identity.author, issued_at=at, dial=dial)
            self._own = made.signed_by(self.identity)
        return self._own.encoded

    def of(self, member: bytes) -> Place | None:
        """The newest place of a member that is known; None: none is."""
        return self._kept.get(member)

    def hear(self, places: Sequence[bytes], most: int, peer: bytes) -> list[Place]:
        """Take places that a peer sends; return those that are new, and prove to be a member's own word.

        Others are left out without a word: malformed ones, and those above the peer's budget of signature checks.

        Args:
            most: so many are read, the first ones.
        """
        found = []
        for data in islice(places, most):
            with suppress(Malformed):
                place = decode(data, Place, PLACE_BYTES_MAX, "a member's place")
                if self._is_new(place, peer) and self._checks.take(peer) and place.verify(place.member):
                    if place.member not in self._kept and len(self._kept) >= KEPT_MAX:  # the oldest makes room
                        del self._kept[next(member for member in self._kept if member not in self.view)]
                    self._kept[place.member] = place
                    found.append(place)
        return found

    def _is_new(self, place: Place, peer: bytes) -> bool:
        """Whether a place may be news of another member, so that its signature is to be checked. Other peers pass on
        newer ones only. A member's own word to this node counts after its clock was set back, too."""
        if not self.roster.private or not self.roster.admits(place.member):
            return False
        if place.run_id != self.run_id or place.member == self.identity.author:
            return False
        kept = self._kept.get(place.member)
        if kept is None:
            return True
        if place.member == peer:
            return place != kept
        return place.issued_at > kept.issued_at
