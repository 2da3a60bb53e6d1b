"""Other compute processes of this node, each on a device of its own, that the first one drives."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import ClassVar, Generic

import msgspec

from ftis_node.errors import NO_ROOM
from ftis_node.text import say
from ftis_node.worker.client import WorkerDied, error_of
from ftis_node.worker.messages import Answer, Call, Reply, Request, decoded, encoded, pack, receive


class Asked(Generic[Answer]):
    """A request under way."""

    def __init__(self, request: Request[Answer], future: Future[msgspec.Raw]) -> None:
        self._kind, self._future = request.answer(), future

    def result(self) -> Answer:
        """Wait for the answer. Raises as `Worker.call`."""
        answer: Answer = decoded(self._future.result(), self._kind)
        return answer


class Rank:
    """Starts a compute process that is a rank. If it dies, this process ends too: what it has is a part of a step."""

    MODULE: ClassVar[str] = "ftis_node.worker"

    def __init__(self, threads: int | None = None) -> None:
        """
        Args:
            threads: of the CPU that it may use; by default as many as it finds.
        """
        ours, theirs = socket.socketpair()
        self._connection, self._ids, self._lock = ours, itertools.count(), threading.Lock()
        self._waiting: dict[int, Future[msgspec.Raw]] = {}
        self._ended = False
        environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request[Answer]) -> Asked[Answer]:
        """Send a request; from any thread."""
        future: Future[msgspec.Raw] = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = future
            self._connection.sendall(pack(Call(number, request.op, encoded(request))))
        return Asked(request, future)

    def end(self) -> None:
        """End the process at once."""
        self._ended = True
        self._connection.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _read(self) -> None:
        try:
            while (reply := receive(self._connection, Reply)) is not None:
                future = self._waiting.pop(reply.id)
                if reply.fault is None:
                    future.set_result(reply.result)
                else:
                    future.set_exception(error_of(reply.fault))
        except OSError:
            pass
        if not self._ended:
            code = self._process.wait()
            say(f"The compute process {self.pid} of one of several devices has ended ({code}).", error=True, flush=True)
            os._exit(NO_ROOM if code == NO_ROOM else 1)
        for future in self._waiting.values():
            future.set_exception(WorkerDied("The compute process ended."))
