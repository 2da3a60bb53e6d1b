"""Answers that are code: right ones pass their tests, and no other one gets anything but a wrong mark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftis_node.errors import UsageError
from ftis_node.tasks import Scorer, code_in, load_task, scoring
from ftis_node.tasks.jail import ALLOWED, can_lock_in
from ftis_node.tasks.judge import Judge
from tests.support.daemons import Join
from tests.support.learning import learn, pair

pytestmark = pytest.mark.skipif(not can_lock_in(), reason="nothing can lock code in here (landlock, seccomp, x86-64)")

TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add(a=-1, b=1) == 0"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Does not mind a loaded machine."""
    with Judge("tests", seconds=10.0) as one:
        yield one


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with scoring("tests") as found:
        yield found


RIGHT = {
    "a function": "def add(a, b):\n    return a + b",
    "a name": "add = lambda a, b: a + b",
    "two functions": "def plus(a, b): return a + b\ndef add(a, b): return plus(a, b)",
    "imports of the standard library": "import math, re, json, heapq, decimal, itertools, collections, random\n"
    "def add(a, b): return math.floor(decimal.Decimal(a) + b)",
    "what it prints is nobody's business": "print('x' * 100_000)\ndef add(a, b):\n    print(a)\n    return a + b",
    "state between calls": "calls = []\ndef add(a, b):\n    calls.append(a)\n    return a + b",
}
WRONG = {
    "a wrong function": "def add(a, b): return a - b",
    "another name": "def plus(a, b): return a + b",
    "no code": "The function adds both numbers.",
    "nothing": "",
    "an error": "def add(a, b): raise ValueError",
    "a text for a number": "def add(a, b): return str(a + b)",
    "a class": "class add:\n    def __new__(cls, a, b): return a + b",
}
# What a stranger would try. None may pass, end the judge, or reach anything.
ADDS = "\n    return a + b"  # as the honest do, after what they should not
ATTACKS = {
    "equal to everything": "class X:\n    def __eq__(s, o): return True\ndef add(a, b): return X()",
    "a number that is equal to all": "class X(int):\n    def __eq__(s, o): return True\ndef add(a, b): return X(7)",
    "a text of its own": "class X:\n    def __repr__(s): return '3'\ndef add(a, b): return X() if a == 1 else 9",
    "ends at once": "import os\nos._exit(0)",
    "exits": "import sys\ndef add(a, b): sys.exit(0)",
    "writes to every file": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'[true, false]\\n')\n    except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "reads the tests": (
        "import gc\ndef add(a, b):\n    return [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o][0]"
    ),
    "a shell": "import os\ndef add(a, b):\n    assert os.system('true') == 0" + ADDS,
    "a process": "import subprocess\ndef add(a, b):\n    subprocess.run(['/bin/true'])" + ADDS,
    "a fork": "import os\ndef add(a, b):\n    os.fork()" + ADDS,
    "a fork bomb": "import os\nwhile True:\n    os.fork()",
    "a thread": "import threading\ndef add(a, b):\n    threading.Thread(target=print).start()" + ADDS,
    "TCP": "import socket\ndef add(a, b):\n    socket.create_connection(('127.0.0.1', 9))" + ADDS,
    "UDP": "import socket as s\ndef add(a, b):\n    s.socket(type=s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))" + ADDS,
    "a unix socket": "import socket\ndef add(a, b):\n    socket.socket(socket.AF_UNIX)" + ADDS,
    "a look at the users": "def add(a, b):\n    open('/etc/passwd').read()" + ADDS,
    "a look at processes": "import os\ndef add(a, b):\n    os.listdir('/proc')" + ADDS,
    "a look at its parent": "import os\ndef add(a, b):\n    open(f'/proc/{os.getppid()}/mem', 'rb')" + ADDS,
    "a look at home": "import os\ndef add(a, b):\n    os.listdir(os.path.expanduser('~root'))" + ADDS,
    "a file": "def add(a, b):\n    open('/tmp/jail', 'w').write('x')" + ADDS,
    "a file in the library": "import os\ndef add(a, b):\n    open(os.__file__, 'a')" + ADDS,
    "a removal": "import os\ndef add(a, b):\n    os.unlink('/tmp/nothing')" + ADDS,
    "a signal to its parent": "import os\ndef add(a, b):\n    os.kill(os.getppid(), 9)" + ADDS,
    "a signal to all": "import os\nos.kill(-1, 9)\ndef add(a, b): return a + b",
    "a raw call": "import ctypes\ndef add(a, b):\n    assert ctypes.CDLL(None).syscall(41, 2, 1, 0) >= 0" + ADDS,
    "a call of 32 bits": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes([0xb8, 102, 0, 0, 0, 0xcd, 0x80, 0xc3]))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nf()\n"
        "def add(a, b): return 0"
    ),
    "a debugger": "import ctypes, os\ndef add(a, b):\n    assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0"
    + ADDS,
    "another limit": "import resource as r\ndef add(a, b):\n    r.setrlimit(r.RLIMIT_CPU, (1, 1))" + ADDS,
    "all memory": "def add(a, b):\n    return len(bytearray(1 << 40)) and a + b",
    "all memory, by and by": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "for ever": "def add(a, b):\n    while True: pass",
    "deaf for ever": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "without end": "def add(a, b): return add(a, b)",
    "a number without end": "def add(a, b): return 9 ** 9 ** 9",
    "a long result": "def add(a, b): return 'x' * (1 << 22)",
    "a deep result": "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "a deep text": "(" * 100_000,
    "a crash": "import ctypes\nctypes.string_at(0)\ndef add(a, b): return a + b",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_passes(judge: Judge, name: str) -> None:
    assert judge.same(TESTS, RIGHT[name])


@pytest.mark.parametrize("name", [*WRONG, *ATTACKS])
def test_nothing_else_passes_and_the_judge_goes_on(judge: Judge, name: str) -> None:
    assert not judge.same(TESTS, (WRONG | ATTACKS)[name])
    assert not Path("/tmp/jail").exists()
    assert judge.same(TESTS, RIGHT["a function"])


def test_the_judge_was_never_hit_and_leaves_nobody_behind() -> None:
    with Judge("tests", seconds=4.0) as judge:
        for name in ("deaf for ever", "for ever", "a fork bomb"):
            assert not judge.same(TESTS, ATTACKS[name])
        assert judge.same(TESTS, RIGHT["a function"]) and judge.started == 1
        assert judge.pid is not None
        assert psutil.Process(judge.pid).children(recursive=True) == []


def test_where_nothing_can_lock_it_in_nothing_is_run(tmp_path: Path) -> None:
    program = shutil.which("setarch")
    if program is None:
        pytest.skip("needs setarch, of util-linux")
    code = (
        "from ftis_node.tasks.judge import Judge\nfrom ftis_node.errors import UserError\n"
        "import sys\ntry: Judge('tests').same('assert True', f'open({sys.argv[1]!r}, 1)')\n"
        "except UserError as error: print(error)"
    )
    line = [program, "i686", sys.executable, "-c", code, str(tmp_path / "ran")]
    told = subprocess.run(line, capture_output=True, text=True)
    assert "nothing can lock it in" in told.stdout, told
    assert not (tmp_path / "ran").exists()


def test_no_call_that_opens_starts_or_signals_is_allowed() -> None:
    names = (
        "socket connect sendto bind clone clone3 fork vfork execve kill tkill tgkill ptrace prctl ioctl unlink rename"
    )
    assert not {*names.split(), "io_uring_setup", "memfd_create", "bpf", "mount", "setuid"} & ALLOWED.keys()


@pytest.mark.parametrize(
    ("text", "reward", "formatted"),
    [
        ("<think>so</think><answer>def add(a, b): return a + b</answer>", 1.0, True),
        ("<think>so</think><answer>```python\ndef add(a, b):\n    return a + b\n```</answer>", 1.0, True),
        ("<think>so</think><answer>def add(a, b): return 0</answer>", 0.0, True),
        ("def add(a, b): return a + b", 0.0, False),
    ],
)
def test_the_rule_scores_completions(scorer: Scorer, text: str, reward: float, formatted: bool) -> None:
    score = scorer(text, TESTS)
    assert (score.reward, score.formatted) == (reward, formatted)


def test_errors_that_tests_expect_are_those_of_the_answer(judge: Judge) -> None:
    tests = "try:\n    half('x')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError"
    assert judge.same(tests, "def half(x): return x / 2")
    assert not judge.same(tests, "def half(x): return x")


def test_code_is_read_out_of_its_fence() -> None:
    assert code_in("```\nx = 1\n```") == code_in("```python3\nx = 1\n```") == "x = 1"
    assert code_in("x = 1") == "x = 1" and code_in("```x") == "```x"


def test_rows_as_mbpp_has_them_are_a_task(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    rows = [{"question": f"Write add{n}(a, b).", "answer": [f"assert add{n}(1, {n}) == {n + 1}"]} for n in range(30)]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(file), reward="tests")
    assert task.reward == "tests" and "Python code" in task.template and len(task.train) + len(task.held_out) == 30
    assert task.train[0].answer.startswith("assert add")
    for answer in ("x = 1", "assert (", 7, [], [1], "assert 1\n" * 600):
        file.write_text(json.dumps({"question": "q", "answer": answer}))
        with pytest.raises(UsageError, match="line 1, has an answer that is not Python text with asserts"):
            load_task(str(file), reward="tests")


@pytest.mark.slow
def test_two_daemons_learn_from_each_others_code(tmp_path: Path, join: Join) -> None:
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
