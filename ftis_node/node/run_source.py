"""Where a node's run comes from: the home, a file, or a peer; and whether the node can take part in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from ftis_node.config.run import RunFile, check_task, in_short, load_run_file, refuse_horizontal
from ftis_node.errors import UsageError, UserError, raise_all
from ftis_node.node.options import JoinOptions
from ftis_node.node.task_files import agreed
from ftis_node.store.home import Home
from ftis_node.swarm.handshake import fetch_run
from ftis_node.swarm.invitation import Invitation
from ftis_node.swarm.wire.transport import Transport
from ftis_node.tasks import check_named, source_of

logger = logging.getLogger(__name__)


async def run_to_join(
    home: Home, options: JoinOptions, transport: Transport, bootstraps: Sequence[str], patience: float
) -> RunFile | None:
    """The run of a previous start, of the named file, or of a peer; None if this node starts a new one, as it does if
    those that mDNS named are silent.

    Raises:
        UsageError: the home belongs to another run than the file, or the run does not fit this node or its files.
        UserError: no peer sent its run within `patience` seconds.
    """
    found = known_run(home, options.run)
    ours = found is not None and agreed(home, found.run.id)
    if found is None and bootstraps:
        try:
            found = await fetch_run(transport, bootstraps, patience, options.invitation)
        except UserError as error:
            if tuple(bootstraps) != options.on_lan:
                raise
            logger.warning("%s They told of themselves on the local network only; a new run begins.", error.what)
            return None
        logger.info("The peers' run is %s: %s", found.run.id.hex(), in_short(found.run))
    if found is not None:
        check_run(found, options, ours=ours)
        await asyncio.to_thread(check_foreseen, found, options)
    return found


async def run_to_watch(
    home: Home, invitation: Invitation | None, transport: Transport, bootstraps: Sequence[str], patience: float
) -> RunFile:
    """The run of a previous start, or of a peer.

    Raises:
        UsageError: the home looks at another run than that of the invitation.
        UserError: no peer sent its run within `patience` seconds.
    """
    found = known_run(home, None) or await fetch_run(transport, bootstraps, patience, invitation)
    refuse_other_run(found, invitation)
    return found


def known_run(home: Home, file: Path | None) -> RunFile | None:
    """The run of the named file, or of a previous start of the home; None if there is neither.

    Raises:
        UsageError: they are two different runs, or a file cannot be read.
    """
    known = load_run_file(home.run_file) if home.run_file.exists() else None
    named = load_run_file(file) if file is not None else None
    if known is not None and named is not None and known.run.id != named.run.id:
        raise UsageError(
            f"The home {home.path} belongs to run {known.run.id.hex()}, not to {named.run.id.hex()}.",
            "Name another --home for the other run.",
        )
    return named or known


def refuse_other_run(found: RunFile, invitation: Invitation | None) -> None:
    """Raise UsageError if the invitation is to another run."""
    if invitation is not None and invitation.run_id != found.run.id:
        raise UsageError(
            f"The invitation is to run {invitation.run_id.hex()}, this is run {found.run.id.hex()}.",
            "Name a fresh --home for the other run.",
        )


def check_run(found: RunFile, options: JoinOptions, *, ours: bool) -> None:
    """Refuse a run that a daemon does not open.

    Args:
        ours: its owner agreed to this run before.

    Raises:
        UsageError: the run is for the lab, or names something that only this node's owner may name.
    """
    refuse_horizontal(found.run)
    refuse_other_run(found, options.invitation)
    if options.private and not found.run.founder:
        raise UsageError(
            "The run is open; who may take part is fixed when a run begins.",
            "Begin a private one in a fresh --home: `ftis-node join --private`, without --peers and --run.",
        )
    check_named(found.run, task=options.task, reward=options.reward, ours=ours, data=options.data)


def check_foreseen(found: RunFile, options: JoinOptions) -> None:
    """Refuse a task or files that differ from the run's, as far as this shows before a download.

    Raises:
        UsageError: the data or the rule differ.
    """
    task = options.task_of(found)
    data, reward = source_of(task, data=options.data, reward=options.reward_of(found)).foreseen()
    raise_all(check_task(found.run, {"task": task, "data": data, "reward": reward, "turns": None}))
