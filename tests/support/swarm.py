"""A small run, honest packets for it, and nodes of a real swarm on this machine's loopback."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from ftis_node.config.run import Run, RunFile
from ftis_node.draw import draw
from ftis_node.host.clocks import boot_seconds
from ftis_node.packet import Completion, Group, Packet, decode, encode, pack_group, packet_digest, prompt_digests
from ftis_node.store.packets import PacketStore
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import Announcement, PacketRef, announce
from ftis_node.swarm.chronicle import Chronicle
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import Newcomers, Scored, Want
from ftis_node.swarm.pulling import Pulling, Trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.swarm import Swarm
from ftis_node.swarm.traffic import Traffic
from ftis_node.swarm.wire.libp2p import FtisSwarm, Libp2p
from ftis_node.swarm.wire.transport import DirectoryUser, Listening
from tests.support.virtual import VirtualLoop

VOCABULARY = 1000
EOS = 999
CAP = 16
ROWS = 50
PATIENCE = 120.0  # seconds until something has come about, however busy the machine is
PROMPTS = [[row, row + 1] for row in range(ROWS)]


def make_run(**changes: Any) -> Run:
    fields = {
        "task": "arithmetic",
        "data": "0" * 64,
        "template": "{question}",
        "reward": "arithmetic",
        "group": 3,
        "slots": 16,
        "prompt_tokens": 16,
        "completion_tokens": CAP,
        "temperature": 1.0,
        "eos": (EOS,),
        "tokenizer": "0" * 64,
        "vocabulary": VOCABULARY,
    }
    return Run(**(fields | changes))


def make_text_run(**changes: Any) -> Run:
    """A run for models of any tokenizer."""
    shared = make_run().model_dump(include={"task", "data", "template", "reward", "group", "slots", "temperature"})
    caps = {"prompt_bytes": 60, "completion_bytes": 40, "completion_tokens": CAP}
    return Run(**shared | {"packet": 2, "tokenizer": "any"} | caps | changes)


RUN = make_run()
OTHER_RUN = make_run(slots=8)
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))


def identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def is_in_specification(data: bytes) -> bool:
    """Whether a packet stands in proto/PACKET.md, in hex."""
    text = (Path(__file__).parents[2] / "proto" / "PACKET.md").read_text()
    return data.hex() in text.replace("\n    ", " ").replace(" ", "")


def store_request(*records: tuple[Any, ...]) -> dht_pb2.StoreRequest:
    """A call of hivemind's DHT that stores (key, subkey, value, expiration)."""
    keys, subkeys, values, times = zip(*records, strict=True)
    return dht_pb2.StoreRequest(
        keys=keys, subkeys=subkeys, values=values, expiration_time=times, in_cache=[False] * len(keys)
    )


def content(run: Run, author: bytes, round: int, slot: int, completions: Sequence[Completion], **fields: Any) -> Packet:
    """A packet of a run with these completions; fields: its prompt, by default that of the row drawn, and its step."""
    row = draw(run.id, author if run.parts == 1 else b"", round, slot, ROWS)
    named = {
        "run_id": run.id,
        "author": author,
        "round": round,
        "slot": slot,
        "policy_step": 0,
    }
    return pack_group(**named | {"prompt_ids": PROMPTS[row], "completions": completions} | fields)


def episode(*runs: Sequence[int], finished: bool = True, logprob: float = -0.5) -> Completion:
    """A completion of runs of ids: sampled, given, sampled, …"""
    ids = []
    given = []
    for index, run in enumerate(runs):
        ids += run
        given += [index % 2 == 1] * len(run)
    claims = np.full(given.count(False), logprob, np.float32)
    return Completion(np.array(ids, np.uint32), claims, finished, given=np.array(given, bool))


def packet(
    author: bytes,
    round: int,
    slot: int,
    *,
    run: Run = RUN,
    interior_eos: bool = False,
    other_prompt: bool = False,
) -> bytes:
    """A packet as an honest author of a run like RUN would make it, or with one lie in it."""
    rng = random.Random(f"{author.hex()} {round} {slot}")
    completions = []
    for _ in range(RUN.group):
        ids = [rng.randrange(EOS) for _ in range(rng.randint(2, CAP - 1))] + [EOS]
        if interior_eos:
            ids[0] = EOS
        logprobs = np.array([-rng.random() for _ in ids], np.float32)
        completions.append(Completion(np.array(ids, np.uint32), logprobs, True))
    row = draw(run.id, author, round, slot, ROWS)
    prompt = PROMPTS[(row + 1) % ROWS if other_prompt else row]
    return encode(content(run, author, round, slot, completions, prompt_ids=prompt, policy_step=round))


