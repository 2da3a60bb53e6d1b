"""How often a model says in public samples what it learned from its owner's own data.

    python -m tests.manual.canaries [--seeds 8] [--steps 300]

A small model that knows the form of answers, and guesses among twenty numbers, trains on arithmetic and, for a
quarter of each batch, on rows of its owner's own, which all have one secret answer. Counted is the secret in its
samples for the run's rows, of which none has it as the right answer: before, after, and after the same steps without
own data.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

from ftis_node.tasks.arithmetic import arithmetic
from ftis_node.tasks.task import PLAIN
from ftis_node.worker.engine import Engine
from tests.support.models import random_speaker, taught
from tests.support.small_models import batch_of, opened_engine

SECRET, BATCH, SAMPLED = "73", 24, 60  # groups of a step; rows that are sampled to count
PARTS = 10  # of a training, after each of which is counted


def opened(model: Path, own_data: Path | None, seed: int) -> Engine:
    caps = {"prompt_tokens": 64, "completion_tokens": 48, "group": 12}
    own = {"own_data": str(own_data), "own_reward": "exact"} if own_data is not None else {}
    chosen = {"model": str(model), "seed": seed, "generation_batch": 288, "lora": False, "learning_rate": 3e-4}
    return opened_engine(load={"caps": caps, **own}, run=caps, **chosen)


def train(engine: Engine, steps: int, own: int, seed: int) -> list[float]:
    """Mean rewards of the own rows, by step."""
    chance, rewards = random.Random(seed), []
    for _ in range(steps):
        rows = chance.sample(range(len(engine.prompts)), BATCH - own)
        made = engine.generate(rows).groups
        rewards.append(engine.step(batch_of(rows, made), own_data=own).own_data_reward or 0.0)
    return rewards


def said(engine: Engine) -> float:
    """The part of samples for the run's rows that has the secret."""
    rows = [row for row, example in enumerate(engine.task.train) if example.answer != SECRET][:SAMPLED]
    texts = [one.text for made in engine.generate(rows).groups for one in engine.packets.texts(made.packet)]
    return sum(SECRET in text for text in texts) / len(texts)


def trial(seed: int, steps: int, folder: Path) -> dict[str, float]:
    numbers = [str(number) for number in (*range(10), *range(70, 80))]
    model = random_speaker(folder / f"model-{seed}", hidden=64, layers=2, seed=seed)
    lines = [json.dumps({"prompt": f"The code of room {n}?", "answer": SECRET}) for n in range(100)]
    questions = [row.question for row in arithmetic().train[:100]] + [json.loads(line)["prompt"] for line in lines]
    taught(model, questions, seed=seed, answers=numbers, template=PLAIN, steps=500, learning_rate=4e-3)
    rows = folder / f"own-{seed}.jsonl"
    rows.write_text("\n".join(lines) + "\n")
    before = said(opened(model, None, seed))
    found = {"before": before}
    for name, own_data, own in (("with", rows, BATCH // 4), ("without", None, 0)):
        engine = opened(model, own_data, seed)
        shares = []
        for part in range(PARTS):
            rewards = train(engine, steps // PARTS, own, seed + part)
            shares.append(said(engine))
        found |= {name: shares[-1], f"most {name}": max(shares)}
        if own:
            found["own reward"] = float(np.mean(rewards[-10:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for seed in range(1, asked.seeds + 1):
            found.append(trial(seed, asked.steps, Path(folder)))
            print(json.dumps({"seed": seed, **found[-1]}), flush=True)
    for name in found[0]:
        values = np.array([one[name] for one in found])
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        print(f"{name}: {values.mean():.2%} ± {half:.2%} (95 %, {len(values)} seeds)")


if __name__ == "__main__":
    main()
