"""The parts of a task: questions with answers, how to put them to a model, and how to score its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftis_node.tasks.rewards import Scorer
from ftis_node.tasks.templates import IN_CHAT, TEMPLATES, known_as, rule_in, usual
from ftis_node.text import counted

# Longest prompt and completion of the tasks that come with the package and can be trained on, in tokens.
CAPS: Mapping[str, tuple[int, int]] = {"arithmetic": (16, 16), "gsm8k": (512, 256)}

BOXED_TOKENS = 512
"""Longest completion in a chat by `boxed`, where nobody chose one: of GSM8K's 13 % are cut off, and 88 % at 200."""


@dataclass(frozen=True, slots=True)
class TextCaps:
    """Longest prompt and completion of a text run, in UTF-8 bytes, and longest completion in its author's tokens.

    A prompt has no cap in tokens there, for each node cuts it by its own tokenizer.
    """

    prompt_bytes: int
    completion_bytes: int
    completion_tokens: int

    @classmethod
    def beside(cls, prompt_tokens: int, completion_tokens: int) -> TextCaps:
        """Caps that let through what token caps do: 5 bytes a token, and a quarter more tokens for other tokenizers.

        Measured with Qwen2.5's and GPT-2's tokenizer: prompts of GSM8K and MATH-500 have up to 4.7 bytes a token (99th
        percentile), worked solutions 1.5 to 4.0.
        """
        return cls(5 * prompt_tokens, 5 * completion_tokens, completion_tokens + completion_tokens // 4)


# The longest completion of four operands that spells its steps has 56 bytes; one token a byte leaves nobody out.
ARITHMETIC_TEXT = TextCaps(prompt_bytes=16, completion_bytes=64, completion_tokens=64)


def told_if_few(held_out: int) -> str:
    """A warning where so few questions are held out that pass@1 says little, else nothing."""
    if held_out >= 30:
        return ""
    few = f"Only {counted(held_out, 'question')} held out, too few to see whether it learns"
    return f"{few}: add rows, or name 30 of a file with --eval-data."


def spread(there: int, wanted: int | None) -> list[int]:
    """So many of the rows' numbers, at even distances, because neighbours may be alike; None: all."""
    count = min(there, wanted or there)
    return [index * there // count for index in range(count)]


def place_of(question: str) -> float:
    """From 0 to 1, by a hash: what decides whether a question is held out."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True, slots=True)
class Example:
    """A question and its gold answer; place: the line and the file that it is from, if it is from one.

    Under the rule `integer` that is an integer in canonical decimal digits (`-1234`, never `-1,234`), under `math` an
    expression in LaTeX, under `exact` a text without whitespace around it in NFC, under `regex` a regular
    expression, under `tests` Python text with asserts.
    """

    question: str
    answer: str
    place: str = field(default="", compare=False)


Rows = tuple[Example, ...]


def digest_of(rows: Sequence[Example]) -> str:
    """The sha256 (hex) of the canonical JSON of the rows."""
    text = json.dumps([[row.question, row.answer] for row in rows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Task:
    """The data and the rules of one task; everything but `held_out` must be equal on all nodes of a run.

    `data` is the sha256 (hex) of what makes the prompts: of the training file's bytes, or of the canonical JSON of the
    rows where there is no file. In a task loaded for evaluation only, `train` is empty and `data` is of that file.
    `reward` names a rule of `ftis_node.tasks.rewards`, or the code of its `scorer`, if it has one (see `own`),
    whose verdict may take `scorer_seconds`. The caps are defaults, in tokens; `text` has those of text runs. `turns` is
    how many answers an episode may have; above 1 the scorer plays it (`replay`). `chosen` says which of `template`,
    `reward` and `completion_tokens` are settled; what is not is another in a chat (`in_chat`).
    """

    name: str
    train: Rows
    held_out: Rows
    data: str
    template: str
    reward: str
    completion_tokens: int
    prompt_tokens: int
    text: TextCaps
    scorer: Scorer | None = field(default=None, compare=False)
    scorer_seconds: float = field(default=5.0, compare=False)
    turns: int = 1
    chosen: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def by_rule(
        cls,
        name: str,
        train: Rows,
        held_out: Rows,
        data: str,
        reward: str,
        caps: tuple[int, int] = CAPS["gsm8k"],
        template: str | None = None,
    ) -> Task:
        """A task with the template of its rule, unless another is given, and the caps of text beside those of tokens.

        Args:
            caps: longest prompt and completion, in tokens.
        """
        text = TextCaps.beside(*caps)
        task = cls(name, train, held_out, data, template or usual(reward), reward, caps[1], caps[0], text)
        return task if template is None else replace(task, chosen=frozenset(["template"]))

    def under(self, rule: str) -> Task:
        """The same rows under a rule of the same kind that rewards another form; asked for that, if by its rule."""
        template = self.template
        if template == usual(self.reward):
            template = usual(rule)
        return replace(self, reward=rule, template=template)

    def in_chat(self) -> Task:
        """The task as a new run asks instruct models: in the words with which they do best, where nobody chose a
        template, or a rule that goes with none of these; and with room for the steps that a box brings."""
        rule = rule_in(IN_CHAT, self.reward)
        if "template" in self.chosen or ("reward" in self.chosen and rule != self.reward):
            return self.with_room()
        if not rule or self.scorer is not None:
            return self
        return replace(self, template=TEMPLATES[IN_CHAT][rule], reward=rule).with_room()

    def with_room(self) -> Task:
        """The task with `BOXED_TOKENS` at least where it asks for a box, and no cap is settled."""
        if known_as(self.template) != IN_CHAT or "completion_tokens" in self.chosen:
            return self
        return replace(self, completion_tokens=max(self.completion_tokens, BOXED_TOKENS))

    def facts(self) -> dict[str, Any]:
        """What nodes of a run must agree on, see `config.run.run_for`."""
        names = ("data", "template", "reward", "prompt_tokens", "completion_tokens", "turns", "text")
        return {"task": self.name} | {name: getattr(self, name) for name in names}

    def asked(self, count: int | None) -> Sequence[Example]:
        """So many of those held out; None: all."""
        return [self.held_out[index] for index in spread(len(self.held_out), count)]

    def prompt(self, example: Example) -> str:
        """The text that a model is given; braces in a question stay what they are."""
        return self.template.replace("{question}", example.question)
