"""reasoning-gym in processes of its own: its rows, and its scorers, which evaluate what peers write.

It imports nothing of this package: stdlib and reasoning-gym only. As a script it prints a task's rows as
JSON, made under PYTHONHASHSEED=0, without which some tasks differ from process to process. `judge_child` loads it to
judge: there each answer gets a fork of its own, locked in by `jail`, in which only harmless expressions are evaluated.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

TRAINING_ROWS = 1000
HELD_OUT_ROWS = 100
TRAINING_SEED = 1
HELD_OUT_SEED = 1 << 20  # far from the other: row n of a seed is row 0 of seed + n
_PART = re.compile(r"(?P<name>[^@*]*)(@(?P<level>[0-9]+))?(\*(?P<weight>0*[1-9][0-9]*))?")


def rows(spec: str, seed: int, size: int) -> list[tuple[str, str]]:
    """The (question, gold answer) of a task's tasks, interleaved by weight; the gold names its row, see `judge`.

    Raises ValueError for a name, a level or a weight that is none.
    """
    parts = parse(spec)
    total = sum(weight for _, _, weight in parts)
    made = []
    for name, level, weight in parts:
        count = max(1, size * weight // total)
        for index in range(count):
            entry = dataset(name, level, seed)[index]
            gold = json.dumps([name, level, seed, index, entry["answer"]], ensure_ascii=False, default=str)
            made.append(((index + 0.5) / count, str(entry["question"]), gold))
    return [(question, gold) for _, question, gold in sorted(made, key=lambda row: row[0])]


def parse(spec: str) -> list[tuple[str, int, int]]:
    """(name, level, weight) of each part of `NAME[@LEVEL][*WEIGHT],…`; level −1 is the package's own configuration."""
    parts = []
    for part in spec.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not NAME[@LEVEL][*WEIGHT]")
        parts.append((found["name"], int(found["level"] or -1), int(found["weight"] or 1)))
    if len({(name, level) for name, level, _ in parts}) < len(parts):
        raise ValueError("a task is named twice")
    return parts


@functools.cache
def dataset(name: str, level: int, seed: int) -> Any:
    """The rows of a task, made when they are asked for."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset

    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = ""
        if near:
            hint = f" (near to it: {', '.join(near)})"
        raise ValueError(f"has no task {name!r}{hint}")
    chosen = {"seed": seed, "size": TRAINING_ROWS}
    if level < 0:
        return create_dataset(name, **chosen)
    if name not in CURRICULA:
        raise ValueError(f"has no levels of {name!r}")
    curriculum = create_curriculum(name)
    highest = max((len(one.levels) for one in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise ValueError(f"has levels 0 to {highest} of {name!r}")
    curriculum.set_global_level(level)  # of each attribute, or its own highest
    return DATASETS[name][0](config=curriculum.generate_configuration(chosen))


def judge(jail: ModuleType, seconds: float) -> Callable[[str, str, bool], float]:
    """The function that says what an answer to a row is worth, from 0 to 1: 0 wherever the scorer fails."""
    import reasoning_gym  # noqa: F401 - before anybody is locked in
    import sympy.parsing.sympy_parser  # noqa: F401

    warm = set()

    def worth(gold: str, answer: str, _: bool) -> float:
        name, level, seed, index, right = json.loads(gold)
        rows_of = dataset(name, level, seed)
        entry = rows_of[index]
        if str(entry["answer"]) != str(right):
            return 0.0  # another version, or a gold of one's own
        if (name, level) not in warm:  # what it imports and builds at first use, out of the jail and of its time
            rows_of.score_answer(right, entry)
            warm.add((name, level))
        return float(jail.worth(lambda: rows_of.score_answer(answer, entry), seconds))

    return worth


def _main(what: str, spec: str) -> dict[str, object]:
    """`rows` of the task, or `check` whether there is such a task."""
    try:
        if what == "rows":
            return {
                "train": rows(spec, TRAINING_SEED, TRAINING_ROWS),
                "held_out": rows(spec, HELD_OUT_SEED, HELD_OUT_ROWS),
            }
        for name, level, _ in parse(spec):
            dataset(name, level, TRAINING_SEED)
    except (ValueError, AssertionError) as error:
        return {"refused": str(error) or "cannot be configured so"}
    return {}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # some tasks print
        json.dump(_main(*sys.argv[1:]), answers)
