"""Requests of the system, a person or a terminal to the daemon's process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def listen(stop: Callable[[int], None]) -> None:
    """Call `stop` with the exit code on SIGTERM (0), on Ctrl-C (130) and when the terminal is closed (129)."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, 0)
    loop.add_signal_handler(signal.SIGINT, stop, 130)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup would not have it matter
        loop.add_signal_handler(signal.SIGHUP, stop, 129)
