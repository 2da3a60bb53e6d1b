"""Tasks: questions with answers, and the rules that score completions."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from ftis_node.config.run import TASKS
from ftis_node.errors import UsageError, did_you_mean
from ftis_node.tasks.arithmetic import arithmetic
from ftis_node.tasks.download import sha256_of
from ftis_node.tasks.gsm8k import TRAIN, check_gsm8k, gsm8k_to_be_tested, load_gsm8k, to_be_downloaded
from ftis_node.tasks.hub import HF, covers, load_hub, to_be_had, with_columns
from ftis_node.tasks.jsonl import load_jsonl
from ftis_node.tasks.judge import Judge, refuse_unjailed
from ftis_node.tasks.math500 import load_math500
from ftis_node.tasks.own import check_module, load_own, make_task, names_code
from ftis_node.tasks.packaged import check_packaged, load_packaged, package_of, rule_of
from ftis_node.tasks.rewards import (
    JUDGED_RULES,
    PURE_RULES,
    RULES,
    Replay,
    Score,
    Scorer,
    check_rule,
    score,
)
from ftis_node.tasks.task import Example, Task, TextCaps

__all__ = [
    "JUDGED_RULES",
    "PURE_RULES",
    "RULES",
    "Example",
    "Replay",
    "Score",
    "Scorer",
    "Task",
    "TextCaps",
    "as_in",
    "check_files",
    "foreseen",
    "load_evaluation",
    "load_task",
    "make_task",
    "score",
    "scoring",
    "to_be_had",
    "with_columns",
]

# The operands of their questions.
_ARITHMETIC = {"arithmetic": 3, "arithmetic-4": 4}


def load_task(
    name: str,
    *,
    data: Path | None = None,
    eval_data: Path | None = None,
    reward: str | None = None,
    code: bool = False,
) -> Task:
    """The task `arithmetic` or `gsm8k`, the one of a `.jsonl` file, or of `package.module:function`, to train on.

    `data` is a local training file (for `gsm8k`, or where a `.jsonl` of that name lies elsewhere on this machine),
    `eval_data` a file of the same layout to hold out, `reward` the rule of a `.jsonl` file (by default `integer`).
    `code` says that the owner of this machine wrote the name, so that what it names may be imported. Raises UsageError
    for an unknown name, for a task that cannot be trained on, and for unusable files.
    """
    if name.endswith(".jsonl"):
        return load_jsonl(data or Path(name), eval_data, reward or "integer")
    if name.startswith(HF):
        _refuse_files(name, data, eval_data)
        return load_hub(name, reward or "integer")
    return _with_rule(_named(name, data, eval_data, code=code), reward)


def _refuse_files(name: str, data: Path | None, eval_data: Path | None) -> None:
    if data is not None or eval_data is not None:
        raise UsageError(f"The task {name} makes its own data.", "Leave out --data and --eval-data.")


def _named(name: str, data: Path | None, eval_data: Path | None, *, code: bool) -> Task:
    if name in _ARITHMETIC:
        _refuse_files(name, data, eval_data)
        return arithmetic(_ARITHMETIC[name])
    if name == "gsm8k":
        return load_gsm8k(data, eval_data)
    if name == "math500":
        raise UsageError(
            "The task math500 is a test: it has nothing to train on, and its verdicts cannot be shared by a run.",
            "Train on another task, for example gsm8k, and use: ftis-node eval --task math500.",
        )
    if names_code(name) or package_of(name):
        _refuse_files(name, data, eval_data)
        return load_packaged(name) if package_of(name) else load_own(name, code=code)
    raise UsageError(
        f"There is no task {name!r}.",
        f"{did_you_mean(name, [*_ARITHMETIC, 'gsm8k'])}Use {TASKS}.",
    )


def _with_rule(task: Task, reward: str | None) -> Task:
    """The task, whose rule is its own business."""
    if reward is not None and reward != task.reward:
        check_rule(reward)
        raise UsageError(
            f"The task {task.name} has the reward rule {task.reward!r}, not {reward!r}.",
            "Leave out --reward, which is for a .jsonl file.",
        )
    return task


def check_files(
    name: str,
    *,
    data: Path | None = None,
    eval_data: Path | None = None,
    reward: str | None = None,
    code: bool = False,
) -> Task | None:
    """Refuse what `load_task` would, as far as that needs no download and no code; return the task, if it needs
    neither.

    Raises:
        UsageError: as `load_task`, and where this machine has no jail for a rule that needs one.
    """
    if reward is not None:
        refuse_unjailed(reward)
    if name.startswith(HF) and data is None and eval_data is None:
        return load_hub(name, reward or "integer") if to_be_had(name) is None else None
    if package_of(name) and data is None and eval_data is None:
        return check_packaged(name)
    if names_code(name) and data is None and eval_data is None and code:
        check_module(name)
        return None
    if name == "gsm8k" and to_be_downloaded(data, eval_data):
        check_gsm8k(data, eval_data)
        return None
    return load_task(name, data=data, eval_data=eval_data, reward=reward, code=code)


def as_in(run_task: str | None, task: str) -> str:
    """The task as the run names it, where `task` names the same dataset of a hub with parts left out."""
    return run_task if run_task is not None and covers(task, run_task) else task


def foreseen(name: str, *, data: Path | None = None, reward: str | None = None) -> tuple[str | None, str | None]:
    """The sha256 (hex) of a task's data and its rule as `load_task` will find them; None: not known before."""
    if name.endswith(".jsonl"):
        return sha256_of(data or Path(name)), reward or "integer"
    if name.startswith(HF):
        return None, reward or "integer"
    if name == "gsm8k":
        return TRAIN.sha256 if data is None else sha256_of(data), "integer"
    if name in _ARITHMETIC:
        task = arithmetic(_ARITHMETIC[name])
        return task.data, task.reward
    package = package_of(name)
    return None, rule_of(package) if package is not None else None


def load_evaluation(name: str, *, data: Path | None = None, reward: str | None = None, code: bool = False) -> Task:
    """The task to evaluate on; its `train` is empty, and no training file is looked for.

    `data` is a local file of the questions, all of which are used. By default the tests of `gsm8k` and `math500` are
    downloaded once. A `.jsonl` file gives the tenth that training on it leaves out. `reward` and `code` as for
    `load_task`. Raises UsageError for an unknown name and for unusable files.
    """
    if name in _ARITHMETIC or names_code(name) or package_of(name):
        return replace(load_task(name, data=data, reward=reward, code=code), train=())
    if name.startswith(HF):
        _refuse_files(name, data, None)
        return load_hub(name, reward or "integer", held_out_only=True)
    if name == "gsm8k":
        return _with_rule(gsm8k_to_be_tested(data), reward)
    if name == "math500":
        return _with_rule(load_math500(data), reward)
    if name.endswith(".jsonl"):
        return replace(load_jsonl(Path(name), data, reward or "integer"), train=())
    raise UsageError(
        f"There is no task {name!r}.",
        f"{did_you_mean(name, [*_ARITHMETIC, 'gsm8k', 'math500'])}Use math500, {TASKS}.",
    )


def scoring(rule: str, own: Scorer | None = None) -> Scorer:
    """A scorer by a rule of `RULES`, for one thread, which has to close it or use it as a context.

    `own` is a task's own scorer, which then is the rule. The process that it and some rules need starts with the first
    answer. Raises UsageError for a rule that is none, or that needs what is not installed.
    """
    if own is not None:
        return own.another()
    check_rule(rule)
    return Judge(rule) if rule in JUDGED_RULES else Scorer(functools.partial(score, rule))
