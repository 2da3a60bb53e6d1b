"""Tasks of one's own: rules of a JSONL file, Python functions, what a run says of them and what it may not ask for."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from ftis_node.config.run import CODE, check_fit, load_run_file
from ftis_node.errors import UsageError, UserError
from ftis_node.packet import Completion
from ftis_node.preflight.task_rows import checked
from ftis_node.tasks import Score, check_named, judge, load_evaluation, load_task, make_task, score, scoring, source_of
from ftis_node.tasks.judge import Asked
from ftis_node.tasks.own import Guarded
from ftis_node.worker.engine import Engine
from tests.support.cli import printed
from tests.support.small_models import arithmetic_settings, opened_engine, packed, tiny_tokenizer
from tests.support.swarm import make_run

DOCS = Path(__file__).resolve().parents[1] / "docs" / "tasks.md"
PLAIN = """
from ftis_node.tasks import Score, make_task

def judge(text, answer):
    return Score(0.5 if answer in text else 0.0, True, answer in text)

def build():
    return make_task([(f"{i}+{i}=", str(2 * i)) for i in range(20)], reward=judge, template="{question}",
                     completion_tokens=16, prompt_tokens=16)

def ruled():
    return make_task([(f"say {i}", f"no. {i}") for i in range(20)], reward="exact")

def broken():
    raise ValueError("no data today")

def wrong():
    return 3

