"""CUDA graphs: the kernels of one token are recorded once and replayed, without Python between them.

A small model's token is some forty launches a layer of a few microseconds each, which the host cannot queue as fast as
the card runs them. A graph belongs to shapes: when they change, one token runs as it is, which loads kernels and
workspaces, and the next is recorded. What a graph reads and writes must lie where it lay, so it lives as long as its
rows do and no longer; weights are changed in place between calls, but buffers of keys and values are new in each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Recorded(Protocol):
    """Work that can be done again."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], None], torch.Generator | None, Any], Recorded]


def cuda_graph(work: Callable[[], None], generator: torch.Generator | None, pool: Any) -> Recorded:
    """Record `work` without doing it. `generator` is what it draws from (None: the default one)."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}


class Graphs:
    """Does the same work again and again, recorded where the device can."""

    def __init__(self, device: torch.device, generator: torch.Generator | None, *, wanted: bool) -> None:
        self._record = RECORDERS.get(device.type) if wanted else None
        self._pool = torch.cuda.graph_pool_handle() if self._record is cuda_graph else None  # the graphs share memory
        self._generator = generator
        self._shapes: Hashable = None
        self._recorded: Recorded | None = None

    def run(self, shapes: Hashable | None, work: Callable[[], None]) -> None:
        """Do `work` once.

        Args:
            shapes: the same as long as kernels, shapes and places in memory stay the same; None: they never do.
        """
        if self._record is None or shapes is None:
            work()
        elif shapes != self._shapes:
            self._shapes, self._recorded = shapes, None
            self._warm_up(work)
        else:
            if self._recorded is None:
                try:
                    self._recorded = self._record(work, self._generator, self._pool)
                except RuntimeError as error:  # of a driver, or of a kernel that cannot be recorded
                    logger.warning("Generation does without CUDA graphs: %s", str(error).splitlines()[0][:200])
                    self._record = None
                    return work()
            self._recorded.replay()
        return None

    def _warm_up(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            return work()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            work()
        here.wait_stream(aside)
        return None
