"""One file from the web into the user's cache: bounded in time and size, its sha256 checked, put there in one move."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import UserError
from ftis_node.host.files import replace_bytes, sha256_of_file

_CHUNK = 1 << 16
_NAME_IT = "Download the file elsewhere and name it: --data FILE for training, --eval-data FILE for evaluation."
LOCAL_COPY = "Download the file elsewhere and name it with --data FILE."


@dataclass(frozen=True, slots=True)
class Remote:
    """A file that never changes: where it is, how many bytes it has and their sha256 (hex)."""

    url: str
    size: int
    sha256: str


_STALL_SECONDS = 20.0  # for each wait for the server
_SECONDS = 300.0  # for a whole download


def sha256_of(path: Path) -> str | None:
    """The sha256 (hex) of a file's bytes; None where there is no file to read."""
    try:
        return sha256_of_file(path)
    except OSError:
        return None


def cached(remote: Remote, path: Path, *, fix: str = _NAME_IT) -> Path:
    """`path`, downloaded first where it is missing or damaged.

    Raises UserError where that fails, with the advice `fix`; then nothing was put at `path`.
    """
    if sha256_of(path) == remote.sha256:
        return path
    try:
        put_there(path, _download(remote))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"Cannot download {remote.url} ({error or type(error).__name__}).", fix) from error
    return path


def _download(remote: Remote) -> bytes:
    deadline = time.monotonic() + _SECONDS
    data = bytearray()
    with urllib.request.urlopen(remote.url, timeout=_STALL_SECONDS) as answer:  # the address is a constant of ours
        while chunk := answer.read1(_CHUNK):
            data += chunk
            if len(data) > remote.size:
                raise ValueError(f"more than the {remote.size} bytes expected")
            if time.monotonic() > deadline:
                raise TimeoutError("it takes too long")
    if len(data) < remote.size:
        raise ValueError(f"only {len(data)} of {remote.size} bytes came")
    if hashlib.sha256(data).hexdigest() != remote.sha256:
        raise ValueError("its sha256 is not the one expected")
    return bytes(data)


def put_there(path: Path, data: bytes) -> None:
    """Write a file of the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, data)
