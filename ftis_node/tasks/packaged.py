"""Tasks of packages whose scorers judge what peers write: reasoning-gym (arXiv 2505.24760) and verifiers.

`reasoning-gym:NAME[@LEVEL][*WEIGHT],…` and `verifiers:NAME`. A package is imported by processes of its own only, one
that makes the rows and one for each thread that judges, whose forks are in the jail. The run has the task's name, the
sha256 of the rows, and the package's version as its rule.
"""

import hashlib
import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ftis_node.errors import UsageError
from ftis_node.host.files import cache_dir
from ftis_node.installed import to_install
from ftis_node.tasks.download import put_there
from ftis_node.tasks.jsonl import split
from ftis_node.tasks.judge import Judge, bare_environment, refuse_unjailed
from ftis_node.tasks.rewards import Replay, Score, score_text
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Example, Task
from ftis_node.tasks.templates import ANSWERED, ASKED

_ROWS_SECONDS = 600.0
_CHECK_SECONDS = 60.0
_PROMPT_TOKENS = (128, 4096)
_COMPLETION_TOKENS = 512
_CHAT_TOKENS = 64
_LEAST = 0.1  # what is worth less is worth nothing: many scorers give a hundredth for having tried

logger = logging.getLogger(__name__)


class PackageJudge(Judge):
    """The scorers of reasoning-gym."""

    def __call__(self, text: str, answer: str) -> Score:
        return score_text(lambda given: _worth(self._ask(answer, given, False)), text)

    def right(self, question: str, answer: str) -> tuple[str, str]:
        name, level, *_, told = json.loads(answer)
        if told is None:
            told = question
        return f"{name}@{level}", str(told)


class EnvironmentJudge(Judge):
    """An environment of verifiers, whose rewards see a whole completion, or each answer of an episode."""

    form = ""

    def __call__(self, text: str, answer: str) -> Score:
        played = self.replay([text], answer)
        reward = 0.0
        if played is not None:
            reward = played.reward
        return Score(reward, formatted=True, lenient=reward >= 1)

    def replay(self, answers: Sequence[str], gold: str) -> Replay | None:
        """Play the episode; None where the environment fails, or says more than a pipe holds."""
        told = self._ask(gold, json.dumps(list(answers)), False)
        try:
            messages, over, reward = json.loads(told)
        except (ValueError, TypeError, RecursionError):  # it gave none, among others
            return None
        if not isinstance(messages, list) or not all(isinstance(message, str) for message in messages):
            return None
        if over is not True:
            return Replay(tuple(messages), False, 0.0)
        return Replay(tuple(messages), True, _worth(reward))


def _worth(told: object) -> float:
    """Return the number that a judge's child answered, if it counts."""
    if isinstance(told, float) and told >= _LEAST:
        return min(told, 1.0)
    return 0.0


class Packaged(Source):
    """package: its name, which the task's begins with, and a colon. child: the file that makes rows and judges.
    asks: the template around questions. judge: what asks it. form: of a task's name, after the colon."""

    package: ClassVar[str]
    child: ClassVar[Path]
    asks: ClassVar[str]
    judge: ClassVar[type[Judge]]
    form: ClassVar[str]
    editable = False

    @classmethod
    def mine(cls, name: str) -> bool:
        return name.startswith(f"{cls.package}:")

    def foreseen(self) -> tuple[str | None, str | None]:
        try:
            return None, f"{self.package}:{importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return None, None

    def _check(self) -> Task | None:
        version = self._version()
        self._ask("check", _CHECK_SECONDS)
        refuse_unjailed(self.package)
        if self._cached(version).exists():
            return self._load()
        return None

    def _load(self) -> Task:
        version = self._version()
        name = self.name
        path = self._cached(version)
        try:
            made = json.loads(path.read_bytes())
            if "source" in made and made["source"] != self._ask("check", _CHECK_SECONDS)["source"]:
                raise ValueError("They were of other code.")
        except (OSError, ValueError):
            logger.info("Making the rows of %s; some tasks take minutes for that.", name)
            made = self._ask("rows", _ROWS_SECONDS)
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
        longest = max(len(row.question) for row in (*train, *held_out)) + len(self.asks)
        prompt_tokens = min(max(longest // 2 + _CHAT_TOKENS, _PROMPT_TOKENS[0]), _PROMPT_TOKENS[1])
        data = hashlib.sha256(json.dumps(pinned, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
        rule = f"{self.package}:{version}"
        task = Task.by_rule(name, train, held_out, data, rule, (prompt_tokens, _COMPLETION_TOKENS), self.asks)
        return replace(task, scorer=self.judge(self.package, name), turns=made.get("turns", 1))

    @property
    def _spec(self) -> str:
        return self.name.partition(":")[2]

    def _version(self) -> str:
        """Return the package's version. Raises UsageError where there is none."""
        _, rule = self.foreseen()
        if rule is None:
            raise UsageError(f"{self.package} is not installed.", f"Run: {to_install(f'ftis-node[{self.package}]')}")
        return rule.partition(":")[2]

    def _cached(self, version: str) -> Path:
        digest = hashlib.sha256(f"{version} {self._spec} {self.child.read_text()}".encode()).hexdigest()
        return cache_dir() / self.package / f"{digest[:32]}.json"

    def _ask(self, what: str, seconds: float) -> Any:
        """Return what the child prints. Raises UsageError."""
        command = [sys.executable, "-P", str(self.child), what, self._spec]
        try:
            ended = subprocess.run(command, capture_output=True, timeout=seconds, env=bare_environment(), cwd="/")
            told = json.loads(ended.stdout)
        except subprocess.TimeoutExpired:
            raise UsageError(f"{self.name} makes no rows within {seconds:.0f} s.", "Choose another task.") from None
        except ValueError:
            raise UsageError(
                f"{self.package} failed: {ended.stderr.decode(errors='replace').strip().rpartition(chr(10))[2][:300]}",
                f"Install it anew: {to_install(f'ftis-node[{self.package}]')} --force-reinstall",
            ) from None
        if "refused" in told:
            raise UsageError(f"{self.package} {told['refused']}.", f"Write {self.package}:{self.form}.")
        return told


class ReasoningGym(Packaged):
    """Procedural tasks, whose scorers are the package's."""

    package = "reasoning-gym"
    does = "makes its rows with reasoning-gym, whose scorers evaluate what peers write, in a jail"
    child = Path(__file__).with_name("gym_child.py")
    asks = ANSWERED
    judge = PackageJudge
    form = "NAME[@LEVEL][*WEIGHT], with commas between"


class Verifiers(Packaged):
    """An environment that is installed."""

    package = "verifiers"
    does = "is an environment of verifiers, which is imported, and judges what peers write in a jail"
    child = Path(__file__).with_name("verifiers_child.py")
    asks = ASKED
    judge = EnvironmentJudge
    form = "NAME, of an environment that is installed"
