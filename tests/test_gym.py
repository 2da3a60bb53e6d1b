"""Tasks of reasoning-gym: rows that are the same everywhere, scorers in the jail, and answers that attack them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from ftis_node.errors import UsageError, UserError
from ftis_node.tasks import check_named, judge, load_evaluation, load_task, source_of
from ftis_node.tasks.jail import can_lock_in
from ftis_node.tasks.packaged import PackageJudge, ReasoningGym
from ftis_node.tasks.trial import unskilled
from tests.support.learning import learn, pair
from tests.support.swarm import make_run

pytestmark = [
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra reasoning-gym is not installed"),
    pytest.mark.skipif(not can_lock_in(), reason="nothing locks scorers in here (landlock, seccomp, x86-64)"),
]

SLOW = pytest.mark.slow
NAME = "reasoning-gym:letter_counting,gcd*2"
# Tasks whose scorers evaluate the answer, and an honest answer's form to each.
FORMED = "string_insertion spiral_matrix binary_matrix n_queens"
OTHERS = "puzzle24 countdown polynomial_multiplication simple_integration intermediate_integration"
EVALUATED = (*FORMED.split(), *OTHERS.split())
TRIED = ("letter_counting", "word_sorting", "graph_color", "sudoku", *EVALUATED)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(shared_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))


@pytest.fixture(scope="module")
def scorer() -> Iterator[PackageJudge]:
    with PackageJudge("reasoning-gym") as made:
        yield made


@cache
def entries(names, level):
    """The answers of tasks' first rows as a node has them: made under the same seed of hashes."""
    code = (
        "import json, sys; from ftis_node.tasks import gym_child as g; level = int(sys.argv[1]); "
        "answers = {n: [g.dataset(n, level, 1)[index]['answer'] for index in range(3)] for n in sys.argv[2:]}; "
        "print(); print(json.dumps(answers))"
    )
    command = [sys.executable, "-c", code, str(level), *names]
    ended = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})
    found = json.loads(ended.stdout.splitlines()[-1])
    return found


def entry(name, index=0, level=-1, among=TRIED):
    """The gold of a task's row as a node has it, and its answer. One process makes those of all names in `among`."""
    answer = entries(among if name in among else (name,), level)[name][index]
    return json.dumps([name, level, 1, index, answer]), str(answer)


def answered(text):
    return f"<think>so</think><answer>{text}</answer>"


def test_rows_are_the_same_in_every_process_and_none_is_held_out_and_trained_on():
    task = load_task(NAME)
    again = ReasoningGym(NAME)._ask("rows", 60.0)
    assert [[row.question, row.answer] for row in task.train] == again["train"]
    assert len(task.train) == 999
    assert 50 < len(task.held_out) <= 99
    assert not {row.question for row in task.train} & {row.question for row in task.held_out}
    kinds = [json.loads(row.answer)[0] for row in task.train]
    assert kinds.count("gcd") == 2 * kinds.count("letter_counting"), "by their weights"
    assert 20 < kinds[:60].count("gcd") < 60, "and mixed"
    assert load_task(NAME) == task
    assert load_task("reasoning-gym:gcd").data != task.data
    assert task.reward == source_of(NAME).foreseen()[1]
    assert load_evaluation(NAME).held_out == task.held_out
    assert not load_evaluation(NAME).train


def test_levels_are_the_packages_curricula(scorer):
    easy, hard = (load_task(f"reasoning-gym:chain_sum@{level}") for level in (0, 3))
    assert max(len(row.question) for row in easy.train) < max(len(row.question) for row in hard.train)
    row = hard.train[3]
    assert scorer(answered(json.loads(row.answer)[-1]), row.answer).reward == 1.0


@pytest.mark.parametrize("name", TRIED)
def test_the_packages_own_answer_is_right_and_others_are_not(name, scorer):
    gold, answer = entry(name)
    if name != "graph_color":  # which has no answer of its own: any colouring will do
        right = scorer(answered(str(answer)), gold)
        assert right.reward == 1.0
        assert right.formatted
        assert right.lenient
        assert scorer(str(answer), gold).reward == 0.0, "without the format"
    wrong = scorer(answered("no"), gold)
    assert wrong.reward == 0.0
    assert wrong.formatted
    assert not wrong.lenient


@pytest.mark.slow
def test_every_task_judges_its_own_answers_in_the_jail(scorer):
    from reasoning_gym.factory import DATASETS

    beside = {"composite", "knight_swap"}  # is made of others; takes a second a row
    failed = []
    names = tuple(sorted(DATASETS.keys() - beside))
    for name in names:
        gold, answer = entry(name, among=names)
        if answer != "None" and len(answer) <= 4096 and scorer(answered(str(answer)), gold).reward < 1.0:
            failed.append(name)
    assert failed == []


