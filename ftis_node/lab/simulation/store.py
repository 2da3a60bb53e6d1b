"""The packets of a simulation, and the store that holds them: `store.packets.PacketStore` without a disk.

A packet is small, so that thousands of stores fit into memory, but it is a real one: admission lets it through. The
network counts it as if it had a real packet's bytes, see `Network.packet_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ftis_node.config.run import Run
from ftis_node.packet import Completion, Group, Packet, encode, pack_group, packet_digest, prompt_digests
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.table import Arrival

EOS = 3
PROMPT = [0]
RUN = Run(
    task="gsm8k",
    data="0" * 64,
    template="{question}",
    reward="gsm8k",
    group=2,
    slots=64,
    prompt_tokens=1,
    completion_tokens=2,
    temperature=1.0,
    eos=(EOS,),
    tokenizer="0" * 64,
    vocabulary=4,
)
CONTEXT = AdmissionContext(RUN, prompt_digests([PROMPT]))
_LOGPROBS = np.zeros(1, np.float32)
_WRONG, _RIGHT = 0, 1  # token ids of an answer


def make_packet(author: bytes, round: int, slot: int, policy_step: int, *, signal: bool) -> tuple[Group, bytes]:
    """A group of two answers, one of them wrong if the rewards are to differ."""
    answers = (_RIGHT, _WRONG if signal else _RIGHT)
    completions = [Completion(np.array([answer, EOS], np.uint32), np.zeros(2, np.float32), True) for answer in answers]
    packet = pack_group(
        run_id=RUN.id,
        author=author,
        round=round,
        slot=slot,
        policy_step=policy_step,
        prompt_ids=PROMPT,
        completions=completions,
    )
    body = encode(packet)
    return Group(author, 0, packet, packet_digest(body)), body


def rewards(packet: Packet) -> tuple[float, ...]:
    """1 for a right answer, 0 for a wrong one."""
    return tuple(float(completion.token_ids[0] == _RIGHT) for completion in packet.completions())


def packet_ref(slot: int, body: bytes) -> PacketRef:
    """What an announcement says of a packet."""
    return PacketRef(slot=slot, digest=packet_digest(body), size=len(body))


PACKET_BYTES = len(make_packet(bytes(38), 1_700_000_000_000, 0, 1, signal=True)[1])


class SimulatedStore:
    """What a node holds and has dealt with."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, bytes] = {}
        self._seen: set[tuple[bytes, int, int]] = set()

    def add(self, groups: Iterable[tuple[Group, bytes]]) -> None:
        for group, body in groups:
            self._bodies[group.digest] = body
            self._seen.add(group.key)

    def arrive(self, arrived: Iterable[Arrival]) -> None:
        self.add((one.group, one.body) for one in arrived)

    def body(self, digest: bytes) -> bytes | None:
        return self._bodies.get(digest)

    def seen(self, author: bytes, round: int, slot: int) -> bool:
        return (author, round, slot) in self._seen

    def settle(self, keys: Iterable[tuple[bytes, int, int]], fate: str) -> None:
        self._seen.update(keys)
