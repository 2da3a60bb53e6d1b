"""The check of an author's claimed log-probs, by the evidence of this node's own training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# FADING: half-life of the sums, in samples. FEWEST: samples before a verdict. TOLERANCE: excess of the mean that
# rounding may cause. DOUBTED, DISPROVED: standard errors above the bound for each verdict.
FADING_SAMPLES = 1000.0
FEWEST_SAMPLES = 32.0
TOLERANCE = 0.02
DOUBTED, DISPROVED = 2.0, 3.0


@dataclass(slots=True)
class Claims:
    """An author's claimed log-probs against this node's own, over about its last thousand samples.

    Tokens drawn from the claimed distribution have E[ρ] = 1, so the sum of min(ρ, 2) − 1 over a sample's tokens has a
    mean of at most 0. Claims that are too low buy weight and make this mean positive. The verdict counts by how many
    standard errors. `surprising` tokens are those that the author claims a thousand times likelier than this node finds
    them. They are shown but not punished, because an honest peer of another style has many.

    `samples` … `squares` cover samples in this node's own tokens. Samples of another tokenizer are judged as wholes
    (`chunked`, `chunk_excess`, `chunk_squares`; see `objective.diagnostics.WHOLE_POWER`). The tokens of a chunk depend
    on what follows, so the mean of its ρ is not 1.
    """

    samples: float = 0.0
    tokens: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    surprising: float = 0.0
    likelihood: float = 0.0
    chunked: float = 0.0
    chunk_excess: float = 0.0
    chunk_squares: float = 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Add a source's figures of one step, see `Diagnostics.summary`."""
        kept = 0.5 ** (figures["samples"] / FADING_SAMPLES)
        chunked = figures.get("chunked", 0.0)
        self.chunked = kept * self.chunked + chunked
        self.chunk_excess = kept * self.chunk_excess + figures.get("chunk_excess", 0.0)
        self.chunk_squares = kept * kept * self.chunk_squares + figures.get("chunk_excess_squares", 0.0)
        self.samples = kept * self.samples + figures["samples"] - chunked
        self.tokens = kept * self.tokens + figures["tokens"] - figures.get("chunk_tokens", 0.0)
        self.excess = kept * self.excess + figures["excess"]
        self.squares = kept * kept * self.squares + figures["excess_squares"]
        self.surprising = kept * self.surprising + figures["surprising"]
        self.likelihood = kept * self.likelihood + figures["likelihood"] * figures["samples"]

    @property
    def mean_weight(self) -> float:
        """Mean of min(ρ, 2) over tokens; of min(W^s, 2) over samples where all are of another tokenizer.

        At most 1 of honest claims.
        """
        if self.tokens:
            return 1.0 + self.excess / self.tokens
        return 1.0 + self.chunk_excess / self.chunked if self.chunked else 1.0

    @property
    def error(self) -> float:
        """Standard error of `mean_weight`."""
        if self.tokens:
            return math.sqrt(self.squares) / self.tokens
        return math.sqrt(self.chunk_squares) / self.chunked if self.chunked else 0.0

    @property
    def mean_likelihood(self) -> float | None:
        """Mean log-prob of the author's tokens under this node's policy, mean over samples."""
        samples = self.samples + self.chunked
        return self.likelihood / samples if samples else None

    def too_low(self, errors: float) -> bool:
        """Whether either mean lies above 1 by so many standard errors, and by more than rounding may do."""
        return bool(self.evidence(errors))

    def evidence(self, errors: float) -> str:
        """The evidence that the claims are too low, in words; empty without any."""
        if self._above(self.samples, self.tokens, self.excess, self.squares, errors):
            return (
                f"mean of min(ρ, 2) {1 + self.excess / self.tokens:.3f} ± {math.sqrt(self.squares) / self.tokens:.3f}"
            )
        if self._above(self.chunked, self.chunked, self.chunk_excess, self.chunk_squares, errors):
            mean, error = self.chunk_excess / self.chunked, math.sqrt(self.chunk_squares) / self.chunked
            return f"mean of min(√W, 2) over whole samples {1 + mean:.3f} ± {error:.3f}"
        return ""

    @staticmethod
    def _above(samples: float, count: float, excess: float, squares: float, errors: float) -> bool:
        if samples < FEWEST_SAMPLES or not count:
            return False
        return excess / count > max(TOLERANCE, errors * math.sqrt(squares) / count)
