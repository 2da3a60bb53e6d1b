"""A jail for code that strangers wrote, and the unit tests that judge it. A script loads this file: stdlib only.

Two processes, each forked for one answer. The *suspect* holds the answer's functions; the *examiner* runs the task's
tests, in which each function's name is a call of the suspect. Only literals cross between them (numbers, texts, lists,
…, by `ast.literal_eval`), so an answer can neither see the tests nor decide their outcome but by what it returns.

Both are in a jail that no later code can leave. landlock lets them read the standard library and nothing else. seccomp
lets pass some sixty system calls, none of which opens a connection, starts a process or a thread, or signals one.
Limits bound memory, processor time and files. Without any one of these nothing is run. Linux on x86-64 only.

https://docs.kernel.org/userspace-api/landlock.html, https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import dis
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType
from typing import Any

REPLY_BYTES = 1 << 16  # of an argument list or a result
SAID_BYTES = 1 << 15  # less than a pipe holds: nobody reads before the fork has ended
_CHILDREN_CPU_SECONDS = 10

# System calls by their numbers on x86-64 (linux/arch/x86/entry/syscalls/syscall_64.tbl).
ALLOWED = {
    **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8},
    **{"mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14},
    **{"rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24},
    **{"mremap": 25, "madvise": 28, "dup": 32, "nanosleep": 35, "getitimer": 36, "setitimer": 38, "getpid": 39},
    **{"exit": 60, "wait4": 61, "uname": 63, "fcntl": 72, "getcwd": 79, "readlink": 89, "gettimeofday": 96},
    **{"getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108},
    **{"getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204},
    **{"getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231},
    **{"openat": 257, "newfstatat": 262, "pselect6": 270, "set_robust_list": 273, "getrandom": 318, "statx": 332},
    **{"rseq": 334, "faccessat2": 439},
}
_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_RETURN, _EQUAL, _NOT_LESS, _LOAD = 0x06, 0x15, 0x35, 0x20  # BPF instructions, with an immediate operand
_KILL, _REFUSE, _PASS = 0x80000000, 0x00050001, 0x7FFF0000  # the process; with EPERM; go on
_NO_NEW_PRIVS, _SET_SECCOMP, _PDEATHSIG = 38, 22, 1  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # by landlock's version
_LATER_FILE_RIGHTS = (1 << 16) - 1
_NET_RIGHTS, _SCOPES = 0b11, 0b11  # binding and connecting by TCP; abstract sockets and signals to others

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(Exception):
    """This machine cannot lock the code in."""


def enter() -> None:
    """Lock this process in, for good. Raises JailError; then it must end."""
    if platform.machine() != "x86_64" or not hasattr(os, "fork"):
        raise JailError(f"there is no list of system calls for {platform.machine()}")
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files()
    _restrict_calls()


def _restrict_files() -> None:
    version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise JailError("the kernel has no landlock")
    rights = struct.pack("QQQ", _FILE_RIGHTS.get(version, _LATER_FILE_RIGHTS), _NET_RIGHTS, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _checked(_libc.syscall(_CREATE_RULESET, rights, size, 0), "landlock_create_ruleset")
    for path in {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")), "/lib", "/lib64", "/usr/lib"}:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        beneath = struct.pack("=Qi", _READ_FILE | _READ_DIR, place)
        _checked(_libc.syscall(_ADD_RULE, rules, 1, beneath, 0), "landlock_add_rule")
        os.close(place)
    _checked(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _restrict_calls() -> None:
    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    numbers = sorted(ALLOWED.values())
    program = [
        step(_LOAD, 4),  # of struct seccomp_data: the architecture
        step(_EQUAL, _ARCH_X86_64, 1, 0),
        step(_RETURN, _KILL),
        step(_LOAD, 0),  # the call's number
        step(_NOT_LESS, _X32_BIT, 0, 1),
        step(_RETURN, _KILL),
        *(step(_EQUAL, number, len(numbers) - place, 0) for place, number in enumerate(numbers)),
        step(_RETURN, _REFUSE),
        step(_RETURN, _PASS),
    ]
    body = ctypes.create_string_buffer(b"".join(program))
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(body))
    _checked(_libc.prctl(_SET_SECCOMP, 2, filter_, 0, 0), "seccomp")


def _checked(answer: int, what: str) -> int:
    if answer < 0:
        raise JailError(f"{what}: {os.strerror(ctypes.get_errno())}")
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
            _close_all_but(keep)
            for name, most in (("NOFILE", 64), ("FSIZE", 0), ("CORE", 0), ("CPU", _CHILDREN_CPU_SECONDS)):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            enter()
            work()
            code = 0
    except BaseException:  # whatever it is, the answer is wrong
        code = 1
    os._exit(code)


def _close_all_but(keep: set[int]) -> None:
    last = 2
    for number in sorted(number for number in keep if number > last):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, 1 << 16)
    for number in (0, 1, 2):
        if number not in keep:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)


def can_lock_in() -> bool:
    """Whether a process can be locked in here, tried out."""
    return ended_well(locked_in(lambda: None, set(), 5.0))


def ended_well(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


# --- an examination ---------------------------------------------------------------------------------------------------


def passes(tests: str, answer: str, seconds: float) -> bool:
    """Whether the tests, Python text with asserts, pass with the functions that the answer, Python text, defines."""
    try:
        names = defined(answer)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    to_suspect, to_examiner = os.pipe(), os.pipe()
    suspect = locked_in(
        lambda: _be_examined(answer, to_suspect[0], to_examiner[1]), {to_suspect[0], to_examiner[1]}, seconds
    )
    examiner = locked_in(
        lambda: _examine(tests, names, to_examiner[0], to_suspect[1]), {to_examiner[0], to_suspect[1]}, seconds
    )
    for end in (*to_suspect, *to_examiner):
        os.close(end)
    passed = ended_well(examiner)
    os.kill(suspect, signal.SIGKILL)
    os.waitpid(suspect, 0)
    return passed


def defined(answer: str) -> set[str]:
    """The names that a Python text defines at its top level. Raises SyntaxError or ValueError; nothing is run."""
    names: set[str] = set()
    for statement in ast.parse(answer).body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


def _be_examined(answer: str, questions: int, replies: int) -> None:
    """The suspect: run the answer, then call its functions as asked."""
    space: dict[str, Any] = {"__name__": "answer"}
    exec(compile(answer, "answer", "exec"), space)
    for line in _lines(questions):
        name, positional, named = ast.literal_eval(line)
        try:
            reply = ("value", space[name](*positional, **named))
        except Exception as error:
            reply = ("error", type(error).__name__)
        _send(replies, repr(reply))


def _examine(tests: str, names: set[str], replies: int, questions: int) -> None:
    """The examiner: run the tests, in which each name asks the suspect."""
    lines = _lines(replies)

    def ask(name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        question = repr((name, positional, named))
        ast.literal_eval(question)  # only literals can be asked about
        _send(questions, question)
        kind, value = ast.literal_eval(next(lines))
        if kind == "value":
            return value
        error = getattr(builtins, value, RuntimeError)
        raise error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError

    def proxy(name: str) -> Callable[..., Any]:
        return lambda *positional, **named: ask(name, positional, named)

    exec(compile(tests, "tests", "exec"), {"__name__": "tests", **{name: proxy(name) for name in names}})


def _send(end: int, text: str) -> None:
    data = text.encode() + b"\n"
    if len(data) > REPLY_BYTES:
        raise ValueError("too long")
    while data:
        data = data[os.write(end, data) :]


def _lines(end: int) -> Any:
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
    Integer Float Rational Symbol Function Pow Mul Add Abs factorial exp log ln sqrt cbrt root sign sin cos tan cot sec
    csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh acoth pi oo
    a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G H I J K L M P R T U V W X Y Z
    """.split()  # noqa: SIM905
)


def worth(score: Callable[[], float], seconds: float) -> float:
    """What a scorer gives, from 0 to 1, asked in a fork that is locked in; 0 where it fails."""
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
    text = os.read(ours, SAID_BYTES) if ended_well(pid) else b""
    os.close(ours)
    return text.decode(errors="replace")


def _only_harmless(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and isinstance(code := arguments[0], CodeType):
        caller = sys._getframe(1).f_code.co_filename
        if not _harmless(code, _MATHEMATICS if "/sympy/parsing/" in caller else _BUILTINS):
            os._exit(1)


def _harmless(code: CodeType, names: frozenset[str]) -> bool:
    """Whether code is a module's, or an expression of these names. Others may be a scorer's own: the right answer."""
    if not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen "):
        return True  # a module
    if code.co_names == ("sympy",) and code.co_consts == (0, ("*",), None):
        return True  # `from sympy import *`, which sympy runs before it parses
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return False
    return names.issuperset(code.co_names) and all(step.opname in _STEPS for step in dis.get_instructions(code))


if __name__ == "__main__":
    sys.exit(not can_lock_in())
