"""Episodes of several answers as their environment sees them: what it says next, and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ftis_node.packet import Completion
from ftis_node.tasks import Example, Replay, Score, Scorer
from ftis_node.tokenizer.chat import Chat, Frame, frame_of


@dataclass(frozen=True)
class Episodes:
    """How the episodes of a run go. frame: around its environment's messages. turns: most answers."""

    tokenizer: PreTrainedTokenizerBase
    frame: Frame
    turns: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat | None, turns: int) -> Episodes | None:
        """The episodes of a run with this template; None where each has one answer. Raises UsageError as `frame_of`."""
        if turns == 1:
            return None
        return cls(tokenizer, frame_of(tokenizer, template, chat), turns)

    def following(self, completion: Completion, example: Example, scorer: Scorer) -> list[int]:
        """The ids of what the environment says to this node's own episode so far; none: the episode is over."""
        scorer.begin()  # each of its own answers may take its time
        answers, _ = self._runs(completion)
        played = scorer.replay(answers, example.answer)
        if played is None or played.over or len(played.messages) != len(answers):
            return []
        return self.frame.later(played.messages[-1])

    def score(self, completion: Completion, example: Example, scorer: Scorer) -> Score | None:
        """Return an episode's reward, played again; None if the environment did not give its given tokens."""
        answers, given = self._runs(completion)
        played = scorer.replay(answers, example.answer)
        if played is None:
            played = Replay((), False, 0.0)
        said = [self.frame.later(message) for message in played.messages[: len(given)]]
        if said != given:
            return None
        reward = 0.0
        if completion.finished:
            reward = played.reward
        return Score(reward, formatted=played.over, lenient=reward >= 1)

    def rewards(self, completions: Sequence[Completion], example: Example, scorer: Scorer) -> list[float]:
        """Return a group's rewards; all 0, thus no signal, if the environment did not give a given token of one."""
        scorer.begin()
        rewards = []
        for completion in completions:
            score = self.score(completion, example, scorer)
            if score is None:
                return [0.0] * len(completions)
            rewards.append(score.reward)
        return rewards

    def _runs(self, completion: Completion) -> tuple[list[str], list[list[int]]]:
        """The texts of the answers, and the given ids between them."""
        where = completion.given
        if where is None:
            where = np.zeros(len(completion), np.bool_)
        changes = np.flatnonzero(np.diff(where)) + 1  # from sampled to given and back
        runs = [ids.tolist() for ids in np.split(completion.token_ids, changes)]
        answers = [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in runs[::2]]
        return answers, runs[1::2]