def leaving():
    raise SystemExit("no data today")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A person's current directory, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    (tmp_path / "mine.py").write_text(PLAIN)
    (tmp_path / "broken_module.py").write_text("import nothing_of_that_name")
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def jsonl(path, *answers, field="question"):
    path.write_text("".join(json.dumps({field: f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))
    return path


# Rules of a JSONL file


@pytest.mark.parametrize(
    ("rule", "answers", "words"),
    [
        ("integer", (1, "2", 3), "a single integer"),
        ("exact", ("Paris", " cafe\u0301 ", 3), "and the answer in <answer>"),
        ("regex", (r"\d+", "(?i)yes", "a|b"), "and the answer in <answer>"),
        ("math", (r"\frac{1}{2}", "x+1", "3"), "a mathematical expression in LaTeX"),
    ],
)
def test_a_file_has_the_rule_that_is_named(tmp_path, rule, answers, words):
    file = jsonl(tmp_path / "t.jsonl", *answers)
    task = load_task(str(file), reward=rule)
    assert task.reward == rule
    assert words in task.template
    assert load_task(str(file), reward=rule).data == task.data
    assert load_evaluation(str(file), reward=rule).reward == rule
    if rule == "exact":
        assert {e.answer for e in (*task.train, *task.held_out)} == {"Paris", "caf\u00e9", "3"}
    prompts = load_task(str(jsonl(tmp_path / "p.jsonl", *answers, field="prompt")), reward=rule)
    assert prompts.template == "{question}"


@pytest.mark.parametrize(
    ("rule", "answer", "what"),
    [
        *(("exact", answer, "a text of 1 to 4096") for answer in (" ", "x" * 4097, True)),
        *(("regex", answer, "a regular expression") for answer in ("(", "x" * 1001, 3)),
        ("math", 3, "a text of 1 to 300"),
    ],
)
def test_an_answer_that_the_rule_cannot_use_says_where(tmp_path, rule, answer, what):
    with pytest.raises(UsageError, match=what):
        load_task(str(jsonl(tmp_path / "t.jsonl", answer)), reward=rule)


def test_other_tasks_keep_their_rule():
    with pytest.raises(UsageError, match="has the reward rule 'integer', not 'exact'"):
        load_task("arithmetic", reward="exact")
    assert load_task("arithmetic", reward="integer") == load_task("arithmetic")


def test_run_new_writes_the_rule_and_the_command_line_names_it(tmp_path):
    file = jsonl(tmp_path / "t.jsonl", "a", "b", "c")
    run = tmp_path / "run.toml"
    printed("run", "new", "--task", file, "--model", "tiny-a", "--reward", "exact", "-o", run)
    assert load_run_file(run).run.reward == "exact"


# The compute process


def engine_on(task, **load):
    return opened_engine(task, load=load, run={"prompt_tokens": 1000, "group": 2}, eval_prompts=2)


def group(engine, *texts):
    ids = [tiny_tokenizer()(text, return_tensors="np")["input_ids"][0].astype("uint32") for text in texts]
    return packed(engine, [Completion(i, (i * 0.0).astype("float32"), True) for i in ids])


def test_each_thread_of_an_engine_has_its_own_judging_process(tmp_path, monkeypatch):
    monkeypatch.setitem(judge.SECONDS, "regex", 30.0)  # a loaded machine may take its time
    before = set(psutil.Process().children())
    engine = engine_on(str(jsonl(tmp_path / "t.jsonl", *[r"\d"] * 5, field="prompt")), reward="regex")
    assert set(psutil.Process().children()) == before, "none is started before the first answer"
    foreign = group(engine, "<think></think><answer>7</answer>", "<think></think><answer>77</answer>")
    found = []
    side = threading.Thread(target=lambda: found.extend(engine.score(0, foreign) for _ in range(20)))
    side.start()
    for _ in range(3):
        engine.generate([0, 1])
        engine.evaluate()
    side.join()
    assert found == [[1.0, 0.0]] * 20
    assert len(set(psutil.Process().children()) - before) == 2
    engine.close()
    assert set(psutil.Process().children()) <= before


# Python functions


def test_a_function_s_task_is_named_by_it_and_has_digests(folder):
    task = load_task("mine:build", code=True)
    assert task.name == "mine:build"
    assert len(task.train) + len(task.held_out) == 20
    assert re.fullmatch(CODE + "[0-9a-f]{40}", task.reward)
    with scoring(task.reward, task.scorer) as rate:
        assert rate("so 4", "4") == Score(0.5, True, True)
    ruled = load_task("mine:ruled", code=True)
    assert ruled.reward == "exact"
    assert ruled.scorer is None
    assert ruled.data != task.data
    assert load_evaluation("mine:ruled", code=True).held_out == ruled.held_out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nowhere:build", "no Python module nowhere"),
        ("mine:nothing", "has no function nothing"),
        ("mine:broken", "failed: ValueError: no data today"),
        ("mine:wrong", "returns int, not a Task"),
        ("mine:leaving", "failed: SystemExit: no data today"),
        ("broken_module:build", "cannot be imported: ModuleNotFoundError"),
        ("_mine:build", "cannot be a run's name"),
        ("mine:build()", "cannot be a run's name"),
        (f"mine:{'x' * 64}", "cannot be a run's name"),
    ],
)
def test_code_that_cannot_be_used_is_told(folder, name, what):
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        load_task(name, code=True)
    assert caught.value.fix


def test_code_that_nobody_here_named_is_not_imported(folder):
    (folder / "evil.py").write_text("open('ran', 'w')")
    for load in (load_task, load_evaluation):
        with pytest.raises(UsageError, match="only if the owner"):
            load("evil:build")
    with pytest.raises(UsageError, match="only if the owner"):
        Engine().load(arithmetic_settings(), "evil:build")
    assert not (folder / "ran").exists()
    assert "evil" not in sys.modules


ODD = """
import os, re, sys, time
from ftis_node.tasks import Score, make_task

def judge(text, answer):
    print("noise on stdout")
    if text == "exit":
        sys.exit(3)
    if text == "fail":
        raise ZeroDivisionError("by zero")
    if text == "loop":
        while True:
            pass
    if text == "backtrack":  # holds the GIL
        re.match("(a|aa)+$", "a" * 100 + "b")
    if text == "die":
        os._exit(1)
    return {"float": 1.0, "nan": Score(float("nan"), True, True), "two": Score(2.0, True, True)}.get(
        text, Score(1, True, answer == "gold")
    )

def build():
    return make_task([(f"{i}", f"{i}") for i in range(20)], reward=judge, reward_seconds=0.5)

def gone():
    if os.environ.get("GONE"):
        sys.exit("no data today")
    return build()
"""


