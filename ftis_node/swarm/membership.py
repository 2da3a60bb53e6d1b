"""Membership: handshakes, a bounded view of live peers, and the sources of peers when the view is empty."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path

from ftis_node.config.run import RunFile, run_file_as_json
from ftis_node.errors import UsageError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import (
    Whereabouts,
    is_plain,
    is_relayed,
    network_of,
    peer_at,
    ranked,
    varied,
)
from ftis_node.swarm.bounded import make_room, put, remember
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.handshake import (
    MAX_ADDRESSES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    greeting,
    other_protocol,
    plain,
    polite_refusal,
    shake,
)
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.invitation import read as read_invitation
from ftis_node.swarm.known_addresses import MET_MAX, NAMED_MAX, KnownAddresses
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.peer_clocks import PeerClocks
from ftis_node.swarm.retries import TRIES_OF_MET, Retries
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.tellers import Tellers
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Health, Transport, Unreachable

VIEW_SIZE = 64
CANDIDATES_MAX = 256
MET_SIZE = 256
OBSERVERS_MAX = 16  # that may ask at a time; the latest ones
assert MET_SIZE > VIEW_SIZE, "the peers met include the view; the oldest outside the view makes room"
# Identities and addresses are free. Inbound peers have at most half of the view. The first peers that this node found
# stay while they answer, and so do the first sixteen with a record as authors. Among the rest, those in the most
# crowded network make room. A peer states its own network, so this rule alone would protect no honest peer. One peer
# can name at most an eighth of the candidates.
INBOUND_MAX = VIEW_SIZE // 2
ANCHORS = 8
VOUCHED = INBOUND_MAX // 2
TELLER_PART = 8
ADDRESSES_TOLD = 2
LAN, LAN_MAX = b"lan", 64  # who names what was heard on the local network; addresses from there
PEERS_IN_A_HANDSHAKE = 16
# Dials of addresses that one peer named: as many as one answer has, and as many again each minute.
DIALS_AT_ONCE = float(PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD)
DIALS_A_SECOND = DIALS_AT_ONCE / 60
# A peer leaves the view after so many failures in a row, after a silence as long as a restart of p2pd takes.
GIVE_UP_AFTER = 3
GIVE_UP_SECONDS = 8.0
HALF_DEAD_AFTER = 2  # unanswered greetings in a row

logger = logging.getLogger(__name__)


class Reachability(StrEnum):
    """How peers can reach this node."""

    DIRECT = "direct"  # also while nothing is known
    RELAYED = "relayed"
    OUTBOUND_ONLY = "outbound-only"


@dataclass(eq=False)
class Peer:
    """A peer of this run that shook hands with this node. addresses: the best first. found: this node greeted it, and
    not the other way round."""

    id: bytes
    addresses: list[str]
    agent: str
    found: bool = False
    seen: float = field(default_factory=boot_seconds)
    failures: int = 0


class Membership:
    """The view: at most 64 peers that this node calls. Other named peers are only candidates until a handshake.

    A peer that shook hands may call this node even after it left the view to make room. Views are not mutual, so
    otherwise most calls in a large swarm would be refused.

    An observer has no model and nothing to give: it may ask, and takes no place in the view.

    Who named an address decides whether the node dials it (`Whereabouts`). Otherwise strangers could make it probe its
    own network.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        run_file: RunFile,
        traffic: Traffic,
        cache: Path | None = None,
        recorded: Callable[[bytes], bool] = lambda peer: False,
        rng: random.Random | None = None,
        roster: Roster | None = None,
        observing: bool = False,
    ) -> None:
        """
        Args:
            recorded: returns whether a peer has a record as an author.
            roster: the members of a private run; None: the run is open.
            observing: this node is an observer.
        """
        self._rng = rng or random.Random()
        self.view: dict[bytes, Peer] = {}
        self.refused: dict[bytes, str] = {}
        self.majors: dict[bytes, int] = {}  # other major versions of refused peers
        self.health: Health | None = None
        self.clocks = PeerClocks()
        self._transport = transport
        self._identity = identity
        self._run_file = run_file
        self._run_text = run_file_as_json(run_file)
        self._roster = roster
        self._traffic = traffic
        self._cache = cache
        self._known = KnownAddresses.read(cache)
        self._recorded = recorded
        self._candidates: dict[bytes, dict[str, bytes | None]] = {}  # addresses, each with its teller
        self.tellers = Tellers()
        self._tellers: dict[bytes, bytes] = {}  # the peer that first named each candidate
        self._retries = Retries(boot_seconds)
        self._met: dict[bytes, Limits] = {}  # peers of this run, in the view or not
        self._observers: dict[bytes, Limits] = {}
        self._observing = observing
        self._dials = Budgets(boot_seconds, DIALS_A_SECOND, DIALS_AT_ONCE)
        self._trusted: frozenset[str] = frozenset()
        self._owners: frozenset[bytes | None] = frozenset()  # peers that this node's owner named or was given
        self._on_lan: dict[str, None] = {}  # addresses that mDNS named
        how = transport.listening
        self._at_home = Whereabouts(how.host, (*how.announce, *how.relays))
        self.own_addresses: list[str] = []
        self._warned: set[bytes] = set()  # peers whose silence is in the log

    @property
    def own_id(self) -> str:
        """This node's peer id in base58."""
        return self._identity.peer_id

    def trust(self, owners: Iterable[str], given: Iterable[str] = ()) -> list[str]:
        """Trust the owner's addresses: the node dials them, and others in their networks; of those that the owner was
        given, exactly these.

        Returns all of them, with those of earlier starts of this home.
        """
        known = self._known
        known.peers = list(dict.fromkeys((*owners, *known.peers)))[:NAMED_MAX]
        known.named = list(dict.fromkeys((*given, *known.named)))[:NAMED_MAX]
        self._at_home.trust(known.peers, known.named)
        found = list(dict.fromkeys((*known.peers, *known.named)))
        self._trusted = frozenset(found)
        self._owners = frozenset(map(peer_at, found))
        return found

    def outside(self) -> list[bytes]:
        """The peers of other runs that this node's owner named; they are asked for records of the DHT only."""
        return [peer for peer in self._owners if peer in self.refused and peer not in self.majors]

    async def refresh_addresses(self) -> list[str]:
        """Ask p2pd for this node's addresses; keep the last ones if it does not answer."""
        try:
            found = ranked(await self._transport.addresses())
        except Exception as error:  # hivemind raises anything from a socket error to what its parser raises
            logger.debug("p2pd does not say where this node may be dialled: %r", error)
            return self.own_addresses
        self.health = await self._transport.health() or self.health
        if self._only_dials():  # peers must not waste time on addresses that do not answer
            found = [address for address in found if is_relayed(address)]
        self.own_addresses = varied(found, MAX_ADDRESSES)
        return self.own_addresses

    async def _look_where(self, peer: bytes) -> None:
        """Add the network of a connection to an owner's peer to the home networks; its address may be a host name."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            self._at_home.widen((await self._transport.neighbours()).get(peer, ()))

    def reachability(self) -> Reachability:
        """How peers can reach this node, by the evidence so far."""
        if not self._only_dials():
            return Reachability.DIRECT
        return Reachability.RELAYED if any(map(is_relayed, self.own_addresses)) else Reachability.OUTBOUND_ONLY

    def _only_dials(self) -> bool:
        """Whether the node does not listen, or AutoNAT found that no peer can dial it."""
        if not self._transport.listening.listen:
            return True
        return self.health is not None and self.health.reachability == "private"

    def hear(self, addresses: Sequence[str], teller: bytes | None = None) -> bool:
        """Remember named addresses; ignore anything that is not an address of a peer.

        Args:
            teller: the peer that named them; None: this node's own sources.

        Returns whether any of them is a new peer.
        """
        news = False
        for text in addresses[:CANDIDATES_MAX]:
            peer = peer_at(text)
            if peer is None or peer == self._identity.author or (teller is not None and not self._may_dial(text)):
                continue
            self._retries.named(peer)
            if peer not in self._candidates:
                self._make_room_for_candidate(teller)
                if teller is not None:
                    self._tellers[peer] = teller
            news |= peer not in self._candidates and peer not in self.view
            known = self._candidates.setdefault(peer, {})
            if text not in known:
                self._candidates[peer] = _own_first(peer, {text: teller, **known})
            elif teller is None:
                known[text] = None
        return news

    def hear_on_lan(self, addresses: Sequence[str]) -> bool:
        """Remember addresses that mDNS named (`lan.read_node`), until the end. Return whether any is a new peer."""
        for text in addresses:
            remember(self._on_lan, text, None, LAN_MAX)
        return self.hear(addresses, LAN)

    def _may_dial(self, address: str) -> bool:
        return address in self._on_lan or self._at_home.reach(address)

    def _why_not_dialled(self, peer: bytes) -> str:
        texts = ", ".join(text for text in self._candidates[peer] if not self._may_dial(text))
        outside = (
            "outside of the networks in which this node's owner named a peer; if it is yours, name it with --peers"
        )
        return f"{texts}: {outside}" if texts else "no address of it is known"

    def _to_dial(self, peer: bytes) -> list[str]:
        """The known addresses of a peer to dial now; each counts against the budget of the peer that named it."""
        return [
            text
            for text, teller in self._candidates.get(peer, {}).items()
            if self._may_dial(text) and (teller is None or self._dials.take(teller))
        ]

    def _make_room_for_candidate(self, teller: bytes | None) -> None:
        if teller is not None:
            named = [peer for peer, who in self._tellers.items() if who == teller]
            if len(named) >= CANDIDATES_MAX // TELLER_PART:
                self._forget(named[0])
                return
        if len(self._candidates) >= CANDIDATES_MAX:
            self._forget(self._rng.choice(list(self._candidates)))

    def strangers(self) -> list[bytes]:
        """Candidates that are not in the view and not in a pause after a failed greeting.

        The owner's peers come first. Then the tellers take turns, so that none can delay others by naming new peers
        without end. Among one teller's, peers that were met before come first; the rest is in random order.
        """
        found = [peer for peer in self._candidates if peer not in self.view and not self._retries.seconds(peer)]
        self._rng.shuffle(found)
        found.sort(key=lambda peer: (peer not in self._owners, peer not in self._met))
        told = Counter[bytes | None]()
        turns: dict[bytes, int] = {}
        for peer in found:
            teller = self._tellers.get(peer)
            turns[peer] = told[teller]
            told[teller] += 1
        return sorted(found, key=lambda peer: (peer not in self._owners, turns[peer]))

    def look_for(self, addresses: Sequence[str]) -> None:
        """Add the bootstraps to the candidates again; a node without peers greets them without a pause."""
        self.hear(addresses)
        if not self.view:
            for peer in filter(None, map(peer_at, addresses)):
                self._retries.forget(peer)

    def patience(self) -> float:
        """Seconds until the pause of an unresponsive peer ends; infinite if there is none."""
        waits = (self._retries.seconds(peer) for peer in self._candidates if peer not in self.view)
        return min(filter(None, waits), default=math.inf)

    def called(self, peer: bytes) -> bool:
        """Note a call of a peer. A peer that was met and lost is a candidate again, because it is alive.

        Returns whether to greet it now.
        """
        if peer in self.view or peer not in self._met:
            return False
        if peer not in self._candidates:
            self._make_room_for_candidate(None)
            self._candidates[peer] = {}
        self._retries.named(peer)
        return not self._retries.seconds(peer)

    async def dial(self, peer: bytes) -> None:
        """Connect to a peer of the view again after p2pd has lost all connections."""
        try:
            await self._transport.connect(peer, list(filter(self._may_dial, self.view[peer].addresses)))
        except Unreachable as error:
            logger.debug("%s", error)
            self.failed(peer)

    async def greet(self, peer: bytes) -> bool:
        """Dial a peer if there is no connection, and shake hands. Return whether it is now in the view."""
        addresses = self._to_dial(peer)
        if not addresses and any(map(self._may_dial, self._candidates.get(peer, ()))):
            return False  # the dial budget of the peer that named it is used up
        try:
            if not addresses and peer in self._candidates and peer not in self.view and not await self._connected(peer):
                raise Unreachable(self._why_not_dialled(peer))
            await self._transport.connect(peer, addresses)
            if peer in map(peer_at, self._known.peers):
                await self._look_where(peer)
            hello = self._hello()
            if self._roster is not None:
                hello.invitation = self._roster.ticket_for(peer)
            answer = await shake(self._transport, peer, hello)
        except Unreachable as error:
            told = (peer in self._owners or not self.view) and peer not in self._warned
            level = logging.WARNING if told else logging.DEBUG
            self._warned |= {peer} if told and len(self._warned) < CANDIDATES_MAX else set()
            logger.log(level, "No handshake with %s: %s", peer_id(peer), error)
            await self._greeted_in_vain(peer)
            return False
        self._traffic.received[peer] += answer.ByteSize()
        if answer.major != PROTOCOL_MAJOR:
            self._refuse_protocol(peer, answer.major)
            return False
        if answer.refusal or answer.run_id != self._run_file.run.id:
            if self._roster is not None and answer.removal:
                self._roster.hear([answer.removal], peer)
            self._refuse(peer, plain(answer.refusal, 200) or "it belongs to another run")
            return False
        if answer.observer:
            self._refuse(peer, "it only looks on")
            return False
        if self._roster is not None:
            if (why := self._roster.meet(peer, answer.certificates)) is not None:
                self._refuse(peer, why)
                return False
            if answer.granted:
                self._roster.accept(answer.granted, peer)
        self.tellers.met(self._tellers.get(peer))
        self._admit(peer, answer, found=True)
        self.hear(answer.peers[: PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD], peer)
        return True

    async def _greeted_in_vain(self, peer: bytes) -> None:
        """Schedule another greeting, or forget the peer until it is named again."""
        if peer not in self._candidates:
            return
        times = self._retries.failed(peer)
        if times == 1 and self._transport.up:
            self.tellers.missed(self._tellers.get(peer))
        if peer not in self._owners and times >= (TRIES_OF_MET if peer in self._met else GIVE_UP_AFTER):
            self._forget(peer)
        if peer not in self.view and times % HALF_DEAD_AFTER == 0:
            # p2pd may keep a dead connection on which nothing arrives any more; without it, p2pd dials again.
            await self._transport.disconnect(peer)

    async def _connected(self, peer: bytes) -> bool:
        """Whether p2pd has a connection to the peer, for example because the peer has called."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            return peer in await self._transport.connected()
        return False

    def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        """Answer a handshake; a peer of the same run and major version enters the view.

        In a private run a stranger gets a refusal and nothing else, not even the run's id.
        """
        self._traffic.received[peer] += request.ByteSize()
        answer, room = self._hello(), self._traffic.room(peer) > 0
        if not room:  # then it is no larger than the question
            del answer.addresses[:]
        if self._roster is not None and (why := self._at_the_door(request, answer, peer)) is not None:
            answer = ftis_pb2.Handshake(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, refusal=why)
            answer.removal = self._roster.removal_for(peer)
            if request.run_id:
                self._refuse(peer, why)
        elif request.major != PROTOCOL_MAJOR:
            answer.refusal = polite_refusal(request.major)
            self._refuse_protocol(peer, request.major)
        elif not (request.run_id or room):
            answer = ftis_pb2.Handshake(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)
        elif not request.run_id:
            answer.run_file = self._run_text
            if (sought := self.view.get(request.whereabouts)) is not None:
                answer.peers.extend(sought.addresses)
        elif request.run_id != self._run_file.run.id:
            answer.refusal = (
                f"this node is in run {self._run_file.run.id.hex()}, you are in {request.run_id.hex()[:32]}"
            )
            if request.tokenizer not in (b"", answer.tokenizer):
                answer.refusal += ", which has another tokenizer"
            self._refuse(peer, f"it is in another run, {request.run_id.hex()[:32]}")
        else:
            self._admit(peer, request, found=False)
            answer.peers.extend(self.some_addresses(PEERS_IN_A_HANDSHAKE if room else 0, peer))
        self._traffic.answer(peer, answer.ByteSize())
        return answer

    def _at_the_door(self, request: ftis_pb2.Handshake, answer: ftis_pb2.Handshake, peer: bytes) -> str | None:
        """Return why a private run refuses a caller, or None. A member's new certificate goes into the answer."""
        roster = self._roster
        assert roster is not None
        if request.major != PROTOCOL_MAJOR:
            return polite_refusal(request.major)
        why = roster.meet(peer, request.certificates)
        refused = self._redeem(request, answer, peer) if request.invitation else why
        if why is None and not answer.granted:
            answer.granted = roster.renewal(peer)
        return why and refused

    def _redeem(self, request: ftis_pb2.Handshake, answer: ftis_pb2.Handshake, peer: bytes) -> str | None:
        """Return why a caller's invitation is refused, or None. With the run's id, not only a question, it is used."""
        assert self._roster is not None
        if not self._roster.affords(peer):
            return "too many invitations were to be checked; try again later"
        try:
            found = read_invitation(request.invitation, unix_seconds())
        except UsageError as error:
            return plain(error.what, 200)
        why = self._roster.why_no_ticket(found, peer)
        if why is None and request.run_id == self._run_file.run.id:
            answer.granted = self._roster.redeem(found, peer)
        return why

    def failed(self, peer: bytes) -> None:
        """Note a failed call. After three in a row and some seconds of silence the peer leaves the view and becomes a
        candidate.

        While this node's own p2pd is down, no peer is to blame.
        """
        entry = self.view.get(peer)
        if entry is not None and self._transport.up:
            entry.failures += 1
            if entry.failures >= GIVE_UP_AFTER and boot_seconds() - entry.seen > GIVE_UP_SECONDS:
                del self.view[peer]
                logger.info("Lost peer %s", peer_id(peer))
                if entry.addresses:
                    named = self._candidates.get(peer, {})
                    self._note_claims(peer, entry.addresses)  # others may have named a newer address, or false ones
                    self._candidates[peer] = _own_first(peer, named | self._candidates[peer])

    def limits(self, peer: bytes) -> Limits | None:
        """The limits of a message between this node and the peer; None if they have not shaken hands, or the run is
        private and the peer no member any more."""
        return (self._met.get(peer) or self._observers.get(peer)) if self.welcomes(peer) else None

    def observes(self, peer: bytes) -> bool:
        """Whether the peer shook hands as an observer."""
        return peer in self._observers

    def welcomes(self, peer: bytes) -> bool:
        """Whether the run is open, or the key a member's."""
        return self._roster is None or self._roster.admits(peer)

    def drop(self, peer: bytes) -> None:
        """Remove a peer from the view; it may come back by a handshake."""
        self.view.pop(peer, None)

    def answered(self, peer: bytes) -> None:
        """Note a successful call."""
        entry = self.view.get(peer)
        if entry is not None:
            entry.failures, entry.seen = 0, boot_seconds()

    def some_addresses(self, count: int, besides: bytes) -> list[str]:
        """Addresses of random peers of the view to send to another peer: two each, in different scopes if possible."""
        peers = [peer for peer in self.view.values() if peer.addresses and peer.id != besides]
        chosen = self._rng.sample(peers, min(count, len(peers)))
        return [address for peer in chosen for address in varied(peer.addresses, ADDRESSES_TOLD)]

    def recall(self) -> None:
        """Add the peers of previous starts to the candidates."""
        self.hear(self._known.met)

    def save_cache(self) -> None:
        """Keep addresses for the next start: the view's, and those of peers that were met before.

        What the owner named stays named, unless the peer there is of another run.
        """
        if self._cache is None:
            return
        known = self._known
        dialled = {peer.id: list(filter(self._at_home.reach, peer.addresses)) for peer in self.view.values()}
        present = [text for addresses in dialled.values() for text in varied(addresses, ADDRESSES_TOLD)]
        met = {peer for peer, addresses in dialled.items() if addresses}
        known.met = [*present, *(text for text in known.met if peer_at(text) not in met)][:MET_MAX]
        if self._roster is None:
            elsewhere = self.refused.keys() - self.majors.keys()
            for named in (known.peers, known.named):
                named[:] = [text for text in named if peer_at(text) not in elsewhere]
        if known.all:
            known.write(self._cache)

    def _hello(self) -> ftis_pb2.Handshake:
        hello = greeting(self._run_file.run, [] if self._observing else self.own_addresses)
        hello.observer = self._observing
        if self._roster is not None:
            hello.certificates = self._roster.own
        return hello

    def _forget(self, peer: bytes) -> None:
        self._candidates.pop(peer, None)
        self._retries.forget(peer)
        self._tellers.pop(peer, None)

    def _admit(self, peer: bytes, hello: ftis_pb2.Handshake, *, found: bool) -> None:
        self.refused.pop(peer, None)
        self._retries.forget(peer)
        self.majors.pop(peer, None)
        self._warned.discard(peer)
        self._met.pop(peer, None)
        self._observers.pop(peer, None)
        if hello.observer:
            self.view.pop(peer, None)
            put(self._observers, peer, OWN.shared_with(hello.limits), OBSERVERS_MAX)
            return
        self.clocks.note(peer, hello.time)
        while len(self._met) >= MET_SIZE:
            del self._met[next(met for met in self._met if met not in self.view)]
        self._met[peer] = OWN.shared_with(hello.limits)
        known = self.view.get(peer)
        if known is None:
            self._make_room_in_view(found)
        claims = (text for text in hello.addresses[:MAX_ADDRESSES] if peer_at(text) == peer)
        addresses = ranked(text for text in claims if self._may_dial(text) or is_plain(text))
        if known is None:
            agent = plain(hello.agent, 64)
            logger.info("Met peer %s (%s)", peer_id(peer), agent)
            self.view[peer] = Peer(peer, addresses, agent, found)
        else:
            known.addresses, known.failures, known.seen = addresses or known.addresses, 0, boot_seconds()
        if addresses:
            self._note_claims(peer, addresses)

    def _note_claims(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Replace a peer's named addresses by its own claims. Dials of them count against the peer's own budget."""
        self._forget(peer)
        self._make_room_for_candidate(None)
        self._candidates[peer] = {text: None if text in self._trusted else peer for text in addresses}

    def _make_room_in_view(self, found: bool) -> None:
        inbound = [peer for peer in self.view.values() if not peer.found]
        if not found and len(inbound) >= INBOUND_MAX:
            leaving = inbound
        elif len(self.view) >= VIEW_SIZE:
            anchors = [peer for peer in self.view.values() if peer.found][:ANCHORS]  # a dictionary keeps its order
            leaving = [peer for peer in self.view.values() if peer not in anchors]
        else:
            return
        vouched = [peer for peer in leaving if self._recorded(peer.id)][:VOUCHED]
        leaving = [peer for peer in leaving if peer not in vouched]
        networks = [network_of(peer.addresses) for peer in leaving]
        crowd = Counter(networks)
        crowded = max(crowd.values())
        fullest = [peer for peer, network in zip(leaving, networks, strict=True) if crowd[network] == crowded]
        del self.view[self._rng.choice(fullest).id]

    def _refuse_protocol(self, peer: bytes, major: int) -> None:
        self._refuse(peer, other_protocol(major))
        put(self.majors, peer, major, CANDIDATES_MAX)

    def _refuse(self, peer: bytes, reason: str) -> None:
        if peer not in self.refused:
            logger.warning("Peer %s is left out: %a", peer_id(peer), reason)
        if (removed := make_room(self.refused, peer, CANDIDATES_MAX)) is not None and removed not in self._candidates:
            self._retries.forget(removed)
        self.refused[peer] = reason
        self._retries.refused(peer)
        self.view.pop(peer, None)
        self._met.pop(peer, None)
        self._observers.pop(peer, None)


def _own_first(peer: bytes, addresses: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """At most eight addresses with their tellers: four from the peer itself or this node's owner, then the first."""
    own = [text for text, teller in addresses.items() if teller is None or teller == peer]
    return dict(islice((dict.fromkeys(own[: MAX_ADDRESSES // 2]) | addresses).items(), MAX_ADDRESSES))
