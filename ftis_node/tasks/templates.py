"""Templates: the text around a question, by name; a closed list.

A name stands for one text with each rule that it goes with. The form that earns is part of the rule's name and of
nothing else: `integer` earns in tags, `integer-boxed` in a box. So the name of a template says which rule it needs, and
no node reads a form out of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.errors import UsageError, did_you_mean
from ftis_node.tasks.rewards import FORMS, RULES, form_of, kind_of

if TYPE_CHECKING:
    from ftis_node.config.run import Run
    from ftis_node.tasks.task import Task

PLAIN = "{question}"
"""The question is the prompt."""

ASKED = "{question}\n"
"""The question is a message, which an instruct model is asked in a chat."""

REASONING = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process and then gives the answer. The reasoning process is enclosed in <think> "
    "</think> tags and the answer, a single integer, in <answer> </answer> tags, i.e. <think> reasoning process here "
    "</think> <answer> answer here </answer>.\nUser: {question}\nAssistant:"
)
"""Plain text for any base or instruct model: no chat template, no tag prefilled, no stop string."""

ANSWERED = REASONING.replace(", a single integer,", "")
"""The same for answers of any kind."""

PAPER = "paper"
"""The name of the template that the paper's form of an answer came with: for any model."""

IN_CHAT = "boxed"
"""The template in which a new run asks instruct models, where nobody chose one: the best of those that were measured on
100 rows (docs/tasks.md)."""

_WHAT = {
    "integer": "an integer",
    "math": "a mathematical expression in LaTeX",
    "tests": "Python code that defines the function asked for",
}
"""By the kind of answer: how a model is told of it."""

_INSTRUCTIONS = {
    "tags": "Think step by step between <think> and </think>. Then write only the final answer{what} between <answer> "
    "and </answer>.",
    "boxed": r"Please reason step by step, and put your final answer{what} within \boxed{}.",
}
"""By the form: what to ask for. None has a placeholder in the answer's place, for small models copy it."""

_STEPS = "There are 3 * 4 = 12 pens in the boxes. After 5 are given away, 12 - 5 = 7 are left."
_REPLIES = {
    "tags": f"<think>{_STEPS}</think> <answer>7</answer>",
    "boxed": rf"{_STEPS} The answer is \boxed{{7}}.",
}
_EXAMPLE = "Question: Tom has 3 boxes with 4 pens each and gives 5 pens away. How many pens are left?\nReply: "
_NUMBERS = ("integer", "math")  # kinds of answers that the example's is of


def _papers(rule: str) -> str:
    what = _WHAT.get(rule)
    if what is None:
        return ANSWERED
    if rule == "integer":
        return REASONING
    return REASONING.replace("a single integer", what)


def instruction(rule: str) -> str:
    """What a model is asked for under this rule."""
    what = _WHAT.get(kind_of(rule), "")
    if what:
        what = f", {what},"
    return _INSTRUCTIONS[form_of(rule)].replace("{what}", what)


def _shown(rule: str) -> str:
    """What form an answer shall have, a worked example, then the question."""
    return f"{instruction(rule)}\n\n{_EXAMPLE}{_REPLIES[form_of(rule)]}\n\nQuestion: {{question}}\nReply:"


def _of(form: str) -> list[str]:
    return [rule for rule in RULES if form_of(rule) == form]


TEMPLATES: Mapping[str, Mapping[str, str]] = {
    PAPER: {rule: _papers(rule) for rule in _of("tags")},
    "boxed": {rule: f"{{question}}\n\n{instruction(rule)}\n" for rule in _of("boxed")},
    **{f"{form}-example": {rule: _shown(rule) for rule in _of(form) if kind_of(rule) in _NUMBERS} for form in FORMS},
}
"""By the name, then by the rule: the text around a question."""


def usual(rule: str) -> str:
    """The text for a rule, where nobody chose one."""
    return TEMPLATES[PAPER].get(rule) or TEMPLATES[form_of(rule)][rule]


def known_as(text: str) -> str | None:
    """The name of this text; None: it has none."""
    return next((name for name, texts in TEMPLATES.items() if text in texts.values()), None)


def shown(text: str) -> str:
    """A template for people: its name, or its text in quotes and escaped, for it may be a stranger's."""
    return known_as(text) or f"{text!a}"


def rule_in(name: str, rule: str) -> str:
    """The rule for the same kind of answer that goes with the template of this name; empty if none does."""
    return next((one for one in TEMPLATES[name] if kind_of(one) == kind_of(rule)), "")


def contradiction(text: str, rule: str) -> str:
    """Why no answer to this text would earn under this rule; empty where it has no name, or asks for the right form."""
    name = known_as(text)
    if name is None or rule not in RULES:
        return ""
    asked, earns = (FORMS[form_of(one)].format("…") for one in (next(iter(TEMPLATES[name])), rule))
    if asked == earns:
        return ""
    return f"The template {name} asks for {asked}, and the rule {rule} rewards {earns}."


def chosen(wanted: str, rule: str, *, fixed: bool) -> tuple[str, str]:
    """The text of a template that a person named, or wrote, and the rule that goes with it.

    Args:
        rule: of the task. fixed: another form of it will not do, for it was named, too.

    Raises:
        UsageError: there is no such template, it is none for such answers, or the rule rewards another form.
    """
    if wanted.count("{question}") == 1:
        text = wanted
        needed = rule
    else:
        texts = TEMPLATES.get(wanted)
        if texts is None:
            near = did_you_mean(wanted[:40], TEMPLATES)
            raise UsageError(
                f"There is no template {wanted[:40]!a}.",
                f"{near}Name one of {', '.join(TEMPLATES)}, or write a text with {{question}} in it, once.",
            )
        needed = rule_in(wanted, rule)
        if not needed:
            raise UsageError(
                f"The template {wanted} does not go with the rule {rule[:40]!a}.",
                "Write a text with {question} in it, or name another template.",
            )
        text = texts[needed]
    why = contradiction(text, rule)
    if why and (fixed or text is wanted):
        raise UsageError(why, "Leave out --reward, or name the template and the rule that belong together.")
    return text, needed


def as_trained(task: Task, run: Run | None, reward: str | None, template: str | None) -> Task:
    """The task in the words in which a model of this run was asked in training, judged by the form that earned there,
    with as much room for an answer.

    The task keeps its words and rule where those of the run do not go with its answers, or where its rows are whole
    prompts; its room, too, unless it is the run's own task.

    Args:
        run: None: no run is known. reward, template: what a person named, which counts more.
    """
    if run is None:
        return task
    as_long = replace(task, completion_tokens=run.completion_tokens, chosen=task.chosen | {"completion_tokens"})
    if task.name == run.task:
        task = as_long
    if template is not None or PLAIN in (task.template, run.template):
        return task
    named = known_as(run.template)
    rule = ""
    text = run.template
    if task.scorer is not None and task.name == run.task:
        rule = task.reward
    elif named is not None:
        rule = rule_in(named, task.reward)
        text = TEMPLATES[named].get(rule, "")
    elif kind_of(run.reward) == kind_of(task.reward):
        rule = run.reward
    if not rule or reward not in (None, rule):
        return task
    return replace(as_long, template=text, reward=rule)