@pytest.fixture
def odd(folder) -> Iterator[Guarded]:
    """A reward function that does what it is told to."""
    (folder / "odd.py").write_text(ODD)
    with scoring("", load_task("odd:build", code=True).scorer) as guarded:
        assert isinstance(guarded, Guarded)
        yield guarded
        process = guarded.process
    assert process is None or not psutil.pid_exists(process.pid), "it ends with its context"


class Child(NamedTuple):
    """A process that judges, with a right answer and one that hangs."""

    asked: Asked
    right: Callable[[], bool]
    hanging: Callable[[], bool]


@pytest.fixture(params=["regex", "function"])
def child(request) -> Iterator[Child]:
    if request.param == "function":
        odd = request.getfixturevalue("odd")
        yield Child(odd, lambda: odd("good", "gold").lenient, lambda: odd("backtrack", "").lenient)
        return
    with judge.Judge("regex") as one:
        yield Child(one, lambda: one.same("(a+)+b", "aab"), lambda: one.same("(a+)+b", "a" * 60))


def test_answers_that_hang_cost_themselves_alone_and_a_process_each(child):
    assert child.right()
    first = child.asked.process
    assert not any(child.hanging() for _ in range(4))
    assert child.asked.process is None
    assert not psutil.pid_exists(first.pid)
    assert child.right(), "no group was begun"
    assert child.asked.started == 5
    assert child.asked.unanswered == 4


def test_a_group_that_hangs_costs_three_answers(child):
    child.asked.begin()
    assert not any(child.hanging() for _ in range(12))
    assert not child.right(), "the rest of that group is wrong, whatever it says"
    assert child.asked.started == 3
    assert child.asked.unanswered == 13
    child.asked.begin()
    assert child.right(), "the next group is another's"


def test_that_it_died_between_two_answers_is_not_the_next_ones_fault(child):
    assert child.right()
    os.kill(child.asked.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.asked.process.pid, os.WEXITED | os.WNOWAIT)
    assert child.right()
    assert child.asked.started == 2
    assert child.asked.unanswered == 0


def test_a_reward_that_fails_counts_as_wrong_and_is_told_again_and_again(odd, caplog):
    for text in ("fail", "exit", "float", "nan", *("two",) * 6):
        assert odd(text, "") == Score(0.0, False, False)
    with scoring("", odd) as another:
        assert another("fail", "") == Score(0.0, False, False), "as each evaluation has one of its own"
    assert odd("good \udcff", "gold") == Score(1.0, True, True)
    assert odd.started == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"The reward function of odd:build failed ({why}): such answers are wrong ({so_far} so far, "
        "logged at 1, 10, 100, …)."
        for why, so_far in (
            ("ZeroDivisionError: by zero", "1 answer"),
            ("ValueError: its reward is 2.0, not from 0 to 1", "10 answers"),
        )
    ]


def test_a_reward_whose_process_does_not_start_is_an_error(folder, monkeypatch):
    (folder / "odd.py").write_text(ODD)
    scorer = load_task("odd:gone", code=True).scorer
    monkeypatch.setenv("GONE", "1")
    with scoring("", scorer) as guarded, pytest.raises(UserError, match="runs the reward function of odd:gone was not"):
        guarded("good", "")


def test_an_engine_rewards_by_a_person_s_function(folder):
    engine = engine_on("mine:build", code=True)
    answer = engine.task.train[0].answer
    assert engine.score(0, group(engine, f"<answer>{answer}", "<answer>")) == [0.5, 0.0]
    assert engine.evaluate().prompts == 2
    engine.close()


# What a run says of it


MADE = """
from functools import partial
from ftis_node.tasks import make_task
from rules import judge

def build():
    return make_task([(f"{i}", f"{i}") for i in range(20)], reward=partial(judge, 3))
"""


