"""Tasks of packages whose scorers judge what peers write: reasoning-gym (arXiv 2505.24760) and verifiers.

`reasoning-gym:NAME[@LEVEL][*WEIGHT],…` and `verifiers:NAME`. A package is imported by processes of its own only, one
that makes the rows and one for each thread that judges, whose forks are in the jail. The run has the task's name, the
sha256 of the rows, and the package's version as its rule.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.tasks.download import cache_dir, put_there
from ftis_node.tasks.jsonl import split
from ftis_node.tasks.judge import Judge, bare_environment, refuse_unjailed
from ftis_node.tasks.rewards import Replay, Score, score_text
from ftis_node.tasks.task import ANSWERED, ASKED, Example, Task, TextCaps

_ROWS_SECONDS, _CHECK_SECONDS = 600.0, 60.0
_PROMPT_TOKENS, _COMPLETION_TOKENS = (128, 4096), 512
_CHAT_TOKENS = 64
_LEAST = 0.1  # what is worth less is worth nothing: many scorers give a hundredth for having tried

logger = logging.getLogger(__name__)


class PackageJudge(Judge):
    """The scorers of reasoning-gym."""

    def __call__(self, text: str, answer: str) -> Score:
        return score_text(lambda given: _worth(self._ask(answer, given, False)), text)

    def right(self, question: str, answer: str) -> tuple[str, str]:
        name, level, *_, told = json.loads(answer)
        return f"{name}@{level}", question if told is None else str(told)


class EnvironmentJudge(Judge):
    """An environment of verifiers, whose rewards see a whole completion, or each answer of an episode."""

    tagged = False

    def __call__(self, text: str, answer: str) -> Score:
        played = self.replay([text], answer)
        reward = played.reward if played is not None else 0.0
        return Score(reward, formatted=True, lenient=reward >= 1)

    def replay(self, answers: Sequence[str], gold: str) -> Replay | None:
        """Play the episode; None where the environment fails, or says more than a pipe holds."""
        told = self._ask(gold, json.dumps(list(answers)), False)
        try:
            messages, over, reward = json.loads(told) if isinstance(told, str) else (None, None, None)
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(messages, list) or not all(isinstance(message, str) for message in messages):
            return None
        return Replay(tuple(messages), over is True, _worth(reward) if over is True else 0.0)


def _worth(told: object) -> float:
    """What a judge's child told, if it is a number that counts."""
    worth = min(told, 1.0) if isinstance(told, float) else 0.0
    return worth if worth >= _LEAST else 0.0


@dataclass(frozen=True)
class Package:
    """child: the file that makes rows and judges. template: for the questions. judge: what asks it. form: of a task's
    name, after the colon."""

    name: str
    child: Path
    template: str
    judge: type[Judge]
    form: str


_HERE = Path(__file__).parent
PACKAGES: Mapping[str, Package] = {
    "reasoning-gym": Package(
        "reasoning-gym",
        _HERE / "gym_child.py",
        ANSWERED,
        PackageJudge,
        form="NAME[@LEVEL][*WEIGHT], with commas between",
    ),
    "verifiers": Package(
        "verifiers",
        _HERE / "verifiers_child.py",
        ASKED,
        EnvironmentJudge,
        form="NAME, of an environment that is installed",
    ),
}


def package_of(name: str) -> Package | None:
    """The package that a task's name begins with, a colon after it."""
    package, colon, _ = name.partition(":")
    return PACKAGES.get(package) if colon else None


def load_packaged(name: str) -> Task:
    """The task of that name, from the cache or made anew.

    Raises:
        UsageError: the package is not installed, has no such task, or one that cannot be trained on.
    """
    package, spec, version = _parts(name)
    path = _cached(package, spec, version)
    try:
        made = json.loads(path.read_bytes())
    except (OSError, ValueError):
        logger.info("Making the rows of %s; some tasks take minutes for that.", name)
        made = _ask(package, "rows", spec, _ROWS_SECONDS)
        put_there(path, json.dumps(made).encode())
    train = tuple(Example(*row) for row in made["train"])
    if "held_out" in made:
        asked = {row.question for row in train}
        held_out = tuple(row for row in (Example(*row) for row in made["held_out"]) if row.question not in asked)
    else:
        train, held_out = split(name, train)
    if not held_out:
        raise UsageError(f"The task {name} has no questions beside those to train on.", "Add another of its tasks.")
    pinned = [made.get("source", ""), [[row.question, row.answer] for row in train]]
    longest = max(len(row.question) for row in (*train, *held_out)) + len(package.template)
    prompt_tokens = min(max(longest // 2 + _CHAT_TOKENS, _PROMPT_TOKENS[0]), _PROMPT_TOKENS[1])
    return Task(
        name=name,
        train=train,
        held_out=held_out,
        data=hashlib.sha256(json.dumps(pinned, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest(),
        template=package.template,
        reward=f"{package.name}:{version}",
        completion_tokens=_COMPLETION_TOKENS,
        prompt_tokens=prompt_tokens,
        text=TextCaps.beside(prompt_tokens, _COMPLETION_TOKENS),
        scorer=package.judge(package.name, name),
        turns=made.get("turns", 1),
    )


def check_packaged(name: str) -> Task | None:
    """Refuse what `load_packaged` would, within seconds; the task, if its rows are in the cache."""
    package, spec, version = _parts(name)
    _ask(package, "check", spec, _CHECK_SECONDS)
    refuse_unjailed(package.name)
    return load_packaged(name) if _cached(package, spec, version).exists() else None


def rule_of(package: Package) -> str | None:
    """The rule of these tasks here; None where the package is not installed."""
    try:
        return f"{package.name}:{importlib.metadata.version(package.name)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(name: str) -> tuple[Package, str, str]:
    """The package, the name in it, and its version. Raises UsageError."""
    head, _, spec = name.partition(":")
    package = PACKAGES[head]
    if (rule := rule_of(package)) is None:
        raise UsageError(
            f"The task is of {package.name}, which is not installed.", f"Run: pip install 'ftis-node[{package.name}]'"
        )
    return package, spec, rule.partition(":")[2]


def _cached(package: Package, spec: str, version: str) -> Path:
    digest = hashlib.sha256(f"{version} {spec} {package.child.read_text()}".encode()).hexdigest()
    return cache_dir() / package.name / f"{digest[:32]}.json"


def _ask(package: Package, what: str, spec: str, seconds: float) -> Any:
    """What the child prints. Raises UsageError."""
    command = [sys.executable, "-P", str(package.child), what, spec]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=seconds, env=bare_environment(), cwd="/")
        told = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"The rows of {package.name}:{spec} are not made within {seconds:.0f} s.", "Choose another task."
        ) from None
    except ValueError:
        raise UsageError(
            f"{package.name} failed: {ended.stderr.decode(errors='replace').strip().rpartition(chr(10))[2][:300]}",
            f"Install it anew: pip install --force-reinstall 'ftis-node[{package.name}]'",
        ) from None
    if "refused" in told:
        raise UsageError(f"{package.name} {told['refused']}.", f"Write {package.name}:{package.form}.")
    return told
