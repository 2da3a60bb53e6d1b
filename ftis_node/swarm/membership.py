"""Who else is there: handshakes, a bounded view of living peers, and where to look when it is empty."""

from __future__ import annotations

import json
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
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.files import replace_text
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
from ftis_node.swarm.bounded import make_room
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.handshake import (
    MAX_ADDRESSES,
    PROTOCOL_MAJOR,
    greeting,
    other_protocol,
    plain,
    polite_refusal,
    shake,
)
from ftis_node.swarm.identity import Identity, peer_id
from ftis_node.swarm.limits import OWN, Limits
from ftis_node.swarm.peer_clocks import PeerClocks
from ftis_node.swarm.retries import TRIES_OF_MET, Retries
from ftis_node.swarm.tellers import Tellers
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.transport import Health, Transport, Unreachable

VIEW_SIZE = 64
HEARD_SIZE = 256
MET_SIZE = 256
assert MET_SIZE > VIEW_SIZE, "those that were met include the view, and the oldest outside the view makes room"
# Identities and addresses are free. Peers that came by themselves have at most half of the view; the first that this
# node found stay while they answer, and so do the first sixteen that have a record as authors. Of the rest those make
# room that crowd together in one network; in which a peer is it says itself, so that rule alone would spare no honest
# one. What one peer tells of others fills at most an eighth of what this node has heard.
INBOUND_MAX = VIEW_SIZE // 2
ANCHORS = 8
VOUCHED = INBOUND_MAX // 2
TELLER_PART = 8
ADDRESSES_TOLD = 2
PEERS_IN_A_HANDSHAKE = 16
# Addresses that one peer named and this node dials: as many as one answer has, and as many again a minute.
DIALS_AT_ONCE = float(PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD)
DIALS_A_SECOND = DIALS_AT_ONCE / 60
# A peer is lost after so many failures in a row, if nothing was heard of it for as long as a p2pd takes to come back.
GIVE_UP_AFTER = 3
GIVE_UP_SECONDS = 8.0
HALF_DEAD_AFTER = 2  # greetings in a row that were not answered

logger = logging.getLogger(__name__)


class Reachability(StrEnum):
    """How others get at this node."""

    DIRECT = "direct"  # or nothing is known to the contrary
    RELAYED = "relayed"
    OUTBOUND_ONLY = "outbound-only"


@dataclass(eq=False)
class Peer:
    """A peer that shook hands with this node and belongs to its run. addresses: the best first. found: it was this node
    that greeted, and not the peer."""

    id: bytes
    addresses: list[str]
    agent: str
    found: bool = False
    seen: float = field(default_factory=boot_seconds)
    failures: int = 0


