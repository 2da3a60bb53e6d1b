"""The checks of `ftis-node doctor`, in the order in which they are made: later ones use what earlier ones found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftis_node.preflight import machine, models, place
from ftis_node.preflight.finding import Case, Check, Finding, examine

# Seconds for what imports torch or transformers, which takes its time from a cold disk.
_HEAVY = 60.0


def _network(case: Case) -> Iterator[Finding]:
    """Peers, if any were named; what a running daemon says of its own, if one runs."""
    from ftis_node.preflight.net import looked_around, of_a_running_node

    if case.peers:
        # Beside a running daemon, which has the port.
        settings = case.settings if case.status is None else case.settings.model_copy(update={"port": 0})
        yield from looked_around(settings, case.peers, case.patience, lambda run: case.runs.append(("--peers", run)))
    elif case.status is not None:
        yield from of_a_running_node(case.status)


CHECKS: Sequence[Check] = (
    Check("home", place.home),
    Check("python", machine.python),
    Check("libraries", machine.libraries),
    Check("torch", machine.torch_, _HEAVY),
    Check("gpu", machine.gpu, machine.SMOKE_SECONDS + 5.0),
    Check("limits", machine.limits),
    Check("hub", models.hub, _HEAVY),
    Check("clock", models.clock, _HEAVY),
    Check("memory", models.memory, _HEAVY),
    Check("disk", place.disk, 10.0),
    Check("port", place.port, _HEAVY),
    Check("page", place.page),
    Check("peers", _network, None),
    Check("tokenizer", models.tokenizer, _HEAVY),
)


def examined(case: Case) -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    return examine(case, CHECKS)
