"""``join --detach``: the same command in the background, until it is known whether it works."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftis_node.errors import UserError
from ftis_node.observe.api import ask
from ftis_node.observe.logs import begin_output
from ftis_node.store.home import Home

POLL_SECONDS = 0.3
ERROR_LINES = 2


def detach(home: Path, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Starts a daemon that outlives this process and waits until it has its model, however long that takes.

    Args:
        arguments: of ``ftis-node``, without ``--detach``.
        tell: given each sentence of what it is doing.

    Returns the daemon's status; `pid` is None if it had nothing to do and has ended.

    Raises:
        UserError: another one runs there, or it ended; then the message is its own.
    """
    place = Home(home)
    if place.in_use():
        raise place.taken()
    home.mkdir(parents=True, exist_ok=True)
    output = begin_output(home)
    before = output.stat().st_size if output.exists() else 0
    with output.open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "ftis_node", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    told = ""
    try:
        while daemon.poll() is None:
            status = _status(place, daemon.pid)
            if status is not None and status["state"] != "LOADING":
                return status | {"pid": daemon.pid}
            if status is not None and status["reason"] != told:
                told = status["reason"]
                tell(told)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        tell(f"The daemon goes on starting as process {daemon.pid}; `kill {daemon.pid}` ends it.")
        raise
    if daemon.returncode == 0:
        return {"state": "STOPPED", "reason": "It has taken its steps already.", "pid": None}
    raise _its_own(output, before, daemon.returncode)


def _status(home: Home, pid: int) -> dict[str, Any] | None:
    """What the new daemon says; not what another on the same home says."""
    record = home.runtime()
    if record is not None and record.get("pid") == pid:
        with suppress(UserError):
            return ask(home.api_socket(), "/status")
    return None


def _its_own(output: Path, before: int, code: int) -> UserError:
    """The error that a daemon ended with, in what it added to its output."""
    with output.open("rb") as log:
        log.seek(before)
        lines = log.read().decode(errors="replace").splitlines()
    start = max((number for number, line in enumerate(lines) if line.startswith("error: ")), default=None)
    if start is None:
        error = UserError(f"The daemon ended while it was starting (exit code {code}).", f"Look into {output}.")
    else:
        what, *fix = lines[start : start + ERROR_LINES]
        error = UserError(what.removeprefix("error: "), " ".join(fix).strip() or f"Look into {output}.")
    error.exit_code = code or 1
    return error
