"""Packets of a run as this node's model writes and reads them: token ids, or in a text run text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.fit.context import Context, refuse_long_prompts, refuse_prompts
from ftis_node.packet import (
    Completion,
    PacketError,
    TextCompletion,
    TextPacket,
    decode,
    encode,
    pack_group,
    pack_text_group,
    prompt_digest,
)
from ftis_node.packet.arrays import total
from ftis_node.tasks import Example, Task
from ftis_node.tasks.score_columns import Columns
from ftis_node.tokenizer.asking import end_ids, prompt_ids, usual_end
from ftis_node.tokenizer.chat import Chat, chat_wanted, chat_with
from ftis_node.tokenizer.codec import Codec
from ftis_node.worker.messages import GroupText, ReadableGroup

# The longest text of one completion to show.
TEXT_TOKENS = 1024
TEXT_LETTERS = 4000


class Slot(NamedTuple):
    """The place of a group among its author's packets. author: 38-byte peer id, or empty for none."""

    author: bytes
    round: int
    slot: int
    policy_step: int


class WayOfAsking(NamedTuple):
    """How questions are put: in a chat, or after these ids (None: the tokenizer's own); the ids that end an answer."""

    chat: Chat | None
    prefix: tuple[int, ...] | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a completion as people and reward rules read it. cut: there is more of it."""

    text: str
    finished: bool
    cut: bool


@dataclass(eq=False)
class _OfRun:
    """What packets of both kinds have.

    asked       how this node's model is asked
    vocabulary  ids from this one on, which a peer's model may have, cannot be read; None: all can
    """

    run: Run
    tokenizer: PreTrainedTokenizerBase
    asked: WayOfAsking
    vocabulary: int | None

    def prompt(self, template: str, question: str) -> list[int]:
        """Token ids of the prompt that asks a question, in a chat or in plain text."""
        return prompt_ids(self.tokenizer, template, question, self.asked.chat, self.asked.prefix)

    def spelled(self, index: int) -> str:
        """A token for people."""
        return str(self.tokenizer.convert_ids_to_tokens(index))


class TokenPackets(_OfRun):
    """Versions 1 and 3: every model of the run has the same ids."""

    def digest(self, text: str, ids: Sequence[int]) -> bytes:
        """The 8 bytes by which packets name a prompt."""
        return prompt_digest(ids)

    def write(self, slot: Slot, prompt: str, ids: Sequence[int], completions: Sequence[Completion]) -> bytes:
        """The bytes of a packet of this node's own samples.

        Args:
            prompt: the prompt as text. ids: the same as token ids. Each kind of packet names it by one of the two.
        """
        group = pack_group(
            run_id=self.run.id,
            prompt_ids=ids,
            completions=completions,
            turns=self.run.turns > 1,
            **slot._asdict(),
        )
        return encode(group)

    def read(self, data: bytes) -> TokenReading:
        """Open an admitted packet. Raises PacketError if it is of the other kind."""
        packet = decode(data)
        if isinstance(packet, TextPacket):
            raise PacketError("a packet of text, in a run of one tokenizer")
        return TokenReading(list(packet.completions()), self.tokenizer, self.vocabulary or len(self.tokenizer))


@dataclass(frozen=True)
class TokenReading:
    """An opened packet of token ids, of which those from `vocabulary` on cannot be read."""

    read: Sequence[Completion]
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int

    def texts(self, tokens: int | None = None) -> list[Written]:
        """The texts [G]; of each only so many of its author's tokens."""
        written = []
        for completion in self.read:
            ids = completion.token_ids[:tokens].tolist()
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            written.append(Written(text, completion.finished, cut=len(ids) < len(completion)))
        return written

    def completions(self, *, own: bool) -> Iterator[Completion | None]:
        """The completions [G] in this node's tokens; None for one that it cannot train on. own: it made them."""
        for completion in self.read:
            if completion.token_ids.max(initial=0) < self.vocabulary:
                yield completion
            else:
                yield None


@dataclass(eq=False)
class TextPackets(_OfRun):
    """Version 2: each model reads the text in its own tokens."""

    def __post_init__(self) -> None:
        """Raise UsageError as `Codec`."""
        self.codec = Codec(self.tokenizer, usual_end(self.tokenizer, self.asked.chat), self.vocabulary)

    def digest(self, text: str, ids: Sequence[int]) -> bytes:
        """As of token ids, of the text."""
        return prompt_digest(text)

    def write(self, slot: Slot, prompt: str, ids: Sequence[int], completions: Sequence[Completion]) -> bytes:
        """As of token ids; each text up to the run's cap in bytes."""
        texts = [self._capped(self.codec.to_text(completion)) for completion in completions]
        group = pack_text_group(
            run_id=self.run.id,
            prompt=prompt,
            completions=texts,
            **slot._asdict(),
        )
        return encode(group)

    def read(self, data: bytes) -> TextReading:
        """Open an admitted packet. Raises PacketError if it is of the other kind."""
        packet = decode(data)
        if not isinstance(packet, TextPacket):
            raise PacketError("a packet of token ids, in a run of any tokenizer")
        return TextReading(list(packet.completions()), self.codec, self.run.completion_tokens)

    def _capped(self, completion: TextCompletion) -> TextCompletion:
        """The completion up to the piece with which its text reaches the run's cap in bytes."""
        ends = np.cumsum(completion.pieces, dtype=np.int64)
        if not len(ends) or ends[-1] < self.run.completion_bytes:
            return completion
        kept = int(np.searchsorted(ends, self.run.completion_bytes)) + 1
        text = completion.text[: int(ends[kept - 1])]
        return TextCompletion(
            text,
            completion.pieces[:kept],
            completion.logprobs[:kept],
            None,
        )


