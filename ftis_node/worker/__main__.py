"""``python -m ftis_node.worker FD``: the compute process, serving the network process at the other end of FD."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from typing import Any

from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers.utils.logging import disable_progress_bar

from ftis_node.errors import UserError
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import pack, receive

# These need no GPU and are wanted while a long step or generation runs. Each set has a thread of its own: scoring must
# not wait for a checkpoint of gigabytes.
_ASIDE = (frozenset({"score", "texts"}), frozenset({"write"}), frozenset({"gpu"}), frozenset({"interrupt"}))


class _Server:
    """Reads requests, hands them to one of five threads, writes the answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._engine = Engine()
        self._write_lock = threading.Lock()
        self._main: queue.Queue[dict[str, Any]] = queue.Queue()
        self._aside: list[queue.Queue[dict[str, Any]]] = [queue.Queue() for _ in _ASIDE]

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        for requests in self._aside:
            threading.Thread(target=self._work, args=(requests,), daemon=True).start()
        self._work(self._main)

    def _read(self) -> None:
        """The end of the stream means that the network process is gone: then nobody needs this process either."""
        try:
            while (request := receive(self._connection)) is not None:
                aside = (queue for queue, ops in zip(self._aside, _ASIDE, strict=True) if request["op"] in ops)
                next(aside, self._main).put(request)
        finally:
            os._exit(0)

    def _work(self, requests: queue.Queue[dict[str, Any]]) -> None:
        try:
            while True:
                data = self._answer(requests.get())
                with self._write_lock:
                    self._connection.sendall(data)
        finally:
            os._exit(1)  # a thread that ended alone would leave its callers waiting for good

    def _answer(self, request: dict[str, Any]) -> bytes:
        try:
            result = getattr(self._engine, request["op"])(**request["args"])
            return pack({"id": request["id"], "result": result})  # in here: a result that cannot be sent is a fault too
        except UserError as error:
            told = {"kind": type(error).__name__, "what": error.what, "fix": error.fix}
        except Exception as error:  # the network process decides what a fault means; here it is only reported
            traceback.print_exc()
            told = {"kind": type(error).__name__, "what": str(error), "fix": ""}
        return pack({"id": request["id"], "error": told})


def main() -> None:
    # What peft calls of transformers is deprecated there; a person can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    disable_progress_bar()  # of transformers, for it has one even for what takes no time
    enable_progress_bars()  # but downloads take theirs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the network process decides when to end
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(True)
    _Server(connection).serve()


if __name__ == "__main__":
    main()
