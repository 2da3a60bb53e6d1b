"""The one list of checks. `join`, `join --dry-run` and `doctor` are three views of it.

`join` makes the light checks before it imports anything heavy; `--dry-run` goes on with the heavy ones; `doctor` also
checks the machine. Later checks use what earlier ones found. Those of the run, the settings, the task's files and the
addresses are here: they write nothing and run no code of a task.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from ftis_node.config.run import RunFile, run_for
from ftis_node.errors import UsageError, UserError, each_once
from ftis_node.node.run_source import agreed, check_foreseen, check_run, known_run
from ftis_node.observe.tracking import refuse_untracked
from ftis_node.policy.names import resolve
from ftis_node.preflight import machine, models, place
from ftis_node.preflight.case import Case, Check, Findings, Origin, View, examine, noted, refusals
from ftis_node.swarm.addresses import parse_address
from ftis_node.tasks.jsonl import JsonLines
from ftis_node.tasks.judge import refuse_unjailed
from ftis_node.tasks.trial import refuse_unskilled

# Seconds for a check that imports torch or transformers, perhaps from a cold disk.
_HEAVY = 60.0
_PATIENCE = 3.0  # seconds to wait for what peers find out about this node
LARGE_BYTES = 64 << 20  # of a task's file; the start reads it anyway, which takes seconds


def _run(case: Case) -> None:
    """Add the run of the home or of a file to the case. Raises UsageError if it cannot be read or joined."""
    found = known_run(case.home, case.options.run)
    if found is not None:
        origin: Origin = "--run"
        if case.home.run_file.exists():
            origin = "the home"
        case.runs.append((origin, found))
        _refuse_run(case, found, ours=agreed(case.home, found.run.id))


def _refuse_run(case: Case, found: RunFile, *, ours: bool) -> None:
    """Refuse a run that this node cannot join; the case remembers that it was refused.

    Args:
        ours: its owner agreed to it before, so it may name what others' may not.

    Raises:
        UsageError: it is for the lab, names what only this node's owner may, or is of other data or another rule.
    """
    case.refused = True
    check_run(found, case.options, ours=ours)
    case.refused = False
    check_foreseen(found, case.options)


def _settings(case: Case) -> None:
    """Check settings, the model's name, and that a tracker is installed. Raises UserError."""
    resolve(case.settings.model)
    refuse_untracked(case.settings.track)


def _data(case: Case) -> None:
    """Load the task into the case, if its files are here and not large. Raises UserError if they are unsound."""
    if case.refused or not case.task_known:
        return
    case.download = case.source.download() or case.download
    if max((path.stat().st_size for path in case.source.files if path.is_file()), default=0) <= LARGE_BYTES:
        case.task = case.source.check()
    if case.task is not None and case.task.turns == 1 and not (case.run_file or case.options.bootstraps):
        run_for(case.task.facts(), any_tokenizer=True)  # raises if its name makes no run


def _own_data(case: Case) -> None:
    """Load the file of rows that only this node trains on into the case.

    Raises:
        UsageError: the file is unsound, its rule has no file, or a batch has no room for it.
    """
    options = case.options
    if options.own_data is None:
        if options.own_reward is not None:
            raise UsageError("--own-reward is the rule of --own-data, which is missing.", "Name both, or neither.")
        return
    if case.settings.batch_groups < 2:
        raise UsageError("A batch of one group has no room for --own-data.", "Set batch_groups=2, or more.")
    rule = options.own_reward or "integer"
    case.own_task = JsonLines(str(options.own_data), reward=rule).load()
    refuse_unjailed(rule)


def _large_data(case: Case) -> None:
    """Load the task of the peers' run into the case, or one that is code, or large; check that it rewards skill.

    Raises:
        UserError: it cannot be loaded, or its rule rewards anything.
    """
    if case.refused or not case.task_known:
        return
    if case.task is None and case.runs and case.runs[0][0] == "--peers" and case.options.task is None:
        _data(case)
    if case.task is None and case.download is None:
        case.task = case.source.load()
    if case.task is not None:
        refuse_unskilled(case.task)


def _addresses(case: Case) -> Iterator[UserError]:
    """Find mistakes in the addresses to dial, one error each."""
    for text in case.options.peers:
        yield from noted(partial(parse_address, text))


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
        _refuse_run(case, found, ours=False)


def _peers(case: Case) -> Findings:
    """The peers that were named, and their run; without any, a running daemon's network, or the peers of the home."""
    from ftis_node.preflight.net import look_around, looked_around, of_a_running_node
    from ftis_node.swarm.known_addresses import KnownAddresses

    peers = case.options.peers
    if peers or (case.status is None and KnownAddresses.read(case.home.peers).all):
        settings = case.settings
        if case.status is not None:  # and has the port
            settings = settings.model_copy(update={"port": 0})
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
    Check("run", _run, views=_START),
    Check("settings", _settings, views=_START),
    Check("home", place.checkpoints, views=_EVERY_START),
    Check("data", _data, views=_START),
    Check("data", _own_data, views=_START),
    Check("addresses", _addresses, views=_START),
    Check("python", machine.python),
    Check("libraries", machine.libraries),
    Check("torch", machine.torch_, _HEAVY),
    Check("gpu", machine.gpu, machine.SMOKE_SECONDS + 5.0),
    Check("limits", machine.limits),
    Check("hub", models.hub, _HEAVY),
    Check("run", _run_of_peers, views=_DRY),
    Check("data", _large_data, views=_DRY),
    Check("memory", models.memory, _HEAVY, _MODEL),
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


def examined(case: Case) -> Findings:
    """All findings of the doctor, each as soon as it is known."""
    return examine(case, listed("doctor"))
