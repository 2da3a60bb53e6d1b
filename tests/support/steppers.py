"""A stepper without a compute process and without a swarm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.host.clocks import boot_seconds
from ftis_node.node.stepper import Compute, Stepper
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.standing import Standing
from ftis_node.worker.client import Worker
from tests.support.swarm import RUN

BATCH = 24


def stepper(
    path: Path, others: int, *, own_only: bool = False, run: Run = RUN, worker: Compute | None = None, **settings: Any
) -> Stepper:
    """A stepper that hears of so many other authors."""
    made = Stepper(
        context=AdmissionContext(run=run, prompt_digests=bytes(80)),
        own_only=own_only,
        identity=Identity.load_or_create(path / "key"),
        settings=Settings(batch_groups=BATCH, **settings),
        store=PacketStore(path / "store.sqlite", RUN.id, 1 << 20),
        worker=worker or Worker(),
        standing=Standing(boot_seconds),
    )
    made.swarm = SimpleNamespace(recent_authors=lambda seconds: set(range(others)))  # type: ignore[assignment]
    return made
