"""Episodes of several answers that a policy plays, in training and in evaluation."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftis_node.evaluate.episodes import Episodes
from ftis_node.packet import Completion
from ftis_node.policy.generate.sampling import CompletionGroups, Prompts, Sampling
from ftis_node.policy.generate.stream import generate
from ftis_node.policy.generate.turns import go_on
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room, fitting
from ftis_node.tasks import Example, Scorer


def sampled(
    policy: Policy,
    prompts: Prompts,
    sampling: Sampling,
    room: Room,
    *,
    group: int = 1,
    noise: Tensor | None = None,
) -> CompletionGroups:
    """So many completions of each prompt, as many side by side as fit into memory; see `generate` and `fitting`."""
    return fitting(
        lambda batch: generate(policy, prompts, group=group, sampling=sampling, noise=noise, batch=batch),
        room,
        there=group * len(prompts),
        least=group,
    )


def play(
    policy: Policy,
    episodes: Episodes,
    prompts: Prompts,
    first: Sequence[Sequence[Completion]],
    examples: Sequence[Example],
    scorer: Scorer,
    sampling: Sampling,
    *,
    room: Room,
    noise: Tensor | None = None,
) -> CompletionGroups:
    """The episodes that begin with these first answers to each prompt, which is of one example.

    Args:
        noise: that the first answers were drawn with, see `generate`: later ones go on in it.

    Raises:
        FtisError: a single context does not fit into memory, or the weights have diverged.
    """

    def answering(contexts: Prompts, places: Sequence[tuple[int, int]], cap: int) -> list[Completion]:
        capped = replace(sampling, max_new_tokens=cap)
        mine = None
        if noise is not None:
            mine = torch.stack([noise[number, at : at + cap] for number, at in places])
        groups = sampled(policy, contexts, capped, room, noise=mine)
        return [group[0] for group in groups]

    return go_on(
        prompts,
        first,
        answering=answering,
        following=lambda number, episode: episodes.following(episode, examples[number], scorer),
        turns=episodes.turns,
        cap=sampling.max_new_tokens,
    )
