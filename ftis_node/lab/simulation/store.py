"""What nodes of a simulation send and hold: packets, announcements, and `store.packets.PacketStore` without a disk.

A packet is small, so that thousands of stores fit into memory, but it is a real one: admission lets it through. The
network counts it as if it had a real packet's bytes, see `Network.packet_scale`.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ftis_node.config.run import Run
from ftis_node.host.clocks import unix_seconds
from ftis_node.lab.bench.packets import make_run
from ftis_node.packet import Completion, Group, Packet, encode, pack_group, prompt_digests
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import Announcement, decode_announcement

EOS = 3
PROMPT = [0]
_SMALL = {
    "group": 2,
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "eos": (EOS,),
    "vocabulary": 4,
}
RUN = Run(**make_run(2).model_dump() | _SMALL)
CONTEXT = AdmissionContext(RUN, prompt_digests([PROMPT]))
# Token ids of an answer.
_WRONG = 0
_RIGHT = 1


def make_packet(
    author: bytes,
    round: int,
    slot: int,
    policy_step: int,
    right: int,
) -> tuple[Packet, bytes]:
    """A group of two answers, of which so many are right; the packet, and its bytes."""
    wrong = RUN.group - right
    completions = []
    for answer in [_RIGHT] * right + [_WRONG] * wrong:
        ids = np.array([answer, EOS], np.uint32)
        logprobs = np.zeros(2, np.float32)
        completions.append(Completion(ids, logprobs, finished=True))
    packet = pack_group(
        run_id=RUN.id,
        author=author,
        round=round,
        slot=slot,
        policy_step=policy_step,
        prompt_ids=PROMPT,
        completions=completions,
    )
    return packet, encode(packet)


def rewards(packet: Packet) -> list[float]:
    """1 for a right answer, 0 for a wrong one."""
    answers = [completion.token_ids[0] for completion in packet.completions()]
    return [float(answer == _RIGHT) for answer in answers]


_, _body = make_packet(bytes(38), 1_700_000_000_000, slot=0, policy_step=1, right=1)
PACKET_BYTES = len(_body)


class SimulatedStore:
    """What a node holds and has dealt with. It has no quota and forgets nothing. See `PacketStore` for each method."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, bytes] = {}
        self._seen: set[tuple[bytes, int, int]] = set()
        self._round = int(1000 * unix_seconds())

    def upcoming_round(self) -> int:
        """Begins near the simulated clock, in milliseconds, and counts on by one."""
        return self._round

    def take_round(self, number: int) -> None:
        self._round = number + 1

    def add(self, groups: Sequence[Group], *, own: bool, ages: Sequence[float] = ()) -> None:
        """Holds these packets for ever; own ones count as seen too."""
        for group in groups:
            self._bodies[group.digest] = group.data
            self._seen.add(group.key)

    def body(self, digest: bytes) -> bytes | None:
        return self._bodies.get(digest)

    def seen(self, author: bytes, round: int, slot: int) -> bool:
        return (author, round, slot) in self._seen

    def holds(self, digest: bytes) -> bool:
        return digest in self._bodies

    def announced(self, data: bytes) -> None:
        """No simulated node starts again."""

    def latest_announced(self, max_age: float) -> list[tuple[bytes, float]]:
        return []

    def settle(self, keys: Iterable[tuple[bytes, int, int]], fate: str) -> None:
        self._seen.update(keys)


class Checked(Announcement, frozen=True):
    """An announcement whose signature the first node that received it has verified. data: its encoding."""

    sound: bool = False
    data: bytes = b""

    def encode(self) -> bytes:
        return self.data

    def verify(self) -> bool:
        return self.sound


class Reader:
    """Decodes announcements as the daemon does, each once, however many nodes receive it. It keeps all of a
    simulation."""

    def __init__(self) -> None:
        self._read: dict[bytes, Checked] = {}

    def __call__(self, data: bytes, *, max_packets: int) -> Announcement:
        known = self._read.get(data)
        if known is None:
            announcement = decode_announcement(data, max_packets=max_packets)
            fields = msgspec.structs.asdict(announcement)
            known = Checked(**fields, sound=announcement.verify(), data=data)
            self._read[data] = known
        return known
