"""Files that others may read at any moment, and what is on the disk."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from ftis_node.errors import UserError

Kept = TypeVar("Kept")

logger = logging.getLogger(__name__)


def home_folder() -> Path:
    """The person's home folder. Raises UserError where neither HOME nor the system's users name one."""
    try:
        return Path.home()
    except RuntimeError:
        raise no_home_folder() from None


def no_home_folder() -> UserError:
    """The error where there is none, as for a number in place of a user in a container or a service."""
    return UserError(
        f"HOME is not set, and the system knows no home folder of the user with the id {os.getuid()}.",
        "Set HOME to a folder that this user can write, as in: HOME=/data ftis-node …",
    )


def kept(path: Path, read: Callable[[bytes], Kept], otherwise: str) -> Kept | None:
    """What `read` makes of a file of the home; None if there is none, or a damaged one.

    Args:
        otherwise: what becomes of a node without the file; a warning says it if the file is damaged.
    """
    try:
        return read(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("The file %s cannot be read (%r): %s", path, error, otherwise)
        return None


def sha256_of_file(path: Path) -> str:
    """The sha256 (hex) of a file's bytes. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a UTF-8 file so that a reader, or a kill in between, finds the old text or the new one, never a part.

    Args:
        durable: it must outlive a power loss too, once this returns.

    Raises:
        OSError: the directory cannot be written; the old file stands.
    """
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """As `replace_text`, of bytes."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with removed_if_it_fails(temporary):
        temporary.write_bytes(data)
        if durable:
            sync(temporary)
        temporary.replace(path)
    if durable:
        sync(path.parent)


@contextmanager
def removed_if_it_fails(path: Path) -> Iterator[None]:
    """Remove a file or a directory that the block could not finish, as on a full disk. After a cancel or Ctrl-C, which
    are no `Exception`, it stays."""
    try:
        yield
    except Exception:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise


def remove_unfinished(directory: Path) -> None:
    """Remove what `replace_bytes` left there in processes that were killed."""
    import psutil

    for file in directory.glob("*.*.tmp"):
        pid = file.suffixes[-2][1:]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            file.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def end_of(file: IO[bytes], size: int) -> bytes:
    """The last `size` bytes in whole lines: of half a line nobody knows what it is half of."""
    length = file.seek(0, os.SEEK_END)
    file.seek(max(0, length - size))
    data = file.read()
    if length > size:
        return data.partition(b"\n")[2]
    return data


def bytes_under(directory: Path) -> int:
    """Bytes of all files in a directory and those below it; 0 if there is none."""
    total = 0
    for file in directory.rglob("*"):
        with suppress(OSError):  # somebody may take it away meanwhile
            total += file.lstat().st_size
    return total


def existing_folder(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(existing_folder(path)).free


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/ftis-node, or ~/.cache/ftis-node."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = home_folder() / ".cache"
    return base / "ftis-node"
