"""HTTP for the owner of a node or observer: read-only pages on loopback, which need a token, and the node's local API
on a unix socket that only its owner can open (`observe.api` asks it)."""

import hashlib
import hmac
import http
import inspect
import ipaddress
import json
import logging
import math
import os
import secrets
from asyncio import Transport
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds
from ftis_node.observe.api import TOKEN_BYTES, no_page

logger = logging.getLogger(__name__)

CODE_SECONDS = 30.0
GUESTS_MAX = 16
CONNECTIONS_MAX = 64  # a browser opens six, Prometheus one
BACKLOG = 64
OPEN_SECONDS = 1.0  # an answer that anybody may have is kept for so long: asking often must not keep the node busy
IDLE_SECONDS = 30.0  # a connection that asks nothing for so long is closed, also one that never asked anything
HTTP_PORT = 80  # browsers leave it out of the Host
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
# Not a redirect: after a click on another site's page a browser would follow one without the cookie that came with it.
WELCOME = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ftis-node</title>'
    '<link rel="icon" href="/icon.svg">'
    '<meta http-equiv="refresh" content="0; url={0}"></head><body><p><a href="{0}">To the page</a></p></body></html>\n'
)

Order = Callable[[Mapping[str, str]], Awaitable[Mapping[str, object]]]
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"  # the type of Prometheus' text exposition


@dataclass(frozen=True)
class Route:
    """The answer to GET and HEAD of a path, on a page or of the local API.

    made: gives the answer, or a coroutine of it: bytes, or a value that is written as JSON. On a page it is called for
    each request, but of an open route once in `OPEN_SECONDS`. kind: its media type. open: it needs no token.
    """

    path: str
    made: Callable[[], Any]
    kind: str = JSON
    open: bool = False

    async def body(self) -> bytes:
        """The bytes of the answer."""
        made = self.made()
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, bytes):
            return made
        return to_json(made)

    def response(self, body: bytes) -> web.Response:
        """The answer with these bytes."""
        return web.Response(body=body, headers={"Content-Type": self.kind})


NOTHING = Route("", bytes)


def to_json(value: Any) -> bytes:
    """JSON that a browser can read whatever is in `value`: null for NaN and infinity, and no `<`, whatever reads it."""
    finite = json.loads(json.dumps(value, default=msgspec.to_builtins), parse_constant=lambda _: None)
    return json.dumps(finite).replace("<", "\\u003c").encode()


class Web:
    """Serves the page under ``/``, its files beside it, and `routes`. Every page takes the token in its address."""

    def __init__(self, token: str, routes: Sequence[Route], first: str = "index.html") -> None:
        """
        Args:
            first: the file that `/` shows.
        """
        self.address = ""  # where it listens, once it was started: http://127.0.0.1:PORT/
        self._token = token.encode()
        self._guests = Guests()
        # Cookies know no ports: without a name of its own each node's would push out the others' on this machine.
        self._cookie = f"ftis-node-{hashlib.sha256(self._token).hexdigest()[:12]}"
        self._names = Names()
        self._routes = {route.path: route for route in (*_files(first), *routes)}
        self._runner: web.ServerRunner | None = None
        self._kept: dict[str, tuple[float, bytes]] = {}  # when an open route's body was made, and it, by path

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 means any that is free.

        Raises:
            UserError: it cannot listen there.
        """
        server = _Server(self._answer, keepalive_timeout=IDLE_SECONDS, access_log=None)
        self._runner = runner = web.ServerRunner(server)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise no_page(host, port, error) from error
        bound, port = runner.addresses[0][:2]
        address = ipaddress.ip_address(bound)
        shown = bound
        if address.is_unspecified:  # on all: a browser here takes loopback
            shown = "127.0.0.1" if address.version == 4 else "::1"
        if ":" in shown:
            shown = f"[{shown}]"
        self.address = f"http://{shown}:{port}/"
        names = frozenset(name.lower() for name in ("127.0.0.1", "localhost", "[::1]", shown, host))
        self._names = Names(names, port, any_address=not address.is_loopback)
        if self._names.any_address:
            logger.warning("The page is served at %s without encryption: listeners on the way learn its token.", host)

    async def close(self) -> None:
        """Stop answering; a page that was never started is left alone."""
        if self._runner is not None:
            await self._runner.cleanup()

    def invite(self) -> str:
        """A link that opens the page once, within half a minute, for a browser whose command line others can read."""
        return f"{self.address}?{urlencode({'code': self._guests.invite()})}"

    # --- who may ask ----------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._guard(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _guard(self, request: web.BaseRequest) -> web.StreamResponse:
        """First by which name, for a stranger's page may give its own name this address (DNS rebinding)."""
        if not self._names.hold(request.headers.get("Host", "")):
            return _plain(403, f"This is a node's page; it is found at {self.address}\n")
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "This page is to be looked at only.\n", Allow="GET, HEAD")
        route = self._routes.get(request.path, NOTHING)
        if route.kind.startswith("text/html") and not request.query.keys().isdisjoint(("token", "code")):
            return self._welcome(request)
        if not route.open and not self._may(request):
            return _plain(401, NO_TOKEN, **{"WWW-Authenticate": "Bearer"})
        if route is NOTHING:
            return _plain(404, "There is nothing here.\n")
        try:
            body = await self._body(route)
        except Exception:
            logger.exception("The page could not answer %s.", request.path)
            return _plain(500, "The node could not answer; its node.log says why.\n")
        return route.response(body)

    async def _body(self, route: Route) -> bytes:
        if not route.open:
            return await route.body()
        now = boot_seconds()
        made, body = self._kept.get(route.path, (-math.inf, b""))
        if now - made >= OPEN_SECONDS:
            body = await route.body()
            self._kept[route.path] = (now, body)
        return body

    def _welcome(self, request: web.BaseRequest) -> web.Response:
        """Move the token from the address, which browsers show and remember, into a cookie."""
        shown = request.cookies.get(self._cookie, "")
        if "token" in request.query:
            given = request.query["token"]
            cookie = given if self._is_token(given) else ""
        else:
            cookie = self._guests.enter(request.query["code"], shown, let_in=self._may(request))
        if not cookie:
            return _plain(401, NO_TOKEN)
        response = web.Response(
            text=WELCOME.format(request.path), content_type="text/html", headers={"Cache-Control": "no-store"}
        )
        response.set_cookie(self._cookie, cookie, path="/", httponly=True, samesite="Strict")
        return response

    def _may(self, request: web.BaseRequest) -> bool:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(given.strip()):
            return True
        cookie = request.cookies.get(self._cookie, "")
        return self._is_token(cookie) or self._guests.know(cookie)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)


