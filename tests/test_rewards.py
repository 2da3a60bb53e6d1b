"""Scores: exact on good text, unmoved by hostile text."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.tasks import score


def scored_at_once(rule, text, gold):
    """Within a second of this process's own time, however busy the machine is."""
    started = time.process_time()
    verdict = score(rule, text, gold)
    assert time.process_time() - started < 1.0
    return verdict


GOOD = "<think>15 12</think><answer>12</answer>"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (GOOD, "12"),
        (f"\n  {GOOD}\t\n", "12"),
        ("<think></think>\n<answer> 12 </answer>", "12"),
        ("<think>a\nb</think> <answer>+12</answer>", "12"),
        ("<think>x</think><answer>-1,234</answer>", "-1234"),
        ("<think>x</think><answer>1234</answer>", "1,234"),
        ("<think>x</think><answer>007</answer>", "7"),
        ("<think>x</think><answer>1,234,567</answer>", "1234567"),
    ],
)
def test_right_format_and_right_integer_earn_the_reward(text, gold):
    verdict = score("integer", text, gold)
    assert verdict.reward == 1.0
    assert verdict.formatted is True
    assert verdict.lenient is True


UNFORMATTED = [
    "",
    "12",
    "<answer>12</answer>",
    "<think>x</think>12",
    "<think>x</think><answer>12",
    f"{GOOD} Done.",
    "<think>x<answer>12</answer>",
    "<answer>12</answer><think>x</think>",
    f"Well: {GOOD}",
    f"{GOOD}{GOOD}",
    "<think><answer>12</answer></think>",
    "<think>x<answer>12</answer></think>",
    "<think>x</think>so<answer>12</answer>",
    "<think>x</think><think>y</think><answer>12</answer>",
    "<think><think>x</think><answer>12</answer>",
    "<think>x</think><answer>13</answer><answer>12</answer>",
    "<THINK>x</THINK><ANSWER>12</ANSWER>",
    "\ud800<think>x</think><answer>12</answer>",
]


NO_INTEGER = ["12.0", "$12", "1 2", "1_2", "0xc", "2+10", "1,2", "--12", "", "__import__('os').abort()"]
FOREIGN_DIGITS = ["١٢", "\uff11\uff12", "\u00a012"]
TOO_LONG = [f"{' ' * 39}12", f"{'0' * 39}12"]


UNFORMATTED += [f"<think>x</think><answer>{text}</answer>" for text in (*NO_INTEGER, *FOREIGN_DIGITS, *TOO_LONG)]


@pytest.mark.parametrize("text", UNFORMATTED)
def test_anything_else_earns_nothing_and_is_not_formatted(text):
    verdict = score("integer", text, "12")
    assert verdict.reward == 0.0
    assert not verdict.formatted


LAST = {
    "I think it is 12.": "12",
    "12 or 13, no: $1,234!": "1234",
    "so -7": "-7",
    "8-3=5, 10-7": "7",
    "1,2,3": "3",
    "\\boxed{42}": "42",
    "18.00 dollars": "18",
    "<answer>12</answer": "12",
}


@pytest.mark.parametrize(("text", "gold"), LAST.items())
def test_the_last_integer_anywhere_is_enough_to_be_lenient(text, gold):
    verdict = score("integer", text, gold)
    assert verdict.reward == 0.0
    assert verdict.formatted is False
    assert verdict.lenient is True


@pytest.mark.parametrize("text", ["12, then 13", "no number", "12.5", "9" * 41, "12 / 0.5"])
def test_another_last_number_is_not_lenient(text):
    assert not score("integer", text, "12").lenient
    assert not score("integer", text, "5").lenient


@pytest.mark.parametrize("gold", ["", "x", "1.5", "9" * 5000, "nan"])
def test_a_gold_that_is_no_integer_is_never_matched(gold):
    verdict = score("integer", f"<think></think><answer>{gold[:40]}</answer>", gold)
    assert verdict.reward == 0.0
    assert not verdict.lenient


@pytest.mark.parametrize(
    "unit",
    ["9", "1,", "1,234", "-", "+-", " ", "\n", "<think>", "</think>", "<answer>", "</answer>", "<", "12.", "0.0", GOOD],
)
@pytest.mark.parametrize("frame", ["{}", "<think>{}</think><answer>12</answer>", "<think></think><answer>{}</answer>"])
def test_a_megabyte_of_hostile_text_is_scored_at_once(unit, frame):
    scored_at_once("integer", frame.replace("{}", unit * (1_000_000 // len(unit))), "12")


PARTS = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "1", "12", ",", "-", "+", " ", "\n", ".", "x"])
TEXTS = st.one_of(
    st.text(st.characters()),
    st.lists(PARTS, max_size=12).map("".join),
    st.lists(PARTS, max_size=5).map(lambda inner: f"<think></think><answer>{''.join(inner)}</answer>"),
)


@given(TEXTS, st.one_of(st.integers().map(str), TEXTS))
def test_no_text_raises_and_a_reward_means_the_integer(text, gold):
    verdict = score("integer", text, gold)
    assert verdict.reward in (0.0, 1.0)
    if verdict.reward:
        answer = re.findall(r"<answer>(.*)</answer>", text, re.DOTALL)
        assert len(answer) == 1
        assert verdict.formatted
        assert verdict.lenient
        assert int(answer[0].replace(",", "")) == int(gold.replace(",", ""))


# The rule `exact`


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        *((answer, "Paris", True) for answer in ("Paris", "\n Paris\t")),
        *((answer, "Paris", False) for answer in ("paris", "Paris.", "")),
        ("cafe\u0301", "caf\u00e9", True),
        ("two\nlines", "two\nlines", True),
        ("x" * 4096, "x" * 4096, True),
        ("x" * 4097, "x" * 4097, False),
    ],
)
def test_exact_wants_the_very_text_in_the_right_format(answer, gold, right):
    verdict = score("exact", f"<think>so</think><answer>{answer}</answer>", gold)
    assert verdict.reward == float(right)
    assert verdict.lenient == right
    assert verdict.formatted == bool(0 < len(answer.strip()) <= 4096)


@pytest.mark.parametrize("text", ["It is\nParis", "<answer>Rome</answer><answer>Paris", "x <answer> Paris </answer> y"])
def test_the_last_answer_is_enough_to_be_lenient_about_a_text(text):
    verdict = score("exact", text, "Paris")
    assert verdict.reward == 0.0
    assert verdict.formatted is False
    assert verdict.lenient is True
    assert not score("exact", text, "Rome").lenient
