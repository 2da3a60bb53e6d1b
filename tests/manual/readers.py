"""What one real model's groups look like to another: `make readers ARGS="MODEL MODEL …"`, folders.

Each model samples groups on the same rows of the public task of `lab/owners.py`. Every model reads all of them as a
node does before a step: ρ of each token, what truncation would cut and the filter drop, by every divergence. Nothing is
trained. With `--any-tokenizer` they read each other's text. One model is in memory at a time. What was found lies in
build/readers and is not made again.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftis_node.config.run import run_for
from ftis_node.config.settings import collect
from ftis_node.learner import TrainingGroup
from ftis_node.objective import Diagnostics
from ftis_node.objective.divergence import ESTIMATORS
from ftis_node.packet import Completion
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.swarm.claims import Claims
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import GroupPart, StepGroup
from tests.support.objective_batches import add, termed

OUT = Path("build/readers")
TASK = "ftis_node.lab.owners:public"
CAPS = {"group": 8, "prompt_tokens": 256, "completion_tokens": 96}
PLACES = (4, 8, 16, 32)  # of a token in its completion: |d| is told up to each of these, and beyond
PEER = "peer"

Readings = dict[tuple[str, str], dict[str, Any]]  # by reader and author


def opened(model: str, any_tokenizer: bool, task: str = TASK, **others: Any) -> Engine:
    """An engine of a model, in the run that all models share. others: fields of `messages.Load`."""
    flags = {
        "model": model,
        "device": "cpu",
        "vram_gb": 8.0,
        "objective": "ftis",
        "lora": True,
    }
    settings, _ = collect(task="", flags=flags, environment={})
    engine = Engine()
    facts = engine.load(settings, task, caps=CAPS, code=True, **others)
    engine.open(run_for(facts.shared() | CAPS, any_tokenizer=any_tokenizer, group=CAPS["group"]))
    return engine


def sample(model: str, rows: int, any_tokenizer: bool) -> dict[str, Any]:
    """The groups that a model samples on the first rows: packets in hexadecimal, and their rewards."""
    with closing(opened(model, any_tokenizer)) as engine:
        made = engine.generate(range(rows), seeds=range(1, rows + 1))
    return {"groups": [{"packet": one.packet.hex(), "rewards": one.rewards} for one in made.groups]}


def read(model: str, given: dict[str, Any], any_tokenizer: bool) -> dict[str, Any]:
    """What a model makes of sampled groups.

    Returns:
        `log_ratio`, d of each token (of text: of its chunk); `place`, the token's in its completion; a row a sample of
        `reward`, `likelihood` (mean log-prob, nats) and each divergence, mean over tokens; `unreadable`, samples; and
        `figures`, what a step's diagnostics would say of the peer.
    """
    found = {"log_ratio": [], "place": [], "samples": [], "unreadable": 0}
    diagnostics = Diagnostics()
    with closing(opened(model, any_tokenizer)) as engine:
        groups = [
            StepGroup(row, [GroupPart(PEER, bytes.fromhex(one["packet"]), one["rewards"])])
            for row, one in enumerate(given["groups"])
        ]
        for group in engine.training_groups(groups):
            add_group(engine, group, found, diagnostics)
    found["figures"] = diagnostics.summary().sources[PEER]
    return found


def add_group(engine: Engine, group: TrainingGroup, found: dict[str, Any], diagnostics: Diagnostics):
    """Add a group's tokens and samples to what was found, and to the figures, all of them as evidence."""
    objective = engine.learner.objective
    part = group.parts[0]
    pairs = [(one, reward) for one, reward in zip(part.completions, part.rewards, strict=True) if one is not None]
    found["unreadable"] += len(part.completions) - len(pairs)
    if not pairs:
        return
    completions = [completion for completion, _ in pairs]
    rewards = torch.tensor([reward for _, reward in pairs], dtype=torch.float64)
    lengths = torch.tensor([one.sampled for one in completions])
    prefixed = Prefixed(group.prompt_ids, [one.token_ids for one in completions], [one.given for one in completions])
    with torch.no_grad():
        logprobs, entropy = completion_logprobs(engine.policy, [prefixed], engine.run.temperature)
    chunks = chunks_of(completions)
    advantages = objective.advantages(rewards).float()
    given = {
        "trainer_logprobs": logprobs,
        "start_logprobs": logprobs,
        "sampler_logprobs": torch.from_numpy(np.concatenate([one.logprobs for one in completions])),
        "lengths": lengths,
        "advantages": advantages,
        "ended": torch.tensor([one.finished for one in completions]),
        "own": torch.zeros(len(completions), dtype=torch.bool),
        "chunks": chunks,
    }
    terms = termed(objective, **given)
    chunked = torch.full((len(completions),), chunks is not None)
    add(diagnostics, terms, given, [PEER] * len(completions), entropy=entropy, chunked=chunked)
    found["log_ratio"] += [round(value, 5) for value in terms.log_ratio.tolist()]
    found["place"] += [place for length in lengths.tolist() for place in range(length)]
    by_name = {name: termed(objective.replace(divergence=name), **given).divergence for name in ESTIMATORS}
    for number, reward in enumerate(rewards.tolist()):
        row = {"reward": reward, "likelihood": float(terms.likelihood[number])}
        row |= {name: float(values[number]) for name, values in by_name.items()}
        found["samples"].append(row)


