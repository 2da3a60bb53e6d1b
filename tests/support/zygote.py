"""Processes of ftis-node that tests start are forked from one that has imported torch and transformers: seconds each.

A zygote is a child of the process that asks it, has one thread, and does nothing but fork. What it forks is a child of
the one who asked too (CLONE_PARENT): process ids, exit codes, signals and orphans are those of a real start. So are
arguments, environment, descriptors, folder, limits and niceness, which are handed over. What libraries read when they
are imported cannot change any more: an environment that differs there has a zygote of its own, the second time that it
is seen. Each process that is forked has a zygote too, for what it starts.

So are the processes of pytest-xdist, which run the tests and have their zygote from there; those that run a person's
reward function; and, from zygotes that have imported nothing else, those that judge mathematics and make
reasoning-gym's rows. Who runs strangers' code is started really. pytest finds this module imported, and has nothing to
rewrite in it: PYTEST_DONT_REWRITE.

With TESTS_START_PLAIN in the environment (the fixture `plain`) a process is started really, as it is with another
command line than these, without OMP_NUM_THREADS where torch is imported, on a terminal, and on another system than
Linux.
"""

import atexit
import collections
import contextlib
import ctypes
import fcntl
import importlib
import inspect
import json
import os
import resource
import runpy
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from ftis_node.host.loading import loading
from ftis_node.host.loops import PARENT
from ftis_node.host.quiet import QUIET, be_quiet
from ftis_node.tasks import judge

NAME = "ftis-zygote"
LOADED = ("ftis_node.cli", "ftis_node.node.daemon", "ftis_node.worker.parallel")
MATHEMATICS = ("math_verify", "sympy.combinatorics", "sympy.physics.units", "sympy.tensor.tensor")
JUDGE = str(judge._CHILD)
RUNNER = "import sys;exec(eval(sys.stdin.readline()))"  # execnet's, by which pytest-xdist begins a process
MODULES = (
    "ftis_node",
    "ftis_node.policy.gguf",
    "ftis_node.worker",
    "tests.support.ranks",
    "tests.support.parts",
    "tests.support.program",
)
SET_BY_IMPORTS = ("PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "HIVEMIND_LOGLEVEL")
# What is read when it is used. Threads are set anew in each process.
PASSED = (
    "FTIS_",
    "PYTEST_",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "NOTIFY_SOCKET",
    "XDG_CACHE_HOME",
    "WATCHDOG_",
    PARENT,
    *SET_BY_IMPORTS,
    *QUIET,
)
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
ROOM = 1 << 20  # bytes of a request
MOST = 64  # descriptors of one
ABOVE = 200  # descriptors that are not in anybody's way
ROOT = Path(__file__).parents[2]
CLONE_PARENT = 0x8000
CLONE_CHILD_CLEARTID = 0x200000
CLONE_CHILD_SETTID = 0x1000000
CLONE3 = 435
PR_SET_NAME = 15
PR_GET_TID_ADDRESS = 40
TITLE = "-" * 4000  # room for the arguments of what is forked

Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]
_libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, as os.fork does
_plain = subprocess.Popen._execute_child
_children = psutil.Process.children
_spawn = util.spawnv_passfds
_inherited: dict[Key, socket.socket] = {}  # the zygote of a process that was forked


class Job(NamedTuple):
    """What a process is started with: where each descriptor goes, and what it would inherit.

    safe_path: no module is found in its folder (python -P).
    """

    words: list[str]
    environment: dict[str, str]
    descriptors: list[int]
    folder: str
    safe_path: bool
    session: bool
    group: int
    umask: int
    nice: int
    limits: list[tuple[int, int]]


