"""The standing of other peers on disk: bans and records must outlive the process."""

import json
import time
from pathlib import Path

from ftis_node.host.files import kept, replace_text
from ftis_node.swarm.reputation import Reputation

BOOKS_SECONDS = 60.0


class ReputationFile:
    """The file of what a node knows of other authors (`Reputation`), `standing.json`; only a daemon has one."""

    def __init__(self, path: Path, reputation: Reputation) -> None:
        """Load the file into `reputation`; without one, or with a damaged one, every peer is a newcomer.

        A damaged one is logged, and overwritten by the next `write`.
        """
        self._path = path
        self._reputation = reputation
        self._written = time.monotonic()
        kept(path, lambda data: reputation.take_up(json.loads(data)), "everybody is a newcomer again.")

    def after_step(self) -> None:
        """Write the file if a minute has passed since the last time. Raises OSError, as `write`."""
        if time.monotonic() - self._written >= BOOKS_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file now, as the end of the training does. Raises OSError if it cannot be written."""
        self._written = time.monotonic()
        replace_text(self._path, json.dumps(self._reputation.facts()))
