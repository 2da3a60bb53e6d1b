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
        return segment_sum(counted, self.owner, self.lengths.numel())

    def sum_counted_chunks(self, values: Tensor) -> Tensor:
        """Sum of each sample's counted chunks: `[C]` → `[N]`."""
        counted = torch.where(self.of_chunks(self.loss_mask), values, 0.0)
        return segment_sum(counted, self.of_chunks(self.owner), self.lengths.numel())


def pack(
    *,
    trainer_logprobs: Tensor,
    start_logprobs: Tensor,
    sampler_logprobs: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    count_end: bool,
    weights: Tensor | None,
    ended: Tensor | None,
    own: Tensor | None,
    chunks: Tensor | None,
    written: Tensor | None,
) -> Samples:
    """The arguments of `Objective.terms` as `Samples`.

    The paper does not say whether |a_i| counts the sampled EOS (arXiv 2605.22537, section 3). We count it, as the
    policy chose it like any other token. Without `count_end` the last token of a sample that `ended` is left out.
    """
    new = trainer_logprobs
    if weights is None:
        weights = torch.ones_like(advantages)
    if ended is None:
        ended = torch.zeros_like(lengths, dtype=torch.bool)
    if own is None:
        own = torch.ones_like(lengths, dtype=torch.bool)
    if chunks is not None:
        chunks = chunks.to(new.device)
    # Half precision has three digits: a ratio of two log-probs rounded to it would be noise.
    dtype = torch.promote_types(new.dtype, torch.float32)
    lengths = lengths.to(new.device)
    ended = ended.to(new.device, torch.bool)
    own = own.to(new.device, torch.bool)
    owner = owners(lengths)
    loss_mask = torch.ones_like(new, dtype=torch.bool)
    written = lengths if written is None else written.to(new.device)
    if not count_end:
        loss_mask[lengths.cumsum(0)[ended] - 1] = False
        lengths = lengths - ended.to(lengths.dtype)
        written = written - ended.to(written.dtype)

    def constant(tensor: Tensor) -> Tensor:
        return tensor.detach().to(new.device, dtype)

    return Samples(
        trainer_logprobs=new.to(dtype),
        start_logprobs=constant(start_logprobs),
        sampler_logprobs=constant(sampler_logprobs),
        owner=owner,
        loss_mask=loss_mask,
        lengths=lengths,
        advantages=constant(advantages),
        weights=constant(weights),
        own=own,
        written=written,
        chunks=chunks,
    )
