"""The cost of the wire: bytes and CPU time of packing, unpacking and admitting one group of 12 × 256 tokens."""

from __future__ import annotations

import numpy as np

from ftis_node.lab.bench.needs import bench_needs
from ftis_node.lab.bench.packets import ROWS, make_context, make_packet, make_run, make_text_packet, make_text_run
from ftis_node.lab.bench.reading import bench_reading, built_in_tokenizers, median_us
from ftis_node.packet import Group, decode, encode, packet_digest, prompt_digests
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.identity import Identity

TOKENS = 256
ANNOUNCED_PACKETS = 8
ROUND, SLOT = 1_000, 3
READING = 10  # of so many repeats one times the tokenizers, which take a thousand times longer


def bench_wire(repeats: int = 200) -> dict[str, float]:
    """Sizes in bytes, times in microseconds of CPU (median over `repeats`).

    bytes_per_token and header_bytes are of a group of 12 completions of 256 tokens each; text_… are of packet version
    2, with 2.6 bytes of text a token. announcement_bytes is of a round of 8 packets. refuse_us is of a packet whose
    last log-prob is none, which is seen after all else. For spell_, align_ and read_us_per_token see `bench_reading`;
    the tokenizers are those of the built-in models; for index_, answering_ and nothing_us see `bench_needs`.

    Raises:
        RuntimeError: admission refuses the group or takes the other, which would make its time meaningless.
    """
    run, identity = make_run(TOKENS), Identity(bytes(32))
    context = make_context(run)
    packet = make_packet(run, identity.author, ROUND, SLOT, np.random.default_rng(0))
    data = encode(packet)
    outcome = admit(context, identity.author, data)
    if not isinstance(outcome, Group):
        raise RuntimeError(f"the benchmark's own group was refused: {outcome.detail}")
    refs = [PacketRef(slot, packet_digest(data), len(data), 1) for slot in range(ANNOUNCED_PACKETS)]
    announcement = announce(
        identity, run_id=run.id, round=ROUND, policy_step=ROUND, issued_at=1_760_000_000, packets=refs
    )
    garbage = data[:-4] + b"\xff" * 4
    if isinstance(admit(context, identity.author, garbage), Group):
        raise RuntimeError("a packet without a last log-prob was admitted")
    tokens = sum(packet.lengths)
    reading = bench_reading(TOKENS, max(1, repeats // READING), built_in_tokenizers())
    return (
        _bench_text(repeats)
        | reading
        | bench_needs(repeats)
        | {
            "bytes_per_token": len(data) / tokens,
            "header_bytes": len(data) - 8 * tokens,
            "encode_us": median_us(lambda: encode(packet), repeats),
            "decode_us": median_us(lambda: decode(data), repeats),
            "admit_us": median_us(lambda: admit(context, identity.author, data), repeats),
            "refuse_us": median_us(lambda: admit(context, identity.author, garbage), repeats),
            "announcement_bytes": len(announcement.encode()),
        }
    )


def _bench_text(repeats: int) -> dict[str, float]:
    """The same of a text run's packet: `text_…`."""
    run, identity = make_text_run(TOKENS), Identity(bytes(32))
    context = AdmissionContext(run, prompt_digests([""] * ROWS))
    packet = make_text_packet(run, identity.author, ROUND, SLOT, np.random.default_rng(0))
    data = encode(packet)
    outcome = admit(context, identity.author, data)
    if not isinstance(outcome, Group):
        raise RuntimeError(f"the benchmark's own group was refused: {outcome.detail}")
    return {
        "text_bytes_per_token": len(data) / (sum(packet.lengths) + sum(packet.finished)),
        "text_encode_us": median_us(lambda: encode(packet), repeats),
        "text_decode_us": median_us(lambda: decode(data), repeats),
        "text_admit_us": median_us(lambda: admit(context, identity.author, data), repeats),
    }
