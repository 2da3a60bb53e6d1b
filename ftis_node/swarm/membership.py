"""Membership: handshakes, and the view, a bounded set of live peers."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ftis_node.config.run import RunFile, run_file_as_json
from ftis_node.errors import UsageError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.swarm import ftis_pb2, handshake
from ftis_node.swarm.address_book import ADDRESSES_TOLD, PASSIVE_VIEW_MAX, PEERS_IN_A_HANDSHAKE, AddressBook
from ftis_node.swarm.addresses import host_of, is_plain, is_relayed, network_of, peer_at, ranked, varied
from ftis_node.swarm.handshake import (
    HANDSHAKE_SECONDS,
    MAX_ADDRESSES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    greeting,
    plain,
    shake,
)
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.invitation import read as read_invitation
from ftis_node.swarm.limits import OWN, Bounded, Limits
from ftis_node.swarm.places import Places
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.sessions import LOOKS_ON, SESSIONS_MAX, Sessions
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Health, Transport, Unreachable, resolved

VIEW_SIZE = 64
assert SESSIONS_MAX > VIEW_SIZE, "the sessions include the view's; the oldest outside the view makes room"
# Identities and addresses are free. Inbound peers have at most half of the view. The first peers that this node found
# stay while they answer, and so do the first sixteen with a record as authors. Among the rest, those in the most
# crowded network make room. A peer states its own network, so this rule alone would protect no honest peer.
INBOUND_MAX = VIEW_SIZE // 2
ANCHORS = 8
VOUCHED = INBOUND_MAX // 2
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
    not the other way round. links: where this node has dialled it. told: this node's addresses that it knows."""

    id: bytes
    addresses: list[str]
    agent: str
    found: bool = False
    links: Sequence[str] = ()
    told: frozenset[str] = frozenset()
    seen: float = field(default_factory=boot_seconds)
    failures: int = 0