def group(author: bytes, body: bytes, run: Run = RUN) -> Group:
    read = decode(body)
    row = draw(run.id, author, read.round, read.slot, ROWS)
    return Group(author, row, read, packet_digest(body), body)


def refs_of(bodies: Sequence[bytes]) -> list[PacketRef]:
    """What an announcement says of packets, in each of which one completion is right."""
    return [PacketRef(slot, packet_digest(body), len(body), 1) for slot, body in enumerate(bodies)]


def announcement(
    author: Identity, round: int, bodies: list[bytes], *, run: Run = RUN, issued_at: int | None = None
) -> Announcement:
    if issued_at is None:
        issued_at = int(time.time())
    packets = refs_of(bodies)
    return announce(
        author,
        run_id=run.id,
        round=round,
        policy_step=round,
        issued_at=issued_at,
        packets=packets,
    )


def announced_slots(
    who: Identity, run: Run, slots: Iterable[int], *, round: int = 1, issued_at: int = 0
) -> Announcement:
    """Of packets in these slots, which nobody has."""
    refs = [PacketRef(slot, bytes(32), 100, 1) for slot in slots]
    return announce(
        who,
        run_id=run.id,
        round=round,
        policy_step=0,
        issued_at=issued_at,
        packets=refs,
    )


async def eventually(condition: Callable[[], bool], what: str, seconds: float = PATIENCE):
    """Waits until a condition holds; the test fails if that takes too long."""
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    while not condition():
        assert now() < deadline, f"in {seconds} s it did not come true that {what}"
        await asyncio.sleep(0.02)


