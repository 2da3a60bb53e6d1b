"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] matrix for a whole batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ftis_node.fit.memory import BLOCK_BYTES, BLOCK_TOKENS, CHUNK_BYTES
from ftis_node.policy.packing import Prefixed, pack, pad
from ftis_node.policy.policy import Policy


def completion_logprobs(policy: Policy, groups: Sequence[Prefixed], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of every sampled token under the policy, and the entropy of what it was drawn from.

    The learner trains on these; `ready` and the probe of a vLLM server compare with them. All groups go through the
    model in one pass, so the caller cuts a step into micro-batches. Nothing is changed.

    Args:
        groups: prompts, each with the completions that follow it, one at least; a packed policy computes a prompt once.
        temperature: the run's, above 0; log-probs are of the tempered distribution over the valid vocabulary.

    Returns:
        Log-probs, fp32 `[Σ sampled]`, completion by completion, with gradient where the policy's weights have one and
        gradients are not switched off; and entropies in nats, of the same shape, without. Given tokens have neither.

    Raises:
        RuntimeError: memory is short, see `room.out_of_memory`.
    """
    lay_out = pad
    if policy.packed:
        lay_out = pack
    layout = lay_out(groups, policy.device)
    hidden = policy.causal_lm.get_decoder()(**layout.inputs, use_cache=False).last_hidden_state
    head = policy.causal_lm.get_output_embeddings()
    cap, factor = _after_head(policy.causal_lm.config.get_text_config())
    logprobs, entropy = _Head.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1).index_select(0, layout.where),
        head.weight,
        head.bias,
        layout.targets,
        policy.vocabulary,
        temperature / factor,  # logits are multiplied by the factor
        cap,
    )
    return logprobs, entropy


def _after_head(config: Any) -> tuple[float | None, float]:
    """What a model makes of its head's logits: c of c · tanh(logit / c) in Gemma 2, and a factor in Cohere, Granite.

    Most models have neither: None and 1.
    """
    cap = getattr(config, "final_logit_softcapping", None)
    times = getattr(config, "logit_scale", None) or 1.0
    over = getattr(config, "logits_scaling", None) or 1.0
    return cap, times / over


class _Head(torch.autograd.Function):
    """hidden `[T, H]`, weight `[rows, H]`, bias `[rows]` or None, targets `[T]` → log-probs and entropies, fp32 `[T]`.

    targets: the ids whose log-probs are wanted. cap: see `_after_head`. Entropies have no gradient.

    Logits exist by blocks of some tokens and some columns, small enough for a cache, and again in the backward pass. A
    token's blocks are put together by their maxima and sums, as in an online softmax (arXiv 1805.02867). Where a block
    has all columns, and all blocks together have `CHUNK_BYTES` at most, they are kept instead. Rows of the head beyond
    the vocabulary are padding and count as −inf.
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
        """`_sums` takes logits x less h, the highest of their own block. Together all blocks need x less m, the highest
        of all. So their sums are shifted by h − m, here `fall`.

        So z = Σ e^(x − h) becomes z · e^(h − m), and s = Σ e^(x − h) · (x − h) becomes (s + (h − m) · z) · e^(h − m).
        Added up over all blocks they give log Z = m + log z, and the entropy log z − s/z.
        """
        count = len(targets)
        rows, parts = _blocks(count, vocabulary, hidden.device)
        logprobs, entropy, log_z = hidden.new_empty(3, count, dtype=torch.float32)
        # where a block has all columns, its probabilities may be kept for the backward pass
        small = cap is None and len(parts) == 1 and 4 * count * vocabulary <= CHUNK_BYTES
        kept: list[Tensor] | None = None
        if small and any(ctx.needs_input_grad):
            kept = []
        for tokens in rows:
            place, here = _place(targets[tokens], parts)
            blocks = []
            for number, columns in enumerate(parts):
                logits = _logits(
                    hidden[tokens],
                    weight,
                    bias,
                    columns,
                    temperature,
                    cap,
                )
                block, exponentials = _sums(logits, place[:, number, None])
                blocks.append(block)
                if kept is not None:
                    z = block[:, 2:3]
                    kept.append(exponentials.div_(z))
            chosen, top, z, mean = torch.stack(blocks, 2).unbind(1)  # each [tokens, blocks]
            most = top.amax(1, keepdim=True)
            fall = top - most
            shrink = fall.exp()
            mean = ((mean + fall * z) * shrink).sum(1)
            z = (z * shrink).sum(1)
            log_z[tokens] = most[:, 0] + z.log()
            logprobs[tokens] = chosen.where(here, 0).sum(1) - log_z[tokens]
            entropy[tokens] = z.log() - mean / z
        ctx.kept = kept
        ctx.vocabulary = vocabulary
        ctx.temperature = temperature
        ctx.cap = cap
        ctx.save_for_backward(hidden, weight, bias, targets, log_z)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """By the logits, ∂ log p[target] is 1[target] − p; over the temperature, and with the cap times its slope.

        The probabilities are those that `forward` kept, or are made anew by `log_z`. The kept ones are
        used up. It returns gradients by hidden, weight and bias, None for what needs none.

        Args:
            gradient: of the loss by the log-probs, fp32 `[T]`.
        """
        hidden, weight, bias, targets, log_z = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        by_hidden = None
        by_weight = None
        by_bias = None
        if need_hidden:
            by_hidden = torch.empty_like(hidden)
        if need_weight:
            by_weight = torch.zeros_like(weight)
        if need_bias:
            by_bias = torch.zeros_like(bias)
        rows, parts = _blocks(len(targets), ctx.vocabulary, hidden.device)
        for row, tokens in enumerate(rows):
            place, here = _place(targets[tokens], parts)
            wanted = -gradient[tokens, None] / ctx.temperature  # negative, for p − 1[target] below is
            scaled = (hidden[tokens] * wanted).to(weight.dtype)
            total = torch.zeros_like(scaled, dtype=torch.float32)
            for number, columns in enumerate(parts):
                flat = None  # the slope of c · tanh(x / c) is 1 − tanh²
                if ctx.kept is not None:
                    slope = ctx.kept[row]
                else:
                    slope = _logits(
                        hidden[tokens],
                        weight,
                        bias,
                        columns,
                        ctx.temperature,
                        ctx.cap,
                    )
                    if ctx.cap is not None:
                        flat = 1 - (slope * (ctx.temperature / ctx.cap)).square_()
                    slope.sub_(log_z[tokens, None]).exp_()
                slope.scatter_add_(1, place[:, number, None], -here[:, number, None].float())  # p − 1[target]
                if flat is not None:
                    slope.mul_(flat)
                slope = slope.to(weight.dtype)
                if by_hidden is not None:
                    total += slope @ weight[columns]
                if by_weight is not None:
                    by_weight[columns].addmm_(slope.T, scaled)
                if by_bias is not None:
                    by_bias[columns] += slope.T @ wanted[:, 0].to(slope.dtype)
            if by_hidden is not None:
                by_hidden[tokens] = total.mul_(wanted)
        ctx.kept = None
        return by_hidden, by_weight, by_bias, None, None, None, None


def _sums(logits: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Of one block's logits, which it overwrites: the logit at each `place`, the highest one, Σ e and Σ e·x, where x is
    a logit less the highest and e its exponential, in this order `[tokens, 4]`; and all e, `[tokens, columns]`.

    place: a column for each token, `[tokens, 1]`.
    """
    chosen = logits.gather(1, place)
    top = logits.amax(1, keepdim=True)
    below = logits.sub_(top)
    exponentials = below.exp()
    z = exponentials.sum(1)
    mean = below.mul_(exponentials).sum(1)
    return torch.stack([chosen[:, 0], top[:, 0], z, mean], 1), exponentials


def _blocks(tokens: int, vocabulary: int, device: torch.device) -> tuple[list[slice], list[slice]]:
    """The tokens and the columns of blocks of logits: together all of both, the same for the same arguments."""
    rows = max(1, min(tokens, BLOCK_TOKENS[device.type]))
    columns = max(1, BLOCK_BYTES[device.type] // (4 * rows))
    return _cut(tokens, rows), _cut(vocabulary, columns)


def _cut(end: int, size: int) -> list[slice]:
    """Slices of so many, one after another, up to the end."""
    return [slice(begin, min(begin + size, end)) for begin in range(0, end, size)]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: slice,
    temperature: float,
    cap: float | None,
) -> Tensor:
    """Tempered logits of some columns, fp32 `[tokens, columns]` in memory of their own; with a cap within ±cap /
    temperature. hidden `[tokens, H]`, weight `[rows, H]`, bias `[rows]`; columns: which of its rows."""
    mine = None
    if bias is not None:
        mine = bias[columns]
    logits = linear(hidden, weight[columns], mine).float()
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    if temperature == 1:
        return logits
    return logits.div_(temperature)


def _place(targets: Tensor, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """The column of each target within each block, int64 `[tokens, blocks]`; and whether it is in it, bool.

    A target that is not in a block has some column of it. parts: the columns of blocks, by `_blocks`.
    """
    width = parts[0].stop
    begins = torch.arange(0, width * len(parts), width, device=targets.device)
    wanted = targets[:, None] - begins
    place = wanted.clamp(0, width - 1)
    return place, place == wanted