@pytest.mark.parametrize(
    "name",
    [
        "complex_arithmetic",
        *(pytest.param(name, marks=SLOW) for name in ("coin_flip", "gcd,coin_flip", "game_of_life_halting")),
    ],
)
def test_row_55_tasks_that_pay_for_no_skill_are_refused(name, cli, tmp_path):
    line = ("--task", f"reasoning-gym:{name}", "--any-tokenizer", "-o", tmp_path / "run.toml")
    code, _, err = cli("run", "new", *line)
    assert code == 2
    assert "rows whose right answers differ" in err
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a hundred tasks
def test_row_55_all_other_tasks_pay_for_skill():
    from reasoning_gym.factory import DATASETS

    beside = {"composite", "knight_swap", "tower_of_hanoi", "complex_arithmetic", "game_of_life_halting", "coin_flip"}
    paying = {name: unskilled(load_task(f"reasoning-gym:{name}"), 600.0) for name in sorted(DATASETS.keys() - beside)}
    assert not {name: found for name, found in paying.items() if found}


def touching(path):
    """Payloads that make a file, if they run."""
    touch = f"open('{path}', 'w').close()"
    imported = f"__import__('os').system('touch {path}')"
    return {
        "import": imported,
        "open": touch,
        "exec": f'exec("{touch}")',
        "eval": f'eval("{imported}")',
        "attribute": f"[c for c in ().__class__.__base__.__subclasses__()] and {imported}",
        "generator": f"(x for x in [1]).gi_frame.f_builtins['open']('{path}', 'w')",
        "lambda": f"(lambda: {touch})()",
        "builtins": f"globals()['__builtins__']['open']('{path}', 'w')",
        "getattr": f"getattr(str, 'form' + 'at') and {touch}",
        "sympify": f'sympify("{imported}")',
        "parse_expr": f'parse_expr("{imported}")',
        "lambdify": f'lambdify(x, "{imported}")(1)',
        "string": f"'{{0.__class__}}' and {imported}",
        "walrus": f"[y := {touch}, y][0]",
        "bytes": f"exec(bytes([{','.join(str(byte) for byte in touch.encode())}]))",
    }


def unjailed(name, text):
    """The package's own scorer on a text, in a process without any limits."""
    code = (
        "import sys; from ftis_node.tasks import gym_child as g; d = g.dataset(sys.argv[1], -1, 1); "
        "d.score_answer(sys.argv[2], d[0])"
    )
    subprocess.run([sys.executable, "-c", code, name, text], capture_output=True, timeout=60)


def in_its_form(name, payload):
    """What a scorer wants to see before it evaluates an answer."""
    return f"[{payload}]" if name in FORMED.split() else payload


def worth_nothing(scorer, text, names):
    """To no scorer, neither as it is nor in the scorer's form."""
    for name in names:
        gold, _ = entry(name)
        scorer.begin()
        for given in {text, in_its_form(name, text), f"{text} or 1"}:
            assert scorer(answered(given), gold).reward == 0.0


def turns(*cases, among=EVALUATED):
    """Each case with one of the scorers, of which each has its turn; with all of them among the slow tests."""
    one = [pytest.param(case, among[turn % len(among) :][:1], id=case) for turn, case in enumerate(cases)]
    return [*one, *(pytest.param(case, among, id=f"{case} everywhere", marks=SLOW) for case in cases)]


@pytest.mark.parametrize("name", [EVALUATED[0], *(pytest.param(name, marks=SLOW) for name in EVALUATED[1:])])
def test_the_packages_scorers_run_what_they_are_given(name, tmp_path):
    """That is why they are in the jail; a release that mends one of them fails here, and that is good news."""
    path = tmp_path / "ran"
    for payload in touching(path).values():
        unjailed(name, in_its_form(name, payload))
        if path.exists():
            return
    if name not in ("puzzle24", "countdown"):  # which compare the numbers of the answer first
        pytest.fail(f"no payload ran in {name}")


@pytest.mark.parametrize(("payload", "names"), turns(*touching(Path("x"))))
def test_no_payload_runs_or_pays(payload, names, tmp_path, scorer):
    path = tmp_path / "ran"
    worth_nothing(scorer, touching(path)[payload], names)
    assert not path.exists()


BOMBS = [
    "9**9**9**9",
    "[0] * 10**11",
    "'a' * 10**10",
    "range(10**18)",
    "(" * 2000 + "1" + ")" * 2000,
    "0" * 4000,
    "[" * 300 + "]" * 300,
    "sum(range(10**12))",
    "factorial(10**8)",
    "x**(10**9) + " * 50 + "1",
    "\x00",
    "\ud7ff\U0010ffff",
]


@pytest.mark.parametrize(
    ("bomb", "names"), turns(*BOMBS, among=("string_insertion", "polynomial_multiplication", "n_queens"))
)
def test_bombs_are_worth_nothing_and_the_next_answer_is_judged(bomb, names, scorer):
    for name in names:
        gold, answer = entry(name)
        scorer.begin()
        assert scorer(answered(bomb), gold).reward == 0.0
        assert scorer(answered(str(answer)), gold).reward == 1.0


