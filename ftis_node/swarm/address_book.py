"""The address book: where peers of the run may be, who named each address, and when to dial it."""

import logging
import math
import random
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ftis_node.host.clocks import Clock, backoff, boot_seconds
from ftis_node.swarm.addresses import peer_at, varied
from ftis_node.swarm.handshake import MAX_ADDRESSES
from ftis_node.swarm.known_addresses import MET_MAX, NAMED_MAX, KnownAddresses
from ftis_node.swarm.limits import Bounded, Budgets
from ftis_node.swarm.local_networks import LocalNetworks
from ftis_node.swarm.sessions import Sessions
from ftis_node.swarm.wire.transport import Listening

PASSIVE_VIEW_MAX = 256
PART_MAX = PASSIVE_VIEW_MAX // 8  # candidates that one peer can name
ADDRESSES_TOLD = 2
# Referrers that are no peers:
HERE = b""  # of what this node has by itself: from its owner, a run file or an earlier start
LAN = b"lan"  # of what mDNS named
LAN_MAX = 64  # addresses from there
SELF = b"self"  # of all peers that came by themselves: they called this node first
PEERS_IN_A_HANDSHAKE = 16
# Dials of addresses that one peer named: as many as one answer has, and as many again each minute.
DIALS_AT_ONCE = float(PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD)
DIALS_A_SECOND = DIALS_AT_ONCE / 60
TRIES_OF_NAMED = 3  # greetings in a row, of a peer that others named and that was never met
# A node greets a peer that it met before again after 1, 2, 4 … s: twelve times, within 34 minutes. While others name
# the peer, or it calls this node, no pause is longer than 20 s.
FIRST_PAUSE = 1.0
NAMED_PAUSE = 20.0
TRIES_OF_MET = 12
LONGEST_PAUSE = FIRST_PAUSE * 2.0**TRIES_OF_MET
TIMES_OF_REFUSED = 9  # for 256 s: a peer of another run or protocol may have restarted in this one

LASTING = 8 * ADDRESSES_TOLD  # addresses of peers that have left, kept before those of peers that came by themselves

REFERRERS_MAX = 1024
# A doubted referrer named at least so many that did not answer, as number and as part.
MISSED_MIN = 8
MISSED_PART = 0.75

logger = logging.getLogger(__name__)


class Referrers:
    """Counts by referrer, a 38-byte peer id: how many of the peers that it named could be met.

    A doubted referrer's answers are still used, but a look-up in the DHT (`wire.directory`) does not end with them. Of
    more than 1024 referrers the oldest is forgotten.
    """

    def __init__(self) -> None:
        self._counts = Bounded[bytes, list[int]](REFERRERS_MAX)  # missed, met

    def note(self, referrer: bytes, *, met: bool) -> None:
        """Count a named peer that shook hands, or did not answer its first greeting. Nothing is counted for `HERE`."""
        if referrer:
            self._counts.setdefault(referrer, [0, 0])[met] += 1  # at 0 for missed, at 1 for met

    def doubted(self, referrer: bytes) -> bool:
        """Whether at least eight of the named peers, and three in four, did not answer."""
        missed, met = self._counts.get(referrer, (0, 0))
        return missed >= MISSED_MIN and missed >= MISSED_PART * (met + missed)


@dataclass(slots=True)
class _Candidate:
    """A peer in the passive view.

    referrer: the peer that named it first. part: whose part of the room it takes up (`_part`). addresses: each with its
    referrer, at most eight (`_own_first`).

    failures: greetings in a row without an answer; one that was refused counts as nine. last: when the last one failed,
    by the clock of the book. refused: the last one was refused. alive: since then it was named again, or it called.
    """

    referrer: bytes
    part: bytes
    addresses: dict[str, bytes] = field(default_factory=dict)
    failures: int = 0
    last: float = 0.0
    refused: bool = False
    alive: bool = False


