"""Tasks: questions with answers, and the rules that score completions."""

import functools
from pathlib import Path
from typing import Any

from ftis_node.config.profiles import TASK_KINDS
from ftis_node.config.run import Run
from ftis_node.errors import UsageError, did_you_mean
from ftis_node.tasks.arithmetic import Arithmetic
from ftis_node.tasks.gsm8k import Gsm8k
from ftis_node.tasks.hub import HubDataset
from ftis_node.tasks.jsonl import CsvRows, JsonLines
from ftis_node.tasks.judge import Judge
from ftis_node.tasks.math500 import Math500
from ftis_node.tasks.own import PythonFunction, make_task
from ftis_node.tasks.packaged import ReasoningGym, Verifiers
from ftis_node.tasks.rewards import JUDGED_RULES, Replay, Score, Scorer, check_rule, form_of, kind_of, score
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Example, Task, TextCaps
from ftis_node.tasks.templates import chosen, contradiction, shown

# What other modules of this folder make, beside the functions below.
__all__ = ["Example", "Replay", "Score", "Scorer", "Source", "Task", "TextCaps", "make_task", "score"]


class _Unknown(Source):
    """What no kind knows."""

    has_files = True

    def _load(self) -> Task:
        if self.code and Path(self.name).exists():
            raise UsageError(
                f"{self.name!r} is there, but no task: its name ends in neither .jsonl nor .csv.",
                "Put a question and an answer in each line of a file with such a name (docs/tasks.md).",
            )
        known = did_you_mean(self.name, (name for kind in KINDS for name in kind.names))
        raise UsageError(f"There is no task {self.name!r}.", f"{known}Use {TASK_KINDS}; for `eval` also math500.")


KINDS: tuple[type[Source], ...] = (
    JsonLines,
    CsvRows,
    Arithmetic,
    Gsm8k,
    Math500,
    HubDataset,
    ReasoningGym,
    Verifiers,
    PythonFunction,
)
"""Each kind of task; a name is of the first that takes it. `config.profiles.TASK_KINDS` describes them for people."""


def source_of(name: str, **said: Any) -> Source:
    """The task of that name before anything is loaded, with what the owner said of it (see `Source`)."""
    return next((kind for kind in KINDS if kind.mine(name)), _Unknown)(name, **said)


def load_task(name: str, **said: Any) -> Task:
    """See `Source.load`."""
    return source_of(name, **said).load()


def load_evaluation(name: str, **said: Any) -> Task:
    """See `Source.test`."""
    return source_of(name, **said).test()


def with_columns(task: str | None, question: str | None, answer: str | None) -> str | None:
    """A task's name with the columns that options name. Raises UsageError where it has none."""
    if question is answer is None:
        return task
    return source_of(task or "").with_columns(question, answer)


# What only a node's owner may agree to, by the rule.
_BOLD_RULES = {
    "math": "gives what peers write to a large parser, in a process with limits of its own",
    "tests": "runs code that peers write, in a jail",
}


def check_named(
    run: Run,
    *,
    task: str | None,
    reward: str | None,
    ours: bool,
    data: Path | None = None,
    template: str | None = None,
) -> None:
    """Refuse a run that wants what only the owner of this node may allow: code, a file, or a large parser; and one
    whose template, known by its name, asks for another form than earns.

    Args:
        task, reward, data, template: what the owner named at this start. ours: the owner joined or began this run
            before.

    Raises:
        UsageError: it was not named, or another rule or template was.
    """
    source_of(run.task, data=data, code=task is not None).refuse_stranger(ours=ours)
    if reward is not None and reward != run.reward:
        raise UsageError(f"The run's reward rule is {run.reward!a}, not {reward!a}.", "Leave out --reward.")
    if template is not None and chosen(template, run.reward, fixed=True)[0] != run.template:
        raise UsageError(
            f"The run asks by the template {shown(run.template)}, not by {template[:40]!a}.",
            "Leave out --template, which is for a new run.",
        )
    why = contradiction(run.template, run.reward)
    if why and not ours:
        raise UsageError(why, "Ask the others in the run for one whose rule and template agree.")
    if kind_of(run.reward) in _BOLD_RULES and reward is None and not ours:
        raise UsageError(
            f"The run judges answers by the rule {run.reward!r}, which {_BOLD_RULES[kind_of(run.reward)]}.",
            f"If that is acceptable to you, start with --reward {run.reward}.",
        )


def scoring(rule: str, own: Scorer | None = None) -> Scorer:
    """A scorer by a rule of `RULES`, for one thread, which has to close it or use it as a context.

    `own` is a task's own scorer, which then is the rule. The process that it and some rules need starts with the first
    answer. Raises UsageError for a rule that is none, or that needs what is not installed.
    """
    if own is not None:
        return own.another()
    check_rule(rule)
    if rule in JUDGED_RULES:
        return Judge(rule)
    return Scorer(functools.partial(score, rule), form_of(rule))
