"""Environments of verifiers (v1) in processes of their own: rows, and the rewards of single-turn tasks.

It imports nothing of this package: stdlib, verifiers and the environment only. As a script it prints the rows as JSON;
`judge_child` loads it to judge, each answer in a fork that is locked in by `jail`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROWS = 2000


class Refused(Exception):
    """Why an environment cannot be used."""


def tasks(name: str) -> list[Any]:
    """The first tasks of an installed environment. Raises Refused."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, taskset_class

    try:
        kind = taskset_class(name)
        taskset = kind((concrete_type(kind, TasksetConfig) or TasksetConfig)(id=name))
        environment = environment_class(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise Refused(f"has no taskset {name!r} that can be loaded: {error}") from error
    if environment is not SingleAgentEnv:
        raise Refused(f"needs several turns or agents for {name!r}; single-turn tasks only")
    if type(taskset).toolsets(taskset.config):
        raise Refused(f"needs tools for {name!r}; a receiver cannot reward what they did")
    found = list(itertools.islice(taskset, ROWS))
    if not found:
        raise Refused(f"has no tasks in {name!r}")
    for task in found[:1]:
        _refuse_kind(name, task)
    for task in found:
        if task.data.image or not _asked(task):
            raise Refused(f"needs a container, or a user who begins, for {name!r}")
    return found


def _refuse_kind(name: str, task: Any) -> None:
    rewards = task.hooks("reward")
    boxed = [hook.__name__ for hook in rewards if _needs_runtime(hook)]
    if type(task).NEEDS_CONTAINER or boxed:
        raise Refused(f"needs a container for {name!r}; rewards of the text alone can be given here")
    if type(task).toolsets(task.config):
        raise Refused(f"needs tools for {name!r}; a receiver cannot reward what they did")
    if task.config.judges:
        raise Refused(f"needs a model that judges for {name!r}")
    if not rewards:
        raise Refused(f"has no reward of a single trace in {name!r}")


def _needs_runtime(hook: Callable[..., Any]) -> bool:
    runtime = inspect.signature(hook).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _asked(task: Any) -> str:
    """What system and user say."""
    parts = (task.data.system_prompt or "", task.data.prompt_text)
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _source(name: str) -> str:
    """sha256 (hex) of the environment's own files."""
    from verifiers.v1.utils.loaders import import_taskset

    file = Path(str(import_taskset(name).__file__))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return hashlib.sha256(b"\0".join(hashlib.sha256(one.read_bytes()).digest() for one in files)).hexdigest()


def judge(jail: ModuleType, seconds: float, name: str) -> Callable[[str, str, bool], float]:
    """The function that says what a completion of a task is worth, from 0 to 1: 0 wherever its reward fails."""
    known = tasks(name)
    with suppress(Exception):
        _reward(known[0], "")  # what it imports at first use, before anybody is locked in

    def worth(gold: str, text: str, _: bool) -> float:
        index, digest = json.loads(gold)
        task = known[index]
        return float(jail.worth(lambda: _reward(task, text), seconds)) if task.hash == digest else 0.0

    return worth


def _reward(task: Any, text: str) -> float:
    """The weighted mean of the task's rewards for one answer."""
    from verifiers.v1.utils.decorators import invoke

    available = {"task": task.data, "trace": _trace(task, text)}
    total = weights = 0.0
    for hook in task.hooks("reward"):
        weight = float(getattr(hook, "_vf_weight", 1.0))
        given = _awaited(invoke(hook, available))
        total += weight * (sum(given.values()) if isinstance(given, dict) else float(given))
        weights += max(weight, 0.0)
    return total / max(weights, 1e-9)


def _trace(task: Any, text: str) -> Any:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    said = MessageNode(message=UserMessage(content=_asked(task)))
    answered = MessageNode(parent=0, message=AssistantMessage(content=text), sampled=True)
    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=AgentConfig()),
        nodes=[said, answered],
        is_completed=True,
        ok=True,
    )


def _awaited(given: Any) -> Any:
    """The result of a coroutine that waits for nothing: in the jail there is nothing to wait for."""
    if not inspect.iscoroutine(given):
        return given
    try:
        given.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits for something")


def _main(what: str, name: str) -> dict[str, object]:
    """`rows` of the environment, or `check` whether it can be used."""
    try:
        found = tasks(name)
    except Refused as error:
        return {"refused": str(error)}
    if what == "check":
        return {}
    rows = [(_asked(task), json.dumps([index, task.hash])) for index, task in enumerate(found)]
    return {"train": rows, "source": _source(name)}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # some environments print
        json.dump(_main(*sys.argv[1:]), answers)
