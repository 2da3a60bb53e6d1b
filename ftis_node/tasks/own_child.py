"""The process that runs a person's reward function, ``python -m ftis_node.tasks.own_child``; `own` kills it at will.

Requests come as JSON lines `[text, answer]` over the socket that is its stdin. It answers each with a JSON line: a
score as `[reward, formatted, lenient]`, or the reason for none as a string. R: ready.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from ftis_node.tasks.judge_child import next_line
from ftis_node.tasks.own import call, judged


def main(parent: int, seconds: float, name: str) -> None:
    """Serve until the other end is closed, the process `parent` is gone, or an answer takes twice `seconds`."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The kernel ends this process at the alarm whatever Python is busy with, and even if nobody is left to kill it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    scorer = call(name)[1].scorer
    if scorer is None:
        sys.exit(f"{name} has no reward function any more.")
    connection.sendall(b"R")
    while (line := next_line(connection, parent)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        reply = judged(scorer, *json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
