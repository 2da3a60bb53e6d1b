"""Checks of the run, the settings, the task's files and the addresses that a person named.

They need neither PyTorch nor libp2p, whose import takes seconds. They write nothing and run no code of a task.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ftis_node.config.run import RunFile
from ftis_node.errors import UsageError, UserError
from ftis_node.node.run_source import agreed, check_foreseen, check_run, known_run
from ftis_node.observe.tracking import refuse_untracked
from ftis_node.policy.names import resolve
from ftis_node.preflight.case import Case, noted
from ftis_node.swarm.addresses import parse_address
from ftis_node.tasks.jsonl import JsonLines
from ftis_node.tasks.judge import refuse_unjailed
from ftis_node.tasks.trial import refuse_unskilled

LARGE_BYTES = 64 << 20  # of a task's file; the start reads it anyway, which takes seconds


def run(case: Case) -> None:
    """Add the run of the home or of a file to the case. Raises UsageError if it cannot be read or joined."""
    found = known_run(case.home, case.options.run)
    if found is not None:
        case.runs.append(("the home" if case.home.run_file.exists() else "--run", found))
        refuse_run(case, found, ours=agreed(case.home, found.run.id))


def refuse_run(case: Case, found: RunFile, *, ours: bool) -> None:
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


def settings(case: Case) -> None:
    """Check settings, the model's name, and that a tracker is installed. Raises UserError."""
    resolve(case.settings.model)
    refuse_untracked(case.settings.track)


def data(case: Case) -> None:
    """Load the task into the case, if its files are here and not large. Raises UserError if they are unsound."""
    if case.refused or not case.task_known:
        return
    case.download = case.source.download() or case.download
    if max((path.stat().st_size for path in case.source.files if path.is_file()), default=0) <= LARGE_BYTES:
        case.task = case.source.check()


def own_data(case: Case) -> None:
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


def large_data(case: Case) -> None:
    """Load the task of the peers' run into the case, or one that is code, or large; check that it rewards skill.

    Raises:
        UserError: it cannot be loaded, or its rule rewards anything.
    """
    if case.refused or not case.task_known:
        return
    if case.task is None and case.runs and case.runs[0][0] == "--peers" and case.options.task is None:
        data(case)
    if case.task is None and case.download is None:
        case.task = case.source.load()
    if case.task is not None:
        refuse_unskilled(case.task)


def addresses(case: Case) -> Iterator[UserError]:
    """What is wrong with the addresses to dial, one error each."""
    for text in case.options.peers:
        yield from noted(partial(parse_address, text))
