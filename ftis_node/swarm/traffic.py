"""Payload bytes, per peer and in total, and what of them a node may send."""

from collections import Counter
from collections.abc import Container

from ftis_node.host.clocks import boot_seconds
from ftis_node.swarm.identity import OfPeer
from ftis_node.swarm.limits import Budgets

PEERS_MAX = 1024
# Bytes that one peer's questions may draw, packets aside. At once: about a full table of announcements.
ANSWERS_A_SECOND = float(64 << 10)
ANSWERS_AT_ONCE = float(1 << 20)
# All answers together have one byte in so many of the upload limit, and do not wait; packets wait for what is left.
ANSWERS_PART = 4
STRANGERS_PART = 2  # of the answers, for all peers without a record together: identities are free
UNLIMITED = 1e12  # bytes a second
ALL = b""


class Traffic:
    """Received and sent RPC payloads in bytes, without libp2p's own framing; and the budgets of what is sent.

    received, sent: by 38-byte peer id, since the start of the process; under `ALL` those of peers that are forgotten.
    Whoever reads a message adds it to `received`.
    """

    def __init__(self, recorded: OfPeer = lambda peer: False) -> None:
        """
        Args:
            recorded: returns whether a peer has a record as an author.
        """
        self.received = Counter[bytes]()
        self.sent = Counter[bytes]()
        self.recorded = recorded
        self._each = Budgets(boot_seconds, ANSWERS_A_SECOND, ANSWERS_AT_ONCE)
        self.limit(0.0)

    @property
    def bytes_in(self) -> int:
        """All received payload since the start, in bytes."""
        return self.received.total()

    @property
    def bytes_out(self) -> int:
        """All sent payload since the start, in bytes."""
        return self.sent.total()

    def limit(self, upload_bytes: float) -> None:
        """Send at most so many bytes of payload a second from now on; 0: no limit. The budgets begin full."""
        rate = upload_bytes or UNLIMITED
        self._upload = Budgets(boot_seconds, rate, rate)
        self._answers = Budgets(boot_seconds, rate / ANSWERS_PART, rate)
        self._strangers = Budgets(boot_seconds, rate / ANSWERS_PART / STRANGERS_PART, rate / STRANGERS_PART)

    def send(self, peer: bytes, size: int) -> None:
        """Count bytes that go out, whatever the limit: the next packets wait the longer."""
        self.sent[peer] += size
        self._upload.wait(ALL, size)

    def delay(self) -> float:
        """Seconds that the next packet must wait."""
        return self._upload.wait(ALL, 0)

    def room(self, peer: bytes) -> float:
        """Bytes that an answer to this peer may have now; at 0 or below it has to be no larger than the question. The
        caller sees to that, and counts the answer (`answer`)."""
        return min(budget.left(key) for budget, key in self._budgets(peer))

    def own_room(self, peer: bytes) -> float:
        """As `room`, for a peer that this node asked: what others draw does not count."""
        return self._each.left(peer)

    def ask(self, peer: bytes, size: int) -> None:
        """Count a question of this node as sent; it draws on the peer's budget, for it may hold what the peer asked for
        in its last answer."""
        self.send(peer, size)
        self._each.spend(peer, size)

    def answer(self, peer: bytes, size: int) -> None:
        """Count bytes as sent that go out because this peer asked."""
        self.send(peer, size)
        for budget, key in self._budgets(peer):
            budget.spend(key, size)

    def _budgets(self, peer: bytes) -> list[tuple[Budgets, bytes]]:
        """The budgets that an answer to this peer draws on, each with its key there."""
        found = [(self._each, peer), (self._answers, ALL)]
        if not self.recorded(peer):
            found.append((self._strangers, ALL))
        return found

    def forget_all_but(self, peers: Container[bytes]) -> None:
        """Bound the memory: above 1024 peers, those outside `peers` count in the totals only, under no peer's id.
        `Swarm` calls it every few seconds."""
        for counter in (self.received, self.sent):
            if len(counter) > PEERS_MAX:
                gone = [peer for peer in counter if peer not in peers]  # also `ALL`, with what it has already
                counter[ALL] = sum(map(counter.pop, gone))
