"""N packed samples as the objective computes with them: one dtype, one device, and which tokens count."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ftis_node.objective.packed import first_of, owners, segment_sum


@dataclass(frozen=True, eq=False)
class Samples:
    """Packed samples; `owner` int64 `[T]` names each token's sample, see `packed`.

    `loss_mask` bool `[T]`: the token is in loss, divergence and likelihood. `lengths` int64 `[N]` counts those, and is
    0 for a sample that was only an uncounted EOS. `chunks` int64 `[T]` names each token's chunk, `sampler_logprobs` is
    `[C]`; None: each token is a chunk. `written` int64 `[N]` counts the same of a sample's author, in its tokens.
    """

    trainer_logprobs: Tensor
    start_logprobs: Tensor
    sampler_logprobs: Tensor
    owner: Tensor
    loss_mask: Tensor
    lengths: Tensor
    advantages: Tensor
    weights: Tensor
    own: Tensor
    written: Tensor
    chunks: Tensor | None

    @property
    def count(self) -> int:
        """N, samples without a counted token included."""
        return self.lengths.numel()

    def by_chunk(self, values: Tensor) -> Tensor:
        """Sum of each chunk's tokens: `[T]` → `[C]`."""
        if self.chunks is None:
            return values
        return segment_sum(values, self.chunks, self.sampler_logprobs.numel())

    def by_token(self, values: Tensor) -> Tensor:
        """The value of each token's chunk: `[C]` → `[T]`."""
        if self.chunks is None:
            return values
        return values[self.chunks]

    def of_chunks(self, values: Tensor) -> Tensor:
        """The value that all tokens of a chunk share: `[T]` → `[C]`."""
        if self.chunks is None:
            return values
        return values[first_of(self.chunks)]

    def sum_counted(self, values: Tensor) -> Tensor:
        """Sum of each sample's counted tokens: `[T]` → `[N]`."""
        counted = torch.where(self.loss_mask, values, 0.0)
        return segment_sum(counted, self.owner, self.count)

    def sum_counted_chunks(self, values: Tensor) -> Tensor:
        """Sum of each sample's counted chunks: `[C]` → `[N]`."""
        counts = self.of_chunks(self.loss_mask)
        owner = self.of_chunks(self.owner)
        counted = torch.where(counts, values, 0.0)
        return segment_sum(counted, owner, self.count)


def pack(
    *,
    trainer_logprobs: Tensor,
    start_logprobs: Tensor,
    sampler_logprobs: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ended: Tensor,
    own: Tensor,
    chunks: Tensor | None,
    written: Tensor,
    count_end: bool,
) -> Samples:
    """N packed samples with T = Σ lengths tokens in all, on the device where they are; floats are float32 in training.

    The paper does not say whether |a_i| counts the sampled EOS (arXiv 2605.22537, section 3). We count it, as the
    policy chose it like any other token.

    Args:
        trainer_logprobs: `[T]`, log π_θ of the sampled tokens, with gradient (or without, to evaluate).
        start_logprobs: `[T]`, the same at the start of the step (`trainer_logprobs.detach()` at its first inner step).
        sampler_logprobs: `[T]`, the log-probs that the generator claims; `[C]` with `chunks`.
        lengths: int64 `[N]`.
        advantages: `[N]`, over each sample's whole group.
        weights: `[N]`, per source.
        ended: bool `[N]`, the last token is a sampled EOS.
        own: bool `[N]`, the node's own, which no gate touches.
        chunks: int64 `[T]`, the chunk of each token, ascending through all samples, where the generator has another
            tokenizer: text that ends in both after the same bytes. ρ, D and the filter are then of chunks, with log ρ_c
            = Σ_{t in c} log π_start − sampler_logprobs_c, and a chunk's weight is that of each of its tokens. |a_i|,
            s_i and the gradient are of tokens. None: each token is one.
        written: int64 `[N]`, tokens of the author.
        count_end: without it the last token of a sample that `ended` is left out.
    """
    owner = owners(lengths)
    loss_mask = torch.ones_like(trainer_logprobs, dtype=torch.bool)
    if not count_end:
        loss_mask[lengths.cumsum(0)[ended] - 1] = False
        left_out = ended.long()
        lengths = lengths - left_out
        written = written - left_out
    return Samples(
        trainer_logprobs=trainer_logprobs,
        start_logprobs=start_logprobs,
        sampler_logprobs=sampler_logprobs,
        owner=owner,
        loss_mask=loss_mask,
        lengths=lengths,
        advantages=advantages,
        weights=weights,
        own=own,
        written=written,
        chunks=chunks,
    )