class Membership:
    """The view: at most 64 peers that this node calls.

    A peer that shook hands may call this node even after it left the view to make room. Views are not mutual, so
    otherwise most calls in a large swarm would be refused.

    An observer has no model and nothing to give: it may ask, and takes no place in the view.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        run_file: RunFile,
        traffic: Traffic,
        cache: Path | None = None,
        rng: random.Random | None = None,
        roster: Roster | None = None,
        observing: bool = False,
    ) -> None:
        """
        Args:
            roster: the members of a private run; None: the run is open.
            observing: this node is an observer.
        """
        self._rng = rng or random.Random()
        self.active_view: dict[bytes, Peer] = {}
        self.refused: Bounded[bytes, str] = Bounded(PASSIVE_VIEW_MAX)
        self.majors: Bounded[bytes, int] = Bounded(PASSIVE_VIEW_MAX)  # other major versions of refused peers
        self.health: Health | None = None
        self.sessions = Sessions(self.active_view)
        self.addresses = AddressBook(
            identity.author, transport.listening, self.active_view, self.sessions, self._rng, cache, roster is not None
        )
        self._places = Places(run_file.run.id, identity, self.welcomes) if roster is not None else None
        self._transport = transport
        self._identity = identity
        self._run_file = run_file
        self._run_text = run_file_as_json(run_file)
        self._roster = roster
        self._traffic = traffic
        self._observing = observing
        self.own_addresses: list[str] = []
        self._near_addresses: list[str] = []  # in a private run: of this node, within its local networks
        self._warned: set[bytes] = set()  # peers whose silence is in the log

    @property
    def own_id(self) -> str:
        """This node's peer id in base58."""
        return self._identity.peer_id

    def outside(self) -> list[bytes]:
        """The peers of other runs that this node's owner named; they are asked for records of the DHT only."""
        owners = filter(None, self.addresses.owners)
        return [peer for peer in owners if peer in self.refused and peer not in self.majors]

    async def refresh_addresses(self) -> list[str]:
        """Ask p2pd for this node's addresses; keep the last ones if it does not answer."""
        try:
            found = ranked(await self._transport.addresses())
        except Exception as error:  # hivemind raises anything from a socket error to what its parser raises
            logger.debug("p2pd does not say where this node may be dialled: %r", error)
            return self.own_addresses
        self.health = await self._transport.health() or self.health
        if self._places is not None and self._transport.listening.listen:  # from there it can be dialled in any case
            self._near_addresses = self.addresses.local.own(found)
        if self._only_dials():  # peers must not waste time on addresses that do not answer
            found = [address for address in found if is_relayed(address)]
        self.own_addresses = varied(found, MAX_ADDRESSES)
        return self.own_addresses

    def reachability(self) -> Reachability:
        """How peers can reach this node, by the evidence so far."""
        if not self._only_dials():
            return Reachability.DIRECT
        return Reachability.RELAYED if any(map(is_relayed, self.own_addresses)) else Reachability.OUTBOUND_ONLY

    def outdated(self) -> list[bytes]:
        """The peers of the view to shake hands with again, in a random order: who knows other addresses of this node
        than it has now, and who may renew its certificate."""
        now, roster = self._tells(), self._roster
        view = self.active_view.values()
        found = [peer.id for peer in view if peer.told != now or (roster is not None and roster.due_at(peer.id))]
        return self._rng.sample(found, len(found))

    def _tells(self) -> frozenset[str]:
        """All addresses that this node tells its peers now."""
        return frozenset((*self.own_addresses, *self._near_addresses))

    def _only_dials(self) -> bool:
        """Whether the node does not listen, or AutoNAT found that no peer can dial it."""
        if not self._transport.listening.listen:
            return True
        return self.health is not None and self.health.reachability == "private"

    async def greet(self, peer: bytes) -> bool:
        """Dial a peer if there is no connection, and shake hands. Return whether it is now in the view."""
        known, addresses = self.addresses, self.addresses.to_dial(peer)
        if addresses is None:
            return False
        try:
            if not addresses and peer in known and peer not in self.active_view and peer not in await self._links():
                raise Unreachable(known.skipped().get(peer, "no address of it is known"))
            await self._transport.connect(peer, addresses)
            links = (await self._links()).get(peer, [])
            if peer in known.named:  # the connection shows that its name leads there; a peer may also have come itself
                hosts = await self._hosts_of(peer)
                known.scope.widen(link for link in links if host_of(link) in hosts)
            hello = self._hello()
            if self._roster is not None:
                hello.invitation = self._roster.ticket_for(peer)
            answer = await shake(self._transport, peer, hello)
        except Unreachable as error:
            told = (peer in known.owners or not self.active_view) and peer not in self._warned
            level = logging.WARNING if told else logging.DEBUG
            self._warned |= {peer} if told and len(self._warned) < PASSIVE_VIEW_MAX else set()
            logger.log(level, "No handshake with %s: %s", peer_id(peer), error)
            times = known.failed(peer, up=self._transport.up)
            if times and peer not in self.active_view and times % HALF_DEAD_AFTER == 0:
                # p2pd may keep a dead connection on which nothing arrives any more; without it, p2pd dials again.
                await self._transport.disconnect(peer)
            return False
        self._traffic.received[peer] += answer.ByteSize()
        if (why := self._why_no_peer(answer, peer)) is not None:
            self._refuse(peer, why)
            return False
        if self._roster is not None and answer.granted:
            self._roster.accept(answer.granted, peer)
        self._admit(peer, answer, found=True, links=links)
        self.hear_places(answer.places, PEERS_IN_A_HANDSHAKE + 1, peer)
        known.hear(answer.peers[: PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD], peer)
        return True

    def _why_no_peer(self, answer: ftis_pb2.Handshake, peer: bytes) -> str | None:
        """Return why a peer that answered a greeting cannot be one of this node's, or None."""
        if answer.major != PROTOCOL_MAJOR:
            return self._other_protocol(peer, answer.major)
        if answer.refusal or answer.run_id != self._run_file.run.id:
            if self._roster is not None and answer.removal:
                self._roster.hear([answer.removal], peer)
            return plain(answer.refusal, 200) or "it belongs to another run"
        if answer.observer:
            return LOOKS_ON
        return self._roster.meet(peer, answer.certificates) if self._roster is not None else None

    async def _hosts_of(self, peer: bytes) -> set[str]:
        """The hosts to which the names lead that this node's owner gave this peer."""
        hosts: set[str] = set()
        for text in self.addresses.names_of(peer):
            with suppress(OSError, TimeoutError):
                hosts.update(map(host_of, await asyncio.wait_for(resolved(text), HANDSHAKE_SECONDS)))
        return hosts

    async def _links(self) -> dict[bytes, list[str]]:
        """The connections of p2pd by peer, also those that peers opened; none if it does not say."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            return await self._transport.neighbours()
        return {}

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
            answer.refusal = handshake.polite_refusal(request.major)
            self._refuse(peer, self._other_protocol(peer, request.major))
        elif not (request.run_id or room):
            answer = ftis_pb2.Handshake(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)
        elif not request.run_id:
            answer.run_file = self._run_text
            if (sought := self.active_view.get(request.whereabouts)) is not None:
                answer.peers.extend(sought.addresses)
        elif request.run_id != self._run_file.run.id:
            answer.refusal = f"this node is in run {self._run_file.run.id.hex()}, you in {request.run_id.hex()[:32]}"
            if request.tokenizer not in (b"", answer.tokenizer):
                answer.refusal += ", which has another tokenizer"
            self._refuse(peer, f"it is in another run, {request.run_id.hex()[:32]}")
        else:
            self._admit(peer, request, found=False)
            self.hear_places(request.places, 1, peer)
            answer.peers.extend(self.some_addresses(PEERS_IN_A_HANDSHAKE if room else 0, peer))
            answer.places.extend(self.some_places(PEERS_IN_A_HANDSHAKE if room else 0, peer))
        self._traffic.answer(peer, answer.ByteSize())
        return answer

    def _at_the_door(self, request: ftis_pb2.Handshake, answer: ftis_pb2.Handshake, peer: bytes) -> str | None:
        """Return why a private run refuses a caller, or None. A member's new certificate goes into the answer."""
        roster = self._roster
        assert roster is not None
        if request.major != PROTOCOL_MAJOR:
            return handshake.polite_refusal(request.major)
        why = roster.meet(peer, request.certificates)
        refused = self._redeem(request, answer, peer) if request.invitation else why
        if why is None and not answer.granted:
            answer.granted = roster.renewal(peer, request.certificates)
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
        entry = self.active_view.get(peer)
        if entry is not None and self._transport.up:
            entry.failures += 1
            if entry.failures >= GIVE_UP_AFTER and boot_seconds() - entry.seen > GIVE_UP_SECONDS:
                del self.active_view[peer]
                logger.info("Lost peer %s", peer_id(peer))
                if entry.addresses:
                    self.addresses.lost(peer, entry.addresses, found=entry.found)

    def limits(self, peer: bytes) -> Limits | None:
        """The limits of a message between this node and the peer; None if they have not shaken hands, or the run is
        private and the peer no member any more."""
        session = self.sessions.get(peer)
        return session.limits if session is not None and self.welcomes(peer) else None

    def skipped(self) -> dict[bytes, str]:
        """By peer that may be one of this node's: why none of its addresses is dialled."""
        return {peer: why for peer, why in self.addresses.skipped().items() if self.welcomes(peer)}

    def observes(self, peer: bytes) -> bool:
        """Whether the peer shook hands as an observer."""
        session = self.sessions.get(peer)
        return session is not None and session.observer

    def welcomes(self, peer: bytes) -> bool:
        """Whether the run is open, or the key a member's."""
        return self._roster is None or self._roster.admits(peer)

    def answered(self, peer: bytes) -> None:
        """Note a successful call."""
        entry = self.active_view.get(peer)
        if entry is not None:
            entry.failures, entry.seen = 0, boot_seconds()

    def some_addresses(self, count: int, besides: bytes) -> list[str]:
        """Addresses of random peers of the view to send to another peer: two each, in different scopes if possible."""
        peers = [peer for peer in self.active_view.values() if peer.addresses and peer.id != besides]
        chosen = self._rng.sample(peers, min(count, len(peers)))
        return [address for peer in chosen for address in varied(peer.addresses, ADDRESSES_TOLD)]

    def some_places(self, count: int, besides: bytes) -> list[bytes]:
        """Places of random peers of the view of a private run, as these signed them."""
        if self._places is None:
            return []
        known = [self._places.of(peer) for peer in self.active_view if peer != besides]
        found = [place.encoded for place in known if place is not None]
        return self._rng.sample(found, min(count, len(found)))

    def hear_places(self, places: Sequence[bytes], most: int, peer: bytes) -> bool:
        """Take at most so many places of members that a peer sends. Return whether any is of a new peer."""
        if self._places is None:
            return False
        news = False
        for place in self._places.hear(places, most, peer):
            news |= self.addresses.hear(place.addresses, place.member)
        known, own = self.active_view.get(peer), self._places.of(peer)
        if known is not None and own is not None:
            known.addresses = list(dict.fromkeys((*known.addresses, *own.addresses)))[:MAX_ADDRESSES]
        return news

    def save_cache(self) -> None:
        """Keep addresses for the next start, but of what the owner named none of another run."""
        others = {peer for peer, why in self.refused.items() if why != LOOKS_ON}
        elsewhere = others - self.majors.keys() if self._roster is None else ()
        view = ([p.addresses for p in self.active_view.values() if p.found is so] for so in (True, False))
        self.addresses.save(view, elsewhere)

    def _hello(self) -> ftis_pb2.Handshake:
        hello = greeting(self._run_file.run, [] if self._observing else self.own_addresses)
        hello.observer = self._observing
        if self._roster is not None:
            hello.certificates = self._roster.own
        if self._places is not None and not self._observing and (own := self._places.own(self._near_addresses)):
            hello.places.append(own)
        return hello

    def _admit(self, peer: bytes, hello: ftis_pb2.Handshake, *, found: bool, links: Sequence[str] = ()) -> None:
        self.refused.pop(peer, None)
        self.majors.pop(peer, None)
        self._warned.discard(peer)
        session = self.sessions.begin(peer, OWN.shared_with(hello.limits), observer=hello.observer)
        session.note_time(hello.time)
        if hello.observer:
            self.active_view.pop(peer, None)
            self.addresses.met(peer, (), found=found)
            return
        known = self.active_view.get(peer)
        if known is None:
            self._make_room_in_view(found)
        claims = (text for text in hello.addresses[:MAX_ADDRESSES] if peer_at(text) == peer)
        addresses = ranked(text for text in claims if self.addresses.may_dial(text, peer) or is_plain(text))
        if known is None:
            agent = plain(hello.agent, 64)
            logger.info("Met peer %s (%s)", peer_id(peer), agent)
            self.active_view[peer] = known = Peer(peer, [], agent, found)
        known.links, known.told = links or known.links, self._tells()
        addresses.sort(key=lambda text: text.rpartition("/p2p/")[0] not in known.links)
        known.addresses, known.failures, known.seen = addresses or known.addresses, 0, boot_seconds()
        self.addresses.met(peer, addresses, found=found)

    def _make_room_in_view(self, found: bool) -> None:
        inbound = [peer for peer in self.active_view.values() if not peer.found]
        if not found and len(inbound) >= INBOUND_MAX:
            leaving = inbound
        elif len(self.active_view) >= VIEW_SIZE:
            # A dictionary keeps its order.
            anchors = [peer for peer in self.active_view.values() if peer.found][:ANCHORS]
            leaving = [peer for peer in self.active_view.values() if peer not in anchors]
        else:
            return
        vouched = [peer for peer in leaving if self._traffic.recorded(peer.id)][:VOUCHED]
        leaving = [peer for peer in leaving if peer not in vouched]
        networks = [network_of(peer.addresses) for peer in leaving]
        crowd = Counter(networks)
        crowded = max(crowd.values())
        fullest = [peer for peer, network in zip(leaving, networks, strict=True) if crowd[network] == crowded]
        del self.active_view[self._rng.choice(fullest).id]

    def _other_protocol(self, peer: bytes, major: int) -> str:
        self.majors[peer] = major
        return handshake.other_protocol(major)

    def _refuse(self, peer: bytes, reason: str) -> None:
        if peer not in self.refused:
            logger.warning("Peer %s is left out: %a", peer_id(peer), reason)
        self.refused[peer] = reason
        self.addresses.refused(peer)
        self.active_view.pop(peer, None)
        self.sessions.pop(peer, None)
