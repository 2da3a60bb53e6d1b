"""A GGUF file made a folder that transformers loads: once, in the user's cache, by the file's sha256.

The folder is laid out as a download from a hub, in bfloat16, and appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import UsageError, UserError
from ftis_node.host.doing import doing
from ftis_node.host.files import cache_dir, free_bytes, replace_text, sha256_of_file
from ftis_node.installed import to_install
from ftis_node.policy.gguf.header import GgufHeader, UnusableFile, read_header
from ftis_node.policy.gguf.words import FILES, LISTS
from ftis_node.text import rounded, say

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_FORMAT = "1"  # of the folders: another makes them anew
FACTS = "gguf.json"  # in the folder: what the file is
_ELSEWHERE = "Take the model's own folder from its hub"
_ROOM = 64 << 20  # beside the weights
_DOWNLOAD = "Download it again, whole."
# What files are that people take for a GGUF file, by their first bytes.
_OTHERS = (
    (b"version https://git-lfs", "is a pointer of git-lfs", "Fetch the file itself with `git lfs pull`."),
    (b"<", "is a web page", "Download the file itself: of a page's links the one that says download."),
)


def folder_of(file: Path, tokenizer: Path | None = None) -> Path:
    """The folder that was made of a GGUF file, which takes minutes the first time.

    Other processes may ask at the same time: one makes it, and the others wait. Later calls read nothing of a file that
    has not changed since. Nothing removes a folder.

    Args:
        tokenizer: a folder whose tokenizer is taken in place of the file's.

    Raises:
        UsageError: it is none that can be read here, or `tokenizer` has no tokenizer.
        UserError: there is no room, or the work was ended.
    """
    place = cache_dir() / "gguf"
    sources = []
    if tokenizer is not None:
        sources = _small_files(tokenizer)
    seen = place / f"{_seal(_stamp(one) for one in (file, *sources))}.seen"  # says which folder it was
    with suppress(OSError):
        known = place / seen.read_text(encoding="utf-8")
        if (known / FACTS).is_file():
            return known
    header = _opened(file)
    target = place / _seal([_FORMAT, *(sha256_of_file(one) for one in (file, *sources))])
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _alone(place / f"{target.name}.lock"):
            if not target.is_dir():
                _make(file, header, tokenizer, target)
        replace_text(seen, target.name)
    except OSError as error:
        raise UserError(
            f"{place} cannot be written: {error.strerror or error}.",
            "Make room there, or set XDG_CACHE_HOME to a folder on another disk.",
        ) from error
    return target


def told_of(folder: Path) -> str:
    """What the file was that a folder was made of, for a person; empty for any other folder."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return f"a GGUF file ({facts['architecture']}, {facts['quantisation']}, {rounded(facts['size'])})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _seal(parts: Any) -> str:
    """A name for a file, that no other texts have: the sha256 of these, each on a line. parts: texts, in this order."""
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()


def _stamp(file: Path) -> str:
    """Changes whenever a file does; of one that has not changed nothing is read."""
    found = file.stat()
    return f"{_FORMAT} {file.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


