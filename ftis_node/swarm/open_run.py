"""Who may take part in an open run: everybody. A private run has a `swarm.roster.Roster` in its place."""

from collections.abc import Callable, Iterable

from ftis_node.swarm.ftis_pb2 import Handshake


class OpenRun:
    """The members of a run that has none. What a roster would know, show or take is empty here.

    All peers are named by their 38-byte peer ids.
    """

    private = False  # whether only members may take part

    def __init__(self) -> None:
        self.lied: Callable[[bytes, str], None] = lambda peer, what: None  # called if a peer shows what is forged

    @property
    def own_chain(self) -> bytes:
        """What this node shows of its membership."""
        return b""

    @property
    def shut_out(self) -> str:
        """Why this node may not take part; empty if it may."""
        return ""

    @property
    def may_invite(self) -> bool:
        """Whether this node may invite others now."""
        return True

    def admits(self, peer: bytes) -> bool:
        """Whether a key may take part."""
        return True

    def has_left(self, peer: bytes) -> bool:
        """Whether the peer was a member and is none any more."""
        return False

    def meet(self, peer: bytes, shown: bytes) -> str:
        """Take what a peer shows of itself, an encoded chain of certificates; return why it is refused, or ""."""
        return ""

    def at_the_door(self, request: Handshake, answer: Handshake, peer: bytes) -> str:
        """Return why a caller is refused, or "". A member's new certificate goes into the answer."""
        return ""

    def removal_for(self, peer: bytes) -> bytes:
        """The removal that ended a peer's membership; else nothing."""
        return b""

    def ticket_for(self, peer: bytes) -> bytes:
        """The invitation to present to its inviter; else nothing."""
        return b""

    def due_at(self, peer: bytes) -> bool:
        """Whether this node may renew its certificate at this peer now."""
        return False

    def accept(self, granted: bytes, peer: bytes) -> None:
        """Take the certificate for this node in a peer's answer, if this node asked for it."""

    def news(self, told: set[bytes]) -> dict[bytes, bytes]:
        """Members' records that a peer was not told yet, by signature; they count as `told` from now on."""
        return {}

    def hear(self, records: Iterable[bytes], peer: bytes, told: set[bytes] | None = None) -> bool:
        """Take members' records that a peer tells. Return whether a budget left some, which are to be told again."""
        return False

    def obey(self) -> None:
        """Carry out the orders of this node's owner, and save what peers told; see `Roster.obey`."""
