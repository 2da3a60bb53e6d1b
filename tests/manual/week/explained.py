"""Lines of logs that may be there, and why. Any other of level WARNING or above, and any traceback, is a problem."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

EXPLAINED = {
    r"WARNING ftis_node.swarm.membership: No handshake with ": "the peer is down, starting, asleep or elsewhere",
    r"PRINTED : (Invited to|This invitation names|Page:)": "what `join` and `watch` say to a person",
    r"\[Errno 28\] No space left on device|disk is full|PRINTED : Make room on its disk": "its disk was full",
    r'PRINTED : (\{"time"|.*"\}$)': "a full disk tore a line",
    r"The DHT cannot be used at present, .*TimeoutError": "its peers are asleep or cut off; the next look-up may work",
    r"ERROR ftis_node.swarm.swarm: p2pd does not answer.*; it is started again": "it was stopped, or is asleep",
    r"WARNING ftis_node.swarm.supervisor: The network daemon p2pd .*; it is started again": "it was killed",
}
"""Patterns of messages, each with the reason why a sound node says so."""
BLAMED = r"(?:Refused a packet of|Author|Peer) (\w+)(?:: | is left alone)"  # which a hostile peer may be


def unexplained(home: Path, members: Collection[str]) -> Counter[str]:
    """Messages of a node from level WARNING on with their error, and what libraries print: those that have no
    explanation here, and how often. members: ids of those who are not hostile."""
    found = Counter()
    for line in (
        line for file in (*home.glob("node.log*"), home / "output.log") for line in file.open(errors="replace")
    ):
        told = {"level": "PRINTED", "logger": "", "message": line.strip()}
        with contextlib.suppress(ValueError):  # a full disk tears a line
            told = json.loads(line) if line.startswith("{") else told
        error = told.get("exception", "").rpartition("\n")[2]
        text = f"{told['level']} {told['logger']}: {told['message']} {error}".strip()
        blamed = re.search(BLAMED, text)
        known = blamed[1] not in members if blamed else any(re.search(one, text) for one in EXPLAINED)
        if (error or told["level"] not in ("DEBUG", "INFO")) and not known:
            found[text[:400]] += 1
    return found
