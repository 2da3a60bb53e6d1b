"""docs/metrics.md as data, and whether what a node tells is what stands there: no key more, none less, of its type."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ftis_node.observe.api import UnixConnection, ask
from ftis_node.observe.metrics import read_events
from tests.support.daemons import Daemon

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
EVENTS = ("started", "changed", "resumed", "restored", "evaluation", "step")
# Of an honest swarm in which nothing went wrong, on CPUs.
NOT_YET = {f"ftis_node_{name}" for name in ("packets_refused_total", "gpu_memory_bytes", "gpu_utilization")}
NOT_YET |= {"ftis_node_generator_mismatch_nats"}  # a vLLM server's
# `name`, `another` (number or null), also further on in a row
_ENTRY = re.compile(r"(`[^(]+`) \(((?:number|string|boolean|object|list|figures|phases|works|gauge|counter)[^)]*)\)")
_TYPES = {"string": str, "boolean": bool, "list": list, "object": dict}
_TABLES = {"figures": "Figures", "phases": "Phases", "works": "Works"}  # types that are tables of their own


@dataclass(frozen=True)
class Key:
    """A documented key: its types, and whether it may be missing."""

    types: frozenset[str]
    optional: bool


@dataclass(frozen=True)
class Exposed:
    """A metric as Prometheus sees it. labels: their names."""

    kind: str
    labels: frozenset[str]


def sections() -> dict[str, list[tuple[str, str]]]:
    """By heading, names without backquotes, each with what stands in parentheses after it, or after several."""
    found = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("* `"):
            below = found.setdefault(heading, [])
            for names, told in _ENTRY.findall(line):
                for name in re.findall(r"`([^`]+)`", names):
                    below.append((name, told))
    return found


def keys(heading: str) -> dict[str, Key]:
    found = {}
    for name, told in sections()[heading]:
        types = told.removesuffix("?").split(" or ")
        found[name] = Key(frozenset(types), told.endswith("?"))
    return found


def metrics(heading: str = "Prometheus") -> dict[str, Exposed]:
    """The documented metrics below a heading by name."""
    found = {}
    for name, told in sections()[heading]:
        kind, _, by = told.partition(", by ")
        labels = re.findall(r"`(\w+)`", by)
        found[name] = Exposed(kind, frozenset(labels))
    return found


def exposed(text: bytes) -> dict[str, Exposed]:
    """All metrics of a text exposition; its own parser raises ValueError if it is not valid."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name] = Exposed(family.type, frozenset(sample.labels))
    return found


def check(told: Mapping[str, Any], heading: str, extra: str = ""):
    """Asserts that the keys are those of the table (and of another), and their values of the types there."""
    known = keys(heading)
    if extra:
        known |= keys(extra)
    _check(told, known, "")


def _check(told: Mapping[str, Any], known: Mapping[str, Key], prefix: str):
    here = {name: key for name, key in known.items() if re.match(rf"{re.escape(prefix)}(\w|\.\d)+$", name)}
    needed = {name for name, key in here.items() if not key.optional}
    found = {prefix + name for name in told}
    assert found <= here.keys(), f"not documented: {sorted(found - here.keys())}"
    assert needed <= found, f"documented, and not there: {sorted(needed - found)}"
    for name, value in told.items():
        path = prefix + name
        types = here[path].types
        assert any(_is(value, kind) for kind in types), f"{path} is {value!r}, not {set(types)}"
        tables = [_TABLES[kind] for kind in types if kind in _TABLES]
        if tables:
            check(value, tables[0])
        elif isinstance(value, dict) and any(other.startswith(f"{path}.") for other in known):
            _check(value, known, f"{path}.")


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, dict if kind in _TABLES else _TYPES[kind])


def scraped(socket: Path) -> bytes:
    """The metrics that a daemon's API answers."""
    connection = UnixConnection(socket, 5.0)
    connection.request("GET", "/metrics")
    return connection.getresponse().read()


def check_daemon(daemon: Daemon, seconds: float = 60):
    """Asserts that all that a daemon tells is documented, and that it tells all that is, once it knows it.

    It must have peers, have trained on groups of theirs, and have gone on from a checkpoint.
    """
    socket = daemon.home.api_socket()
    documented = metrics()
    seen = {}
    deadline = time.monotonic() + seconds
    while documented.keys() - seen.keys() - NOT_YET and time.monotonic() < deadline:
        seen |= exposed(scraped(socket))  # one step may know what the next does not
        time.sleep(0.1)
    expected = {name: of for name, of in documented.items() if name in seen}
    assert seen == expected, "documented otherwise, or not at all"
    assert documented.keys() - seen.keys() <= NOT_YET, "documented, and not exposed"
    check(ask(socket, "/status", dict), "ftis-node status --json")
    peers = ask(socket, "/peers", dict)
    check(peers, "ftis-node peers --json")
    for peer in peers["peers"]:
        check(peer, "A peer")
    happened = read_events(daemon.home.metrics, *EVENTS)
    assert {event["event"] for event in happened} == set(EVENTS) - {"changed", "restored"}
    for event in happened:
        check(event, event["event"], extra="Events")
