"""What the wire costs: bytes and CPU time of packing, unpacking and admitting one group of 12 × 256 tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from ftis_node.draw import draw
from ftis_node.packet import Completion, Group, Packet, decode, encode, pack_group, packet_digest, prompt_digests
from ftis_node.run import Run
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.identity import Identity

GROUP = 12
TOKENS = 256
VOCABULARY = 151_665  # Qwen2.5 with its special tokens
EOS = (151_643, 151_645)
ANNOUNCED_PACKETS = 8
ROUND, SLOT, POLICY_STEP, ROWS = 1_000, 3, 4_000, 7_473


def bench_wire(repeats: int = 200) -> dict[str, float]:
    """Sizes in bytes, times in microseconds of CPU (median over `repeats`).

    bytes_per_token and header_bytes are of a group of 12 completions of 256 tokens each; announcement_bytes is of a
    round of 8 packets. Raises RuntimeError if admission refuses the group, which would make its time meaningless.
    """
    run, identity = _run(), Identity(bytes(32))
    context = AdmissionContext(run, prompt_digests([row] * 60 for row in range(ROWS)))
    packet = _packet(run, identity)
    data = encode(packet)
    outcome = admit(context, identity.author, data)
    if not isinstance(outcome, Group):
        raise RuntimeError(f"the benchmark's own group was refused: {outcome.detail}")
    refs = [PacketRef(slot, packet_digest(data), len(data)) for slot in range(ANNOUNCED_PACKETS)]
    announcement = announce(
        identity, run_id=run.id, round=ROUND, policy_step=POLICY_STEP, issued_at=1_760_000_000, packets=refs
    )
    tokens = sum(packet.lengths)
    return {
        "bytes_per_token": len(data) / tokens,
        "header_bytes": len(data) - 8 * tokens,
        "encode_us": _median_us(lambda: encode(packet), repeats),
        "decode_us": _median_us(lambda: decode(data), repeats),
        "admit_us": _median_us(lambda: admit(context, identity.author, data), repeats),
        "announcement_bytes": len(announcement.encode()),
    }


def _run() -> Run:
    return Run(
        task="gsm8k",
        data="0" * 64,
        template="{question}",
        reward="gsm8k",
        group=GROUP,
        slots=64,
        prompt_tokens=512,
        completion_tokens=TOKENS,
        temperature=1.0,
        eos=EOS,
        tokenizer="0" * 64,
        vocabulary=VOCABULARY,
    )


def _packet(run: Run, identity: Identity) -> Packet:
    """Ids with the long tail of text and log-probs of a fairly sure model; every second completion ends in an EOS."""
    random = np.random.default_rng(0)
    completions = []
    for index in range(GROUP):
        ids = (random.zipf(1.2, TOKENS) % EOS[0]).astype(np.uint32)
        finished = index % 2 == 0
        if finished:
            ids[-1] = EOS[1]
        completions.append(Completion(ids, -random.exponential(0.4, TOKENS).astype(np.float32), finished))
    row = draw(run.id, identity.author, ROUND, SLOT, ROWS)
    return pack_group(
        run_id=run.id,
        author=identity.author,
        round=ROUND,
        slot=SLOT,
        policy_step=POLICY_STEP,
        prompt_ids=[row] * 60,
        completions=completions,
    )


def _median_us(call: Callable[[], object], repeats: int) -> float:
    """CPU time of this thread, so that other work on the machine does not count."""
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1000