def test_a_reward_that_is_made_of_another_function_is_named_by_that_one_s_source(folder):
    (folder / "made.py").write_text(MADE)
    found = []
    for verdict in ("True", "False"):
        (folder / "rules.py").write_text(f"def judge(most, text, answer): return {verdict}")
        found.append(load_task("made:build", code=True).reward)
        del sys.modules["made"], sys.modules["rules"]
    assert found[0] != found[1]


def facts_of(run):
    shared = ("task", "data", "reward", "turns", "tokenizer", "vocabulary")
    return {key: getattr(run, key) for key in shared} | {"prefix": [], "ends": []}


def test_nodes_whose_code_differs_are_told(folder):
    reward = load_task("mine:build", code=True).reward
    run = make_run(task="mine:build", reward=reward)
    check_fit(run, facts_of(run), "tiny-a")
    del sys.modules["mine"]
    (folder / "mine.py").write_text(PLAIN.replace("0.5", "0.7"))
    other = load_task("mine:build", code=True).reward
    with pytest.raises(UsageError, match="code that judges answers of mine:build is not the run's"):
        check_fit(run, facts_of(run) | {"reward": other}, "tiny-a")


def test_a_run_of_strangers_gets_no_code_and_no_parser_that_the_owner_did_not_name():
    code = make_run(task="mine:build", reward=f"{CODE}{'0' * 40}")
    hard = make_run(reward="math")
    for ours in (False, True):
        with pytest.raises(UsageError, match="only if you name it yourself") as caught:
            check_named(code, task=None, reward=None, ours=ours)
        assert "--task mine:build" in caught.value.fix
        assert "someone you trust" in caught.value.fix
    check_named(code, task="mine:build", reward=None, ours=False)
    with pytest.raises(UsageError, match="large parser") as caught:
        check_named(hard, task=None, reward=None, ours=False)
    assert "--reward math" in caught.value.fix
    check_named(hard, task=None, reward="math", ours=False)
    check_named(hard, task=None, reward=None, ours=True)
    for rule in ("integer", "exact", "regex"):
        check_named(make_run(reward=rule), task=None, reward=None, ours=False)
    with pytest.raises(UsageError, match="rule is 'integer', not 'exact'"):
        check_named(make_run(reward="integer"), task=None, reward="exact", ours=True)


# The documentation


def test_the_example_of_the_documentation_works(folder):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (folder / "capitals.py").write_text(next(block for block in blocks if "CAPITALS" in block))
    task = load_task("capitals:task", code=True)
    example = task.train[0]
    good = f"<think>so</think><answer>{example.answer}</answer>"
    with scoring(task.reward, task.scorer) as rate:
        assert rate(good, example.answer).reward == 1.0
        assert rate(good.lower(), example.answer).reward == 1.0
        assert rate("<think></think><answer>x</answer>", example.answer).reward == 0.0
    told = checked(source_of("capitals:task", code=True), task, {})
    assert told["refused"] == 0 < told["undecided"], "its golds are no answers without their tags"


def test_make_task_holds_out_and_checks():
    rows = [(f"q{i}", i) for i in range(50)]
    task = make_task(rows)
    assert len(task.train) + len(task.held_out) == 50
    assert task.held_out
    assert score(task.reward, "<think></think><answer>3</answer>", "3").reward == 1.0
    assert make_task(rows, held_out=[("r", 1)]).train == make_task(rows, held_out=[]).train
    assert [row.place for row in task.train] == [f"Row {int(row.answer) + 1} of the task" for row in task.train]
    for bad, what in (
        ([], "no rows"),
        ([("q", "x")], "Row 1"),
        ([("", 1)], "Row 1"),
        ([("q", 1)], "only 1 different"),
    ):
        with pytest.raises(UsageError, match=what):
            make_task(bad)
    with pytest.raises(UsageError, match="no template 'hello'"):
        make_task(rows, template="hello")
    for never in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="A reward cannot take"):
            make_task(rows, reward_seconds=never)
