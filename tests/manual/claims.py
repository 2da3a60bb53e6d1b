"""How often the test of claims bans the honest and finds liars: the rule in force beside the one before it.

    python -m tests.manual.claims [--histories 1000] [--only honest,lies,selection,late,models] [--models DIR]

A history is up to 2,000 samples of one author, judged after every twelve. Author and reader have random distributions
over 16 words in 512 contexts, so far apart that the author's KL divergence from the reader is as named, in nats a
token. A liar lowers the claim of each token by δ nats. `tokens`: both have one tokenizer. `wholes`: they have not, so
only whole samples are judged. The rule before: mean of min(ρ, 2) (wholes: min(√W, 2)) above 1.02 and 2 (doubt) or 3
(ban) standard errors, from 32 samples on.

`selection`: groups of 8, of which only those with right and wrong answers are trained on; answers of 1 or 3 tokens, one
of which decides. `late`: 20,000 honest samples, then lies. `models`: real models with three tokenizers, `demo
--mixed`'s or DIR's, as they come.

Expected, written down before the first run of this file (after trials of the design with other random numbers):

1. Honest authors: the rule in force bans at most 0.4 % and doubts at most 4 % in every cell. The one before doubts over
   5 % at one token and divergences up to 0.05.
2. In every cell of lies the rule in force bans in no fewer histories than the one before, up to one in a hundred.
3. Tokens: δ = 0.1 is found (banned in 90 % of histories) at divergences up to 0.05 at every length, at 0.27 from 5
   tokens on, at 1.0 from 20; δ = 0.2 up to 0.27 at every length, at 1.0 from 3; δ = 0.5 everywhere.
4. Wholes of 200 tokens at a divergence of 1.0: neither δ = 0.1 nor 0.2 is found.
5. Selection: the rule before bans more than half of weak honest authors (right in 10 %, the reader in 20 %). The rule
   in force bans at most 0.4 % of any honest author.
6. A late liar (δ = 0.2, divergence 0.05, 3 tokens) is banned in 99 % of histories within 2,000 samples.
7. Real models: no honest pair is doubted.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ftis_node.config.settings import collect
from ftis_node.objective.diagnostics import HONEST_CAP, MOST_LOG, TOLERANCE
from ftis_node.packet import TextPacket, decode
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.step_report import BETS
from ftis_node.swarm.claims import DISPROVED, DOUBTED, LARGEST_WIN, MOST, STAKE_SAMPLES
from ftis_node.worker.engine import Engine
from tests.support.small_models import BUILT_IN, arithmetic_run

DISTANCES, LIES = (0.02, 0.05, 0.27, 1.0), (0.1, 0.2, 0.5)
LENGTHS, WHOLES = (1, 2, 3, 4, 5, 20, 200), (5, 20, 200)
SAMPLES, LOOK, CONTEXTS, WORDS = 2000, 12, 512, 16
MIXED = ("tiny-chars", "tiny-numbers", "tiny-bpe")
AUTHOR = bytes(38)
Array = np.ndarray


class Before:
    """The rule before: fading sums, judged at each look by a fixed number of standard errors."""

    def __init__(self, histories: int) -> None:
        self.sums = np.zeros((4, histories))  # samples, units, excess, squares

    def look(self, samples: Array, units: Array, excess: Array, squares: Array) -> tuple[Array, Array]:
        """Add figures of each history [H]; which are doubted, which banned."""
        kept = 0.5 ** (samples / 1000)
        self.sums = self.sums * [kept, kept, kept, kept**2] + [samples, units, excess, squares]
        count, units, excess, squares = self.sums
        mean, error = excess / np.maximum(units, 1), np.sqrt(squares) / np.maximum(units, 1)
        doubted, banned = ((count >= 32) & (mean > np.maximum(0.02, errors * error)) for errors in (2, 3))
        return doubted, banned


class InForce:
    """`Claims`, for many histories at once; tests/test_standing.py plays the class itself."""

    def __init__(self, histories: int) -> None:
        self.wealth = np.ones((histories, len(BETS)))

    def look(self, samples: Array, paid: Array) -> tuple[Array, Array]:
        """Add logarithms [H, bets] of what samples [H] paid; which are doubted, which banned. The other kind's is 1."""
        grown = self.wealth * np.exp(np.minimum(paid, LARGEST_WIN)) + samples[:, None] / STAKE_SAMPLES
        self.wealth = np.minimum(grown, MOST)
        total = self.wealth.mean(1) + 1
        return total >= DOUBTED, total >= DISPROVED


def paid(log_ratio: Array) -> Array:
    """Logarithms [..., bets] of what bets on these pay."""
    gain = np.expm1(np.minimum(log_ratio, MOST_LOG))
    return np.stack([np.log1p(bet * gain) for bet in BETS], -1)


