"""Membership: handshakes, and the view, a bounded set of live peers."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from ftis_node.config.run import RunFile, run_file_as_json
from ftis_node.host.clocks import boot_seconds
from ftis_node.step_report import Health
from ftis_node.swarm.address_book import ADDRESSES_TOLD, PASSIVE_VIEW_MAX, PEERS_IN_A_HANDSHAKE, AddressBook
from ftis_node.swarm.addresses import host_of, is_plain, is_relayed, network_of, peer_at, ranked, varied
from ftis_node.swarm.ftis_pb2 import ExchangeResponse, Handshake
from ftis_node.swarm.handshake import (
    HANDSHAKE_SECONDS,
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
from ftis_node.swarm.limits import OWN, Bounded, Limits
from ftis_node.swarm.open_run import OpenRun
from ftis_node.swarm.places import Places
from ftis_node.swarm.sessions import LOOKS_ON, SESSIONS_MAX, Sessions
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Transport, Unreachable, resolved

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

Introducing: TypeAlias = Handshake | ExchangeResponse

logger = logging.getLogger(__name__)


class Reachability(StrEnum):
    """How peers can reach this node. `status`, metrics and self-reports have these values."""

    DIRECT = "direct"  # also while nothing is known
    RELAYED = "relayed"
    OUTBOUND_ONLY = "outbound-only"


@dataclass(eq=False)
class Peer:
    """A peer of this run that shook hands with this node, in its active view.

    id: 38 bytes. addresses: its multiaddrs, the best first; empty if none is known. found: when it came into the view,
    this node greeted it, and not the other way round. links: the far ends of its connections when this node greeted it
    last, without ``/p2p/ID``; they only order `addresses`. told: this node's addresses, as of their last handshake.
    seen: its last answer or handshake (`boot_seconds`). failures: calls in a row that it has not answered since.
    """

    id: bytes
    addresses: list[str]
    agent: str
    found: bool
    links: Sequence[str] = ()
    told: frozenset[str] = frozenset()
    seen: float = field(default_factory=boot_seconds)
    failures: int = 0


@dataclass(eq=False)
class Membership:
    """The view: at most 64 peers that this node calls.

    A peer that shook hands may call this node even after it left the view to make room. Views are not mutual, so
    otherwise most calls in a large swarm would be refused.

    An observer has no model and nothing to give: it may ask, and takes no place in the view.

    Everything here runs in the network process's event loop; nothing needs a lock.

    cache: a file of addresses for the next start. roster: the members of a private run. observing: this node is an
    observer.
    """

    transport: Transport
    identity: Identity
    run_file: RunFile
    traffic: Traffic
    cache: Path | None = None
    rng: random.Random = field(default_factory=random.Random)
    roster: OpenRun = field(default_factory=OpenRun)
    observing: bool = False

    def __post_init__(self) -> None:
        self.active_view = dict[bytes, Peer]()  # in order of entry, by which peers stay in a full view
        self.refused = Bounded[bytes, str](PASSIVE_VIEW_MAX)  # why, until a handshake succeeds; `peers` shows it
        self.majors = Bounded[bytes, int](PASSIVE_VIEW_MAX)  # other major versions of refused peers
        self.health: Health | None = None
        self.sessions = Sessions(self.active_view)
        self.addresses = AddressBook(
            self.identity.author,
            self.transport.listening,
            self.active_view,
            self.sessions,
            self.rng,
            self.cache,
            self.roster.private,
        )
        self.own_addresses = list[str]()
        self._places = Places(self.run_file.run.id, self.identity, self.roster, self.active_view)
        self._run_text = run_file_as_json(self.run_file)
        self._near_addresses = list[str]()  # in a private run: of this node, within its local networks

    def outside(self) -> list[bytes]:
        """The peers that this node's owner named and that are refused, but for their protocol: most are of another run.
        They are asked for records of the DHT only."""
        owners = self.addresses.owners
        return [peer for peer in owners if peer in self.refused and peer not in self.majors]

    async def refresh_addresses(self) -> list[str]:
        """Ask p2pd for this node's health and addresses; keep the last ones if it does not answer.

        Return those that peers may dial, at most eight; none, if no peer can dial this node. Peers learn of a change at
        their next handshake (see `outdated`).
        """
        try:
            found = ranked(await self.transport.addresses())
        except Exception as error:  # hivemind raises anything from a socket error to what its parser raises
            logger.debug("p2pd does not say where this node may be dialled: %r", error)
            return self.own_addresses
        self.health = await self.transport.health() or self.health
        if self.roster.private and self.transport.listening.listen:  # from there it can be dialled in any case
            self._near_addresses = self.addresses.local.dialled_by_neighbours(found)
        if self._only_dials():  # peers must not waste time on addresses that do not answer
            found = [address for address in found if is_relayed(address)]
        self.own_addresses = varied(found, MAX_ADDRESSES)
        return self.own_addresses

    def reachability(self) -> Reachability:
        """How peers can reach this node, by the evidence so far."""
        if not self._only_dials():
            return Reachability.DIRECT
        if any(map(is_relayed, self.own_addresses)):
            return Reachability.RELAYED
        return Reachability.OUTBOUND_ONLY

    def outdated(self) -> list[bytes]:
        """The peers of the view to shake hands with again, in a random order: those that know other addresses of this
        node than it has now, and the one that may renew this node's certificate."""
        now = self._tells()
        found = [peer.id for peer in self.active_view.values() if peer.told != now or self.roster.due_at(peer.id)]
        return self.rng.sample(found, len(found))

    def _tells(self) -> frozenset[str]:
        """All addresses that this node tells its peers now."""
        return frozenset((*self.own_addresses, *self._near_addresses))

    def _only_dials(self) -> bool:
        """Whether the node does not listen, or AutoNAT found that no peer can dial it."""
        if not self.transport.listening.listen:
            return True
        return self.health is not None and self.health.reachability == "private"

    async def greet(self, peer: bytes) -> bool:
        """Dial a peer if there is no connection, and shake hands. Return whether it is now in the view.

        False also if it was not dialled, because the peers that named its addresses have used up their dials. An
        unanswered greeting is not raised, but noted in the address book, which puts off the next one.
        """
        addresses = self.addresses.to_dial(peer)
        if addresses is None:
            return False
        try:
            links = await self._dial(peer, addresses)
            hello = self._hello()
            hello.invitation = self.roster.ticket_for(peer)
            answer = await shake(self.transport, peer, hello)
        except Unreachable as error:
            await self._unreachable(peer, error)
            return False
        self.traffic.received[peer] += answer.ByteSize()
        why = self._why_no_peer(answer, peer)
        if why:
            self._refuse(peer, why)
            return False
        if answer.granted:
            self.roster.accept(answer.granted, peer)
        self._admit(peer, answer, found=True, links=links)
        self.hear_of_peers(answer, PEERS_IN_A_HANDSHAKE, peer)
        return True

    async def _dial(self, peer: bytes, addresses: Sequence[str]) -> list[str]:
        """Connect to a peer; return the far ends of its connections, without ``/p2p/ID``. Raises Unreachable.

        If this node's owner named the peer by a host's name, the network of that host is one to dial in from now on.
        """
        known = self.addresses
        # Without an address that may be dialled, a candidate is connected only if it dialled this node.
        may_be_linked = addresses or peer not in known or peer in self.active_view
        if not may_be_linked and peer not in await self._links():
            raise Unreachable(known.skipped().get(peer, "no address of it is known"))
        await self.transport.connect(peer, addresses)
        links = (await self._links()).get(peer, [])
        hosts = await self._hosts_of(peer)  # a peer may also have come itself, from elsewhere
        known.scope.widen(link for link in links if host_of(link) in hosts)
        return links

    async def _unreachable(self, peer: bytes, error: Unreachable) -> None:
        """Note that a greeting failed. The log warns once, of a peer that the owner named, or while there are no peers.
        After every second failure in a row of a peer outside the view its connection is closed."""
        times = self.addresses.failed(peer, up=self.transport.up)
        matters = peer in self.addresses.owners or not self.active_view
        level = logging.WARNING if matters and times == 1 else logging.DEBUG
        logger.log(level, "No handshake with %s: %s", peer_id(peer), error)
        if times and peer not in self.active_view and times % HALF_DEAD_AFTER == 0:
            # p2pd may keep a dead connection on which nothing arrives any more; without it, p2pd dials again.
            await self.transport.disconnect(peer)

    def _why_no_peer(self, answer: Handshake, peer: bytes) -> str:
        """Return why a peer that answered a greeting cannot be one of this node's, or "". The roster takes what the
        answer shows of members."""
        if answer.major != PROTOCOL_MAJOR:
            return self._other_protocol(peer, answer.major)
        if answer.refusal or answer.run_id != self.run_file.run.id:
            if answer.removal:
                self.roster.hear([answer.removal], peer)
            return plain(answer.refusal, 200) or "it belongs to another run"
        if answer.observer:
            return LOOKS_ON
        return self.roster.meet(peer, answer.certificates)

    async def _hosts_of(self, peer: bytes) -> set[str]:
        """The hosts at which this node's owner named this peer. A name is looked up, which may take 5 s each; one that
        leads nowhere is left out."""
        hosts = set[str]()
        for text in self.addresses.names_of(peer):
            with suppress(OSError, TimeoutError):
                hosts.update(map(host_of, await asyncio.wait_for(resolved(text), HANDSHAKE_SECONDS)))
        return hosts

    async def _links(self) -> dict[bytes, list[str]]:
        """The connections of p2pd by peer, also those that peers opened; none if it does not say."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            return await self.transport.neighbours()
        return {}

    def on_handshake(self, request: Handshake, peer: bytes) -> Handshake:
        """Answer a handshake; a peer of the same run and major version enters the view, an observer gets a session.

        A caller that names no run gets the run file. In a private run a stranger gets a refusal and nothing else, not
        even the run's id.
        """
        self.traffic.received[peer] += request.ByteSize()
        room = self.traffic.room(peer) > 0  # else the answer is no larger than the question
        answer = self._hello()
        bare = Handshake(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)
        if not room:
            del answer.addresses[:]
        why = self.roster.at_the_door(request, answer, peer)
        if why:
            answer = bare
            answer.refusal = why
            answer.removal = self.roster.removal_for(peer)
            if request.run_id:
                self._refuse(peer, why)
        elif request.major != PROTOCOL_MAJOR:
            answer.refusal = polite_refusal(request.major)
            self._refuse(peer, self._other_protocol(peer, request.major))
        elif request.run_id:
            named = 0
            if room:
                named = PEERS_IN_A_HANDSHAKE
            self._take_caller(request, answer, peer, named)
        elif room:
            self._tell_run(request, answer)
        else:
            answer = bare
        self.traffic.answer(peer, answer.ByteSize())
        return answer

    def _take_caller(self, request: Handshake, answer: Handshake, peer: bytes, named: int) -> None:
        """Admit a caller of this run, and name so many peers (`named`) to it; refuse a caller of another run."""
        run_id = self.run_file.run.id
        if request.run_id == run_id:
            self._admit(peer, request, found=False)
            self.hear_of_peers(request, 0, peer)
            self.introduce(answer, named, peer)
            return
        theirs = request.run_id.hex()[:32]
        answer.refusal = f"this node is in run {run_id.hex()}, you in {theirs}"
        if request.tokenizer not in (b"", answer.tokenizer):
            answer.refusal += ", which has another tokenizer"
        self._refuse(peer, f"it is in another run, {theirs}")

    def _tell_run(self, question: Handshake, answer: Handshake) -> None:
        """Put the run file into the answer, and the addresses of the peer of the view that the question asks for."""
        answer.run_file = self._run_text
        sought = self.active_view.get(question.whereabouts)
        if sought is not None:
            answer.peers.extend(sought.addresses)

    def failed(self, peer: bytes) -> None:
        """Note a failed call. After three in a row and 8 s without an answer the peer leaves the view. If an address of
        it is known, it is in the passive view from then on.

        While this node's own p2pd is down, no peer is to blame.
        """
        entry = self.active_view.get(peer)
        if entry is None or not self.transport.up:
            return
        entry.failures += 1
        silence = boot_seconds() - entry.seen
        if entry.failures < GIVE_UP_AFTER or silence <= GIVE_UP_SECONDS:
            return
        del self.active_view[peer]
        logger.info("Lost peer %s", peer_id(peer))
        if entry.addresses:
            self.addresses.lost(peer, entry.addresses, found=entry.found)

    def limits(self, peer: bytes) -> Limits | None:
        """The limits of a message between this node and the peer; None if they have not shaken hands, or the run is
        private and the peer no member any more."""
        session = self.sessions.get(peer)
        if session is None or not self.roster.admits(peer):
            return None
        return session.limits

    def skipped(self) -> dict[bytes, str]:
        """By peer that may be one of this node's: why none of its addresses is dialled."""
        return {peer: why for peer, why in self.addresses.skipped().items() if self.roster.admits(peer)}

    def answered(self, peer: bytes) -> None:
        """Note that a peer answered a call, or shook hands: its failures begin anew. No effect outside of the view."""
        entry = self.active_view.get(peer)
        if entry is not None:
            entry.failures = 0
            entry.seen = boot_seconds()

    def introduce(self, answer: Introducing, count: int, to: bytes) -> None:
        """Name up to `count` random peers of the view in an answer to the peer `to`, itself left out: two addresses
        each, in different scopes if possible; and in a private run their places, as they signed them."""
        peers = [peer for peer in self.active_view.values() if peer.addresses and peer.id != to]
        for peer in self.rng.sample(peers, min(count, len(peers))):
            answer.peers.extend(varied(peer.addresses, ADDRESSES_TOLD))
            place = self._places.of(peer.id)
            if place is not None:
                answer.places.append(place.encoded)

    def hear_of_peers(self, message: Introducing, most: int, peer: bytes) -> bool:
        """Take what a peer names: addresses and places of up to `most` others, and its own place. They go into the
        address book; nothing is dialled here. Return whether any is of a new peer."""
        news = self.addresses.hear(message.peers[: most * ADDRESSES_TOLD], peer)
        for place in self._places.hear(message.places, most + 1, peer):
            news |= self.addresses.hear(place.addresses, place.member, peer)
        known = self.active_view.get(peer)
        own = self._places.of(peer)
        if known is not None and own is not None:
            addresses = (*known.addresses, *self._believed(own.addresses, peer))
            known.addresses = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        return news

    def _believed(self, addresses: Iterable[str], peer: bytes) -> list[str]:
        """Of what a peer says of its own addresses, those that name it and that a node listens on, or may dial here."""
        claims = (text for text in addresses if peer_at(text) == peer)
        return [text for text in claims if self.addresses.may_dial(text, peer) or is_plain(text)]

    def save_cache(self) -> None:
        """Write addresses for the next start into the cache; in an open run none that the owner named and whose peer
        turned out to be of another run. Raises OSError."""
        elsewhere = set[bytes]()
        if not self.roster.private:
            elsewhere = {peer for peer, why in self.refused.items() if why != LOOKS_ON} - self.majors.keys()
        self.addresses.save(elsewhere)

    def _hello(self) -> Handshake:
        """What this node says of itself first; an observer does not say where it is."""
        if self.observing:
            hello = greeting(self.run_file.run)
        else:
            hello = greeting(self.run_file.run, self.own_addresses)
            if self._near_addresses:
                hello.places.append(self._places.signed_own(self._near_addresses))
        hello.observer = self.observing
        hello.certificates = self.roster.own_chain
        return hello

    def _admit(self, peer: bytes, hello: Handshake, *, found: bool, links: Sequence[str] = ()) -> None:
        """Begin a session with a peer that shook hands, and put it into the view; an observer has no place there.

        A peer that is in the view keeps its place, and its `found`.

        Args:
            found: this node greeted it. links: see `Peer`.
        """
        self.refused.pop(peer, None)
        self.majors.pop(peer, None)
        session = self.sessions.begin(peer, OWN.shared_with(hello.limits), observer=hello.observer)
        session.note_time(hello.time)
        if hello.observer:
            self.active_view.pop(peer, None)
            self.addresses.met(peer, (), found=found)
            return
        if peer not in self.active_view:
            self._make_room_in_view(found)
            agent = plain(hello.agent, 64)
            logger.info("Met peer %s (%s)", peer_id(peer), agent)
            self.active_view[peer] = Peer(peer, [], agent, found)
        known = self.active_view[peer]
        known.links = links or known.links
        known.told = self._tells()
        addresses = ranked(self._believed(hello.addresses[:MAX_ADDRESSES], peer))
        addresses.sort(key=lambda text: text.rpartition("/p2p/")[0] not in known.links)
        known.addresses = addresses or known.addresses
        self.answered(peer)
        self.addresses.met(peer, addresses, found=found)

    def _make_room_in_view(self, found: bool) -> None:
        """Drop a peer from the view if another has no room there: of the 64 in it, half may have come by themselves.

        It is drawn among those in the most crowded network, but for the ones that stay in any case (see `ANCHORS` and
        `VOUCHED`). It keeps its session and its connection.

        Args:
            found: this node found the peer that needs room; else it came by itself.
        """
        view = self.active_view.values()
        inbound = [peer for peer in view if not peer.found]
        if not found and len(inbound) >= INBOUND_MAX:
            leaving = inbound
        elif len(view) >= VIEW_SIZE:
            # Those that are here for longest; a dictionary keeps its order.
            anchors = [peer for peer in view if peer.found][:ANCHORS]
            leaving = [peer for peer in view if peer not in anchors]
        else:
            return
        vouched = [peer for peer in leaving if self.traffic.recorded(peer.id)][:VOUCHED]
        leaving = [peer for peer in leaving if peer not in vouched]
        crowd = Counter(network_of(peer.addresses) for peer in leaving)
        most = max(crowd.values())
        fullest = [peer for peer in leaving if crowd[network_of(peer.addresses)] == most]
        del self.active_view[self.rng.choice(fullest).id]

    def _other_protocol(self, peer: bytes, major: int) -> str:
        """Note a peer's major version; return why it is refused."""
        self.majors[peer] = major
        return other_protocol(major)

    def _refuse(self, peer: bytes, reason: str) -> None:
        """Take a peer out of the view, and end its session; the log says why once. A later handshake may succeed."""
        if peer not in self.refused:
            logger.warning("Peer %s is left out: %a", peer_id(peer), reason)
        self.refused[peer] = reason
        self.addresses.refused(peer)
        self.active_view.pop(peer, None)
        self.sessions.pop(peer, None)
