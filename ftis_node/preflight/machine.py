"""Checks of the machine: Python, libraries, torch, the GPU, limits."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from ftis_node.host.allocator import FIXED, NAMES
from ftis_node.host.descriptors import raise_limit
from ftis_node.host.threads import LOOK_SECONDS, Threads
from ftis_node.installed import to_install
from ftis_node.policy.names import built_in
from ftis_node.preflight.case import Case, Finding, Findings, fail, ok, warn
from ftis_node.store.home import socket_folder
from ftis_node.text import GB, rounded

_PACKAGE = "ftis-node"
_NVIDIA = Path("/proc/driver/nvidia/version")
SMOKE_SECONDS = 60.0
_TOLD = ("transformers", "peft", "hivemind")
FEW_FILES = 1024  # the usual default; p2pd opens one for each connection


def python(case: Case) -> Findings:
    """Python's platform, and whether hivemind's p2pd is installed. (A Python that is too old cannot import this.)"""
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    found = util.find_spec("hivemind")
    daemon = Path()
    if found is not None and found.origin:
        daemon = Path(found.origin).parent / "hivemind_cli" / "p2pd"
    if not os.access(daemon, os.X_OK) or not daemon.is_file():
        yield fail(
            f"{seen}; hivemind's network daemon p2pd is not there.",
            "Use Linux on x86-64, which hivemind's wheel is for, and install hivemind from that wheel.",
        )
        return
    yield ok(f"{seen}.")


def libraries(case: Case) -> Findings:
    """The libraries: whether their versions are in the ranges of pyproject.toml. Extras count only if installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        yield warn(
            f"{_PACKAGE} itself is not installed, so its ranges are unknown.",
            "Install it: pip install -e . in its folder, or `make`.",
        )
        return
    sound = 0
    for requirement in requirements:
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        wanted = f"{requirement.name}{requirement.specifier}"
        version = _version(requirement.name)
        if not version:
            if not optional:
                yield fail(f"{wanted} is not installed.", f"Run: {to_install(wanted)}")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            sound += not optional
        else:
            complain = fail
            if optional:
                complain = warn
            text = f"{requirement.name} {version} is outside of {requirement.specifier}."
            yield complain(text, f"Run: {to_install(wanted)}")
    versions = [f"{name} {_version(name)}" for name in _TOLD if _version(name)]
    yield ok(f"{sound} are within their ranges; {', '.join(versions)}".rstrip("; ") + ".")


def installed() -> dict[str, str]:
    """Name → version of all libraries that ftis-node requires and that are installed, those of extras too."""
    names = [Requirement(text).name for text in metadata.requires(_PACKAGE) or ()]
    return {name: version for name in names if (version := _version(name))}


def _version(name: str) -> str:
    """The version of a library; empty if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def torch_(case: Case) -> Findings:
    """PyTorch: its version and build, and whether it can use the machine's GPU."""
    import torch

    hip = torch.version.hip
    build = "for the CPU"
    if torch.version.cuda:
        build = f"for CUDA {torch.version.cuda}"
    elif hip:
        build = f"for ROCm {hip}"
    seen = f"{torch.__version__}, {build}; {torch.get_num_threads()} thread(s)"
    with warnings.catch_warnings(record=True) as said:  # torch warns of a driver that is too old
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable and hip and case.settings.devices[0] != "cpu":
        text = "ROCm is untested: the node takes such a GPU for a CUDA device, and nothing else is made for it."
        yield warn(f"{seen}. {text}", "Try it, and say how it went; or use --device cpu.")
        return
    wanted = case.settings.device.startswith("cuda")
    if usable or (not _NVIDIA.exists() and not wanted):
        yield ok(f"{seen}.")
        return
    complain = warn
    if wanted:
        complain = fail
    if not _NVIDIA.exists():
        text = f"{seen}; no NVIDIA driver is loaded."
        advice = "Mend or install the driver, or use --device cpu."
    elif not torch.version.cuda:
        text = f"{seen}, though this machine has an NVIDIA GPU."
        advice = "Install torch for CUDA (pytorch.org says how) to use it."
    else:
        reason = " ".join(str(one.message).split(" (Triggered")[0] for one in said)[:300]
        text = f"{seen}, which cannot use the GPU with driver {_driver()}. {reason}".rstrip()
        advice = "Update the driver, or install a torch for the CUDA that it knows (`nvidia-smi` names it)."
    yield complain(text, advice)


