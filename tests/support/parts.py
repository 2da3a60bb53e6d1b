"""``python -m tests.support.parts RANK PLACE``: one of two ranks of a model in shards, which takes two steps.

The second rank lacks memory once, when gradients are added up. Each prints a line of JSON: how many numbers its
optimiser keeps, how far those of all are from what one process has (squared, and the size), and its embedding.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.learner import Learner, team
from ftis_node.learner.fsdp import Shards
from ftis_node.objective import PRESETS
from ftis_node.policy import room
from ftis_node.policy.policy import Policy
from tests.support.learners import BATCH, TEMPERATURE
from tests.support.small_models import tiny_policy, twin


def stepped(policy: Policy, ranks: team.Team) -> Learner:
    settings = Settings(learning_rate=1e-3, gradient_clip=1e9, warmup_steps=0)
    subject = Learner(policy, PRESETS["ftis"], settings, TEMPERATURE, team=ranks)
    for _ in range(2):
        assert subject.step(BATCH).skipped is None
    return subject


def lacking(times: int):
    """Let so many sums of gradients lack memory."""
    add_up = team._add_up
    cat = torch.cat
    left = [None] * times

    def short(*given: Any) -> Tensor:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cat(*given)

    def adding(pieces: Any):
        torch.cat = short
        add_up(pieces)
        torch.cat = cat

    team._add_up = adding
    room.WAITS = (0.0, 0.0, 0.0)


def main(rank: int, place: str):
    policy = tiny_policy(vocab_size=32, tie_word_embeddings=True)
    policy.model.to(torch.bfloat16)
    alone = stepped(twin(policy), team.ALONE)
    ranks = team.Team.init_process_group(rank, 2, place, torch.device("cpu"))
    Shards(list(policy.causal_lm.model.layers), ranks, policy.device)
    lacking(rank)
    subject = stepped(policy, ranks)
    held = sum(value.numel() for state in subject.optimiser._adam.state.values() for value in state.values())
    mine = subject.state()[1]
    theirs = alone.state()[1]  # the moments, whole in the first rank
    told = {
        "held": held,
        "trained": policy.trainable(),
        "tensors": len(subject.trainable),
        "embedding": policy.causal_lm.get_input_embeddings().weight.double().flatten().tolist(),
        "far": 0.0,
        "size": 0.0,
    }
    if rank == 0:
        for name, value in theirs.items():
            told["far"] += float((mine[name] - value).square().sum())
            told["size"] += float(value.square().sum())
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
