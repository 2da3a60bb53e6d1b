"""Sampling groups of completions, by an engine of this process or by a server."""

import torch
from torch import Tensor

from ftis_node.policy.generate.native import by_modules, decode
from ftis_node.policy.generate.sampling import CompletionGroups, Prompts, Sampling
from ftis_node.policy.policy import Policy

__all__ = ["Sampling", "generate"]


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Prompts,
    *,
    group: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    batch: int = 288,
) -> CompletionGroups:
    """Sample `group` completions of each prompt, by the policy's server, or without one that is there in this process.

    Only the thread that computes calls it; where there is a server, after `Server.prepare`. The model is not changed.

    Args:
        prompts: token ids of each prompt, none empty.
        group: completions a prompt (G), at least 1.
        noise: a uniform number in [0, 1) for each token, fp64 `[prompts · group, ≥ max_new_tokens]` on the CPU. A
            server has random numbers of its own; greedily none are used.
        generator: of the CPU, for `noise` where there is none; the default one if None.
        batch: how many sequences are decoded side by side at most. Where `decoder` does it, a row that ends gives its
            place to the next; else prompts are split into calls, groups are not.

    Returns:
        For each prompt, in their order, its G completions: uint32 ids and float32 log-probs `[length]` in sampling
        order, a sampled EOS included. The log-probs are those of the distribution sampled from: temperature applied,
        softmax in fp32 over the valid vocabulary, nothing cut off.

    Raises:
        FtisError: the weights have diverged, or are too large for their dtype (see `not_finite`).
        Interrupted: it was asked for.
        RuntimeError: memory is short; with a smaller `batch` it takes less (see `room.fitting`).
    """
    per_call = max(1, batch // group)
    if noise is None and not sampling.greedy:
        shape = (len(prompts) * group, sampling.max_new_tokens)
        noise = torch.rand(shape, dtype=torch.float64, generator=generator)
    if policy.server is not None and noise is not None and len(noise):
        made: CompletionGroups | None = policy.server.sample(policy, prompts, group, sampling)
        if made is not None:
            return made
    if sampling.greedy:
        noise = None
    if policy.native:
        return decode(policy, prompts, group, sampling, noise, per_call * group)
    out: CompletionGroups = []
    for start in range(0, len(prompts), per_call):
        end = start + per_call
        mine = None
        if noise is not None:
            mine = noise[start * group : end * group]
        out += by_modules(policy, prompts[start:end], group, sampling, mine)
    return out
