"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] matrix for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ftis_node.fit.memory import BLOCK_BYTES, BLOCK_TOKENS, CHUNK_BYTES, Device
from ftis_node.policy.packing import Prefixed, pack, pad
from ftis_node.policy.policy import Policy


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
    logprobs, entropy = _Head.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1).index_select(0, layout.where),
        head.weight,
        head.bias,
        layout.targets,
        policy.vocabulary,
        temperature,
    )
    return logprobs, entropy


class _Head(torch.autograd.Function):
    """hidden `[T, H]`, weight `[rows, H]`, bias `[rows]` or None, targets `[T]` → log-probs and entropies, fp32 `[T]`.

    Logits exist by blocks of some tokens and some columns, small enough for a cache, and again in the backward pass.
    The softmax over a token's blocks is an online one (arXiv 1805.02867). Where a block has all columns, and all blocks
    together have `CHUNK_BYTES` at most, they are kept instead. Rows of the head beyond the vocabulary are padding and
    count as −inf.
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
    ) -> tuple[Tensor, Tensor]:
        logits = _Logits(hidden, weight, bias, targets, vocabulary, temperature)
        logprobs, entropy, log_z = hidden.new_empty(3, len(targets), dtype=torch.float32)
        small = logits.whole and 4 * len(targets) * vocabulary <= CHUNK_BYTES
        kept: list[tuple[Tensor, Tensor]] | None = [] if small and any(ctx.needs_input_grad) else None
        for tokens in logits.tokens():
            top = torch.full_like(log_z[tokens], torch.finfo(torch.float32).min)
            z, mean, chosen = torch.zeros(3, len(top), device=top.device)  # Σ e, Σ e·x, with x = logit − top, e = exp x
            for columns in logits.columns():
                x = logits(tokens, columns)
                place, here = logits.place(tokens, columns)
                chosen += x.gather(1, place)[:, 0] * here
                before, top = top, torch.maximum(top, x.amax(1))
                fall = before - top
                mean, z = (mean + fall * z) * fall.exp(), z * fall.exp()
                e = x.sub_(top[:, None]).exp()
                z += e.sum(1)
                mean += torch.bmm(e[:, None], x[:, :, None])[:, 0, 0]
                if kept is not None:
                    kept.append((e, z))
            log_z[tokens] = top + z.log()
            logprobs[tokens] = chosen - log_z[tokens]
            entropy[tokens] = z.log() - mean / z
        ctx.kept, ctx.arguments = kept, (vocabulary, temperature)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if need_hidden else None
        by_weight = torch.zeros_like(weight) if need_weight else None
        by_bias = torch.zeros_like(bias) if need_bias else None
        logits = _Logits(hidden, weight, bias, targets, *ctx.arguments)
        for number, tokens in enumerate(logits.tokens()):
            wanted, z = -gradient[tokens, None] / logits.temperature, None
            if ctx.kept is not None:
                slope, z = ctx.kept[number]
                wanted /= z[:, None]
            scaled = (hidden[tokens] * wanted).to(weight.dtype)
            total = hidden.new_zeros(hidden[tokens].shape, dtype=torch.float32)
            for columns in logits.columns():
                if z is None:
                    slope = logits(tokens, columns).sub_(log_z[tokens, None]).exp_()
                place, here = logits.place(tokens, columns)
                slope.scatter_add_(1, place, -(here if z is None else here * z)[:, None])  # p − 1[target], times z
                slope = slope.to(weight.dtype)
                if need_hidden:
                    total += slope @ weight[columns]
                if by_weight is not None:
                    by_weight[columns].addmm_(slope.T, scaled)
                if by_bias is not None:
                    by_bias[columns] += slope.T @ wanted[:, 0].to(slope.dtype)
            if by_hidden is not None:
                by_hidden[tokens] = total.mul_(wanted)
        ctx.kept = None
        return by_hidden, by_weight, by_bias, None, None, None


@dataclass(frozen=True, eq=False)
class _Logits:
    """Tempered logits of `[T]` tokens by `vocabulary` columns, in blocks."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    vocabulary: int
    temperature: float

    @property
    def whole(self) -> bool:
        """Whether a block has all columns."""
        return len(self.columns()) == 1

    def tokens(self) -> list[slice]:
        """The blocks' tokens."""
        return _slices(len(self.targets), self._rows)

    def columns(self) -> list[slice]:
        """The blocks' columns."""
        return _slices(self.vocabulary, max(1, BLOCK_BYTES[self._device] // (4 * self._rows)))

    def __call__(self, tokens: slice, columns: slice) -> Tensor:
        """A block, fp32."""
        bias = None if self.bias is None else self.bias[columns]
        logits = linear(self.hidden[tokens], self.weight[columns], bias).float()
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def place(self, tokens: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The column of each token's target within a block, int64 `[tokens, 1]`; 1 where it is in it, else 0."""
        place = self.targets[tokens] - columns.start
        inside = place.clamp(0, columns.stop - columns.start - 1)
        return inside[:, None], (inside == place).float()

    @property
    def _rows(self) -> int:
        return max(1, min(len(self.targets), BLOCK_TOKENS[self._device]))

    @property
    def _device(self) -> Device:
        return "cuda" if self.hidden.is_cuda else "cpu"


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
