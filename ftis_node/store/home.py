"""The home directory: one node's key, store, checkpoints and logs; locked against a second daemon."""

import fcntl
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from ftis_node.errors import UserError
from ftis_node.host.descriptors import limit, ran_out
from ftis_node.host.files import kept, remove_unfinished, removed_if_it_fails, replace_bytes, replace_text
from ftis_node.store.schema import refuse_other

# Sockets lie in a short private directory of their own: a socket's path may have 107 bytes, a home's may have more.
RUNTIME_PREFIX = "ftis-"
DEFAULT_HOME = Path("~/.ftis-node")
_DEEPEST = 60  # bytes of a folder for theirs
LOCK_SECONDS = 0.5  # who asks whether a home is in use holds its lock for a moment

SCHEMA = 2  # of what is written into a home, but for its database and its checkpoints


def socket_folder() -> str:
    """The folder for directories of sockets: that for temporary files, or /tmp where their paths would be too long."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _DEEPEST:
        return "/tmp"
    return folder


class Runtime(msgspec.Struct, frozen=True):
    """A daemon's record: its process id, the directory of its sockets."""

    pid: int
    directory: str


class Home:
    """Paths of one node, and the lock on them.

    Commands use the paths without the lock, also while a daemon runs there. A daemon holds the lock from `open` to
    `close`.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: may begin with ~.
        """
        path = path.expanduser()
        self.path = path
        self.key = path / "identity.key"
        self.store = path / "store.sqlite"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.track = path / "track"
        self.log = path / "node.log"
        self.run_file = path / "run.toml"
        self.standing = path / "standing.json"
        self.vllm = path / "vllm"
        self.page_token = path / "page.token"
        self.schema = path / "home.json"
        self.task_files = path / "task.json"
        self.port = path / "port"
        self.swarm_history = path / "swarm.history"
        self.peers = path / "peers.json"
        self.members = path / "members"
        self.orders = path / "orders"
        self.invitation = path / "invitation"
        self._runtime_file = path / "runtime.json"
        self._lock: IO[str] | None = None

    @property
    def to_start(self) -> str:
        """The advice for a person who looks for a node where none runs."""
        return f"Start one with `ftis-node join{self.flag}`, or name another home."

    def refuse_missing(self) -> None:
        """Raise UserError if there is no such home."""
        if not self.path.is_dir():
            raise UserError(f"There is no home {self.path}.", self.to_start)

    @property
    def flag(self) -> str:
        """The flags by which a command means this home, with a space before them; empty for the default home."""
        path = self.path.absolute()
        if path == DEFAULT_HOME.expanduser():
            return ""
        return f" --home {shlex.quote(str(path))}"

    @property
    def observes(self) -> bool:
        """Whether the home is that of an observer, which keeps a run and no packets."""
        return self.run_file.exists() and not self.store.exists()

    def last_port(self) -> int:
        """The port that it listened on last, so that others find it again; 0 if there is none."""
        port = kept(self.port, int, "the node takes another port.") or 0
        if not 0 < port < 1 << 16:
            return 0
        return port

    def open(self) -> None:
        """Create and lock the home, and clear what a killed daemon left behind; an open one stays as it is.

        It comes before all other writes. It waits up to half a second for the lock.

        Raises:
            UserError: another daemon uses this home, or it cannot be written.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(stat.S_IRWXU)
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise UserError(f"The home {self.path} cannot be used: {error.strerror}.", "Name another --home.") from None
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                lock.close()
                raise self.taken()
            time.sleep(LOCK_SECONDS / 10)
        self._lock = lock
        self._clear_runtime()
        for directory in (self.path, self.orders):
            remove_unfinished(directory)

    def check_schema(self) -> None:
        """Refuse a home whose schema this version does not know; nothing is written, and no lock needed.

        Raises:
            UserError: a newer version wrote it, or one that is too old, or its schema is damaged.
        """
        try:
            found = json.loads(self.schema.read_text(encoding="utf-8"))["schema"]
        except FileNotFoundError:
            found = SCHEMA
            if self.store.exists():  # a new home has no packets
                found = 1  # the first ones had no number
        except (ValueError, KeyError, TypeError):
            found = None
        refuse_other(f"The home {self.path}", found, SCHEMA)

    def mark(self) -> None:
        """Write the schema into a new home, once it is open. Raises UserError as `check_schema` does."""
        self.check_schema()
        if not self.schema.exists():
            replace_text(self.schema, json.dumps({"schema": SCHEMA}), durable=True)

    def close(self) -> None:
        """Remove the runtime directory and give up the lock; a home that is not open is left alone."""
        if self._lock is None:
            return
        self._clear_runtime()
        self._lock.close()
        self._lock = None

    def taken(self) -> UserError:
        """The error for a second daemon on one home."""
        return UserError(
            f"Another ftis-node daemon is running on the home {self.path}.",
            f"Stop it with `ftis-node stop{self.flag}`, or name another --home.",
        )

    def failed(self, error: Exception) -> UserError:
        """The error that ends a daemon when it could not read or write here."""
        if ran_out(error):
            return UserError(
                f"The node needs more open files than the {limit()} that it may have.",
                "Raise the limit (`ulimit -n 4096`, or limits.conf) and start the same command again.",
            )
        if not self.path.is_dir():
            return UserError(f"The home {self.path} was removed meanwhile.", "Start again on a --home that stays.")
        return UserError(
            f"The home {self.path} cannot be written or read: {error}.",
            "Make room on its disk and start the same command again; it goes on from the last checkpoint.",
        )

    def in_use(self) -> bool:
        """Whether a daemon holds the lock. To find out, this takes it for a moment, which `open` waits for."""
        try:
            with (self.path / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return not isinstance(error, FileNotFoundError | NotADirectoryError)
        return False

    def make_runtime(self) -> Path:
        """A fresh private directory (0700) for this daemon's sockets, recorded so that others find it; `close` removes
        it."""
        directory = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=socket_folder()))
        with removed_if_it_fails(directory):
            self.record_runtime(directory)
        return directory

    def record_runtime(self, directory: Path) -> None:
        """Write down this process (its id) and its runtime directory: clients read them, and the next start removes the
        directory if this daemon is killed. It replaces the record."""
        replace_bytes(self._runtime_file, msgspec.json.encode(Runtime(os.getpid(), str(directory))))

    def runtime(self) -> Runtime | None:
        """The record of the running daemon, or of one that was killed (see `lives`); None if there is none."""
        record = kept(self._runtime_file, msgspec.json.Decoder(Runtime).decode, "no daemon is found by it.")
        if record is None or not Path(record.directory).name.startswith(RUNTIME_PREFIX):
            return None
        return record

    @staticmethod
    def lives(record: Runtime | None) -> bool:
        """Whether the daemon of this record is there still."""
        import psutil

        try:
            return record is not None and psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ValueError):
            return False

    def api_socket(self) -> Path | None:
        """Where the daemon on this home answers, though it may be dead; None if there is no record of one."""
        record = self.runtime()
        if record is None:
            return None
        return Path(record.directory) / "api.sock"

    def _clear_runtime(self) -> None:
        """Remove this daemon's sockets and record, or a killed one's. Only the holder of the lock may do so.
        Children of a killed one have ended with it: p2pd by the kernel (`p2pd._PRELUDE`), the compute process when its
        socket closed."""
        record = self.runtime()
        if record is not None:
            shutil.rmtree(record.directory, ignore_errors=True)
            self._runtime_file.unlink(missing_ok=True)