class World:
    """An author and a reader so far apart; draws samples, of which each token is one of `CONTEXTS` · `WORDS` cells."""

    def __init__(self, distance: float, random: np.random.Generator) -> None:
        self.random = random
        logits, noise = np.random.default_rng(5).normal(size=(2, CONTEXTS, WORDS))
        low, high = 0.0, 8.0
        for _ in range(40):
            middle = (low + high) / 2
            author, reader = log_softmax(1.5 * logits), log_softmax(1.5 * logits + middle * noise)
            near = (np.exp(author) * (author - reader)).sum(1).mean() < distance
            low, high = (middle, high) if near else (low, middle)
        self.log_ratio = (reader - author).ravel()
        self.cells = np.cumsum(np.exp(author).ravel() / CONTEXTS)

    def looks(self, histories: int, length: int, lie: float, wholes: bool) -> Iterator[tuple[Array, Array]]:
        """x of each sample [H, LOOK], and what bets on all of a look pay [H, bets]."""
        log_ratio = self.log_ratio + lie
        x, bets = np.minimum(np.exp(log_ratio), HONEST_CAP) - 1, paid(log_ratio - TOLERANCE)
        while True:
            drawn = np.searchsorted(self.cells, self.random.random((histories, LOOK, length)) * self.cells[-1])
            if wholes:
                whole = log_ratio[drawn].sum(-1)
                of_whole = np.exp(np.minimum(whole / 2, np.log(HONEST_CAP))) - 1
                yield of_whole, paid(whole - TOLERANCE * length).sum(1)
            else:
                yield x[drawn].sum(-1), bets[drawn].sum((1, 2))


def log_softmax(logits: Array) -> Array:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Tally:
    """The sample at which each history was first doubted and banned by each rule; infinite if it was not."""

    def __init__(self, histories: int) -> None:
        self.first = np.full((4, histories), np.inf)

    def note(self, sample: Array, *verdicts: Array) -> None:
        for first, verdict in zip(self.first, verdicts, strict=True):
            first[verdict & np.isinf(first)] = np.broadcast_to(sample, first.shape)[verdict & np.isinf(first)]

    def __str__(self) -> str:
        shares = [f"{np.isfinite(first).mean():7.1%}" for first in self.first]
        times = [f"{np.median(self.first[place]):5.0f}" for place in (1, 3)]
        return f"{shares[0]} {shares[1]} {times[0]}   | {shares[2]} {shares[3]} {times[1]}"


HEADING = "before: doubted, banned, median | in force: doubted, banned, median samples to the ban"


def history(world: World, histories: int, length: int, lie: float, wholes: bool) -> Tally:
    before, in_force, tally = Before(histories), InForce(histories), Tally(histories)
    each = np.full(histories, float(LOOK))
    looks = world.looks(histories, length, lie, wholes)
    for number, (x, bets) in zip(range(LOOK, SAMPLES + 1, LOOK), looks, strict=False):
        old = before.look(each, each * (1 if wholes else length), x.sum(1), np.square(x).sum(1))
        tally.note(number, *old, *in_force.look(each, bets))
        if np.isfinite(tally.first).all():
            break
    return tally


def cells(histories: int, lies: tuple[float, ...], random: np.random.Generator) -> None:
    print(f"kind   divergence length δ     {HEADING}")
    for wholes, distance in itertools.product((False, True), DISTANCES):
        world = World(distance, random)
        for length, lie in itertools.product(WHOLES if wholes else LENGTHS, lies):
            tally = history(world, histories, length, lie, wholes)
            print(f"{'wholes' if wholes else 'tokens'} {distance:<10} {length:<6} {lie:<5} {tally}", flush=True)


