"""What the claims test between tokenizers sees: honest claims, and claims that are too low, by the power s of W.

    python -m tests.manual.claims --models DIR [--groups 24]

DIR holds the warm-ups of `ftis-node lab run tokenizers` (its `models`). Each model writes groups, and a model with
another tokenizer reads them, in both directions. A liar lowers the claim of each of its tokens by δ nats. A sample has
x = min(W^s, 2) − 1; an author is disproved when its mean is above 0.02 and three standard errors. Expected before the
first run: no honest pair is disproved at any s; δ = 0.2 is disproved at every s up to 1; s = 1/2 sees δ = 0.1. Of these
only the first came out: docs/security.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from ftis_node.config.settings import collect
from ftis_node.objective.diagnostics import HONEST_CAP
from ftis_node.packet import TextPacket, decode
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.swarm.claims import DISPROVED, TOLERANCE
from ftis_node.worker.engine import Engine
from tests.support.small_models import arithmetic_run

POWERS, LIES = (1.0, 0.5, 0.25, 0.125), (0.0, 0.05, 0.1, 0.2)
AUTHOR = bytes(38)


def opened(model: Path) -> Engine:
    engine = Engine()
    settings = collect(task="arithmetic", flags={"device": "cpu", "model": str(model)}, environment={})[0]
    engine.open(arithmetic_run(engine.load(settings, "arithmetic"), any_tokenizer=True, group=12))
    return engine


def log_weights(author: Engine, reader: Engine, groups: int) -> list[tuple[float, int]]:
    """(log W, pieces) of each sample of the author that the reader reads in chunks."""
    rows = list(range(groups))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=24)
    asked = parser.parse_args()
    seeds: dict[str, dict[str, Path]] = {}
    for folder in sorted(path.parent for path in asked.models.glob("*/start.json")):
        facts = json.loads((folder / "start.json").read_text())
        words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        kind = folder.name.rsplit("-", 1)[0]
        if (kind == "tiny-numbers") == ("think" in words):  # a seed's third model has the first one's tokenizer
            seeds.setdefault(facts["seed"].split("/")[0], {})[kind] = folder
    weights = []
    for seed, models in sorted(seeds.items()):
        a, b = opened(models["tiny-numbers"]), opened(models["tiny-bpe"])
        weights.append(log_weights(a, b, asked.groups))
        weights.append(log_weights(b, a, asked.groups))
        print(f"seed {seed}: {len(weights[-2])} and {len(weights[-1])} samples", flush=True)
    print("s      δ     mean x over pairs (lowest, highest)   pairs disproved")
    for power in POWERS:
        for lie in LIES:
            means, disproved = [], 0
            for pair in weights:
                logs = np.array([log + lie * pieces for log, pieces in pair])
                x = np.minimum(np.exp(power * logs), HONEST_CAP) - 1
                means.append(x.mean())
                error = math.sqrt(float(np.square(x).sum())) / len(x)
                disproved += bool(x.mean() > max(TOLERANCE, DISPROVED * error))
            spread = f"{np.mean(means):+.3f} ({min(means):+.3f}, {max(means):+.3f})"
            print(f"{power:<6} {lie:<5} {spread:<36} {disproved} of {len(weights)}")


if __name__ == "__main__":
    main()
