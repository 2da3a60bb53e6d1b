"""The check of an author's claimed log-probs, by the evidence of this node's own training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftis_node.step_report import BETS

FADING_SAMPLES = 1000.0  # half-life of the means that are shown; the verdicts need none
STAKE_SAMPLES = 1000.0  # samples after which as much was staked anew as at first
DOUBTED = 100.0  # what the bets have paid for each stake at a verdict
DISPROVED = 1000.0
MOST = 1e6  # what a bet can be worth, so that an author that mends its ways is not doubted for ever
LARGEST_WIN = 50.0  # nats of a step
# By place in `wealth`: the kind of sample (0: tokens, 1: whole samples), and the name of the figure that it is paid by.
_ACCOUNTS = tuple((kind, f"{prefix}_{bet}") for kind, prefix in enumerate(("bet", "chunk_bet")) for bet in BETS)


@dataclass(slots=True)
class Claims:
    """An author's claimed log-probs against this node's own. ρ is the ratio of a token's probability by this node's
    policy to the claimed one; W is the same of a whole sample.

    **Verdicts** go by bets against the claims (Waudby-Smith and Ramdas, JRSS B 86, 2024). A token drawn from the
    claimed distribution has E[ρ | what was before it] ≤ 1. So 1 + λ(ρ − 1) has a mean of at most 1, and so has the
    product over all tokens, whenever one looks. Claims that are too low make it grow, at a small λ even where ρ is
    spread far. `wealth` has what each λ of `BETS` has paid: first over tokens, then over whole samples of another
    tokenizer, with W for ρ. (The tokens of a chunk depend on what follows, so the mean of its ρ is not 1.) Every sample
    adds a fresh stake of 1/1000, from which bets grow on an author that begins to lie later: an e-detector (Shin,
    Ramdas and Rinaldo, arXiv 2203.03532) that sums over starts as Shiryaev and Roberts do.

    Level: within n judged samples an honest author is banned with a probability of at most (2 + n/1000) / 1000, and
    doubted with at most (2 + n/1000) / 100, for any number of looks (Ville's inequality). Assumed: samples are drawn
    one by one from what is claimed, up to `objective.diagnostics.TOLERANCE` a token, and are judged whatever they hold
    themselves (`learner.batch.after_both`).

    **Means** are shown. The fields are their sums, which fade, so that about the last thousand samples count. judged,
    excess, squares: the number of terms x, their sum and that of x², over judged tokens, with x = min(ρ, 2) − 1, and
    over judged whole samples of another tokenizer, with x = min(√W, 2) − 1. samples, likelihood: of all that was
    trained on. `surprising` tokens are not punished, because an honest peer of another style has many.
    """

    samples: float = 0.0
    judged: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    surprising: float = 0.0
    likelihood: float = 0.0
    wealth: list[float] = field(default_factory=lambda: [1.0] * len(_ACCOUNTS))

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Claims:
        """Read what a home kept, as `dataclasses.asdict` gives it. Older ones kept whole samples apart, or no
        `wealth`: it begins at 1. Raises ValueError, TypeError or KeyError if it is malformed."""
        wealth = [float(value) for value in row.get("wealth", ())]
        numbers: dict[str, Any] = {key: float(value) for key, value in row.items() if key != "wealth"}
        if "tokens" in numbers:
            numbers["judged"] = numbers.pop("tokens") + numbers.pop("chunked", 0.0)
            numbers["excess"] += numbers.pop("chunk_excess", 0.0)
            numbers["squares"] += numbers.pop("chunk_squares", 0.0)
        kept = cls(**numbers)
        if len(wealth) == len(_ACCOUNTS):
            kept.wealth = wealth
        return kept

    def add(self, figures: Mapping[str, float]) -> None:
        """Let the sums fade, add the author's figures of one step, see `Diagnostics.summary`, and settle the bets. Call
        it once a step in which samples of the author were trained on."""
        self._fade(0.5 ** (figures["samples"] / FADING_SAMPLES))
        judged = [figures.get("judged", 0.0), figures.get("chunk_judged", 0.0)]  # samples, by the kind of an account
        self.samples += figures["samples"]
        self.likelihood += figures["likelihood"] * figures["samples"]
        self.surprising += figures["surprising"]
        self.judged += figures.get("judged_tokens", 0.0)
        self.judged += judged[1]
        self.excess += figures["excess"]
        self.excess += figures.get("chunk_excess", 0.0)
        self.squares += figures["excess_squares"] + figures.get("chunk_excess_squares", 0.0)
        for place, (kind, name) in enumerate(_ACCOUNTS):
            win = min(figures.get(name, 0.0), LARGEST_WIN)  # a logarithm; negative if the bet lost
            paid = self.wealth[place] * math.exp(win)
            stake = judged[kind] / STAKE_SAMPLES
            self.wealth[place] = min(paid + stake, MOST)

    def _fade(self, kept: float) -> None:
        """Let this part of each sum stay, 0 to 1.

        A term of `excess` that has faded to the part `kept` has kept² of its variance, which `squares` estimates.
        """
        self.samples *= kept
        self.likelihood *= kept
        self.surprising *= kept
        self.judged *= kept
        self.excess *= kept
        self.squares *= kept * kept

    @property
    def mean_weight(self) -> float:
        """Mean of min(ρ, 2) over tokens, and of min(√W, 2) over samples of another tokenizer.

        At most 1 of honest claims, up to chance; 1 before any sample was judged.
        """
        if not self.judged:
            return 1.0
        return 1.0 + self.excess / self.judged

    @property
    def error(self) -> float:
        """Standard error of `mean_weight`; 0 before any sample was judged."""
        if not self.judged:
            return 0.0
        return math.sqrt(self.squares) / self.judged

    @property
    def mean_likelihood(self) -> float | None:
        """Mean log-prob (nats) of the author's tokens under this node's policy, mean over samples; None before any."""
        if not self.samples:
            return None
        return self.likelihood / self.samples

    @property
    def paid(self) -> float:
        """Return what the bets against the claims have paid, for a stake of 1 in each kind of sample: 2 at
        first. `Reputation` doubts the author from `DOUBTED` on and bans it from `DISPROVED` on."""
        return sum(self.wealth) / len(BETS)

    @property
    def evidence(self) -> str:
        """The evidence that the claims are too low, in words, by the kind of sample that has more. A ban quotes it."""
        if sum(self.wealth[: len(BETS)]) >= sum(self.wealth[len(BETS) :]):
            judged = "tokens, mean of min(ρ, 2)"
        else:
            judged = "whole samples, mean of min(√W, 2)"
        return f"bets against them paid {self.paid:,.0f} to 1, over {judged} {self.mean_weight:.3f}"
