"""Checks of the home, the daemon on it, its disk, its port and its page."""

import errno
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from ftis_node.config.run import load_run_file
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.plan import Plan
from ftis_node.host.files import bytes_under, existing_folder, free_bytes
from ftis_node.node.checkpointing import wear
from ftis_node.node.remembered import refuse_other_settings
from ftis_node.node.run_source import with_remembered
from ftis_node.observe.answers import Status
from ftis_node.observe.api import ask, no_page
from ftis_node.preflight.case import Case, Checked, Finding, Findings, fail, noted, ok, warn
from ftis_node.store.checkpoints import newest_facts, parse_label
from ftis_node.swarm.addresses import bind, check_port, free_port, listening_mistakes
from ftis_node.swarm.identity import Identity
from ftis_node.text import rounded

# The locks of SQLite and of the home are not reliable on these.
NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs")
)
NETWORK_FUSE = frozenset(("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"))


def home(case: Case) -> Checked:
    """Check that the home can be written, is free and of this version, and its key; the case gets what the home knows.

    Raises:
        UserError: it cannot be used at all, or its key is damaged.
    """
    place = case.home
    parent = existing_folder(case.home.path)
    why = _unfit(parent)
    if why:
        raise UserError(f"The home {place.path} cannot be used: {parent} is {why}.", "Name another --home.")
    if not place.path.exists():
        yield ok(f"{place.path} is new: `ftis-node join` makes it.")
        return
    try:
        case.options = with_remembered(case.options)
    except UserError as error:
        yield error
    facts = newest_facts(place.checkpoints)
    if facts is not None:
        case.step = facts["progress"]["step"]
    yield from _daemon(case)
    if place.key.exists():
        case.peer_id = Identity.load(place.key).peer_id  # raises if it is damaged
        if place.key.stat().st_mode & 0o077:
            yield warn(
                f"Others on this machine may read the key {place.key}: whoever has it is this node.",
                f"Run: chmod 600 {place.key}",
            )


def _daemon(case: Case) -> Checked:
    """The daemon on the home, which keeps another from starting."""
    place = case.home
    if case.starting:
        return
    with suppress(UserError):
        case.status = ask(place.api_socket(), "/status", Status, timeout=2.0)
    if case.status is not None:
        yield ok(f"A daemon runs on {place.path}: {case.status.state}. {case.status.reason}")
    elif place.in_use():
        yield fail(
            f"A daemon holds {place.path} but does not answer.",
            f"Look into {place.log}; if it hangs, end it: `ftis-node stop`, else kill -9.",
        )
    if place.run_file.exists():
        for error in noted(lambda: load_run_file(place.run_file)):
            yield fail(f"{place.run_file}: {error.what}", error.fix)


def _unfit(parent: Path) -> str:
    """Why a home cannot be made in it; empty if it can."""
    if not parent.is_dir():
        return "no folder"
    about = os.statvfs(parent)
    if about.f_flag & os.ST_RDONLY:
        return "on a read-only file system"
    if not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
        if parent.stat().st_uid != os.geteuid():
            return "not yours"
        return "not writable"
    with suppress(OSError):
        if not about.f_blocks:  # a file system of the kernel's, as /proc, only shows by trying what it takes
            os.rmdir(tempfile.mkdtemp(dir=parent))
        return ""
    return "no place for files"


def checkpoints(case: Case) -> Findings:
    """The home's checkpoints: whether they are sound, and of the settings' model."""
    place = case.home
    damaged = sorted(place.checkpoints.glob("*.damaged"))
    if damaged:
        yield warn(
            f"{len(damaged)} checkpoints are damaged and set aside, the last is {damaged[-1].name}.",
            "If that goes on, test the disk and the memory of this machine.",
        )
    refuse_other_settings(place.checkpoints, case.settings)
    facts = newest_facts(place.checkpoints)
    if facts is not None and parse_label(facts["model"]) is not None:
        yield ok(f"{place.path} goes on from step {facts['progress']['step']} of {facts['model']}.")
    elif place.path.is_dir():
        yield ok(f"{place.path} has no checkpoint yet.")


