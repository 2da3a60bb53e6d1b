"""Real packets without a model: what admission lets through, of the size and shape that a run's would have."""

import numpy as np

from ftis_node import packet
from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import Completion, Packet, TextCompletion, TextPacket
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity

GROUP = 12
VOCABULARY = 151_665  # Qwen2.5 with its special tokens
EOS = (151_643, 151_645)
ROWS = 7_473


def make_run(tokens: int) -> Run:
    """A run whose completions have up to `tokens` tokens."""
    return Run(
        task="gsm8k",
        data="0" * 64,
        template="{question}",
        reward="gsm8k",
        group=GROUP,
        slots=64,
        prompt_tokens=512,
        completion_tokens=tokens,
        temperature=1.0,
        eos=EOS,
        tokenizer="0" * 64,
        vocabulary=VOCABULARY,
    )


def make_text_run(tokens: int) -> Run:
    """The same for models of any tokenizer."""
    kept = {"task", "data", "template", "reward", "group", "slots", "temperature"}
    shared = make_run(tokens).model_dump(include=kept)
    return Run(
        **shared,
        prompt_bytes=5 * 512,
        completion_bytes=5 * tokens,
        completion_tokens=tokens,
        packet=2,
        tokenizer="any",
    )


def make_text_packet(
    run: Run,
    author: bytes,
    round: int,
    slot: int,
    random: np.random.Generator,
) -> TextPacket:
    """Pieces as long as Qwen2.5's of GSM8K's solutions: 2.6 bytes on average; every second completion is finished. For
    arguments see `make_packet`."""
    completions = []
    for index in range(GROUP):
        count = run.completion_tokens
        end = None
        if index % 2 == 0:
            count -= 1
            end = -0.1
        lengths = random.geometric(1 / 2.6, count)
        pieces = np.minimum(lengths, 40).astype(np.uint8)
        claims = -random.exponential(0.4, count).astype(np.float32)
        text = b"x" * int(pieces.sum(dtype=np.int64))
        completions.append(TextCompletion(text, pieces, claims, end))
    return packet.pack_text_group(
        run_id=run.id,
        author=author,
        round=round,
        slot=slot,
        policy_step=round,
        prompt="",
        completions=completions,
    )


def node_identity(number: int) -> Identity:
    """The key of a benchmark's n-th node, the same at every call."""
    return Identity((number + 1).to_bytes(32, "big"))


def make_context(run: Run) -> AdmissionContext:
    """The admission of packets that `make_packet` makes."""
    prompts = ([row] * 60 for row in range(ROWS))
    return AdmissionContext(run, packet.prompt_digests(prompts))


def make_packet(
    run: Run,
    author: bytes,
    round: int,
    slot: int,
    random: np.random.Generator,
) -> Packet:
    """Ids with the long tail of text and log-probs of a fairly sure model; every second completion ends in an EOS. Each
    is as long as the run allows.

    Args:
        author: the 38-byte peer id. random: ids and log-probs are drawn from it, so the next call gives others.
    """
    tokens = run.completion_tokens
    completions = []
    for index in range(GROUP):
        drawn = random.zipf(1.2, tokens) % EOS[0]
        ids = drawn.astype(np.uint32)
        finished = index % 2 == 0
        if finished:
            ids[-1] = EOS[1]
        logprobs = -random.exponential(0.4, tokens).astype(np.float32)
        completions.append(Completion(ids, logprobs, finished))
    row = draw(run.id, author, round, slot, ROWS)
    return packet.pack_group(
        run_id=run.id,
        author=author,
        round=round,
        slot=slot,
        policy_step=round,
        prompt_ids=[row] * 60,
        completions=completions,
    )
