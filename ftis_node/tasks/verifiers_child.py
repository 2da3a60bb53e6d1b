"""Environments of verifiers (v1) in processes of their own: rows, what they say between answers, and their rewards.

It imports nothing of this package: stdlib, verifiers and the environment only. As a script it prints the rows as JSON;
`judge_child` loads it to judge. There each episode is played again, with the answers that it had, in a fork that is
locked in by `jail`. So an environment must be nothing but a function of its task and the answers: one agent, no tools,
no container, no model that judges.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROWS = 2000
TURNS = 4  # answers in an episode where the environment names no `max_turns`
TURNS_MAX = 16

_TRIED = 3  # tasks that are played before an environment is believed
_ANSWERS = ("", "1", "What next?", "A B C")
_NO_LOOP = "no running event loop"  # of asyncio, where something is to be waited for


class Refused(Exception):
    """Why an environment cannot be used."""


class _Waiting(BaseException):
    """The environment waits for an answer that is still to come. It must not catch this as a failure of its own."""


class _Elsewhere(Exception):
    """The environment waits for something else, or asks what no agent here can answer."""


@dataclass(frozen=True)
class Loaded:
    """An installed environment: its first tasks, and how many answers an episode of it may have."""

    environment: Any
    tasks: list[Any]
    turns: int


def load(name: str) -> Loaded:
    """The environment of that name. Raises Refused."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, taskset_class

    try:
        taskset_class(name)
        kind = environment_class(name)
        environment = kind((concrete_type(kind, EnvConfig, origin=Env) or EnvConfig)(taskset={"id": name}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise Refused(f"has no taskset {name!r} that can be loaded: {error}") from error
    agents = list(agent_config_fields(environment.config).values())
    if len(agents) != 1:
        raise Refused(f"needs several agents for {name!r}; a model plays alone here")
    if kind.start is not Env.start or kind.stop is not Env.stop:
        raise Refused(f"needs something running beside it for {name!r}; a receiver must play an episode again")
    single = kind is SingleAgentEnv
    turns = 1
    if not single:
        turns = min(agents[0].max_turns or TURNS, TURNS_MAX)
    taskset = environment.taskset
    if type(taskset).toolsets(taskset.config):
        raise Refused(f"needs tools for {name!r}; a receiver cannot reward what they did")
    found = list(itertools.islice(taskset, ROWS))
    if not found:
        raise Refused(f"has no tasks in {name!r}")
    _refuse_kind(name, found, single)
    loaded = Loaded(environment, found, turns)
    for task in found[:_TRIED]:
        _try(name, loaded, task)
    return loaded


def _refuse_kind(name: str, found: Sequence[Any], single: bool) -> None:
    from verifiers.v1.task import Task
    from verifiers.v1.utils.decorators import discover_decorated

    task = found[0]
    rewards = task.hooks("reward")
    boxed = [hook.__name__ for hook in rewards if _needs_runtime(hook)]
    prepares = any(getattr(type(task), hook) is not getattr(Task, hook) for hook in ("setup", "finalize"))
    images = any(one.data.image for one in found)  # of containers
    if type(task).NEEDS_CONTAINER or boxed or prepares or images:
        raise Refused(f"needs a container for {name!r}; rewards of the text alone can be given here")
    if type(task).toolsets(task.config):
        raise Refused(f"needs tools for {name!r}; a receiver cannot reward what they did")
    if task.config.judges:
        raise Refused(f"needs a model that judges for {name!r}")
    if discover_decorated(task, "intercept") or (task.hooks("stop") and not single):
        raise Refused(f"needs hooks on the model's requests for {name!r}; here it is asked and answers, no more")
    if single and not rewards:
        raise Refused(f"has no reward of a single trace in {name!r}")


def _needs_runtime(hook: Callable[..., Any]) -> bool:
    runtime = inspect.signature(hook).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _try(name: str, loaded: Loaded, task: Any) -> None:
    """Play a task with some answers, twice; raises Refused where it cannot be played, or comes out in two ways."""
    for count in range(loaded.turns + 1):
        answers = [_ANSWERS[place % len(_ANSWERS)] for place in range(count)]
        outcomes: list[object] = []
        for _ in range(2):
            try:
                episode = play(loaded, task, answers)
                outcomes.append((episode.messages, episode.over, episode.reward))
            except Exception as error:  # of a reward, that is a reward of 0: many fail where an answer is nonsense
                if isinstance(error, _Elsewhere) or str(error) == _NO_LOOP or not answers:
                    what = f"{type(error).__name__.strip('_')}: {error}"[:200]
                    raise Refused(f"cannot play {name!r} from its task and the answers alone ({what})") from error
                outcomes.append(type(error))
        if outcomes[0] != outcomes[1]:
            raise Refused(f"plays {name!r} in two ways with the same answers, so no receiver could reward one")
    if not play(loaded, task, []).question:
        raise Refused(f"asks nothing in {name!r}")


def _asked(task: Any, opening: str = "") -> str:
    """Return the messages of system and user before the first answer."""
    parts = (task.data.system_prompt or "", task.data.prompt_text, opening)
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _source(name: str) -> str:
    """sha256 (hex) of the environment's own files."""
    from verifiers.v1.utils.loaders import import_taskset

    file = Path(str(import_taskset(name).__file__))
    files = [file]
    if file.name == "__init__.py":
        files = sorted(file.parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(hashlib.sha256(one.read_bytes()).digest() for one in files)).hexdigest()


# --- an episode -------------------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """What an environment made of some answers.

    question: what is asked first. messages: what it said after each answer but the last. over: it wants no more
    answers. reward: from 0 to 1 once it is over.
    """

    question: str = ""
    messages: tuple[str, ...] = ()
    over: bool = False
    reward: float = 0.0


def play(loaded: Loaded, task: Any, answers: Sequence[str]) -> Episode:
    """Play a task with these answers. Whatever the environment raises is raised."""
    seat = _Seat(list(answers), loaded.turns)
    episode = Episode()
    with suppress(_Waiting):
        _awaited(_run(loaded.environment, task, seat))
        episode.over = not seat.answers  # more answers than it took: another episode
    if seat.exchange is None:
        raise _Elsewhere("it asks no agent")
    episode.question = seat.exchange.question
    episode.messages = tuple(seat.exchange.messages)
    if episode.over:
        rewards = [given for given in seat.exchange.trace.rewards.values() if given is not None]
        total = sum(given.score * given.weight for given in rewards)
        episode.reward = total / max(sum(max(given.weight, 0.0) for given in rewards), 1e-9)
    return episode


async def _run(environment: Any, task: Any, seat: _Seat) -> None:
    from verifiers.v1.env import Env
    from verifiers.v1.episode import EnvInfo
    from verifiers.v1.episode import Episode as Record

    agents = _Agents(seat)
    await environment.setup(agents)
    await environment.run(task, agents)
    if type(environment).finalize is not Env.finalize and seat.exchange is not None:
        trace = seat.exchange.trace
        record = Record(env=EnvInfo(id=environment.config.env_id), task=trace.task, traces=[trace])
        await environment.finalize(task, record)


class _Agents:
    """Whatever its name, the one agent there is."""

    def __init__(self, seat: _Seat) -> None:
        self._seat = seat

    def __getattr__(self, name: str) -> _Seat:
        return self._seat


class _Seat:
    """Stands where an environment expects its agent, and gives the answers that are already there."""

    def __init__(self, answers: list[str], turns: int) -> None:
        self.answers = answers
        self.turns = turns
        self.trainable = True
        self.exchange: _Exchange | None = None

    def interaction(self, task: Any, **_: Any) -> _Exchange:
        if self.exchange is not None:
            raise _Elsewhere("it begins a second conversation")
        self.exchange = _Exchange(self, task)
        return self.exchange

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace


class _Exchange:
    """Stands for `verifiers.v1.agent.Interaction`."""

    def __init__(self, seat: _Seat, task: Any) -> None:
        self._seat = seat
        self._task = task
        self._begun = False
        self._over = False
        self.trace = _trace(task)
        self.question = ""
        self.messages: list[str] = []

    async def __aenter__(self) -> _Exchange:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.close()

    async def turn(self, message: Any = None) -> Any:
        """The next answer to a message, which the first of a task with a prompt does not have."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage

        prompted = not self._begun and self._task.data.prompt is not None
        if self._over or self.trace.is_completed or (message is None) != prompted:
            raise _Elsewhere("it asks out of turn")
        if self.trace.num_turns == self._seat.turns:
            self._over = True
            return Segment(messages=[], terminated=True)
        said = ""
        if message is not None:
            said = _text(message)
        if self._begun:
            self.messages.append(said)
        else:
            said = _asked(self._task, said)
            self.question = said
        self._begun = True
        _put(self.trace, said, sampled=False)
        if not self._seat.answers:
            raise _Waiting
        answer = self._seat.answers.pop(0)
        _put(self.trace, answer, sampled=True)
        return Segment(messages=[AssistantMessage(content=answer)])

    async def close(self) -> Any:
        """Give the task's own rewards, once."""
        from verifiers.v1.utils.decorators import invoke

        if not self.trace.is_completed:
            self.trace.stop("user_closed")
            self.trace.ok = True
            available = {"task": self._task.data, "trace": self.trace}
            for hook in self._task.hooks("reward"):
                given = invoke(hook, available)
                if inspect.isawaitable(given):
                    given = await given
                if not isinstance(given, dict):
                    given = {hook.__name__: given}
                for name, worth in given.items():
                    self.trace.record_reward(name, worth, float(getattr(hook, "_vf_weight", 1.0)))
        return self.trace


def _text(message: Any) -> str:
    """The text of a message as `turn` takes it."""
    if not isinstance(message, str):
        parts = [one["content"] if isinstance(one, dict) else one.content for one in message]
        if not all(isinstance(part, str) for part in parts):
            raise _Elsewhere("a message is more than text")
        message = "\n\n".join(parts)
    return str(message)


def _put(trace: Any, text: str, *, sampled: bool) -> None:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import AssistantMessage, UserMessage

    message = UserMessage(content=text)
    if sampled:
        message = AssistantMessage(content=text)
    parent = None
    if trace.nodes:
        parent = len(trace.nodes) - 1
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


def _trace(task: Any) -> Any:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=AgentConfig()),
    )


