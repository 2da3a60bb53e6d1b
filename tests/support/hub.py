"""A hub on loopback: datasets with ranges, revisions, and downloads that break off; files of one model."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping

from tests.support.served import Quiet, served

REVISION = "5f" * 20


class Hub:
    """What it offers, and what it was asked. `breaks`: after how many bytes the next download breaks off."""

    def __init__(self):
        self.address = ""
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.model: dict[str, bytes] = {}  # whatever its name
        self.asked: list[str] = []
        self.agents: set[str] = set()
        self.ranges: list[str] = []
        self.sent = 0
        self.breaks: int | None = None
        self.refuses: Mapping[str, str] = {}  # by dataset: the hub's error code

    def offer(self, name: str, **files: bytes):
        """Files by their names, in which __ stands for / and _ for a point before the last word."""
        self.datasets[name] = {
            re.sub(r"_(jsonl|parquet|json|csv)$", r".\1", file.replace("__", "/")): content
            for file, content in files.items()
        }


@contextlib.contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Answers(Quiet):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._answer(body=False)

        def do_GET(self):
            self._answer(body=True)

        do_POST = do_GET

        def _answer(self, *, body: bool):
            hub.asked.append(self.path)
            hub.agents.add(self.headers.get("user-agent", ""))
            if info := re.fullmatch(r"/api/datasets/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path):
                self._info(info[1], info[2])
            elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", self.path):
                if not self._refused(found[1]):
                    self._file(hub.datasets[found[1]][found[3]], body=body)
            elif found := re.fullmatch(rf"/[^/]+/[^/]+/resolve/(?:{REVISION}|main)/(.*)", self.path):
                self._file(hub.model.get(found[1]), body=body)
            elif "/discussions" in self.path:
                self._send(200, b'{"discussions": [], "count": 0, "start": 0}')
            elif "/commits/main" in self.path:
                one = {
                    "id": REVISION,
                    "title": "",
                    "message": "",
                    "date": "2026-01-01T00:00:00.000Z",
                    "authors": [],
                }
                self._send(200, json.dumps([one]).encode())
            elif re.fullmatch(r"/api/models/[^/]+/[^/]+", self.path):
                self._send(200, json.dumps({"id": "a/model", "private": False, "sha": REVISION}).encode())
            elif self.path.startswith("/api/models/"):
                self._file(None, body=body)
            else:
                self._send(200, b"{}")

        def _info(self, name: str, revision: str | None):
            if self._refused(name, revision):
                return
            siblings = [{"rfilename": file, "size": len(data)} for file, data in hub.datasets[name].items()]
            facts = {
                "id": name,
                "sha": REVISION,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            self._send(200, json.dumps(facts | {"private": False, "disabled": False}).encode())

        def _refused(self, name: str, revision: str | None = None) -> bool:
            code = hub.refuses.get(name, "" if name in hub.datasets else "RepoNotFound")
            if not code and revision not in (None, "main", REVISION):
                code = "RevisionNotFound"
            if code:
                self._send(403 if code == "GatedRepo" else 404, b"{}", {"X-Error-Code": code})
            return bool(code)

        def _file(self, data: bytes | None, *, body: bool):
            if data is None:
                self._send(404, b"no", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
                return
            headers = {"X-Repo-Commit": REVISION, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            start = 0
            if asked := self.headers.get("Range"):
                hub.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[start:], headers, body=body)

        def _send(self, code: int, data: bytes, headers: Mapping[str, str] = {}, *, body: bool = True):
            self.send_response(code)
            for key, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command != "HEAD":
                whole = hub.breaks is None or "X-Repo-Commit" not in headers
                part = data if whole else data[: hub.breaks]
                self.wfile.write(part)
                hub.sent += len(part)
                if not whole:
                    hub.breaks = None
                    self.close_connection = True

    with served(Answers) as hub.address:
        yield hub