class Zygotes:
    """The zygotes of this process, by their libraries and what these have read. Only tests begin them."""

    def __init__(self, *, may_begin: bool):
        self._lock = threading.Lock()
        self._seen: collections.Counter[Key] = collections.Counter()
        self._running: dict[Key, socket.socket | None] = dict(_inherited)
        self._may_begin = may_begin
        self._begun: list[subprocess.Popen[bytes]] = []

    def end(self):
        for control in filter(None, self._running.values()):
            control.close()
        for zygote in self._begun:
            zygote.wait()

    def fork(self, job: Job, descriptors: Sequence[int]) -> int | None:
        """The process id of a new child; None if it is to be started really."""
        key = _key(job)
        with self._lock:
            self._seen[key] += 1
            worth_it = self._seen[key] > 1 or RUNNER in job.words
            if self._may_begin and key not in self._running and worth_it:
                self._running[key] = self._begin(key[0], job.environment)
            control = self._running.get(key)
            if control is None:
                return None
            try:
                socket.send_fds(control, [json.dumps(job).encode()], descriptors)
                told = int(control.recv(16))
            except (OSError, ValueError):  # it is gone
                self._running[key], told = None, 0
            return told or None

    def _begin(self, libraries: Sequence[str], environment: Mapping[str, str]) -> socket.socket | None:
        """A zygote that is ready; None if it cannot be one, because its libraries have threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            zygote = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno()), *libraries, TITLE],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        self._begun.append(zygote)
        return ours if ours.recv(1) else None


def _key(job: Job) -> Key:
    """What is imported for a process, and what may have been read meanwhile; ROOT is where all look."""
    given = job.environment.items()
    read = frozenset((name, text.removeprefix(f"{ROOT}:")) for name, text in given if not name.startswith(PASSED))
    return _libraries(job.words), read


def _libraries(words: Sequence[str]) -> tuple[str, ...]:
    """What a zygote imports for processes with such a command line; nothing: they are started really."""
    match words:
        case [sys.executable, "-m", module, *_] if module in MODULES:
            return LOADED
        case [sys.executable, "-u", "-c", line] if line == RUNNER:
            return LOADED
        case [sys.executable, "-c", _, "--multiprocessing-fork"]:
            return LOADED  # of the lab's crew
        case [sys.executable, script, *_, "math"] if script == JUDGE:
            return MATHEMATICS
        case [sys.executable, script, *_, rule] if script == JUDGE and rule.partition(":")[0] not in judge.SECONDS:
            return LOADED  # a person's function
        case [sys.executable, script, *_] if script.endswith("/gym_child.py"):
            return ("reasoning_gym",)
    return ()


def install(zygotes: Zygotes):
    """Let this process fork what it would start; its zygotes are no children of it, for who asks."""
    signature = inspect.signature(_plain)

    def execute(*given: Any):
        call = signature.bind(*given).arguments
        job, descriptors = _job(call)
        pid = zygotes.fork(job, descriptors) if job is not None else None
        if pid is None:
            return _plain(*given)
        popen = call["self"]
        popen.pid = pid
        popen._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(call[name] for name in ends))

    def children(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        found = []
        for child in _children(self, recursive):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() != NAME:
                    found.append(child)
        return found

    def spawn(path: bytes, words: Sequence[bytes], descriptors: Sequence[int]) -> int:
        line = [os.fsdecode(word) for word in words]
        if not _libraries(line):
            return _spawn(path, words, descriptors)
        child = subprocess.Popen(line, pass_fds=descriptors)
        child.returncode = 0  # who asked waits for it
        return child.pid

    util.spawnv_passfds = spawn
    subprocess.Popen._execute_child = execute
    psutil.Process.children = children


def _job(call: Mapping[str, Any]) -> tuple[Job | None, list[int]]:
    words = call["args"]
    safe_path = not isinstance(words, str) and [*words[1:2]] == ["-P"]
    if safe_path:
        words = [words[0], *words[2:]]
    environment = dict(os.environ if call["env"] is None else call["env"])
    special = ("executable", "preexec_fn", "shell", "gids")
    libraries = _libraries(words)
    if (
        not libraries
        or any(call[name] for name in special)
        or not call["close_fds"]
        or call["umask"] >= 0
        or "TESTS_START_PLAIN" in environment | os.environ
        or (libraries == LOADED and "OMP_NUM_THREADS" not in environment)
        or sys.platform != "linux"
    ):
        return None, []
    ends = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
    descriptors = [*(end if end >= 0 else number for number, end in enumerate(ends)), *call["pass_fds"]]
    if any(map(os.isatty, descriptors)):
        return None, []
    mask = os.umask(0)
    os.umask(mask)
    job = Job(
        [os.fspath(word) for word in words],
        environment,
        [0, 1, 2, *call["pass_fds"]],
        os.fspath(call["cwd"] or os.getcwd()),
        safe_path,
        call["start_new_session"],
        call["process_group"],
        mask,
        os.getpriority(os.PRIO_PROCESS, 0),
        [resource.getrlimit(limit) for limit in LIMITS],
    )
    return job, descriptors


def main():
    """A zygote; in what it forks, a command."""
    with loading():
        for name in sys.argv[2:-1]:
            importlib.import_module(name)
    control = socket.socket(fileno=int(sys.argv[1]))
    if len(os.listdir("/proc/self/task")) > 1:
        return
    control.send(b"1")
    job = serve(control)
    _, first, *words = job.words
    sys.argv[:] = words
    code = 1
    try:
        if first == "-m":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif first in ("-u", "-c"):
            exec(words[first == "-u"], {"__name__": "__main__"})
        else:
            sys.argv.insert(0, first)
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # without taking thousands of modules apart


def serve(control: socket.socket) -> Job:
    """Fork for each request until the asker is gone. Returns in each process that is forked."""
    _name(NAME)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, ROOM, MOST)
        if not message:
            os._exit(0)
        if not _fork_sibling():
            asker = socket.socket(fileno=fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, ABOVE))
            try:
                return _become(Job(*json.loads(message)), descriptors, asker)
            except Exception:  # as in a folder that is not there; a real start says so
                asker.send(b"0")
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_sibling() -> int:
    """os.fork, whose child is one of this process's parent."""
    own = ctypes.c_ulong()
    _libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(own), 0, 0, 0)  # what glibc's fork has the kernel write to
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
    given = struct.pack("8Q", flags, 0, own.value, 0, 0, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(CLONE3, given, len(given))
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    if pid < 0:
        os._exit(1)
    return int(pid)


def _become(job: Job, descriptors: Sequence[int], asker: socket.socket) -> Job:
    """Be what was asked for, with a zygote of its own."""
    _name("python")
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.detach(), asker.detach()
        _keep({0, 1, 2, theirs.fileno()})
        return serve(theirs)
    theirs.close()
    own = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, ABOVE))
    for there, descriptor in zip(job.descriptors, moved, strict=True):
        os.dup2(descriptor, there)
    _keep({*job.descriptors, asker.fileno(), own.fileno()})
    _title(job.words)
    if job.session:
        os.setsid()
    elif job.group >= 0:
        os.setpgid(0, job.group)
    for limit, pair in zip(LIMITS, job.limits, strict=True):
        resource.setrlimit(limit, tuple(pair))
    os.setpriority(os.PRIO_PROCESS, 0, job.nice)
    os.umask(job.umask)
    os.chdir(job.folder)
    _have(job)
    _inherited[_key(job)] = own
    install(Zygotes(may_begin=False))
    asker.send(str(os.getpid()).encode())
    asker.close()
    return job


