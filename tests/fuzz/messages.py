"""Targets for the messages of the three RPCs: each is parsed and given to its real handler, without a network.

An input is a conversation (`frames`): what one peer after another sends to one node.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2P, P2PHandlerError, PeerID

from ftis_node.config.run import RunFile
from ftis_node.errors import UserError
from ftis_node.packet import packet_digest
from ftis_node.swarm import ftis_pb2, gossip
from ftis_node.swarm.address_book import PASSIVE_VIEW_MAX
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.fetch import HolderFault, Uploads, fetch
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.handshake import MAX_ADDRESSES, fetch_run
from ftis_node.swarm.known import Known, Target
from ftis_node.swarm.limits import OWN as OWN_LIMITS
from ftis_node.swarm.limits import Limits
from ftis_node.swarm.membership import VIEW_SIZE, Membership
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.sessions import LACKING_MAX, SESSIONS_MAX
from ftis_node.swarm.table import Table
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.libp2p import FtisSwarm, Libp2p
from ftis_node.swarm.wire.transport import Listening
from tests.fuzz.frames import split
from tests.fuzz.world import AUTHOR, NOW, OWN, PEERS, RUN, peer_of, run_async, stopped_clock

CAPACITY = 16
LIMITS = (OWN_LIMITS, Limits(1, 2, 1), Limits(4, 64, 64))
BODIES = tuple(bytes([number]) * (100 + number) for number in range(3))
HELD = {packet_digest(body): body for body in BODIES}
_REFS = [PacketRef(slot, digest, len(body), 1) for slot, (digest, body) in enumerate(HELD.items())]
_FIELDS = {
    "run_id": RUN.id,
    "round": 1,
    "policy_step": 1,
    "issued_at": NOW,
    "packets": _REFS,
}
OWN_ANNOUNCEMENT = announce(OWN, **_FIELDS)
FETCHED = announce(AUTHOR, **_FIELDS)
_KNOWN = Known(FETCHED, FETCHED.encode(), 0.0, 0.0, None)
TARGETS = tuple(Target(_KNOWN, index) for index in range(len(_REFS)))
ADDRESSES = tuple(f"/ip4/192.0.2.{number}/tcp/4001/p2p/{peer.peer_id}" for number, peer in enumerate(PEERS))

# What the frames of each target are, by their kind.
HANDSHAKES = (ftis_pb2.Handshake,) * 3
EXCHANGES = (ftis_pb2.ExchangeRequest, ftis_pb2.ExchangeResponse, None)
REQUESTS = (ftis_pb2.FetchRequest,)
CHUNKS = (ftis_pb2.FetchChunk, None, None)


class Wire(P2P):
    """A libp2p without a network: every peer can be dialled, and answers what it is told to."""

    def __init__(self, answer: bytes = b""):
        super().__init__()
        self._answer = answer
        self._client = SimpleNamespace(connect=self._do_nothing, call_unary_handler=self._reply)

    def _terminate(self):
        """There is nothing to end."""

    async def _do_nothing(self, *args: object):
        return None

    async def _reply(self, *args: object) -> bytes:
        return self._answer

    async def iterate_protobuf_handler(
        self, peer: PeerID, name: str, requests: object, kind: type[Message]
    ) -> AsyncIterator[Message]:
        return self._messages(kind)

    async def _messages(self, kind: type[Message]) -> AsyncIterator[Message]:
        """As hivemind reads a stream, to its end."""
        reader = asyncio.StreamReader()
        reader.feed_data(self._answer)
        reader.feed_eof()
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message, error = await P2P.receive_protobuf(kind, reader)
                if error is not None:
                    raise P2PHandlerError(error.message)
                yield message


async def _open_door(place: str) -> str:
    return ""


def _transport(answer: bytes = b"") -> Libp2p:
    transport = Libp2p(Listening(Path(), Path()))
    transport.p2p = Wire(answer)
    transport.up = True
    transport.knock = _open_door
    return transport


# --- handshakes -------------------------------------------------------------------------------------------------------


def shake_hands(data: bytes):
    """Peers greet this node, answer its greetings, and send it their run."""
    random.seed(0)
    transport = _transport()
    node = Membership(transport, OWN, RunFile(run=RUN), Traffic())
    node.own_addresses = [ADDRESSES[0]]
    for frame in split(data):
        peer = peer_of(frame.peer).author
        transport.p2p = Wire(frame.body)
        kind = frame.kind % 3
        if kind == 0:
            with contextlib.suppress(DecodeError):
                answer = node.on_handshake(ftis_pb2.Handshake.FromString(frame.body), peer)
                assert answer.refusal.isprintable() and len(answer.refusal) < 300, "a refusal does not print"
                assert answer.ByteSize() < 1 << 14, "an answer is large"
        elif kind == 1:
            assert not run_async(node.greet(peer)) or peer in node.active_view, "who was greeted is not in the view"
        else:
            with contextlib.suppress(UserError):
                run_async(fetch_run(transport, [ADDRESSES[frame.peer % 8]], patience=0.0))
    _check_membership(node)


def _check_membership(node: Membership):
    assert len(node.active_view) <= VIEW_SIZE, "too many peers"
    assert len(node.addresses.strangers()) <= PASSIVE_VIEW_MAX, "too many named peers"
    for peer, known in node.active_view.items():
        assert peer not in node.refused and node.limits(peer) is not None, "a peer is let in and left out"
        assert known.agent.isprintable() and len(known.agent) <= 64, "a peer's name does not print"
        assert len(known.addresses) <= MAX_ADDRESSES, "too many addresses"
        assert all(parse_address(text) == peer for text in known.addresses), "an address of somebody else"
    assert all(why.isprintable() for why in node.refused.values()), "a refusal does not print"
    assert OWN.author not in node.addresses.strangers(), "it greets itself"


# --- exchanges --------------------------------------------------------------------------------------------------------


def listener(clock: list[float] | None = None) -> Gossip:
    """A node's gossip, with room for few announcements; clock: one number, the monotonic seconds."""
    now = clock or [0.0]
    table = Table(600.0, lambda: now[0], random.Random(0), capacity=CAPACITY)
    reputation = Reputation(lambda: now[0], unix=lambda: 0.0)
    return Gossip(table, RUN, OWN.author, reputation, lambda author, round, slot: slot == 1, lambda: None)


