"""What every member of a run knows, and with it packets that are as they must be, or as they must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer

import ftis_node.models
from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import Completion, Packet, TextCompletion, TextPacket, encode, pack_text_group
from ftis_node.tasks.arithmetic import arithmetic
from tests.support.swarm import content

LIKELY = -0.2
"""A log-prob as an honest sampler has it."""

Said: TypeAlias = Completion | TextCompletion


@dataclass(frozen=True)
class World:
    """The run, what its rows ask and should be answered, and how text becomes token ids.

    prompts: token ids; of a text run texts.
    """

    run: Run
    prompts: Sequence[Sequence[int] | str]
    answers: Sequence[str]
    ids: Callable[[str], list[int]]

    @classmethod
    def of(cls, run: Run) -> World:
        """Of a run of the built-in arithmetic, whose tokenizer comes with the package."""
        rows = arithmetic().train
        questions = [run.template.replace("{question}", row.question) for row in rows]
        if run.text:
            return TextWorld(run, questions, [row.answer for row in rows], lambda text: list(text.encode()))
        folder = Path(ftis_node.models.__path__[0])
        tokenizer = Tokenizer.from_file(str(folder / "tiny-a" / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            found = tokenizer.encode(text, add_special_tokens=False).ids
            return found

        return cls(run, [ids(question) for question in questions], [row.answer for row in rows], ids)

    def row(self, author: bytes, round: int, slot: int) -> int:
        return draw(self.run.id, author, round, slot, len(self.prompts))

    def completion(self, ids: Sequence[int], logprob: float = LIKELY, *, finished: bool = True) -> Completion:
        """A completion of these ids, each with the same log-prob."""
        return Completion(np.array(ids, np.uint32), np.full(len(ids), logprob, np.float32), finished)

    def say(self, text: str, logprob: float = LIKELY) -> Said:
        """A text and the end token; what is over the cap is cut off, and then it is unfinished."""
        ids = [*self.ids(text), self.run.eos[0]]
        cap = self.run.completion_tokens
        return self.completion(ids[:cap], logprob, finished=len(ids) <= cap)

    def right(self, row: int, thought: str = "", logprob: float = LIKELY) -> Said:
        return self.say(f"<think>{thought}</think><answer>{self.answers[row]}</answer>", logprob)

    def wrong(self, row: int, thought: str = "", logprob: float = LIKELY) -> Said:
        """As `right`, with another number of as many digits."""
        answer = self.answers[row]
        other = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        return self.say(f"<think>{thought}</think><answer>{other}</answer>", logprob)

    def mixed(self, row: int) -> list[Said]:
        """A group as a learner would make it: some right, some wrong."""
        return [self.right(row) if index % 2 else self.wrong(row) for index in range(self.run.group)]

    def pack(
        self, author: bytes, round: int, slot: int, completions: Sequence[Said] | None = None, **lies: Any
    ) -> bytes:
        """A packet, by default with a group that teaches something.

        Args:
            lies: fields of `packet` that are not as they should be.
        """
        row = self.row(author, round, slot)
        made = self.mixed(row) if completions is None else completions
        return encode(self.packet(author, round, slot, made, **{"prompt": self.prompts[row], **lies}))

    def packet(
        self, author: bytes, round: int, slot: int, completions: Sequence[Said], prompt: Any, **lies: Any
    ) -> Packet | TextPacket:
        """These completions as a packet of the run's version."""
        return content(self.run, author, round, slot, completions, **{"prompt_ids": prompt, **lies})


@dataclass(frozen=True)
class TextWorld(World):
    """Of a text run: completions are text, by default in pieces of one byte."""

    def say(self, text: str, logprob: float = LIKELY) -> TextCompletion:
        return self.pieces(*(bytes([byte]) for byte in text.encode()), logprob=logprob)

    def pieces(
        self, *pieces: bytes, logprob: float = LIKELY, end: float | None = None, finished: bool = True
    ) -> TextCompletion:
        """A completion of these pieces, each with the same log-prob, and the end.

        What is over the caps is cut off, and then it is unfinished. With `finished` False there is no end, and nothing
        is cut off.

        Args:
            end: the end's own log-prob.
        """
        run = self.run
        kept = list(pieces)
        if finished and (len(pieces) >= run.completion_tokens or len(b"".join(pieces)) >= run.completion_bytes):
            kept = self._cut(pieces)
            finished = False
        sizes = np.array([len(piece) for piece in kept], np.uint8)
        closing = (logprob if end is None else end) if finished else None
        return TextCompletion(b"".join(kept), sizes, np.full(len(kept), logprob, np.float32), closing)

    def _cut(self, pieces: Sequence[bytes]) -> list[bytes]:
        """The first pieces, up to the one that reaches a cap."""
        kept = []
        for piece in pieces:
            if len(kept) == self.run.completion_tokens or len(b"".join(kept)) >= self.run.completion_bytes:
                break
            kept.append(piece)
        return kept

    def packet(
        self, author: bytes, round: int, slot: int, completions: Sequence[Said], prompt: Any, **lies: Any
    ) -> TextPacket:
        named = {"run_id": self.run.id, "author": author, "round": round, "slot": slot, "policy_step": 0}
        return pack_text_group(**named | lies, prompt=prompt, completions=completions)
