"""Whether an answer is worth the gold one in LaTeX; `judge_child` loads this where the rule is `math`.

It imports nothing of this package: stdlib and math-verify only. math-verify compares numbers by six decimals and
differences by 1e-15, so that all tiny numbers are equal; here two numbers are near one another by their own size, too.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

_NEAR = 1e-4
"""How far a decimal may be off, as a part of the larger number: 0.010309 is right for 1/97."""
_EXACT = 1e-12
"""The same where neither number is a decimal."""
_DIGITS = 20
_BRACKETS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    (r"\boxed{", "}"),
    (r"\fbox{", "}"),
    ("**", "**"),
    ("`", "`"),
)
_BRACKET = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\fbox")  # not \$, which is money
_AROUND = " \t\n\r\f\v.,;"
_MONEY = re.compile(r"[€£¥]\s*|\s*(?:[€£¥]|dollars?|euros?|USD|EUR)\Z")
_THOUSANDS = re.compile(r"(?<![\d.,\s}])[0-9]{1,3}(?:(?: |\\[,;: ]|~)[0-9]{3})+(?![\d,])")
_SPACED = re.compile(r" |\\[,;: ]|~")
_MIXED = re.compile(r"\A(?P<whole>-?[0-9]+) (?P<over>[0-9]+)/(?P<under>[0-9]+)\Z")


def load() -> Callable[[str, str, bool], bool]:
    """Import math-verify; return the function that decides whether an answer is worth the gold one."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()
    _compare_by_size()
    latex = [LatexExtractionConfig()]

    def verdict(gold: str, answer: str, loose: bool) -> bool:
        wanted = _bare(gold)
        bare = _bare(answer)
        if bare is not None and bare == wanted:
            return True
        right = parse(f"${wanted or gold}$", latex, parsing_timeout=None)
        if loose and verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None):
            return True
        given = []
        if bare is not None:
            given = parse(f"${bare}$", latex, parsing_timeout=None)
        return bool(verify(right, given, timeout_seconds=None))

    # Parsers and caches are built at first use: not within the time of somebody's answer.
    matrix = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    for text in (r"\frac{\sqrt{2}x^2}{3}+1", matrix, r"(3,\pi]", r"x=\text{yes}", "1,000"):
        verdict(text, f"{text}{{}}", False)
        verdict(text, f"The answer is ${text}$, 1/2.", True)
    return verdict


def _bare(answer: str) -> str | None:
    """One expression without brackets and full stops around it; None for several: an answer must not hedge."""
    answer = _stripped(answer)
    for opening, closing in _BRACKETS * 2:
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) >= len(opening + closing):
            answer = _stripped(answer[len(opening) : -len(closing)])
    if answer.count("$") == 1:
        answer = answer.removeprefix("$")  # money again
        if not answer.endswith(r"\$"):
            answer = answer.removesuffix("$").strip()
    if _BRACKET.search(answer) or not answer:
        return None
    answer = _MONEY.sub("", answer, count=1).replace("°", r"^\circ").replace("\N{MINUS SIGN}", "-")
    answer = _THOUSANDS.sub(lambda found: _SPACED.sub("", found[0]), answer)
    return _MIXED.sub(r"\g<whole>\\frac{\g<over>}{\g<under>}", answer)


def _stripped(answer: str) -> str:
    """Without spaces, an equals sign before it, and the full stop of a sentence; `.5` and a TeX space stay."""
    answer = answer.strip()
    shorter = answer.rstrip(_AROUND).removeprefix("=").lstrip()
    if shorter.endswith("\\"):
        return answer
    return shorter


def _compare_by_size() -> None:
    """Make math-verify's comparison of two numbers, wherever they stand in an expression, heed their size.

    It is the one place where it rounds. A version without it raises AttributeError, and no judge starts.
    """
    from math_verify import grader
    from sympy import Float, MatrixBase, MatrixExpr

    rounded = grader.sympy_numeric_eq

    def equal(gold: Any, given: Any, *precision: int) -> bool:
        if isinstance(gold, MatrixBase | MatrixExpr) or isinstance(given, MatrixBase | MatrixExpr):
            return bool(rounded(gold, given, *precision))  # it asks for each of their numbers
        numbers = (gold, given), (grader.get_pct_val(gold, gold), grader.get_pct_val(given, given))
        return any(rounded(*pair, *precision) and near(*pair) for pair in numbers)

    def near(gold: Any, given: Any) -> bool:
        """Whether the difference is small beside the numbers; True for what is no number."""
        if gold == given:
            return True
        sizes = [_size(value) for value in (gold - given, gold, given)]
        difference, *both = sizes
        if difference is None or None in both:
            return True
        share = _EXACT
        if gold.has(Float) or given.has(Float):
            share = _NEAR
        return bool(difference <= share * max(both))

    grader.sympy_numeric_eq = equal


def _size(value: Any) -> Any:
    """The absolute value, 0 where all digits of it cancel; None for what is no number."""
    number = abs(value).evalf(_DIGITS)
    if number.is_zero or (number.is_Float and number._prec == 1):
        return 0
    if number.is_Float:
        return number
    return None