@dataclass(frozen=True)
class Names:
    """The names that a request's Host may have, in small letters, and the port.

    any_address: also any address in digits, for a page beyond loopback: no name leads there, so none lies.
    """

    names: frozenset[str] = frozenset()
    port: int = 0
    any_address: bool = False

    def hold(self, host: str) -> bool:
        """Whether a Host header names this page."""
        name, _, port = host.lower().rpartition(":")
        if self.port == HTTP_PORT and not (name and port.isdecimal()):
            name = host.lower()
            port = str(HTTP_PORT)
        if port != str(self.port):
            return False
        if name in self.names:
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
        except ValueError:
            return False


@dataclass
class _Invitation:
    until: float
    session: str = ""  # the cookie of the browser that came with it


class Guests:
    """Browsers that came with a code, which opens once and within half a minute.

    Every user of the machine can read the command line of the owner's browser, and be there first. So a code that is
    shown again, by whom and whenever, shuts out who came with it before.
    """

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        self._clock = clock
        self._invitations: dict[str, _Invitation] = {}  # by the hash of their code, the latest last

    def invite(self) -> str:
        """A new code."""
        code = secrets.token_urlsafe(TOKEN_BYTES)
        self._invitations[_key(code)] = _Invitation(self._clock() + CODE_SECONDS)
        for key in list(self._invitations)[:-GUESTS_MAX]:
            del self._invitations[key]
        return code

    def enter(self, code: str, shown: str, *, let_in: bool) -> str:
        """The cookie of who came with the code; empty for who stays outside.

        Args:
            shown: the cookie it has. let_in: whether that opens the page already.
        """
        found = self._invitations.get(_key(code))
        if found is not None and found.session and _key(found.session) == _key(shown):
            return shown  # it went back
        if found is not None and (found.session or let_in):
            del self._invitations[_key(code)]
            if found.session:
                logger.warning("A link to the page was used twice, so it opens nothing any more: was that you?")
        if let_in:
            return shown
        if found is None or found.session or self._clock() > found.until:
            return ""
        found.session = secrets.token_urlsafe(TOKEN_BYTES)
        return found.session

    def know(self, cookie: str) -> bool:
        """Whether a cookie is that of a browser that was let in and not shut out since."""
        return _key(cookie) in {_key(one.session) for one in self._invitations.values() if one.session}


class _Server(web.Server):
    """Closes connections beyond a number at once: whoever opens many would take all files that a process may open."""

    def connection_made(self, handler: web.RequestHandler, transport: Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()


def _key(secret: str) -> str:
    """Hashed, so that the time of a comparison tells nothing of the secret."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _plain(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=text, headers=headers)


def page_files() -> dict[str, bytes]:
    """The files of the pages by name."""
    found = resources.files("ftis_node.observe").joinpath("page").iterdir()
    return {file.name: file.read_bytes() for file in found if Path(file.name).suffix in FILES}


def _files(first: str) -> Iterator[Route]:
    """A route for each file of the pages; / shows the first."""
    for name, body in page_files().items():
        path = f"/{name}"
        if name == first:
            path = "/"
        yield Route(path, partial(bytes, body), f"{FILES[Path(name).suffix]}; charset=utf-8")


# --- the local API ----------------------------------------------------------------------------------------------------


class Api:
    """Serves `routes`, and under POST `orders`, which are answered with JSON.

    An order may have a JSON object of texts with it; its UserError is answered with status 422.
    """

    def __init__(self, routes: Sequence[Route], orders: Mapping[str, Order] = MappingProxyType({})) -> None:
        app = web.Application()
        app.add_routes(web.get(route.path, _handler(route)) for route in routes)
        app.add_routes(web.post(path, _order_handler(order)) for path, order in orders.items())
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, path: Path) -> None:
        """Listen on a unix socket with mode 0600. Raises OSError; changes the process's umask for a moment."""
        await self._runner.setup()
        previous = os.umask(0o177)  # so that there is no moment at which others could connect
        try:
            await web.UnixSite(self._runner, str(path)).start()
        finally:
            os.umask(previous)

    async def close(self) -> None:
        """Stop answering."""
        await self._runner.cleanup()


def _handler(route: Route) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return route.response(await route.body())

    return handle


def _order_handler(order: Order) -> Any:
    async def handle(request: web.Request) -> web.Response:
        try:
            return web.json_response(
                await order(msgspec.json.decode(await request.read() or b"{}", type=dict[str, str]))
            )
        except UserError as error:
            refusal = {"what": error.what, "fix": error.fix}
            return web.json_response(refusal, status=http.HTTPStatus.UNPROCESSABLE_ENTITY)

    return handle
