"""``python -m ftis_node.worker FD``: the compute process, serving the network process at the other end of FD."""

import os
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from queue import Queue

from ftis_node.errors import UserError
from ftis_node.host.interruption import Interrupted
from ftis_node.host.loading import loading
from ftis_node.host.loops import signal_with_parent
from ftis_node.worker.messages import REQUESTS, Call, Fault, Reply, decoded, encoded, pack, receive

with loading():
    from ftis_node.worker.parallel import Ranks

# These operations need no GPU and must run beside a long step or generation. Each set has a thread of its own: scoring
# must not wait for a checkpoint of gigabytes.
_ASIDE = ({"score", "texts"}, {"write"}, {"watch"}, {"interrupt"})


class _Dispatcher:
    """Reads requests, passes each to one of five threads, and writes the answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ranks = Ranks()
        self._write_lock = threading.Lock()
        self._main: Queue[Call] = Queue()
        self._aside: list[Queue[Call]] = [Queue() for _ in _ASIDE]

    def serve(self) -> None:
        """Answer requests for ever; this thread takes those that need the device."""
        threading.Thread(target=self._read, daemon=True).start()
        for calls in self._aside:
            threading.Thread(target=self._work, args=(calls,), daemon=True).start()
        self._work(self._main)

    def _read(self) -> None:
        """Queue requests until the stream ends; then exit, because the network process is gone."""
        try:
            for call in iter(lambda: receive(self._connection, Call), None):
                aside = (calls for calls, ops in zip(self._aside, _ASIDE, strict=True) if call.op in ops)
                next(aside, self._main).put(call)
        finally:
            os._exit(0)

    def _work(self, calls: Queue[Call]) -> None:
        """Answer these calls, one after another, for ever."""
        try:
            while True:
                data = self._answer(calls.get())
                with self._write_lock:
                    self._connection.send_bytes(data)
        finally:
            os._exit(1)  # if only this thread ended, its callers would wait forever

    def _answer(self, call: Call) -> bytes:
        """The bytes of the reply; a call that fails gets a fault."""
        try:
            result = self._ranks.answer(decoded(call.args, REQUESTS[call.op]))
            return pack(Reply(call.id, encoded(result)))  # within the try: a result that cannot be sent is a fault too
        except UserError as error:
            fault = Fault(type(error).__name__, error.what, error.fix)
        except Exception as error:  # the network process decides what a fault means
            if not isinstance(error, Interrupted):  # that was asked for
                traceback.print_exc()
            fault = Fault(type(error).__name__, str(error))
        return pack(Reply(call.id, fault=fault))


def main() -> None:
    """Serve the network process at the other end of the socket whose number is the argument."""
    # peft calls deprecated functions of transformers; a person can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the network process decides when to end
    signal_with_parent(signal.SIGKILL)  # it does not see that the socket is closed while it is stopped, or stuck in C
    _Dispatcher(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
