"""``join --detach``: the same command in the background, until it is known whether it works."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from ftis_node.errors import UserError
from ftis_node.observe.answers import Status
from ftis_node.observe.api import ask
from ftis_node.observe.logs import ENDED, Growing, as_object, begin_output
from ftis_node.store.home import Home

POLL_SECONDS = 0.3
SILENT_SECONDS = 1.5
LINE_SECONDS = 10.0  # between two lines on the same work
ALARMING = ("WARNING", "ERROR", "CRITICAL")


def detach(
    home: Path, arguments: Sequence[str], tell: Callable[[str], None], peers: Sequence[str] = ()
) -> tuple[Status, int | None]:
    """Start a daemon that outlives this process and wait until it has its model, however long that takes.

    Args:
        arguments: of ``ftis-node``, without ``--detach``.
        tell: given a sentence when it does something else, and now and then; and what its log says of `peers`, whose
            addresses its owner named: that one does not answer, first of all.

    Returns the daemon's status and process id, None if it had nothing to do and has ended.

    Raises:
        SystemExit: it ended, with its exit code; `tell` was given the error that it had printed.
        UserError: it ended and had printed none.
    """
    place = Home(home)
    home.mkdir(parents=True, exist_ok=True)
    output = begin_output(home)
    before = 0
    if output.exists():
        before = output.stat().st_size
    news = _News(place.log, [address.rpartition("/")[2] for address in peers])
    with output.open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "ftis_node", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    told = None
    due = time.monotonic() + SILENT_SECONDS
    try:
        while daemon.poll() is None:
            status = _status(place, daemon.pid)
            if status is not None and status.state != "LOADING":
                return status, daemon.pid
            work = None
            said = f"The daemon starts as process {daemon.pid}; it loads its libraries first."
            if status is not None:
                said = status.reason
                work = said
                if status.doing is not None:
                    said += f" {status.doing.sentence()}."
                    work = status.doing.what
            if work != told or time.monotonic() > due:
                told = work
                due = time.monotonic() + LINE_SECONDS
                tell(said)
            for line in news.lines():
                tell(line)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        tell(f"The daemon goes on starting as process {daemon.pid}; `kill {daemon.pid}` ends it.")
        raise
    if daemon.returncode == 0:
        return Status(state="STOPPED", reason="It has taken its steps already."), None
    with output.open("rb") as log:
        log.seek(before)
        printed = log.read().decode(errors="replace").splitlines()
    error = list(dropwhile(lambda line: not line.startswith("error: "), printed))
    for line in error:
        tell(line)
    if error:
        sys.exit(daemon.returncode)
    ended = UserError(
        f"The daemon ended while it was starting (exit code {daemon.returncode}).", f"Look into {output}."
    )
    ended.exit_code = daemon.returncode
    raise ended


class _News:
    """New log lines that the owner should see at once: warnings, and all about the peers that were named."""

    def __init__(self, log: Path, names: Sequence[str]) -> None:
        self._log = log
        self._names = names
        self._growing = None
        if log.exists():
            self._growing = Growing(log, added=True)

    def lines(self) -> Iterator[str]:
        """Those since the last call."""
        with suppress(OSError):
            self._growing = self._growing or Growing(self._log)
            for event in map(as_object, self._growing.lines()):
                message = str(event.get("message", ""))
                wanted = event.get("level") in ALARMING or any(name in message for name in self._names)
                if wanted and not message.startswith(ENDED):  # which is told as the daemon printed it
                    yield message


def _status(home: Home, pid: int) -> Status | None:
    """Output of the new daemon; not that of another on the same home."""
    record = home.runtime()
    if record is not None and record.pid == pid:
        with suppress(UserError):
            return ask(home.api_socket(), "/status", Status)
    return None