def _small_files(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder, in the order of `FILES`. Raises UsageError where there is none."""
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if not {"tokenizer.json", "vocab.json", "tokenizer.model"} & {file.name for file in found}:
        raise UsageError(
            f"{folder} holds no tokenizer.",
            "Name a folder with the tokenizer.json and tokenizer_config.json of the model.",
        )
    return found


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Within it no other process makes the folder; while one does, wait for it, as long as it takes.

    lock: a file, which stays.
    """
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process turns this file into a folder; waiting for it.", error=True, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def blocks() -> dict[int, tuple[int, int]]:
    """Elements and bytes of a block, by number of the quantisation. Raises UsageError without the package `gguf`."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        raise UsageError(
            "GGUF files are read and written with the package gguf, which is not installed.",
            f"Install it: {to_install('ftis-node[gguf]')}.",
        ) from None
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def read(file: Path) -> GgufHeader:
    """The header of a GGUF file, of any architecture.

    Raises:
        UnusableFile: the file is none, or damaged. OSError: it cannot be read. UsageError: as `blocks`.
    """
    sizes = blocks()
    with file.open("rb") as opened:
        number = opened.fileno()
        if os.fstat(number).st_size == 0:
            raise UnusableFile("it is empty")
        with mmap.mmap(number, 0, access=mmap.ACCESS_READ) as data:
            return read_header(data, sizes, LISTS)


def _opened(file: Path) -> GgufHeader:
    """The header of a file that can be turned into a folder. Raises UsageError for any other."""
    from ftis_node.policy.gguf.families import FAMILIES

    try:
        with file.open("rb") as opened:
            first = opened.read(64)
        header = read(file)
    except UnusableFile as error:
        if first.startswith(b"GGUF"):
            raise UsageError(f"{file} is no sound GGUF file: {error}.", _DOWNLOAD) from None
        for begin, what, fix in _OTHERS:
            if first.lstrip().startswith(begin):
                raise UsageError(f"{file} {what}, and no model.", fix) from None
        raise UsageError(
            f"{file} is a file, and no GGUF file.",
            "Name a GGUF file, or the folder that holds config.json and the weights.",
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.", "Check its permissions.") from None
    facts = header.facts
    family = facts["general.architecture"]
    parts = facts.get("split.count", 1)
    if parts != 1:
        raise UsageError(
            f"{file} is one of {parts} parts of a model.",
            "Join them first: `llama-gguf-split --merge FIRST-PART WHOLE.gguf` of llama.cpp.",
        )
    if facts.get("general.type", "model") == "adapter":
        raise UsageError(
            f"{file} is an adapter, which is no model by itself.",
            "Name the GGUF file of a whole model; `llama-export-lora` of llama.cpp merges the two.",
        )
    if family == "clip" or facts.get("general.type") == "mmproj":
        raise UsageError(
            f"{file} is the part of a model that reads pictures (mmproj).",
            "Name the file of its language model, which lies beside it as a rule.",
        )
    if family not in FAMILIES:
        raise UsageError(
            f"{file} is of the architecture {family!a}, which is not read from GGUF files here.",
            f"{_ELSEWHERE}, or a model of: {', '.join(FAMILIES)}.",
        )
    return header


def _make(file: Path, header: GgufHeader, tokenizer: Path | None, target: Path) -> None:
    """Make the folder, in a process of its own: it needs torch, and what it takes is given back.

    Call it within `_alone`. `target` appears whole at the end, or not at all.

    Raises:
        UsageError: the process refused the file. UserError: there is no room, or it ended otherwise.
    """
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    need = 2 * sum(one.elements for one in header.tensors.values()) + _ROOM
    free = free_bytes(target)
    if need > free:
        raise UserError(
            f"{file} takes {rounded(need)} as a folder, and {rounded(free)} are free in {target.parent}.",
            "Make room there, or set XDG_CACHE_HOME to a folder on another disk.",
        )
    partial.mkdir()
    say(f"{file.name} becomes a folder of {rounded(need - _ROOM)} in {target.parent}, once.", error=True, flush=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "ftis_node.policy.gguf",
        str(file),
        str(tokenizer or ""),
        str(partial),
    ]
    here = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    try:
        with doing(f"unpacking {file.name}"):
            ended = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
                check=False,
            )
        if ended.returncode:
            raise _why(file, ended)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _why(file: Path, ended: subprocess.CompletedProcess[bytes]) -> UserError:
    """Return the error for a process that made no folder: its own refusal, or else how it ended."""
    try:
        what, fix = json.loads(ended.stdout)
        return UsageError(what, fix)
    except (ValueError, TypeError):
        return UserError(
            f"{file} was not turned into a folder: the process ended with {ended.returncode}.",
            f"Its own words stand above; -9 means that memory ran out. {_ELSEWHERE}.",
        )


def quantisation(header: GgufHeader) -> str:
    """The name of a file's quantisation, as Q4_K_M; by its largest tensor where it does not say. For people only."""
    from gguf import LlamaFileType

    with suppress(ValueError):
        kind = LlamaFileType(header.facts.get("general.file_type"))
        return str(kind.name).partition("_")[2]
    largest = max(header.tensors.values(), key=lambda one: one.elements)
    return str(kind_of(largest.kind).name)


def kind_of(number: int) -> GGMLQuantizationType:
    """The quantisation of that number, one of `blocks`; ValueError for others."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number)