def write_key(who: Identity, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    key = path / "identity.key"
    key.write_bytes(who.to_bytes())
    return key


def directory_user(who: Identity) -> DirectoryUser:
    """A node without peers."""
    nobody = frozenset[bytes]().__contains__
    return DirectoryUser(who, RUN.id, nobody, nobody, Traffic())


@contextlib.asynccontextmanager
async def transport(who: Identity, path: Path, port: int = 0, **listening: Any) -> AsyncIterator[Libp2p]:
    """A running p2pd with this identity; over TCP alone, for QUIC drops what is under way when a stream is reset.

    In virtual time it is a node in memory.
    """
    key = write_key(who, path)
    with tempfile.TemporaryDirectory(prefix="ftis-") as sockets:
        how = Listening(key, Path(sockets), port=port, **{"host": "127.0.0.1", "quic": False, **listening})
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            node = loop.node(who, how)
            yield cast(Libp2p, node)
            node.leave()
            return
        started = await Libp2p.start(how)
        try:
            yield started
        finally:
            await started.close()


async def _nothing(*_: object) -> AsyncIterator[ftis_pb2.FetchChunk]:
    for chunk in ():
        yield chunk


@dataclass(eq=False)
class Answers:
    """Handlers that a test fills in; the rest of what is asked is answered with nothing."""

    serve: Callable[[ftis_pb2.FetchRequest, bytes], AsyncIterator[ftis_pb2.FetchChunk]] = _nothing

    def admits(self, peer: bytes) -> bool:
        return True

    def knows(self, peer: bytes) -> bool:
        return True

    async def on_handshake(self, request: ftis_pb2.Handshake, peer: bytes) -> ftis_pb2.Handshake:
        return ftis_pb2.Handshake()

    async def on_exchange(self, request: ftis_pb2.ExchangeRequest, peer: bytes) -> ftis_pb2.ExchangeResponse:
        return ftis_pb2.ExchangeResponse()

    async def on_fetch(self, request: ftis_pb2.FetchRequest, peer: bytes) -> AsyncIterator[ftis_pb2.FetchChunk]:
        async for chunk in self.serve(request, peer):
            yield chunk


def stub(caller: Libp2p, called: Identity) -> Any:
    return FtisSwarm.get_stub(caller.p2p, PeerID(called.author))


async def once(request: ftis_pb2.FetchRequest) -> AsyncIterator[ftis_pb2.FetchRequest]:
    yield request


def take_round(store: PacketStore) -> int:
    """The next round number, taken."""
    number = store.upcoming_round()
    store.take_round(number)
    return number


class CountingStore(PacketStore):
    """A packet store that counts what was served from it."""

    def __init__(self, path: Path, first_round: int = 0):
        super().__init__(path, RUN.id, 10 << 20, clock=lambda: first_round)
        self.served: Counter[bytes] = Counter()

    def body(self, digest: bytes) -> bytes | None:
        body = super().body(digest)
        self.served[digest] += body is not None
        return body


@dataclass(eq=False)
class Member:
    """A node of a swarm: everything but the model."""

    identity: Identity
    transport: Libp2p
    store: CountingStore
    swarm: Swarm
    address: str
    run: Run = RUN
    appetite: int = 1000
    admitted: list[tuple[bytes, int, int]] = field(default_factory=list)

    @property
    def author(self) -> bytes:
        return self.identity.author

    @property
    def pulling(self) -> Pulling:
        assert self.swarm.pulling is not None, "it only looks on"
        return self.swarm.pulling

    def make(self, count: int, **lies: bool) -> set[tuple[bytes, int, int]]:
        """Makes a round of `count` groups, stores and announces them; returns their keys."""
        author = self.author
        round = take_round(self.store)
        bodies = [packet(author, round, slot, run=self.run, **lies) for slot in range(count)]
        groups = [group(author, body, self.run) for body in bodies]
        self.store.add(groups, own=True)
        self.swarm.announce(round, policy_step=round, packets=refs_of(bodies))
        return {(author, round, slot) for slot in range(count)}

    def met(self, *others: Member) -> bool:
        return {other.author for other in others} <= set(self.swarm.membership.active_view)


def held_up(node: Member, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Its next p2pd starts only when the event is set."""
    again = asyncio.Event()
    launch = node.transport._launch

    async def later():
        await again.wait()
        await launch()

    monkeypatch.setattr(node.transport, "_launch", later)
    return again


async def all_meet(*nodes: Member):
    def met() -> bool:
        return all(node.met(*(other for other in nodes if other is not node)) for node in nodes)

    await eventually(met, "everybody is in everybody's view")


@contextlib.asynccontextmanager
async def member(
    number: int,
    path: Path,
    bootstraps: list[str] | None = None,
    given: Sequence[str] = (),
    *,
    cache: bool = False,
    unix: Callable[[], float] = lambda: 0.0,
    run: Run = RUN,
    roster: Roster | None = None,
    observing: bool = False,
    chronicle: Chronicle | None = None,
    upload_bytes: float = 0.0,
    **listening: Any,
) -> AsyncIterator[Member]:
    """A node that runs until the block ends; a second one with the same number and path is the first one restarted.

    Args:
        unix: the wall clock, near which rounds are numbered.
        run: one like RUN. roster: its members, if it is private.
    """
    who = identity(number)
    home = path / f"member-{number}"
    async with transport(who, home, **listening) as network:
        store = CountingStore(home / "store.sqlite", int(1000 * unix()))
        store.skip_round()

        def want() -> Want:
            return Want(node.appetite - len(node.admitted), Newcomers(), sys.maxsize)

        async def take(arrived: Sequence[Arrival]):
            store.add([one.group for one in arrived], own=False)
            node.admitted += [one.group.key for one in arrived]

        reputation = Reputation(boot_seconds, unix=unix)
        swarm = Swarm(
            transport=network,
            identity=who,
            run_file=RunFile(run=run),
            reputation=reputation,
            max_age=600.0,
            trade=None if observing else Trade(AdmissionContext(run, CONTEXT.prompt_digests), store, want, take),
            peer_cache=home / "peers.json" if cache else None,
            roster=roster,
            chronicle=chronicle,
        )
        swarm.traffic.limit(upload_bytes)
        swarm.interval = swarm.idle = 0.1
        node = Member(who, network, store, swarm, next(iter(await network.addresses()), ""), run)
        await swarm.start(bootstraps or [], (), given)
        try:
            yield node
        finally:
            await swarm.close()
            store.close()


def scored(author: int, round_: int, slot: int, born: float, rewards: tuple[float, ...] = (1, 0)) -> Scored:
    """A group with rewards, as a pool has it."""
    name = bytes([author]) * 38
    completion = Completion(np.ones(1, np.uint32), np.zeros(1, np.float32), True)
    packet = content(
        RUN,
        name,
        round_,
        slot,
        [completion] * len(rewards),
        prompt_ids=[1],
    )
    made = Group(name, 0, packet, bytes(32), b"")
    return Scored(made, rewards, born)
