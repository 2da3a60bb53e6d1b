"""The home, its disk, the daemon on it, and the port: what a node takes of this machine."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ftis_node.config.run import load_run_file
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.host.files import bytes_under
from ftis_node.node.checkpointing import refuse_other_settings, wear
from ftis_node.preflight.finding import Case, Finding
from ftis_node.store.checkpoints import newest_facts, parse_label
from ftis_node.text import rounded

if TYPE_CHECKING:
    from ftis_node.fit.geometry import Geometry
    from ftis_node.fit.plan import Plan

# SQLite's locks, and the home's own, cannot be relied on there.
NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs")
)
NETWORK_FUSE = frozenset(("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"))


def home(case: Case) -> Iterator[Finding]:
    """Whether it is new or begun, sound, ours to write, and whether a daemon runs on it."""
    from ftis_node.observe.api import ask

    place = case.home
    if not place.path.exists():
        parent = standing(place.path)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            yield Finding("home", "fail", f"{place.path} cannot be made in {parent}.", "Name another --home.")
        else:
            yield Finding("home", "ok", f"{place.path} is new: `ftis-node join` makes it.")
        return
    if not place.path.is_dir() or not os.access(place.path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("home", "fail", f"{place.path} is no directory that you may write.", "Name another --home.")
        return
    with suppress(UserError):
        case.status = ask(place.api_socket(), "/status", timeout=2.0)
    if case.status is not None:
        yield Finding("home", "ok", f"A daemon runs on {place.path}: {case.status['state']}. {case.status['reason']}")
    elif place.in_use():
        advice = f"Look into {place.log}; if it hangs, end it: `ftis-node stop`, else kill -9."
        yield Finding("home", "fail", f"A daemon holds {place.path} but does not answer.", advice)
    if place.run_file.exists():
        try:
            load_run_file(place.run_file)
        except UserError as error:
            yield Finding("home", "fail", f"{place.run_file}: {error.what}", error.fix)
    yield from _contents(case)


def _contents(case: Case) -> Iterator[Finding]:
    """Its key, and what it was trained with."""
    from ftis_node.swarm.identity import Identity

    place, facts = case.home, newest_facts(case.home.checkpoints)
    if place.key.exists():
        Identity.load(place.key)  # raises if it is damaged
        if place.key.stat().st_mode & 0o077:
            text = f"Others on this machine may read the key {place.key}: whoever has it is this node."
            yield Finding("home", "warn", text, f"Run: chmod 600 {place.key}")
    damaged = sorted(place.checkpoints.glob("*.damaged"))
    if damaged:
        text = f"{len(damaged)} checkpoints are damaged and set aside, the last is {damaged[-1].name}."
        yield Finding("home", "warn", text, "If that goes on, test the disk and the memory of this machine.")
    of = parse_label(facts["model"]) if facts is not None else None
    if facts is None or of is None:
        yield Finding("home", "ok", f"{place.path} has no checkpoint yet.")
        return
    try:
        refuse_other_settings(place.checkpoints, case.settings)
    except UsageError as error:
        yield Finding("home", "fail", error.what, error.fix)
        return
    yield Finding("home", "ok", f"{place.path} goes on from step {facts['progress']['step']} of {facts['model']}.")


def disk(case: Case) -> Iterator[Finding]:
    """Room for checkpoints, packets and logs; for the model, if it is still to be downloaded; what kind of disk."""
    from huggingface_hub import constants

    from ftis_node.node.assembly import CHECKPOINTS, LOG_BYTES, quotas
    from ftis_node.policy.hub import cached
    from ftis_node.policy.names import resolve

    place = standing(case.home.path)
    kind = file_system(place)
    if kind in NETWORK_FILE_SYSTEMS | NETWORK_FUSE:
        text = f"{place} is on a network file system ({kind}), whose locks SQLite cannot rely on."
        yield Finding("disk", "warn", text, "Name a --home on a disk of this machine.")
    free, there = shutil.disk_usage(place).free, bytes_under(case.home.path)
    one = checkpoint_bytes(case.plan, case.shape) if case.plan is not None and case.shape is not None else 0
    checkpoints, quota = CHECKPOINTS * one, quotas(case.settings, one)
    need = max(0, quota.packets + checkpoints + LOG_BYTES + quota.older_metrics - there)
    logs = LOG_BYTES + quota.older_metrics
    parts = f"{rounded(checkpoints)} of checkpoints, {rounded(quota.packets)} of packets, {rounded(logs)} of logs"
    parts += f", less {rounded(there)} that are there" if there else ""
    text = f"{rounded(free)} are free on the home's disk; it may grow by {rounded(need)} ({parts})."
    text += f" It gets {wear(case.settings.checkpoint_minutes, one)}." if one else ""
    if free < need:
        advice = "Make room, name a --home on another disk, train LoRA layers, or lower packet_quota_mb with --set."
        yield Finding("disk", "fail", text, advice)
    else:
        yield Finding("disk", "ok", text)
    source = resolve(case.settings.model)
    if case.shape is None or Path(source).is_dir() or cached(source) is not None:
        return
    cache = standing(Path(constants.HF_HUB_CACHE))
    free, need = shutil.disk_usage(cache).free, 2 * case.shape.parameters  # hub models are in bf16 as a rule
    text = f"{rounded(free)} are free in {cache}; {case.settings.model} takes about {rounded(need)} there."
    if free < need:
        yield Finding("disk", "fail", text, "Make room there, or set HF_HOME to a folder on another disk.")
    else:
        yield Finding("disk", "ok", text)


def checkpoint_bytes(plan: Plan, shape: Geometry) -> int:
    """One checkpoint: what is trained in fp32, and the optimiser's state."""
    trained = shape.lora_parameters(plan.lora_rank, plan.lora_targets) if plan.lora else shape.parameters
    return 4 * trained + plan.memory.optimiser


