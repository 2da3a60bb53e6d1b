"""A jail for code that strangers wrote, and the unit tests that judge it. A script loads this file: stdlib only.

Two processes, each forked for one answer. The *suspect* runs the answer. It is forked from a clean process: a new
Python that is given two pipes for each answer and nothing else, no test, no answer, no environment. The *examiner* runs
the task's tests, in which each function's name is a call of the suspect. Only literals and the names of a few errors
cross between them, so an answer can neither see the tests nor decide their outcome but by what its functions return.

Both are in a jail that no later code can leave. seccomp lets pass 15 system calls and looks at their arguments: none
opens or examines a file, names the machine or another process, makes memory executable, or handles a signal. landlock
refuses files once more. Limits bound memory and time. Without any of these nothing is run. Linux on x86-64 only.

https://docs.kernel.org/userspace-api/landlock.html, https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ast
import builtins
import ctypes
import dis
import functools
import importlib
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

REPLY_BYTES = 1 << 16  # of an argument list or a result
SAID_BYTES = 1 << 15  # less than a pipe holds: nobody reads before the fork has ended
_CHILDREN_CPU_SECONDS = 10

# System calls by their numbers on x86-64 (linux/arch/x86/entry/syscalls/syscall_64.tbl).
ALLOWED = {
    "read": 0,
    "write": 1,
    "close": 3,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "mremap": 25,
    "exit": 60,
    "futex": 202,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "getrandom": 318,
}
# Which argument, counted from 0, must not have which bits: PROT_EXEC; all but WAIT, WAKE, PRIVATE; a process's clock.
_REFUSED = {
    "mmap": (2, 0x4),
    "mprotect": (2, 0x4),
    "futex": (1, 0xFFFFFF7E),
    "clock_gettime": (0, 0xFFFFFFF0),
    "clock_getres": (0, 0xFFFFFFF0),
    "clock_nanosleep": (0, 0xFFFFFFF0),
}
_ARCH_X86_64 = 0xC000003E
_RETURN, _EQUAL, _ANY_OF, _LOAD = 0x06, 0x15, 0x45, 0x20  # BPF instructions, with an immediate operand
_KILL, _REFUSE, _PASS = 0x80000000, 0x00050001, 0x7FFF0000  # the process; with EPERM; go on
_NO_NEW_PRIVS, _SET_SECCOMP, _PDEATHSIG = 38, 22, 1  # of prctl
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
# What answers, tests and scorers may import, with what these import: nothing can be loaded later.
_MODULES = """
    array ast base64 bisect bz2 calendar cmath codecs colorsys contextlib copy csv dataclasses datetime decimal difflib
    enum fractions functools gc graphlib hashlib heapq hmac html inspect io ipaddress itertools json linecache logging
    math numbers operator pathlib pickle pprint queue random re secrets statistics string struct sys textwrap threading
    time timeit tokenize traceback types typing unicodedata unittest urllib.parse warnings weakref zlib _strptime
    encodings.cp1252 encodings.hex_codec encodings.latin_1 encodings.rot_13 encodings.unicode_escape encodings.utf_16_le
"""
# What a call may raise in a test; for another error, the nearest of these that it is one of, or a RuntimeError.
_ERRORS: dict[str, type[Exception]] = {
    name: getattr(builtins, name)
    for name in """
    ArithmeticError AssertionError AttributeError IndexError KeyError LookupError NameError NotImplementedError
    OverflowError RecursionError RuntimeError TypeError UnicodeError ValueError ZeroDivisionError
    """.split()  # noqa: SIM905
}

for _name in _MODULES.split():
    with suppress(ImportError):  # a Python that was built without it
        importlib.import_module(_name)
_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Lock this process in, for good. Raises OSError; then it must end."""
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    files = struct.pack("Q", (1 << 13) - 1)  # the rights of landlock's first version, which every later one has
    rules = _checked(_libc.syscall(_CREATE_RULESET, files, len(files), 0), "landlock_create_ruleset")
    _checked(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)
    _restrict_calls()


def _restrict_calls() -> None:
    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [
        step(_LOAD, 4),  # of struct seccomp_data: the architecture
        step(_EQUAL, _ARCH_X86_64, 1, 0),
        step(_RETURN, _KILL),
        step(_LOAD, 0),  # the call's number
    ]
    for name, number in ALLOWED.items():
        argument, refused = _REFUSED.get(name, (0, 0))
        program += [
            step(_EQUAL, number, 0, 4),
            step(_LOAD, 16 + 8 * argument),  # its lower half
            step(_ANY_OF, refused, 0, 1),
            step(_RETURN, _REFUSE),
            step(_RETURN, _PASS),
        ]
    program.append(step(_RETURN, _REFUSE))
    body = ctypes.create_string_buffer(b"".join(program))
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(body))
    _checked(_libc.prctl(_SET_SECCOMP, 2, filter_, 0, 0), "seccomp")