class Membership:
    """The view: at most 64 peers, whom this node asks. Others are only heard of until a handshake succeeds.

    Whoever shook hands may ask, also when it has left the view to make room: else most of a large swarm's questions
    would be answered with "we have not met", for views are not mutual.

    Whom others name is dialled in private networks, or on this machine, only if this node is at home there by its
    owner's word: or strangers could make it knock at the doors of its own network.
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
    ) -> None:
        """
        Args:
            recorded: whether a peer has a record as an author.
        """
        self._rng = rng or random.Random()
        self.view: dict[bytes, Peer] = {}
        self.refused: dict[bytes, str] = {}
        self.majors: dict[bytes, int] = {}  # of those refused, the versions that are not this node's
        self.health: Health | None = None
        self.clocks = PeerClocks()
        self._transport = transport
        self._identity = identity
        self._run_file = run_file
        self._run_text = run_file_as_json(run_file)
        self._traffic = traffic
        self._cache = cache
        self._recorded = recorded
        self._heard: dict[bytes, dict[str, bytes | None]] = {}  # addresses, and who named each
        self.tellers = Tellers()
        self._tellers: dict[bytes, bytes] = {}  # of peers heard of, who told
        self._retries = Retries(boot_seconds)
        self._met: dict[bytes, Limits] = {}  # peers of this run, in the view or not
        self._dials = Budgets(boot_seconds, DIALS_A_SECOND, DIALS_AT_ONCE)
        self._trusted: frozenset[str] = frozenset()
        self._owners: frozenset[bytes | None] = frozenset()  # peers that this node's owner named
        how = transport.listening
        self._at_home = Whereabouts(how.host, (*how.announce, *how.relays))
        self.own_addresses: list[str] = []
        self._told: set[bytes] = set()  # whom the owner named and who did not answer

    def trust(self, addresses: Iterable[str]) -> None:
        """These are this node's owner's: wherever they lead, it dials them, and others in such networks."""
        self._trusted = frozenset(addresses)
        self._owners = frozenset(map(peer_at, self._trusted))
        self._at_home.add(self._trusted)

    async def refresh_addresses(self) -> list[str]:
        """Asks p2pd again where this node may be dialled; while it does not answer, what it said last stands."""
        try:
            found = ranked(await self._transport.addresses())
        except Exception as error:  # hivemind raises anything from a socket error to what its parser raises
            logger.debug("p2pd does not say where this node may be dialled: %r", error)
            return self.own_addresses
        self.health = await self._transport.health() or self.health
        if self._only_dials():  # nobody shall waste time on addresses that do not answer
            found = [address for address in found if is_relayed(address)]
        self.own_addresses = varied(found, MAX_ADDRESSES)
        return self.own_addresses

    async def _look_where(self, peer: bytes) -> None:
        """The owner named this peer, perhaps by a host's name; where the connection leads, this node is at home."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            self._at_home.add((await self._transport.neighbours()).get(peer, ()))

    def reachability(self) -> Reachability:
        """How others get at this node, by evidence."""
        if not self._only_dials():
            return Reachability.DIRECT
        return Reachability.RELAYED if any(map(is_relayed, self.own_addresses)) else Reachability.OUTBOUND_ONLY

    def _only_dials(self) -> bool:
        """Whether it does not listen, or AutoNAT has found out that nobody can dial it."""
        if not self._transport.listening.listen:
            return True
        return self.health is not None and self.health.reachability == "private"

    def hear(self, addresses: Sequence[str], teller: bytes | None = None) -> bool:
        """Remembers addresses that somebody mentioned; anything that is not an address of a peer is ignored.

        Args:
            teller: who did; None: this node's own sources.

        Returns whether any of them is a peer that was not known at all.
        """
        news = False
        for text in addresses[:HEARD_SIZE]:
            peer = peer_at(text)
            if peer is None or peer == self._identity.author or (teller is not None and not self._may_dial(text)):
                continue
            self._retries.named(peer)
            if peer not in self._heard:
                self._make_room_to_hear(teller)
                if teller is not None:
                    self._tellers[peer] = teller
            news |= peer not in self._heard and peer not in self.view
            known = self._heard.setdefault(peer, {})
            if text not in known:
                self._heard[peer] = _own_first(peer, {text: teller, **known})
            elif teller is None:
                known[text] = None
        return news

    def _may_dial(self, address: str) -> bool:
        return address in self._trusted or self._at_home.reach(address)

    def _to_dial(self, peer: bytes) -> list[str]:
        """Of the addresses that were heard of a peer those that are dialled now, which is counted."""
        return [
            text
            for text, teller in self._heard.get(peer, {}).items()
            if self._may_dial(text) and (teller is None or self._dials.take(teller))
        ]

    def _make_room_to_hear(self, teller: bytes | None) -> None:
        if teller is not None:
            told = [peer for peer, who in self._tellers.items() if who == teller]
            if len(told) >= HEARD_SIZE // TELLER_PART:
                self._forget(told[0])
                return
        if len(self._heard) >= HEARD_SIZE:
            self._forget(self._rng.choice(list(self._heard)))

    def strangers(self) -> list[bytes]:
        """Peers heard of but not in the view, of which none was greeted in vain a moment ago.

        Those that the owner named come first. Of the rest those who told of them have turns, so that nobody who names
        fresh peers without end keeps others from being greeted. Of one teller, those that were met before come first;
        otherwise the order is random.
        """
        found = [peer for peer in self._heard if peer not in self.view and not self._retries.seconds(peer)]
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
        """Hears of bootstraps again; a node that is alone greets them without a pause."""
        self.hear(addresses)
        if not self.view:
            for peer in filter(None, map(peer_at, addresses)):
                self._retries.forget(peer)

    def patience(self) -> float:
        """Seconds until another of the peers that did not answer may be greeted; infinite if there are none."""
        waits = (self._retries.seconds(peer) for peer in self._heard if peer not in self.view)
        return min(filter(None, waits), default=math.inf)

    def called(self, peer: bytes) -> bool:
        """Notes that a peer calls. One that this node has met, and lost since, lives after all.

        Returns whether it is to be greeted now.
        """
        if peer in self.view or peer not in self._met:
            return False
        if peer not in self._heard:
            self._make_room_to_hear(None)
            self._heard[peer] = {}
        self._retries.named(peer)
        return not self._retries.seconds(peer)

    async def dial(self, peer: bytes) -> None:
        """Makes sure of a connection to a peer of the view, after one's own p2pd has lost all."""
        try:
            await self._transport.connect(peer, list(filter(self._may_dial, self.view[peer].addresses)))
        except Unreachable as error:
            logger.debug("%s", error)
            self.failed(peer)

    async def greet(self, peer: bytes) -> bool:
        """Dials a peer, if there is no connection, and shakes hands; True if it is now in the view."""
        addresses = self._to_dial(peer)
        if not addresses and any(map(self._may_dial, self._heard.get(peer, ()))):
            return False  # who told of it has told enough for now
        try:
            if not addresses and peer in self._heard and peer not in self.view and not await self._connected(peer):
                raise Unreachable("none of its addresses is one to dial")
            await self._transport.connect(peer, addresses)
            if peer in self._owners:
                await self._look_where(peer)
            answer = await shake(self._transport, peer, self._hello())
        except Unreachable as error:
            level = logging.WARNING if peer in self._owners and peer not in self._told else logging.DEBUG
            self._told |= {peer} & self._owners
            logger.log(level, "No handshake with %s: %s", peer_id(peer), error)
            await self._greeted_in_vain(peer)
            return False
        self._traffic.received[peer] += answer.ByteSize()
        if answer.major != PROTOCOL_MAJOR:
            self._refuse_protocol(peer, answer.major)
            return False
        if answer.refusal or answer.run_id != self._run_file.run.id:
            self._refuse(peer, plain(answer.refusal, 200) or "it belongs to another run")
            return False
        self.tellers.met(self._tellers.get(peer))
        self._admit(peer, answer, found=True)
        self.hear(answer.peers[: PEERS_IN_A_HANDSHAKE * ADDRESSES_TOLD], peer)
        return True

    async def _greeted_in_vain(self, peer: bytes) -> None:
        """It is greeted again later, or forgotten until somebody names it again."""
        if peer not in self._heard:
            return
        times = self._retries.failed(peer)
        if times == 1 and self._transport.up:
            self.tellers.missed(self._tellers.get(peer))
        if peer not in self._owners and times >= (TRIES_OF_MET if peer in self._met else GIVE_UP_AFTER):
            self._forget(peer)
        if peer not in self.view and times % HALF_DEAD_AFTER == 0:
            # p2pd takes a connection for alive on which nothing arrives any more; without it, p2pd dials anew.
            await self._transport.disconnect(peer)

    async def _connected(self, peer: bytes) -> bool:
        """Whether p2pd has a connection to it, as when the peer has called."""
        with suppress(Exception):  # hivemind raises anything from a socket error to what its parser raises
            return peer in await self._transport.connected()
        return False

    def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        """Answers a handshake; a peer of the same run and major version enters the view."""
        self._traffic.received[peer] += request.ByteSize()
        answer = self._hello()
        if request.major != PROTOCOL_MAJOR:
            answer.refusal = polite_refusal(request.major)
            self._refuse_protocol(peer, request.major)
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
            answer.peers.extend(self.some_addresses(PEERS_IN_A_HANDSHAKE, peer))
        self._traffic.sent[peer] += answer.ByteSize()
        return answer

    def failed(self, peer: bytes) -> None:
        """Notes a failed call; after three in a row and some seconds of silence the peer leaves the view. From then on
        it is greeted again.

        While this node's own p2pd is down, nobody is to blame.
        """
        entry = self.view.get(peer)
        if entry is not None and self._transport.up:
            entry.failures += 1
            if entry.failures >= GIVE_UP_AFTER and boot_seconds() - entry.seen > GIVE_UP_SECONDS:
                del self.view[peer]
                logger.info("Lost peer %s", peer_id(peer))
                if entry.addresses:
                    named = self._heard.get(peer, {})
                    self._hear_claims(peer, entry.addresses)  # others may have named a newer address, or false ones
                    self._heard[peer] = _own_first(peer, named | self._heard[peer])

    def limits(self, peer: bytes) -> Limits | None:
        """What fits into a message between the two; None if they have not shaken hands."""
        return self._met.get(peer)

    def drop(self, peer: bytes) -> None:
        """It leaves the view, and may come back by a handshake."""
        self.view.pop(peer, None)

    def answered(self, peer: bytes) -> None:
        """Notes a call that worked."""
        entry = self.view.get(peer)
        if entry is not None:
            entry.failures, entry.seen = 0, boot_seconds()

    def some_addresses(self, count: int, besides: bytes) -> list[str]:
        """Addresses of some peers of the view, to tell another: two of each, as different as may be."""
        peers = [peer for peer in self.view.values() if peer.addresses and peer.id != besides]
        chosen = self._rng.sample(peers, min(count, len(peers)))
        return [address for peer in chosen for address in varied(peer.addresses, ADDRESSES_TOLD)]

    def load_cache(self) -> None:
        """Hears again of the peers that a previous start knew; where that was at home, its owner has to say again."""
        if self._cache is not None:
            with suppress(OSError, ValueError):
                cached = json.loads(self._cache.read_text())
                if isinstance(cached, list):
                    self.hear([text for text in cached if isinstance(text, str)])

    def save_cache(self) -> None:
        """Writes down the view's addresses, for the next start."""
        if self._cache is not None and self.view:
            dialled = (filter(self._may_dial, peer.addresses) for peer in self.view.values())
            addresses = [address for some in dialled for address in varied(some, ADDRESSES_TOLD)]
            replace_text(self._cache, json.dumps(addresses))

    def _hello(self) -> ftis_pb2.Handshake:
        return greeting(self._run_file.run, self.own_addresses)

    def _forget(self, peer: bytes) -> None:
        self._heard.pop(peer, None)
        self._retries.forget(peer)
        self._tellers.pop(peer, None)

    def _admit(self, peer: bytes, hello: ftis_pb2.Handshake, *, found: bool) -> None:
        self.refused.pop(peer, None)
        self._retries.forget(peer)
        self.majors.pop(peer, None)
        self._told.discard(peer)
        self.clocks.note(peer, hello.time)
        self._met.pop(peer, None)
        while len(self._met) >= MET_SIZE:
            del self._met[next(met for met in self._met if met not in self.view)]
        self._met[peer] = OWN.shared_with(hello.limits)
        known = self.view.get(peer)
        if known is None:
            self._make_room_in_view(found)
        claims = (text for text in hello.addresses[:MAX_ADDRESSES] if peer_at(text) == peer)
        addresses = ranked(text for text in claims if text in self._trusted or is_plain(text))
        if known is None:
            agent = plain(hello.agent, 64)
            logger.info("Met peer %s (%s)", peer_id(peer), agent)
            self.view[peer] = Peer(peer, addresses, agent, found)
        else:
            known.addresses, known.failures, known.seen = addresses or known.addresses, 0, boot_seconds()
        if addresses:
            self._hear_claims(peer, addresses)

    def _hear_claims(self, peer: bytes, addresses: Sequence[str]) -> None:
        """What a peer says of itself replaces what others said. Dials of it are counted as the peer's own."""
        self._forget(peer)
        self._make_room_to_hear(None)
        self._heard[peer] = {text: None if text in self._trusted else peer for text in addresses}

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
        make_room(self.majors, peer, HEARD_SIZE)
        self.majors[peer] = major

    def _refuse(self, peer: bytes, reason: str) -> None:
        if peer not in self.refused:
            logger.warning("Peer %s is left out: %a", peer_id(peer), reason)
        if (forgotten := make_room(self.refused, peer, HEARD_SIZE)) is not None and forgotten not in self._heard:
            self._retries.forget(forgotten)
        self.refused[peer] = reason
        self._retries.refused(peer)
        self.view.pop(peer, None)
        self._met.pop(peer, None)


def _own_first(peer: bytes, addresses: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """At most eight, with who named each: four that the peer itself or this node's owner named, then the first."""
    own = [text for text, teller in addresses.items() if teller is None or teller == peer]
    return dict(islice((dict.fromkeys(own[: MAX_ADDRESSES // 2]) | addresses).items(), MAX_ADDRESSES))
