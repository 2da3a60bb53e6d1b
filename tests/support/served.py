"""HTTP on loopback: servers in threads, a port that is taken, and a page's calls."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import aiohttp


class Quiet(BaseHTTPRequestHandler):
    """One that logs nothing."""

    def log_message(self, *_: object):
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that answers so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def taken_port() -> Iterator[int]:
    """A port of 127.0.0.1 that another socket listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


async def opens(url: str, cookie: str = "") -> tuple[int, str]:
    """The answer's status and cookie for a browser that has no other cookie."""
    headers = {"Cookie": cookie} if cookie else {}
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(cookie_jar=jar) as session, session.get(url, headers=headers) as response:
        return response.status, response.headers.get("Set-Cookie", "").split(";")[0]
