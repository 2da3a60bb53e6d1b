"""The one list of checks. `join`, `join --dry-run` and `doctor` are three views of it.

`join` makes the light checks before it imports anything heavy; `--dry-run` goes on with the heavy ones; `doctor` also
checks the machine. Later checks use what earlier ones found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftis_node.errors import UserError, each_once
from ftis_node.preflight import inputs, machine, models, place
from ftis_node.preflight.case import Case, Check, Finding, View, examine, refusals

# Seconds for a check that imports torch or transformers, perhaps from a cold disk.
_HEAVY = 60.0
_PATIENCE = 3.0  # seconds to wait for what peers find out about this node


def _run_of_peers(case: Case) -> None:
    """The run of the peers, if no other is known."""
    from ftis_node.preflight.net import run_of_peers

    options = case.options
    if case.run_file is None and options.bootstraps:
        try:
            found = run_of_peers(case.settings, options.bootstraps, options.invitation)
        except UserError:
            if options.bootstraps == options.on_lan:
                return  # a start begins a run then
            raise
        case.runs.append(("--peers", found))
        inputs.refuse_run(case, found, ours=False)


def _peers(case: Case) -> Iterator[Finding]:
    """The peers that were named, and their run; without any, a running daemon's network, or the peers of the home."""
    from ftis_node.preflight.net import look_around, looked_around, of_a_running_node
    from ftis_node.swarm.known_addresses import KnownAddresses

    peers = case.options.peers
    if peers or (case.status is None and KnownAddresses.read(case.home.peers).all):
        # Beside a running daemon, which has the port.
        settings = case.settings if case.status is None else case.settings.model_copy(update={"port": 0})
        met = look_around(settings, case.home, peers, _PATIENCE, lambda run: case.runs.append(("--peers", run)))
        yield from looked_around(met)
    elif case.status is not None:
        yield from of_a_running_node(case.status)


_START: Sequence[View] = ("join",)
_EVERY_START: Sequence[View] = ("join", "doctor")
_DRY: Sequence[View] = ("dry-run",)
_MODEL: Sequence[View] = ("dry-run", "doctor")

CHECKS: Sequence[Check] = (
    Check("home", place.home, views=_EVERY_START),
    Check("run", inputs.run, views=_START),
    Check("settings", inputs.settings, views=_START),
    Check("home", place.checkpoints, views=_EVERY_START),
    Check("data", inputs.data, views=_START),
    Check("data", inputs.own_data, views=_START),
    Check("addresses", inputs.addresses, views=_START),
    Check("python", machine.python),
    Check("libraries", machine.libraries),
    Check("torch", machine.torch_, _HEAVY),
    Check("gpu", machine.gpu, machine.SMOKE_SECONDS + 5.0),
    Check("limits", machine.limits),
    Check("hub", models.hub, _HEAVY),
    Check("clock", models.clock, _HEAVY),
    Check("run", _run_of_peers, views=_DRY),
    Check("data", inputs.large_data, views=_DRY),
    Check("memory", models.memory, _HEAVY, _MODEL),
    Check("home", models.checkpoints, views=_DRY),
    Check("disk", place.disk, 10.0, _MODEL),
    Check("port", place.port, _HEAVY, _EVERY_START),
    Check("page", place.page, views=_EVERY_START),
    Check("peers", _peers, None),
    Check("tokenizer", models.tokenizer, _HEAVY, _MODEL),
    Check("model", models.weights, views=_DRY),
)


def listed(view: View) -> list[Check]:
    """The checks of a command, in their order."""
    return [check for check in CHECKS if view in check.views]


def refused(case: Case, view: View) -> tuple[UserError, ...]:
    """Every error that `join` would end with, as far as the view's checks can see; the case keeps them."""
    case.problems = each_once([*case.problems, *refusals(case, listed(view))])
    return case.problems


def examined(case: Case) -> Iterator[Finding]:
    """All findings of the doctor, each as soon as it is known."""
    return examine(case, listed("doctor"))
