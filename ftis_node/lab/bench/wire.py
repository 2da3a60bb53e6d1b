"""The cost of the wire: bytes and CPU time of packing, unpacking and admitting one group of 12 × 256 tokens."""

import numpy as np

from ftis_node.lab.bench import packets
from ftis_node.lab.bench.packets import ROWS
from ftis_node.lab.bench.reading import bench_reading, built_in_tokenizers, median_us
from ftis_node.packet import AnyPacket, Group, decode, encode, packet_digest, prompt_digests
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.identity import Identity

TOKENS = 256
ANNOUNCED_PACKETS = 8
ROUND = 1_000
SLOT = 3
READING = 10  # of so many repeats one times the tokenizers, which take a thousand times longer


def bench_wire(repeats: int = 200) -> dict[str, float]:
    """Sizes in bytes, times in microseconds of CPU (median over `repeats`).

    bytes_per_token and header_bytes are of a group of 12 completions of 256 tokens each; text_… are of packet version
    2, with 2.6 bytes of text a token. announcement_bytes is of a round of 8 packets. refuse_us is of a packet whose
    last log-prob is none, which is seen after all else. For spell_, align_ and read_us_per_token see `bench_reading`;
    the tokenizers are those of the built-in models.

    Raises:
        RuntimeError: admission refuses the group or takes the other, which would make its time meaningless.
    """
    identity = Identity(bytes(32))
    author = identity.author
    run = packets.make_run(TOKENS)
    context = packets.make_context(run)
    packet = packets.make_packet(run, author, ROUND, SLOT, np.random.default_rng(0))
    data, times = _timed(context, author, packet, repeats)
    tokens = sum(packet.lengths)

    garbage = data[:-4] + b"\xff" * 4
    if isinstance(admit(context, author, garbage), Group):
        raise RuntimeError("a packet without a last log-prob was admitted")

    digest = packet_digest(data)
    refs = [PacketRef(slot, digest, len(data), 1) for slot in range(ANNOUNCED_PACKETS)]
    announcement = announce(
        identity,
        run_id=run.id,
        round=ROUND,
        policy_step=ROUND,
        issued_at=1_760_000_000,
        packets=refs,
    )

    text_run = packets.make_text_run(TOKENS)
    text_context = AdmissionContext(text_run, prompt_digests([""] * ROWS))
    text = packets.make_text_packet(text_run, author, ROUND, SLOT, np.random.default_rng(0))
    text_data, text_times = _timed(text_context, author, text, repeats)
    text_tokens = sum(text.lengths) + sum(text.finished)
    reading = bench_reading(TOKENS, max(1, repeats // READING), built_in_tokenizers())
    return {
        "text_bytes_per_token": len(text_data) / text_tokens,
        **{f"text_{name}": spent for name, spent in text_times.items()},
        **reading,
        "bytes_per_token": len(data) / tokens,
        "header_bytes": len(data) - 8 * tokens,
        **times,
        "refuse_us": median_us(lambda: admit(context, author, garbage), repeats),
        "announcement_bytes": len(announcement.encode()),
    }


def _timed(
    context: AdmissionContext,
    author: bytes,
    packet: AnyPacket,
    repeats: int,
) -> tuple[bytes, dict[str, float]]:
    """The packet's bytes, and the times to encode, decode and admit them."""
    data = encode(packet)
    outcome = admit(context, author, data)
    if not isinstance(outcome, Group):
        raise RuntimeError(f"the benchmark's own group was refused: {outcome.detail}")
    times = {
        "encode_us": median_us(lambda: encode(packet), repeats),
        "decode_us": median_us(lambda: decode(data), repeats),
        "admit_us": median_us(lambda: admit(context, author, data), repeats),
    }
    return data, times
