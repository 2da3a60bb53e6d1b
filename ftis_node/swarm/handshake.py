"""What is said first: the greeting, and what a node asks before it takes part: for a run, for a twin of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ftis_node
from ftis_node.config.run import Run, RunFile, run_file_from_json
from ftis_node.errors import UsageError, UserError, brief
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import Whereabouts, parse_address, peer_at
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.transport import Listening, Transport, Unreachable

logger = logging.getLogger(__name__)

# Announcements that a node cannot read are held against who passes them on: another form of them is another major.
PROTOCOL_MAJOR, PROTOCOL_MINOR = 2, 0
MAX_ADDRESSES = 8
HANDSHAKE_SECONDS = 5.0
TWIN_SECONDS = 5.0


async def refuse_a_twin(how: Listening, identity: Identity, bootstraps: Sequence[str], home: Path) -> None:
    """Raises UserError if a node of this identity is alive somewhere, as far as the bootstraps know."""
    if bootstraps and await somebody_else(how, identity.author, bootstraps, TWIN_SECONDS):
        raise UserError(
            f"Another node with the key of {home} is running somewhere: {identity.peer_id}.",
            "Stop that one first, or give this one a --home of its own.",
        )


async def somebody_else(how: Listening, own: bytes, bootstraps: Sequence[str], seconds: float) -> bool:
    """Whether another node of this identity is alive somewhere.

    Under a key that is thrown away, peers are asked where it is, and it is dialled.

    Args:
        how: as this node is going to listen.
        own: its 38-byte peer id; its own p2pd must not run yet.
        seconds: in which to find out.
    """
    scratch = how.sockets / "scout.key"
    Identity(os.urandom(32)).keep(scratch)
    try:
        scout = await Libp2p.start(replace(how, key=scratch, listen=False, announce=(), relays=()))
    finally:
        scratch.unlink()
    try:
        async with asyncio.timeout(seconds):
            answers = await asyncio.gather(
                *(_where_is(scout, own, text) for text in bootstraps), return_exceptions=True
            )
            told = [text for answer in answers if not isinstance(answer, BaseException) for text in answer]
            at_home = Whereabouts(how.host, bootstraps)
            await scout.connect(own, list(filter(at_home.reach, told[:MAX_ADDRESSES])))
            return True
    except (Unreachable, TimeoutError):
        return False  # nobody knows it, or it is gone
    finally:
        await scout.close()


async def _where_is(scout: Transport, peer: bytes, bootstrap: str) -> list[str]:
    """Addresses of `peer`, as this node tells them."""
    _, teller = parse_address(bootstrap)
    await scout.connect(teller, [bootstrap])
    question = greeting(None, [])
    question.whereabouts = peer
    answer = await shake(scout, teller, question)
    return [text for text in answer.peers if peer_at(text) == peer]


async def fetch_run(transport: Transport, bootstraps: Sequence[str], patience: float) -> RunFile:
    """The run file of the first of `bootstraps` that gives one, asked again for `patience` seconds.

    Raises:
        UserError: none was reached, or none gave a run.
    """
    reasons: dict[str, str] = {}
    others: set[str] = set()  # that speak another protocol
    deadline = time.monotonic() + patience
    while True:
        for text in bootstraps:
            found = await _ask_run(transport, text)
            if isinstance(found, RunFile):
                return found
            if reasons.get(text) != found:
                logger.info("%s: %s; it is asked again for up to %.0f s.", text, found, patience)
            reasons[text] = found
            others = others | {text} if found.startswith(_SPEAKS) else others - {text}
        if others.issuperset(bootstraps) or time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.5)
    raise UserError(
        "None of the peers gave their run: " + "; ".join(f"{text}: {why}" for text, why in reasons.items()) + ".",
        "Upgrade ftis-node there or here, so that both speak one protocol."
        if others.issuperset(bootstraps)
        else "Check the addresses and that those nodes run; or give --run FILE; or leave out --peers to start a run.",
    )


async def _ask_run(transport: Transport, address: str) -> RunFile | str:
    """The run file of the node there, or why it is not to be had."""
    _, peer = parse_address(address)
    try:
        await transport.connect(peer, [address])
        answer = await shake(transport, peer, greeting(None, []))
        if answer.major != PROTOCOL_MAJOR:
            return other_protocol(answer.major)
        run_file = run_file_from_json(answer.run_file)
    except Unreachable as error:
        return str(error)
    except UsageError as error:
        return plain(answer.refusal or error.what, 200)
    if run_file.run.id == answer.run_id:
        return run_file
    return "the run file that it sent is not of the run that it names"


_SPEAKS = "it speaks protocol "


def other_protocol(theirs: int) -> str:
    """Why a peer of this major version is left out, and what to do about it, in one line."""
    older = theirs < PROTOCOL_MAJOR
    todo = "its owner has to upgrade ftis-node" if older else "upgrade ftis-node here"
    return f"{_SPEAKS}{theirs}, this node speaks {PROTOCOL_MAJOR}: {todo}"


def polite_refusal(theirs: int) -> str:
    """The same in this node's answer to it."""
    todo = ": upgrade ftis-node" if theirs < PROTOCOL_MAJOR else ""
    return f"this node speaks protocol {PROTOCOL_MAJOR}, you speak {theirs}{todo}"


def plain(text: str, length: int) -> str:
    """A peer's words, short and without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text[:length])


def greeting(run: Run | None, addresses: Sequence[str]) -> ftis_pb2.Handshake:
    """What a node of this run says first; without a run it asks for the other's."""
    return ftis_pb2.Handshake(
        major=PROTOCOL_MAJOR,
        minor=PROTOCOL_MINOR,
        run_id=b"" if run is None else run.id,
        tokenizer=b"" if run is None else bytes.fromhex(run.tokenizer),
        addresses=addresses,
        agent=f"ftis-node/{ftis_node.__version__}",
        limits=OWN.message(),
        time=int(time.time()),
    )


async def shake(transport: Transport, peer: bytes, hello: ftis_pb2.Handshake) -> ftis_pb2.Handshake:
    try:
        return await transport.handshake(peer, hello, HANDSHAKE_SECONDS)
    except Exception as error:  # see `Transport.handshake`
        raise Unreachable(f"no answer to the handshake: {brief(error)}") from error