def disk(case: Case) -> Findings:
    """The disk: its kind, and room for checkpoints, packets, logs and a model to download."""
    from huggingface_hub import constants

    from ftis_node.node.assembly import CHECKPOINTS, LOG_BYTES, quotas
    from ftis_node.policy.availability import cached
    from ftis_node.policy.names import resolve

    place = existing_folder(case.home.path)
    kind = file_system(place)
    if kind in NETWORK_FILE_SYSTEMS | NETWORK_FUSE:
        yield warn(
            f"{place} is on a network file system ({kind}), whose locks SQLite cannot rely on.",
            "Name a --home on a disk of this machine.",
        )
    files = [file.stat().st_size for file in case.home.path.glob("*") if file.is_file()]  # not a service's models
    there = bytes_under(case.home.checkpoints) + sum(files)
    free = free_bytes(place)
    one = 0
    if case.plan is not None and case.shape is not None:
        one = checkpoint_bytes(case.plan, case.shape)
    checkpoints = CHECKPOINTS * one
    quota = quotas(case.settings, one)
    logs = LOG_BYTES + quota.older_metrics
    need = max(0, quota.packets + checkpoints + logs - there)
    parts = f"{rounded(checkpoints)} of checkpoints, {rounded(quota.packets)} of packets, {rounded(logs)} of logs"
    if there:
        parts += f", less {rounded(there)} that are there"
    text = f"{rounded(free)} are free on the home's disk; it may grow by {rounded(need)} ({parts})."
    if one:
        text += f" It gets {wear(case.settings.checkpoint_minutes, one)}."
    yield _room(
        need,
        free,
        text,
        "Make room, name a --home on another disk, train LoRA layers, or lower packet_quota_mb with --set.",
    )
    source = resolve(case.settings.model)
    if case.shape is None or Path(source).is_dir() or cached(source) is not None:
        return
    cache = existing_folder(Path(constants.HF_HUB_CACHE))
    if os.stat(place).st_dev == os.stat(cache).st_dev:
        free -= need  # the home's growth comes first
    else:
        free = free_bytes(cache)
    need = 2 * case.shape.parameters  # hub models are in bf16 as a rule
    yield _room(
        need,
        free,
        f"{rounded(max(0, free))} are left in {cache}; {case.settings.model} takes about {rounded(need)} there.",
        "Make room there, or set HF_HOME to a folder on another disk.",
    )


def _room(need: int, free: int, text: str, advice: str) -> Finding:
    if need <= free:
        return ok(text)
    return fail(text, advice)


def checkpoint_bytes(plan: Plan, shape: Geometry) -> int:
    """Bytes of one checkpoint: trained weights in fp32, and the optimiser's state."""
    trained = shape.parameters
    if plan.lora:
        trained = shape.lora_parameters(plan.lora_rank, plan.lora_targets)
    return 4 * trained + plan.memory.optimiser


def file_system(path: Path) -> str:
    """The kind of file system a path is on; "" if the system does not say."""
    path = path.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    if not mounts:
        return ""
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype


def port(case: Case) -> Checked:
    """The port: whether the node can listen where the settings say."""
    settings = case.settings
    yield from listening_mistakes(settings)
    if not settings.listen:
        yield ok("This node listens nowhere: it only dials.")
        return
    if case.starting and case.home.in_use():
        return  # the port may be that daemon's
    if settings.port == 0:
        free_port(settings.host)
        yield ok(f"Any on {settings.host} will do; a node that others shall find again needs one of its own.")
        return
    ours = case.status is not None and any(f"/{settings.port}/" in text for text in case.status.addresses)
    where = f"{settings.port} on {settings.host}"
    check = partial(check_port, settings.host, settings.port)
    free = f"{where} is free, for TCP and UDP."
    yield from _bound(where, settings.port, check, free, ours=ours)


def page(case: Case) -> Checked:
    """The node's page: whether it can be served where the settings say."""
    settings = case.settings
    if not settings.page:
        yield ok("It is switched off.")
        return
    ours = case.status is not None and f":{settings.http_port}/" in (case.status.page or "")
    where = f"{settings.http_host}, port {settings.http_port or 'any'}"
    free = f"It can be served at {where}."
    yield from _bound(where, settings.http_port, partial(check_page, settings), free, ours=ours)


def _bound(where: str, port: int, check: Callable[[], None], free: str, *, ours: bool) -> Findings:
    """Find out whether a port can be listened on, and if not, why.

    Args:
        check: raises UserError, from the OSError, if it cannot.
        free: the text if it can. ours: the daemon on this home has it.
    """
    try:
        check()
    except UserError as error:
        if ours:
            yield ok(f"{where} is that of the daemon on this home.")
            return
        cause = error.__cause__
        owner = _listener(port)
        why = ""
        if isinstance(cause, OSError) and cause.errno == errno.EACCES:
            why = "Only root may listen on ports below 1024. "
        elif owner:
            why = f"{owner} has it. "
        raise UserError(error.what, f"{why}{error.fix}") from cause
    yield ok(free)


def check_page(settings: Settings) -> None:
    """Raise UserError if the page cannot be served where the settings say. The port is free again afterwards."""
    try:
        bind(settings.http_host, settings.http_port, socket.SOCK_STREAM).close()
    except OSError as error:
        raise no_page(settings.http_host, settings.http_port, error) from error


def _listener(number: int) -> str:
    """Name and pid of the process that listens on a port, if this user may know; else "", as for port 0."""
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("inet"):
            if number and one.laddr and one.laddr.port == number and one.pid and one.status in ("LISTEN", "NONE"):
                return f"{ascii(psutil.Process(one.pid).name())[1:-1]} (pid {one.pid})"
    return ""
