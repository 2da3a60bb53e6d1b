"""An observer: a member of a swarm without a model. It asks, shows the whole, and takes nobody's place."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftis_node.config.run import dump_run_file, in_short
from ftis_node.config.settings import Settings
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.files import replace_bytes, replace_text
from ftis_node.host.loops import listen
from ftis_node.node.assembly import check_peers, open_lan, open_network
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import roster_of, run_to_watch
from ftis_node.observe.api import read_token
from ftis_node.observe.prometheus import swarm_exposition
from ftis_node.observe.web import TEXT, Route, Web, page_files, to_json
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.chronicle import read_chronicle
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.overview import Overview, SwarmFacts
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.swarm import Swarm

ASK_SECONDS = 10.0  # between exchanges
EXPORT_SECONDS = 60.0
PAGE = "watch.html"
EXPORTED = (PAGE, "watch.js", "dom.js", "charts.js", "page.css", "icon.svg")

logger = logging.getLogger(__name__)


class Observer:
    """Looks at one swarm until it is stopped. It has a home and a key of its own, and pulls no packets."""

    def __init__(self, options: JoinOptions, settings: Settings, export: Path | None = None) -> None:
        """
        Args:
            options: home, and of the run peers (multiaddrs that its owner named) and invitation; without either it
                begins with the peers of before.
            export: a directory for the page as files, written anew each minute; None: no files.

        Raises:
            UsageError: one of the peers is no multiaddr.
        """
        self._options = options
        self._settings = settings
        self._export = export
        for text in options.peers:
            parse_address(text)  # raises UsageError
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def run(self, ready: Callable[[Web], None], seconds: float = math.inf) -> tuple[SwarmFacts, int]:
        """Look on until stopped; return what was seen last, and the exit code.

        Args:
            ready: called with the page once it can be opened.

        Raises:
            UserError: the run cannot be found, this key may not see it, or page or export cannot be written.
        """
        listen(self._stop)
        async with contextlib.AsyncExitStack() as stack:
            overview = await self._start(stack)
            server = Web(read_token(self._options.home.page_token), self._routes(overview), PAGE)
            await server.start(self._settings.http_host, self._settings.http_port)
            stack.push_async_callback(server.close)
            ready(server)
            overview.begin(stack)
            await self._look_on(overview, seconds)
            overview.look()
            self._write(overview)
            return overview.facts(), self._exit_code

    def _stop(self, exit_code: int) -> None:
        """Called on a signal (`listen`): `run` then ends within seconds."""
        self._exit_code = exit_code
        self._stopping.set()

    async def _start(self, stack: contextlib.AsyncExitStack) -> Overview:
        """Open the home, find the run and join its swarm; what is begun on the way ends with the stack. See `run` for
        errors."""
        options = self._options
        home = options.home
        settings = self._settings
        home.open()
        stack.callback(home.close)
        identity = Identity.load_or_create(home.key)
        transport = await open_network(options, settings, home.make_runtime(), identity)
        stack.push_async_callback(transport.close)
        run_file = await run_to_watch(options, transport, settings.patience)
        run = run_file.run
        roster = roster_of(options, run, identity)
        replace_text(home.run_file, dump_run_file(run_file))
        swarm = Swarm(
            transport=transport,
            identity=identity,
            run_file=run_file,
            reputation=Reputation(boot_seconds, settings.defences),
            max_age=settings.max_age,
            peer_cache=home.peers,
            roster=roster,
            chronicle=read_chronicle(home.swarm_history, run),
        )
        swarm.idle = ASK_SECONDS  # it pulls none, so it never has enough
        swarm.gossip.enough = float("inf")
        overview = Overview(swarm, home.swarm_history)
        await swarm.start(options.peers, run_file.hints.bootstraps, options.given)
        stack.push_async_callback(swarm.close)
        if settings.lan:
            await open_lan(stack, swarm, transport, {})
        check_peers(swarm.membership, options.bootstraps, home.path)
        logger.info("Looking at run %s: %s", run.id.hex(), in_short(run))
        return overview

    async def _look_on(self, overview: Overview, seconds: float) -> None:
        """Write the page each minute until stopped or for so many seconds. Only the first time a failure ends it
        (OSError): a directory that was good once is tried again."""
        ends = boot_seconds() + seconds
        self._write(overview)
        while not self._stopping.is_set() and boot_seconds() < ends:
            try:
                self._write(overview)
            except OSError as error:  # a disk that is full now may have room in a minute
                logger.warning("The page cannot be written to %s: %s", self._export, error)
            left = max(0.0, ends - boot_seconds())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(EXPORT_SECONDS, left))

    def _write(self, overview: Overview) -> None:
        """Write the page as files, if there is an export; what it shows last, so that a reader never meets half of it.
        Raises OSError."""
        if self._export is None:
            return
        self._export.mkdir(parents=True, exist_ok=True)
        for name, body in page_files().items():
            if name in EXPORTED:
                replace_bytes(self._export / ("index.html" if name == PAGE else name), body)
        replace_bytes(self._export / "swarm.json", to_json(overview.facts()))

    def _routes(self, overview: Overview) -> list[Route]:
        """What the page serves beside its own files: the overview, and metrics, which need no token."""

        def metrics() -> bytes:
            return swarm_exposition(msgspec.to_builtins(overview.facts()))

        return [Route("/swarm.json", overview.facts), Route("/metrics", metrics, TEXT, open=True)]
