"""Where a node's run comes from: the home, a file, or a peer; whether the node can take part; and what its owner said,
for later starts that do not: the run, the paths of its files, the node's name, and its settings."""

import asyncio
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ftis_node.config.run import Run, RunFile, check_task, in_short, load_run_file, refuse_horizontal
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError, raise_all
from ftis_node.host.files import kept, replace_text
from ftis_node.node.options import JoinOptions
from ftis_node.store.home import Home
from ftis_node.swarm.handshake import STARTING_SECONDS, fetch_run
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation
from ftis_node.swarm.open_run import OpenRun
from ftis_node.swarm.roster import NO_MEMBER, Roster
from ftis_node.swarm.wire.transport import Transport
from ftis_node.tasks import check_named, source_of
from ftis_node.tasks.templates import shown

logger = logging.getLogger(__name__)


async def run_to_join(options: JoinOptions, transport: Transport, patience: float) -> RunFile | None:
    """The run of a previous start, of the named file, or of a peer; None if this node starts a new one, as it does if
    those that mDNS named are silent. It writes nothing: the home gets the run when the model is known to fit it.

    Raises:
        UsageError: the home belongs to another run than the file, or the run does not fit this node or its files.
        UserError: no peer sent its run within `patience` seconds, or half an hour while one of them was starting.
    """
    bootstraps = options.bootstraps
    found = known_run(options.home, options.run)
    ours = found is not None and agreed(options.home, found.run.id)
    if found is None and bootstraps:
        try:
            found = await fetch_run(transport, bootstraps, patience, options.invitation, STARTING_SECONDS)
        except UserError as error:
            if bootstraps != options.on_lan:
                raise
            logger.warning("%s They told of themselves on the local network only; a new run begins.", error.what)
            return None
        asked_by = f"asked by the template {shown(found.run.template)}"
        logger.info("The peers' run is %s: %s; %s", found.run.id.hex(), in_short(found.run), asked_by)
    if found is not None:
        check_run(found, options, ours=ours)
        await asyncio.to_thread(check_foreseen, found, options)
    return found


async def run_to_watch(options: JoinOptions, transport: Transport, patience: float) -> RunFile:
    """The run of a previous start, or of a peer, for an observer. It loads no task, so none is compared with the run's.

    Raises:
        UsageError: the home looks at another run than that of the invitation.
        UserError: no peer sent its run within `patience` seconds, or half an hour while one of them was starting.
    """
    found = known_run(options.home, None)
    if found is None:
        found = await fetch_run(transport, options.bootstraps, patience, options.invitation, STARTING_SECONDS)
    refuse_other_run(found, options.invitation)
    return found


def known_run(home: Home, file: Path | None) -> RunFile | None:
    """The run of the named file, or of a previous start of the home; None if there is neither. The file counts for more
    where both are of one run: it may name other addresses.

    Raises:
        UsageError: they are two different runs, or a file cannot be read.
    """
    known = None
    if home.run_file.exists():
        known = load_run_file(home.run_file)
    named = None
    if file is not None:
        named = load_run_file(file)
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
        ours: its owner agreed to this run before (`agreed`); then it may name what a stranger's run may not.

    Raises:
        UsageError: the run is for the lab, or names something that only this node's owner may name.
        UserError: it is private, and this node is no member.
    """
    refuse_horizontal(found.run)
    refuse_other_run(found, options.invitation)
    if options.private and not found.run.founder:
        raise UsageError(
            "The run is open; who may take part is fixed when a run begins.",
            "Begin a private one in a fresh --home: `ftis-node join --private`, without --peers and --run.",
        )
    home = options.home
    identity = Identity(os.urandom(32))
    if home.key.exists():
        identity = Identity.load(home.key)
    roster_of(options, found.run, identity)
    check_named(
        found.run,
        task=options.task,
        reward=options.reward,
        template=options.template,
        ours=ours,
        data=options.data,
    )


def roster_of(options: JoinOptions, run: Run, identity: Identity) -> OpenRun:
    """The members of a run; an open run's roster (`OpenRun`) takes everybody.

    Each call reads the home's file of members anew; a node's parts share the one of `assembly.build_components`.

    Raises:
        UserError: this key is no member, and has no invitation either; or the file of members is damaged.
    """
    if not run.founder:
        return OpenRun()
    home = options.home
    roster = Roster(run.id, run.founder, identity, home.members, home.orders, options.invitation)
    why = roster.shut_out
    if why:
        raise UserError(f"This node is no member of its private run: {why}.", NO_MEMBER)
    return roster


def check_foreseen(found: RunFile, options: JoinOptions) -> None:
    """Refuse a task or files that differ from the run's, as far as this shows before a download. It reads the task's
    files, so call it in a thread.

    Raises:
        UsageError: the data or the rule differ.
    """
    source = options.source(found)
    data, reward = source.foreseen()
    raise_all(check_task(found.run, {"task": source.name, "data": data, "reward": reward, "turns": None}))


def remember_files(options: JoinOptions, task: str, run_id: bytes) -> None:
    """Write what later starts of this home go by into its file.

    That is the run, to which the owner agreed by this start, and what a later start may leave unsaid: the paths of the
    task's files, the node's name, the settings.

    Args:
        options: as `with_remembered` completed them, so what this start left unsaid is kept.

    Raises:
        OSError: the file cannot be written.
    """
    files = options.files()
    file = source_of(task).file
    if files["data"] is None and file is not None:
        files["data"] = str(file.resolve())
    said = _Said(run=run_id.hex(), name=options.name or None, settings=dict(options.kept), **files)
    replace_text(options.home.task_files, json.dumps(msgspec.to_builtins(said)), durable=True)


def agreed(home: Home, run_id: bytes) -> bool:
    """Whether the owner joined or began this run here. Of a node of an earlier version only its packets say so; a run
    file alone does not, for observers keep one too."""
    run = _said(home).run
    if run is None:
        return home.store.exists()
    return run == run_id.hex()


def with_remembered(options: JoinOptions) -> JoinOptions:
    """The options, completed with the files and the name of an earlier start; what this start names counts for more. A
    named task may itself be a file: then the earlier data are not taken.

    Raises:
        UserError: this version does not know the home's schema.
    """
    options.home.check_schema()
    said = _said(options.home)
    files = {name: Path(path) for name, path in (("data", said.data), ("eval_data", said.eval_data)) if path}
    if options.task is not None:
        named = source_of(options.task)
        if named.file is not None:
            files.pop("data", None)
        if not named.has_files:
            files = {}
    data = options.data or files.get("data")
    eval_data = options.eval_data or files.get("eval_data")
    name = options.name
    if name is None:
        name = said.name
    return replace(options, data=data, eval_data=eval_data, name=name)


def kept_settings(home: Home) -> dict[str, object]:
    """The settings of earlier command lines, by name, in the order they were said; those that this version does not
    have are left out. Nobody has checked the values. Empty for a new home."""
    return {name: value for name, value in _said(home).settings.items() if name in Settings.model_fields}


class _Said(msgspec.Struct, frozen=True):
    """What the owner has said at earlier starts, as the home keeps it: paths of files, the id of the run in hex, …"""

    data: str | None = None
    eval_data: str | None = None
    run: str | None = None
    name: str | None = None
    settings: dict[str, Any] = {}


def _said(home: Home) -> _Said:
    """Read what the home keeps; nothing if the file is missing or damaged. `json` takes paths that are not UTF-8."""

    def decode(data: bytes) -> _Said:
        return msgspec.convert(json.loads(data), _Said)

    return kept(home.task_files, decode, "name the task's files again, if it does not find them.") or _Said()
