"""Launches of kernels, waits of the host and faults on the pretend device, by the line of ftis_node."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.pretend import graphs

PACKAGE = "ftis_node"


class PretendError(RuntimeError):
    """What CUDA would refuse."""


@dataclass
class Counts:
    """Launches and waits by the line of ftis_node that caused them. kernels: those of graphs one by one. captures: of
    graphs. current: devices that became the current one, each after so many launches."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    captures: int = 0
    current: list[tuple[str, int]] = field(default_factory=list)


counting_now: list[Counts] = []
faults: list[str] = []  # also of errors that the product caught


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count what happens within."""
    counts = Counts()
    counting_now.append(counts)
    try:
        yield counts
    finally:
        counting_now.remove(counts)


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if f"/{PACKAGE}/" in file and "site-packages" not in file:
            return f"{file.rsplit(f'/{PACKAGE}/', 1)[1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def launch(kernels: int = 1):
    if graphs.capturing:
        graphs.capturing[0].kernels += kernels
        return
    for counts in counting_now:
        counts.launches[_line()] += 1
        counts.kernels += kernels


def wait():
    if graphs.capturing:
        raise fault("the host waits while a graph is captured")
    for counts in counting_now:
        counts.waits[_line()] += 1


def fault(message: str) -> PretendError:
    faults.append(f"{message} at {_line()}")
    return PretendError(faults[-1])
