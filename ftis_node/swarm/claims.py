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
    """

    samples: float = 0.0
    tokens: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    surprising: float = 0.0
    likelihood: float = 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Add a source's figures of one step, see `Diagnostics.summary`."""
        kept = 0.5 ** (figures["samples"] / FADING_SAMPLES)
        self.samples = kept * self.samples + figures["samples"]
        self.tokens = kept * self.tokens + figures["tokens"]
        self.excess = kept * self.excess + figures["excess"]
        self.squares = kept * kept * self.squares + figures["excess_squares"]
        self.surprising = kept * self.surprising + figures["surprising"]
        self.likelihood = kept * self.likelihood + figures["likelihood"] * figures["samples"]

    @property
    def mean_weight(self) -> float:
        """Mean of min(ρ, 2) over tokens; at most 1 if the claims are honest."""
        return 1.0 + self.excess / self.tokens if self.tokens else 1.0

    @property
    def error(self) -> float:
        """Standard error of `mean_weight`."""
        return math.sqrt(self.squares) / self.tokens if self.tokens else 0.0

    def too_low(self, errors: float) -> bool:
        """Whether the mean lies above 1 by so many standard errors, and by more than rounding may cause."""
        margin = max(TOLERANCE, errors * self.error)
        return self.samples >= FEWEST_SAMPLES and self.mean_weight > 1.0 + margin