def exchange(data: bytes):
    """Peers ask this node, and answer what it asks them; some messages get lost and time passes."""
    now = [0.0]
    node = listener(now)
    node.announce(OWN_ANNOUNCEMENT)
    with stopped_clock():
        for frame in split(data):
            peer = peer_of(frame.peer).author
            limits = LIMITS[frame.peer % len(LIMITS)]
            if frame.kind % 3 == 0:
                with contextlib.suppress(DecodeError):
                    told = node.answer(ftis_pb2.ExchangeRequest.FromString(frame.body), peer, limits)
                    _check_told(told, limits)
            elif frame.kind % 3 == 1:
                _ask(node, peer, limits, frame.body)
            else:
                now[0] += len(frame.body)
                node.table.forget_peer(peer)
        _check_gossip(node)


def _ask(node: Gossip, peer: bytes, limits: Limits, answer: bytes):
    request = node.ask(peer, limits)
    _check_told(request, limits)
    try:
        further = node.take(request, ftis_pb2.ExchangeResponse.FromString(answer), peer, limits)
    except DecodeError:
        node.failed(request, peer)
        return
    if further is not None:
        _check_told(further, limits)
        node.unsent(further, peer)


def _check_told(message: ftis_pb2.ExchangeRequest | ftis_pb2.ExchangeResponse, limits: Limits):
    assert len(message.entries) <= max(1, limits.entries), "more entries than the other takes"
    assert len(message.mentions) <= limits.mentions, "more mentions than the other takes"
    assert len(message.wanted) <= limits.entries, "more is asked for than the other gives"
    assert message.ByteSize() > 0 or not message.entries, "it has no bytes"


def _check_gossip(node: Gossip):
    assert len(node.table) <= CAPACITY, "the table is too full"
    assert len(node.sessions) <= SESSIONS_MAX, "too many sessions"
    assert len(node._asked) <= gossip.IDS_MAX and len(node._dealt) <= gossip.IDS_MAX, "too many ids are remembered"
    for session in node.sessions.values():
        assert len(session.lacking) <= LACKING_MAX, "a session remembers too many ids"
    for known in node.table:
        made = known.announcement
        beyond = -1 << len(made.packets)  # bits of packets that there are not
        assert made.run_id == RUN.id and made.verify(), "what nobody signed is in the table"
        assert (made.author == OWN.author) == (known.first_sender is None), "somebody else speaks for this node"
        for mask in (known.have, known.done, *known.holders.values()):
            assert not mask & beyond, "a packet that there is not"
    for target in node.table.choose(4, lambda known: -1):
        assert target.ref.slot != 1 or target.key[0] == OWN.author, "what was dealt with is wanted again"


# --- packets on their way ---------------------------------------------------------------------------------------------


def serve(data: bytes):
    """A peer asks for packets, in as many requests of one stream as it likes."""
    frames = split(data)
    asked = []

    async def requests() -> AsyncIterator[ftis_pb2.FetchRequest]:
        for frame in frames:
            with contextlib.suppress(DecodeError):
                request = ftis_pb2.FetchRequest.FromString(frame.body)
                asked.extend(digest for digest in request.digests[: OWN_LIMITS.digests] if len(digest) == 32)
                yield request

    async def answers() -> list[ftis_pb2.FetchChunk]:
        context = SimpleNamespace(remote_id=PeerID(peer_of(frames[0].peer if frames else 0).author))
        return [chunk async for chunk in service.rpc_fetch(requests(), context)]

    uploads = Uploads(HELD.get, Traffic())
    service = FtisSwarm(SimpleNamespace(admits=lambda peer: True, knows=lambda peer: True, on_fetch=uploads.serve))
    chunks = run_async(answers())
    answered = [chunk.digest for chunk in chunks if len(chunk.digest) == 32]
    assert answered == asked, "it does not answer what was asked"
    for chunk in chunks:
        here = chunk.status == ftis_pb2.FetchChunk.HERE
        assert here or chunk.status == ftis_pb2.FetchChunk.GONE, "it is busy"
        assert here == (chunk.digest in HELD), "it does not say what it holds"
        assert chunk.packet == HELD.get(chunk.digest, b""), "it serves another packet"
    assert not uploads._active and not service._streams, "a stream never ends"


def fetch_packets(data: bytes):
    """A holder answers this node's request: with messages, with errors, or with whatever bytes."""
    stream = b""
    for frame in split(data):
        kind = frame.kind % 3
        if kind < 2:
            stream += P2P.MESSAGE_MARKER if kind == 0 else P2P.ERROR_MARKER
            stream += len(frame.body).to_bytes(P2P.HEADER_LEN, "big")
        stream += frame.body
    came = []

    async def pull():
        async for target, chunk in fetch(_transport(stream), peer_of(2).author, TARGETS, Traffic()):
            here = chunk.status == ftis_pb2.FetchChunk.HERE
            assert not here or chunk.packet == BODIES[target.index], "other bytes than the author signed"
            came.append(target.index)

    with contextlib.suppress(HolderFault):
        run_async(pull())
    assert len(came) == len(set(came)), "a packet came twice"
