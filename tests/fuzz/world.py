"""The small world in which every input is judged: four runs, a few nodes, a clock that stands still."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import prompt_digests
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity
from tests.support.swarm import PROMPTS, ROWS, identity, make_run, make_text_run

NOW = 1_760_000_000
"""Inputs are kept for years, so the time of day at which they are read is always this one."""

PEERS = tuple(identity(number) for number in range(1, 9))
OWN = PEERS[0]
AUTHOR = PEERS[1]
IDENTITIES = {peer.author: peer for peer in PEERS}

EOS = (998, 999)
RUN = make_run(group=4, eos=EOS)
HORIZONTAL = make_run(group=8, eos=EOS, collaboration="horizontal", parts=2)
TEXT = make_text_run(group=4)
TURNS = make_run(group=4, eos=EOS, packet=3, turns=3)
CONTEXTS = tuple(AdmissionContext(run, prompt_digests(PROMPTS)) for run in (RUN, HORIZONTAL, TEXT, TURNS))

Result = TypeVar("Result")


def peer_of(number: int) -> Identity:
    """One of the other nodes, whatever the number."""
    return PEERS[1 + number % (len(PEERS) - 1)]


def drawn_digest(run: Run, author: bytes, round: int, slot: int) -> bytes:
    """The digest of the prompt that a slot must answer."""
    row = draw(run.id, author if run.parts == 1 else b"", round, slot, ROWS)
    return CONTEXTS[0].digest_of_row(row)


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """The time of day is `NOW`; monotonic clocks go on."""
    real = time.time
    time.time = lambda: float(NOW)
    try:
        yield
    finally:
        time.time = real


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in one event loop for all inputs: making one for each costs more than most inputs do."""
    return _runner().run(work)
