"""How often the filter drops another's samples when they are read in chunks, beside the same samples read in tokens.

    python -m tests.manual.vetoes --models DIR [--groups 24]

DIR holds the warm-ups of `ftis-node lab run tokenizer-pairs` (its `models`): for each seed A writes groups, and the two
twins of one teacher read them, L with another tokenizer and M with A's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.worker.engine import Engine
from tests.manual.claims import AUTHOR, opened


def divergences(author: Engine, reader: Engine, groups: int) -> list[tuple[float, float]]:
    """(mean of k3_reverse, sum of k1) over the chunks of each sample of the author."""
    found = []
    for row, made in zip(range(groups), author.generate(list(range(groups)), AUTHOR).groups, strict=True):
        read = [one for one in reader.packets.completions(made.packet, own=False) if one is not None]
        with torch.no_grad():
            prompt = Prefixed(reader.prompts[row], [one.token_ids for one in read])
            start = completion_logprobs(reader.policy, [prompt], reader.run.temperature)[0].numpy()
        for one, own in zip(read, np.split(start, np.cumsum([len(one) for one in read])[:-1]), strict=True):
            ours = own if one.chunks is None else np.bincount(one.chunks, weights=own, minlength=len(one.logprobs))
            gap = np.clip(ours - one.logprobs, -20, 20)
            found.append((float(np.mean(np.exp(-gap) - 1 + gap)), float(-gap.sum())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=24)
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"chunks": [], "tokens": []}
    models = {(json.loads(path.read_text())["seed"], path.parent) for path in asked.models.glob("*/start.json")}
    for seed, folder in sorted(models):
        if seed.endswith("/A"):
            for twin in sorted(place for known, place in models if known == seed.replace("/A", "/L")):
                same = (twin / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
                found["tokens" if same else "chunks"] += divergences(opened(folder), opened(twin), asked.groups)
    for kind, samples in found.items():
        far, apart = np.array(samples).T
        shares = f"k3_reverse ≥ 50: {np.mean(far >= 50):.2%}, sum of k1 ≥ 1: {np.mean(apart >= 1):.2%}"
        print(f"{kind}: {len(samples)} samples; {shares}; k3_reverse's median {np.median(far):.3f}")


if __name__ == "__main__":
    main()