@dataclass(eq=False)
class AddressBook:
    """The passive view: peers that were named or met, with their addresses. Those outside of the view are candidates
    for a greeting. A peer that shook hands stays here with the addresses that it claims itself.

    Who named an address decides whether the node dials it (`NetworkScope`). Otherwise strangers could make it probe its
    own network.

    own: this node's 38-byte peer id. how: its listening settings. view: the active view, `membership.Peer` by peer id;
    `Membership` changes it. cache: the file that keeps addresses between starts; None: nothing is kept. private: the
    run has members. clock: in seconds.
    """

    own: bytes
    how: Listening
    view: Mapping[bytes, Any]
    sessions: Sessions
    rng: random.Random
    cache: Path | None
    private: bool
    clock: Clock = boot_seconds  # with the seconds in which the machine sleeps

    def __post_init__(self) -> None:
        self.referrers = Referrers()
        self.owners: frozenset[bytes] = frozenset()  # peers that this node's owner named, or was given
        self._passive_view = dict[bytes, _Candidate]()
        self._dials = Budgets(boot_seconds, DIALS_A_SECOND, DIALS_AT_ONCE)
        self._known = KnownAddresses.read(self.cache)
        self._on_lan = Bounded[str, None](LAN_MAX)  # addresses that mDNS named
        # peers and addresses that are not dialled, and why, by whose part of the room they take up
        self._skipped = Bounded[bytes, Bounded[tuple[bytes, str], str]](PASSIVE_VIEW_MAX)
        self.scope = self._known.scope(self.how)
        self.local = LocalNetworks(self.how.host)

    def __contains__(self, peer: bytes) -> bool:
        """Whether the peer is in the passive view."""
        return peer in self._passive_view

    # --- what this node's owner says ------------------------------------------------------------------------------

    def trust(self, owners: Iterable[str], given: Iterable[str] = ()) -> list[str]:
        """Trust the owner's addresses: the node dials them, and others in their networks; of those that the owner was
        given, exactly these. Call it once at the start, before `recall` and `hear`.

        Returns all of them, with those of earlier starts of this home: at most 16 of the owner's, then 16 given ones.
        """
        known = self._known
        known.peers = list(dict.fromkeys((*owners, *known.peers)))[:NAMED_MAX]
        known.given = list(dict.fromkeys((*given, *known.given)))[:NAMED_MAX]
        self.scope.trust(known.peers, known.given)
        found = list(dict.fromkeys((*known.peers, *known.given)))
        self.owners = frozenset(map(peer_at, found))
        return found

    def names_of(self, peer: bytes) -> list[str]:
        """The addresses at which this node's owner named this peer, without those that the owner was given."""
        return [text for text in self._known.peers if peer_at(text) == peer]

    def recall(self) -> None:
        """Add the peers of previous starts to the candidates, at the start and whenever the view is empty. They claimed
        their addresses themselves, so each is the referrer of its own, but for what the owner named."""
        self.hear(self._known.met)
        for text in self._known.met:
            candidate = self._passive_view.get(peer_at(text))
            if candidate is not None and text in candidate.addresses and text not in self.scope.exact:
                candidate.addresses[text] = peer_at(text)

    def save(self, elsewhere: Container[bytes]) -> None:
        """Keep addresses for the next start: the view's, each peer's together, and those of peers met before. Peers
        that came by themselves push out none of the first eight that this node has found. Called after each round of
        greetings and at the end.

        Args:
            elsewhere: what the owner named stays named, unless the peer there is one of these.

        Raises:
            OSError: the file cannot be written.
        """
        if self.cache is None:
            return
        known = self._known
        good = self._reached(found=True)
        claimed = self._reached(found=False)
        met = set(map(peer_at, (*good, *claimed)))
        left = [text for text in known.met if peer_at(text) not in met]
        known.met = [*good, *left[:LASTING], *claimed, *left[LASTING:]][:MET_MAX]
        for kept in (known.peers, known.given):
            kept[:] = [text for text in kept if peer_at(text) not in elsewhere]
        if known.all:
            known.write(self.cache)

    # --- what is heard --------------------------------------------------------------------------------------------

    def hear(self, addresses: Sequence[str], referrer: bytes = HERE, teller: bytes = HERE) -> bool:
        """Remember named addresses. Ignore anything that is not an address of a peer, this node's own addresses, and
        new ones that this node does not dial at that referrer's word (`may_dial`).

        Args:
            addresses: at most 256 are read.
            referrer: the peer that named them.
            teller: the peer that passed on the referrer's signed word, and whose part of the room new peers take up;
                `HERE`: nobody did, and they take up the referrer's.

        Returns whether any of them is a new peer: neither a candidate nor in the view.
        """
        news = False
        for text in addresses[:PASSIVE_VIEW_MAX]:
            peer = peer_at(text)
            if peer in (b"", self.own):
                continue
            if referrer and text not in self._addresses(peer) and not self.may_dial(text, referrer):
                continue
            candidate = self._passive_view.get(peer)
            if candidate is None:
                news |= peer not in self.view
                candidate = self._add(peer, teller or referrer)
            if not (candidate.refused and self.view):  # a node without peers asks also those of another run
                candidate.alive = True
            if text not in candidate.addresses:
                candidate.addresses = _own_first(peer, {text: referrer, **candidate.addresses})
            elif not referrer and candidate.addresses[text] != peer:  # this node's own word outranks other peers'
                candidate.addresses[text] = HERE
        return news

    def hear_on_lan(self, addresses: Sequence[str]) -> bool:
        """Remember addresses that mDNS named in an open run (`lan.read_node`). They are dialled in whatever network
        they are until this process ends; of more than 64 the oldest goes. Return whether any is a new peer."""
        for text in addresses:
            self._on_lan[text] = None
        return self.hear(addresses, LAN)

    def called(self, peer: bytes) -> bool:
        """Note a call of a peer. A peer that was met and lost is a candidate again, because it is alive.

        Returns whether to greet it now: not if it is in the view, never shook hands, or its pause is not over.
        """
        if peer in self.view or not self.sessions.met(peer):
            return False
        candidate = self._passive_view.get(peer) or self._add(peer, SELF)
        candidate.alive = True
        return not self._wait(candidate)

    # --- whom to greet, and where ---------------------------------------------------------------------------------

    def strangers(self) -> list[bytes]:
        """Candidates that are not in the view and not in a pause after a failed greeting. The node greets the first.

        The owner's peers come first. Then the referrers take turns, so that none can delay others by naming new peers
        without end. Among one referrer's, peers that were met before come first; the rest is in random order.
        """
        found = [peer for peer, known in self._passive_view.items() if peer not in self.view and not self._wait(known)]
        self.rng.shuffle(found)
        found.sort(key=lambda peer: (peer not in self.owners, not self.sessions.met(peer)))
        earlier = Counter[bytes]()  # candidates of each part
        turns = {}
        for peer in found:
            part = self._passive_view[peer].part
            turns[peer] = earlier[part]
            earlier[part] += 1
        return sorted(found, key=lambda peer: (peer not in self.owners, turns[peer]))

    def patience(self) -> float:
        """Seconds until the first pause of a candidate ends; infinite if none is in a pause."""
        waits = (self._wait(known) for peer, known in self._passive_view.items() if peer not in self.view)
        return min(filter(None, waits), default=math.inf)

    def may_dial(self, address: str, referrer: bytes = HERE) -> bool:
        """Whether the node dials this address, which the referrer named. If not, the reason is kept for `skipped`, and
        the log says it once, while there are few."""
        why = self._why_not(address, referrer)
        skipped = self._skipped.setdefault(self._part(referrer), Bounded(PART_MAX))
        key = peer_at(address), address
        if not why:
            skipped.pop(key, None)
            return True
        if key not in skipped:
            if max(len(self._skipped), len(skipped)) < PART_MAX:  # strangers may name any number
                logger.info("%s is not dialled: %s.", address, why)
            skipped[key] = why
        return False

    def to_dial(self, peer: bytes) -> list[str] | None:
        """The known addresses of a peer to dial now; an empty list if none may be dialled; None if the budgets of those
        that named them are used up. Each returned address is charged to a budget, so call it only to dial."""
        found = {text: who for text, who in self._addresses(peer).items() if self.may_dial(text, who)}
        teller = peer  # who pays for what the peer itself named
        if found and not self.sessions.met(peer):  # another may have passed its signed word on
            teller = self._passive_view[peer].referrer or peer
        affordable = []
        for text, referrer in found.items():
            payer = referrer
            if referrer == peer:
                payer = teller
            if not payer or self._dials.take(payer):
                affordable.append(text)
        if found and not affordable:
            return None
        return affordable

    def skipped(self) -> dict[bytes, str]:
        """By peer outside the view of which no address is dialled: a sentence with one of its addresses, and why not.
        `status` and the log show it."""
        found = dict[bytes, str]()
        for skipped in reversed(self._skipped.values()):
            for (peer, text), why in reversed(skipped.items()):  # the latest is told
                if not peer or peer in found or peer in self.view:
                    continue
                if all(self._why_not(*one) for one in self._addresses(peer).items()):
                    found[peer] = f"{text.partition('/p2p/')[0]} is not dialled: {why}"
        return found

    def _reached(self, *, found: bool) -> list[str]:
        """Claims of the view's peers: of those that this node has found, or of those that came by themselves. Of each
        peer at most two that the node dials, in the order of the view."""
        reached = []
        for peer in self.view.values():
            if peer.found == found:
                dialled = (text for text in peer.addresses if not self._why_not(text, peer.id))
                reached += varied(dialled, ADDRESSES_TOLD)
        return reached

    def _why_not(self, address: str, referrer: bytes) -> str:
        """Why an address is not dialled at this referrer's word; "" if it is. It may lie in the local networks too if a
        member of a private run names itself, also by its code in mDNS, or a peer does that the owner named there."""
        if address in self._on_lan:
            return ""
        why = self.scope.why_not(address)
        peer = peer_at(address)
        if not why or not referrer or referrer not in (peer, LAN):  # there nobody else's word counts
            return why
        if self.private or self.local.has(referrer, self.scope.exact):
            return self.local.why_not(address)
        return why

    # --- what came of it ------------------------------------------------------------------------------------------

    def met(self, peer: bytes, claims: Sequence[str], *, found: bool) -> None:
        """Note a handshake. The peer's own claims, if there are any, replace what others named.

        Args:
            claims: the addresses that it said it has, the best first.
            found: this node greeted it, so the referrer that named it was right.
        """
        candidate = self._passive_view.get(peer)
        if candidate is not None:
            candidate.failures = 0
            candidate.refused = False
            if found:
                self.referrers.note(candidate.referrer, met=True)
        if claims:
            self._claimed(peer, claims, found)

    def failed(self, peer: bytes, *, up: bool) -> int:
        """Note that a greeting of a candidate failed, so that it is greeted again after a pause (`_wait`). Forget it
        until it is named again after twelve failures in a row, or three if others named it and it was never met; but
        never an owner's. Return how many failed in a row; 0 if it is no candidate.

        Args:
            up: this node's own p2pd runs; else the referrer is not to blame.
        """
        candidate = self._passive_view.get(peer)
        if candidate is None:
            return 0
        candidate.failures += 1
        candidate.last = self.clock()
        candidate.refused = False
        candidate.alive = False
        if candidate.failures == 1 and up:
            self.referrers.note(candidate.referrer, met=False)
        most = TRIES_OF_MET
        if candidate.referrer and not self.sessions.met(peer):
            most = TRIES_OF_NAMED
        if peer not in self.owners and candidate.failures >= most:
            self.forget(peer)
        return candidate.failures

    def lost(self, peer: bytes, addresses: Sequence[str], *, found: bool) -> None:
        """Make a peer that has just left the view a candidate again, with its own addresses and those that others
        named: these may be newer, or false.

        Args:
            found: this node had greeted it, and not the other way round.
        """
        named = self._addresses(peer)
        own = self._claimed(peer, addresses, found)
        own.addresses = _own_first(peer, named | own.addresses)

    def refused(self, peer: bytes) -> None:
        """Note that the peer belongs to another run or protocol: a candidate is not greeted for 256 s, or 20 s if it is
        named again while this node has no peers."""
        candidate = self._passive_view.get(peer)
        if candidate is not None:
            candidate.failures = TIMES_OF_REFUSED
            candidate.last = self.clock()
            candidate.refused = True
            candidate.alive = False

    def forget(self, peer: bytes) -> None:
        """Drop a candidate, if it is one, with its addresses and its failures."""
        self._passive_view.pop(peer, None)

    def _wait(self, candidate: _Candidate) -> float:
        """Seconds until the node may greet a candidate; 0: now."""
        if not candidate.failures:
            return 0.0
        longest = LONGEST_PAUSE
        if candidate.alive:
            longest = NAMED_PAUSE
        pause = backoff(candidate.failures, FIRST_PAUSE, longest)
        return max(0.0, candidate.last + pause - self.clock())

    def _addresses(self, peer: bytes) -> dict[str, bytes]:
        """The known addresses of a peer, each with its referrer; none if it is no candidate."""
        candidate = self._passive_view.get(peer)
        if candidate is None:
            return {}
        return candidate.addresses

    def _claimed(self, peer: bytes, addresses: Sequence[str], found: bool) -> _Candidate:
        """Replace a peer's named addresses by its own claims, make it the newest candidate, and return it. Dials of its
        claims count against its own budget, but for those that the owner named."""
        referrer = SELF
        if found:
            referrer = HERE
        made = self._passive_view.pop(peer, None) or self._add(peer, referrer)
        self._passive_view[peer] = made  # as the newest
        made.failures = 0
        made.addresses = {text: HERE if text in self.scope.exact else peer for text in addresses}
        return made

    def _add(self, peer: bytes, referrer: bytes) -> _Candidate:
        """Add a candidate that is not here, and return it. If its part is full (32; `HERE` has no bound), the oldest of
        that makes room; if all 256 places are taken, a random one, but none that this node's owner named."""
        part = self._part(referrer)
        others = [one for one in self._passive_view if one not in self.owners]
        named = [one for one in others if part and self._passive_view[one].part == part]
        if len(named) >= PART_MAX:
            self.forget(named[0])
        elif len(self._passive_view) >= PASSIVE_VIEW_MAX:
            self.forget(self.rng.choice(others))
        self._passive_view[peer] = _Candidate(referrer, part)
        return self._passive_view[peer]

    def _part(self, referrer: bytes) -> bytes:
        """Whose part of the room is used by what this referrer names: its own, but all peers of the view that came by
        themselves have one together."""
        teller = self.view.get(referrer)
        if teller is None or teller.found:
            return referrer
        return SELF


def _own_first(peer: bytes, addresses: dict[str, bytes]) -> dict[str, bytes]:
    """Keep at most eight addresses with their referrers: first up to four from the peer itself or with `HERE`, then the
    others in their order."""
    own = [item for item in addresses.items() if item[1] in (HERE, peer)]
    ordered = dict(own[: MAX_ADDRESSES // 2]) | addresses
    return dict(islice(ordered.items(), MAX_ADDRESSES))
