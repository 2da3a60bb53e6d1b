"""The cost of the wire: bytes and CPU time of packing, unpacking and admitting one group of 12 × 256 tokens."""

import random
from collections.abc import Callable

import numpy as np

from ftis_node.lab.bench import packets
from ftis_node.lab.bench.packets import GROUP, ROWS
from ftis_node.lab.bench.reading import bench_reading, built_in_tokenizers, median_us
from ftis_node.lab.exchange import everything
from ftis_node.packet import AnyPacket, Group, decode, encode, packet_digest, prompt_digests
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import Announcement, PacketRef, PacketRefs, announce
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.needs import ROWS_MAX, no_rows, teaching_rows
from ftis_node.swarm.table import CAPACITY, Table

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
    run, identity = packets.make_run(TOKENS), Identity(bytes(32))
    context = packets.make_context(run)
    packet = packets.make_packet(run, identity.author, ROUND, SLOT, np.random.default_rng(0))
    data, times = _timed(context, identity.author, packet, repeats)
    refs = [PacketRef(slot, packet_digest(data), len(data), 1) for slot in range(ANNOUNCED_PACKETS)]
    announcement = announce(
        identity, run_id=run.id, round=ROUND, policy_step=ROUND, issued_at=1_760_000_000, packets=refs
    )
    garbage = data[:-4] + b"\xff" * 4
    if isinstance(admit(context, identity.author, garbage), Group):
        raise RuntimeError("a packet without a last log-prob was admitted")
    tokens = sum(packet.lengths)
    text_run = packets.make_text_run(TOKENS)
    text = packets.make_text_packet(text_run, identity.author, ROUND, SLOT, np.random.default_rng(0))
    text_context = AdmissionContext(text_run, prompt_digests([""] * ROWS))
    text_data, text_times = _timed(text_context, identity.author, text, repeats)
    return {
        "text_bytes_per_token": len(text_data) / (sum(text.lengths) + sum(text.finished)),
        **{f"text_{name}": spent for name, spent in text_times.items()},
        **bench_reading(TOKENS, max(1, repeats // READING), built_in_tokenizers()),
        **bench_needs(repeats),
        "bytes_per_token": len(data) / tokens,
        "header_bytes": len(data) - 8 * tokens,
        **times,
        "refuse_us": median_us(lambda: admit(context, identity.author, garbage), repeats),
        "announcement_bytes": len(announcement.encode()),
    }


def _timed(context: AdmissionContext, author: bytes, packet: AnyPacket, repeats: int) -> tuple[bytes, dict[str, float]]:
    """The packet's bytes, and the times to encode, decode and admit them."""
    data = encode(packet)
    outcome = admit(context, author, data)
    if not isinstance(outcome, Group):
        raise RuntimeError(f"the benchmark's own group was refused: {outcome.detail}")
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(packet),
        "decode": lambda: decode(data),
        "admit": lambda: admit(context, author, data),
    }
    return data, {f"{name}_us": median_us(call, repeats) for name, call in calls.items()}


AUTHORS, PACKETS, ANSWERS = 64, 8, 8


def bench_needs(repeats: int) -> dict[str, float]:
    """Microseconds of CPU (median over `repeats`).

    index_us: of an announcement of 8 packets that joins a full table of 64 authors, where another makes room; less the
    same without rows. answering_us: to choose 8 answers for a full book of 4,096 rows. nothing_us: the same where
    no row of the book has an answer, so that all are looked at.
    """
    rng, run = random.Random(0), packets.make_run(1)
    context = packets.make_context(run)
    authors = [Identity(rng.randbytes(32)).author for _ in range(AUTHORS)]
    rounds = iter(range(1 << 32))

    def announced() -> Announcement:
        refs = [PacketRef(slot, rng.randbytes(32), 1000, GROUP // 2) for slot in range(PACKETS)]
        return Announcement(run.id, rng.choice(authors), next(rounds), 0, 0, PacketRefs.of(refs), b"")

    indexed = Table(600.0, lambda: 0.0, rng, kept_age=3600.0, rows_of=lambda made: teaching_rows(context, made))
    plain = Table(600.0, lambda: 0.0, rng, kept_age=3600.0, rows_of=no_rows)
    made = [announced() for _ in range(2 * (CAPACITY + repeats))]
    adding = {table: iter(made) for table in (indexed, plain)}

    def add(table: Table) -> None:
        table.add(next(adding[table]), b"", age=0.0, first_sender=None)

    for table in (indexed, plain):
        for _ in range(2 * CAPACITY):
            add(table)
    indexing = median_us(lambda: add(indexed), repeats) - median_us(lambda: add(plain), repeats)
    answered = {row for known in indexed for row in known.rows.values()}
    unanswered = [row for row in range(ROWS) if row not in answered]
    book, vain = rng.sample(range(ROWS), ROWS_MAX), rng.choices(unanswered, k=ROWS_MAX)
    return {
        "index_us": indexing,
        "answering_us": median_us(lambda: indexed.choose(ANSWERS, everything, rows=book), repeats),
        "nothing_us": median_us(lambda: indexed.choose(ANSWERS, everything, rows=vain), repeats),
    }
