"""Episodes: completions that go on after an answer, with what an environment says to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ftis_node.packet import Completion
from ftis_node.policy.generate.sampling import CompletionGroups, Prompts

Following = Callable[[int, Completion], Sequence[int]]
"""(number of the prompt, an episode so far) → the ids that an environment puts after it; none: the episode is over."""

Answering = Callable[[Prompts, Sequence[tuple[int, int]], int], Sequence[Completion]]
"""(contexts, the number of each one's episode and how many tokens were sampled in it, cap) → an answer to each context,
of so many tokens at most."""


@dataclass(eq=False)
class _Episode:
    """Grows by an answer, or by given tokens, at a time. number: among all; prompt: its prompt's. ids, given: of all
    tokens behind the prompt; logprobs: of those that were sampled. answers: turns that have ended by themselves, not by
    a cap. finished: it ends with such an answer. over: nothing is added any more.
    """

    number: int
    prompt: int
    ids: list[int] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answers: int = 0
    finished: bool = False
    over: bool = False

    def so_far(self) -> Completion:
        """The episode as a completion, which shares no memory with it."""
        given = None
        if any(self.given):
            given = np.array(self.given, np.bool_)
        ids = np.array(self.ids, np.uint32)
        logprobs = np.array(self.logprobs, np.float32)
        return Completion(ids, logprobs, self.finished, given=given)

    def answer(self, answer: Completion) -> None:
        """Add an answer of the policy, or a part of one that a cap has cut off."""
        self.ids += answer.token_ids.tolist()
        self.logprobs += answer.logprobs.tolist()
        self.given += [False] * len(answer)
        self.finished = answer.finished
        self.answers += answer.finished

    def go_on(self, ids: Sequence[int]) -> None:
        """Add what the environment says, in token ids: these are given."""
        self.ids += ids
        self.given += [True] * len(ids)
        self.finished = False


def go_on(
    prompts: Prompts,
    first: Sequence[Sequence[Completion]],
    *,
    answering: Answering,
    following: Following,
    turns: int,
    cap: int,
) -> CompletionGroups:
    """Play the episodes that begin with these first answers of each prompt.

    All open episodes are answered side by side, with the cap of the one that has the least room left. So no row is
    wider than a prompt with a whole completion, and what was cut off by another's cap goes on in the next round.

    Args:
        prompts: token ids of each prompt.
        first: the first answers to each prompt; none has more than `cap` tokens.
        answering: called once a round, with all open episodes. following: called once for each answer that ended by
            itself, but for the last turn's.
        turns: most answers of an episode. cap: most tokens of one, sampled and given.

    Returns:
        For each prompt its episodes, in the order of `first`. One that has no room for what follows ends before it.
    """
    prompt_of = [prompt for prompt, group in enumerate(first) for _ in group]
    episodes = [_Episode(number, prompt) for number, prompt in enumerate(prompt_of)]
    waiting = episodes
    answers = [answer for group in first for answer in group]
    while waiting:
        for episode, answer in zip(waiting, answers, strict=True):
            episode.answer(answer)
            if not episode.finished:
                episode.over = len(episode.ids) >= cap
                continue
            ids: Sequence[int] = ()
            if episode.answers < turns:
                ids = following(episode.prompt, episode.so_far())
            if ids and len(episode.ids) + len(ids) < cap:
                episode.go_on(ids)
            else:
                episode.over = True
        waiting = [episode for episode in waiting if not episode.over]
        if waiting:
            contexts = [[*prompts[episode.prompt], *episode.ids] for episode in waiting]
            places = [(episode.number, len(episode.logprobs)) for episode in waiting]
            room = min(cap - len(episode.ids) for episode in waiting)
            answers = list(answering(contexts, places, room))
    played = iter(episodes)
    return [[next(played).so_far() for _ in group] for group in first]
