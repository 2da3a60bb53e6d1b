"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] matrix for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftis_node.fit.memory import CHUNK_BYTES
from ftis_node.policy.packing import Prefixed, pack, pad
from ftis_node.policy.policy import Policy

_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def completion_logprobs(policy: Policy, groups: Sequence[Prefixed], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of every sampled token under the policy, and the entropy of what it was drawn from.

    Args:
        groups: prompts, each with the completions that follow it; a prompt is computed once.
        temperature: the run's; log-probs are of the tempered distribution over the valid vocabulary.

    Returns:
        Log-probs, fp32 `[Σ sampled]`, completion by completion, with gradient where the policy's weights have one; and
        entropies in nats, of the same shape, without.
    """
    layout = (pack if policy.packed else pad)(groups, policy.device)
    hidden = policy.causal_lm.get_decoder()(**layout.inputs, use_cache=False).last_hidden_state
    head = policy.causal_lm.get_output_embeddings()
    cap, factor = _after_head(policy.causal_lm.config.get_text_config())
    logprobs, entropy = _Head.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1).index_select(0, layout.where),
        head.weight,
        head.bias,
        layout.targets,
        policy.vocabulary,
        temperature / factor,
        cap,
    )
    return logprobs, entropy


def _after_head(config: Any) -> tuple[float | None, float]:
    """What a model makes of its head's logits: c of c · tanh(logit / c) in Gemma 2, and a factor in Cohere, Granite."""
    cap, times, over = (getattr(config, name, None) for name in _AFTER_HEAD)
    return cap, (times or 1.0) / (over or 1.0)


class _Head(torch.autograd.Function):
    """hidden `[T, H]`, weight `[rows, H]`, bias `[rows]` or None, targets `[T]` → log-probs and entropies, fp32 `[T]`.

    The logits of one chunk of tokens exist at a time, and again in the backward pass. If a single chunk is enough, its
    probabilities are kept instead. Rows of the head beyond the vocabulary are padding and count as −inf.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        vocabulary: int,
        temperature: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, CHUNK_BYTES // (4 * vocabulary))
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        kept = None
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], weight, bias, vocabulary, temperature, cap)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            kept = torch.log_softmax(logits, 1)
            logprobs[part] = kept.gather(1, targets[part, None])[:, 0]
            kept.exp_()  # H = log Z − Σ p·logit, and log Z = logit − log p of any token
            entropy[part] = chosen - logprobs[part] - logits.mul_(kept).sum(1)
        ctx.size, ctx.vocabulary, ctx.temperature, ctx.cap = size, vocabulary, temperature, cap
        ctx.kept = kept if len(targets) <= size and any(ctx.needs_input_grad) and cap is None else None
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if need_hidden else None
        by_weight = torch.zeros_like(weight) if need_weight else None
        by_bias = torch.zeros_like(bias) if need_bias else None
        for start in range(0, len(targets), ctx.size):
            part = slice(start, start + ctx.size)
            wanted = gradient[part, None] / ctx.temperature
            slope = ctx.kept  # of the log-prob by the logits, times the gradient: (1[target] − p) g
            if slope is None:
                logits = _logits(hidden[part], weight, bias, ctx.vocabulary, ctx.temperature, ctx.cap)
                slope = logits.softmax(1)
            slope.mul_(-wanted).scatter_add_(1, targets[part, None], wanted)
            if ctx.cap is not None:  # the slope of c · tanh(x / c) is 1 − tanh²
                slope.mul_(1 - logits.mul_(ctx.temperature / ctx.cap).square_())
            slope = slope.to(weight.dtype)
            if by_hidden is not None:
                torch.mm(slope, weight[: ctx.vocabulary], out=by_hidden[part])
            if by_weight is not None:
                by_weight[: ctx.vocabulary].addmm_(slope.T, hidden[part])
            if by_bias is not None:
                by_bias[: ctx.vocabulary] += slope.sum(0)
        ctx.kept = None
        return by_hidden, by_weight, by_bias, None, None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int, temperature: float, cap: float | None
) -> Tensor:
    """Tempered logits, fp32 `[tokens, vocabulary]`, within ±cap / temperature."""
    logits = torch.nn.functional.linear(
        hidden, weight[:vocabulary], None if bias is None else bias[:vocabulary]
    ).float()
    logits = logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1 else logits.div_(temperature)