@dataclass(frozen=True)
class TextReading:
    """An opened packet of texts, which the codec reads in this node's tokens; cap: the run's, in tokens."""

    read: Sequence[TextCompletion]
    codec: Codec
    cap: int

    def texts(self, tokens: int | None = None) -> list[Written]:
        """The texts [G]; of each only so many of its author's tokens."""
        written = []
        for completion in self.read:
            size = total(completion.pieces[:tokens])
            text = completion.text[:size].decode(errors="replace")
            written.append(Written(text, completion.finished, cut=size < len(completion.text)))
        return written

    def completions(self, *, own: bool) -> Iterator[Completion | None]:
        """The completions [G] in this node's tokens; None for one that it cannot train on. own: it made them."""
        for completion in self.read:
            found = self.codec.from_text(completion, own=own)
            yield self._within_cap(found)

    def _within_cap(self, found: Completion | None) -> Completion | None:
        """The completion as far as this model would have written it; a finished one that is longer is none.

        The run's cap holds for this node's tokens, too.
        """
        if found is None or len(found) <= self.cap:
            return found
        if found.finished:
            return None
        if found.chunks is None:
            return replace(found, token_ids=found.token_ids[: self.cap], logprobs=found.logprobs[: self.cap])
        whole = int(found.chunks[self.cap])  # chunks that lie before the cap
        kept = int(np.searchsorted(found.chunks, whole))
        if not kept:
            return None
        counts = found.counts
        if counts is not None:
            counts = counts[:whole]
        return Completion(
            found.token_ids[:kept],
            found.logprobs[:whole],
            False,
            found.chunks[:kept],
            counts,
        )


Packets = TokenPackets | TextPackets
Reading = TokenReading | TextReading


def packets_of(
    run: Run, tokenizer: PreTrainedTokenizerBase, settings: Settings, vocabulary: int | None = None
) -> Packets:
    """The run's kind of packets for a model with this tokenizer, and with so many ids; None: with all of them.

    Raises:
        UsageError: as `Codec` and `chat_in` do.
    """
    asked = asked_in(run, tokenizer, run.template, settings)
    if run.text:
        return TextPackets(run, tokenizer, asked, vocabulary)
    return TokenPackets(run, tokenizer, asked, vocabulary)


def chat_in(
    run: Run | None,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    settings: Settings,
) -> Chat | None:
    """The chat in which a model is asked; None: in plain text. A run of one tokenizer says which, else the settings do.

    Raises:
        UsageError: the model does not have it.
    """
    if run is not None and not run.text:
        if run.chat:
            return chat_with(tokenizer, run.chat, run.turns)
        return None
    return chat_wanted(tokenizer, template, settings.chat, thinking=settings.thinking)


def asked_in(
    run: Run | None,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    settings: Settings,
) -> WayOfAsking:
    """How a model is asked in a run, or in its own way where there is none. Raises UsageError as `chat_in`."""
    chat = chat_in(run, tokenizer, template, settings)
    if run is None or run.text:
        return WayOfAsking(chat, None, end_ids(tokenizer, chat))
    return WayOfAsking(chat, run.prefix, run.eos)


def prompts_of(
    run: Run,
    packets: Packets,
    model: str,
    context: Context,
    task: Task,
    most: int | None,
    *,
    own: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts to train on, and of those held out.

    Args:
        model, context: its name and its context. most: of the rows held out; None: all. own: they are the owner's,
            asked by their own template; an error about one does not show it.

    Raises:
        UsageError: one is empty, longer than the run allows, or has no room in the model's context.
    """
    template = run.template
    train_name = "the training data"
    held_out_name = "the held-out data"
    if own:
        template = task.template
        train_name = "one's own data"
        held_out_name = "one's own held-out data"

    def checked(examples: Sequence[Example], data: str) -> list[list[int]]:
        """The prompts of these examples; `data` is what an error calls them."""
        prompts = [packets.prompt(template, example.question) for example in examples]
        if run.text and not own:
            texts = [template.replace("{question}", example.question) for example in examples]
            refuse_long_prompts(texts, run.prompt_bytes, examples, data)
        refuse_prompts(
            model,
            context,
            prompts,
            examples,
            data,
            run.completion_tokens,
            run.prompt_tokens or float("inf"),
            shown=not own,
            spelled=packets.spelled,
        )
        return prompts

    return checked(task.train, train_name), checked(task.asked(most), held_out_name)


def group_text(packets: Packets, example: Example, group: ReadableGroup, columns: list[Columns]) -> GroupText:
    """The first of a group's completions as people read them, with their columns; a very long one is cut."""
    texts = []
    for written in packets.read(group.packet).texts(TEXT_TOKENS)[: group.completions]:
        text = written.text[:TEXT_LETTERS]
        if written.cut or len(written.text) > TEXT_LETTERS:
            text += "…"
        texts.append(text)
    return GroupText(
        example.question[:TEXT_LETTERS],
        example.answer[:200],
        texts,
        columns[: group.completions],
    )
