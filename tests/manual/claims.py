"""What the claims test between tokenizers sees: honest claims, and claims that are too low, by the power s of W.

    python -m tests.manual.claims [--models DIR] [--groups 24] [--tokens 300] [--verdict 32]

DIR holds the warm-ups of `ftis-node lab run tokenizers` (its `models`); without it, the built-in models of `demo
--mixed` are taken. Each model writes groups, and a model with another tokenizer reads them, in both directions. A liar
lowers the claim of each of its tokens by δ nats. A sample has x = min(W^s, 2) − 1; an author is disproved when its mean
is above 0.02 and three standard errors, doubted above two. Expected before the first run: no honest pair is disproved
at any s; δ = 0.2 is disproved at every s up to 1; s = 1/2 sees δ = 0.1. Of these only the first came out:
docs/security.md has the figures.

These models end a completion after 6 to 50 tokens and were taught nothing longer. With `--tokens` a sample is therefore
several problems in a row: completions of one author, in random order, until they have so many of its tokens. Each
begins at its own prompt, so W is the product of theirs and is exact. In one long text each part would also depend on
the parts before it, which this does not have. `--verdict` judges so many samples at a time; 32 are the fewest on which
a node gives a verdict.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ftis_node.config.settings import collect
from ftis_node.objective.diagnostics import HONEST_CAP
from ftis_node.packet import TextPacket, decode
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.swarm.claims import DISPROVED, DOUBTED, TOLERANCE
from ftis_node.worker.engine import Engine
from tests.support.small_models import BUILT_IN, arithmetic_run

POWERS, LIES = (1.0, 0.5, 0.25, 0.125), (0.0, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)
MIXED = ("tiny-chars", "tiny-numbers", "tiny-bpe")
AUTHOR = bytes(38)


def opened(model: Path) -> Engine:
    engine = Engine()
    settings = collect(task="arithmetic", flags={"device": "cpu", "model": str(model)}, environment={})[0]
    engine.open(arithmetic_run(engine.load(settings, "arithmetic"), any_tokenizer=True, group=12))
    return engine


def log_weights(author: Engine, reader: Engine, groups: int) -> list[tuple[float, int]]:
    """(log W, pieces) of each sample of the author that the reader reads in chunks."""
    rows = [place % len(author.prompts) for place in range(groups)]
    found = []
    for row, made in zip(rows, author.generate(rows, AUTHOR).groups, strict=True):
        packet = decode(made.packet)
        assert isinstance(packet, TextPacket)
        read = reader.packets.completions(made.packet, own=False)
        kept = [(one, len(text)) for one, text in zip(read, packet.completions(), strict=True) if one is not None]
        with torch.no_grad():
            prompt = Prefixed(reader.prompts[row], [one.token_ids for one, _ in kept])
            start = completion_logprobs(reader.policy, [prompt], reader.run.temperature)[0].numpy()
        ends = np.cumsum([len(one) for one, _ in kept])
        for (one, pieces), own in zip(kept, np.split(start, ends[:-1]), strict=True):
            if one.chunks is not None:
                found.append((float(own.sum() - one.logprobs.sum()), pieces))
    return found


def joined(samples: list[tuple[float, int]], tokens: int) -> list[tuple[float, int]]:
    """Samples of at least so many pieces each, of these in random order; what is left over is dropped."""
    found, log, pieces = [], 0.0, 0
    for place in np.random.default_rng(0).permutation(len(samples)):
        log, pieces = log + samples[place][0], pieces + samples[place][1]
        if pieces >= tokens:
            found.append((log, pieces))
            log, pieces = 0.0, 0
    return found


def upper_bound(hits: int, trials: int) -> float:
    """Upper 95 % bound of a rate, one-sided (Clopper and Pearson, 1934)."""
    low, high = hits / trials, 1.0
    while high - low > 1e-6 and hits < trials:
        rate = (low + high) / 2
        at_most = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(hits + 1))
        low, high = (rate, high) if at_most > 0.05 else (low, rate)
    return high


def pairs(folder: Path | None) -> Iterator[tuple[str, Path, Path]]:
    """Name, author and reader of each pair with two tokenizers."""
    if folder is None:
        for author, reader in itertools.permutations(MIXED, 2):
            yield f"{author} → {reader}", BUILT_IN / author, BUILT_IN / reader
        return
    seeds: dict[str, dict[str, Path]] = {}
    for place in sorted(path.parent for path in folder.glob("*/start.json")):
        facts = json.loads((place / "start.json").read_text())
        words = json.loads((place / "tokenizer.json").read_text())["model"]["vocab"]
        kind = place.name.rsplit("-", 1)[0]
        if (kind == "tiny-numbers") == ("think" in words):  # a seed's third model has the first one's tokenizer
            seeds.setdefault(facts["seed"].split("/")[0], {})[kind] = place
    for seed, models in sorted(seeds.items()):
        for author, reader in itertools.permutations(("tiny-numbers", "tiny-bpe")):
            yield f"seed {seed}, {author} → {reader}", models[author], models[reader]


def report(authors: list[list[tuple[float, int]]], verdict: int) -> None:
    """Print a line for each s and δ: means of authors, and the verdicts on so many samples at a time (0: on all)."""
    print("s      δ     mean x over pairs (lowest, highest)   doubted, disproved of verdicts (upper 95 % bounds)")
    for power, lie in itertools.product(POWERS, LIES):
        means, doubted, disproved, verdicts = [], 0, 0, 0
        for samples in authors:
            logs = np.array([log + lie * pieces for log, pieces in samples])
            # 1 is far above every logarithm at which x reaches its bound, and exp of it does not overflow
            x = np.minimum(np.exp(np.minimum(power * logs, 1.0)), HONEST_CAP) - 1
            means.append(x.mean())
            size = verdict or len(x)
            for part in (x[start : start + size] for start in range(0, len(x) - size + 1, size)):
                error = math.sqrt(float(np.square(part).sum())) / len(part)
                doubted += bool(part.mean() > max(TOLERANCE, DOUBTED * error))
                disproved += bool(part.mean() > max(TOLERANCE, DISPROVED * error))
                verdicts += 1
        spread = f"{np.mean(means):+.3f} ({min(means):+.3f}, {max(means):+.3f})"
        bounds = f"{upper_bound(doubted, verdicts):.1%}, {upper_bound(disproved, verdicts):.1%}"
        print(f"{power:<6} {lie:<5} {spread:<36} {doubted}, {disproved} of {verdicts} ({bounds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--verdict", type=int, default=0)
    asked = parser.parse_args()
    authors = []
    for name, author, reader in pairs(asked.models):
        samples = log_weights(opened(author), opened(reader), asked.groups)
        long = joined(samples, asked.tokens) if asked.tokens else samples
        pieces = [count for _, count in long]
        print(f"{name}: {len(samples)} completions, {len(long)} samples of {min(pieces)} to {max(pieces)}", flush=True)
        authors.append(long)
    report(authors, asked.verdict)


if __name__ == "__main__":
    main()
