"""The network process's end of the pipe to the compute process."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from contextlib import suppress
from typing import IO, ClassVar

import msgspec

from ftis_node.errors import NO_ROOM, FtisError, UsageError, UserError
from ftis_node.worker.messages import HEADER, Answer, Call, Fault, Load, Reply, Request, decoded, encoded, pack

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


class Worker:
    """Starts the compute process and sends it requests. One instance is one process."""

    MODULE: ClassVar[str] = "ftis_node.worker"

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._asked: dict[int, float] = {}  # times of open requests by the monotonic clock, without `load`
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None without a running process, because the system reuses ids."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def owing_seconds(self) -> float:
        """Seconds since the oldest open request; 0 without one, and during a load, which may be a long download."""
        return time.monotonic() - min(self._asked.values()) if self._asked else 0.0

    async def start(self, log: IO[bytes] | None = None) -> None:
        """Spawn the process; its output goes to `log`, or to this process's stderr."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.MODULE, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log or sys.stderr,
                stderr=log or sys.stderr,
                start_new_session=True,
            )
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reader_task = asyncio.create_task(self._read(reader))

    async def call(self, request: Request[Answer]) -> Answer:
        """Call the engine and return its answer, without a time limit because a step may take minutes.

        Raises:
            UserError: the engine refused for a reason that a person can fix.
            WorkerFault: the engine failed otherwise.
            WorkerDied: the process ended before it answered.
        """
        if self._writer is None or self._reader_task is None or self._reader_task.done():
            raise WorkerDied("The compute process is not running.")
        number = next(self._ids)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if not isinstance(request, Load):
            self._asked[number] = time.monotonic()
        try:
            self._writer.write(pack(Call(number, request.op, encoded(request))))
            await self._writer.drain()
            answer: Answer = decoded(await future, request.answer())
            return answer
        except (ConnectionError, BrokenPipeError) as error:
            raise WorkerDied("The compute process ended.") from error
        finally:
            self._waiting.pop(number, None)
            self._asked.pop(number, None)

    async def stop(self) -> None:
        """End the process at once. Save first what must last."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader_task is not None:
            await asyncio.gather(self._reader_task, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                reply = decoded(await reader.readexactly(HEADER.unpack(header)[0]), Reply)
                future = self._waiting.get(reply.id)
                if future is None or future.done():
                    continue
                if reply.fault is None:
                    future.set_result(reply.result)
                else:
                    future.set_exception(error_of(reply.fault))
        except (asyncio.IncompleteReadError, ConnectionError):
            no_room = await self._code() == NO_ROOM
            for future in self._waiting.values():
                if not future.done():
                    why = "The compute process ended while it was working."
                    future.set_exception(WorkerDied(why, no_room=no_room))

    async def _code(self) -> int | None:
        """The exit code of a process whose stream has ended; None if it is still there after a while."""
        assert self._process is not None
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        return None


def error_of(fault: Fault) -> FtisError:
    """The error to raise here: the engine's own if a person can fix it, else a `WorkerFault`."""
    if fault.kind == "UsageError":
        return UsageError(fault.what, fault.fix)
    return UserError(fault.what, fault.fix) if fault.fix else WorkerFault(f"{fault.kind}: {fault.what}")