def gpu(case: Case) -> Findings:
    """The GPU: a small product in bf16 and its gradient, in another process, which a broken driver may kill."""
    import torch

    if case.settings.devices[0] == "cpu" or not torch.cuda.is_available():
        if case.settings.devices[0] == "cpu" or case.settings.model in built_in():
            yield ok(f"No GPU is used; {_on_cpu(case)}")
        else:
            yield warn(
                f"There is none that torch can use: {_on_cpu(case)}",
                "Fine for small models; large ones take a GPU, see `ftis-node fit`.",
            )
        return
    devices: Sequence[str] = ("cuda",)
    if case.settings.device.startswith("cuda"):
        devices = case.settings.devices
    for device in devices:
        found = smoke(device)
        if found.verdict == "fail" and (case.status is not None or case.home.in_use()):
            text = f"{found.text} But a daemon runs on this home, and may have all of the GPU's memory."
            found = warn(text, f"Stop it to try the GPU alone. {found.advice}")
        yield found


def _on_cpu(case: Case) -> str:
    """That the CPU trains, and with how many threads if others use it; this home's own node would be one of them."""
    import torch

    threads = Threads(torch.get_num_threads())
    if case.status is None:
        time.sleep(LOOK_SECONDS)
        threads.wanted()
    return f"the CPU trains{threads.told()}."


def smoke(device: str) -> Finding:
    """The finding of `ftis_node.preflight.smoke` about a device, in another process; if it fails, of a second one whose
    allocator has segments of fixed size, which mends some drivers."""
    advice = "Look at `nvidia-smi` and the kernel's log; with --device cpu the node does without."
    try:
        ended = _computed(device)
        fixed = {NAMES[1]: FIXED}
        if ended.returncode != 0 and device != "cpu" and _computed(device, fixed).returncode == 0:
            advice = f"Set {NAMES[1]}={FIXED} in the node's environment: with it the computation succeeds."
    except subprocess.TimeoutExpired:
        return fail(f"A small computation on {device} did not end within {SMOKE_SECONDS:g} s.", advice)
    if ended.returncode != 0:
        why = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1][:300]
        return fail(f"A small computation on {device} failed: {why}", advice)
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    memory = ""
    if "total" in told:
        memory = f", {rounded(told['free'])} of {rounded(told['total'])} free"
    text = f"{told['name']}{memory}; driver {_driver()}: {told['half']} and a backward pass agree with the CPU."
    if util.find_spec("bitsandbytes") is None:
        text += f" Without bitsandbytes there is no 8-bit AdamW and no NF4 ({to_install('ftis-node[gpu]')})."
    if told["wrong"]:
        return fail(
            f"{told['name']} computes {', '.join(told['wrong'])} otherwise than the CPU does.",
            "Its memory or its driver is broken: update the driver, test the card.",
        )
    return ok(text)


def _computed(device: str, changes: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    # -P: a file in the current folder is no module
    line = [sys.executable, "-P", "-m", "ftis_node.preflight.smoke", device]
    wanted = {name: value for name, value in os.environ.items() if not (changes and name in NAMES)} | dict(changes)
    return subprocess.run(
        line, capture_output=True, text=True, timeout=SMOKE_SECONDS, stdin=subprocess.DEVNULL, env=wanted
    )


def _driver() -> str:
    """The version of NVIDIA's kernel module; "unknown" where it does not say."""
    with suppress(OSError):
        words = _NVIDIA.read_text(encoding="utf-8").split()
        return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
    return "unknown"


def limits(case: Case) -> Findings:
    """Limits: open files, the control group's memory, and the disk for temporary files."""
    files = raise_limit()  # as a node does
    if files < FEW_FILES:
        yield warn(f"Only {files} files may be open at a time.", "Ask for more: a higher hard limit (limits.conf).")
    total = psutil.virtual_memory().total
    limit = memory_limit()
    if limit is not None and limit < total:
        yield warn(
            f"Its control group may use {rounded(limit)} of {rounded(total)} of memory; a plan for the CPU sees all.",
            f"On a CPU start with --vram {0.8 * limit / GB:.1f}, or give the container more.",
        )
    folder = socket_folder()
    if not os.access(folder, os.W_OK):
        yield fail(
            f"The directory for sockets, {folder}, cannot be written.", "Set TMPDIR to a folder that can be written."
        )
        return
    free = shutil.disk_usage(folder).free
    if free < 16 << 20:
        yield warn(
            f"Only {rounded(free)} are free in {folder}.", "Make room there, or set TMPDIR to a folder on another disk."
        )
    yield ok(f"{files} open files, {os.cpu_count()} cores, {rounded(total)} of memory.")


def memory_limit(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that the control groups (version 1 or 2) of this process allow; None if they do not say."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = tree
            file = "memory.max"
        elif "memory" in controllers.split(","):
            root = tree / "memory"
            file = "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        # In a container the tree may begin at its own group: then the path leads nowhere, and the root is the group.
        for directory in (place, *place.parents):
            if directory.is_relative_to(root):
                found += _bytes_in(directory / file)
    return min(found, default=None)


def _bytes_in(file: Path) -> list[int]:
    with suppress(OSError):
        text = file.read_text(encoding="utf-8").strip()
        if text.isdecimal() and int(text) < 1 << 60:  # version 1 writes 2^63 for no limit
            return [int(text)]
    return []
