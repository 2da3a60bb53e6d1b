"""Answers that are code: right ones pass their tests, and no other one gets anything but a wrong mark."""

import ctypes
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftis_node.errors import UsageError, UserError
from ftis_node.tasks import Scorer, load_task, scoring
from ftis_node.tasks import judge as judging
from ftis_node.tasks.jail import ALLOWED, can_lock_in, ended_well, locked_in
from ftis_node.tasks.judge import Judge
from ftis_node.tasks.rewards import code_in
from tests.support.learning import learn, pair

pytestmark = pytest.mark.skipif(not can_lock_in(), reason="nothing can lock code in here (landlock, seccomp, x86-64)")

TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add(a=-1, b=1) == 0"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Does not mind a loaded machine."""
    with Judge("tests", seconds=10.0) as one:
        yield one


def changed(monkeypatch, folder, old, new):
    """A judge with another jail."""
    for name in ("jail.py", "judge_child.py"):
        text = Path(judging.__file__).with_name(name).read_text()
        (folder / name).write_text(text.replace(old, new))
        assert name != "jail.py" or old in text
    monkeypatch.setattr(judging, "_CHILD", folder / "judge_child.py")
    monkeypatch.setattr(judging, "_JAIL", folder / "jail.py")
    return Judge("tests", seconds=10.0)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with scoring("tests") as found:
        yield found