def standing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def file_system(path: Path) -> str:
    """The kind of file system a path is on; "" if the system does not say."""
    path = path.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""


def port(case: Case) -> Iterator[Finding]:
    """Whether the node could listen where it is told to."""
    from ftis_node.swarm.addresses import check_port, free_port
    from ftis_node.swarm.wire.p2pd import listening_of

    settings = case.settings
    listening_of(settings, case.home.key, case.home.path)  # raises if addresses in the settings are none
    if not settings.listen:
        yield Finding("port", "ok", "This node listens nowhere: it only dials.")
        return
    if settings.port == 0:
        free_port(settings.host)
        text = f"Any on {settings.host} will do; a node that others shall find again needs one of its own."
        yield Finding("port", "ok", text)
        return
    where = f"{settings.port} on {settings.host}"
    try:
        check_port(settings.host, settings.port)
    except UserError as error:
        if case.status is not None and any(f"/{settings.port}/" in text for text in case.status["addresses"] or ()):
            yield Finding("port", "ok", f"{where} is that of the daemon on this home.")
            return
        yield Finding("port", "fail", *_why_not(error, case))
        return
    yield Finding("port", "ok", f"{where} is free, for TCP and UDP.")


def page(case: Case) -> Iterator[Finding]:
    """Whether the node's page could be served where it is told to."""
    settings = case.settings
    if not settings.page:
        yield Finding("page", "ok", "It is switched off.")
        return
    where = f"{settings.http_host}, port {settings.http_port or 'any'}"
    try:
        check_page(settings)
    except UserError as error:
        if case.status is not None and f":{settings.http_port}/" in (case.status.get("page") or ""):
            yield Finding("page", "ok", f"{where} is that of the daemon on this home.")
            return
        owner = _who_listens(settings.http_port) if settings.http_port else ""
        yield Finding("page", "fail", error.what, f"{f'{owner} has it. ' if owner else ''}{error.fix}")
        return
    yield Finding("page", "ok", f"It can be served at {where}.")


def check_page(settings: Settings) -> None:
    """Raises UserError if the page cannot be served where the settings say; nothing is kept."""
    host, port = settings.http_host, settings.http_port
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind((host, port))
    except OSError as error:
        raise UserError(
            f"The page cannot be served at {host} port {port}: {error.strerror or error}.",
            "Name another port with --set http_port=PORT (0: any), or do without it with --set page=false.",
        ) from error


def _why_not(error: UserError, case: Case) -> tuple[str, str]:
    code = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    settings = case.settings
    where = f"The port {settings.port} on {settings.host}"
    if "cannot listen on" in error.what:
        return error.what, error.fix
    if code == errno.EACCES:
        return f"{where} may not be listened on by you.", "Choose a --port from 1024."
    owner = _who_listens(settings.port)
    return f"{where} is taken{f' by {owner}' if owner else ''}.", f"End that, or choose another --port. {error.fix}"


def _who_listens(number: int) -> str:
    """Name and pid of the process that has the port, as far as this user may know."""
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("inet"):
            if one.laddr and one.laddr.port == number and one.pid and one.status in ("LISTEN", "NONE"):
                return f"{ascii(psutil.Process(one.pid).name())[1:-1]} (pid {one.pid})"
    return ""
