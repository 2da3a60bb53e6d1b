"""Real packets without a model: what admission lets through, of the size and shape that a run's would have."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ftis_node import packet
from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import Completion, Group, Packet, TextCompletion, TextPacket
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.announcement import PacketRef

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


def make_text_packet(run: Run, author: bytes, round: int, slot: int, random: np.random.Generator) -> TextPacket:
    """Pieces as long as Qwen2.5's of GSM8K's solutions: 2.6 bytes on average; every second completion is finished."""
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


def make_context(run: Run) -> AdmissionContext:
    """The admission of packets that `make_packet` makes."""
    return AdmissionContext(run, packet.prompt_digests([row] * 60 for row in range(ROWS)))


def packed(run: Run, where: tuple[bytes, int, int, int], ids: Sequence[int], made: Sequence[Completion]) -> Packet:
    """A packet of a run. where: its author, round, slot and policy step. ids: of the prompt."""
    author, round, slot, policy_step = where
    return packet.pack_group(
        run_id=run.id,
        author=author,
        round=round,
        slot=slot,
        policy_step=policy_step,
        prompt_ids=ids,
        completions=made,
    )


def make_packet(run: Run, author: bytes, round: int, slot: int, random: np.random.Generator) -> Packet:
    """Ids with the long tail of text and log-probs of a fairly sure model; every second completion ends in an EOS."""
    tokens = run.completion_tokens
    completions = []
    for index in range(GROUP):
        ids = (random.zipf(1.2, tokens) % EOS[0]).astype(np.uint32)
        finished = index % 2 == 0
        if finished:
            ids[-1] = EOS[1]
        logprobs = -random.exponential(0.4, tokens).astype(np.float32)
        completions.append(Completion(ids, logprobs, finished))
    row = draw(run.id, author, round, slot, ROWS)
    return packed(run, (author, round, slot, round), [row] * 60, completions)


@dataclass(frozen=True)
class Round:
    """A round of packets that an author made, by slot."""

    number: int = 0
    packets: tuple[Group, ...] = ()

    @property
    def refs(self) -> list[PacketRef]:
        """The entries of its announcement; a third is right, as `model.rewards` has it."""
        return [
            PacketRef(slot, group.digest, len(group.data), math.ceil(len(group.packet.lengths) / 3))
            for slot, group in enumerate(self.packets)
        ]


def make_round(
    context: AdmissionContext, author: bytes, store: PacketStore, groups: int, make: Callable[[int, int], Packet]
) -> Round:
    """The author's next round, admitted and stored.

    Args:
        make: the packet of a round and a slot.

    Raises:
        RuntimeError: admission refuses one.
    """
    number = store.upcoming_round()
    store.take_round(number)
    made = []
    for slot in range(groups):
        body = packet.encode(make(number, slot))
        verdict = admit(context, author, body)
        if not isinstance(verdict, Group):
            raise RuntimeError(f"a packet of the benchmark is unsound: {verdict}")
        made.append(verdict)
    store.add(made, own=True)
    return Round(number, tuple(made))
