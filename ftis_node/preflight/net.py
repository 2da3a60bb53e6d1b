"""Checks of the network: addresses, peers, their clocks, and whether peers can dial this node."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from ftis_node.config.run import RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.node.condition import CLOCK_FAR, CLOCK_SHOWN, SET_CLOCK
from ftis_node.observe.answers import Peers, Status
from ftis_node.preflight.case import Finding, Findings, Verdict
from ftis_node.store.home import Home, socket_folder
from ftis_node.swarm.addresses import is_relayed, parse_address, ranked, scope
from ftis_node.swarm.handshake import fetch_run, greeting, shake
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.swarm.membership import Reachability
from ftis_node.swarm.roster import read_book
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.p2pd import listening_of
from ftis_node.swarm.wire.transport import Unreachable
from ftis_node.text import called, counted, duration, with_names

PATIENCE = 5.0  # seconds for peers to send their run; a node that starts waits for `patience`
KEPT_TRIED = 8  # of the addresses that a home keeps, until one answers
FORWARD = (
    "Forward a port (TCP and UDP) in your router to this machine and start the node with --port; or name with --relay "
    "nodes that can be dialled. It takes full part in any case, over the connections that it opens itself."
)


def of_a_running_node(status: Status, known: Peers | None = None) -> Findings:
    """Findings about the network from the status of a running daemon, and from its peers."""
    yield _addresses(status.addresses)
    network = status.network
    if network is None:
        yield Finding("daemon", "warn", f"It is still starting: {status.reason}")
        return
    if network.p2pd_restarts:
        yield Finding(
            "p2pd",
            "warn",
            f"The network daemon p2pd had to be started again {network.p2pd_restarts} times.",
            "If it grows, look into the log, and at this machine's memory.",
        )
    if status.peers:
        yield Finding("peers", "ok", f"{status.peers} peers.")
    else:
        yield Finding(
            "peers",
            "warn",
            "No peers: it trains alone.",
            "Fine for the first node of a run; else dial one by hand: `ftis-node doctor net --peers ADDRESS`.",
        )
    if known is not None:
        for one in known.left_out:
            yield Finding(
                "peer", "warn", f"{called(one.id, known.names)} is left out: {with_names(one.reason, known.names)}."
            )
    if network.clock:
        yield _clock(network.clock.behind, f"the clocks of {counted(network.clock.peers, 'peer')}")
    autonat = "unknown"
    if network.p2pd:
        autonat = network.p2pd.reachability
    yield _reachability(network.reachability, autonat)


def looked_around(findings: AsyncGenerator[Finding, None]) -> Findings:
    """Yield the findings of `look_around` outside an event loop, each as soon as it is known."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def following() -> Finding | None:
            return await anext(findings, None)

        finding = runner.run(following())
        while finding is not None:
            yield finding
            finding = runner.run(following())


async def look_around(
    settings: Settings, home: Home, peers: Sequence[str], patience: float, met: Callable[[RunFile], None] | None = None
) -> AsyncGenerator[Finding, None]:
    """Start a network daemon with a temporary key, and try what a node would do.

    Args:
        peers: addresses to dial. Without any, those that the home keeps are dialled until one answers, as by a node
            that starts again; that another of these does not answer keeps no node from working.
        patience: seconds to wait for what peers find out about this node.
        met: called with the run of each peer that answers.

    Raises:
        UserError: the port is taken, or p2pd does not start.
        UsageError: an address is none.
    """
    for text in peers:
        parse_address(text)
    began = time.monotonic()
    async with _stranger(settings) as transport:
        seconds = time.monotonic() - began
        where = "listens nowhere"
        if settings.listen:
            where = f"listens on {settings.host}, port {transport.port}"
        yield Finding("p2pd", "ok", f"It starts in {seconds:.1f} s and {where}.")
        yield _addresses(await transport.addresses())
        answered = 0
        known = []
        if not peers:
            known = list(KnownAddresses.read(home.peers).tried(settings, read_book(home.members)))
        for text, why in known:
            if why:
                yield Finding("peer", "warn", f"{text} is not dialled: {why}.")
        for text in peers or [text for text, why in known if not why][:KEPT_TRIED]:
            finding, run_file = await _dial(transport, text)
            if run_file is not None and met is not None:
                met(run_file)
            answered += finding.verdict == "ok"
            if finding.verdict == "fail" and not peers:
                finding = replace(finding, verdict="warn")
            yield finding
            if run_file is not None:
                told = await _time_of(transport, text)
                if told:
                    yield _clock(told - time.time(), f"the clock of {text}")
            if answered and not peers:
                break
        else:
            if not peers and not answered:
                yield Finding(
                    "peers", "warn", "None was named, and none that this home knows answers.", "Name some with --peers."
                )
        if answered:
            yield _reachability(*await _autonat(transport, patience))


