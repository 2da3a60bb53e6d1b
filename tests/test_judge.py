"""Mathematics from strangers: judged in a process that nothing can make slow, deaf or dangerous to its parent."""

import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ftis_node.errors import UsageError, UserError
from ftis_node.tasks import judge, load_evaluation, load_task, math500, score, scoring, verifiers_child
from ftis_node.tasks.judge import ANSWER_CHARACTERS, Judge
from ftis_node.tasks.rewards import JUDGED_RULES, PURE_RULES, RULES

MATH500 = Path(__file__).resolve().parents[2] / "shared" / "data" / "math500_test.jsonl"
real_data = pytest.mark.skipif(not MATH500.exists(), reason="the MATH-500 file is not on this machine")

# Liveness, not speed: an answer has one second, a loaded machine some more.
BOUND = 20.0


@pytest.fixture(scope="module")
def patient() -> Iterator[Judge]:
    """Does not mind a loaded machine."""
    with Judge(seconds=30.0) as one:
        yield one


# The rule


@real_data
@pytest.mark.parametrize("of", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_every_gold_answer_is_worth_itself_and_not_that_of_another_problem(patient, of):
    every = [example.answer for example in load_evaluation("math500", data=MATH500).held_out]
    golds = every[::of]
    others = sorted({*every})[:: max(4, of)]
    scores = [patient(f"<think>so</think><answer>{gold}</answer>", gold) for gold in golds]
    assert sum(s.reward for s in scores) == len(scores) == 500 // of
    assert all(s.formatted and s.lenient for s in scores)
    assert not [pair for pair in itertools.pairwise(others) if patient.same(*pair)]
    assert patient.started == 1


HALF = r"\frac{1}{2}"
TAGGED = "<think></think>\n<answer>{}</answer>"
RIGHT = (
    (HALF, "1/2"),
    (HALF, "$0.5$"),
    (HALF, r" \boxed{\dfrac12} "),
    (r"2\sqrt{2}", r"\(\sqrt{8}\)"),
    (r"\text{Evelyn}", "Evelyn"),
    ("x+1", "1+x"),
    ("5", "x = 5"),
    ("10,080", "10080"),
    (r"\$36", "$36"),
    ("(3,4]", r"\left( 3, 4 \right]"),
    *(
        ("18", said)
        for said in ("18.", "$18$.", r"\boxed{18}.", r"\boxed{18.}", "$18.$", "**18**.", "= 18", "18 $", "€18")
    ),
    (HALF, r"\frac{1}{2}."),
    (HALF, ".5"),
    ("$18$.", "18"),
    ("Evelyn", "Evelyn."),
    ("18", "18 dollars"),
    ("90", "90°"),
    ("1234", r"1\,234"),
    ("1 234", "1,234"),
    ("3.5", "3 1/2"),
    (r"12.5\%", "12.5"),
    ("9^{9^9}", "$9^{9^9}$"),
    ("1/3", "0.333333"),
    ("1/97", "0.010309"),
    ("0.0000012", r"1.2 \cdot 10^{-6}"),
    ("0", r"\sqrt{2}-\sqrt{2}"),
)
HEDGED = (
    ("12", "13"),
    ("12", "12 or 13"),
    ("12", "$12$ or $13$"),
    ("12", "12, 13"),
    ("x", "y"),
    ("12", "12. 13."),
)
TINY = (
    ("1/2^{99}", "1/2^{98}"),
    ("0.0000012", "0.0000014"),
    ("(0.0000012,1)", "(0.0000014,1)"),
    ("e^{-50}", "e^{-51}"),
    (r"\begin{pmatrix}0.0000012\\1\end{pmatrix}", r"\begin{pmatrix}0.0000014\\1\end{pmatrix}"),
    ("1.5", "3 1/2"),
    (r"\frac{0}{3}", r"\frac{1}{10^{20}}"),
    (r"10^{-8}\%", r"10^{-9}\%"),
    ("234", "1 234"),
    ("i/10^{20}", "i/10^{21}"),
)
ANYWHERE = (
    r"So it is \boxed{\frac{1}{2}}.",
    r"First \boxed{7}, no: \boxed{\frac{1}{2}}, I think.",
    "<answer>1/2",
    r"\boxed{3}. Well, <answer>0.5</answer> it is",
    "<think>x</think><answer>1/2</answer> Done.",
    r"The answer is $\frac{1}{2}$.",
)
EMPTY_TOO_LONG_OR_OPEN = (
    "",
    " ",
    "<think></think><answer></answer>",
    "<think></think><answer> </answer>",
    r"\boxed{1/2",
    f"<think></think><answer>{' ' * ANSWER_CHARACTERS}1/2</answer>",
    r"\boxed{\frac{1}{2}} or \boxed{3}",
    f"<answer>{'1' * 1_000_000}</answer>",
    "\\boxed{" * 100_000,
)


@pytest.mark.parametrize(
    ("gold", "text", "reward", "formatted", "lenient"),
    [
        *((gold, TAGGED.format(answer), 1.0, True, True) for gold, answer in RIGHT),
        *((gold, TAGGED.format(answer), 0.0, True, False) for gold, answer in (*HEDGED, *TINY)),
        *((HALF, text, 0.0, False, True) for text in ANYWHERE),
        *((HALF, text, 0.0, False, False) for text in EMPTY_TOO_LONG_OR_OPEN),
    ],
)
def test_what_means_the_same_is_right_and_the_last_answer_anywhere_is_enough_to_be_lenient(
    patient, gold, text, reward, formatted, lenient
):
    verdict = patient(text, gold)
    assert verdict.reward == reward
    assert verdict.formatted == formatted
    assert verdict.lenient == lenient


def test_rules_that_need_a_process_are_not_scored_without_one():
    assert (*PURE_RULES, *JUDGED_RULES) == RULES
    for rule in JUDGED_RULES:
        with pytest.raises(UsageError, match="process of its own"):
            score(rule, "", "")
    with pytest.raises(UsageError, match="no reward rule"), scoring("eval"):
        pass


def test_without_math_verify_a_person_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(judge.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught, scoring("math"):
        pass
    assert "[math]" in caught.value.fix


# Attacks

ATTACKS = {
    "tower": "9^{9^9}",
    "factorials": "((9!)!)!",
    "binomial": r"\binom{10^8}{5 \cdot 10^7}",
    "sum": r"\sum_{k=1}^{10^9} \frac{1}{k^k}",
    "integral": r"\int_0^{1} e^{x^{x^{x}}} \sin(x^{9}) dx",
    "divisor": r"\gcd(9^{9^8}, 6^{9^8})",
    "expansion": "(a+b+c+d+e+f+g+h)^{60}-(a-b)^{60}",
    "sine": r"\sin(10^{10^{10}})",
    "nested braces": "{" * 140 + "1" + "}" * 140,
    "nested roots": r"\sqrt{" * 40 + "2" + "}" * 40,
    "matrix": r"\begin{pmatrix}" + r"\\".join("&".join(["x^9"] * 8) for _ in range(7)) + r"\end{pmatrix}^{99}",
    "digits": "9" * ANSWER_CHARACTERS,
    "exponent": "1e999999999",
    "unicode": "\u0661\u2070\ud800\U0001d7d9\u202e" * 50,
    "NUL": "\x00" * 100 + "12",
    "line breaks": "\n\r\u2028" * 90,
    "backslashes": "\\" * 299,
    "quotes": '"]\n["12", "12", false]\n',
    "code": "__import__('os').kill(__import__('os').getppid(), 9)",
    "long": "1+" * 500_000 + "1",
}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Judge]:
    """Waits for a moment only, for twelve full ones are long in a test."""
    with Judge(seconds=0.15) as one:
        yield one


@pytest.mark.parametrize("answer", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_scores_nothing_and_stalls_nobody(hasty, answer):
    began = time.monotonic()
    strict = hasty(f"<think></think><answer>{answer}</answer>", "12")
    assert time.monotonic() - began < BOUND
    assert strict.reward == 0.0
    assert strict.lenient is False


def test_memory_is_limited_and_a_parent_with_much_of_it_is_no_reason_to_start_anew(plain):
    held = bytearray(b"x") * (600 << 20)  # more than half of what the process may have
    with Judge(seconds=BOUND) as one:
        assert all(one.same(str(number), str(number)) for number in range(5))
        assert one.started == 1
        child = psutil.Process(one.process.pid)
        assert child.memory_info().vms < 1 << 29
        assert child.rlimit(psutil.RLIMIT_AS) == (1 << 30, 1 << 30)
        assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    del held


def test_the_verdict_of_an_interrupted_question_is_not_taken_for_the_next_one_s():
    def interrupted(*_):
        raise KeyboardInterrupt

    with Judge("regex", seconds=BOUND) as one:
        assert one.same("a", "a")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(socket.socket, "recv", interrupted)
            one.same("a", "a")
        assert not one.same("a", "b")
        assert one.started == 2


def test_a_process_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit(1)")
    monkeypatch.setattr("ftis_node.tasks.judge._CHILD", broken)
    with Judge() as one, pytest.raises(UserError, match="did not start"):
        one.same("1", "1")


def test_a_reply_that_comes_byte_by_byte_is_awaited_no_longer(monkeypatch, tmp_path):
    (tmp_path / "child.py").write_text("import os, time\nos.write(0, b'R')\nwhile os.write(0, b' '): time.sleep(0.01)")
    monkeypatch.setattr("ftis_node.tasks.judge._CHILD", tmp_path / "child.py")
    with Judge(seconds=0.1) as one:
        assert not one.same("1", "1")


def test_an_environments_reward_that_fails_is_a_verdict(monkeypatch):
    """No answer at all would count as a slow one, after three of which the rest of a group is wrong unasked."""
    monkeypatch.setattr(verifiers_child, "load", lambda name: SimpleNamespace(tasks=[SimpleNamespace(hash="h")]))
    jail = SimpleNamespace(said=lambda speak, seconds: "")
    assert verifiers_child.judge(jail, 1.0, "digits")('[0, "h"]', '["no number"]', False) == ""


def test_it_holds_no_file_or_secret_of_its_parent(monkeypatch, tmp_path, plain):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with (tmp_path / "key").open("w") as file, Judge() as one:
        os.set_inheritable(file.fileno(), True)
        assert one.same("1", "1")
        child = psutil.Process(one.process.pid)
        held = [os.readlink(link) for link in Path(f"/proc/{one.process.pid}/fd").iterdir()]
        assert str(tmp_path / "key") not in held
        assert all(name.startswith(("socket:", "/dev/null")) for name in held)
        assert "HF_TOKEN" not in child.environ()


@pytest.mark.parametrize("answer", ["1", "a" * 60], ids=["idle", "busy"])
def test_it_ends_when_its_parent_is_killed(answer):
    script = f"""
        from ftis_node.tasks.judge import Judge
        one = Judge("regex", seconds=0.5)
        one.same("1", "1")
        print(one.process.pid, flush=True)
        while True:
            one.same("1|(a+)+b", {answer!r})
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=BOUND)


# Regular expressions


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        *((r"\d{4}-\d\d", *said) for said in (("2024-05", True), (" 2024-05\n", True), ("2024-05-06", False))),
        (r"a|b", "ab", False),
        (r"(?i)yes", "YES", True),
        (r"caf\u00e9", "cafe\u0301", True),
        (r".*", "", False),
        (r"(", "(", False),
        (r".", "\ud800", True),
    ],
)
def test_the_whole_answer_has_to_match(gold, answer, right, monkeypatch):
    monkeypatch.setitem(judge.SECONDS, "regex", BOUND)
    with scoring("regex") as rate:
        verdict = rate(f"<think></think><answer>{answer}</answer>", gold)
    assert verdict.reward == float(right)
    assert verdict.lenient == right


@pytest.mark.parametrize("answer", ["a" * 1_000_000, "\u0301\u0323" * 400_000])
def test_an_answer_too_long_to_match_is_not_asked_about(answer):
    with Judge("regex") as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_start", None)
        assert not one.same(".*", answer)


# The task


@real_data
def test_math500_is_for_evaluation_only():
    task = load_evaluation("math500", data=MATH500)
    assert len(task.train) == 0
    assert len(task.held_out) == 500
    assert task.reward == "math"
    assert task.data == math500.TEST.sha256
    assert MATH500.stat().st_size == math500.TEST.size
    prompt = task.prompt(task.held_out[0])
    assert "Convert the point" in prompt
    assert "integer" not in prompt
    assert "<answer>" in prompt
    with pytest.raises(UsageError, match="nothing to train on") as caught:
        load_task("math500", data=MATH500)
    assert "ftis-node eval" in caught.value.fix


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"question": "1+1", "answer": "2"}, "line 1, has no text in `problem`"),
        ({"problem": "1+1"}, "line 1, has no `answer`"),
        ({"problem": "1+1", "answer": 2}, "a text of 1 to 300 characters"),
        ({"problem": "1+1", "answer": ""}, "a text of 1 to 300 characters"),
        ({"problem": "1+1", "answer": "2" * 301}, "a text of 1 to 300 characters"),
    ],
)
def test_a_file_of_problems_that_cannot_be_used_says_where(tmp_path, row, what):
    file = tmp_path / "m.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(UsageError, match=what):
        load_evaluation("math500", data=file)


def test_evaluation_needs_no_training_file(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(30)))
    task = load_evaluation("gsm8k", data=file)
    assert len(task.train) == 0
    assert len(task.held_out) == 30
    with pytest.raises(UsageError, match="math500"):
        load_evaluation("chess")