def _checked(answer: int, what: str) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), what)
    return answer


# --- a process in the jail --------------------------------------------------------------------------------------------


def locked_in(work: Callable[[], None], keep: set[int], seconds: float) -> int:
    """Fork a process that is locked in, has no files but `keep`, and does the work; it exits with 0 if that ends well.

    Returns its pid. It ends with its parent, and after `seconds`.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            for one, next_one in itertools.pairwise(sorted({2, *keep, 1 << 16})):
                os.closerange(one + 1, next_one)
            for name, most in (("NOFILE", 64), ("FSIZE", 0), ("CORE", 0), ("CPU", _CHILDREN_CPU_SECONDS)):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            enter()
            work()
            code = 0
    finally:  # whatever it is that was raised, the answer is wrong
        os._exit(code)


def can_lock_in() -> bool:
    """Whether a process can be locked in here, tried out."""
    return ended_well(locked_in(lambda: None, set(), 5.0))


def ended_well(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


# --- an examination ---------------------------------------------------------------------------------------------------


def examiner(seconds: float) -> Callable[[str, str, bool], bool]:
    """Start the clean process; return what says whether an answer, Python text, passes tests, text with asserts."""
    ours, theirs = socket.socketpair()
    kept = {name: os.environ[name] for name in ("PYTHONHOME", "LD_LIBRARY_PATH") if name in os.environ}
    subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", __file__, str(seconds)],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0", "TZ": "UTC0", **kept},
        cwd="/",
    )
    theirs.close()
    if not ours.recv(1):
        sys.exit("The process that answers are forked from did not start.")

    def passes(tests: str, answer: str, _: bool) -> bool:
        to_suspect = os.pipe()
        to_examiner = os.pipe()
        ends = to_examiner[0], to_suspect[1]
        socket.send_fds(ours, [b"+"], [to_suspect[0], to_examiner[1]])
        pid = locked_in(lambda: _examine(tests, answer, *ends), set(ends), seconds)
        for end in (*to_suspect, *to_examiner):
            os.close(end)
        passed = ended_well(pid)
        ours.send(b"-")
        ours.recv(1)  # the suspect is gone
        return passed

    return passes


def _fork_suspects(seconds: float) -> None:
    """The clean process: fork a suspect for each two pipes that come through stdin, and kill it at the next byte."""
    connection = socket.socket(fileno=os.dup(0))
    connection.send(b"R")
    while ends := socket.recv_fds(connection, 1, 2)[1]:
        pid = locked_in(functools.partial(_be_examined, *ends), set(ends), seconds)
        for end in ends:
            os.close(end)
        connection.recv(1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        connection.send(b"-")


def _be_examined(questions: int, replies: int) -> None:
    """The suspect: run the answer, tell what can be called, then call it as asked. A reply: (error or "", value)."""
    lines = _lines(questions)
    sys.modules["answer"] = module = ModuleType("answer")
    space = vars(module)
    exec(compile(ast.literal_eval(next(lines)), "answer", "exec", dont_inherit=True), space)
    _send(replies, repr(("", [name for name, value in space.items() if callable(value)])))
    for line in lines:
        name, positional, named = ast.literal_eval(line)
        try:
            reply = ("", space[name](*positional, **named))
        except Exception as error:
            reply = (next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "Exception"), 0)
        _send(replies, repr(reply))


def _examine(tests: str, answer: str, replies: int, questions: int) -> None:
    """The examiner: run the tests, in which each name that the answer gives and Python has not asks the suspect."""
    lines = _lines(replies)

    def ask(question: object) -> tuple[str, Any]:
        try:
            _send(questions, repr(question))
            return read_reply(next(lines))
        except BaseException:  # nothing that tests might catch, or take for the end of a loop
            os._exit(1)

    def call(name: str, /, *positional: Any, **named: Any) -> Any:
        error, value = ask((name, positional, named))
        if error:
            raise _ERRORS.get(error, RuntimeError)
        return value

    names = {str(name) for name in ask(answer)[1]} - vars(builtins).keys()
    space = {name: functools.partial(call, name) for name in names if not name.startswith("__")}
    exec(compile(tests, "tests", "exec", dont_inherit=True), {**space, "__name__": "tests"})


def read_reply(line: str) -> tuple[str, Any]:
    """What a suspect says: the name of an error or "", and literals. Raises what `ast.literal_eval` does."""
    error, value = ast.literal_eval(line)
    return str(error), value


def _send(end: int, text: str) -> None:
    data = text.encode() + b"\n"
    if len(data) > REPLY_BYTES:
        raise ValueError("too long")
    os.write(end, data)


def _lines(end: int) -> Iterator[str]:
    """The lines of a pipe; ends with it, or with a line that is too long."""
    left = b""
    while part := os.read(end, REPLY_BYTES):
        *whole, left = (left + part).split(b"\n")
        yield from (line.decode() for line in whole)
        if len(left) > REPLY_BYTES:
            return


# --- a scorer that may evaluate what it judges ------------------------------------------------------------------------

# What a peer's expression may do. No attribute, no function of its own, no assignment, no import: whoever could do
# these could write a verdict of his own.
_STEPS = frozenset(
    """
    RESUME PUSH_NULL LOAD_CONST LOAD_NAME LOAD_GLOBAL RETURN_VALUE RETURN_CONST PRECALL CALL CALL_KW KW_NAMES POP_TOP
    NOP BINARY_OP BINARY_SUBSCR BINARY_SLICE BUILD_SLICE UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT TO_BOOL
    CACHE COMPARE_OP CONTAINS_OP IS_OP BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_STRING BUILD_CONST_KEY_MAP
    LIST_EXTEND SET_UPDATE LIST_TO_TUPLE COPY SWAP EXTENDED_ARG LOAD_SMALL_INT LOAD_COMMON_CONSTANT CALL_INTRINSIC_1
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE JUMP_IF_FALSE_OR_POP
    JUMP_IF_TRUE_OR_POP JUMP_FORWARD NOT_TAKEN
    """.split()  # noqa: SIM905
)
_BUILTINS = frozenset(
    """
    abs bool complex dict float frozenset int len list max min pow range round set str sum tuple
    """.split()  # noqa: SIM905
)


# In what sympy parses: what it makes of numbers and letters, and elementary functions. Not those that solve a task, as
# `integrate` and `expand` do, nor those that parse another text.
_MATHEMATICS = _BUILTINS | frozenset(
    """
    Integer Float Rational Symbol Pow Mul Add Abs factorial exp log ln sqrt cbrt root sign sin cos tan cot sec
    csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh acoth pi oo
    a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G H I J K L M P R T U V W X Y Z
    """.split()  # noqa: SIM905
)


def worth(score: Callable[[], float], seconds: float) -> float:
    """Return a scorer's verdict, from 0 to 1, asked in a fork that is locked in; 0 where it fails."""
    try:
        return min(1.0, max(0.0, float(said(lambda: repr(float(score())), seconds))))
    except ValueError:
        return 0.0


