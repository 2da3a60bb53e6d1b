"""The local API: HTTP on a unix socket that only its owner can open."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from ftis_node.errors import UsageError, UserError
from ftis_node.observe.answers import Kind, read

Answer = Callable[[], Mapping[str, object]]
Order = Callable[[Mapping[str, str]], Awaitable[Mapping[str, object]]]
Text = Callable[[], bytes]
TEXT = "text/plain; version=0.0.4; charset=utf-8"  # the type of Prometheus' text exposition
LOOK_INTO_LOG = "Look into node.log in its home."


class NoDaemon(UserError):
    """Nobody answers where a daemon should."""

    def __init__(self) -> None:
        super().__init__("No ftis-node daemon is running on this home.", "Start one with `ftis-node join`.")


class Api:
    """Serves JSON answers under GET to `reads` and POST to `actions`, and Prometheus' text under GET to `texts`.

    `orders` are POSTed with a JSON object of texts; the UserError of one is answered with status 422.
    """

    def __init__(
        self,
        reads: dict[str, Answer],
        actions: dict[str, Answer],
        texts: Mapping[str, Text] = MappingProxyType({}),
        orders: Mapping[str, Order] = MappingProxyType({}),
    ) -> None:
        app = web.Application()
        app.add_routes(web.get(path, _handler(answer)) for path, answer in reads.items())
        app.add_routes(web.post(path, _handler(answer)) for path, answer in actions.items())
        app.add_routes(web.get(path, text_handler(text)) for path, text in texts.items())
        app.add_routes(web.post(path, _order_handler(order)) for path, order in orders.items())
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, path: Path) -> None:
        """Listens on a unix socket with mode 0600."""
        await self._runner.setup()
        previous = os.umask(0o177)  # so that there is no moment at which others could connect
        try:
            await web.UnixSite(self._runner, str(path)).start()
        finally:
            os.umask(previous)

    async def close(self) -> None:
        await self._runner.cleanup()


def _handler(answer: Answer) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer())

    return handle


def _order_handler(order: Order) -> Any:
    async def handle(request: web.Request) -> web.Response:
        try:
            return web.json_response(await order(msgspec.json.decode(await request.read(), type=dict[str, str])))
        except UserError as error:
            refusal = {"what": error.what, "fix": error.fix}
            return web.json_response(refusal, status=http.HTTPStatus.UNPROCESSABLE_ENTITY)

    return handle


def text_handler(text: Text) -> Any:
    """A handler that answers Prometheus' text."""

    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(body=text(), headers={"Content-Type": TEXT})

    return handle


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(
    path: Path | None,
    route: str,
    kind: type[Kind],
    *,
    action: bool = False,
    timeout: float = 5.0,
    order: Mapping[str, str] | None = None,
) -> Kind:
    """Asks a running daemon; see `ask_text`.

    Args:
        kind: what the answer is read as, see `observe.answers`; `dict` leaves it as it is.

    Raises:
        NoDaemon: nobody answers there.
        UserError: the daemon does not answer in time, not this, or not what `kind` needs.
    """
    try:
        answer = json.loads(ask_text(path, route, action=action, timeout=timeout, order=order))
    except ValueError as error:
        raise NoDaemon from error
    return read(answer, kind)


def ask_text(
    path: Path | None,
    route: str,
    *,
    action: bool = False,
    timeout: float = 5.0,
    order: Mapping[str, str] | None = None,
) -> bytes:
    """The text of a running daemon's answer.

    Args:
        path: its API socket, None if it left no record of one.
        order: what an order is sent with.

    Raises:
        NoDaemon: nobody answers there.
        UserError: the daemon does not answer in time, or not this.
        UsageError: it refuses the order.
    """
    if path is None:
        raise NoDaemon
    connection = _UnixConnection(path, timeout)
    try:
        sent = None if order is None else json.dumps(order)
        connection.request("POST" if action or sent is not None else "GET", route, sent)
        response = connection.getresponse()
        body = response.read()
        if response.status == http.HTTPStatus.UNPROCESSABLE_ENTITY:
            refusal = json.loads(body)
            raise UsageError(refusal["what"], refusal["fix"])
        if response.status != http.HTTPStatus.OK:
            raise UserError(f"The daemon answered {route} with {response.status} {response.reason}.", LOOK_INTO_LOG)
        return body
    except TimeoutError as error:
        raise UserError(f"The daemon on this home did not answer within {timeout:g} s.", LOOK_INTO_LOG) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoDaemon from error
    finally:
        connection.close()
