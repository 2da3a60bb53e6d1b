"""Two small models, warmed up, whose daemons learn from each other on a task."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ftis_node.observe.metrics import read_events
from ftis_node.tasks import Task
from tests.support.daemons import Daemon, Join, run_cli
from tests.support.models import random_speaker, taught

STEPS = 60


def pair(
    path: Path, task: Task, answers: Sequence[str], later: Sequence[str] = (), widths: tuple[int, int] = (48, 64)
) -> list[Path]:
    """Two models that are asked in a chat, know the format, and guess; also after these later messages."""
    questions = [row.question for row in task.train]
    made = []
    for seed, name in enumerate(("small", "large"), start=1):
        model = random_speaker(path / name, hidden=widths[seed - 1], layers=2, seed=seed)
        shown = {
            "answers": answers,
            "template": task.template,
            "later": later,
            "steps": 500,
            "learning_rate": 4e-3,
        }
        made.append(taught(model, questions, seed=seed, **shown))
    return made


def learn(
    path: Path, join: Join, models: list[Path], *flags: str, one_tokenizer: bool = False, completion_tokens: int = 64
):
    """Both daemons' mean reward comes to rise by a half, from the first ten steps to the last third.

    Each trained on the other's groups.
    """
    run_file = path / "run.toml"
    kind = ("--model", str(models[0])) if one_tokenizer else ("--any-tokenizer",)
    cap = ("--completion-tokens", str(completion_tokens))
    made = run_cli("run", "new", *kind, *flags, *cap, "-o", str(run_file), "--json")
    assert made.returncode == 0, made.stderr
    settings = ("batch_groups=8", "learning_rate=1e-3", "eval_prompts=20", "eval_every=1000")
    common = (*flags, "--full", *(word for setting in settings for word in ("--set", setting)))
    first = join("first", "--model", str(models[0]), "--run", str(run_file), *common)
    second = join("second", "--model", str(models[1]), "--peers", first.address(), *common)
    for daemon in (first, second):
        daemon.wait(partial(_learned, daemon), "it learned, also from the other's groups")
        assert daemon.status()["run"] == json.loads(made.stdout)["id"]
        assert daemon.status()["refused_packets"] == {}
    for daemon in (first, second):
        assert daemon.stop() == 0


def _learned(daemon: Daemon, status: dict[str, Any]) -> bool:
    if status.get("step", 0) < STEPS:
        return False
    steps = read_events(daemon.home.metrics, "step")
    rewards = [step["own_reward"] for step in steps if step["own_reward"] is not None]
    before, after = (sum(part) / max(len(part), 1) for part in (rewards[:10], rewards[-len(rewards) // 3 :]))
    return sum(step["foreign_groups"] for step in steps) >= STEPS and after > 1.5 * before
