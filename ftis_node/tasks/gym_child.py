"""reasoning-gym in processes of its own: its rows, and its scorers, which evaluate what peers write.

It imports nothing of this package: stdlib and reasoning-gym only. As a script it prints a task's rows as
JSON, made under PYTHONHASHSEED=0, without which some tasks differ from process to process. `judge_child` loads it to
judge: there each answer gets a fork of its own, locked in by `jail`, in which only harmless expressions are evaluated.
"""

from __future__ import annotations

import dis
import json
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

TRAINING_ROWS, HELD_OUT_ROWS = 1000, 100
TRAINING_SEED, HELD_OUT_SEED = 1, 1 << 20  # far apart: row n of a seed is row 0 of seed + n
_REPLY_BYTES = 64

# What a peer's expression may do. No attribute, no function of its own, no assignment, no import: whoever could do
# these could write a verdict of his own.
_STEPS = frozenset(
    """
    RESUME PUSH_NULL LOAD_CONST LOAD_NAME LOAD_GLOBAL RETURN_VALUE RETURN_CONST PRECALL CALL CALL_KW KW_NAMES POP_TOP
    NOP BINARY_OP BINARY_SUBSCR BINARY_SLICE BUILD_SLICE UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT TO_BOOL
    CACHE COMPARE_OP CONTAINS_OP IS_OP BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_STRING BUILD_CONST_KEY_MAP
    LIST_EXTEND SET_UPDATE LIST_TO_TUPLE COPY SWAP EXTENDED_ARG LOAD_SMALL_INT LOAD_COMMON_CONSTANT CALL_INTRINSIC_1
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE JUMP_IF_FALSE_OR_POP
    JUMP_IF_TRUE_OR_POP JUMP_FORWARD NOT_TAKEN
    """.split()  # noqa: SIM905
)
_BUILTINS = frozenset(
    """
    abs bool complex dict float frozenset int len list max min pow range round set str sum tuple
    """.split()  # noqa: SIM905
)


