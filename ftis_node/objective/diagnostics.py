"""Figures on the worth of a step's samples, over all sources and by source.

The paper shows no importance weights before and after truncation and no counts of its filter (arXiv 2605.22537, section
4.5 varies g only). Without them nobody can tell whether a peer teaches, is ignored, or is believed too much.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ftis_node.objective.columns import Columns
from ftis_node.objective.divergence import ESTIMATORS
from ftis_node.objective.figures import sample_figures, token_figures
from ftis_node.objective.loss import Terms
from ftis_node.objective.packed import owners, segment_sum
from ftis_node.step_report import BETS, OWN, Figures, StepFigures

HONEST_CAP = 2.0  # the bound E[min(ρ, 2)] ≤ 1 of honest claims is checked with this, whatever the objective's C
SURPRISE = -math.log(1000.0)
WHOLE_POWER = 0.5
"""s: of another tokenizer's sample only the whole is judged, by min(W^s, 2) with W = Π_c ρ_c = π(text) / claim(text).

E[W] ≤ 1 of honest claims whatever the segmentation is (Jensen: so is E[W^s]); E[ρ_c] of one chunk is not 1, because
the end of a chunk depends on what follows.
"""
TOLERANCE = 0.02  # nats a token by which honest claims may be too low, since they are rounded or another kernel's
MOST_LOG = 20.0  # bound of log W in a bet; a bet that wins less stays a fair one


@dataclass(eq=False)
class Diagnostics:
    """Gathers the `Terms` of a step's micro-batches; `summary` may be called at any time.

    idle               samples by source with nothing to learn from: their group's rewards were all equal
    unreadable         samples by source that the policy's tokenizer cannot write
    unreadable_judged  so many of these are evidence: with W = 0 they lose each bet, as readable ones win too often
                       without them

    Idle and unreadable samples have rewards, and never become terms.
    """

    idle: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    unreadable_judged: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._samples = Columns()
        self._tokens = Columns()
        self._clips = Columns()
        self._numbers: dict[str, int] = {}

    def add(
        self,
        terms: Terms,
        *,
        advantages: Tensor,
        lengths: Tensor,
        sources: Sequence[str],
        entropy: Tensor,
        distrusted: Tensor,
        chunked: Tensor,
        judged: Tensor,
    ) -> None:
        """Count a micro-batch at its first inner step.

        Args:
            advantages: `[N]`.
            lengths: int64 `[N]`, those that `terms` is of.
            sources: one name a sample.
            entropy: `[T]`, in nats, of the policy at the start of the step.
            distrusted: bool `[N]`, samples that some defence leaves out.
            chunked: bool `[N]`, those whose terms are of chunks.
            judged: bool `[N]`, those that are evidence on claims.
        """
        counted, owner, source = self._rows(terms, lengths, sources)
        samples = len(sources)
        log_ratio = terms.log_ratio.cpu()[counted].double()
        estimates: dict[str, Tensor] = {name: estimate(log_ratio) for name, estimate in ESTIMATORS.items()}
        by_token = {
            "log_ratio": log_ratio,
            "importance": terms.importance.cpu()[counted],
            "truncated": terms.truncated.cpu()[counted],
            "entropy": entropy.cpu()[counted],
            **estimates,
        }
        sizes = torch.bincount(owner, minlength=samples).clamp(min=1)
        negative = advantages.cpu() <= 0
        dropped = ~terms.kept.cpu()
        by_sample = {
            "negatives": negative,
            "filtered": dropped & negative,
            "gated": dropped & ~negative,
            "distrusted": distrusted,
            "divergence": terms.divergence,
            "likelihood": terms.likelihood,
            "loss_weight": terms.loss_weight,
            "token_weight": terms.loss_weight.cpu() / sizes,
            "chunked": chunked,
            **_evidence(terms, lengths.cpu(), chunked.cpu(), judged.cpu()),
        }
        for name, values in estimates.items():
            by_sample[name] = segment_sum(values, owner, samples) / sizes
        self._samples.add(source, by_sample)
        source_of_token = source[owner]
        clipped = terms.clipped.cpu()[counted]
        self._tokens.add(source_of_token, by_token)
        self._clips.add(source_of_token, {"clipped": clipped})

    def add_inner(self, terms: Terms, lengths: Tensor, sources: Sequence[str]) -> None:
        """Count a micro-batch of a later inner step: only `clipped` changes, which is over all inner steps' tokens.

        lengths, sources: as for `add`.
        """
        counted, owner, source = self._rows(terms, lengths, sources)
        clipped = terms.clipped.cpu()[counted]
        self._clips.add(source[owner], {"clipped": clipped})

    def summary(self) -> StepFigures:
        """The figures of everything counted so far, plain floats (0 of nothing is 0).

        samples, tokens     that the terms were of; `idle`: samples in no other figure
        ratio_p1 _p50 _p99 _max   ρ of the tokens at the start of the step, before truncation
        weight_p1 _p50 _p99 _max  importance weights, after truncation
        ess                 (Σ w)² / Σ w² of the importance weights, as a share of the tokens
        truncated           share of the tokens with ρ > C
        clipped             share of the tokens of all inner steps with the clip at ε active
        negatives           samples with Â ≤ 0, those that the filter may drop
        filtered, filtered_fraction   how many of them were dropped, by filter or gate, and of the negatives which share
        gated               samples with Â > 0 that were dropped; only the gate does that
        distrusted          samples that a defence left out, see `learner.trust`
        divergence_mean, divergence_p99   of the objective's own D, over samples
        k1, k2, …           mean over tokens of every estimator in `divergence.ESTIMATORS`
        k1_p99, k2_p99, …   the same, each sample's mean over its tokens, over samples
        likelihood          s_i, the mean log-prob under the policy at the start of the step, mean over samples
        judged, judged_tokens    samples that are evidence on claims and not chunked, and all their tokens
        excess, excess_squares   Σ x_i and Σ x_i² over these, where x_i = Σ_t min(ρ_t, 2) − 1 has a mean ≤ 0 if the
                            generator's claims are honest
        surprising          their tokens that the generator claims a thousand times likelier than the policy finds them
        bet_λ               Σ_t log(1 + λ(e^−τ ρ_t − 1)) over them for each λ of `BETS`, τ = `TOLERANCE`: the logarithm
                            of what a bet on too low claims pays
        chunked             samples that are chunked; absent where none is, as the next three
        chunk_judged        those that are evidence on claims
        chunk_excess, chunk_excess_squares   Σ x_i and Σ x_i² of these, x_i = min(W_i^s, 2) − 1, see `WHOLE_POWER`
        chunk_bet_λ         Σ_i log(1 + λ(e^(−τ·tokens) W_i − 1)) over these, and those that cannot be read (W = 0)
        unreadable          samples that the policy's tokenizer cannot write; absent where none is
        entropy             in nats, mean over tokens; absent where no sample was added
        loss_weight         Σ |Â| · weight · Σ_t importance over the samples that were kept
        loss_share          the same as a share of all sources': they add up to 1, or all are 0
        loss_share_per_sample   that share of Σ |Â| · weight · mean importance: a loss that divides by length gives a
                            long completion no more weight than a short one

        Tokens are the counted ones, see `Terms`.
        """
        every = self._samples.of(self._numbers.values())

        def figures(names: set[str]) -> Figures:
            """The figures of all samples of these sources."""
            numbers = [self._numbers[name] for name in names if name in self._numbers]
            idle = sum(self.idle[name] for name in names)
            unreadable = sum(self.unreadable[name] for name in names)
            lost = sum(self.unreadable_judged[name] for name in names)
            made = {"idle": float(idle)}
            if unreadable:
                made["unreadable"] = float(unreadable)
            samples = self._samples.of(numbers)
            tokens = self._tokens.of(numbers)
            clips = self._clips.of(numbers)
            made |= sample_figures(samples, every, lost=lost)
            return made | token_figures(tokens, clips)

        everyone = {*self._numbers, *self.idle, *self.unreadable}
        return StepFigures(
            overall=figures(everyone),
            foreign=figures(everyone - {OWN}),
            sources={name: figures({name}) for name in sorted(everyone)},
        )

    def _rows(self, terms: Terms, lengths: Tensor, sources: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Which tokens count, bool `[T]`; the sample of each that does; the number of each sample's source `[N]`."""
        numbers = [self._numbers.setdefault(source, len(self._numbers)) for source in sources]
        source = torch.tensor(numbers, dtype=torch.int64)
        counted = terms.loss_mask.cpu()
        owner = owners(lengths.cpu())[counted]
        return counted, owner, source