def selection(histories: int, random: np.random.Generator) -> None:
    """Groups of 8 with an answer that is right or wrong by one token; those of equal rewards are never seen."""
    print(f"author reader tokens δ     {HEADING} (samples: of groups trained on)")
    for (own, reader), length, lie in itertools.product(
        ((0.1, 0.2), (0.2, 0.1), (0.05, 0.1), (0.5, 0.6), (0.9, 0.8)), (1, 3), (0.0, *LIES)
    ):
        ratio = np.array([np.log((1 - reader) / (1 - own)), np.log(reader / own)]) + lie
        rest = (length - 1) * np.array([paid(np.array(lie - TOLERANCE))])
        x = np.minimum(np.exp(ratio), HONEST_CAP) - 1 + (length - 1) * (np.exp(lie) - 1)
        bets = paid(ratio - TOLERANCE) + rest
        before, in_force, tally, seen = Before(histories), InForce(histories), Tally(histories), np.zeros(histories)
        while seen.min() < SAMPLES:
            right = (random.random((histories, 8)) < own).astype(int)
            count = right.cumsum(1) - right
            judged = (count > 0) & (count < np.arange(8))  # a right and a wrong one were before
            trained = (right.sum(1) % 8 > 0) & (seen < SAMPLES)
            seen += 8.0 * trained
            of = trained[:, None]
            old = before.look(
                8.0 * trained, 8.0 * length * trained, (x[right] * of).sum(1), (x[right] ** 2 * of).sum(1)
            )
            judged &= of
            new = in_force.look(judged.sum(1).astype(float), (bets[right] * judged[..., None]).sum(1))
            tally.note(seen, *old, *new)
        print(f"{own:<6} {reader:<6} {length:<6} {lie:<5} {tally}", flush=True)


def late(histories: int, random: np.random.Generator) -> None:
    world, in_force = World(0.05, random), InForce(histories)
    each, first = np.full(histories, float(LOOK)), np.full(histories, np.inf)
    early = np.zeros(histories, bool)
    for _, (_, bets) in zip(range(0, 20_000, LOOK), world.looks(histories, 3, 0.0, wholes=False), strict=False):
        early |= in_force.look(each, bets)[1]
    for number, (_, bets) in zip(range(LOOK, SAMPLES, LOOK), world.looks(histories, 3, 0.2, False), strict=False):
        first[in_force.look(each, bets)[1] & np.isinf(first)] = number
    print(f"late liar: banned while honest {early.mean():.1%}; then {np.isfinite(first).mean():.1%} ", end="")
    print(f"within {SAMPLES} samples, median {np.median(first):.0f}")


def opened(model: Path) -> Engine:
    engine = Engine()
    settings = collect(task="arithmetic", flags={"device": "cpu", "model": str(model)}, environment={})[0]
    engine.open(arithmetic_run(engine.load(settings, "arithmetic"), any_tokenizer=True, group=12))
    return engine


def log_weights(author: Engine, reader: Engine, groups: int) -> Array:
    """Of each of the author's samples that the reader reads in chunks: log W, −∞ where it cannot; tokens; pieces."""
    rows = [place % len(author.prompts) for place in range(groups)]
    found = []
    for row, made in zip(rows, author.generate(rows, AUTHOR).groups, strict=True):
        packet = decode(made.packet)
        assert isinstance(packet, TextPacket)
        every = reader.packets.completions(made.packet, own=False)
        texts = [text for one, text in zip(every, packet.completions(), strict=True) if one is not None]
        read = [one for one in every if one is not None]
        found += [(-np.inf, 1, 1)] * (len(every) - len(read))
        with torch.no_grad():
            prompt = Prefixed(reader.prompts[row], [one.token_ids for one in read])
            start = completion_logprobs(reader.policy, [prompt], reader.run.temperature)[0].numpy()
        ends = np.cumsum([len(one) for one in read])
        for one, text, own in zip(read, texts, np.split(start, ends[:-1]), strict=True):
            if one.chunks is not None:
                found.append((float(own.sum() - one.logprobs.sum()), len(one), len(text)))
    return np.array(found).T


def models(folder: Path, groups: int = 60) -> None:
    """The most that bets on each pair's samples ever paid, in their order; one history each."""
    print("author → reader: samples, mean tokens of both; the most that bets paid for δ = 0, 0.1, 0.2, 0.5")
    for author, reader in itertools.permutations(MIXED, 2):
        logs, lengths, pieces = log_weights(opened(folder / author), opened(folder / reader), groups)
        most = []
        for lie in (0.0, *LIES):
            wealth, peak = np.ones(len(BETS)), 0.0
            for bets in paid(logs + lie * pieces - TOLERANCE * lengths):
                wealth = np.minimum(wealth * np.exp(bets) + 1 / STAKE_SAMPLES, MOST)
                peak = max(peak, wealth.mean() + 1)
            most.append(f"{peak:,.1f}")
        print(
            f"{author} → {reader}: {len(logs)}, {pieces.mean():.0f} → {lengths.mean():.0f}; {', '.join(most)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--only", default="honest,lies,selection,late,models")
    parser.add_argument("--models", type=Path, default=BUILT_IN)
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    for part in asked.only.split(","):
        print(f"\n{part}")
        if part in ("honest", "lies"):
            cells(asked.histories, (0.0,) if part == "honest" else LIES, random)
        elif part == "models":
            models(asked.models)
        else:
            {"selection": selection, "late": late}[part](asked.histories, random)


if __name__ == "__main__":
    main()
