"""A stepper without a compute process and without a swarm; a whole node that is still to be run."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings, collect
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.daemon import Node
from ftis_node.node.means import Compute, Means
from ftis_node.node.options import JoinOptions
from ftis_node.node.stepper import Stepper, source_for
from ftis_node.node.vertical import VerticalSource
from ftis_node.store.home import Home
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import PacketRef
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.reputation import Reputation
from ftis_node.worker.client import Worker
from tests.support.swarm import RUN

BATCH = 24


class Hearsay:
    """A swarm in which so many other authors announce, and bring nothing."""

    interval = 1.0

    def __init__(self, others: int):
        self._authors = {bytes([number]) for number in range(others)}

    def announce(self, round: int, policy_step: int, packets: Sequence[PacketRef], issued_at: int): ...

    def wake(self): ...

    def recent_authors(self, seconds: float) -> set[bytes]:
        return self._authors

    def has_peers(self) -> bool:
        return bool(self._authors)


def stepper(
    path: Path,
    others: int = 1,
    *,
    own_only: bool = False,
    context: AdmissionContext | None = None,
    run: Run = RUN,
    identity: Identity | None = None,
    worker: Compute | None = None,
    reputation: Reputation | None = None,
    clock: Callable[[], float] | None = None,
    unix: Callable[[], float] = unix_seconds,
    own_data: bool = False,
    welcomes: Callable[[bytes], bool] = lambda author: True,
    **settings: object,
) -> Stepper:
    """A stepper that hears of so many other authors."""
    means = Means(
        context=context or AdmissionContext(run=run, prompt_digests=bytes(80)),
        own_only=own_only,
        author=(identity or Identity.load_or_create(path / "key")).author,
        settings=Settings.model_validate({"batch_groups": BATCH, **settings}),
        store=PacketStore(path / "store.sqlite", run.id, 1 << 20),
        worker=worker or Worker(),
        reputation=reputation or Reputation(boot_seconds),
        swarm=Hearsay(others),
        clock=clock or time.monotonic,
        age_clock=clock or boot_seconds,
        unix=unix,
        own_data=own_data,
        welcomes=welcomes,
    )
    return Stepper(means, source_for(means))


def idle_node(home: Path, *peers: str) -> Node:
    """A node in this process."""
    settings = {"host": "127.0.0.1", "device": "cpu", "model": "tiny-a"}
    options = JoinOptions(home=Home(home), peers=peers)
    return Node(options, lambda task: collect(task=task, flags=settings)[0])


def vertical(node: Stepper) -> VerticalSource:
    """The node's source, of whole groups."""
    assert isinstance(node.source, VerticalSource)
    return node.source