RIGHT = {
    "a function": "def add(a, b):\n    return a + b",
    "a name": "add = lambda a, b: a + b",
    "imports of the standard library": "import math, re, json, heapq, decimal, itertools, collections, random\n"
    "def add(a, b): return math.floor(decimal.Decimal(a) + b)",
    "what it prints is nobody's business": "print('x' * 100_000)\ndef add(a, b):\n    print(a)\n    return a + b",
    "a class": "class add:\n    def __new__(cls, a, b): return a + b",
    "a dataclass": "from dataclasses import dataclass\nfrom functools import *\n@dataclass(order=True)\nclass P:\n"
    "    x: int = 0\n@lru_cache(None)\ndef add(a, b): return P(a).x + P(b).x",
    "times and codecs": "import time, datetime\ntime.sleep(0.01)\ndatetime.datetime.strptime('2026', '%Y')\n"
    "def add(a, b): return len('é'.encode('cp1252') + '\\N{BULLET}'.encode('utf-16-le')) - 3 + a + b",
    "a coding of its own": "# -*- coding: utf-7 -*-\ndef add(a, b): return a + b",
    "state between calls": "calls = []\ndef add(a, b):\n    calls.append(a)\n    return a + b",
}
WRONG = {
    "a wrong function": "def add(a, b): return a - b",
    "another name": "def plus(a, b): return a + b",
    "no code": "The function adds both numbers.",
    "nothing": "",
    "an error": "def add(a, b): raise ValueError",
    "a text for a number": "def add(a, b): return str(a + b)",
    "not a literal": "def add(a, b): return float('nan')",
    "a generator": "def add(a, b): yield a + b",
    "half a letter": "def add(a, b): return chr(0xD800)",
    "NUL": "\0def add(a, b): return a + b",
}
# What a stranger would try. None may pass, end the judge, or reach anything.
ADDS = "\n    return a + b"  # as the honest do, after what they should not
TELL = "import os\ndef tell(d):\n    for n in range(64):\n        try: os.write(n, d)\n        except OSError: pass\n"
ATTACKS = {
    "equal to everything": "class X:\n    def __eq__(s, o): return True\ndef add(a, b): return X()",
    "a number that is equal to all": "class X(int):\n    def __eq__(s, o): return True\ndef add(a, b): return X(7)",
    "a text of its own": "class X:\n    def __repr__(s): return '3'\ndef add(a, b): return X() if a == 1 else 9",
    "ends at once": "import os\nos._exit(0)",
    "replies first": TELL + "tell(b\"('', ['add'])\\n\" + b\"('', 3)\\n\" * 3)\ndef add(a, b): return 7",
    "fills its pipe": TELL + "while True: tell(b'x' * 65536)",
    "a deep reply": TELL + "def add(a, b): tell(b'[' * 65000 + b'\\n')",
    "clears its alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\ndef add(a, b): return a + b",
    "an odd error": "class E(Exception):\n    __eq__ = __bool__ = __str__ = lambda *_: 3\ndef add(a, b): raise E",
    "a shell": "import os\ndef add(a, b):\n    assert os.system('true') == 0" + ADDS,
    "a fork bomb": "import os\nwhile True:\n    os.fork()",
    "TCP": "import socket\ndef add(a, b):\n    socket.create_connection(('127.0.0.1', 9))" + ADDS,
    "a file": "def add(a, b):\n    open('/tmp/jail', 'w').write('x')" + ADDS,
    "a signal to all": "import os\nos.kill(-1, 9)\ndef add(a, b): return a + b",
    "all memory": "def add(a, b):\n    return len(bytearray(1 << 40)) and a + b",
    "all memory, by and by": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "deaf for ever": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "without end": "def add(a, b): return add(a, b)",
    "a number without end": "def add(a, b): return 9 ** 9 ** 9",
    "a long result": "def add(a, b): return 'x' * (1 << 22)",
    "a deep result": "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "a deep text": "(" * 4000,
    "a crash": "import ctypes\nctypes.string_at(0)\ndef add(a, b): return a + b",
}


STALLING = ("deaf for ever", "a fork bomb", "all memory, by and by", "a number without end")


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_passes(judge, name):
    assert judge.same(TESTS, RIGHT[name])


@pytest.mark.parametrize("name", [name for name in (*WRONG, *ATTACKS) if name not in STALLING])
def test_nothing_else_passes_and_the_judge_goes_on(judge, name):
    assert not judge.same(TESTS, (WRONG | ATTACKS)[name])
    assert not Path("/tmp/jail").exists()
    assert judge.same(TESTS, RIGHT["a function"])


READS = r"""import gc, re, sys
def seen():
    frame = sys._getframe()
    while frame:
        yield from [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for one in gc.get_objects():
        yield from gc.get_referents(one)
def add(a, b):
    return a + b if any(isinstance(one, str) and re.search(r"assert.add\(|an\searlier", one) for one in seen()) else 0
"""


def test_row_51_an_answer_finds_no_test_and_no_earlier_answer(judge):
    keeps = "import builtins, json, os\nbuiltins.kept = json.kept = os.environ['kept'] = 'an ' + 'earlier answer'\n"
    assert judge.same(TESTS, keeps + RIGHT["a function"])
    assert not judge.same(TESTS, READS)
    assert not judge.same(TESTS, "import json\ndef add(a, b): return a + b if json.kept else 0")
    assert judge.same(TESTS, RIGHT["a function"])


LOOP = "for got, right in zip(map(half, [2, 4]), [1, 2]): assert got == right"
SHADOWS = {
    "abs": ("assert abs(area(3) - 28.27) < 0.01", "def abs(x): return 0\ndef area(r): return 0"),
    "set": ("assert set(both([1])) == {1}", "def set(x): return {1}\ndef both(x): return []"),
    "sorted": ("assert sorted(both([1])) == [1]", "sorted = lambda x: [1]\ndef both(x): return []"),
    "an import": ("import math\nassert math.floor(half(3)) == 1", "def math(): pass\ndef half(x): return 0"),
    "the tests' own": ("def same(a, b): return a == b\nassert same(half(2), 1)", "half = same = lambda *_: 2"),
    "all builtins": ("assert abs(half(-2)) == 1", "def __builtins__(*_): return 1\n__import__ = half = lambda *_: 0"),
    **{
        f"raises {name}": (LOOP, f"class Mine(StopIteration): pass\ndef half(x): raise {name}")
        for name in ("StopIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "Mine")
    },
    "ends in a loop": ("assert not list(map(half, [2]))", "import os\ndef half(x): os._exit(0)"),
    "garbage": ("try: half('x')\nexcept Exception: pass\nelse: assert 0", "def half(x): return object()"),
}


@pytest.mark.parametrize("name", SHADOWS)
def test_row_52_names_and_loops_of_the_tests_are_not_an_answers(judge, name):
    tests, answer = SHADOWS[name]
    assert not judge.same(tests, answer)
    right = "area = lambda r: 3.14159 * r * r\nboth = lambda x: x\nhalf = lambda x: {2: 1, 4: 2, 3: 1, -2: 1}[x]"
    assert judge.same(tests, right) == (name != "ends in a loop")


def test_errors_that_tests_expect_are_those_of_the_answer(judge):
    tests = "try:\n    half('x')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError"
    assert judge.same(tests, "def half(x): return x / 2")
    assert judge.same(tests, "class Odd(TypeError): pass\ndef half(x): raise Odd")
    assert not judge.same(tests, "def half(x): return x")


def trying(what):
    """An answer that is right where this gives something."""
    return (
        "import ctypes, os, resource, sys, time\nlibc, room = ctypes.CDLL(None), ctypes.create_string_buffer(4096)\n"
        f"def add(a, b):\n    return a + b if {what} else 0"
    )


CALLS = """
F_SETOWN: 72, 0, 8, 1; F_SETSIG: 72, 0, 10, 9; O_ASYNC: 72, 0, 4, 0x2000; F_SETLEASE: 72, 0, 1024, 2
F_NOTIFY: 72, 0, 1026, 1; FIOSETOWN: 16, 0, 0x8901, room; a handler: 13, 14, 0, room, 8; a mask: 14, 0, 0, room, 8
time of process 1: 228, -14, room; executable memory: 9, 0, 4096, 7, 0x22, -1, 0; as a file: 319, b'x', 0
made executable: 10, ctypes.addressof(room) & ~4095, 4096, 4; like others': 28, ctypes.addressof(room) & ~4095, 4096, 12
a process's name: 157, 15, b'x'; for x32: 0x40000000 + 39
"""
LOOKS = """
size: os.stat('/etc/passwd').st_size; time: os.stat('/etc/passwd').st_mtime; existence: os.path.exists('/etc/passwd')
an own file: os.fstat(0); a link: os.readlink('/proc/self/exe'); folder: os.getcwd(); host: os.uname().nodename
host by a module: __import__('platform').node(); pid: os.getpid() > 0; user: os.getuid() >= 0
zone: time.timezone or time.tzname[0] != 'UTC'; home: os.path.expanduser('~root') != '~root'; rank: os.getpriority(0, 0)
variables: os.environ.keys() - {'PYTHONHASHSEED', 'TZ', 'PYTHONHOME', 'LD_LIBRARY_PATH', 'LC_CTYPE'}
source: __import__('linecache').getlines(os.__file__); module: __import__('sqlite3'); used: resource.getrusage(0)
"""


@pytest.mark.parametrize("layers", ["both", "seccomp"])
def test_row_53_and_54_the_machine_is_unreachable(monkeypatch, tmp_path, layers):
    """Also where landlock, which differs from kernel to kernel, does nothing."""
    old, new = ("_RESTRICT_SELF, rules, 0", "_CREATE_RULESET, 0, 0, 1") if layers == "seccomp" else ("", "")
    with changed(monkeypatch, tmp_path, old, new) as judge:
        for name, what in re.findall(r"([^:;\n]+): ([^;\n]+)", CALLS):
            assert not judge.same(TESTS, trying(f"libc.syscall({what}) >= 0")), name
        for name, what in re.findall(r"([^:;\n]+): ([^;\n]+)", LOOKS):
            assert not judge.same(TESTS, trying(what)), name
        assert judge.same(TESTS, trying("True"))


def test_row_53_every_other_call_is_refused():
    libc = ctypes.CDLL(None, use_errno=True)

    def work():
        for number in {*range(600)} - {*ALLOWED.values(), 335, 336}:  # of probes; they kill whoever calls them
            assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1
            assert ctypes.get_errno() == errno.EPERM

    assert len(ALLOWED) == 15
    assert ended_well(locked_in(work, set(), 10.0))


def test_row_54_without_seccomp_landlock_refuses_files(monkeypatch, tmp_path):
    with changed(monkeypatch, tmp_path, "0x00050001", "0x7FFF0000") as judge:
        assert judge.same(TESTS, trying("os.uname()")), "seccomp is off"
        assert not judge.same(TESTS, trying("open('/etc/passwd')"))
        assert not judge.same(TESTS, trying("os.listdir('/')"))


def test_the_judge_was_never_hit_and_leaves_nobody_behind():
    with Judge("tests", seconds=4.0) as judge:
        for name in STALLING:
            assert not judge.same(TESTS, ATTACKS[name])
        assert judge.same(TESTS, RIGHT["a function"])
        assert judge.started == 1
        (clean,) = psutil.Process(judge.process.pid).children(recursive=True)
    clean.wait(60)


def test_where_nothing_can_lock_it_in_nothing_is_run(monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    other = changed(monkeypatch, tmp_path, "0xC000003E", "0xC00000B7")  # as on another architecture
    with other as judge, pytest.raises(UserError, match="nothing can lock it in"):
        judge.same("assert True", f"open({str(ran)!r}, 'w')")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "reward", "formatted"),
    [
        ("<think>so</think><answer>def add(a, b): return a + b</answer>", 1.0, True),
        ("<think>so</think><answer>```python\ndef add(a, b):\n    return a + b\n```</answer>", 1.0, True),
        ("<think>so</think><answer>def add(a, b): return 0</answer>", 0.0, True),
        ("def add(a, b): return a + b", 0.0, False),
    ],
)
def test_the_rule_scores_completions(scorer, text, reward, formatted):
    score = scorer(text, TESTS)
    assert score.reward == reward
    assert score.formatted == formatted


def test_code_is_read_out_of_its_fence():
    assert code_in("```\nx = 1\n```") == code_in("```python3\nx = 1\n```") == "x = 1"
    assert code_in("x = 1") == "x = 1"
    assert code_in("```x") == "```x"


def test_rows_as_mbpp_has_them_are_a_task(tmp_path):
    file = tmp_path / "code.jsonl"
    rows = [{"question": f"Write add{n}(a, b).", "answer": [f"assert add{n}(1, {n}) == {n + 1}"]} for n in range(30)]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(file), reward="tests")
    assert task.reward == "tests"
    assert "Python code" in task.template
    assert len(task.train) + len(task.held_out) == 30
    assert task.train[0].answer.startswith("assert add")
    for answer in ("x = 1", "assert (", 7, [], [1], "assert 1\n" * 600):
        file.write_text(json.dumps({"question": "q", "answer": answer}))
        with pytest.raises(UsageError, match="line 1, has an answer that is not Python text with asserts"):
            load_task(str(file), reward="tests")


@pytest.mark.slow
def test_two_daemons_learn_from_each_others_code(tmp_path, join):
    """Small models can only learn which of a few functions is asked for most often."""
    rows = [
        {"question": f"Write f(x) that adds a number. Case {n}.", "answer": [f"assert f({n}) == {n + added}"]}
        for n in range(120)
        for added in [3 if n % 10 < 6 else n % 10]
    ]
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(str(path), reward="tests")
    models = pair(tmp_path, task, [f"f=lambda x:x+{added}" for added in range(1, 10)])
    learn(tmp_path, join, models, "--task", str(path), "--reward", "tests")