def rows(spec: str, seed: int, size: int) -> list[tuple[str, str]]:
    """The (question, gold answer) of a task's tasks, interleaved by weight; the gold names its row, see `_Entries`.

    Raises ValueError for a name, a level or a weight that is none.
    """
    entries, parts = _Entries(), parse(spec)
    total = sum(weight for _, _, weight in parts)
    made = []
    for name, level, weight in parts:
        count = max(1, size * weight // total)
        for index in range(count):
            entry = entries.entry(name, level, seed, index)
            gold = json.dumps([name, level, seed, index, entry["answer"]], ensure_ascii=False, default=str)
            made.append(((index + 0.5) / count, str(entry["question"]), gold))
    return [(question, gold) for _, question, gold in sorted(made, key=lambda row: row[0])]


def parse(spec: str) -> list[tuple[str, int, int]]:
    """(name, level, weight) of each part of `NAME[@LEVEL][*WEIGHT],…`; level −1 is the package's own configuration."""
    parts = []
    for part in spec.split(","):
        rest, starred, weight = part.partition("*")
        name, at, level = rest.partition("@")
        if (starred and not weight.isdecimal()) or (at and not level.isdecimal()) or weight == "0":
            raise ValueError(f"{part!r} is not NAME[@LEVEL][*WEIGHT]")
        parts.append((name, int(level) if at else -1, int(weight) if starred else 1))
    if len({(name, level) for name, level, _ in parts}) < len(parts):
        raise ValueError("a task is named twice")
    return parts


class _Entries:
    """The rows of reasoning-gym's tasks, made when they are asked for."""

    def __init__(self) -> None:
        self._datasets: dict[tuple[str, int, int], Any] = {}

    def dataset(self, name: str, level: int, seed: int) -> Any:
        from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset

        key = name, level, seed
        if key not in self._datasets:
            if name not in DATASETS:
                import difflib

                near = difflib.get_close_matches(name, DATASETS, n=3)
                raise ValueError(f"has no task {name!r}" + (f" (near to it: {', '.join(near)})" if near else ""))
            chosen = {"seed": seed, "size": TRAINING_ROWS}
            if level < 0:
                self._datasets[key] = create_dataset(name, **chosen)
            elif name not in CURRICULA:
                raise ValueError(f"has no levels of {name!r}")
            else:
                curriculum = create_curriculum(name)
                highest = max((len(one.levels) for one in curriculum.attributes.values()), default=1) - 1
                if level > highest:
                    raise ValueError(f"has levels 0 to {highest} of {name!r}")
                curriculum.set_global_level(level)  # of each attribute, or its own highest
                config = curriculum.generate_configuration(chosen)
                self._datasets[key] = DATASETS[name][0](config=config)
        return self._datasets[key]

    def entry(self, name: str, level: int, seed: int, index: int) -> dict[str, Any]:
        entry: dict[str, Any] = self.dataset(name, level, seed)[index]
        return entry


def judge(jail: ModuleType, seconds: float) -> Callable[[str, str, bool], float]:
    """The function that says what an answer to a row is worth, from 0 to 1: 0 wherever the scorer fails."""
    import reasoning_gym  # noqa: F401 - before anybody is locked in
    import sympy.parsing.sympy_parser  # noqa: F401

    entries = _Entries()
    warm: set[tuple[str, int]] = set()

    def worth(gold: str, answer: str, _: bool) -> float:
        name, level, seed, index, right = json.loads(gold)
        dataset, entry = entries.dataset(name, level, seed), entries.entry(name, level, seed, index)
        if str(entry["answer"]) != str(right):
            return 0.0  # another version, or a gold of one's own
        if (name, level) not in warm:  # what it imports and builds at first use, out of the jail and of its time
            dataset.score_answer(right, entry)
            warm.add((name, level))
        ours, theirs = os.pipe()
        pid = jail.locked_in(lambda: _score(dataset, entry, answer, theirs), {theirs}, seconds)
        os.close(theirs)
        told = os.read(ours, _REPLY_BYTES) if jail.ended_well(pid) else b""
        os.close(ours)
        try:
            return min(1.0, max(0.0, float(told)))
        except ValueError:
            return 0.0

    return worth


def _score(dataset: Any, entry: dict[str, Any], answer: str, end: int) -> None:
    sys.addaudithook(_only_harmless)
    os.write(end, repr(float(dataset.score_answer(answer, entry))).encode())


def _only_harmless(event: str, arguments: tuple[Any, ...]) -> None:
    """End the process before it runs code that was made of a text, unless it is an expression as answers have them."""
    if event == "exec" and isinstance(code := arguments[0], CodeType) and not _harmless(code):
        os._exit(1)


def _harmless(code: CodeType) -> bool:
    if not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen "):
        return True  # a module of the package's
    if code.co_names == ("sympy",) and code.co_consts == (0, ("*",), None):
        return True  # `from sympy import *`, which sympy runs before it parses
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return False
    known = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
    if any(name.startswith("_") or (name in known and name not in _BUILTINS) for name in code.co_names):
        return False
    return all(step.opname in _STEPS for step in dis.get_instructions(code))


def _main(what: str, spec: str) -> dict[str, object]:
    """`rows` of the task, or `check` whether there is such a task."""
    try:
        if what == "rows":
            return {
                "train": rows(spec, TRAINING_SEED, TRAINING_ROWS),
                "held_out": rows(spec, HELD_OUT_SEED, HELD_OUT_ROWS),
            }
        for name, level, _ in parse(spec):
            _Entries().dataset(name, level, TRAINING_SEED)
    except (ValueError, AssertionError) as error:
        return {"refused": str(error) or "cannot be configured so"}
    return {}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # some tasks print
        json.dump(_main(*sys.argv[1:]), answers)