def _evidence(terms: Terms, lengths: Tensor, chunked: Tensor, judged: Tensor) -> dict[str, Tensor]:
    """Return the evidence of each sample on its claims, `[N]` by name; 0 where it is none. All sampled tokens count.

    lengths int64 `[N]`; chunked, judged bool `[N]`; all on the CPU.
    """
    samples = lengths.numel()
    owner = owners(lengths)
    log_ratio = terms.log_ratio.cpu().double()
    whole = terms.sample_log_ratio.cpu().double()
    by_token = {
        "judged_tokens": torch.ones_like(log_ratio),
        "excess": log_ratio.exp().clamp(max=HONEST_CAP) - 1.0,
        "surprising": log_ratio < SURPRISE,
        **{f"bet_{bet}": _paid(bet, log_ratio - TOLERANCE) for bet in BETS},
    }
    by_text = {
        "chunk_judged": torch.ones_like(whole),
        "chunk_excess": (WHOLE_POWER * whole).exp().clamp(max=HONEST_CAP) - 1.0,
        **{f"chunk_bet_{bet}": _paid(bet, whole - TOLERANCE * lengths) for bet in BETS},
    }
    judged_by_token = judged & ~chunked
    judged_by_text = judged & chunked
    evidence = {"judged": judged_by_token}
    for name, values in by_token.items():
        total = segment_sum(values.double(), owner, samples)
        evidence[name] = torch.where(judged_by_token, total, 0.0)
    for name, values in by_text.items():
        evidence[name] = torch.where(judged_by_text, values, 0.0)
    return evidence


def _paid(bet: float, log_ratio: Tensor) -> Tensor:
    """log(1 + λ(R − 1)): the logarithm of what the bet pays."""
    return torch.log1p(bet * torch.expm1(log_ratio.clamp(max=MOST_LOG)))
