"""Tasks of reasoning-gym (arXiv 2505.24760): rows that every node makes alike, and scorers in the jail.

`reasoning-gym:NAME[@LEVEL][*WEIGHT],…`. The run has this name, the sha256 of the rows, and the package's version as its
rule. The package is imported by processes of its own only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.host.quiet import QUIET
from ftis_node.tasks.download import cache_dir, put_there
from ftis_node.tasks.judge import KEPT, Judge, refuse_unjailed
from ftis_node.tasks.rewards import Score, score_text
from ftis_node.tasks.task import ANSWERED, Example, Task, TextCaps

GYM = "reasoning-gym:"
"""Prefix of the task's name, and of its rule, which the package's version follows."""

_CHILD = Path(__file__).with_name("gym_child.py")
_ROWS_SECONDS, _CHECK_SECONDS = 600.0, 60.0
_PROMPT_TOKENS, _COMPLETION_TOKENS = (128, 4096), 512
_CHAT_TOKENS = 64
_LEAST = 0.1  # what is worth less is worth nothing: many scorers give a hundredth for having tried

logger = logging.getLogger(__name__)


class GymJudge(Judge):
    """The scorers of one task's tasks. One thread at a time may use it."""

    def __call__(self, text: str, answer: str) -> Score:
        """What the package's scorer gives for the answer in a text; `answer` is the row's gold, see `gym_child`."""
        return score_text(lambda given: self._worth(answer, given), text)

    def _worth(self, gold: str, given: str) -> float:
        worth = self._ask(gold, given, False)
        return worth if isinstance(worth, float) and _LEAST <= worth <= 1 else 0.0


def load_gym(name: str) -> Task:
    """The task of that name, from the cache or made anew.

    Raises:
        UsageError: reasoning-gym is not installed, has no such task, or nothing can lock its scorers in.
    """
    spec, version = name.removeprefix(GYM), _version()
    path = _cached(spec, version)
    try:
        made = json.loads(path.read_bytes())
    except (OSError, ValueError):
        logger.info("Making the rows of %s, which some of its tasks take minutes for.", name)
        made = _ask("rows", spec, _ROWS_SECONDS)
        put_there(path, json.dumps(made).encode())
    train, held_out = (tuple(Example(*row) for row in made[part]) for part in ("train", "held_out"))
    asked = {row.question for row in train}
    held_out = tuple(row for row in held_out if row.question not in asked)
    if not held_out:
        raise UsageError(f"The task {name} has no questions beside those to train on.", "Add another of its tasks.")
    rows = json.dumps([[row.question, row.answer] for row in train], ensure_ascii=False, separators=(",", ":"))
    longest = max(len(row.question) for row in (*train, *held_out)) + len(ANSWERED)
    prompt_tokens = min(max(longest // 2 + _CHAT_TOKENS, _PROMPT_TOKENS[0]), _PROMPT_TOKENS[1])
    return Task(
        name=name,
        train=train,
        held_out=held_out,
        data=hashlib.sha256(rows.encode()).hexdigest(),
        template=ANSWERED,
        reward=f"{GYM}{version}",
        completion_tokens=_COMPLETION_TOKENS,
        prompt_tokens=prompt_tokens,
        text=TextCaps.beside(prompt_tokens, _COMPLETION_TOKENS),
        scorer=GymJudge("reasoning-gym"),
    )


def check_gym(name: str) -> Task | None:
    """Refuse what `load_gym` would, within seconds; the task, if its rows are in the cache."""
    spec, version = name.removeprefix(GYM), _version()
    _ask("check", spec, _CHECK_SECONDS)
    refuse_unjailed("reasoning-gym")
    return load_gym(name) if _cached(spec, version).exists() else None


def gym_rule() -> str | None:
    """The rule of these tasks here; None where the package is not installed."""
    try:
        return f"{GYM}{importlib.metadata.version('reasoning-gym')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _version() -> str:
    rule = gym_rule()
    if rule is None:
        raise UsageError(
            "The task is of reasoning-gym, which is not installed.", "Run: pip install 'ftis-node[reasoning-gym]'"
        )
    return rule.removeprefix(GYM)


def _cached(spec: str, version: str) -> Path:
    digest = hashlib.sha256(f"{version} {spec} {_CHILD.read_text()}".encode()).hexdigest()
    return cache_dir() / "reasoning-gym" / f"{digest[:32]}.json"


def _ask(what: str, spec: str, seconds: float) -> Any:
    """What the child prints, of this task's rows. Raises UsageError."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {"PYTHONHASHSEED": "0", **QUIET}
    try:
        ended = subprocess.run(
            [sys.executable, "-P", str(_CHILD), what, spec],
            capture_output=True,
            timeout=seconds,
            env=environment,
            cwd="/",
        )
        told = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"The rows of {GYM}{spec} are not made within {seconds:.0f} s.", "Choose another task, or a lower level."
        ) from None
    except ValueError:
        raise UsageError(
            f"reasoning-gym failed: {ended.stderr.decode(errors='replace').strip().rpartition(chr(10))[2][:300]}",
            "Install it anew: pip install --force-reinstall 'ftis-node[reasoning-gym]'",
        ) from None
    if "refused" in told:
        raise UsageError(f"reasoning-gym {told['refused']}.", f"Write {GYM}NAME[@LEVEL][*WEIGHT], with commas between.")
    return told
