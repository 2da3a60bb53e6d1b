"""Tasks: prompts with integer answers, and the rules that score completions."""

from __future__ import annotations

from pathlib import Path

from ftis_node.errors import UsageError
from ftis_node.tasks.arithmetic import arithmetic
from ftis_node.tasks.gsm8k import load_gsm8k
from ftis_node.tasks.jsonl import load_jsonl
from ftis_node.tasks.rewards import RULES, Score, score
from ftis_node.tasks.task import Example, Task

__all__ = ["RULES", "Example", "Score", "Task", "load_task", "score"]


def load_task(name: str, *, data: Path | None = None, eval_data: Path | None = None) -> Task:
    """The task `arithmetic` or `gsm8k`, or the one of a `.jsonl` file.

    `data` is a local training file (for `gsm8k`, or where a `.jsonl` of that name lies elsewhere on this machine),
    `eval_data` a file of the same layout to hold out. Raises UsageError for an unknown name and for unusable files.
    """
    if name in ("arithmetic", "arithmetic-4"):
        if data is not None or eval_data is not None:
            raise UsageError(f"The task {name} makes its own data.", "Leave out --data and --eval-data.")
        return arithmetic(3 if name == "arithmetic" else 4)
    if name == "gsm8k":
        return load_gsm8k(data, eval_data)
    if name.endswith(".jsonl"):
        return load_jsonl(data or Path(name), eval_data)
    raise UsageError(f"There is no task {name!r}.", "Use arithmetic, gsm8k or the path of a .jsonl file.")
