"""A compute process as seen by the process that started it: the daemon, or the first of several devices' processes."""

import asyncio
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, ClassVar, NamedTuple

import msgspec

from ftis_node.errors import NO_ROOM, FtisError, UsageError, UserError
from ftis_node.worker.messages import Answer, Call, Fault, Load, Reply, Request, decoded, encoded, pack, receive

EXIT_SECONDS = 5.0


class WorkerDied(FtisError):
    """The compute process is gone; its open requests are lost, its saved files are not.

    no_room: it ended for want of memory in a step that several devices take together.
    """

    def __init__(self, text: str, *, no_room: bool = False) -> None:
        super().__init__(text)
        self.no_room = no_room


class WorkerFault(FtisError):
    """The compute process answered with an error and is still running."""


class _Asked(NamedTuple):
    """An open request.

    kind: the type of its answer. since: when it was sent, in seconds of the monotonic clock; inf for a load, which may
    take as long as it likes.
    """

    future: Future[Any]
    kind: type
    since: float


class Worker:
    """Starts a compute process and sends it requests, from any thread. One instance is one process."""

    MODULE: ClassVar[str] = "ftis_node.worker"

    def __init__(self, died: Callable[[int | None], None] | None = None) -> None:
        """
        Args:
            died: called in a thread, with the exit code, when the process ends by itself.
        """
        self._died = died
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Asked] = {}  # by the number of the call
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None  # None: not started, or ended
        self._sender = ThreadPoolExecutor(1)  # a busy process may be slow to read
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None without a running process, because the system reuses ids."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        return None

    def owing_seconds(self) -> float:
        """Seconds since the oldest open request; 0 without one, and during a load, which may be a long download."""
        asked = [one.since for one in list(self._waiting.values())]
        return max(0.0, time.monotonic() - min(asked, default=math.inf))

    def start(self, log: IO[bytes] | None = None, threads: int | None = None, nice: int = 0) -> None:
        """Spawn the process.

        Args:
            log: for its output; by default this process's stderr.
            threads: of the CPU that it may use; by default as many as it finds.
            nice: its scheduling priority, and that of the processes that it starts.
        """
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        output = log or sys.stderr
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.MODULE, str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, nice)
        self._reader = threading.Thread(target=self._read, args=(self._connection, self._process), daemon=True)
        self._reader.start()

    def ask(self, request: Request[Answer]) -> Future[Answer]:
        """Send a request. The future has the answer, or the errors of `call`. Raises WorkerDied without a process."""
        future: Future[Answer] = Future()
        body = encoded(request)
        with self._lock:
            connection = self._connection
            if connection is None:
                raise WorkerDied("The compute process is not running.")
            number = next(self._ids)
            since = time.monotonic()
            if isinstance(request, Load):
                since = math.inf
            self._waiting[number] = _Asked(future, request.answer(), since)
            self._sender.submit(_send, connection, pack(Call(number, request.op, body)))
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    async def call(self, request: Request[Answer]) -> Answer:
        """Call the engine and return its answer, without a time limit because a step may take minutes.

        Raises:
            UserError: the engine refused for a reason that a person can fix.
            WorkerFault: the engine failed otherwise.
            WorkerDied: the process ended before it answered.
        """
        return await asyncio.wrap_future(self.ask(request))

    async def stop(self) -> None:
        """End the process at once. Save first what must last."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """As `stop`, for threads."""
        self._died = None
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _read(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        """Hand out answers until the process ends; then every request that is open fails."""
        for reply in iter(lambda: receive(connection, Reply), None):
            self._answer(reply)
        with self._lock:
            self._connection = None
        self._sender.shutdown()
        connection.close()
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(EXIT_SECONDS)
        if self._died is not None:
            self._died(code)
        for asked in list(self._waiting.values()):
            if asked.future.set_running_or_notify_cancel():
                died = WorkerDied("The compute process ended while it was working.", no_room=code == NO_ROOM)
                asked.future.set_exception(died)

    def _answer(self, reply: Reply) -> None:
        """Hand out one reply; that of a request that nobody waits for any more is dropped."""
        asked = self._waiting.get(reply.id)
        if asked is None or not asked.future.set_running_or_notify_cancel():
            return
        if reply.fault is not None:
            asked.future.set_exception(error_of(reply.fault))
            return
        try:
            asked.future.set_result(decoded(reply.result, asked.kind))
        except msgspec.ValidationError as error:
            asked.future.set_exception(error)


def _send(connection: Connection, message: bytes) -> None:
    with suppress(OSError):  # the reader sees that the process has ended
        connection.send_bytes(message)


def error_of(fault: Fault) -> FtisError:
    """The error to raise here: the engine's own if a person can fix it, else a `WorkerFault`."""
    if fault.kind == "UsageError":
        return UsageError(fault.what, fault.fix)
    if fault.fix:
        return UserError(fault.what, fault.fix)
    return WorkerFault(f"{fault.kind}: {fault.what}")
