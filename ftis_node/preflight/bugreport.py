"""The bug report: facts, findings and logs in one file, without keys, weights and packets."""

import io
import json
import os
import platform
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from ftis_node.config.settings import ENVIRONMENT_PREFIX
from ftis_node.errors import UsageError, UserError, brief
from ftis_node.host.files import bytes_under, existing_folder, removed_if_it_fails
from ftis_node.observe.api import ask
from ftis_node.observe.metrics import end_of_parts
from ftis_node.observe.provenance import commit, versions
from ftis_node.preflight.case import Case, Finding
from ftis_node.preflight.machine import installed, memory_limit
from ftis_node.preflight.place import file_system
from ftis_node.preflight.redaction import Redactor

TAIL_BYTES = 1 << 20
# Files of a home that hold secrets: they are never packed, and their text is removed from all other parts.
_TOKENS = "*.token"


def collect(case: Case, findings: Sequence[Finding], *, with_addresses: bool = False) -> dict[str, str]:
    """Collect the parts of a report: name → text, without secrets and, by default, without addresses."""
    home = case.home
    # The numbers of the run and of its dataset's revision are no secrets.
    public = " ".join(f"{found.run.id.hex()} {found.run.task} {found.run.reward}" for _, found in case.runs)
    redactor = Redactor(_key(case), _secrets(case), public, with_addresses=with_addresses)
    parts: dict[str, Callable[[], str]] = {
        "facts.json": lambda: _json(_facts(case)),
        "doctor.json": lambda: _json([asdict(finding) for finding in findings]),
        "settings.json": lambda: _json(case.explained()),
        "environment.json": lambda: _json({k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIX)}),
        "run.toml": lambda: _whole(home.run_file),
        "status.json": lambda: _asked(case, "/status"),
        "peers.json": lambda: _asked(case, "/peers"),
        "node.log": lambda: _end(home.log),
        "metrics.jsonl": lambda: _end(home.metrics),
        "checkpoints.json": lambda: _json(_manifests(case)),
        "home.txt": lambda: "\n".join(_listing(home.path)),
    }
    packed = {}
    for name, part in parts.items():
        try:
            text = part()
        except Exception as error:  # the report may be about just this
            text = f"This could not be collected: {brief(error)}\n"
        if text:
            packed[name] = redactor.clean(text)
    return packed


def pack(parts: Mapping[str, str], out: Path) -> None:
    """Write the parts as a .tar.gz that only its owner may read.

    Raises:
        UsageError: there is a file of that name.
        UserError: it cannot be written.
    """
    data = io.BytesIO()
    folder = out.name.removesuffix(".tar.gz")
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, text in parts.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")  # owner and group stay at 0: no sender is named
            content = text.encode(errors="replace")
            entry.size = len(content)
            entry.mtime = int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with removed_if_it_fails(out), os.fdopen(descriptor, "wb") as file:
            file.write(data.getvalue())
    except FileExistsError:
        raise UsageError(f"{out} exists already.", "Name another file with --out; none is overwritten.") from None
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.", "Name another file with --out.") from error


def _key(case: Case) -> bytes | None:
    try:
        return case.home.key.read_bytes()
    except OSError:
        return None


def _asked(case: Case, path: str) -> str:
    """The answer of the daemon on the home, if one runs."""
    if case.status is None:
        return ""
    return _json(ask(case.home.api_socket(), path, dict))


def _secrets(case: Case) -> Iterator[str]:
    """Secrets of this machine: the hub's token, the home's tokens, and its key in several spellings."""
    from huggingface_hub import get_token

    yield get_token() or ""
    for file in case.home.path.glob(_TOKENS):
        yield _whole(file).strip()
    key = _key(case) or b""
    yield key.hex()
    yield key[4:36].hex()


def _facts(case: Case) -> dict[str, object]:
    import torch

    memory = psutil.virtual_memory()
    place = existing_folder(case.home.path)
    disk = shutil.disk_usage(place)
    home = bytes_under(case.home.path)
    gpus = []
    if torch.cuda.is_available():
        gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {**versions(), **installed()},
        "commit": commit(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": {"total": memory.total, "available": memory.available, "limit": memory_limit()},
        "disk": {"total": disk.total, "free": disk.free, "home": home, "kind": file_system(place)},
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }


def _gpu(index: int) -> dict[str, object]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "free": free, "total": total}


def _manifests(case: Case) -> dict[str, object]:
    """The facts of each checkpoint, with names and checksums of its weights."""
    found = {}
    for file in sorted(case.home.checkpoints.glob("*/checkpoint.json")):
        try:
            found[file.parent.name] = json.loads(_whole(file))
        except ValueError:
            found[file.parent.name] = "damaged"
    return found


def _listing(home: Path) -> Iterator[str]:
    """Names, sizes and modes of a home's files."""
    for file in sorted(home.rglob("*")):
        facts = file.lstat()
        yield f"{facts.st_mode:o} {facts.st_size:12} {file.relative_to(home)}"


def _whole(file: Path) -> str:
    if not file.is_file() or file.is_symlink():
        return ""
    return file.read_text(encoding="utf-8", errors="replace")


def _end(file: Path) -> str:
    """The last MB, older parts of the file included."""
    if not file.is_file() or file.is_symlink():
        return ""
    return end_of_parts(file, TAIL_BYTES).decode(errors="replace")


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
