"""Checkpoints: directories that appear whole or not at all, with a checksum of every file."""

import json
import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ftis_node.errors import FtisError, UserError
from ftis_node.host.files import sha256_of_file, sync
from ftis_node.store.schema import refuse_other

CHECKPOINTS_KEPT = 2
_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "checkpoint.json"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)

logger = logging.getLogger(__name__)


def labelled(model: str, kind: str) -> str:
    """Identity of the trained weights: the model's name and its trained part, `lora` or `full`. Manifests have it, so
    its form is fixed."""
    return f"{model} ({kind})"


def parse_label(label: object) -> tuple[str, str] | None:
    """Model and kind of what `labelled` gave; None for anything else."""
    found = re.fullmatch(r"(.+) \((lora|full)\)", str(label))
    if not found:
        return None
    return found[1], found[2]


Facts = dict[str, Any]
"""The facts in a checkpoint's manifest, as JSON has them: model (`labelled`), optimiser, branch, and `progress`, which
`node.progress` reads. A trial of the lab adds its own. The store reads the branch alone."""


SCHEMA = 2
"""Version of what a manifest says."""


class CheckpointError(FtisError):
    """A checkpoint that is damaged."""


class Checkpoints:
    """The checkpoints under one directory. `begin`, fill the directory, `commit`; only then does it exist.

    A start takes the newest sound one (`latest`). "Newest" is by the branch that its facts name, then by step; among
    those that are not set aside the order of steps is the same. Every start and every return to an older checkpoint
    begins a branch, with a number above all before it (`next_branch`).
    Checkpoints that `set_aside` took away are of two kinds:

    * diverged: its weights led to no finite numbers. It never comes back.
    * doubted: the compute process failed with it. It comes back (`take_back`, or the next start) as long as it is the
      newest. Once a newer one is committed, the training has gone on without it, and it is removed.

    A directory has one object at a time, for a new one removes what is unfinished: in a home, that of the daemon which
    holds the lock. Methods that read or write whole files block for long, so the daemon calls these in a thread.
    OSError is raised as it comes.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory if need be, and clear what a killed process left: unfinished checkpoints go, doubted ones
        come back (`take_back`)."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for leftover in path.glob("*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        for replaced in path.glob("*.replaced"):  # killed between the two renames of `commit`
            if replaced.with_suffix("").exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(replaced.with_suffix(""))
        self.take_back()

    def begin(self, step: int) -> Path:
        """Make an empty directory for the files of the checkpoint of `step`; an unfinished one of that step goes."""
        directory = self.path / f"step-{step:08d}.partial"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory

    def commit(self, directory: Path, facts: Facts) -> Path:
        """Make what `begin` gave a checkpoint: checksums, fsync of everything, rename. The two of the latest steps
        stay; older ones go, and doubted ones that are no newer. Returns its directory.

        Args:
            facts: what else to remember, as JSON; comes back from `latest`.
        """
        files = {file.name: sha256_of_file(file) for file in sorted(directory.iterdir())}
        manifest = {"schema": SCHEMA, "files": files, "facts": facts}
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in directory.iterdir():
            sync(file)
        sync(directory)
        final = directory.with_suffix("")
        replaced = directory.with_suffix(".replaced")
        if final.exists():  # the same step again, as after a restart: at every moment one of the two is whole
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        directory.rename(final)
        sync(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in [*self._outlived(), *complete(self.path)[:-CHECKPOINTS_KEPT]]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def next_branch(self) -> int:
        """A number above the branches of all checkpoints that lie here, set aside or not; 1 at first."""
        latest = 0
        for suffix in {entry.suffix for entry in self.path.iterdir()}:
            for directory in _named(self.path, suffix):
                latest = max(latest, _age(directory)[0])
        return latest + 1

    def latest(self, before: int | None = None) -> tuple[Path, Facts] | None:
        """The newest sound checkpoint and its facts, None if there is none. All of its bytes are read; damaged ones are
        set aside as ``*.damaged`` on the way, and the log says so.

        Args:
            before: only those of earlier steps than this one.

        Raises:
            UserError: a newer version wrote it.
        """
        for directory in reversed(complete(self.path)):
            if before is not None and _step(directory) >= before:
                continue
            try:
                return directory, verify(directory)
            except CheckpointError:
                aside = directory.with_suffix(".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                directory.rename(aside)
                logger.error(
                    "A checkpoint is damaged and set aside as %s; an older one is used, if there is one.", aside
                )
        return None

    def set_aside(self, after: int, why: Literal["diverged", "doubted"] = "diverged") -> None:
        """Rename the checkpoints of later steps than `after` to ``*.diverged`` or ``*.doubted``. If there are any,
        those that have such a name already are removed first."""
        later = [directory for directory in complete(self.path) if _step(directory) > after]
        if not later:
            return
        for forgotten in self.path.glob(f"*.{why}"):
            shutil.rmtree(forgotten, ignore_errors=True)
        for directory in reversed(later):  # a kill in between leaves no newer one in its place than those that went
            directory.rename(directory.with_suffix(f".{why}"))

    def take_back(self) -> bool:
        """Make checkpoints again of those that were set aside as doubted; return whether there were any.

        Those that a newer checkpoint has outlived are removed instead.
        """
        outlived = self._outlived()
        for directory in outlived:
            shutil.rmtree(directory, ignore_errors=True)
        aside = [directory for directory in _named(self.path, ".doubted") if directory not in outlived]
        for directory in aside:
            directory.rename(directory.with_suffix(""))
        return bool(aside)

    def _outlived(self) -> list[Path]:
        """Doubted checkpoints that are no newer than the newest of the others."""
        newest = max(map(_age, complete(self.path)), default=(0, -1))
        return [directory for directory in _named(self.path, ".doubted") if _age(directory) <= newest]


def newest_facts(path: Path) -> Facts | None:
    """The facts of the checkpoint of the latest step under `path`, without a look at its files; None if none can be
    read. Nothing is changed, so a daemon may run there.

    Raises:
        UserError: a newer version wrote it.
    """
    if not path.exists():
        return None
    for directory in reversed(complete(path)):
        with suppress(*_UNREADABLE):
            return _manifest(directory)[1]
    return None


def complete(path: Path) -> list[Path]:
    """The checkpoints in a directory, sound or not, the oldest step first; none that is unfinished or set aside."""
    return _named(path, "")


def under(path: Path) -> list[Path]:
    """The checkpoints of a home, or in a directory of them, as `complete`; none: it is a directory of something else.

    Raises:
        UserError: the home has none yet.
    """
    directory = path / "checkpoints"
    if not directory.is_dir():
        directory = path
    found = complete(directory)
    if not found and (directory != path or (path / "run.toml").exists()):
        raise UserError(f"The home {path} has no checkpoint yet.", "Wait for the first step, or name the model itself.")
    return found


def _named(path: Path, suffix: str) -> list[Path]:
    """Directories of checkpoints whose names end so, as in ".doubted", the oldest step first; "": those that count."""
    found = []
    for entry in path.iterdir():
        if entry.suffix == suffix and _NAME.fullmatch(entry.stem) and entry.is_dir():
            found.append(entry)
    return sorted(found, key=_step)


def verify(directory: Path) -> Facts:
    """Check every file of a checkpoint against its checksum, which reads all of it, and return the facts it was
    committed with.

    Raises:
        CheckpointError: a file is missing or altered.
        UserError: a newer version wrote it.
    """
    try:
        files, facts = _manifest(directory)
        sound = all(sha256_of_file(directory / name) == digest for name, digest in files.items())
    except _UNREADABLE as error:
        raise CheckpointError(f"The checkpoint {directory} cannot be read: {error}") from error
    if not sound:
        raise CheckpointError(f"The checkpoint {directory} is damaged: a checksum differs.")
    return facts


def _manifest(directory: Path) -> tuple[dict[str, str], Facts]:
    """Checksums and facts. Raises UserError, or one of `_UNREADABLE`."""
    manifest = json.loads((directory / _MANIFEST).read_text())
    files = dict(manifest["files"])  # before the schema: what is damaged is not called old
    facts = dict(manifest["facts"])
    refuse_other(f"The checkpoint {directory}", int(manifest["schema"]), SCHEMA)
    return files, facts


def _step(directory: Path) -> int:
    """The step in the name of a checkpoint's directory, whatever its suffix."""
    return int(directory.stem.removeprefix("step-"))


def _age(directory: Path) -> tuple[int, int]:
    """Branch and step, by which checkpoints are ordered; the branch is 0 where none can be read."""
    branch = 0
    with suppress(*_UNREADABLE, UserError):
        branch = _manifest(directory)[1].get("branch", 0)
    if not isinstance(branch, int):
        branch = 0
    return branch, _step(directory)
