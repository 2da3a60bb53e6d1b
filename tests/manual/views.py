"""How long live nodes of a swarm that have a live peer in common are not in each other's view."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ftis_node.errors import UserError
from ftis_node.observe.answers import Peers
from ftis_node.observe.api import ask
from tests.support.daemons import Daemon

SAMPLE_SECONDS = 1.0
Pair = tuple[str, str]


@dataclass
class Apart:
    """For each pair of live nodes since when it has a live peer in common and yet is not in each other's view.

    worst: the longest of these times, of pairs that met again or not, and which pair it was. times: of those that met.
    """

    worst: tuple[float, Pair | None] = (0.0, None)
    times: list[float] = field(default_factory=list)
    _since: dict[Pair, float] = field(default_factory=dict)

    def note(self, now: float, views: Mapping[str, set[str]], cut: Callable[[str, str], bool]) -> None:
        """Takes a sample.

        Args:
            now: in seconds. views: of each live node the peers in its view. cut: whether no packet passes between two.
        """
        for pair in itertools.combinations(sorted(views), 2):
            one, other = pair
            met = other in views[one] and one in views[other]
            common = (peer for peer in views[one] & views[other] & views.keys())
            linked = not cut(one, other) and any(not cut(peer, one) and not cut(peer, other) for peer in common)
            began = self._since.get(pair)
            if began is not None:
                self.worst = max(self.worst, (now - began, pair), key=lambda known: known[0])
            if met or not linked:
                if began is not None and met:
                    self.times.append(now - began)
                self._since.pop(pair, None)
            else:
                self._since.setdefault(pair, now)


class Observer:
    """Asks daemons for their views, each in a thread of its own, and samples what they answered."""

    def __init__(
        self, nodes: Mapping[str, Daemon], live: Callable[[str], bool], cut: Callable[[str, str], bool]
    ) -> None:
        """
        Args:
            nodes: by peer id. live: whether a node runs now and is not frozen.
        """
        self.apart = Apart()
        self._live = live
        self._cut = cut
        self._views: dict[str, set[str]] = {}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=item, daemon=True) for item in nodes.items()]
        self._threads.append(threading.Thread(target=self._sample, daemon=True))

    def __enter__(self) -> Observer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, peer: str, daemon: Daemon) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            try:
                answer = ask(daemon.home.api_socket(), "/peers", Peers) if self._live(peer) else None
            except UserError:
                answer = None
            if answer is None:
                self._views.pop(peer, None)
            else:
                self._views[peer] = {known.id for known in answer.peers}

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.apart.note(time.monotonic(), dict(self._views), self._cut)


def halves(cut_off: Sequence[str]) -> Callable[[str, str], bool]:
    """Whether two are on different sides of a cut."""
    return lambda one, other: (one in cut_off) != (other in cut_off)
