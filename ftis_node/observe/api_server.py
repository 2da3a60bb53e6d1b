"""The local API of a node: HTTP on a unix socket that only its owner can open. `observe.api` asks it."""

from __future__ import annotations

import http
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from ftis_node.errors import UserError

Answer = Callable[[], Mapping[str, object]]
Order = Callable[[Mapping[str, str]], Awaitable[Mapping[str, object]]]
Text = Callable[[], bytes]
TEXT = "text/plain; version=0.0.4; charset=utf-8"  # the type of Prometheus' text exposition


class Api:
    """Serves JSON answers under GET to `reads` and POST to `actions`, and Prometheus' text under GET to `texts`.

    `orders` are POSTed with a JSON object of texts; the UserError of one is answered with status 422.
    """

    def __init__(
        self,
        reads: dict[str, Answer],
        actions: Mapping[str, Answer],
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
