"""Requests of the system, a person or a terminal to the daemon's process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable

PARENT = "END_WITH_PROCESS"
"""An environment variable: the id of the process that started this one and that it does not outlive."""
_PDEATHSIG = 1  # of prctl


def listen(stop: Callable[[int], None]) -> None:
    """Call `stop` with the exit code on SIGTERM (0), on Ctrl-C (130) and when the terminal is closed (129).

    Takes `PARENT` from the environment: the end of that process, however it ends, counts as a SIGTERM.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, 0)
    loop.add_signal_handler(signal.SIGINT, stop, 130)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup would not have it matter
        loop.add_signal_handler(signal.SIGHUP, stop, 129)
    if parent := os.environ.pop(PARENT, ""):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):  # it ended before this
            stop(0)
