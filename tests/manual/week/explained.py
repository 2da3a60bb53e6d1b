"""Lines of logs that may be there, and why. Any other of level WARNING or above, and any traceback, is a problem."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EXPLAINED = {
    r"WARNING ftis_node.swarm.membership: No handshake with ": "the peer is down, starting, asleep or elsewhere",
    r"ERROR ftis_node.swarm.swarm: The network daemon p2pd .*; it is started again": "it was killed",
}
"""Patterns of messages, each with the reason why a sound node says so."""


def unexplained(home: Path) -> Counter[str]:
    """The first line of whatever a node logged or printed that has no explanation here, and how often."""
    found: Counter[str] = Counter()
    for text in said(home):
        if not any(re.search(pattern, text) for pattern in EXPLAINED):
            found[text[:400]] += 1
    return found


def said(home: Path) -> Iterator[str]:
    """What is no mere information: messages of level WARNING on with their error, and what libraries print."""
    for file in sorted((*home.glob("node.log*"), home / "output.log")):
        for line in file.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                yield line
                continue
            told = json.loads(line)
            error = told.get("exception", "").rpartition("\n")[2]
            if error or told["level"] not in ("DEBUG", "INFO"):
                yield " ".join((told["level"], told["logger"], told["message"], error))
