"""Tasks that are Python code of the owner's: `package.module:function`, a function that returns a `Task`.

Such code is imported only because the owner of this machine has named it; what peers name is never imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ftis_node.config.run import CODE
from ftis_node.errors import UsageError, UserError, did_you_mean
from ftis_node.tasks.jsonl import GOLDS, split
from ftis_node.tasks.judge import START_SECONDS, Asked
from ftis_node.tasks.rewards import Score, Scorer, check_rule, kind_of
from ftis_node.tasks.score_columns import bounded
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import CAPS, Example, Task, digest_of
from ftis_node.tasks.templates import chosen
from ftis_node.text import counted

_NAME = re.compile(r"[A-Za-z]\w*(?:\.\w+)*:\w+", re.ASCII)
_NAME_CHARACTERS = 64  # of a task in a run
_WRONG = Score(0.0, formatted=False, lenient=False)

logger = logging.getLogger(__name__)


def make_task(
    rows: Iterable[tuple[str, str | int]],
    *,
    reward: str | Callable[[str, str], Score] = "integer",
    held_out: Iterable[tuple[str, str | int]] | None = None,
    template: str | None = None,
    completion_tokens: int | None = None,
    prompt_tokens: int = 512,
    reward_seconds: float = 5.0,
) -> Task:
    """A task of these questions with their gold answers, for a function that `--task package.module:function` names.

    Args:
        rows: to train on, in an order that is the same on every node.
        reward: a rule (integer, integer-boxed, exact, …), or what gives the verdict on a text, given the gold answer:
            it is called with whatever peers wrote, in processes of its own.
        held_out: to be evaluated on; by default about a tenth of the rows, chosen by hash, which is not trained on.
        template: the prompt, with {question} in it once, or the name of one that goes with the rule; by default one
            that asks for reasoning, and for an answer in the form that earns.
        completion_tokens, prompt_tokens: longest completion and prompt; by default 256, and in a chat by the template
            `boxed` 512.
        reward_seconds: that a verdict of a function may take; then the answer is wrong.

    Raises:
        UsageError: a row cannot be used, there are too few, or there is no such rule.
    """
    if not 0 < reward_seconds < math.inf:
        raise UsageError(f"A reward cannot take {reward_seconds} seconds.", "Give it a time, such as 5.")
    named = ""
    gold: tuple[Callable[[Any], str | None], str] = (_any_text, "a text")
    if isinstance(reward, str):
        named = reward
        check_rule(named)
        gold = GOLDS[kind_of(named)]
    train = _examples(rows, *gold)
    rest = _examples(held_out or (), *gold)
    if not train:
        raise UsageError("The task has no rows.", "Give it two different questions at least.")
    if held_out is None:
        train, rest = split("The task", train)
    if template is not None:
        template, _ = chosen(template, named, fixed=True)
    caps = (prompt_tokens, completion_tokens or CAPS["gsm8k"][1])
    task = Task.by_rule("", train, rest, digest_of(train), named or "exact", caps, template)
    if completion_tokens is not None:
        task = replace(task, chosen=task.chosen | {"completion_tokens"})
    if isinstance(reward, str):
        return task
    return replace(task, reward="", scorer=Scorer(reward), scorer_seconds=reward_seconds)


class PythonFunction(Source):
    """The task that the function of that name returns, called by this name in a run.

    Its data digest is of the rows it trains on. Where it has a scorer of its own, `reward` names that by the sha256 of
    the source files of the function and the scorer, so that nodes whose code differs notice.
    """

    @classmethod
    def mine(cls, name: str) -> bool:
        return ":" in name

    def refuse_stranger(self, *, ours: bool) -> None:
        if not self.code:
            raise UsageError(
                f"The run's task is Python code, {self.name!a}, which is imported only if you name it yourself.",
                f"Get that code from someone you trust, read it, and start with --task {self.name}.",
            )

    def _check(self) -> Task | None:
        if not self.code:
            return self._load()
        module = self.name.partition(":")[0]
        top = module.partition(".")[0]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise _no_module(module)
        return None

    def _load(self) -> Task:
        name = self.name
        if not self.code:
            raise UsageError(
                f"The task {name!a} is Python code, which is imported only if the owner of this node names it.",
                "Get that code from someone you trust, and start with --task and that name.",
            )
        if not _NAME.fullmatch(name) or len(name) > _NAME_CHARACTERS:
            raise UsageError(
                f"The task {name!a} cannot be a run's name of a Python function.",
                f"Write package.module:function, a letter first, of at most {_NAME_CHARACTERS} characters.",
            )
        began = time.monotonic()
        function, task = call(name)
        seconds = time.monotonic() - began
        if not task.train:
            raise UsageError(f"The task {name} has nothing to train on.", "Give it rows.")
        data = digest_of(task.train)
        if task.scorer is None:
            check_rule(task.reward)
            return replace(task, name=name, data=data)
        reward = f"{CODE}{_code_digest(name, function, task.scorer)[:40]}"
        guarded = Guarded(name, task.scorer_seconds, START_SECONDS + 3 * seconds)
        return replace(task, name=name, data=data, reward=reward, scorer=guarded)


def call(name: str) -> tuple[Callable[[], Any], Task]:
    """The function of that name, which is imported, and the task that it returns.

    Raises:
        UsageError: the code cannot be used.
    """
    function = _function(name)
    try:
        task = function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"The function {name} failed: {_told(error)}.", "Mend that code.") from error
    if not isinstance(task, Task):
        raise UsageError(f"{name} returns {type(task).__name__}, not a Task.", "Return what `make_task` makes.")
    return function, task


class Guarded(Asked):
    """A person's reward function. It may fail, hang or die without harm to the node: it runs in a process of its own,
    which imports the same code.
    """

    form = ""

    def __init__(self, name: str, seconds: float, start_seconds: float) -> None:
        """
        Args:
            name: of the task's function. seconds, start_seconds: see `Asked`.
        """
        super().__init__(name, seconds, start_seconds)
        self._failures: Counter[str] = Counter()

    def another(self) -> Guarded:
        """One for another thread. They count their failures together."""
        made = Guarded(self._rule, self._seconds, self._start_seconds)
        made._failures = self._failures
        return made

    def __call__(self, text: str, answer: str) -> Score:
        """The function's verdict; nothing where it fails, takes too long, or gives no sound `Score`.

        Raises:
            UserError: its process cannot be started.
        """
        verdict = self._ask(text, answer)
        why = self._failure(verdict)
        if why:
            self._tell("late" if verdict is None else "failed", why)
            return _WRONG
        reward, formatted, lenient, columns = verdict
        return Score(reward, formatted, lenient, bounded(columns))

    def why_not(self, text: str, answer: str) -> str:
        return self._failure(self._ask(text, answer))

    def _failure(self, verdict: Any) -> str:
        """Return what a verdict that is none says; empty for one."""
        if verdict is None:
            return f"took longer than {self._seconds:g} s, or ended its process"
        if isinstance(verdict, str):
            return f"failed ({verdict})"
        return ""

    def _tell(self, kind: str, what: str) -> None:
        """Log the first failure of a kind, the tenth, the hundredth, and so on."""
        self._failures[kind] += 1
        number = self._failures[kind]
        if str(number).rstrip("0") == "1":
            nth = f"{counted(number, 'answer')} so far, logged at 1, 10, 100, …"
            logger.warning("The reward function of %s %s: such answers are wrong (%s).", self._rule, what, nth)

    def _surroundings(self) -> dict[str, Any]:
        return {"stdout": 2, "stderr": 2}  # its output goes to stderr: stdout may be somebody's JSON

    def _did_not_start(self) -> UserError:
        return UserError(
            f"The process that runs the reward function of {self._rule} was not ready in {self._start_seconds:.0f} s.",
            "What it printed says why; it imports the module and calls that function once more.",
        )


def judged(function: Scorer, text: str, answer: str) -> list[object] | str:
    """Return the function's verdict, or why it gave none; it runs in its own process."""
    try:
        verdict = _sound(function(text, answer))
    except (Exception, SystemExit) as error:
        return _told(error)
    return [verdict.reward, verdict.formatted, verdict.lenient, verdict.columns]


