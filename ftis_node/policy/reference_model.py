"""The engine `hf`: transformers' own `generate`, which the native one is held against."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ftis_node.host.doing import advance
from ftis_node.packet import Completion
from ftis_node.policy.generate.sampling import Sampling, left_padded, to_completions
from ftis_node.policy.policy import Policy


def reference(
    policy: Policy, prompts: Sequence[Sequence[int]], group: int, sampling: Sampling, noise: Tensor | None
) -> list[list[Completion]]:
    """One batch; see `generate.generate`. Of the noise only its first number matters, as a seed."""
    ids, mask = (table.to(policy.device).repeat_interleave(group, 0) for table in left_padded(prompts))
    tempered = _Tempered(policy.vocabulary, sampling.temperature, sampling.max_new_tokens)
    with _plain_settings(policy.causal_lm), _seeded(noise, policy.device):
        whole = policy.causal_lm.generate(
            input_ids=ids,
            attention_mask=mask,
            **({} if sampling.greedy else {"do_sample": True, "top_k": 0}),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.eos),
            pad_token_id=0,
            logits_processor=LogitsProcessorList([tempered]),
        )
    drawn = whole[:, ids.shape[1] :]
    advance(len(drawn))
    logprobs = tempered.logprobs(drawn[:, -1:])
    return to_completions(policy, drawn.cpu().numpy(), logprobs.cpu().numpy(), sampling.eos, group)


class _Tempered(LogitsProcessor):  # type: ignore[misc]
    """Turns logits into log-probs of the distribution that is sampled from, and keeps those of the tokens drawn.

    It is the last processor, and the only one, so that the draw is from what it returns; a draw shows in the next call.
    """

    def __init__(self, vocabulary: int, temperature: float, max_new_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._cap = max_new_tokens
        self._latest: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._latest is not None:
            self._columns.append(self._latest.gather(1, input_ids[:, -1:]))
        tempered = torch.full_like(scores, -torch.inf, dtype=torch.float32)
        logits = scores[:, : self._vocabulary].float() / self._temperature
        tempered[:, : self._vocabulary] = logits.log_softmax(-1)
        self._latest = tempered
        rows = len(scores)
        advance(tokens=rows, begun=rows * len(self._columns) / self._cap)
        return tempered

    def logprobs(self, last: Tensor) -> Tensor:
        """fp32 `[rows, tokens]`; `last` are the tokens drawn last, `[rows, 1]`."""
        assert self._latest is not None
        return torch.cat([*self._columns, self._latest.gather(1, last)], 1)


@contextlib.contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """Without what a model's folder says of sampling (penalties, top-k): it would fill in what is not named."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


@contextlib.contextmanager
def _seeded(noise: Tensor | None, device: torch.device) -> Iterator[None]:
    """transformers draws from the global state: it is seeded, if there is noise, and put back."""
    if noise is None:
        yield
        return
    seed = int(float(noise[0, 0]) * 2**53)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