def said(speak: Callable[[], str], seconds: float) -> str:
    """The text that `speak` gives in a fork that is locked in; empty where it fails, or is longer than `SAID_BYTES`.

    In the fork, code that is made of a text must be a harmless expression, or the fork ends.
    """
    ours, theirs = os.pipe()

    def work() -> None:
        sys.addaudithook(_only_harmless)
        text = speak().encode()
        if len(text) > SAID_BYTES:
            raise ValueError("too long")
        os.write(theirs, text)

    pid = locked_in(work, {theirs}, seconds)
    os.close(theirs)
    text = b""
    if ended_well(pid):
        text = os.read(ours, SAID_BYTES)
    os.close(ours)
    return text.decode(errors="replace")


def _only_harmless(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "exec" or not isinstance(arguments[0], CodeType):
        return
    names = _BUILTINS
    if "/sympy/parsing/" in sys._getframe(1).f_code.co_filename:
        names = _MATHEMATICS
    if not _harmless(arguments[0], names):
        os._exit(1)


def _harmless(code: CodeType, names: frozenset[str]) -> bool:
    """Whether code is a module's, or an expression of these names. Others may be a scorer's own: the right answer."""
    if not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen "):
        return True  # a module
    if code.co_names == ("sympy",) and code.co_consts == (0, ("*",), None):
        return True  # `from sympy import *`, which sympy runs before it parses
    return names.issuperset(code.co_names) and all(step.opname in _STEPS for step in dis.get_instructions(code))


if __name__ == "__main__":
    _fork_suspects(float(sys.argv[1])) if sys.argv[1:] else sys.exit(not can_lock_in())