def _have(job: Job):
    """The environment, and what has read it already."""
    theirs = {name: text for name, text in os.environ.items() if name in SET_BY_IMPORTS}
    os.environ.clear()
    os.environ.update(theirs | job.environment)
    be_quiet()
    sys.path[0] = job.folder
    if job.safe_path:
        sys.path[0] = str(ROOT)
    if _libraries(job.words) == LOADED:
        import huggingface_hub.constants
        import torch

        torch.set_num_threads(int(job.environment["OMP_NUM_THREADS"]))
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper()
        huggingface_hub.constants.HF_HUB_OFFLINE = offline in ("1", "ON", "YES", "TRUE")


def _keep(descriptors: set[int]):
    for name in map(int, os.listdir("/proc/self/fd")):
        if name not in descriptors:
            with contextlib.suppress(OSError):
                os.close(name)


def _name(name: str):
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _title(words: Sequence[str]):
    """Let others see these arguments, with spaces between them: the kernel takes it so where the last byte is not 0."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = " ".join(words).encode()[: end - begin - 2].ljust(end - begin - 1, b"\0") + b"x"
    ctypes.memmove(begin, text, end - begin)


def pytest_configure(config: pytest.Config):
    zygotes = Zygotes(may_begin=True)
    install(zygotes)
    config.add_cleanup(zygotes.end)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch):
    """Processes are started really: for tests of the start itself."""
    monkeypatch.setenv("TESTS_START_PLAIN", "1")
