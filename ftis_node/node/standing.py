"""The standing of other peers on disk: bans and records must outlive the process."""

import json
import time
from pathlib import Path

from ftis_node.host.files import kept, replace_text
from ftis_node.swarm.reputation import Reputation

BOOKS_SECONDS = 60.0


class ReputationFile:
    """The file of a node's reputation."""

    def __init__(self, path: Path, reputation: Reputation) -> None:
        """Load the file; a damaged one is ignored, which makes every peer a newcomer."""
        self._path = path
        self._reputation = reputation
        self._written = time.monotonic()
        kept(path, lambda data: reputation.take_up(json.loads(data)), "everybody is a newcomer again.")

    def after_step(self) -> None:
        """Write the file, at most once a minute."""
        if time.monotonic() - self._written >= BOOKS_SECONDS:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        replace_text(self._path, json.dumps(self._reputation.facts()))
