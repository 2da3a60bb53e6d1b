"""Answers without skill: rules that pay for them are refused before a run begins, and honest ones are not."""

import importlib.util
import json
from pathlib import Path

import pytest

from ftis_node.errors import UsageError
from ftis_node.tasks import load_task, trial
from ftis_node.tasks.jail import can_lock_in
from ftis_node.tasks.trial import ROWS, refuse_broken, refuse_unskilled, unskilled

RULES = """
import math, os, signal, time
from concurrent.futures import ThreadPoolExecutor
from ftis_node.tasks import Score, make_task

def score(right): return Score(float(right), True, bool(right))
def last(text): return text.rpartition("<answer>")[2].removesuffix("</answer>")

def anything(text, gold): return score(True)
def contained(text, gold): return score(gold in text)
def far(text, gold):
    try: return score(not abs(float(text) - float(gold)) > 1e-3)
    except ValueError: return score(False)
def truthy(text, gold): return score(bool(last(text)) == bool(gold))
def boxed(text, gold): return score(text.startswith("\\\\boxed{") and gold.startswith(text[7:-1]))
def equal(text, gold): return score(last(text) == gold)
def half(text, gold): return Score(1.0 if last(text) == gold else 0.5, True, False)
def slow(text, gold): time.sleep(600)

NUMBERS = [(f"{n} + {n}", str(2 * n)) for n in range(40)]
LABELS = [(f"Is {n} {'small' if n else 'none'}?", "yes" if n % 20 else "no") for n in range(40)]
def task(rows, reward, **more): return lambda: make_task(rows, reward=reward, **more)
pays_anything, pays_all_numbers, pays_nan = task(NUMBERS, anything), task(NUMBERS, contained), task(NUMBERS, far)
pays_words, pays_nothing = task(LABELS, truthy), task(NUMBERS, boxed)
labels, hangs = task(LABELS, equal), task(NUMBERS, slow, reward_seconds=0.2)
echo = task([(f"Say {n}", str(n)) for n in range(100, 140)], equal)
def threaded(text, gold):
    with ThreadPoolExecutor() as pool: return pool.submit(signal.signal, signal.SIGALRM, signal.SIG_DFL).result()
def ended(text, gold):
    with open("ended.txt", "a") as calls: calls.write("x")
    os.kill(os.getpid(), 9)
BROKEN = {
    "threads": threaded, "signals": ended, "bool": lambda text, gold: True,
    "nan": lambda text, gold: Score(math.nan, True, True),
    "some": lambda text, gold: score(float(last(text)) == float(gold)),
}
for name, reward in BROKEN.items():
    def judge(text, gold, reward=reward): return reward(text, gold)
    globals()["broken_" + name] = task(NUMBERS, judge)
shaped, style = task(NUMBERS, half), task([(f"Write {n}", "") for n in range(40)], anything)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lucky.py").write_text(RULES)
    return tmp_path


@pytest.mark.parametrize("name", ["anything", "all_numbers", "nan", "words", "nothing"])
def test_row_55_a_reward_that_pays_for_no_skill_is_refused(name, cli, folder):
    line = ["--task", f"lucky:pays_{name}", "--any-tokenizer", "-o", str(folder / "run.toml")]
    code, _, err = cli("run", "new", *line)
    assert code == 2 and "on 16 of 16 rows whose right answers differ" in err, err
    assert not (folder / "run.toml").exists()


@pytest.mark.parametrize("name", ["labels", "echo", "shaped", "style", "hangs"])
def test_row_55_an_honest_reward_passes(name):
    assert unskilled(load_task(f"lucky:{name}", code=True)) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("threads", "signal only works in main thread"),
        ("signals", "or ended its process"),
        ("bool", "it gave bool, not a Score"),
        ("nan", "its reward is nan"),
        ("some", ""),
    ],
)
def test_a_reward_function_that_gives_no_verdict_is_told_before_a_run(name, why, cli, folder, monkeypatch):
    monkeypatch.setenv("FTIS_MODEL", "tiny-bpe")
    code, out, _ = cli("task", "check", f"lucky:broken_{name}")
    assert code == 1
    if name == "signals":
        assert len((folder / "ended.txt").read_text()) <= 3, "each takes a process, and a slow one seconds"
    assert "error: The reward function of lucky:broken_" in out
    assert "Mend it: it returns a Score" in out
    assert (why or "could not convert string to float") in out
    task = load_task(f"lucky:broken_{name}", code=True)
    if not why:
        refuse_broken(task)
    else:
        with pytest.raises(UsageError, match="no verdict on any answer"):
            refuse_broken(task)


GOLDS = {
    "integer": range(20),
    "exact": ["yes", "no", "no", "no"] * 5,
    "math": [rf"\\frac{{{n}}}{{7}}" for n in range(1, 11)],  # as few as will do
    "regex": [rf"(?i)no\\.? {n}" for n in range(20)],
    "tests": [f"assert add({n}, 1) == {n + 1}" for n in range(20)],
}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", GOLDS)
def test_row_55_the_built_in_rules_pay_for_skill_only(rule, every, folder, monkeypatch):
    """every: of the answers one in so many is tried."""
    monkeypatch.setattr(trial, "_ANSWERS", trial._ANSWERS[::every])
    if (rule == "tests" and not can_lock_in()) or (rule == "math" and not importlib.util.find_spec("math_verify")):
        pytest.skip("this machine cannot judge by that rule")
    rows = [json.dumps({"question": f"What is number {n}?", "answer": gold}) for n, gold in enumerate(GOLDS[rule])]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    task = load_task("rows.jsonl", reward=rule)
    assert len(task.train) >= ROWS // 2
    assert unskilled(task) is None


def test_row_55_a_pattern_that_matches_everything_is_refused(folder):
    rows = [json.dumps({"question": f"What is number {n}?", "answer": f"(?s).*|{n}"}) for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(UsageError, match="rewards"):
        refuse_unskilled(load_task("rows.jsonl", reward="regex"))


def test_trying_ends_in_time_and_says_so(caplog):
    caplog.set_level("INFO")
    task = load_task("lucky:hangs", code=True)
    assert unskilled(task) is None
    assert "Trying answers without skill on lucky:hangs" in caplog.text
    assert unskilled(task, seconds=0.0) is None
    assert "Not all answers without skill were tried" in caplog.text