def chunks_of(completions: Sequence[Completion]) -> torch.Tensor | None:
    """The chunk of each token, counted through all completions; None where each token is one."""
    if all(one.chunks is None for one in completions):
        return None
    pieces = []
    begin = 0
    for one in completions:
        chunks = one.chunks
        if chunks is None:
            chunks = np.arange(one.sampled)
        pieces.append(chunks + begin)
        begin += len(one.logprobs)
    return torch.from_numpy(np.concatenate(pieces))


# --- the table --------------------------------------------------------------------------------------------------------


def table(readings: Readings) -> Iterator[str]:
    """A line of Markdown for each reader and author, and three tables more."""
    heads = ("tokens", "ρ, 1, 50, 99 %", "ρ > 2", "D ≥ 1, 5, 50 of wrong", "mean &#124;d&#124;", "bets pay")
    yield f"| reader | author | {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for (reader, author), found in readings.items():
        log_ratio = np.array(found["log_ratio"])
        ratios = np.exp(log_ratio)
        quantiles = [f"{value:.3f}" for value in np.quantile(ratios, (0.01, 0.5, 0.99))]
        wrong = np.array([one["k3_reverse"] for one in found["samples"] if not one["reward"]])
        far = [f"{share(wrong >= bound):.2f}" for bound in (1.0, 5.0, 50.0)]
        claims = Claims()
        claims.add(found["figures"])
        cells = [
            reader,
            author,
            str(len(ratios)),
            ", ".join(quantiles),
            f"{share(ratios > 2):.4f}",
            ", ".join(far),
            f"{np.abs(log_ratio).mean():.3f}",
            f"{claims.paid:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from places(readings)
    yield ""
    yield from divergences(readings)
    yield ""
    yield from gates(readings)


def share(some: Any) -> float:
    """The share of what is true, 0 of nothing."""
    return float(np.mean(some)) if len(some) else 0.0


def places(readings: Readings) -> Iterator[str]:
    """Mean |d| by the token's place in its completion."""
    bounds = [0, *PLACES, 1 << 30]
    heads = [f"{low + 1} to {high}" for low, high in zip(bounds, PLACES, strict=False)]
    yield f"| reader | author | token {' | '.join(heads)} | beyond |"
    yield "|---" * (len(bounds) + 1) + "|"
    for (reader, author), found in readings.items():
        apart = np.abs(np.array(found["log_ratio"]))
        place = np.array(found["place"])
        cells = [f"{apart[(place >= low) & (place < high)].mean():.3f}" for low, high in pairwise(bounds)]
        yield f"| {reader} | {author} | {' | '.join(cells)} |"


def divergences(readings: Readings) -> Iterator[str]:
    """Each divergence's median and 99th percentile over samples, mean over their tokens."""
    yield f"| reader | author | {' | '.join(ESTIMATORS)} |"
    yield "|---" * (len(ESTIMATORS) + 2) + "|"
    for (reader, author), found in readings.items():
        cells = []
        for name in ESTIMATORS:
            values = [one[name] for one in found["samples"]]
            middle, high = np.quantile(values, (0.5, 0.99))
            cells.append(f"{middle:.3g}, {high:.3g}")
        yield f"| {reader} | {author} | {' | '.join(cells)} |"


def gates(readings: Readings) -> Iterator[str]:
    """The level of `gated`, the least mean log-prob of a reader's own right answers, and whose right ones pass it."""
    yield "| reader | author | level, nats a token | right answers | of them pass |"
    yield "|---|---|---|---|---|"
    for (reader, author), found in readings.items():
        own = [one["likelihood"] for one in readings[reader, reader]["samples"] if one["reward"]]
        right = [one["likelihood"] for one in found["samples"] if one["reward"]]
        level = min(own, default=0.0)
        passed = share([one >= level for one in right])
        yield f"| {reader} | {author} | {level:.3f} | {len(right)} of {len(found['samples'])} | {passed:.2f} |"


def kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was found before and lies in a file; if nothing does, it is found now and kept there."""
    if not file.exists():
        print(file.stem, file=sys.stderr, flush=True)
        file.write_text(json.dumps(make()))
        gc.collect()  # the model goes before the next one comes
    return json.loads(file.read_text())


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.manual.readers", description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--any-tokenizer", action="store_true")
    options = parser.parse_args()
    out = OUT / ("text" if options.any_tokenizer else "tokens")
    out.mkdir(parents=True, exist_ok=True)
    models = {Path(model).name: model for model in options.models}
    groups = {}
    for name, model in models.items():
        groups[name] = kept(out / f"{name}.json", partial(sample, model, options.rows, options.any_tokenizer))
    readings = {}
    for reader, model in models.items():
        for author, given in groups.items():
            file = out / f"{reader}.{author}.json"
            readings[reader, author] = kept(file, partial(read, model, given, options.any_tokenizer))
    lines = list(table(readings))
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