def run_of_peers(settings: Settings, peers: Sequence[str], invitation: Invitation | None) -> RunFile:
    """The run of the first of the peers that answers; an invitation is shown to its inviter, and not redeemed.

    Raises:
        UserError: none gave its run in time.
        UsageError: an address is none.
    """
    dialling = settings.model_copy(update={"listen": False, "announce": (), "port": 0})

    async def ask() -> RunFile:
        async with _stranger(dialling) as transport:
            return await fetch_run(transport, peers, min(PATIENCE, settings.patience), invitation)

    return asyncio.run(ask())


@asynccontextmanager
async def _stranger(settings: Settings) -> AsyncGenerator[Libp2p, None]:
    """A network daemon with a temporary key."""
    with tempfile.TemporaryDirectory(prefix="ftis-", dir=socket_folder()) as scratch:
        key = Path(scratch) / "key"
        Identity(os.urandom(32)).keep(key)
        transport = await Libp2p.start(listening_of(settings, key, Path(scratch)))
        try:
            yield transport
        finally:
            await transport.close()


def _addresses(addresses: Sequence[str]) -> Finding:
    if not addresses:
        return Finding("addresses", "warn", "This node listens nowhere: it only dials.")
    best = ranked(addresses)
    told: dict[str, tuple[Verdict, str, str]] = {
        "public": ("ok", "Announced", ""),
        "relayed": ("ok", "Announced, through relays", ""),
        "private": ("warn", "All are of a private network", f"That is fine for peers in it. For others: {FORWARD}"),
    }
    alone = "For peers elsewhere start with --host 0.0.0.0."
    verdict, text, advice = told.get(scope(best[0]), ("warn", "All are of this machine alone", alone))
    return Finding("addresses", verdict, f"{text}: {', '.join(best)}.", advice)


async def _dial(transport: Libp2p, text: str) -> tuple[Finding, RunFile | None]:
    began = time.monotonic()
    try:
        run_file = await fetch_run(transport, [text], 0.0)
    except UserError as error:
        return Finding(
            "peer", "fail", error.what, "Check its address, that it runs, and firewalls on both sides."
        ), None
    milliseconds = 1000 * (time.monotonic() - began)
    run = f"run {run_file.run.id.hex()} ({run_file.run.task})"
    return Finding("peer", "ok", f"{text} answers in {milliseconds:.0f} ms; {run}."), run_file


async def _time_of(transport: Libp2p, text: str) -> int:
    """The time of the node at an address, in seconds since 1970; 0 if it does not answer."""
    try:
        return int((await shake(transport, parse_address(text), greeting())).time)
    except Unreachable:
        return 0


def _clock(behind: float, whose: str) -> Finding:
    """Compare this machine's clock with others'."""
    if abs(behind) < CLOCK_SHOWN:
        return Finding("clock", "ok", f"It agrees with {whose}.")
    direction = "behind"
    if behind < 0:
        direction = "ahead of"
    verdict: Verdict = "warn"
    if abs(behind) >= CLOCK_FAR:
        verdict = "fail"
    return Finding("clock", verdict, f"It is {duration(abs(behind))} {direction} {whose}.", SET_CLOCK)


async def _autonat(transport: Libp2p, patience: float) -> tuple[str, str]:
    """(reachability, AutoNAT's finding), as soon as AutoNAT knows."""
    deadline = time.monotonic() + patience
    verdict = "unknown"
    while verdict == "unknown" and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        health = await transport.health()
        if health is not None:
            verdict = health.reachability
    if verdict != "private":
        return Reachability.DIRECT, verdict
    if any(map(is_relayed, await transport.addresses())):
        return Reachability.RELAYED, verdict
    return Reachability.OUTBOUND_ONLY, verdict


def _reachability(how: str, autonat: str) -> Finding:
    if how == Reachability.OUTBOUND_ONLY:
        return Finding("reachability", "warn", "Nobody can dial this node.", FORWARD)
    if how == Reachability.RELAYED:
        return Finding("reachability", "ok", "Nobody can dial this node directly; relays pass calls on.")
    if autonat == "public":
        return Finding("reachability", "ok", "Peers dialled this node successfully.")
    return Finding("reachability", "warn", "Not known yet: only peers with public addresses can tell, and none has.")