def _awaited(given: Any) -> Any:
    """The result of a coroutine that waits for nothing: in the jail there is nothing to wait for."""
    try:
        given.send(None)
    except StopIteration as ended:
        return ended.value
    given.close()
    raise _Elsewhere("it waits for something")


# --- as a judge, and as a script --------------------------------------------------------------------------------------


def judge(jail: ModuleType, seconds: float, name: str) -> Callable[[str, str, bool], str | None]:
    """The function that plays a row's task with answers (a JSON list): the JSON of [messages, over, reward]."""
    loaded = load(name)  # which tries it: what it imports at first use is there before anybody is locked in

    def played(gold: str, answers: str, _: bool) -> str | None:
        index, digest = json.loads(gold)
        task = loaded.tasks[index]
        if task.hash != digest:
            return None

        def speak() -> str:
            episode = play(loaded, task, json.loads(answers))
            return json.dumps([episode.messages, episode.over, float(episode.reward)])

        return str(jail.said(speak, seconds))  # empty where it failed: as a rule the reward did, at nonsense

    return played


def _main(what: str, name: str) -> dict[str, object]:
    """`rows` of the environment, or `check` whether it can be used; with the digest of its files."""
    try:
        loaded = load(name)
    except Refused as error:
        return {"refused": str(error)}
    if what == "check":
        return {"source": _source(name)}
    rows = [
        (play(loaded, task, []).question, json.dumps([index, task.hash])) for index, task in enumerate(loaded.tasks)
    ]
    return {"train": rows, "source": _source(name), "turns": loaded.turns}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # some environments print
        json.dump(_main(*sys.argv[1:]), answers)