FORGERIES = """
    import os; os.write(4, b'1.0') | [__import__('os').write(n, b'1.0') for n in range(3, 64)] | exit() | quit(0)
    type('A', (), {'__eq__': lambda s, o: True})() | print(1.0) | breakpoint() | answer | self | Function('f')('1.0')
    Function('f', __eq__=Add)(x) | Symbol('x').subs | (yield 1) | entry['answer'] | oracle_answer | S('1') | expand('x')
    list(entry['metadata'].values())
"""


@pytest.mark.parametrize(("forgery", "names"), turns(*map(str.strip, re.split(r" \| |\n", FORGERIES.strip()))))
def test_a_verdict_cannot_be_forged(forgery, names, scorer):
    worth_nothing(scorer, forgery, names)


def test_sympy_does_not_solve_the_task(scorer):
    for index in range(3):
        gold, answer = entry("intermediate_integration", index)
        assert scorer(answered(str(answer)), gold).reward == 1.0
        derived = f"integrate(diff({str(answer).removesuffix(' + C')}, x), x) + C"
        scorer.begin()
        assert scorer(answered(derived), gold).reward == 0.0


def test_a_gold_that_is_not_the_packages_is_worth_nothing(scorer):
    gold, answer = entry("letter_counting")
    assert scorer(answered("7777"), json.dumps([*json.loads(gold)[:-1], "7777"])).reward == 0.0
    assert scorer(answered(answer), gold).reward == 1.0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("letter_countin", "has no task 'letter_countin' (near to it: letter_counting"),
        ("gcd,gcd", "a task is named twice"),
        *((name, "is not NAME") for name in ("gcd*0", "gcd@x")),
        ("gcd@99", "has levels 0 to"),
        ("composite", "Must specify at least one dataset"),
    ],
)
def test_a_name_that_is_none_is_refused_before_rows_are_made(name, what):
    with pytest.raises(UsageError) as refused:
        source_of(f"reasoning-gym:{name}").check()
    assert what in refused.value.what


def test_a_task_of_one_row_has_nothing_to_hold_out(monkeypatch):
    rows = [["What is 1?", "[]"]]
    monkeypatch.setattr(ReasoningGym, "_ask", lambda *_: {"train": rows, "held_out": rows})
    with pytest.raises(UsageError, match="no questions beside those to train on"):
        load_task("reasoning-gym:gcd,letter_counting*7")


def test_data_of_ones_own_and_other_rules_are_refused(tmp_path):
    with pytest.raises(UsageError, match="makes its own data"):
        load_task(NAME, data=tmp_path)
    with pytest.raises(UsageError, match="has the reward rule"):
        load_task(NAME, reward="math")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ReasoningGym, "foreseen", lambda _: (None, None))
    with pytest.raises(UsageError, match="not installed"):
        load_task(NAME)


def test_rows_that_take_too_long_or_fail_are_told(monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="makes no rows within"):
        patch.setattr("ftis_node.tasks.packaged._ROWS_SECONDS", 0.01)
        load_task("reasoning-gym:gcd,letter_counting*5")
    broken = tmp_path / "child.py"
    broken.write_text("raise RuntimeError('half installed')")
    monkeypatch.setattr(ReasoningGym, "child", broken)
    with pytest.raises(UsageError, match="half installed"):
        load_task("reasoning-gym:gcd,letter_counting*6")


def test_a_machine_without_a_jail_is_told_by_dry_run_and_judge(monkeypatch, tmp_path):
    nowhere = tmp_path / "jail.py"
    nowhere.write_text("import sys\nsys.exit(1)")
    monkeypatch.setattr(judge, "_JAIL", nowhere)
    for arguments in ({"name": NAME}, {"name": "x.jsonl", "reward": "tests"}):
        with pytest.raises(UsageError, match="nothing can lock it in here"):
            source_of(**arguments).check()
    with PackageJudge("reasoning-gym") as blind:
        monkeypatch.setattr(blind, "_command", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
        with pytest.raises(UserError, match="nothing can lock it in here"):
            blind(answered("1"), entry("letter_counting")[0])


def test_a_strangers_run_makes_nobody_run_scorers():
    run = make_run(task=NAME, reward="reasoning-gym:0.1.25")
    with pytest.raises(UsageError, match="evaluate what peers write"):
        check_named(run, task=None, reward=None, ours=False)
    check_named(run, task=NAME, reward=None, ours=False)
    check_named(run, task=None, reward=None, ours=True)


@pytest.mark.slow
def test_two_daemons_learn_three_tasks_from_each_other(tmp_path, join):
    name = "reasoning-gym:gcd,letter_counting,binary_alternation"
    learn(tmp_path, join, pair(tmp_path, load_task(name), "0123456789"), "--task", name)