def _sound(verdict: Any) -> Score:
    if not isinstance(verdict, Score):
        raise TypeError(f"it gave {type(verdict).__name__}, not a Score")
    reward = float(verdict.reward)
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise ValueError(f"its reward is {reward}, not from 0 to 1")
    return Score(reward, bool(verdict.formatted), bool(verdict.lenient), bounded(verdict.columns))


def _no_module(name: str) -> UsageError:
    near = did_you_mean(name, (*(file.stem for file in Path.cwd().glob("*.py")), "hf", "reasoning-gym", "verifiers"))
    return UsageError(
        f"There is no Python module {name}, neither in {Path.cwd()} nor installed.",
        f"{near}Start in the folder that holds it, or install it.",
    )


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it, which the compute process is run by
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise _no_module(module_name) from error
        raise UsageError(f"The module {module_name} cannot be imported: {_told(error)}.", "Mend that code.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = did_you_mean(function_name, (name for name in vars(module) if name[0] != "_"))
        raise UsageError(
            f"The module {module_name} ({getattr(module, '__file__', None)}) has no function {function_name}.",
            f"{near}Name a function in it.",
        )
    return function  # type: ignore[no-any-return]


def _examples(
    rows: Iterable[tuple[str, str | int]], answer_of: Callable[[Any], str | None], wanted: str
) -> tuple[Example, ...]:
    examples = []
    for number, (question, answer) in enumerate(rows, start=1):
        gold = answer_of(answer)
        if not isinstance(question, str) or not question.strip():
            raise UsageError(f"Row {number} of the task has no question that is a text.", "Correct that row.")
        if gold is None:
            raise UsageError(f"Row {number} of the task has an answer that is not {wanted}.", "Correct that row.")
        examples.append(Example(question, gold, f"Row {number} of the task"))
    return tuple(examples)


def _any_text(value: Any) -> str | None:
    if isinstance(value, str | int):
        return str(value)
    return None


def _code_digest(name: str, *functions: object) -> str:
    """sha256 (hex) over the source files that the functions are in, in the order of their contents' own digests.

    Raises:
        UsageError: one has no source file.
    """
    digests = set()
    for function in functions:
        while isinstance(function, functools.partial) or type(function) is Scorer:
            if isinstance(function, functools.partial):
                function = function.func
            else:
                function = function.function
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        path = getattr(module, "__file__", None)
        if path is None or not path.endswith(".py") or not os.path.isfile(path):
            raise UsageError(
                f"The code of the task {name} has no source file that others could be compared with.",
                "Write the function and its reward as plain functions in .py files.",
            )
        digests.add(hashlib.sha256(Path(path).read_bytes()).hexdigest())
    return hashlib.sha256(json.dumps(sorted(digests), separators=(",", ":")).encode()).hexdigest()


def _told(error: BaseException) -> str:
    if not str(error):
        return type(error).__name__
    return f"{type(error).__name__}: {error}"[:300]
