"""What the tests of silence need: a hub on loopback, and a list of whatever a process tries to reach."""

import contextlib
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.served import Quiet, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"

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


@dataclass
class Hub:
    """Serves the files of one model by their names; `asked` has every request's path, `agents` who asked."""

    files: dict[str, bytes]
    address: str = ""
    asked: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)


@contextlib.contextmanager
def hub_of(files: dict[str, bytes]) -> Iterator[Hub]:
    """A stand-in for the hub, whatever a model is called there."""
    hub = Hub(files)

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        do_POST = do_GET

        def _told(self, path: str) -> bytes | None:
            """What the hub's API says of a model that is public, has one commit, and that nobody talks about."""
            if path.endswith("/discussions"):
                return b'{"discussions": [], "count": 0, "start": 0}'
            if path.endswith("/commits/main"):
                date = "2026-01-01T00:00:00.000Z"
                return json.dumps([{"id": COMMIT, "title": "", "message": "", "date": date, "authors": []}]).encode()
            if path == "/" or re.fullmatch(r"/api/models/[^/]+/[^/]+", path):
                return json.dumps({"id": path.removeprefix("/api/models/"), "private": False, "sha": COMMIT}).encode()
            return None

        def _answer(self, *, body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            hub.agents.add(self.headers.get("user-agent", ""))
            content = hub.files.get(self.path.rpartition(f"/resolve/{COMMIT}/")[2].rpartition("/resolve/main/")[2])
            if "/resolve/" not in self.path:
                content = self._told(self.path.partition("?")[0])
            self.send_response(404 if content is None else 200)
            if content is None:
                content = b"no"
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    with served(Handler) as hub.address:
        yield hub
