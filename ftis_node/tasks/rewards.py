"""Scores of text that strangers wrote: pure string work, linear in its length, the same verdict on every node.

Nothing is evaluated, and no number longer than 40 characters is converted. Integers have only ASCII whitespace and
digits, so the Unicode tables of a Python version cannot make two nodes disagree. `exact`
compares in NFC, which Unicode promises not to change for characters that it has.

The rule `math` is this format around an answer that a judge compares with the gold one. math-verify is lenient (50 % =
0.5 = 50, units are ignored), and what it has no time for is wrong, so two nodes may disagree. In a run every node
rewards by its own verdict. It is a large parser for strangers' text: a node uses it only if its owner says so.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ftis_node.errors import UsageError, did_you_mean
from ftis_node.tasks.score_columns import Columns

PURE_RULES = ("integer", "integer-boxed", "exact")
"""The names that `score` knows: rules whose verdict is the same on every node."""

JUDGED_RULES = ("regex", "math", "math-boxed", "tests")
"""Rules that need a process of their own (see `judge`): bound to a wall clock, so that two nodes may disagree."""

RULES = PURE_RULES + JUDGED_RULES
"""The names that a run may have: a kind of answer, and the form that earns where that is not the tags."""

FORMS: Mapping[str, str] = {
    "tags": "<think>…</think> <answer>{}</answer>",
    "boxed": r"\boxed{{{}}}",
}
"""The forms that earn, by their names: a short text of each, around an answer."""

TEXT_CHARACTERS = 4096
"""The longest answer under `exact` and `regex`; NFC takes time with the square of a text of nothing but accents."""

ANSWER_CHARACTERS = 300  # the longest gold of MATH-500 has 53
_BOXED = r"\boxed{"
_OPENED = "<answer>"
_CLOSED = "</answer>"
_MAX_ANSWER = 40
_WINDOW = 2 * _MAX_ANSWER  # enough to see that a number is too long to be read
_SPACE = " \t\n\r\f\v"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
_FENCE = re.compile(r"```[a-zA-Z0-9]*\n(?P<code>.*)\n```", re.DOTALL)
_LAST_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)])[+-])?"  # a sign, but not the minus of 8-3
    r"(?:(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
    r"(?P<fraction>\.[0-9]+)?\Z"
)


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one completion.

    `reward` is 1.0 only for the strict format with the right answer, else 0.0. `formatted` says that the format was
    right, whatever the answer; `lenient` that the last answer anywhere in the text was right, whatever the format.
    `columns` are shown beside it, see `score_columns`.
    """

    reward: float
    formatted: bool
    lenient: bool
    columns: Columns = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """An episode played again. messages: what the environment said after each answer but the last. over: it wants no
    more answers. reward: from 0 to 1, and 0 before it is over."""

    messages: tuple[str, ...]
    over: bool
    reward: float


