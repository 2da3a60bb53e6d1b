"""What every member of a run knows, and with it packets that are as they must be, or as they must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer

from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import Completion, TextCompletion, encode, pack_group, pack_text_group
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.tasks.arithmetic import arithmetic

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
        answers = [row.answer for row in rows]
        if run.text:
            return TextWorld(run, questions, answers, lambda text: list(text.encode()))
        tokenizer = Tokenizer.from_file(str(BUILT_IN_DIR / "tiny-a" / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            found = tokenizer.encode(text, add_special_tokens=False).ids
            return found

        return cls(run, list(map(ids, questions)), answers, ids)

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
        digit = (int(answer[-1]) + 1) % 10
        other = f"{answer[:-1]}{digit}"
        return self.say(f"<think>{thought}</think><answer>{other}</answer>", logprob)

    def mixed(self, row: int) -> list[Said]:
        """A group as a learner would make it: some right, some wrong."""
        return [self.right(row) if index % 2 else self.wrong(row) for index in range(self.run.group)]

    def pack(
        self,
        author: bytes,
        round: int,
        slot: int,
        completions: Sequence[Said] | None = None,
        *,
        row: int | None = None,
        run_id: bytes | None = None,
    ) -> bytes:
        """A packet, by default as it must be, with a group that teaches something.

        Args:
            row: which it answers; by default that which is drawn. run_id: by default this run's.
        """
        if row is None:
            row = self.row(author, round, slot)
        named = {
            "run_id": run_id or self.run.id,
            "author": author,
            "round": round,
            "slot": slot,
            "policy_step": 0,
            "completions": completions or self.mixed(row),
        }
        if self.run.text:
            return encode(pack_text_group(**named, prompt=self.prompts[row]))
        return encode(pack_group(**named, prompt_ids=self.prompts[row]))


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
        kept = []
        for piece in pieces:
            if finished and self._at_cap(kept):
                break
            kept.append(piece)
        closing = None
        if finished and not self._at_cap(kept):
            closing = logprob if end is None else end
        sizes = np.array([len(piece) for piece in kept], np.uint8)
        claims = np.full(len(kept), logprob, np.float32)
        return TextCompletion(b"".join(kept), sizes, claims, closing)

    def _at_cap(self, pieces: Sequence[bytes]) -> bool:
        """Whether a completion of these pieces may not go on."""
        run = self.run
        return len(pieces) >= run.completion_tokens or sum(map(len, pieces)) >= run.completion_bytes
