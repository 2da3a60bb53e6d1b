"""What a home remembers beside its checkpoints, and homes of older versions: what becomes of them at the next start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftis_node.host.files import replace_text
from ftis_node.node.options import JoinOptions
from ftis_node.observe.metrics import read_events
from ftis_node.store.home import Home
from ftis_node.store.migrations import Schema

_FILES = ("data", "eval_data")

logger = logging.getLogger(__name__)


def _pending(home: Home) -> Sequence[Callable[[Home], None]]:
    """What makes the newest schema of a home, which is left as it is.

    Raises:
        UserError: a newer version wrote it.
    """
    return HOME.pending(f"The home {home.path}", _schema(home))


def upgrade(home: Home) -> None:
    """Brings an open home up to date. What a kill cuts short is done again at the next start.

    Raises:
        UserError: a newer version wrote it.
    """
    steps = _pending(home)
    for step in steps:
        step(home)
    if steps:  # last: until then all of it is done again
        found = _schema(home)
        replace_text(home.schema, json.dumps({"schema": HOME.newest}), durable=True)
        if home.run_file.exists():
            logger.info("The home %s was brought from schema %s to %d.", home.path, found, HOME.newest)


def _schema(home: Home) -> Any:
    """Its number; the first homes had none."""
    try:
        return json.loads(home.schema.read_text(encoding="utf-8"))["schema"]
    except FileNotFoundError:
        return 1
    except (ValueError, KeyError, TypeError):
        return None


# --- the task's files -------------------------------------------------------------------------------------------------


def remember_files(home: Home, options: JoinOptions, task: str) -> None:
    """Writes down which files the task was read from, for starts that do not name them."""
    files = options.files()
    if files["data"] is None and task.endswith(".jsonl"):
        files["data"] = str(Path(task).resolve())
    if any(files.values()):
        _write(home, files)


def with_remembered(options: JoinOptions, home: Home) -> JoinOptions:
    """The options with the files of an earlier start where they name none; a task that is named may be a file.

    Raises:
        UserError: a newer version wrote the home.
    """
    _pending(home)  # nothing is upgraded here
    kept = {name: Path(path) for name, path in _read(home).items()}
    if options.task is not None and options.task.endswith(".jsonl"):
        kept.pop("data", None)
    return replace(options, data=options.data or kept.get("data"), eval_data=options.eval_data or kept.get("eval_data"))


def _from_log(home: Home) -> None:
    """Schema 1 had them in the events of its starts alone, the latest of which tells where they lie; a task's file that
    was not named lay where the node was started."""
    if not home.task_files.exists() and (files := _logged(home)):
        _write(home, files)


def _logged(home: Home) -> dict[str, str | None]:
    """The files of the latest start, None for one that was not named; nothing if there was no start."""
    started = read_events(home.metrics, "started")
    if not started:
        return {}
    last = started[-1]
    files = {name: last.get(name) for name in _FILES}
    if files["data"] is None and str(last.get("task", "")).endswith(".jsonl"):
        files["data"] = str(Path(str(last.get("directory", ""))) / last["task"])
    return files


def _write(home: Home, files: Mapping[str, str | None]) -> None:
    replace_text(home.task_files, json.dumps(files), durable=True)


def _read(home: Home) -> dict[str, str]:
    """What the home remembers, or would once it is upgraded: who only looks at it must be told what a start would use.

    Nothing where there is nothing, or something else.
    """
    try:
        kept = json.loads(home.task_files.read_text(encoding="utf-8"))
        return {name: kept[name] for name in _FILES if isinstance(kept.get(name), str)}
    except FileNotFoundError:
        found = {} if home.schema.exists() else _logged(home)
        return {name: path for name, path in found.items() if isinstance(path, str)}
    except (OSError, ValueError, AttributeError):
        logger.warning("%s cannot be read; name the task's files again, if it does not find them.", home.task_files)
        return {}


HOME = Schema[Home]({1: _from_log})