class Scorer:
    """Gives verdicts on texts. One thread at a time may use it; as a context it ends the process that it may have.

    This one gives those of a function. form: of `FORMS`, in which alone an answer counts; empty: it may have another.
    takes_gold: the gold answer is itself an answer.
    """

    form = "tags"
    takes_gold = True

    def __init__(self, function: Callable[[str, str], Score], form: str = "tags") -> None:
        self.function = function
        self.form = form

    def __call__(self, text: str, answer: str) -> Score:
        """The verdict on a completion's text, given the gold answer."""
        return self.function(text, answer)

    def why_not(self, text: str, answer: str) -> str:
        """Why there is no verdict on this text, in words after a person's function; empty where there is one."""
        return ""

    def replay(self, answers: Sequence[str], gold: str) -> Replay | None:
        """Play the episode of the row with this gold answer, the same on every node; None where that fails."""
        return None

    def right(self, question: str, answer: str) -> tuple[str, str]:
        """The part of the task that a row is of, and its right answer."""
        return "", answer

    def begin(self) -> None:
        """Count the answers that follow, up to the next `begin`, as one group: a hostile one costs some seconds at
        most. Without it each answer is asked about, as in evaluations, where each is to another question."""

    def another(self) -> Scorer:
        """One for another thread."""
        return self

    def close(self) -> None:
        """End the process, if there is one, whatever it is doing; another answer starts another."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def form_of(rule: str) -> str:
    """The name of the form in which answers earn under this rule."""
    _, _, form = rule.partition("-")
    if form in FORMS:
        return form
    return "tags"


def ways(form: str) -> list[str]:
    """The texts around an answer in this form; in all and in none, if it is empty."""
    if form:
        return [FORMS[form]]
    return [*FORMS.values(), "{}"]


def tags_of(rule: str) -> tuple[str, ...]:
    """The tags that an answer needs in order to earn."""
    if rule in RULES and form_of(rule) == "tags":
        return TAGS
    return ()


def kind_of(rule: str) -> str:
    """What answers are under this rule, whatever their form."""
    kind, _, form = rule.partition("-")
    if form in FORMS:
        return kind
    return rule


def check_rule(rule: str) -> None:
    """Raise UsageError for a rule that is none."""
    if rule not in RULES:
        near = did_you_mean(rule[:40], RULES)
        raise UsageError(f"There is no reward rule {rule[:40]!a}.", f"{near}Use one of: {', '.join(RULES)}.")


def score(rule: str, text: str, answer: str) -> Score:
    """Score `text` against the gold `answer` by a rule of `PURE_RULES`; raises UsageError for any other.

    Never raises on account of `text` or `answer`: a gold that is no integer is simply never matched.
    """
    check_rule(rule)
    if rule not in PURE_RULES:
        raise UsageError(f"The reward rule {rule!r} needs a process of its own.", "Use `ftis_node.tasks.scoring`.")
    if rule == "exact":
        return score_text(lambda given: given == answer, text)
    gold = parse_integer(answer)
    answered = answer_of(text, form_of(rule))
    given = None
    if answered is not None:
        given = parse_integer(answered)
    right = gold is not None and given == gold
    lenient = right or (gold is not None and _last_integer(text) == gold)
    return Score(float(right), given is not None, lenient)


def score_text(worth: Callable[[str], float], text: str) -> Score:
    """Score `text` by what its answer, stripped and in NFC, is worth, from 0 to 1, which is asked once at most.

    An answer may have 1 to `TEXT_CHARACTERS` characters. `lenient` is of the last answer anywhere: after the last
    `<answer>` or, in a text without one, its last line.
    """
    given = normal(answer_of(text) or "")
    if given:
        reward = float(worth(given))
        return Score(reward, formatted=True, lenient=reward >= 1)
    last = normal(_last_text(text))
    return Score(0.0, formatted=False, lenient=bool(last) and worth(last) >= 1)


def normal(text: str) -> str:
    """Without whitespace around it, in NFC; empty if it is longer than `TEXT_CHARACTERS`."""
    text = text.strip()
    if len(text) > TEXT_CHARACTERS:
        return ""
    return unicodedata.normalize("NFC", text)


def code_in(answer: str) -> str:
    """The code of an answer, without the fence of three backticks that models like to put around it."""
    fenced = _FENCE.fullmatch(answer)
    if fenced is None:
        return answer
    return fenced["code"]


def _last_text(text: str) -> str:
    _, opened, rest = text.rpartition(_OPENED)
    if opened:
        return rest.partition(_CLOSED)[0]
    return text.rstrip().rpartition("\n")[2]


def parse_integer(text: str) -> int | None:
    """The integer that `text` is, with an optional sign and thousands commas; None for anything else."""
    if len(text) > _MAX_ANSWER:
        return None
    text = text.strip(_SPACE)
    if not _INTEGER.fullmatch(text):
        return None
    return int(text.replace(",", ""))


def answer_of(text: str, form: str = "tags") -> str | None:
    r"""The answer in a text of this form of `FORMS`; None where the text has another.

    `tags`: what stands between the answer's tags in a text that is exactly <think>…</think> <answer>…</answer>.
    `boxed`: what the last \boxed{…} holds.
    """
    if form == "boxed":
        _, opened, rest = text.rpartition(_BOXED)
        if not opened:
            return None
        return _braced(rest[:ANSWER_CHARACTERS])
    text = text.strip(_SPACE)
    if not (text.startswith("<think>") and text.endswith("</answer>")) or any(text.count(tag) != 1 for tag in TAGS):
        return None
    between, opened, answer = text.partition("</think>")[2].partition(_OPENED)
    if not opened or between.strip(_SPACE):
        return None
    return answer.removesuffix(_CLOSED)


def _last_integer(text: str) -> int | None:
    """The last number of the text where it is an integer (12.00 is one, 12.5 is not) of at most 40 characters."""
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    found = _LAST_NUMBER.search(text[max(0, end - _WINDOW) : end])
    if found is None:
        return None
    fraction = found["fraction"] or ""
    if fraction.strip(".0"):
        return None
    return parse_integer(found[0].removesuffix(fraction))


def score_mathematics(same: Callable[..., bool], text: str, gold: str, form: str) -> Score:
    r"""Score `text` against the gold answer in LaTeX; ask `same`, a `Judge.same`, once at most; never raise.

    `formatted`: the text has this form of `FORMS`, and an answer of 1 to `ANSWER_CHARACTERS` characters. `lenient` is
    then the same as right, and otherwise of the last answer anywhere: of the last `\boxed{…}` or `<answer>…`, whichever
    begins later, or what math-verify finds at the end of a text that has neither.
    """
    answer = answer_of(text, form)
    if answer is not None and answer.strip() and len(answer) <= ANSWER_CHARACTERS:
        right = same(gold, answer)
        return Score(float(right), formatted=True, lenient=right)
    last = _last_answer(text)
    return Score(0.0, formatted=False, lenient=bool(last.strip()) and same(gold, last, loose=True))


def _last_answer(text: str) -> str:
    boxed = text.rfind(_BOXED)
    opened = text.rfind(_OPENED)
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
        if place and text[place - 1] == "\\":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return ""
