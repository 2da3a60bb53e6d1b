"""What every member of a run knows, and with it packets that are as they must be, or as they must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import ftis_node.models
from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import Completion, encode
from ftis_node.tasks.arithmetic import arithmetic
from tests.support.swarm import content

LIKELY = -0.2
"""A log-prob as an honest sampler has it."""


@dataclass(frozen=True)
class World:
    """The run, what its rows ask and should be answered, and how text becomes token ids."""

    run: Run
    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]
    ids: Callable[[str], list[int]]

    @classmethod
    def of(cls, run: Run) -> World:
        """Of a run of the built-in arithmetic, whose tokenizer comes with the package."""
        folder = Path(ftis_node.models.__path__[0])
        tokenizer = Tokenizer.from_file(str(folder / "tiny-a" / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return found

        rows = arithmetic().train
        questions = [run.template.replace("{question}", row.question) for row in rows]
        return cls(run, [ids(question) for question in questions], [row.answer for row in rows], ids)

    def row(self, author: bytes, round: int, slot: int) -> int:
        return draw(self.run.id, author, round, slot, len(self.prompts))

    def completion(self, ids: Sequence[int], logprob: float = LIKELY, *, finished: bool = True) -> Completion:
        """A completion of these ids, each with the same log-prob."""
        return Completion(np.array(ids, np.uint32), np.full(len(ids), logprob, np.float32), finished)

    def say(self, text: str, logprob: float = LIKELY) -> Completion:
        """A text and the end token; what is over the cap is cut off, and then it is unfinished."""
        ids = [*self.ids(text), self.run.eos[0]]
        cap = self.run.completion_tokens
        return self.completion(ids[:cap], logprob, finished=len(ids) <= cap)

    def right(self, row: int, thought: str = "", logprob: float = LIKELY) -> Completion:
        return self.say(f"<think>{thought}</think><answer>{self.answers[row]}</answer>", logprob)

    def wrong(self, row: int, thought: str = "", logprob: float = LIKELY) -> Completion:
        """As `right`, with another number of as many digits."""
        answer = self.answers[row]
        other = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        return self.say(f"<think>{thought}</think><answer>{other}</answer>", logprob)

    def mixed(self, row: int) -> list[Completion]:
        """A group as a learner would make it: some right, some wrong."""
        return [self.right(row) if index % 2 else self.wrong(row) for index in range(self.run.group)]

    def pack(
        self, author: bytes, round: int, slot: int, completions: Sequence[Completion] | None = None, **lies: Any
    ) -> bytes:
        """A packet, by default with a group that teaches something.

        Args:
            lies: fields of `pack_group` that are not as they should be.
        """
        row = self.row(author, round, slot)
        made = self.mixed(row) if completions is None else completions
        return encode(content(self.run, author, round, slot, made, **{"prompt_ids": self.prompts[row], **lies}))
