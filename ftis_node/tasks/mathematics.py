"""The rule `math`: the strict format of `rewards`, around an answer that a judge compares with the gold one.

math-verify is lenient (50 % = 0.5 = 50) and what it has no time for is wrong, so two nodes may disagree. In a run every
node rewards by its own verdict. It is a large parser for strangers' text: a node uses it only if its owner says so.
"""

from __future__ import annotations

from collections.abc import Callable

from ftis_node.tasks.rewards import Score, answer_of

ANSWER_CHARACTERS = 300  # the longest gold of MATH-500 has 53
_BOXED, _OPENED, _CLOSED = r"\boxed{", "<answer>", "</answer>"


def score_mathematics(same: Callable[..., bool], text: str, gold: str) -> Score:
    r"""Score `text` against the gold answer in LaTeX; ask `same`, a `Judge.same`, once at most; never raise.

    `formatted`: the tags are right and hold 1 to `ANSWER_CHARACTERS` characters. `lenient` is then the same as right,
    and otherwise of the last answer anywhere: of the last `\boxed{…}` or `<answer>…`, whichever begins later, or what
    math-verify finds at the end of a text that has neither.
    """
    answer = answer_of(text)
    if answer is not None and answer.strip() and len(answer) <= ANSWER_CHARACTERS:
        right = same(gold, answer)
        return Score(float(right), formatted=True, lenient=right)
    last = _last_answer(text)
    return Score(0.0, formatted=False, lenient=bool(last.strip()) and same(gold, last, loose=True))


def _last_answer(text: str) -> str:
    boxed, opened = text.rfind(_BOXED), text.rfind(_OPENED)
    if boxed > opened:
        return _braced(text[boxed + len(_BOXED) :][:ANSWER_CHARACTERS])
    if opened >= 0:
        rest = text[opened + len(_OPENED) :]
        return rest.partition(_CLOSED)[0][: ANSWER_CHARACTERS + 1]  # one more: too long, and refused
    return text[-ANSWER_CHARACTERS:]


def _braced(text: str) -> str:
    """Up to the brace that closes one opened before the text; empty where there is none."""
    depth = 1
    for place, character in enumerate(text):
        if character in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[:place]
    return ""
