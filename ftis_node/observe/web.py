"""The page that a node serves to its owner: HTTP on loopback, for who knows the token, to look and not to touch."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from ftis_node.errors import UserError

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
FILES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Server": "ftis-node",
}
NO_TOKEN = "This page is for the node's owner. `ftis-node page`, on the node's machine, prints the link to it.\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """What is answered to GET and HEAD of a path. open: also without the token."""

    path: str
    handler: Handler
    open: bool = False


def read_token(path: Path) -> str:
    """The token of a home, made at its first use, in a file that only its owner can read.

    Raises:
        OSError: the file can be neither read nor written.
    """
    try:
        kept = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        kept = ""
    if len(kept) >= TOKEN_BYTES:
        path.chmod(0o600)
        return kept
    token = secrets.token_urlsafe(TOKEN_BYTES)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def link(address: str, token: str) -> str:
    """The address with the token in it, which a browser exchanges for a cookie."""
    return f"{address}?{urlencode({'token': token})}"


def json_route(path: str, answer: Callable[[], Awaitable[dict[str, Any]]]) -> Route:
    """A route that answers a JSON object."""

    async def handle(request: web.Request) -> web.Response:
        return json_response(request, to_json(await answer()))

    return Route(path, handle)


def to_json(value: Any) -> bytes:
    """JSON that a browser can read whatever is in `value`: no NaN, and no `<`, whatever reads it."""
    return json.dumps(_finite(value)).replace("<", "\\u003c").encode()


def json_response(request: web.Request, body: bytes) -> web.Response:
    """The body, or 304 where the browser has it already."""
    return _unless_known(request, body, "application/json")


class Web:
    """Serves the page under ``/``, its files beside it, and `routes`."""

    def __init__(self, token: str, routes: Sequence[Route]) -> None:
        self.address = ""  # where it listens, once it was started: http://127.0.0.1:PORT/
        self._token = token.encode()
        # Cookies know no ports: without a name of its own each node's would push out the others' on this machine.
        self._cookie = f"ftis-node-{hashlib.sha256(self._token).hexdigest()[:12]}"
        self._hosts: frozenset[str] = frozenset()
        self._any_address = False
        self._open = frozenset(route.path for route in routes if route.open)
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        for route in (*_files(), *routes):
            app.router.add_get(route.path, route.handler)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 means any that is free.

        Raises:
            UserError: it cannot listen there.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"The page cannot be served at {host} port {port}: {error.strerror or error}.",
                "Name another port with --set http_port=PORT (0: any), or do without it with --set page=false.",
            ) from error
        bound, port = self._runner.addresses[0][:2]
        address = ipaddress.ip_address(bound)
        own = bound if not address.is_unspecified else "127.0.0.1" if address.version == 4 else "::1"
        shown = f"[{own}]" if ":" in own else own
        self.address = f"http://{shown}:{port}/"
        names = {"127.0.0.1", "localhost", "[::1]", shown, host}
        self._hosts = frozenset(f"{name}:{port}".lower() for name in names)
        self._port = port
        self._any_address = not address.is_loopback
        if self._any_address:
            logger.warning(
                "The page is served at %s without encryption: who listens on the way learns its token.", host
            )

    async def close(self) -> None:
        await self._runner.cleanup()

    # --- who may ask ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """First by which name, for a stranger's page may give its own name this address (DNS rebinding)."""
        if not self._is_ours(request.headers.get("Host", "")):
            return _plain(403, f"This is a node's page; it is found at {self.address}\n")
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "This page is to be looked at only.\n", Allow="GET, HEAD")
        if request.path == "/" and "token" in request.query:
            return self._welcome(request.query["token"])
        if request.path not in self._open and not self._may(request):
            return _plain(401, NO_TOKEN, **{"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _plain(error.status, f"{error.reason}\n")
        except Exception:
            logger.exception("The page could not answer %s.", request.path)
            return _plain(500, "The node could not answer; its node.log says why.\n")

    def _is_ours(self, host: str) -> bool:
        """Where the node listens beyond loopback, also any address in digits: no name leads there, so none lies."""
        if host.lower() in self._hosts:
            return True
        if not self._any_address:
            return False
        name, _, port = host.rpartition(":")
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return port == str(self._port)

    def _welcome(self, token: str) -> web.Response:
        """The token goes from the address, which is shown and remembered, into a cookie."""
        if not self._is_token(token):
            return _plain(401, NO_TOKEN)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, token, path="/", httponly=True, samesite="Strict")
        return response

    def _may(self, request: web.Request) -> bool:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(given.strip()):
            return True
        return self._is_token(request.cookies.get(self._cookie, ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers[name] = value


def _plain(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=text, headers=headers)


def _files() -> list[Route]:
    """The files of the page, read once."""
    routes = []
    for file in resources.files("ftis_node.observe").joinpath("page").iterdir():
        kind = FILES.get(Path(file.name).suffix)
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            routes.append(Route(path, _file_handler(file.read_bytes(), kind)))
    return routes


def _file_handler(body: bytes, kind: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _unless_known(request, body, kind)

    return handle


def _unless_known(request: web.Request, body: bytes, kind: str) -> web.Response:
    tag = hashlib.sha256(body).hexdigest()[:32]
    headers = {"ETag": f'"{tag}"'}
    if any(known.value == tag for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
