"""The page and the local API of a running node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.settings import Settings
from ftis_node.node.means import Compute
from ftis_node.node.step_batch import Shown
from ftis_node.observe.api import read_token
from ftis_node.observe.history import History
from ftis_node.observe.prometheus import exposition
from ftis_node.observe.web import TEXT, Api, Order, Route, Web, to_json
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import GroupText, ReadableGroup, Texts

if TYPE_CHECKING:
    from ftis_node.node.daemon import Node

logger = logging.getLogger(__name__)

TEXT_SECONDS = 5.0
SHOWN = 12  # completions of a group


class Dashboard:
    """The page of a node with an open home, as long as the settings have one, and the node's local API. Both answer in
    the node's event loop, from the start of the node on."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._server: Web | None = None

    @property
    def address(self) -> str | None:
        """The page's URL, without the token that opens it; None without a page."""
        if self._server is not None:
            return self._server.address
        return None

    async def show(self, settings: Settings) -> None:
        """Start or end the page, as the settings have it; one that runs stays as it is. A start of the node calls it,
        and each change of settings before they count.

        Raises:
            UserError: the page's port is taken.
        """
        if not settings.page:
            return await self.close()
        if self._server is not None:
            return
        node = self._node
        home = node.home
        routes = [
            Route("/api/status", node.row),
            Route("/api/peers", node.peers),
            _curves(History(home.metrics)),
            Route("/api/completions", _Texts(node).answer),
            Route("/swarm.json", self._swarm),
            self._metrics,
        ]
        server = Web(read_token(home.page_token), routes)
        await server.start(settings.http_host, settings.http_port)
        self._server = server
        logger.info("Page: %s (`ftis-node page%s` prints the link that opens it)", server.address, home.flag)

    async def close(self) -> None:
        """End the page, if there is one; the local API stays."""
        server = self._server
        self._server = None
        if server is not None:
            await server.close()

    async def api(self, path: Path, orders: Mapping[str, Order]) -> Api:
        """Start the local API on a socket; `orders` are the owner's by route. The caller closes it."""
        node = self._node
        reads = (Route("/status", node.row), Route("/peers", node.peers), Route("/page", self.invitation))
        api = Api([*reads, self._metrics], {**orders, "/save": self._save})
        await api.start(path)
        return api

    async def _save(self, _: Mapping[str, str]) -> Mapping[str, object]:
        """Let the node save what it has learned, after the running step, and answer with the status at once. Before the
        training nothing happens. Raises UsageError, see `Saving.ask`."""
        node = self._node
        components = node.components
        if components is not None and not components.stepper.means.resting:  # one that rests saved before
            components.saving.ask(components.stepper.progress.step)
        return node.row()

    @property
    def _metrics(self) -> Route:
        """The present metrics as Prometheus reads them, for page and local API. They hold no secret, so the page gives
        them without a token."""
        node = self._node
        return Route("/metrics", lambda: exposition(node.row(), node.peers()), TEXT, open=True)

    def _swarm(self) -> object:
        """What the page shows of the whole swarm; nothing before the node has joined it."""
        overview = self._node.overview
        if overview is None:
            return {}
        return overview.facts()

    def invitation(self) -> dict[str, str | None]:
        """A new link that opens the page once, for whoever has it; null without a page. Each call makes another."""
        return {"link": self._server.invite() if self._server is not None else None}


def _curves(history: History) -> Route:
    """The route of the present curves. What the log has got since is read in a thread, for one request at a time; the
    bytes are made anew only if that was anything, for of a long run they are many."""
    lock = asyncio.Lock()
    body = to_json(history.facts())

    async def curves() -> bytes:
        nonlocal body
        async with lock:
            if await asyncio.to_thread(history.follow):
                body = to_json(history.facts())
            return body

    return Route("/api/history", curves)


class _Texts:
    """The latest groups with their texts. Only the compute process can decode them; what it has decoded is kept, and
    what failed is requested again."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = asyncio.Lock()
        self._known: dict[Shown, GroupText] = {}

    async def answer(self) -> dict[str, object]:
        """The latest step and its shown groups, own ones first; those without a text yet are left out. It waits up to
        five seconds for texts."""
        components = self._node.components
        if components is None:
            return {"step": 0, "groups": []}
        stepper = components.stepper
        async with self._lock:
            groups = stepper.recent.groups()
            step = stepper.recent.step
            self._known = {group: self._known[group] for group in groups if group in self._known}
            await self._decode(stepper.means.worker, [group for group in groups if group not in self._known])
            shown = [_group(group, self._known[group]) for group in groups if group in self._known]
        return {"step": step, "groups": shown}

    async def _decode(self, worker: Compute, new: Sequence[Shown]) -> None:
        """Get the texts of these groups, if the compute process has time for it within five seconds; else none of them.
        Call it under the lock."""
        if not new:
            return
        asked = [ReadableGroup(one.group.row, one.group.data, SHOWN) for one in new]
        try:
            async with asyncio.timeout(TEXT_SECONDS):
                texts = await worker.call(Texts(asked))
        except (WorkerDied, WorkerFault, TimeoutError):
            return  # it restarts or is very busy: the texts known so far are shown
        self._known |= dict(zip(new, texts, strict=True))


def _group(shown: Shown, texts: GroupText) -> dict[str, object]:
    """A group as the page shows it (`page.js` reads these keys): its first twelve completions with their texts, and
    their lengths in tokens."""
    packet = shown.group.packet
    columns = texts.columns or [{}] * len(texts.completions)
    rewards = shown.rewards[:SHOWN]
    lengths = packet.lengths[:SHOWN]
    finished = packet.finished[:SHOWN]
    samples = zip(texts.completions, rewards, lengths, finished, columns, strict=True)
    names = ("text", "reward", "tokens", "finished", "columns")
    return {
        "step": shown.step,
        "author": shown.author,
        "question": texts.question,
        "answer": texts.answer,
        "completions": [dict(zip(names, sample, strict=True)) for sample in samples],
    }
