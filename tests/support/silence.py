"""What the tests of silence need: a list of whatever a process tries to reach."""

import json
import textwrap
from pathlib import Path

# Python loads a module of this name at its start, in every process that has the folder on its path.
HOOK = textwrap.dedent(
    """
    import json, os, sys

    _FILE = os.environ["TRIED"]
    _EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg")

    def _heard(event, args):
        if event in _EVENTS:
            address = args[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else args[1]
            with open(_FILE, "a") as file:
                file.write(json.dumps([event, repr(address), " ".join(sys.orig_argv[1:4])]) + "\\n")

    sys.addaudithook(_heard)
    """
)


def listening_in(folder: Path) -> dict[str, str]:
    """The variables for a process, and all that it starts, whose attempts `tried` is to tell."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    return {"TRIED": str(folder / "tried.jsonl"), "PYTHONPATH": str(folder)}


def tried(folder: Path) -> list[tuple[str, str, str]]:
    """(kind, address, process) of each attempt."""
    file = folder / "tried.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
