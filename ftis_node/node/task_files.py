"""What the owner of a home agreed to, for later starts that do not say it: the run, and the paths of its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ftis_node.host.files import kept, replace_text
from ftis_node.node.options import JoinOptions
from ftis_node.store.home import Home
from ftis_node.tasks import source_of


def remember_files(home: Home, options: JoinOptions, task: str, run_id: bytes) -> None:
    """Keep the run, to which the owner agreed, and the paths of the task's files for starts that do not name them."""
    files = options.files()
    if files["data"] is None and (file := source_of(task).file) is not None:
        files["data"] = str(file.resolve())
    replace_text(home.task_files, json.dumps(files | {"run": run_id.hex()}), durable=True)


def agreed(home: Home, run_id: bytes) -> bool:
    """Whether the owner joined or began this run here. Of a node of an earlier version only its packets say so; a run
    file alone does not, for observers keep one too."""
    run = _read(home).get("run")
    return home.store.exists() if run is None else run == run_id.hex()


def with_remembered(options: JoinOptions, home: Home) -> JoinOptions:
    """The options, completed with the files of an earlier start; a named task may itself be a file.

    Raises:
        UserError: this version does not know the home's schema.
    """
    home.check_schema()
    files = {name: Path(path) for name, path in _read(home).items() if name != "run"}
    if options.task is not None and source_of(options.task).file is not None:
        files.pop("data", None)
    data, eval_data = options.data or files.get("data"), options.eval_data or files.get("eval_data")
    return replace(options, data=data, eval_data=eval_data)


def _read(home: Home) -> dict[str, str]:
    """What the home keeps; empty if the file is missing or damaged."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    found = kept(home.task_files, decode, "name the task's files again, if it does not find them.") or {}
    return {name: found[name] for name in ("data", "eval_data", "run") if isinstance(found.get(name), str)}
